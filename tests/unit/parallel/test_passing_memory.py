"""What a large table is laid out in on its way to other ranks leaves no hole behind."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from coremill.parallel.same_host import _passing  # noqa: E402


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon line")


def test_it_goes_back_with_the_last_view_of_it() -> None:
    numel = 2**25
    before = _resident_bytes()
    whole = _passing(numel, torch.bfloat16)
    part = whole.view(4, -1)[3]
    whole.fill_(1.0)
    del whole
    held = _resident_bytes() - before
    assert held >= 0.9 * 2 * numel and float(part.float().sum()) == numel / 4
    del part
    assert _resident_bytes() - before < 0.1 * held
