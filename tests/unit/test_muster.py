"""Under a foreign launcher: rank 0 owns the run before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coremill import muster
from coremill.config.load import load_config
from coremill.errors import InputError
from coremill.launch.folder_lock import LOCK_FILE
from coremill.launch.run_folder import RunFolder
from coremill.launch.run_lock import OWNED, OwnedFolders
from coremill.launcher import Options


@dataclass
class Alone:
    """A world of one rank that torchrun started."""

    rank: int = 0
    nodes: int = 1
    identity: Any = field(default_factory=lambda: SimpleNamespace(launcher="torchrun"))

    def once_per_node(self, action: Any) -> Any:
        return action()

    def broadcast(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize("fresh", [False, True])
def test_rank_0_does_not_start_beside_a_living_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    monkeypatch.setattr(muster, "_cpus_of_node", lambda world: {0})
    monkeypatch.setattr(muster.atexit, "register", lambda release: None)
    first, folder = OwnedFolders(), RunFolder(tmp_path / "run")
    first.take(folder.path, folder.path / "checkpoints", where_run="", where_checkpoints="", say=print)
    loaded = load_config(None, [f"run.folder={folder.path}"])
    try:
        with pytest.raises(InputError, match="is the folder of a run that is going on: host"):
            muster.orders_for(loaded, folder, Alone(), Options(fresh=fresh))  # type: ignore[arg-type]
        assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", LOCK_FILE]
    finally:
        first.release()
        OWNED.release()
