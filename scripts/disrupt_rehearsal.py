"""Rehearsals with random disruptions: `python scripts/disrupt_rehearsal.py SEED [SEED ...] [--pods 4] [--folder DIR]`.

Each rehearses a small run of 3,200 steps, saved every 20, with five reclaims and five kills in turn, of random pods at
random seconds (`coremill k8s rehearse --reclaim --kill`); the delays of a Job, which grow to minutes, are cut to
seconds. Prints what each came to; 1 where one failed. As root, about ten minutes each on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from coremill.k8s.rehearse import job_controller
from coremill.k8s.rehearse.command import Request, rehearse

RUN_FILE = """\
model:
  weights: random
  config: {model_type: llama, vocab_size: 4096, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
    num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 256, tie_word_embeddings: true}
tokenizer: built-in
data: {source: built-in, sequence_length: 64, evaluation_fraction: 0.002}
train: {steps: 3200, tokens_per_step: 512, learning_rate: 1.0e-3, warmup_steps: 4}
parallel: {dtype: fp32, wire_dtype: fp32}
checkpoint: {every: 20steps}
fleet: {nodes: PODS, instance: c7i.8xlarge}
kubernetes: {image: "example.com/coremill:0.2.0", karpenter: none, kind: job, cpus: 4, memory_gib: 4}
"""
DISRUPTIONS, FIRST_SECONDS, MEAN_SECONDS = 10, 25.0, 30.0


def disrupted(seed: int, pods: int, folder: Path) -> int:
    drawn, at, reclaims, kills = random.Random(seed), FIRST_SECONDS, [], []
    for number in range(DISRUPTIONS):
        at += drawn.uniform(0.55 * MEAN_SECONDS, 1.45 * MEAN_SECONDS)
        (kills if number % 2 else reclaims).append(f"{drawn.randrange(pods)}@{at:.0f}s")
    out = folder / f"out-{seed}"
    code = rehearse(Request(folder / "run.yaml", (), tuple(reclaims), tuple(kills), None, out, False))
    told = json.loads((out / "rehearsal.json").read_text())
    print(f"seed {seed}: {told['steps']} steps, {told['steps_lost']} lost, loss {told['loss_last']}; {told['faults']}")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs/disrupted"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "run.yaml").write_text(RUN_FILE.replace("PODS", str(options.pods)))
    job_controller.FIRST_DELAY_SECONDS, job_controller.LONGEST_DELAY_SECONDS = 1.0, 4.0
    return max(disrupted(seed, options.pods, options.folder.resolve()) for seed in options.seeds)


if __name__ == "__main__":
    sys.exit(main())
