"""What coremill would choose on this machine: the plan of the built-in example, with its reasons."""

from __future__ import annotations

from coremill.config.load import load_config
from coremill.hardware.facts import Calibration, NodeFacts
from coremill.hardware.instances import this_machine
from coremill.model.source import BUILT_IN_CONFIG
from coremill.plan.card import read_card
from coremill.plan.planner import make_plan

# The choices that the machine decides; the others depend on the model and belong to `coremill plan`.
_NAMES = {
    "dtype": "dtype",
    "ranks_per_node": "ranks",
    "threads_per_rank": "threads per rank",
    "engine": "engine",
    "wire_dtype": "wire dtype",
}


def choices_here(node: NodeFacts, calibration: Calibration) -> list[tuple[str, str, str]]:
    """Name, value and reason of each choice for the built-in example on this machine."""
    card = read_card(config=BUILT_IN_CONFIG, name="the built-in model")
    plan = make_plan(load_config(None).config, this_machine(node, calibration), card, with_remedies=False)
    choices = [(name, getattr(plan, field)) for field, name in _NAMES.items()]
    return [(name, str(choice.value), choice.reason) for name, choice in choices]
