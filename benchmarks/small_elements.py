"""What 8 bits do to elements far below the largest of their block: `python -m benchmarks.small_elements`.

One matrix whose gradients span three and a half decades within each block, with a mean of 0.3 of their spread, moved by
adamw and by adamw-8bit side by side in fp32. Prints, by size of the gradient beside the block's largest, second moment,
way moved and spread of the weights, each of 8 bits over fp32. Asserts nothing.
"""

from __future__ import annotations

import torch
from torch import nn

from coremill.config.schema import TrainSection
from coremill.engines.optimizers import Optimizer, optimizer_of
from coremill.engines.optimizers.cost import BLOCK
from coremill.engines.optimizers.moments_8bit import with_fp32_moments
from coremill.model.slices import RowSlice

ROWS, STEPS, RATE, MEAN, DECADES, SHOWN_AT_ONCE = 64, 1500, 1e-3, 0.3, 3.5, 32


def make(name: str) -> tuple[Optimizer, nn.Parameter]:
    module = nn.Linear(BLOCK, ROWS, bias=False)
    nn.init.zeros_(module.weight)
    settings = optimizer_of(TrainSection.model_validate({"steps": 1, "optimizer": name, "weight_decay": 0.0}))
    piece = RowSlice("weight", (ROWS, BLOCK), 0, ROWS, module.weight)
    return settings.make(module, [("weight", module.weight)], [piece]), module.weight


def main() -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(0, -DECADES, BLOCK)
    made = {name: make(name) for name in ("adamw-8bit", "adamw")}
    for _ in range(STEPS):
        gradient = (torch.randn(ROWS, BLOCK) + MEAN) * sizes
        for optimizer, weight in made.values():
            optimizer.begin_step()
            optimizer.move(weight, gradient.clone(), RATE)
    weights = [weight.detach() for _, weight in made.values()]
    moments = [
        with_fp32_moments(optimizer.state_of(weight)[0], weight.shape)["exp_avg_sq"]
        for optimizer, weight in made.values()
    ]
    print(
        "| gradient beside the block's largest | second moment | way moved | spread of weights |\n|---|---:|---:|---:|"
    )
    for begin in range(0, BLOCK, SHOWN_AT_ONCE):
        columns = slice(begin, begin + SHOWN_AT_ONCE)
        second = float((moments[0][:, columns] / moments[1][:, columns]).mean())
        way = float(weights[0][:, columns].mean() / weights[1][:, columns].mean())
        spread = float(weights[0][:, columns].std(0).mean() / weights[1][:, columns].std(0).mean())
        print(f"| 1/{1 / float(sizes[begin]):.0f} and below | {second:.2f} | {way:.2f} | {spread:.1f} |")


if __name__ == "__main__":
    main()
