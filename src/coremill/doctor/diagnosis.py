"""Everything the doctor found, as one value; made here, shown by screen.py, or printed as JSON."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coremill.doctor.findings import Finding, Surroundings, findings_of, installed_versions
from coremill.doctor.self_test import SelfTest, self_test
from coremill.errors import CoremillError
from coremill.hardware.calibrate import calibration_of, torch_version
from coremill.hardware.facts import Calibration, NodeFacts
from coremill.hardware.probe import cache_folder as cache_folder_of
from coremill.hardware.probe import environment_snapshot, probe_node, read_clock_driver, read_governor
from coremill.hardware.topology import online_cpus

NamedChoice = tuple[str, str, str]  # name, value, reason
Chooser = Callable[[NodeFacts, Calibration], Sequence[NamedChoice]]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What this machine is and can do, what coremill would choose on it, and whether the stack works."""

    node: NodeFacts
    surroundings: Surroundings
    calibration: Calibration | None  # None: measuring failed, see problems
    cache_folder: str
    versions: Mapping[str, str]
    choices: tuple[NamedChoice, ...]
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]  # what the doctor itself could not do
    self_test: SelfTest | None  # None: not asked for

    @property
    def healthy(self) -> bool:
        """Whether training can work here: the machine could be measured and the self-test passed."""
        return not self.problems and (self.self_test is None or self.self_test.passed)

    def to_json(self) -> dict[str, Any]:
        """The keys of `coremill doctor --json`."""
        node = self.node
        return {
            "healthy": self.healthy,
            "versions": dict(self.versions),
            "node": {
                **asdict(node),
                "usable_cores": node.usable_cores,
                "numa_nodes": list(node.numa_nodes),
                "memory_bytes": node.memory_bytes,
                "has_bf16_units": node.has_bf16_units,
                **asdict(self.surroundings),
            },
            "calibration": asdict(self.calibration) if self.calibration is not None else None,
            "cache_folder": self.cache_folder,
            "choices": {name: {"value": value, "reason": reason} for name, value, reason in self.choices},
            "findings": [asdict(finding) for finding in self.findings],
            "problems": list(self.problems),
            "self_test": None
            if self.self_test is None
            else {**asdict(self.self_test), "passed": self.self_test.passed},
        }


def diagnose(
    *,
    choose: Chooser | None = None,
    with_self_test: bool = True,
    refresh: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Probes, measures (or reads the cache), asks `choose` what coremill would do here, and runs the self-test.

    What fails is part of the result: a doctor that dies of the illness helps nobody.
    """
    say = progress or (lambda _: None)
    environ = environment_snapshot()
    folder = cache_folder_of(environ)
    node = probe_node()
    problems: list[str] = []
    calibration: Calibration | None = None
    choices: tuple[NamedChoice, ...] = ()
    tested: SelfTest | None = None
    try:
        calibration = calibration_of(node, folder, progress=progress, refresh=refresh)
    except CoremillError as error:
        problems.append(str(error))
    if calibration is not None and choose is not None:
        try:
            choices = tuple(choose(node, calibration))
        except CoremillError as error:
            problems.append(str(error))
    if with_self_test:
        say("self-test: starting two ranks")
        tested = self_test(node, environ, calibration)
    return assemble(
        node,
        calibration,
        environ=environ,
        surroundings=Surroundings(
            online_cpus=len(online_cpus()), governor=read_governor(), clock_driver=read_clock_driver()
        ),
        cache_folder=folder,
        choices=choices,
        problems=problems,
        tested=tested,
    )


def assemble(
    node: NodeFacts,
    calibration: Calibration | None,
    *,
    environ: Mapping[str, str],
    surroundings: Surroundings,
    cache_folder: Path,
    choices: Sequence[NamedChoice] = (),
    problems: Sequence[str] = (),
    tested: SelfTest | None = None,
) -> Diagnosis:
    """Puts together what was found elsewhere and adds the findings; starts nothing."""
    return Diagnosis(
        node=node,
        surroundings=surroundings,
        calibration=calibration,
        cache_folder=str(cache_folder),
        versions=_versions(),
        choices=tuple(choices),
        findings=findings_of(node, calibration, environ, surroundings),
        problems=tuple(problems),
        self_test=tested,
    )


def _versions() -> dict[str, str]:
    try:
        torch = torch_version()
    except CoremillError:
        torch = "not installed"
    packages = {name: version for name, (_, version) in installed_versions().items()}
    kernel = f"{platform.system()} {platform.release()}"
    return {**packages, "python": platform.python_version(), "torch": torch, "kernel": kernel}
