"""What a person should know about this machine before training on it, each with what to do about it.

A warning costs speed or a run; a note explains a number that may surprise. All functions are pure: facts and
environment in, findings out.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coremill.hardware.facts import Calibration, NodeFacts
from coremill.hardware.load import busy_with_others
from coremill.report.terminal import format_bytes, format_flops

# Drivers whose "powersave" still follows the load; with others it holds the lowest clock.
_SELF_MANAGED_DRIVERS = ("intel_pstate", "amd-pstate-epp")

_RETIRED_PACKAGES = {
    "intel-extension-for-pytorch": "IPEX is archived (last for torch 2.8); what it did is in torch itself or done here",
    "oneccl-bind-pt": "the oneCCL bindings are archived (last for torch 2.8); collectives run on gloo",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know."""

    level: Literal["warning", "note"]
    subject: str
    message: str
    do: str | None = None


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What matters to a person and not to the plan."""

    online_cpus: int  # of the machine, usable or not; 0: unknown
    governor: str | None = None
    clock_driver: str | None = None


def is_installed(distribution: str) -> bool:
    """Whether pip knows it; nothing is imported."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def installed_versions() -> dict[str, tuple[str, str]]:
    """What coremill needs: the versions it was tested with, as its package says, and the one that is here."""
    found: dict[str, tuple[str, str]] = {}
    try:
        for requirement in importlib.metadata.requires("coremill") or ():
            wanted, _, condition = requirement.partition(";")
            name = re.split(r"[<>=!~ \[(]", wanted)[0]
            if not condition and is_installed(name):
                found[name] = (wanted.removeprefix(name).strip(), importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return {}
    return found


def findings_of(
    node: NodeFacts,
    calibration: Calibration | None,
    environ: Mapping[str, str],
    surroundings: Surroundings,
    *,
    installed: Callable[[str], bool] = is_installed,
    versions: Mapping[str, tuple[str, str]] | None = None,
) -> tuple[Finding, ...]:
    """All findings, warnings first."""
    found = [
        *_about_cores(node, surroundings),
        *_about_memory(node),
        *_about_arithmetic(node, calibration),
        *_about_environment(node, environ),
        *(
            Finding(level="note", subject=name, message=text, do=f"pip uninstall {name}")
            for name, text in _RETIRED_PACKAGES.items()
            if installed(name)
        ),
        *_about_versions(installed_versions() if versions is None else versions),
    ]
    return tuple(sorted(found, key=lambda finding: finding.level != "warning"))


def _about_versions(versions: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    """Packages outside what coremill was tested with: pip keeps to that, other ways of installing do not."""
    for name, (bounds, version) in versions.items():
        if not _is_within(version, bounds):
            yield Finding(
                level="note",
                subject=name,
                message=f"{version} is untested with this coremill, which was tested with {name}{bounds}",
                do=f"pip install '{name}{bounds}'",
            )


def _is_within(version: str, bounds: str) -> bool:
    """Bounds are of the form >=2.11,<2.14; of a version its numbers count."""
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", bounds):
        size = len(bound.split("."))
        is_below = _numbers(version)[:size] < _numbers(bound)
        if is_below != (sign == "<"):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))


def _about_cores(node: NodeFacts, surroundings: Surroundings) -> Iterator[Finding]:
    cores, cpus = len(node.cores), sum(len(core.cpus) for core in node.cores)
    if cpus > cores:
        yield Finding(
            level="note",
            subject="hardware threads",
            message=f"{cpus} hardware threads on {cores} cores; coremill computes with one per core, "
            "since siblings share the arithmetic units",
        )
    if surroundings.online_cpus > cpus:
        yield Finding(
            level="note",
            subject="affinity mask",
            message=f"this process may use {cpus} of the machine's {surroundings.online_cpus} cpus (mask or cpuset); "
            "coremill stays inside",
        )
    if node.cpu_quota is not None and node.cpu_quota < cores:
        lost = node.cpu_quota - node.usable_cores
        yield Finding(
            level="warning" if lost >= 0.1 else "note",
            subject="CPU quota",
            message=f"the cgroup grants {node.cpu_quota:g} CPUs of {cores} cores: {node.usable_cores} threads will run"
            + (f", {lost:.2g} CPUs of the quota stay unused" if lost >= 0.1 else ""),
            do="give the pod whole CPUs" if lost >= 0.1 else None,
        )
    if (busy := busy_with_others(node)) is not None:
        yield Finding(level="warning", subject="busy", message=busy.message, do=busy.do)
    governor = surroundings.governor
    if governor in ("powersave", "conservative") and surroundings.clock_driver not in _SELF_MANAGED_DRIVERS:
        yield Finding(
            level="warning",
            subject="clock",
            message=f"the CPU frequency governor is {governor}: the cores run below their clock",
            do="cpupower frequency-set -g performance",
        )


def _about_memory(node: NodeFacts) -> Iterator[Finding]:
    if node.memory_limit_bytes is not None and node.memory_limit_bytes < node.memory_total_bytes:
        yield Finding(
            level="note",
            subject="memory limit",
            message=f"the cgroup allows {format_bytes(node.memory_limit_bytes)} of "
            f"{format_bytes(node.memory_total_bytes)}; plans use the smaller number",
        )
    if node.huge_pages == "never":
        yield Finding(
            level="warning",
            subject="huge pages",
            message="transparent huge pages are off: large buffers cost a page fault every 4 kB",
            do="as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if not node.allocators:
        yield Finding(
            level="note",
            subject="allocator",
            message="neither tcmalloc nor jemalloc is installed; glibc returns large blocks to the kernel and pays "
            "for their pages anew",
            do="apt install libtcmalloc-minimal4, or dnf install gperftools-libs",
        )
    if all(interface.is_loopback for interface in node.interfaces):
        yield Finding(
            level="note",
            subject="network",
            message="no interface but loopback is up: this machine can only train by itself",
        )


def _about_arithmetic(node: NodeFacts, calibration: Calibration | None) -> Iterator[Finding]:
    if calibration is None:
        return
    if calibration.taken_while_busy:
        yield Finding(
            level="note",
            subject="measured while busy",
            message="the rates were measured while others used the machine; they are measured again after an hour",
        )
    emulated = calibration.bf16_emulated_flops_per_second
    if not node.has_bf16_units and emulated:
        fp32 = calibration.fp32_matmul_flops_per_second
        yield Finding(
            level="note",
            subject="bf16",
            message=f"no bf16 units: a bf16 product reaches {format_flops(emulated)}, {fp32 / emulated:,.0f} times "
            "less than fp32; coremill computes in fp32 here",
        )


def _about_environment(node: NodeFacts, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables set by hand that slow a process down or do nothing."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        threads = environ.get(name, "").partition(",")[0].strip()
        if threads.isdigit() and int(threads) < node.usable_cores:
            yield Finding(
                level="warning",
                subject=name,
                message=f"{name}={environ[name]} is set: any process that keeps it computes on {threads} of "
                f"{node.usable_cores} cores; coremill sets the count for its own ranks",
                do=f"unset {name}",
            )
    preloaded = [word for word in environ.get("LD_PRELOAD", "").replace(":", " ").split() if word]
    if "KMP_AFFINITY" in environ and not any("iomp" in library for library in preloaded):
        yield Finding(
            level="warning",
            subject="KMP_AFFINITY",
            message="KMP_AFFINITY only means something to Intel's OpenMP (libiomp5), which is not preloaded; "
            "torch wheels bring GNU OpenMP",
            do="unset KMP_AFFINITY",
        )
    for library in preloaded:
        if "/" in library and not Path(library).exists():
            yield Finding(
                level="warning",
                subject="LD_PRELOAD",
                message=f"{library} does not exist: every process complains and goes on without it",
                do="take it out of LD_PRELOAD",
            )
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        if environ.get(name, "").lower() not in ("", "default", "all"):
            yield Finding(
                level="warning",
                subject=name,
                message=f"{name}={environ[name]} keeps the kernels below what this CPU can do",
                do=f"unset {name}",
            )
    known = {interface.name for interface in node.interfaces}
    for interface in filter(None, dict.fromkeys(environ.get("GLOO_SOCKET_IFNAME", "").split(","))):
        if interface not in known:
            yield Finding(
                level="warning",
                subject="GLOO_SOCKET_IFNAME",
                message=f"names {interface}, which is not up here; ranks would fail to connect",
                do=f"use one of {', '.join(sorted(known))}" if known else None,
            )
