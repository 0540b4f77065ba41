"""A process's memory as the kernel tells it: its own, and pages of files that are mapped from the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from coremill.hardware import calibrate_child, process_memory

STATUS = """\
Name:	rank-00000
VmHWM:	  640000 kB
VmRSS:	  600000 kB
RssAnon:	  480000 kB
RssFile:	   %d kB
RssShmem:	   %d kB
"""


@pytest.mark.parametrize("file_kib", [60_000, 110_000])
def test_pages_of_libraries_are_no_memory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_kib: int
) -> None:
    status = tmp_path / "status"
    status.write_text(STATUS % (file_kib, 120_000 - file_kib))
    monkeypatch.setattr(process_memory, "_STATUS", status)
    assert process_memory.own_bytes() == (600_000 - file_kib) * 1024
    assert process_memory.memory_now() == {
        "rss_bytes": 600_000 * 1024,
        "peak_rss_bytes": 640_000 * 1024,
        "mapped_file_bytes": file_kib * 1024,
    }


def test_a_kernel_that_does_not_tell_pages_of_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status").write_text("VmRSS:\t600000 kB\n")
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "status")
    assert process_memory.own_bytes() == process_memory.rss_bytes() == 600_000 * 1024


def test_the_base_of_ranks_does_not_depend_on_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # 0.1.0 took all that was resident: 369 MB after a fresh installation, 327 an hour later.
    monkeypatch.setattr(calibrate_child, "own_bytes", lambda: 270_000_000)
    options = calibrate_child._parse(["--part", "base-memory"])
    measured = calibrate_child.measure_base_memory(options)
    assert measured["base_rss_bytes"] == 270_000_000 + process_memory.MAPPED_FILE_BYTES
