"""Every key of the run file is said to be one that may change at a continuation, or one that may not."""

from __future__ import annotations

from coremill.config.continuing import FIXED, MAY_CHANGE, may_change
from coremill.config.keys import keys


def dotted(table: dict[str, tuple[str, ...]]) -> list[str]:
    return [f"{section}.{name}" if section else name for section, names in table.items() for name in names]


def test_every_key_stands_in_one_table():
    allowed, fixed = dotted(dict(MAY_CHANGE)), dotted(dict(FIXED))
    twice = {key for key in (*allowed, *fixed) if (*allowed, *fixed).count(key) > 1}
    assert not twice
    missing = set(keys()) - {*allowed, *fixed}
    assert not missing, f"put these into MAY_CHANGE or FIXED of config/continuing.py: {sorted(missing)}"
    assert {*allowed, *fixed} <= set(keys()), "config/continuing.py names keys that the schema has not"


def test_what_the_design_lets_change():
    for key in ("train.steps", "train.epochs", "train.learning_rate", "train.schedule", "train.warmup_steps"):
        assert may_change(key)
    whole = ("checkpoint", "parallel", "fleet", "supervise", "numerics", "evaluation", "sample", "run")
    assert all(may_change(key) for key in keys() if key.startswith(tuple(f"{section}." for section in whole)))
    assert not any(may_change(key) for key in ("tokenizer", "model.config.hidden_size", "train.seed", "train.freeze"))
