"""What users and scripts rely on, pinned: commands, options, exit codes, JSON keys, files of a run, public names.

A change here is a change of the contract: it belongs in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re

import pytest
from commands import surface
from house import PACKAGE, ROOT, sources

import coremill
from coremill import api, errors
from coremill.cli import app

COMMANDS = {
    "coremill": ["--install-completion", "--show-completion", "--version"],
    "coremill train": [
        "--data",
        "--dry-run",
        "--force",
        "--fresh",
        "--from",
        "--hostfile",
        "--interface",
        "--model",
        "--mpirun",
        "--nproc",
        "--page",
        "--port",
        "--ppn",
        "--set",
        "--ssh",
        "--via",
        "CONFIG",
    ],
    "coremill plan": ["--compare", "--data", "--fleet", "--json", "--learn", "--live", "--model", "--set", "CONFIG"],
    "coremill doctor": ["--json", "--self-test/--no-self-test"],
    "coremill launch": [
        "--accelerate",
        "--allocator",
        "--bind-threads",
        "--check/--no-check",
        "--dry-run",
        "--hostfile",
        "--interface",
        "--log-dir",
        "--master",
        "--mpirun",
        "--nnodes",
        "--node-rank",
        "--nproc",
        "--ppn",
        "--prefix",
        "--python",
        "--quiet/-q",
        "--ssh",
        "--threads",
        "--via",
        "-m",
        "ARGUMENTS",
        "SCRIPT",
    ],
    "coremill stop": ["RUN"],
    "coremill instances": ["--efa", "--family", "--json", "--live"],
    "coremill report": ["--html", "--json", "--port", "--serve", "RUN"],
    "coremill export": ["--adapter", "--dtype", "--merged", "--private", "--push", "--step", "DESTINATION", "RUN"],
    "coremill data": [],
    "coremill data show": ["--data", "--evaluation", "--json", "--model", "--rows", "--set", "CONFIG"],
    "coremill k8s": [],
    "coremill k8s render": ["--output/-o", "--set", "CONFIG"],
    "coremill k8s check": ["--json", "--release", "--schemas", "--set", "FILES"],
    "coremill k8s rehearse": ["--image", "--json", "--kill", "--output/-o", "--reclaim", "--set", "CONFIG"],
    "coremill k8s dashboard": [],
    "coremill k8s submit": ["--context", "--json", "--set", "--wait/--no-wait", "CONFIG"],
    "coremill k8s status": ["--context", "--json", "--set", "CONFIG"],
    "coremill k8s logs": ["--context", "--follow/--no-follow", "--json", "--rank", "--set", "--tail", "CONFIG"],
    "coremill k8s stop": ["--context", "--json", "--set", "--wait/--no-wait", "CONFIG"],
    "coremill k8s delete": ["--context", "--json", "--set", "--yes/-y", "CONFIG"],
    "coremill config": [],
    "coremill config init": ["--answer", "--yes/-y", "FILE"],
    "coremill config import": ["--json", "WORDS"],
    "coremill config show": ["--data", "--json", "--model", "--set", "CONFIG"],
    "coremill config schema": [],
}

EXIT_CODES = {
    "KnownEnding": 1,
    "CoremillError": 1,
    "InputError": 78,
    "ConfigError": 78,
    "PeerLost": 69,
    "NonFinite": 70,
    "Drifted": 70,
    "StorageError": 74,
    "Stopped": 75,
    "Interrupted": 130,
}

PLAN_KEYS = {
    "fits",
    "engine",
    "dtype",
    "ranks_per_node",
    "threads_per_rank",
    "memory_bytes_per_rank",
    "wire_bytes_per_step_per_rank",
    "step_seconds",
    "tokens_per_second",
    "usd_per_hour",
    "hours",
    "usd",
}
PLAN_MEMORY_KEYS = {"parameters", "gradients", "optimizer", "activations", "logits", "buffers", "total", "limit"}
PLAN_CHOICES = ("engine", "dtype", "ranks_per_node", "threads_per_rank")

REPORT_KEYS = {
    "tokens_per_second",
    "padding_fraction",
    "model_flops_per_second",
    "matmul_flops_per_second",
    "utilization",
    "load_seconds",
    "bytes_read_per_rank",
    "peak_rss_bytes_per_rank",
    "peak_rss_bytes_at_load_per_rank",
    "wire_bytes_per_step_per_rank",
    "loss_first",
    "loss_last",
    "steps",
    "seconds",
    "goodput",
    "metrics",
    "best",
    "plan",
    "measured",
}


def test_commands_and_options():
    assert surface() == COMMANDS


def test_exit_codes():
    classes = {name: kind for name, kind in vars(errors).items() if getattr(kind, "__module__", "") == errors.__name__}
    assert {name: kind.exit_code for name, kind in classes.items()} == EXIT_CODES
    for name, kind in classes.items():
        assert issubclass(kind, errors.KnownEnding), name
        # A request to stop is no error: what handles errors must not swallow it.
        assert issubclass(kind, Exception) == (name not in {"KnownEnding", "Stopped", "Interrupted"}), name


def test_the_error_tree_is_drawn_as_it_is():
    drawn = dict(re.findall(r"^[ |`-]*(\w+) +(\d+) ", errors.__doc__ or "", flags=re.MULTILINE))
    assert {name: int(code) for name, code in drawn.items()} | {"KnownEnding": 1} == EXIT_CODES


API = {
    "load_config": ["path", "settings", "model", "data", "nproc"],
    "plan": ["config", "settings", "model", "data", "fleet"],
    "train": [
        *("config", "settings", "model", "data", "nproc"),
        *("dry_run", "fresh", "force", "start_from", "page", "port", "console"),
    ],
    "report": ["run"],
}
API_TYPES = {
    "CoremillError": None,
    "LoadedConfig": ["config", "origins", "name", "path", "text", "without_file", "notes", "places"],
    "TrainResult": ["state", "exit_code", "folder", "summary"],
    "TrainingInterrupted": None,
}


def test_public_python_names():
    assert set(api.__all__) == {*API, *API_TYPES}
    assert {name: list(inspect.signature(getattr(api, name)).parameters) for name in API} == API
    for name, fields in API_TYPES.items():
        if fields is not None:
            assert [field.name for field in dataclasses.fields(getattr(api, name))] == fields
    assert all(inspect.getdoc(getattr(api, name)) for name in api.__all__)
    assert issubclass(api.TrainingInterrupted, KeyboardInterrupt)
    assert (PACKAGE / "py.typed").is_file()


def test_public_names():
    # coremill is a command: the package offers its version, everything else may move.
    assert {name for name in vars(coremill) if not name.startswith("_")} <= set(packages_and_modules())
    assert re.fullmatch(r"\d+\.\d+\.\d+", coremill.__version__)


def packages_and_modules() -> list[str]:
    """What importing submodules leaves as attributes of the package."""
    return [path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")]


def test_plan_json_has_its_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    app(["plan", "examples/tiny-from-scratch.yaml", "--fleet", "2xc7i.8xlarge", "--json"], standalone_mode=False)
    plan = json.loads(capsys.readouterr().out)
    assert set(plan) >= PLAN_KEYS
    assert set(plan["memory_bytes_per_rank"]) >= PLAN_MEMORY_KEYS
    assert set(plan["step_seconds"]) >= {"compute", "communication", "total"}
    for name in PLAN_CHOICES:
        assert set(plan[name]) == {"value", "reason"} and plan[name]["reason"], name


def test_report_json_has_its_keys(capsys, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tests" / "unit" / "report")
    from fake_run import make_fake_run  # type: ignore[import-not-found]

    app(["report", str(make_fake_run(tmp_path / "run")), "--json"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    assert set(report) >= REPORT_KEYS
    for name in (key for key in REPORT_KEYS if key.endswith("_per_rank")):
        assert len(report[name]) == 4, name


def test_the_architecture_page_names_what_exists():
    """Each `stage.module.name(...)` of its contract table is a function or class of that module."""
    rows = re.findall(r"^\| \w+ \|.*\|(.*)\|$", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
    named = {found for row in rows for found in re.findall(r"`((?:\w+\.)+\w+)(?:\(|`)", row)}
    assert len(named) > 10
    missing = []
    for dotted in sorted(named):
        module, _, name = f"coremill.{dotted}".rpartition(".")
        defined = {getattr(node, "name", None) for node in ast.walk(sources().get(module, ast.Module([], [])))}
        if name not in defined and f"coremill.{dotted}" not in sources():
            missing.append(dotted)
    assert not missing


def test_the_architecture_page_lists_every_kind_of_event():
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page[page.index("### Events") :], flags=re.MULTILINE))
    written = {
        node.args[0].value
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", None) == "write"
        and node.keywords
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert listed == written
