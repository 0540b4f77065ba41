"""Whatever breaks a run off, nothing that follows it is left: a notebook goes on, and may train again."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from coremill.config.load import load_config
from coremill.errors import InputError, StorageError
from coremill.report.page import server
from coremill.report.readers.base import Reader, Readers
from coremill.run import story
from coremill.run.opening import Options


class Follower(Reader):
    def __init__(self) -> None:
        self.closed_with: list[int] = []

    def close(self, exit_code: int) -> None:
        self.closed_with.append(exit_code)


@pytest.fixture
def listeners(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Those of live pages."""
    listen, made = server.listen, []

    def kept(port: int) -> socket.socket:
        made.append(listen(port))
        return made[-1]

    monkeypatch.setattr(server, "listen", kept)
    return made


def train(folder: Path) -> int:
    loaded = load_config(None, {"run.folder": str(folder)})
    return story.run_as_launcher(loaded, Options(page=True), None, Console(quiet=True))


def refuse(*_: object, **__: object) -> Any:
    raise InputError("no such data")


@pytest.mark.parametrize("ending", ["refused", "finished earlier"])
def test_a_page_that_never_began_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listeners: list[socket.socket], ending: str
) -> None:
    monkeypatch.setattr(story, "prepare_run", refuse)
    if ending == "refused":
        with pytest.raises(InputError, match="no such data"):
            train(tmp_path / "run")
    else:
        monkeypatch.setattr(story, "already_finished", lambda *_, **__: True)
        assert train(tmp_path / "run") == 0
    (listener,) = listeners
    assert listener.fileno() == -1


def test_readers_end_with_a_launcher_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower, orders = Follower(), SimpleNamespace(steps=3, plan=SimpleNamespace(to_json=dict))

    def fail(*_: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(story, "prepare_run", lambda *_, **__: orders)
    monkeypatch.setattr(story, "write_orders", lambda *_, **__: None)
    monkeypatch.setattr(story, "make_readers", lambda *_, **__: Readers(tmp_path, [follower]))
    monkeypatch.setattr(story, "watch_ranks", fail)
    with pytest.raises(StorageError):
        train(tmp_path / "run")
    assert follower.closed_with == [StorageError.exit_code]
