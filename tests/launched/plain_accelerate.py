"""An accelerate script as its documentation writes them; it knows nothing of coremill."""

from __future__ import annotations

import json

import torch
from accelerate import Accelerator


def main() -> None:
    """Gather one number of every rank, after a step that needs all of them."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
    told = {"rank": accelerator.process_index, "world": accelerator.num_processes, "gathered": ranks.tolist()}
    print("SAID " + json.dumps(told), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
