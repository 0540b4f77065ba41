"""Bad input through the real command line: exit code 78, one message, no rank started, no process left."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from end_to_end.scene import RUN_FILE, Ended, Scene
from end_to_end.stand_in_hub import serve_gated_hub
from tiers import long_test
from tiny_models import make_config_folder

NOBODY_LISTENS = "http://127.0.0.1:9"  # the discard port: refused at once
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "coremill"]


def nothing(_: Scene) -> None:
    pass


def unknown_key(scene: Scene) -> None:
    scene.path("unknown.yaml").write_text(RUN_FILE.replace("learning_rate", "learning_rat"))


def open_question(scene: Scene) -> None:
    asked = "# model: ?                                    # model: which model: a hub id or a folder"
    scene.path("asked.yaml").write_text(re.sub("^model:.*$", asked, RUN_FILE, flags=re.M))


def wrong_type(scene: Scene) -> None:
    scene.path("type.yaml").write_text(RUN_FILE.replace("steps: 8", "steps: many").replace("256", "[256]"))


def pickle_only(scene: Scene) -> None:
    folder = copied_model(scene, "pickle")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(scene: Scene) -> None:
    weights = copied_model(scene, "truncated") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def no_tokenizer(scene: Scene) -> None:
    folder = copied_model(scene, "mute")
    for file in folder.glob("tokenizer*"):
        file.unlink()


def other_words(scene: Scene) -> None:
    """The model's tokenizer with two ids swapped."""
    folder = scene.path("words")
    folder.mkdir()
    shutil.copy(scene.path("model") / "tokenizer_config.json", folder)
    document = json.loads((scene.path("model") / "tokenizer.json").read_text())
    words = document["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (folder / "tokenizer.json").write_text(json.dumps(document))


def small_vocabulary(scene: Scene) -> None:
    shutil.copytree(scene.path("model"), scene.path("small"), dirs_exist_ok=True)
    make_config_folder(scene.path("small"), "llama", vocab_size=60)


def encoder(scene: Scene) -> None:
    make_config_folder(scene.path("encoder"), "llama", model_type="bert")


def pictures(scene: Scene) -> None:
    make_config_folder(scene.path("pictures"), "llama", model_type="vit")


def huge_model(scene: Scene) -> None:
    make_config_folder(
        scene.path("huge"), "llama", hidden_size=1 << 15, intermediate_size=1 << 17, num_hidden_layers=99
    )


def empty_text(scene: Scene) -> None:
    scene.path("empty.jsonl").write_text("")


def folder_without_text(scene: Scene) -> None:
    scene.path("drawings").mkdir(exist_ok=True)
    scene.path("drawings/one.png").write_bytes(b"PNG")
    scene.path("folder.yaml").write_text(RUN_FILE.replace("text/*.jsonl", "drawings"))


def broken_line(scene: Scene) -> None:
    lines = scene.path("text/part.jsonl").read_text().splitlines(keepends=True)
    scene.path("broken.jsonl").write_text("".join([*lines[:39], '{"text": \n', *lines[39:]]))


def truncated_parquet(scene: Scene) -> None:
    import pyarrow
    import pyarrow.parquet

    path = scene.path("cut.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some words"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-100])


def open_to_all(scene: Scene) -> None:
    scene.path("open").mkdir()
    scene.path("open").chmod(0o777)


def short_text(scene: Scene) -> None:
    scene.path("short.jsonl").write_text('{"text": "' + "mill" * 10 + '"}\n')


def file_in_the_way(scene: Scene) -> None:
    scene.path("occupied").write_text("a file")


def copied_model(scene: Scene, name: str) -> Path:
    return Path(shutil.copytree(scene.path("model"), scene.path(name)))


@dataclass(frozen=True)
class Case:
    """What is wrong, and what is said about it."""

    message: str  # regular expression; "..." stands for anything
    settings: tuple[str, ...] = ()
    file: str = "run.yaml"
    words: tuple[str, ...] = ()
    prepare: Callable[[Scene], None] = nothing
    hub: str | None = NOBODY_LISTENS  # None: the gated one

    @property
    def arguments(self) -> list[str]:
        return ["train", self.file, *self.words, *(word for item in self.settings for word in ("--set", item))]


CASES = {
    "unknown key": Case(
        "unknown key train.learning_rat...unknown.yaml:9...did you mean train.learning_rate",
        file="unknown.yaml",
        prepare=unknown_key,
    ),
    "a question of an import": Case(
        "still has open questions...asked.yaml...asks for model...--model and --data",
        file="asked.yaml",
        prepare=open_question,
    ),
    "wrong type": Case(
        "2 problems...train.steps must be a whole number...'many'...type.yaml:7...train.tokens_per_step...type.yaml:8",
        file="type.yaml",
        prepare=wrong_type,
    ),
    "no ranks": Case(
        "parallel.ranks_per_node must be auto or a whole number above 0...where: --nproc 0", words=("--nproc", "0")
    ),
    "no run file": Case("there is no file absent.yaml", file="absent.yaml"),
    "missing model folder": Case("no such model folder: nowhere/at/all", ("model=nowhere/at/all",)),
    "gated model": Case("gated/model is gated...hf auth login", ("model=gated/model",), hub=None),
    "gated dataset": Case("gated/text is gated...hf auth login", ("data.source=hf://gated/text",), hub=None),
    "unreachable hub, model": Case(
        "the hub cannot be reached...check the name, network or proxy...hf download some/model", ("model=some/model",)
    ),
    "unreachable hub, tokenizer": Case("the hub cannot be reached...where: ...tokenizer", ("tokenizer=some/words",)),
    "unreachable hub, dataset": Case(
        "cannot reach the Hugging Face hub...where: --set data.source=hf://some/text", ("data.source=hf://some/text",)
    ),
    "pickle-only checkpoint": Case(
        r"only a pickle checkpoint \(pytorch_model.bin\)...python -c", ("model=pickle",), prepare=pickle_only
    ),
    "truncated safetensors": Case("model.safetensors is damaged...", ("model=truncated",), prepare=truncated),
    "no tokenizer": Case("has no tokenizer of its own...built-in", ("model=mute",), prepare=no_tokenizer),
    "a tokenizer of another model": Case(
        "the tokenizer words was made for another model...where: --set tokenizer=words...2 of [0-9]+ words differ",
        ("tokenizer=words",),
        prepare=other_words,
    ),
    "an encoder": Case("encoder, not a causal language model...bert", ("model=encoder",), prepare=encoder),
    "no language model": Case("not a causal language model...vit", ("model=pictures",), prepare=pictures),
    "no such text": Case("no file matches...absent/", ("data.source=absent/*.jsonl",)),
    "empty dataset": Case("empty.jsonl", ("data.source=empty.jsonl",), prepare=empty_text),
    "missing column": Case("'body'...text", ("data.column=body",)),
    "a broken line in the middle, two ranks": Case(
        "not a line of JSON...broken.jsonl:40, column 10...repair or remove...data.on_bad_rows=skip",
        ("data.source=broken.jsonl",),
        words=("--nproc", "2"),
        prepare=broken_line,
    ),
    "truncated parquet, two ranks": Case(
        "not a whole parquet file...cut.parquet...again",
        ("data.source=cut.parquet",),
        words=("--nproc", "2"),
        prepare=truncated_parquet,
    ),
    "a folder without text": Case(
        r"the folder holds no data...where: folder.yaml:3 \(data.source\): drawings\n...\.png",
        file="folder.yaml",
        prepare=folder_without_text,
    ),
    "fewer rows than ranks": Case(
        "fewer rows than there are ranks: 1 rows?, 2 ranks",
        ("data.source=short.jsonl", "data.evaluation_fraction=0"),
        words=("--nproc", "2"),
        prepare=short_text,
    ),
    "a warm-up longer than the epochs": Case(
        r"train.warmup_steps \(99\) is not below the 28 steps...--set train.warmup_steps=99...231 rows...at most 27",
        ("train.steps=null", "train.epochs=1", "train.warmup_steps=99"),
    ),
    "token ids beyond the embedding": Case(
        "embedding...60", ("model.name=small", "model.weights=random"), prepare=small_vocabulary
    ),
    "rows longer than the model's positions": Case(
        "rows of 128 tokens are longer than the model's 64 positions", ("data.sequence_length=128",)
    ),
    "less than a row in a step": Case("train.tokens_per_step...16...32", ("train.tokens_per_step=16",)),
    "run folder cannot be made": Case("run folder /proc/run is not writable", ("run.folder=/proc/run",)),
    "a file in the way of the run folder": Case(
        "run folder ...occupied is not writable", ("run.folder=occupied",), prepare=file_in_the_way
    ),
    "a checkpoint folder that others may write": Case(
        r"checkpoint folder ...open is not safe...other users may write into it \(mode 0777\)...chmod go-w",
        ("checkpoint.folder=open",),
        prepare=open_to_all,
    ),
    "more memory than there is": Case(
        "does not fit...GB...--force",
        ("model.name=huge", "model.weights=random", "tokenizer=model"),
        prepare=huge_model,
    ),
}


def one_host(scene: Scene) -> None:
    scene.path("hosts").write_text("localhost slots=2\n")


CASES["missing column, by a hostfile"] = Case(
    "'body'...text", ("data.column=body",), words=("--hostfile", "hosts"), prepare=one_host
)


@pytest.fixture(scope="module")
def gated_hub() -> Iterator[str]:
    with serve_gated_hub() as address:
        yield address


def environ(case: Case, gated_hub: str) -> dict[str, str]:
    return {"HF_ENDPOINT": case.hub or gated_hub, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}


def said(text: str, message: str) -> bool:
    return re.search(message.replace("...", "(?s:.)*?"), text) is not None


def assert_no_rank_started(scene: Scene, done: Ended) -> None:
    assert not done.left
    assert not list(scene.folder.rglob("rank-*"))
    assert not scene.path("runs").exists()
    assert not scene.path("run").exists(), list(scene.path("run").rglob("*"))  # the folder of run.yaml


@pytest.mark.parametrize("name", CASES)
def test_one_message_and_78(scene: Scene, gated_hub: str, name: str) -> None:
    case = CASES[name]
    case.prepare(scene)
    command = [sys.executable, "-m", "coremill", *case.arguments]
    done = scene.start(command, environ(case, gated_hub)).end()
    assert done.code == 78, str(done)
    assert said(done.err, case.message), str(done)
    first, *rest = done.err.splitlines()
    assert first.startswith("coremill: "), str(done)
    assert all(line.startswith(("  ", "- ")) for line in rest), str(done)  # details of the message, nothing else
    assert_no_rank_started(scene, done)


# Each case costs three imports of torch; all of them run without torchrun above.
UNDER_TORCHRUN = ["missing column"]
if os.environ.get("COREMILL_LONG_TESTS"):
    UNDER_TORCHRUN += ["no run file", "token ids beyond the embedding"]


@pytest.mark.parametrize("name", UNDER_TORCHRUN)
def test_under_torchrun_it_is_said_once(scene: Scene, gated_hub: str, name: str) -> None:
    case = CASES[name]
    case.prepare(scene)
    done = scene.run([*TORCHRUN, *case.arguments], environ(case, gated_hub))
    assert done.code != 0
    assert said(done.err, case.message), str(done)
    assert done.err.count("coremill: ") == 1, str(done)
    assert re.search(r"rank +: 0 .*\n.*exitcode +: 78", done.err), str(done)  # torchrun's own words on who failed
    assert_no_rank_started(scene, done)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here: make hosts-setup")
def test_under_mpirun_it_is_said_once(scene: Scene, gated_hub: str) -> None:
    case = CASES["missing column"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    oversubscribed = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    command = ["mpirun", "-n", "2", sys.executable, "-m", "coremill", *case.arguments]
    done = scene.run(command, {**environ(case, gated_hub), **root, **oversubscribed})
    assert done.code == 78, str(done)
    assert said(done.err, case.message) and done.err.count("coremill: ") == 1, str(done)
    assert_no_rank_started(scene, done)


@long_test("test_documents.py refuses such families, test_launch.py sees that what one rank refuses is said once")
def test_documents_that_would_see_each_other_are_refused_before_the_first_step(scene: Scene, tmp_path: Path) -> None:
    """Said by a rank: a small copy of the model has to be run."""
    from transformers import BloomConfig, BloomForCausalLM

    folder = copied_model(scene, "bloom")
    BloomForCausalLM(BloomConfig(vocab_size=131, hidden_size=24, n_layer=2, n_head=4)).save_pretrained(folder)
    run = tmp_path / "run"  # ranks start: not where the other tests look for none
    settings = ("model.name=bloom", "data.attention_across_documents=false", f"run.folder={run}")
    done = scene.coremill("train", "run.yaml", "--nproc", "2", *(word for item in settings for word in ("--set", item)))
    assert done.code == 78, str(done)
    assert not done.left
    assert said(done.err + done.out, "does not keep the documents of a row apart...attention_across_documents: true")
    assert (done.err + done.out).count("does not keep the documents") == 1, str(done)
    assert '"kind":"step"' not in (run / "events/rank-00000.jsonl").read_text()
