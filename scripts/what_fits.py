# ruff: noqa: E501 (the text of the page)
"""What fits where, by the plan: docs/what-fits.md.

python scripts/what_fits.py > docs/what-fits.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from coremill.config.schema import RunConfig
from coremill.hardware.instances import fleet_of
from coremill.plan.adapters import with_usual_adapters
from coremill.plan.card import ModelCard, read_card
from coremill.plan.planner import make_plan
from coremill.plan.types import Plan

HEAD = """\
# What fits where

Full training, every weight, and adapters (LoRA), by the plan: `coremill plan` with your model and machine says the same with all its
numbers. This page is made by `python scripts/what_fits.py > docs/what-fits.md`, and a test holds it to the plan.

Each machine is an instance with bf16 units (AMX); rows of 512 tokens, {tokens} tokens a step on each machine. `train.optimizer: auto` takes
the first of these that fits:

| | held of a parameter, in bf16 arithmetic | what it means |
|---|---|---|
| `adamw` | 18 bytes: fp32 weight and two fp32 moments, a bf16 copy to compute with, the fp32 gradient | the reference |
| `adamw`, inside | 14 bytes, and the gradients that are on their way | the same moments; `train.clip_norm` goes by norms of earlier steps, and a gradient that is not a number ends the run |
| `adamw-8bit` | 8 bytes: bf16 weight, two moments of 8 bits, the fp32 gradient | weights and moments are rounded by chance, and what is far below the largest of its block moves less: close to adamw, not the same bits |
| `adamw-8bit`, inside | 4 bytes, and the gradients that are on their way | both |

"Inside" is `train.update: inside`: each weight moves inside backward, as soon as its gradient is whole, which is freed at once. Where
`train.optimizer` is left out, `adamw` is planned; a run that does not fit is told what would.
"""

SHAPES = {
    "1 B": ("Llama-3.2-1B", {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                             "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
                             "max_position_embeddings": 131072, "tie_word_embeddings": True}),
    "3 B": ("Llama-3.2-3B", {"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                             "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
                             "max_position_embeddings": 131072, "tie_word_embeddings": True}),
    "8 B": ("Llama-3-8B", {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                           "max_position_embeddings": 8192, "tie_word_embeddings": False}),
    "14 B": ("Qwen3-14B", {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
                           "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                           "max_position_embeddings": 40960, "tie_word_embeddings": False}),
    "32 B": ("Qwen3-32B", {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
                           "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                           "max_position_embeddings": 40960, "tie_word_embeddings": False}),
}  # fmt: skip
MACHINES = {
    "16 GB": "c7i.2xlarge",
    "32 GB": "c7i.4xlarge",
    "64 GB": "c7i.8xlarge",
    "128 GB": "m7i.8xlarge",
    "256 GB": "r7i.8xlarge",
}
TOKENS_PER_STEP = 4096
ADAPTER_RANK = 16
# The case coremill grew from: tokens of a step and steps as in examples/llama3-8b-wikitext.yaml.
SEED_TOKENS_PER_STEP, SEED_STEPS = 16384, 50
LEAN = {"optimizer": "adamw-8bit"}
SEED_RUNS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("4xc7i.8xlarge", {}),
    ("4xc7i.8xlarge", LEAN),
    ("2xc7i.8xlarge", {}),
    ("2xc7i.8xlarge", LEAN),
    ("1xc7i.8xlarge", {}),
    ("1xc7i.8xlarge", LEAN),
)


def card_of(size: str) -> ModelCard:
    name, config = SHAPES[size]
    return read_card(config=config, name=name)


def plan_of(fleet: str, card: ModelCard, train: Mapping[str, Any], *, lora_rank: int | None = None) -> Plan:
    config = RunConfig.model_validate(
        {"train": dict(train), "data": {"sequence_length": 512}, "lora": {"rank": lora_rank} if lora_rank else {}}
    )
    return make_plan(config, fleet_of(fleet), card, with_remedies=False)


def cell(plan: Plan) -> str:
    memory = f"{plan.memory.peak.total / 1e9:.0f} GB"
    if not plan.fits:
        return f"no: {memory}"
    way = plan.optimizer.value + (", inside" if plan.update.value == "inside" else "")
    return f"{way}: {memory}, {speed(plan)}"


def speed(plan: Plan) -> str:
    per_second = plan.tokens_per_second
    return f"{per_second:.0f} tok/s" if per_second >= 10 else f"{per_second:.1f} tok/s"


def table(machines: int, *, adapters: bool) -> Iterator[str]:
    prefix = "" if machines == 1 else f"{machines} x "
    yield "| | " + " | ".join(f"{prefix}{memory}<br>{name}" for memory, name in MACHINES.items()) + " |\n"
    yield "|---|" + "---|" * len(MACHINES) + "\n"
    for size in SHAPES:
        card = card_of(size)
        rank = ADAPTER_RANK if adapters else None
        if adapters:
            card = with_usual_adapters(card, ADAPTER_RANK)
        train = {"steps": 100, "optimizer": "auto", "tokens_per_step": machines * TOKENS_PER_STEP}
        plans = [plan_of(f"{machines}x{name}", card, train, lora_rank=rank) for name in MACHINES.values()]
        yield f"| {size} | " + " | ".join(cell(plan) for plan in plans) + " |\n"


def seed_table() -> Iterator[str]:
    yield "| machines | train.optimizer, train.update | memory a rank | step | speed | 50 steps | dollars |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for fleet, settings in SEED_RUNS:
        train = {"steps": SEED_STEPS, "tokens_per_step": SEED_TOKENS_PER_STEP, **settings}
        plan = plan_of(fleet, card_of("8 B"), train)
        hours, usd = plan.hours(), plan.usd()
        assert hours is not None and usd is not None
        memory = f"{plan.memory.peak.total / 1e9:.1f} of {plan.memory.limit / 1e9:.1f} GB"
        result = (
            f"{plan.step_seconds.total:.0f} s | {speed(plan)} | {hours:.1f} h | {usd:.2f}"
            if plan.fits
            else "does not fit | | |"
        )
        yield f"| {plan.fleet} | {plan.optimizer.value}, {plan.update.value} | {memory} | {result} |\n"


def render_page() -> str:
    shapes = ", ".join(f"{size} {name}" for size, (name, _) in SHAPES.items())
    parts = [
        HEAD.format(tokens=TOKENS_PER_STEP),
        f"\n## Every weight, on one machine\n\nThe shapes are {shapes}. A cell has what `auto` takes, the peak of a rank and the speed; `no` has the least that was found. More memory is used where there is more: the first optimizer that fits is taken, then the quickest way to run it.\n\n",
        *table(1, adapters=False),
        "\n## Every weight, shared by four machines\n\nThe engine is `shard` where the whole model does not fit into each.\n\n",
        *table(4, adapters=False),
        f"\n## Adapters, on one machine\n\nOf rank {ADAPTER_RANK} beside every linear map of the layers; the model stays as it is, in bf16.\n\n",
        *table(1, adapters=True),
        "\n## Llama-3-8B: four machines, two, or one\n\n",
        f"The case coremill grew from, {SEED_TOKENS_PER_STEP:,} tokens a step and {SEED_STEPS} steps; `examples/llama3-8b-one-machine.yaml` is the last row. ",
        "What is left out in the second column is as `auto` has it.\n\n",
        *seed_table(),
        "\nSpeeds are of assumed rates (`coremill plan` says which), prices on demand. What was measured beside plans is in [plan-table.md](plan-table.md) and [benchmarks.md](benchmarks.md).\n",
    ]
    return "".join(parts)


if __name__ == "__main__":
    print(render_page(), end="")
