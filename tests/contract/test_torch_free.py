"""Planning, looking and launching cost no torch: a command answers in well under a second, a launcher stays small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from house import ROOT, sources

from tiers import long_test

PROBE = Path(__file__).with_name("torch_free_probe.py")

# These modules compute, or live in the own process of a tracker or of metrics; packages with all they hold. Every other
# one is importable without the heavy libraries.
COMPUTING = (
    "coremill.checkpoint.committing",
    "coremill.checkpoint.dropout",
    "coremill.checkpoint.export",
    "coremill.checkpoint.export_adapter",
    "coremill.checkpoint.export_best",
    "coremill.checkpoint.export_checkpoint",
    "coremill.checkpoint.export_folder",
    "coremill.checkpoint.in_flight",
    "coremill.checkpoint.conversions",
    "coremill.checkpoint.saver",
    "coremill.checkpoint.snapshot",
    "coremill.data.encoded_batches",
    "coremill.data.packed_batches",
    "coremill.engines.base",
    "coremill.engines.held_base",
    "coremill.engines.one_host.engine",
    "coremill.engines.one_host.slots",
    "coremill.engines.optimizers.adamw",
    "coremill.engines.optimizers.adamw_8bit",
    "coremill.engines.optimizers.moments_8bit",
    "coremill.engines.optimizers.place_bits",
    "coremill.engines.replicate.engine",
    "coremill.engines.replicate.named_rows",
    "coremill.engines.replicate.replicas",
    "coremill.engines.shard.engine",
    "coremill.engines.shard.fsdp_rules",
    "coremill.engines.kept_in_fp32",
    "coremill.engines.shard.embedding",
    "coremill.engines.update",
    "coremill.engines.wire.codec",
    "coremill.engines.wire.collectives",
    "coremill.engines.wire.exchange",
    "coremill.engines.wire.link",
    "coremill.model.base_rows",
    "coremill.model.build",
    "coremill.model.chunked_loss",
    "coremill.model.documents",
    "coremill.model.changes",
    "coremill.model.fused_layers",
    "coremill.model.initialise",
    "coremill.model.known_forwards",
    "coremill.model.load",
    "coremill.model.lora",
    "coremill.model.names",
    "coremill.model.poolers",
    "coremill.model.read",
    "coremill.model.quick_attention",
    "coremill.model.quick_dropout",
    "coremill.model.slices",
    "coremill.model.small_copy",
    "coremill.model.tied_lookup",
    "coremill.report.readers.prometheus.families",
    "coremill.report.readers.prometheus.server",
    "coremill.report.readers.trackers.to_mlflow",
    "coremill.report.readers.trackers.to_tensorboard",
    "coremill.report.readers.trackers.to_wandb",
    "coremill.tasks.causal_lm.loss_path",
    "coremill.tasks.causal_lm.training",
    "coremill.tasks.encoder.training",
    "coremill.tasks.question_answering.training",
    "coremill.tasks.sequence_classification.training",
    "coremill.train.evaluation",
    "coremill.train.loop",
    "coremill.train.numerics",
    "coremill.train.watched_step",
)


def probe(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROBE), *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def modules_in(names: tuple[str, ...]) -> set[str]:
    return {module for module in sources() for name in names if module == name or module.startswith(f"{name}.")}


def test_modules_import_without_torch():
    outcome = probe("modules", *sorted(set(sources()) - modules_in(COMPUTING)))
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout) == {}


@long_test("a list that is too long hides nothing of what users meet; commands are tried below")
def test_the_list_of_computing_modules_is_no_longer_than_it_must_be():
    outcome = probe("modules", *sorted(modules_in(COMPUTING)))
    assert set(json.loads(outcome.stdout)) == modules_in(COMPUTING)
    assert [name for name in COMPUTING if name not in sources()] == []


TINY = "examples/tiny-from-scratch.yaml"


@pytest.mark.parametrize(
    "command",
    [
        ("--version",),
        ("train", "--help"),
        ("config", "show", TINY),
        ("config", "schema"),
        ("config", "import", "tests/golden/brought/cpu-ds.json"),
        ("config", "import", "--", "mpirun", "-n", "2", "python", "run_qa.py", "--bf16"),
        ("instances", "--efa"),
        ("plan", TINY, "--fleet", "2xc7i.8xlarge"),
        ("plan", TINY, "--fleet", "2xc7i.8xlarge", "--fleet", "1xc7i.4xlarge", "--json"),
        (
            "k8s",
            "render",
            TINY,
            "--set",
            "kubernetes={image: a:1, karpenter: none}",
            "--set",
            "fleet.instance=c7i.8xlarge",
        ),
        ("k8s", "check", "tests/k8s/manifests/good/nodes.yaml", "--json"),
    ],
    ids=" ".join,
)
def test_commands_answer_without_torch(command):
    outcome = probe("command", *command)
    assert outcome.returncode == 0, outcome.stderr
    assert "ASKED" not in outcome.stderr
    assert outcome.stdout.strip()


def test_the_version_says_what_numbers_depend_on():
    """Looked up, not imported: a bug report begins with it, also where torch cannot be imported."""
    lines = probe("command", "--version").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["coremill", "torch", "transformers", "CPU"]
    assert all(len(line.split()) > 1 for line in lines)


def test_plan_of_a_folder_without_torch(tmp_path):
    shape = {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = [f"model.name={tmp_path}", "model.weights=random", "tokenizer=built-in", "train.steps=10"]
    words = [word for setting in settings for word in ("--set", setting)]
    outcome = probe("command", "plan", *words, "--fleet", "2xc7i.8xlarge", "--json")
    assert outcome.returncode == 0, outcome.stderr
    assert "ASKED" not in outcome.stderr
    assert json.loads(outcome.stdout)["fits"]


def test_report_without_torch(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "unit" / "report")
    from fake_run import make_fake_run  # type: ignore[import-not-found]

    folder = make_fake_run(tmp_path / "run")
    for options in ([], ["--json"], ["--html", str(tmp_path / "page.html")]):
        outcome = probe("command", "report", str(folder), *options)
        assert outcome.returncode == 0, outcome.stderr
        assert "ASKED" not in outcome.stderr
