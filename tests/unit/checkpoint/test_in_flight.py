"""What ranks tell each other of the saves under way."""

from __future__ import annotations

import time
from typing import Any

import pytest

from coremill.checkpoint.in_flight import WRITTEN_BYTES_KEY, Save, SaveDeadline, WrittenBytes


class Counters:
    """A store, as far as it counts."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def add(self, key: str, count: int) -> int:
        self.values[key] = self.values.get(key, 0) + count
        return self.values[key]


def test_only_bytes_of_this_save_are_progress_and_no_save_leaves_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WrittenBytes, "EVERY_SECONDS", 0.0)
    store, snapshot = Counters(), None
    for number in (1, 2, 3):
        before: Any = store.add(WRITTEN_BYTES_KEY, 0)
        save = Save(number, number, snapshot, {}, time.perf_counter(), SaveDeadline(600.0), before)  # type: ignore[arg-type]
        assert not save.hear(store.add(WRITTEN_BYTES_KEY, 0))
        WrittenBytes(store).add(1000)
        assert save.hear(store.add(WRITTEN_BYTES_KEY, 0))
        assert not save.hear(store.add(WRITTEN_BYTES_KEY, 0))
    assert store.values == {WRITTEN_BYTES_KEY: 3000}
