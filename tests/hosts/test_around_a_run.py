"""What people look for around a run, on two hosts: trackers, frozen parameters, the live page, `--from`.

Two runs of a minute each, so with the long tests; each part has tests of its own on one host.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from end_to_end.scene import RUN_FILE, make_cache, write_text
from hosts.namespaces import Fleet, clean_environment, fake_hosts, why_not
from tiny_models import make_model, make_tokenizer

WAIT_SECONDS = 400  # only a hang takes that long
SETTINGS = (
    "train.freeze=[model.embed_tokens.*]",
    "evaluation.every_steps=4",
    "checkpoint.every=4steps",
    "checkpoint.keep=5",
    "run.trackers=[tensorboard, wandb, mlflow]",
)

_reason = why_not()
pytestmark = [
    pytest.mark.skipif(_reason is not None, reason=f"no hosts here: {_reason}"),
    pytest.mark.skipif(not os.environ.get("COREMILL_LONG_TESTS"), reason="slow: COREMILL_LONG_TESTS=1 runs it"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("around-a-run")
    make_tokenizer(make_model(folder / "model", "llama"))
    write_text(folder / "text")
    (folder / "run.yaml").write_text(RUN_FILE)
    make_cache(folder / "cache")
    with fake_hosts(2, folder) as hosts:
        yield hosts


def train(fleet: Fleet, *words: str) -> tuple[str, str]:
    """`coremill train` from the first host to its end: what it said, and the live page while it went on."""
    mark = uuid.uuid4().hex
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "coremill", "train", "run.yaml", *settings, *words, "--page"]
    command += ["--hostfile", str(fleet.hostfile()), "--ssh", fleet.ssh]
    environ = {**clean_environment(), "COREMILL_CACHE": str(fleet.folder / "cache"), "MARK": mark}
    environ |= {"HOME": str(fleet.folder), "WANDB_MODE": "offline"}
    process = subprocess.Popen(
        fleet.hosts[0].command(command, fleet.folder),
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said, page, deadline = "", "", time.monotonic() + WAIT_SECONDS
    assert process.stdout is not None
    try:
        for line in process.stdout:
            said += line
            address = re.search(r"live page.*?(http\S+)", line)
            if address is not None and not page:
                page = fleet.run(["curl", "-sS", "--max-time", "20", address[1]]).stdout
            assert time.monotonic() < deadline, said
        process.wait(WAIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, said
    fleet.assert_nothing_left(mark)
    return said, page


def test_trackers_freeze_page_and_from_on_two_hosts(fleet: Fleet) -> None:
    run = fleet.folder / "run"
    said, page = train(fleet)
    assert "<!doctype html>" in page.lower() and "frozen" in said
    for name in ("tensorboard", "wandb", "mlflow"):
        assert json.loads((run / "trackers" / f"{name}.json").read_text())["done"] == {"train": 8, "eval": 8}, said
    report = json.loads((run / "report.json").read_text())
    assert (report["state"], report["steps"], report["world_size"]) == ("finished", 8, 2)
    assert len(report["environment"]["hosts"]) == 2
    assert "of them frozen" in (run / "export" / "README.md").read_text()

    again, _ = train(fleet, "--from", "8")
    assert "holds this run, finished" in again
    said, page = train(fleet, "--from", "4", "--set", "train.steps=10")
    assert "going on from step 4" in said and "<!doctype html>" in page.lower()
    for name in ("wandb", "mlflow"):
        progress = json.loads((run / "trackers" / f"{name}.json").read_text())
        assert (progress["from_step"], progress["done"]) == (4, {"train": 10, "eval": 10}), said
        assert f"{name}: a new run, run-from-step-4," in said
    report = json.loads((run / "report.json").read_text())
    assert (report["state"], report["steps"]) == ("finished", 10)
    assert [each["step"] for each in report["evaluations"]] == [4, 8, 10]
    aside = list((run / "checkpoints").glob("set-aside-*"))
    assert [path.name for one in aside for path in one.iterdir()] == ["step-00000008"]
