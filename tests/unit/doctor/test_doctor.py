from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coremill.doctor import Check, Diagnosis, SelfTest, assemble, diagnosis, examine, render
from coremill.doctor.choices import choices_here
from coremill.doctor.findings import Finding, Surroundings, findings_of, installed_versions
from coremill.doctor.screen import cpu_ranges
from coremill.doctor.self_test import judge, plans_here
from coremill.errors import CoremillError
from coremill.hardware.facts import Calibration, Interface, NodeFacts
from unit.hardware.fake_machine import node_of

CALIBRATION = Calibration(
    source="measured",
    origin="measured on box",
    threads=4,
    fp32_matmul_flops_per_second=1.2e12,
    bf16_matmul_flops_per_second=4.8e12,
    copy_bytes_per_second=1e11,
    base_rss_bytes=400_000_000,
    torch_version="2.13.0",
)
NETWORK = (
    Interface(name="ens5", address="10.0.0.4", is_loopback=False, bits_per_second=12_500_000_000),
    Interface(name="lo", address="127.0.0.1", is_loopback=True, bits_per_second=None),
)
PASSED = SelfTest(checks=(Check(name="collective", passed=True, detail="right"),), seconds=9.0)
FAILED = SelfTest(checks=(Check(name="two ranks", passed=False, detail="rank 1 failed"),), seconds=9.0)


def healthy_node(**changes: Any) -> NodeFacts:
    return node_of(**{"interfaces": NETWORK, "allocators": (("tcmalloc", "/usr/lib/libtcmalloc.so.4"),), **changes})


def found(
    node: NodeFacts,
    *,
    environ: dict[str, str] | None = None,
    calibration: Calibration | None = CALIBRATION,
    installed: tuple[str, ...] = (),
    versions: dict[str, tuple[str, str]] | None = None,
    **surroundings: Any,
) -> dict[str, Finding]:
    around = Surroundings(**{"online_cpus": 4, **surroundings})
    here = {"installed": lambda name: name in installed, "versions": versions or {}}
    findings = findings_of(node, calibration, environ or {}, around, **here)  # type: ignore[arg-type]
    return {finding.subject: finding for finding in findings}


def test_a_good_machine_has_nothing_to_say() -> None:
    assert found(healthy_node()) == {}


@pytest.mark.parametrize(
    ("arguments", "subject", "level", "words"),
    [
        (
            {"node": healthy_node(siblings=True), "online_cpus": 8},
            "hardware threads",
            "note",
            "8 hardware threads on 4",
        ),
        ({"node": healthy_node(), "online_cpus": 96}, "affinity mask", "note", "4 of the machine's 96"),
        ({"node": healthy_node(cpu_quota=2.0)}, "CPU quota", "note", "2 CPUs of 4 cores"),
        ({"node": healthy_node(cpu_quota=2.5)}, "CPU quota", "warning", "0.5 CPUs of the quota"),
        ({"node": healthy_node(busy_fraction=0.6)}, "busy", "warning", "60 %"),
        (
            {"node": healthy_node(), "governor": "powersave", "clock_driver": "acpi-cpufreq"},
            "clock",
            "warning",
            "powersave",
        ),
        ({"node": healthy_node(memory_limit_bytes=8 * 10**9)}, "memory limit", "note", "8.00 GB"),
        ({"node": healthy_node(huge_pages="never")}, "huge pages", "warning", "page fault"),
        ({"node": healthy_node(allocators=())}, "allocator", "note", "tcmalloc"),
        ({"node": healthy_node(interfaces=NETWORK[1:])}, "network", "note", "loopback"),
        ({"node": healthy_node(), "environ": {"OMP_NUM_THREADS": "1"}}, "OMP_NUM_THREADS", "warning", "1 of 4 cores"),
        ({"node": healthy_node(), "environ": {"KMP_AFFINITY": "compact"}}, "KMP_AFFINITY", "warning", "libiomp5"),
        ({"node": healthy_node(), "environ": {"LD_PRELOAD": "/no/such.so"}}, "LD_PRELOAD", "warning", "/no/such.so"),
        ({"node": healthy_node(), "environ": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}, "ONEDNN_MAX_CPU_ISA", "warning", "AVX2"),
        (
            {"node": healthy_node(), "environ": {"GLOO_SOCKET_IFNAME": "eth9,ens5"}},
            "GLOO_SOCKET_IFNAME",
            "warning",
            "eth9",
        ),
        (
            {"node": healthy_node(), "installed": ("intel-extension-for-pytorch",)},
            "intel-extension-for-pytorch",
            "note",
            "archived",
        ),
        ({"node": healthy_node(), "installed": ("oneccl-bind-pt",)}, "oneccl-bind-pt", "note", "gloo"),
        (
            {"node": healthy_node(), "versions": {"torch": ("<2.14,>=2.11", "2.14.0.dev2"), "rich": (">=13", "15.0")}},
            "torch",
            "note",
            "2.14.0.dev2 is untested with this coremill",
        ),
    ],
)
def test_each_finding_comes_alone(arguments: dict[str, Any], subject: str, level: str, words: str) -> None:
    findings = found(**arguments)
    assert list(findings) == [subject]
    assert findings[subject].level == level
    assert words in findings[subject].message


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("2.10.1", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.14.0", False), ("2.14.0a0", False), ("3.0", False)],
)
def test_untested_versions_are_said(version: str, is_tested: bool) -> None:
    findings = found(healthy_node(), versions={"torch": ("<2.14,>=2.11", version)})
    assert ("torch" not in findings) == is_tested


def test_the_versions_of_what_is_needed_are_known() -> None:
    assert {"torch", "transformers", "tokenizers", "rich"} <= set(installed_versions())
    assert "boto3" not in installed_versions()  # an extra


@pytest.mark.parametrize(
    "environ",
    [
        {"OMP_NUM_THREADS": "4"},
        {"KMP_AFFINITY": "compact", "LD_PRELOAD": "libiomp5.so"},
        {"ONEDNN_MAX_CPU_ISA": "DEFAULT"},
        {"GLOO_SOCKET_IFNAME": "ens5,ens5"},
    ],
)
def test_settings_that_do_no_harm(environ: dict[str, str]) -> None:
    assert found(healthy_node(), environ=environ) == {}


def test_a_governor_that_follows_the_load_is_fine() -> None:
    assert found(healthy_node(), governor="powersave", clock_driver="intel_pstate") == {}


def test_bf16_without_units_shows_the_measured_factor() -> None:
    emulated = Calibration(
        **{**CALIBRATION.__dict__, "bf16_matmul_flops_per_second": None, "bf16_emulated_flops_per_second": 4e9}
    )
    assert "300 times less" in found(healthy_node(isa=("avx2",)), calibration=emulated)["bf16"].message


def test_warnings_come_first() -> None:
    findings = list(found(healthy_node(allocators=(), huge_pages="never", busy_fraction=0.9)).values())
    assert [finding.level for finding in findings] == ["warning", "warning", "note"]


def diagnosis_of(**changes: Any) -> Diagnosis:
    values: dict[str, Any] = {
        "environ": {},
        "surroundings": Surroundings(online_cpus=8),
        "cache_folder": Path("/cache"),
        "choices": [("dtype", "bf16", "measured 4 times fp32")],
        "tested": PASSED,
        **changes,
    }
    calibration = values.pop("calibration", CALIBRATION)
    return assemble(healthy_node(siblings=True, cpu_quota=2.5), calibration, **values)


def screen_of(diagnosis: Diagnosis, **options: Any) -> str:
    stream = io.StringIO()
    render(diagnosis, Console(file=stream, **options))
    return stream.getvalue()


def test_off_a_terminal_one_finding_is_one_line() -> None:
    text = screen_of(diagnosis_of(), width=40)
    lines = text.splitlines()
    assert "CPU           Some CPU, x86_64" in lines
    assert any(line.startswith("cores         4 physical cores (8 hardware threads)") for line in lines)
    assert any("quota 2.5 CPUs: 2 cores to compute with" in line for line in lines)
    assert "bf16 products  4.80 TFLOP/s, 4.0 times fp32" in lines
    assert "dtype  bf16  measured 4 times fp32" in lines
    assert "ok      collective: right" in lines
    assert lines[-1] == "ready: coremill train"
    assert "\x1b" not in text


def test_on_a_terminal_it_is_one_screen() -> None:
    text = screen_of(diagnosis_of(), width=120, force_terminal=True)
    assert len(text.splitlines()) <= 40
    assert "This machine: box" in text


def test_a_failed_self_test_is_not_healthy() -> None:
    sick = diagnosis_of(tested=FAILED)
    assert not sick.healthy
    text = screen_of(sick)
    assert "FAILED  two ranks: rank 1 failed" in text
    assert "not ready" in text


def test_json_has_everything() -> None:
    document = json.loads(json.dumps(diagnosis_of().to_json()))
    assert document["healthy"] is True
    assert document["node"]["usable_cores"] == 2
    assert document["node"]["has_bf16_units"] is True
    assert document["node"]["online_cpus"] == 8
    assert document["calibration"]["fp32_matmul_flops_per_second"] == 1.2e12
    assert document["choices"]["dtype"] == {"value": "bf16", "reason": "measured 4 times fp32"}
    assert document["self_test"]["passed"] is True
    assert {"level", "subject", "message", "do"} == set(document["findings"][0])


def test_the_choices_of_this_machine_have_reasons() -> None:
    choices = {name: (value, reason) for name, value, reason in choices_here(healthy_node(), CALIBRATION)}
    assert choices["dtype"][0] == "bf16"
    assert choices["threads per rank"][0] == "4"
    assert all(reason for _, reason in choices.values())
    sizes = {name: value for name, (value, _) in choices.items() if name.startswith("ranks, ")}
    assert list(sizes) == ["ranks, 60 M", "ranks, 350 M", "ranks, 1.2 B"]
    assert set(sizes.values()) <= {"1", "2", "4"}, "even splits of four cores"


def test_a_machine_that_cannot_be_measured_is_still_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Calibration:
        raise CoremillError("measuring failed", why="no torch")

    monkeypatch.setattr(diagnosis, "calibration_of", fail)
    monkeypatch.setattr(diagnosis, "probe_node", healthy_node)
    monkeypatch.setattr(diagnosis, "self_test", lambda *_: PASSED)
    assert examine(as_json=True, run_self_test=True, console=Console()) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["calibration"] is None
    assert "no torch" in document["problems"][0]
    assert document["node"]["cpu_model"] == "Some CPU"


def test_the_self_test_plans_both_engines_as_they_would_be_chosen_here() -> None:
    measured, unmeasured = plans_here(healthy_node(), CALIBRATION), plans_here(healthy_node(), None)
    assert [plan.engine.value for plan in measured] == [plan.engine.value for plan in unmeasured]
    assert {plan.engine.value for plan in measured} == {"replicate", "shard"}
    assert all(plan.ranks_per_node.value == 2 and plan.fits for plan in measured)
    assert {plan.dtype.value for plan in unmeasured} == {"fp32"}
    assert {plan.dtype.value for plan in measured} == {choices_by_name(healthy_node())["dtype"]}


def choices_by_name(node: NodeFacts) -> dict[str, str]:
    return {name: value for name, value, _ in choices_here(node, CALIBRATION)}


@pytest.mark.parametrize(
    ("shard", "failed", "words"),
    [
        ({}, set(), "replicate over gloo and shard through memory"),
        ({"losses": [5.5, 5.2]}, {"equal weights"}, "come to DIFFERENT losses"),
        ({"weights_are_equal": False}, {"equal weights"}, "hold DIFFERENT weights"),
        ({"weights_moved": False}, {"training step"}, "the weights did not move"),
        ({"losses": [5.5, float("nan")]}, {"training step", "equal weights"}, "not finite"),
    ],
)
def test_the_self_test_judges_each_engine(shard: dict[str, Any], failed: set[str], words: str) -> None:
    engine = {"engine": "replicate", "exchange": "wire", "dtype": "fp32", "losses": [5.5, 5.4], "step_seconds": 0.1}
    engine |= {"weights_moved": True, "weights_are_equal": True}
    engines = [engine, {**engine, "engine": "shard", "exchange": "memory", **shard}]
    rank = {"all_reduce_is_right": True, "onednn_was_lost": False, "engines": engines}
    checks = judge([rank, rank], 1e9)
    assert {check.name for check in checks if not check.passed} == failed
    assert words in " ".join(check.detail for check in checks)


@pytest.mark.parametrize(("cpus", "text"), [([0, 1, 2, 5, 7, 8], "0-2,5,7-8"), ([3], "3"), ([], "")])
def test_cpu_ranges(cpus: list[int], text: str) -> None:
    assert cpu_ranges(cpus) == text
