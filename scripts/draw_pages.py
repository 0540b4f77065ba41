"""Makes the pictures of the pages in the README: short real runs, then their pages in Chromium (`make browser-setup`).

    python scripts/draw_pages.py runs/pictures

Three runs of the tiny example, 80 steps of 512 tokens: as it is, stopped halfway (`coremill stop`) and continued by
the same command; with a learning rate three times as high; and on two ranks. What is there already is not run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from coremill.errors import Stopped
from coremill.report.events import EventFollower

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import browser  # noqa: E402

EXAMPLE = "examples/tiny-from-scratch.yaml"
COMMON = ("train.steps=80", "train.warmup_steps=16", "train.tokens_per_step=512", "evaluation.every_steps=16")
COMMON = (*COMMON, "checkpoint.every=16steps", "parallel.threads_per_rank=1")
RUNS = {
    "tiny": ("--nproc=1",),
    "tiny-high-rate": ("--nproc=1", "--set=train.learning_rate=6.0e-3"),
    "tiny-two-ranks": ("--nproc=2",),
}
STOPPED_AT_STEP = 36
COREMILL = str(Path(sys.executable).with_name("coremill"))


def train(folder: Path, words: tuple[str, ...], *, stop: bool = False) -> None:
    """The command a user would type; with `stop` it is asked to stop on its way."""
    values = [f"--set={value}" for value in (*COMMON, f"run.folder={folder}")]
    with subprocess.Popen([COREMILL, "train", EXAMPLE, *words, *values], cwd=ROOT) as process:
        follower = EventFollower(folder)
        while stop and process.poll() is None:
            if any(event.number("step") >= STOPPED_AT_STEP for event in follower.poll() if event.kind == "step"):
                subprocess.run([COREMILL, "stop", str(folder)], check=True)
                break
            time.sleep(0.2)
    if process.returncode not in (0, Stopped.exit_code):
        raise SystemExit(process.returncode)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the pictures of the pages in the README.")
    parser.add_argument("folder", type=Path, help="where the runs are, or are left")
    folder: Path = parser.parse_args().folder.absolute()
    for name, words in RUNS.items():
        if name == "tiny" and not (folder / name).exists():
            train(folder / name, words, stop=True)
        train(folder / name, words)
    comparison, pictures = folder / "comparison.html", ROOT / "docs" / "pictures"
    runs = [str(folder / name) for name in RUNS]
    subprocess.run([COREMILL, "report", *runs, "--html", str(comparison)], check=True)
    with browser() as tab:
        tab.look(1180, height=900)
        tab.open((folder / "tiny" / "report.html").as_uri())
        tab.point_at(".plot", 0.7)
        tab.picture(pictures / "page.png", height=1010)
        tab.open(comparison.as_uri())
        tab.point_at("[data-panel=step] .plot", 0.5)
        tab.picture(pictures / "comparison.png", height=1010)
        if tab.problems:
            raise SystemExit("\n".join(tab.problems))


if __name__ == "__main__":
    main()
