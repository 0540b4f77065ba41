"""The run folder before the run: made to see whether it can be written, gone again where there is no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from coremill.errors import InputError
from coremill.run.folder import RunFolder


def test_refused_input_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for path in (tmp_path / "runs" / "one", tmp_path / "kept"):
        with pytest.raises(InputError, match="bad rows"), RunFolder(path).writable("run.folder"):
            assert path.is_dir()
            raise InputError("bad rows")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_lies_in_it_stays(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    with pytest.raises(InputError), RunFolder(path).writable("run.folder"):
        (path / "note").write_text("of somebody else")
        raise InputError("bad rows")
    assert (path / "note").exists()
    with RunFolder(tmp_path / "good").writable("run.folder"):
        pass
    assert (tmp_path / "good").is_dir()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not writable"), RunFolder(tmp_path / "file" / "run").writable("--set x"):
        pass
    assert (tmp_path / "file").exists()
