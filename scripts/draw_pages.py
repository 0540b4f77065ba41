"""Makes the pictures in docs/guide/text.md: short real runs, then their pages in Chromium (`make browser-setup`).

    python scripts/draw_pages.py runs/pictures

Three runs of the tiny example, 240 steps of 512 tokens: as it is, stopped on its way (`coremill stop`) and continued by
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

EXAMPLE = ROOT / "examples" / "tiny-from-scratch.yaml"
SETTINGS = (
    *("train.steps=240", "train.warmup_steps=30", "train.tokens_per_step=512", "parallel.threads_per_rank=1"),
    *("evaluation.every_steps=40", "checkpoint.every=40steps"),
)
RUNS = {
    "tiny": SETTINGS,
    "tiny-high-rate": (*SETTINGS, "train.learning_rate=6.0e-3"),
    "tiny-two-ranks": (*SETTINGS, "parallel.ranks_per_node=2"),
}
STOPPED_AT_STEP = 100
COREMILL = str(Path(sys.executable).with_name("coremill"))


def write_run_file(file: Path, settings: tuple[str, ...]) -> None:
    """The example with these settings, every key written out."""
    words = [word for setting in settings for word in ("--set", setting)]
    shown = subprocess.run([COREMILL, "config", "show", EXAMPLE, *words], check=True, capture_output=True, text=True)
    file.write_text(shown.stdout)


def train(folder: Path, name: str, *, stop: bool = False) -> None:
    """The command a user would type; with `stop` it is asked to stop on its way."""
    run = folder / "runs" / name
    with subprocess.Popen([COREMILL, "train", f"{name}.yaml"], cwd=folder) as process:
        follower = EventFollower(run)
        while stop and process.poll() is None:
            if any(event.number("step") >= STOPPED_AT_STEP for event in follower.poll() if event.kind == "step"):
                subprocess.run([COREMILL, "stop", str(run)], check=True)
                break
            time.sleep(0.05)
    if process.returncode not in (0, Stopped.exit_code):
        raise SystemExit(process.returncode)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the pictures in docs/guide/text.md.")
    parser.add_argument("folder", type=Path, help="where the runs are, or are left")
    folder: Path = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name, settings in RUNS.items():
        if not (folder / "runs" / name).exists():
            write_run_file(folder / f"{name}.yaml", settings)
            train(folder, name, stop=name == "tiny")
        train(folder, name)
    runs = [str(folder / "runs" / name) for name in RUNS]
    page, comparison, pictures = folder / "page.html", folder / "comparison.html", ROOT / "docs" / "pictures"
    subprocess.run([COREMILL, "report", runs[0], "--html", str(page)], check=True)
    subprocess.run([COREMILL, "report", *runs, "--html", str(comparison)], check=True)
    with browser() as tab:
        tab.look(1080, height=900)
        tab.open(page.as_uri())
        tab.point_at(".plot", 0.7)
        tab.picture(pictures / "page.png", height=1105, scale=0.8)
        tab.open(comparison.as_uri())
        tab.point_at("[data-panel=step] .plot", 0.5)
        tab.picture(pictures / "comparison.png", height=935, scale=0.8)
        if tab.problems:
            raise SystemExit("\n".join(tab.problems))


if __name__ == "__main__":
    main()
