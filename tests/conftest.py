"""Shared by all tests: real ranks that are gone when the session is."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import ranks


def pytest_configure() -> None:
    """Started with Ctrl-C ignored (nohup, `&` in a script), so would be every command that a test then interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# In the first tier the same examples each time: what a change did not touch cannot fail it. The second tier looks on.
settings.register_profile("first tier", derandomize=True)
if not os.environ.get("COREMILL_LONG_TESTS"):
    settings.load_profile("first tier")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """COREMILL_TEST_ORDER=7: files, and the tests of each, in an order drawn by that number."""
    if not (seed := os.environ.get("COREMILL_TEST_ORDER")):
        return
    drawn = random.Random(seed)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    drawn.shuffle(groups)
    for group in groups:
        drawn.shuffle(group)
    items[:] = chain.from_iterable(groups)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test draws the same numbers whichever ran before it. Not Python's `random`: workers draw free ports by it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _no_rank_outlives_the_session() -> Iterator[None]:
    yield
    ranks.close_nursery()


@pytest.fixture(scope="session")
def run_ranks() -> Any:
    """`run_ranks(function, world_size, **kwargs)`; see tests/ranks.py."""
    return ranks.run_ranks
