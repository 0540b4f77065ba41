"""The doctor's screen: a line per fact, in tables that fit a terminal and are never wrapped on a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from coremill.doctor.diagnosis import Diagnosis
from coremill.doctor.findings import Finding
from coremill.hardware.facts import Calibration, NodeFacts
from coremill.report.terminal import (
    format_bytes,
    format_flops,
    format_percent,
    format_seconds,
    print_heading,
    print_line,
    print_rows,
)

_ISA_NAMES = {
    "amx_bf16": "AMX (bf16)",
    "avx512_bf16": "AVX512_BF16",
    "avx512f": "AVX512",
    "avx2": "AVX2",
    "arm_bf16": "ARM BF16",
    "sve": "SVE",
}


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Shows all of it."""
    node = diagnosis.node
    print_heading(console, f"This machine: {node.hostname}")
    print_rows(console, "machine", ("", ""), _machine_rows(diagnosis), wrapped_column=1)
    if diagnosis.calibration is not None:
        print_heading(console, "Measured")
        rows = _measured_rows(diagnosis.calibration, diagnosis.cache_folder)
        print_rows(console, "measured", ("", ""), rows, wrapped_column=1)
    if diagnosis.choices:
        print_heading(console, "What coremill chooses here")
        print_rows(console, "choice", ("", "", ""), diagnosis.choices, wrapped_column=2)
    if diagnosis.findings:
        print_heading(console, "Worth knowing")
        for finding in diagnosis.findings:
            print_line(console, _finding_line(finding))
    if diagnosis.self_test is not None:
        print_heading(console, f"Self-test, {format_seconds(diagnosis.self_test.seconds)}")
        for check in diagnosis.self_test.checks:
            mark = Text("ok      ", style="green") if check.passed else Text("FAILED  ", style="bold red")
            print_line(console, Text.assemble(mark, f"{check.name}: {check.detail}"))
    for problem in diagnosis.problems:
        print_line(console, f"could not be done: {problem}", style="red")
    console.print()
    if diagnosis.healthy:
        print_line(console, "ready: coremill train", style="green")
    else:
        print_line(console, "not ready: see what failed above", style="bold red")


def _machine_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    node, surroundings, versions = diagnosis.node, diagnosis.surroundings, diagnosis.versions
    isa = ", ".join(_ISA_NAMES[name] for name in node.isa) or "none of AMX, AVX512_BF16, AVX512, AVX2, ARM BF16, SVE"
    libraries = [f"{name} {path}" for name, path in node.allocators]
    libraries += [f"libiomp5 {node.openmp}"] if node.openmp else []
    clock = f", governor {surroundings.governor}" if surroundings.governor else ""
    return [
        ("CPU", f"{node.cpu_model}, {node.architecture}{clock}"),
        ("cores", _cores_text(node)),
        ("limits", _limits_text(diagnosis)),
        ("memory", _memory_text(node)),
        ("instructions", isa),
        ("network", _network_text(node)),
        ("allocators", ", ".join(libraries) or "glibc only"),
        ("huge pages", node.huge_pages or "not known here"),
        ("load", f"others keep {format_percent(node.busy_fraction)} of the usable cores busy"),
        ("software", _software_text(versions)),
    ]


def _software_text(versions: Mapping[str, str]) -> str:
    transformers = f", transformers {versions['transformers']}" if "transformers" in versions else ""
    return f"Python {versions['python']}, torch {versions['torch']}{transformers}, {versions['kernel']}"


def _cores_text(node: NodeFacts) -> str:
    cpus = sum(len(core.cpus) for core in node.cores)
    sockets = len({core.socket for core in node.cores})
    cpus_of_node = {
        number: [cpu for core in node.cores if core.numa_node == number for cpu in core.cpus]
        for number in node.numa_nodes
    }
    numa = "; ".join(f"node {number}: cpus {cpu_ranges(cpus)}" for number, cpus in cpus_of_node.items())
    threads = f"{cpus} hardware threads" if cpus > len(node.cores) else "one hardware thread each"
    return (
        f"{_count(len(node.cores), 'physical core')} ({threads}), {_count(sockets, 'socket')}, "
        f"{_count(len(node.numa_nodes), 'NUMA node')} ({numa})"
    )


def _limits_text(diagnosis: Diagnosis) -> str:
    node, online = diagnosis.node, diagnosis.surroundings.online_cpus
    cpus = sum(len(core.cpus) for core in node.cores)
    mask = f"mask {cpus} of {online} cpus" if online > cpus else "mask: all cpus"
    quota = f"quota {node.cpu_quota:g} CPUs" if node.cpu_quota is not None else "no CPU quota"
    return f"{mask}, {quota}: {_count(node.usable_cores, 'core')} to compute with"


def _memory_text(node: NodeFacts) -> str:
    limit = f", limit {format_bytes(node.memory_limit_bytes)}" if node.memory_limit_bytes else ", no cgroup limit"
    return f"{format_bytes(node.memory_total_bytes)}, {format_bytes(node.memory_available_bytes)} available{limit}"


def _network_text(node: NodeFacts) -> str:
    return (
        ", ".join(
            f"{interface.name} {interface.address}"
            + (f" at {interface.bits_per_second / 1e9:g} Gbit/s" if interface.bits_per_second else "")
            for interface in node.interfaces
        )
        or "no interface is up"
    )


def _measured_rows(calibration: Calibration, cache_folder: str) -> list[tuple[str, str]]:
    fp32, bf16 = calibration.fp32_matmul_flops_per_second, calibration.bf16_matmul_flops_per_second
    emulated = calibration.bf16_emulated_flops_per_second
    if bf16:
        bf16_text = f"{format_flops(bf16)}, {bf16 / fp32:.1f} times fp32"
    elif emulated:
        bf16_text = f"{format_flops(emulated)} without units for it: {fp32 / emulated:,.0f} times slower than fp32"
    else:
        bf16_text = "not measured: no units for it"
    return [
        ("fp32 products", f"{format_flops(fp32)} on {_count(calibration.threads, 'thread')}"),
        ("bf16 products", bf16_text),
        ("copy", f"{format_bytes(calibration.copy_bytes_per_second)}/s, read plus written"),
        ("bare rank", f"{format_bytes(calibration.base_rss_bytes)} resident before any model"),
        ("origin", f"{calibration.origin}; kept in {cache_folder}"),
    ]


def _finding_line(finding: Finding) -> Text:
    style = "yellow" if finding.level == "warning" else "dim"
    line = Text.assemble((f"{finding.level:<8}", style), f"{finding.subject}: {finding.message}")
    return line.append(f" ({finding.do})", style="dim") if finding.do else line


def cpu_ranges(cpus: Sequence[int]) -> str:
    """0-3,8: the kernel's way to write a list of cpus."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
