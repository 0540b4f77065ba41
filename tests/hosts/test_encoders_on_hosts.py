"""The example of question answering on two hosts, by the command in its header."""

from __future__ import annotations

import json
import os
import shlex
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from end_to_end.scene import make_cache
from hosts.namespaces import ROOT, Fleet, fake_hosts, why_not
from tiny_encoders import make_encoder, questions, write_jsonl

EXAMPLE = "examples/bert-large-squad-2-hosts.yaml"
SMALLER = (
    *(
        "model=encoder",
        "data.source=train.jsonl",
        "data.evaluation_split=null",
        "data.evaluation_source=held-out.jsonl",
    ),
    *("data.sequence_length=64", "data.doc_stride=16", "train.learning_rate=1e-3", "evaluation.every_steps=3"),
)

_reason = why_not()
pytestmark = [
    pytest.mark.skipif(_reason is not None, reason=f"no hosts here: {_reason}"),
    pytest.mark.skipif(not os.environ.get("COREMILL_LONG_TESTS"), reason="a minute: COREMILL_LONG_TESTS=1 runs it"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("encoders-on-hosts")
    (folder / "examples").symlink_to(ROOT / "examples")
    make_encoder(folder / "encoder", weights=True)
    write_jsonl(folder / "train.jsonl", questions(80, seed=1))
    write_jsonl(folder / "held-out.jsonl", questions(20, seed=2))
    make_cache(folder / "cache")
    with fake_hosts(2, folder) as hosts:
        yield hosts


@pytest.mark.timeout(600)
def test_the_example_trains_on_four_ranks_of_two_hosts(fleet: Fleet) -> None:
    (command,) = [line[4:] for line in (ROOT / EXAMPLE).read_text().splitlines() if line.endswith("--hostfile hosts")]
    fleet.hostfile().rename(fleet.folder / "hosts")
    words = [*shlex.split(command)[1:], "--ssh", fleet.ssh, *(word for each in SMALLER for word in ("--set", each))]
    mark = uuid.uuid4().hex
    environ = {"COREMILL_CACHE": str(fleet.folder / "cache"), "MARK": mark}
    done = fleet.run([sys.executable, "-m", "coremill", *words], timeout=500, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks started on 2 machines" in done.stdout
    run = fleet.folder / "runs" / Path(EXAMPLE).stem
    report = json.loads((run / "report.json").read_text())
    assert report["state"] == "finished" and len(report["environment"]["hosts"]) == 2
    assert report["best"]["step"] == report["export"]["step"] and report["best"]["metrics"]["f1"] > 0
    assert len(json.loads((run / "predictions.json").read_text())) == 20
    fleet.assert_nothing_left(mark)
