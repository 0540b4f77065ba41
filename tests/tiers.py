"""The two tiers of tests: `make test` runs the first, `make test-long` both.

What is slow and held by another test of the first tier belongs to the second; the reason says which.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

IS_LONG = bool(os.environ.get("COREMILL_LONG_TESTS"))


def long_test(reason: str) -> pytest.MarkDecorator:
    """Of the second tier."""
    return pytest.mark.skipif(not IS_LONG, reason=f"{reason}: COREMILL_LONG_TESTS=1 runs it")


def some_long(values: Iterable[Any], first_tier: Collection[Any], reason: str) -> list[Any]:
    """Parameters of a test, of which only some are in the first tier."""
    return [value if value in first_tier else pytest.param(value, marks=long_test(reason)) for value in values]
