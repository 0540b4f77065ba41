"""Shared by all tests: real ranks that are gone when the session is."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

import ranks


def pytest_configure() -> None:
    """Started with Ctrl-C ignored (nohup, `&` in a script), so would be every command that a test then interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_rank_outlives_the_session() -> Iterator[None]:
    yield
    ranks.close_nursery()


@pytest.fixture(scope="session")
def run_ranks() -> Any:
    """`run_ranks(function, world_size, **kwargs)`; see tests/ranks.py."""
    return ranks.run_ranks
