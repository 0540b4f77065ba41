"""Question answering and classification as a user meets them: killed and resumed with dropout, exported, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from end_to_end.scene import Scene
from end_to_end.test_supervise import events, going, losses, weights
from tiers import long_test
from tiny_encoders import make_encoder, questions, sentences, write_jsonl

KILLS = 10 if os.environ.get("COREMILL_LONG_TESTS") else 2
QUESTIONS = """\
model: {name: encoder, dropout: 0.1, attention_dropout: 0.1}
task: question-answering
data: {source: questions.jsonl, evaluation_fraction: 0.2, sequence_length: 64, doc_stride: 16}
train: {steps: 1000000, samples_per_step: 8, learning_rate: 1.0e-3, schedule: constant}
parallel: {dtype: fp32, wire_dtype: fp32, threads_per_rank: 1, ranks_per_node: 2}
checkpoint: {every: 5steps}
"""
SENTENCES = """\
model: encoder
task: sequence-classification
data:
  source: sentences.jsonl
  evaluation_fraction: 0.2
  text_columns: [sentence1, sentence2]
  sequence_length: 64
train: {steps: 6, samples_per_step: 8, learning_rate: 1.0e-3}
parallel: {dtype: fp32, threads_per_rank: 1, ranks_per_node: 2}
evaluation: {every_steps: 2, keep_best: f1}
sample: {prompt: good river, context: fine city}
run: {folder: sentences}
"""


@pytest.fixture(scope="module")
def study(scene: Scene) -> Scene:
    make_encoder(scene.path("encoder"), weights=True)
    write_jsonl(scene.path("questions.jsonl"), questions(60, unanswerable=0.2))
    write_jsonl(scene.path("sentences.jsonl"), sentences(80, pairs=True, names=True))
    scene.path("questions.yaml").write_text(QUESTIONS)
    scene.path("sentences.yaml").write_text(SENTENCES)
    return scene


def command(folder: str, *settings: str) -> list[str]:
    words = [f"run.folder={folder}", "run.export=false", *settings]
    start = [sys.executable, "-m", "coremill", "train", "questions.yaml"]
    return [*start, *(word for setting in words for word in ("--set", setting))]


@pytest.mark.timeout(900)
@long_test("tests/distributed resumes with dropout, test_resume.py kills")
def test_killed_with_dropout_and_resumed_to_the_same_bits(study: Scene) -> None:
    folder = study.path("war")

    def done() -> int:
        return max((event["step"] for event in events(folder, "step", 0)), default=0)

    with going(study, command("war")) as (running, wait_for):
        for number in range(KILLS):
            reached = done()
            wait_for(lambda reached=reached: done() >= reached + 7)
            os.kill(int(events(folder, "start", number % 2)[-1]["pid"]), signal.SIGKILL)
            wait_for(lambda number=number: len(events(folder, "restart")) == number + 1)
        running.process.terminate()
        ended = running.end()
    assert ended.code == 75 and not ended.left, str(ended)
    last = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
    peace = study.run(command("peace", f"train.steps={last}", "checkpoint.every=1000000steps"))
    assert peace.code == 0, str(peace)
    done_before = {step: loss for step, loss in losses(folder).items() if step <= last}  # a kill may cost later ones
    assert done_before == losses(study.path("peace"))
    assert weights(folder, last) == weights(study.path("peace"), last)
    # At another number of ranks it cannot be the same, and that is said.
    other = study.run(command("war", f"train.steps={last + 1}", "parallel.ranks_per_node=1"))
    assert other.code == 0 and "dropout: drawn anew, because 2 ranks had random numbers of their own" in other.out, (
        other
    )
    assert json.loads((folder / "predictions.json").read_text())


@pytest.fixture(scope="module")
def finished(study: Scene) -> Path:
    ended = study.coremill("train", "sentences.yaml")
    assert ended.code == 0, str(ended)
    assert "a new head is learned, drawn by train.seed: classifier.weight, classifier.bias" in ended.out, str(ended)
    return study.path("sentences")


LOADING = """\
import json, sys
from transformers import AutoConfig, pipeline
said = pipeline("text-classification", model=sys.argv[1])({"text": "good river", "text_pair": "fine city"})
said = said[0] if isinstance(said, list) else said
print(json.dumps({"label": said["label"], "names": AutoConfig.from_pretrained(sys.argv[1]).id2label}))
"""


def test_a_pipeline_loads_the_best_step_with_the_names_of_its_classes(study: Scene, finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    assert report["export"]["step"] == report["best"]["step"]
    assert set(report["best"]["metrics"]) == {"loss", "accuracy", "f1"}
    assert report["subject"]["samples_per_step"] == 8 and report["subject"]["tokens_per_step"] is None
    answer = subprocess.run(
        [sys.executable, "-c", LOADING, str(finished / "export")], capture_output=True, text=True, check=True
    )
    said = json.loads(answer.stdout.splitlines()[-1])
    assert said["names"] == {"0": "negative", "1": "positive"} and said["label"] in said["names"].values()
    assert report["sample"]["completion"].split(" ")[0] == said["label"]
    predictions = json.loads((finished / "predictions.json").read_text())
    assert len(predictions) == report["data"]["evaluation_rows"]
    card = (finished / "export" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "samples per step" in card


def test_rows_are_shown_with_what_is_learned(study: Scene) -> None:
    shown = json.loads(study.coremill("data", "show", "questions.yaml", "--rows", "6", "--json").out)
    learned = [
        "".join(segment["text"] for segment in row["segments"] if segment["learned"] and not segment["special"]).strip()
        for row in shown["rows"]
    ]
    assert {"river", "city", "king", "queen"} & set(learned)
    text = study.coremill("data", "show", "sentences.yaml", "--rows", "2").out
    assert "label negative" in text or "label positive" in text, text


REFUSED = {
    "a decoder for questions": (
        ["questions.yaml", "--set", "model={name: model}"],
        "model is a decoder, and question-answering trains encoders",
    ),
    "no answers": (["questions.yaml", "--set", "data.answers_column=replies"], "replies"),
    "more classes than the head": (
        ["sentences.yaml", "--set", "model=two-classes", "--set", "data.source=three.jsonl"],
        "the model's head",
    ),
    "a stride that is not below the length": (
        ["questions.yaml", "--set", "data.doc_stride=64"],
        "data.doc_stride (64) is not below data.sequence_length (64)",
    ),
    "tokens per step": (
        ["questions.yaml", "--set", "train.tokens_per_step=4096"],
        "train.samples_per_step says how many rows a step has",
    ),
    "a metric of another task": (
        ["sentences.yaml", "--set", "evaluation.keep_best=pearson"],
        "pearson is no metric of sequence-classification",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_message_and_78(study: Scene, name: str) -> None:
    if not study.path("two-classes").exists():
        make_encoder(study.path("two-classes"), architectures=["BertForSequenceClassification"])
        (study.path("two-classes") / "model.safetensors").symlink_to(study.path("encoder") / "model.safetensors")
        rows = sentences(20, pairs=True)
        write_jsonl(study.path("three.jsonl"), [{**row, "label": number % 3} for number, row in enumerate(rows)])
    words, message = REFUSED[name]
    ended = study.coremill("train", *words, "--set", "run.folder=refused")
    assert ended.code == 78 and message in ended.err, str(ended)
    assert ended.err.count("coremill: ") == 1 and not study.path("refused/events").exists(), str(ended)
