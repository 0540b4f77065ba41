"""X13: a run that goes on with other numbers of ranks, and with the other engine, is the same run.

Ranks write down which rows they were given. Eight rows a step on three ranks do not come out even: a short rank runs a
row whose labels are ignored.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from chaos.experiment import Rig, Trial
from chaos.running import Broken, Run, losses, make_scene

LEGS = ((2, "shard"), (1, "replicate"), (4, "shard"), (3, "replicate"), (2, "shard"))
STEPS_PER_LEG = 13  # 5 legs of it are two epochs of the 255 rows here, and a bit
FILLER = -1
TOLERANCE = 1e-5


def resized(rig: Rig, trials: int) -> Iterator[Trial]:
    """Stopped and gone on four times."""
    run_file = make_scene(rig.shared)
    random = rig.random("X13")
    reference = Run(run_file, rig.folder / "peace", rig.shared, ranks=1, settings=("parallel.engine=replicate",))
    most = len(LEGS) * 2 * STEPS_PER_LEG
    reference.start(f"train.steps={most}")
    if (code := reference.wait_end()) != 0:
        raise Broken(f"the undisturbed run ended with {code}; see {reference.log}")
    expected = {step: min(values) for step, values in losses(reference).items()}
    for number in range(trials):
        run = Run(run_file, rig.folder / f"run{number}", rig.shared)
        rows = rig.folder / f"rows{number}"
        rows.mkdir()
        try:
            codes = [_leg(run, ranks, engine, rows, random.randint(5, STEPS_PER_LEG)) for ranks, engine in LEGS]
        finally:
            run.kill()
        yield _judged(run, rows, expected, codes)


def _leg(run: Run, ranks: int, engine: str, rows: Path, steps: int) -> int:
    """Some steps with so many ranks, then a request to stop."""
    inside = json.dumps({"kind": "rows", "folder": str(rows)})
    before = run.last_step
    run.start(f"parallel.engine={engine}", ranks=ranks, environ={"CHAOS_INSIDE": inside})
    run.wait_for(lambda: run.last_step >= before + steps, f"{steps} steps on {ranks} ranks")
    os.kill(run.launcher_pid, signal.SIGTERM)
    return run.wait_end()


def _judged(run: Run, rows: Path, expected: dict[int, float], codes: list[int]) -> Trial:
    told = losses(run)
    differences = [
        abs(value - expected[step]) / abs(expected[step])
        for step, values in told.items()
        if step in expected
        for value in values
    ]
    given: dict[int, list[int]] = {}
    for path in rows.iterdir():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            given.setdefault(entry["step"], []).extend(row for row in entry["rows"] if row != FILLER)
    # A step that was asked for but not finished was asked for again by the next leg; it is the same rows then.
    in_order = [row for step in range(1, run.last_step + 1) for row in sorted(set(given.get(step, [])))]
    twice_in_a_step = [step for step in told if max(Counter(given.get(step, [0])).values()) > 1]
    epoch = len(set(in_order))
    counts = Counter(in_order)
    wholly = run.last_step * 8 // epoch
    once = not twice_in_a_step and set(counts.values()) <= {wholly, wholly + 1}
    steps_ok = sorted(told) == list(range(1, run.last_step + 1))
    worst = max(differences, default=float("inf"))
    good = once and steps_ok and worst <= TOLERANCE and set(codes) == {75}
    return Trial(
        passed=good,
        fault=f"{len(LEGS)} legs, {run.last_step} steps, {run.last_step * 8 / epoch:.2f} epochs of {epoch} rows",
        outcome="each row once an epoch, loss within 1e-5"
        if good
        else f"once: {once}, steps: {steps_ok}, largest difference {worst:.1e}, exit codes {codes}",
        steps_lost=0 if steps_ok else None,
        exit_code=75 if set(codes) == {75} else max(codes),
    )
