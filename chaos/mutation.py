"""X18: training goes on right after a save began; what is saved is what was when it began.

`python -m chaos.mutation FOLDER N` is the rank: a few real AdamW steps between a snapshot and the end of its write.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.experiment import Rig, Trial
from chaos.running import ROOT, Broken, environment


def mutated(rig: Rig, trials: int) -> Iterator[Trial]:
    """All trials in one process: torch is imported once."""
    child = subprocess.Popen(
        [sys.executable, "-m", "chaos.mutation", str(rig.folder), str(trials)],
        cwd=ROOT,
        env=environment(rig.shared, {"OMP_NUM_THREADS": "1"}),
        stdout=subprocess.PIPE,
        stderr=(rig.folder / "stderr").open("wb"),
        text=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        seen = json.loads(line)
        good = seen["same"] and seen["moved_on"] and seen["updates"] == seen["updates_saved"]
        yield Trial(
            passed=good,
            fault=f"{seen['steps']} steps while save {seen['number']} was written",
            outcome="saved as it was" if good else f"torn: {seen}",
            same_bits=seen["same"],
        )
    if child.wait() != 0:
        raise Broken(f"the rank ended with {child.returncode}; see {rig.folder / 'stderr'}")


def _be_rank(folder: Path, trials: int) -> None:
    import torch
    from safetensors.torch import load_file

    from coremill.checkpoint import store as store_module
    from coremill.checkpoint.snapshot import Training, take_snapshot
    from coremill.checkpoint.store import Store
    from coremill.config.schema import TrainSection
    from coremill.engines.base import ParameterState
    from coremill.engines.optimizers import optimizer_of
    from coremill.engines.optimizers.adamw import STATE_NAMES, AdamW
    from coremill.model.slices import RowSlice

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
    settings = optimizer_of(TrainSection(learning_rate=1e-2, weight_decay=1e-2))
    optimizer = AdamW(model, list(model.named_parameters()), settings)
    slices = [RowSlice(name, tuple(weight.shape), 0, len(weight), weight) for name, weight in model.named_parameters()]

    class Engine:
        def state(self) -> list[ParameterState]:
            return [ParameterState(piece, *optimizer.state_of(piece.local)) for piece in slices]

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()

    def digest() -> str:
        state = hashlib.sha256()
        for piece in slices:
            for tensor in (piece.local, *optimizer.state_of(piece.local)[0].values()):
                state.update(tensor.detach().numpy().tobytes())
        return state.hexdigest()

    step()
    store = Store(folder / "checkpoints", "a1")
    store.make()
    store_module.PIECE_BYTES = 64 * 1024  # many writes: time for training to get between them
    for number in range(1, trials + 1):
        before, updates = digest(), optimizer.state_of(slices[0].local)[1]
        training: Any = Training(Engine(), model, None, None)  # type: ignore[arg-type]
        snapshot = take_snapshot(training, rank=0, world_size=1, copy=True)
        saved_updates = snapshot.updates
        path = store.begin(number, number) / "rank-00000-of-00001.safetensors"
        started = threading.Event()

        def write(path: Path = path, snapshot: Any = snapshot, started: threading.Event = started) -> None:
            started.set()
            time.sleep(0.01)
            store.write_tensors(path, snapshot.tensors, snapshot.rows)

        thread = threading.Thread(target=write)
        thread.start()
        started.wait()
        steps = 0
        while thread.is_alive() or steps < 3:
            step()
            steps += 1
        thread.join()
        stored = hashlib.sha256()
        tensors = load_file(path)
        for piece in slices:
            for group in ("parameters", *STATE_NAMES):
                stored.update(tensors[f"{group}/{piece.name}"].numpy().tobytes())
        seen = {
            "number": number,
            "steps": steps,
            "same": stored.hexdigest() == before,
            "moved_on": digest() != before,
            "updates": updates,
            "updates_saved": saved_updates,
        }
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    _be_rank(Path(sys.argv[1]), int(sys.argv[2]))
