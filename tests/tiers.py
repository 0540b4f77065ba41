"""The two tiers of tests: `make test` runs the first, `make test-long` both.

What is slow and held by another test of the first tier belongs to the second; the reason says which. The slowest of the
first tier stay, for nothing else there holds what they do:

    end_to_end  test_chaos (whole runs under faults), test_resume (stopped, killed and damaged: the same bits),
                test_guests (a task of another package), test_encoder_runs and test_lora_export (as users load
                them), test_keep (exported while it runs, pushed), test_lean (updates inside backward, both ways),
                test_api, test_chat, test_plan_limits (the kernel's own kill), test_readme_files,
                test_safety (pinned code), test_one_owner (two runs, one folder), test_train (anew in an old folder)
    contract    test_examples (the smallest; the others are of the second tier)
    distributed test_model_load (every family, one pool of ranks), test_plan_wire (bytes as counted), test_launch,
                test_adapters (beside peft)
    hosts       test_reform (lost hosts), test_hosts (a real mpirun), test_peer_scripts (scripts of others)
    unit        data/test_data_hub (a hub that answers), config/test_config_show (any value, by hypothesis)
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
    return [value if value in first_tier else _long_param(value, reason) for value in values]


def _long_param(value: Any, reason: str) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=long_test(reason))
