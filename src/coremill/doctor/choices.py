"""What coremill would choose on this machine: the plan of the built-in example, with its reasons, and how many ranks
models of other sizes would have."""

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
# Llama shapes; small ones gain most from ranks that share a machine.
_SIZES = {
    "60 M": {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 8, "vocab_size": 16384},
    "350 M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "vocab_size": 32768},
    "1.2 B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
}


def choices_here(node: NodeFacts, calibration: Calibration) -> list[tuple[str, str, str]]:
    """Name, value and reason of each choice for the built-in example on this machine."""
    card = read_card(config=BUILT_IN_CONFIG, name="the built-in model")
    machine = this_machine(node, calibration)
    plan = make_plan(load_config(None).config, machine, card, with_remedies=False)
    choices = [(name, getattr(plan, field)) for field, name in _NAMES.items()]
    long = load_config(None, ["train.steps=10000", "train.tokens_per_step=4096", "data.sequence_length=512"]).config
    for size, shape in _SIZES.items():
        card = read_card(config={"model_type": "llama", **shape}, name=size)
        choices.append((f"ranks, {size}", make_plan(long, machine, card, with_remedies=False).ranks_per_node))
    return [(name, str(choice.value), choice.reason) for name, choice in choices]
