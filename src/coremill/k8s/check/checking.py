"""The check itself: every object against its schema and rules, then all of them together against the lints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coremill.k8s.check.core_kinds import core_kind, groups_of, is_core_group
from coremill.k8s.check.crds import Kind, Schemas
from coremill.k8s.check.defaulting import with_defaults
from coremill.k8s.check.findings import Finding, Problem, shown
from coremill.k8s.check.lints import lint
from coremill.k8s.check.manifests import Manifest
from coremill.k8s.check.object_meta import metadata_problems
from coremill.k8s.check.rules import rule_problems
from coremill.k8s.check.structure import BLOCKING, Schema, Structure

_ROOT = ("apiVersion", "kind", "metadata")


@dataclass(frozen=True)
class Outcome:
    """What was found, and what could not be looked at."""

    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...]  # in words: which object, why
    objects: int
    releases: tuple[str, ...]  # whose schemas were used

    @property
    def errors(self) -> int:
        return sum(finding.problem.level == "error" for finding in self.findings)

    @property
    def warnings(self) -> int:
        return len(self.findings) - self.errors

    def summary(self) -> str:
        """One line: how many of what, against which releases."""
        counted = [(self.objects, "object"), (self.errors, "error"), (self.warnings, "warning")]
        words = [f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counted]
        words += [f"{len(self.unchecked)} not checked"] if self.unchecked else []
        against = f" against {', '.join(self.releases)}" if self.releases else ""
        return f"{', '.join(words)}{against}"

    def to_json(self) -> dict[str, Any]:
        return {
            "objects": self.objects,
            "errors": self.errors,
            "warnings": self.warnings,
            "findings": [finding.to_json() for finding in self.findings],
            "unchecked": list(self.unchecked),
            "releases": list(self.releases),
        }


def check(manifests: list[Manifest], schemas: Schemas, wanted: Mapping[str, str]) -> Outcome:
    """All findings, in the order of objects and lines. `wanted` releases go before those a run file names."""
    findings: list[Finding] = []
    unchecked: list[str] = []
    releases: set[str] = set()
    for manifest in manifests:
        verdict = check_object(manifest, schemas, {**manifest.releases, **wanted})
        findings += map(manifest.finding, verdict.problems)
        unchecked += (f"{manifest.file}: {manifest.name}: {reason}" for reason in verdict.unchecked)
        releases |= {verdict.release} - {""}
    findings += lint(manifests)
    order = {(manifest.file, manifest.name): number for number, manifest in enumerate(manifests)}
    findings.sort(key=lambda one: (order[one.file, one.object], one.line or 0, one.problem.level, one.problem.path))
    return Outcome(tuple(dict.fromkeys(findings)), tuple(unchecked), len(manifests), tuple(sorted(releases)))


@dataclass(frozen=True)
class Verdict:
    """What an API server would say of one object."""

    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...] = ()
    release: str = ""


def check_object(manifest: Manifest, schemas: Schemas, wanted: Mapping[str, str]) -> Verdict:
    """Structure, metadata and CEL rules of one object."""
    missing = [key for key in ("apiVersion", "kind") if not isinstance(manifest.object.get(key), str)]
    if missing:
        return Verdict(tuple(Problem(key, "required", "missing", "every object names it") for key in missing))
    twice = tuple(Problem(path, "duplicate", "this key stands twice", "keep one") for path in manifest.repeated)
    group, version, kind = manifest.group, manifest.version, manifest.kind
    found = schemas.kind_of(group, version, kind, wanted)
    if found is None and is_core_group(group):
        return _check_core(manifest, twice, wanted.get("kubernetes"))
    if found is not None:
        unchecked: set[str] = set()
        problems = [*twice, *_custom_problems(manifest.object, found, unchecked)]
        if found.successor:
            fix = f"write apiVersion: {group}/{found.successor}"
            problems.append(Problem("apiVersion", "deprecated", f"{version} is deprecated", fix, "warning"))
        hinted = tuple(_with_releases(problem, manifest, schemas, found) for problem in problems)
        return Verdict(hinted, tuple(sorted(unchecked)), found.release)
    for release in schemas.chosen(wanted):
        if served := release.versions_of(group, kind):
            fix = f"write apiVersion: {group}/{served[-1]}"
            return Verdict((Problem("apiVersion", "version", f"{release} serves no {shown(version)}", fix),))
    return Verdict(twice, (f"no schema for {group}/{version} {kind} among those {schemas.origin}",))


def _check_core(manifest: Manifest, twice: tuple[Problem, ...], release: str | None) -> Verdict:
    found = core_kind(manifest.group, manifest.version, manifest.kind, release)
    if found is None:
        others = groups_of(manifest.kind, release)
        if others:
            text = f"{manifest.api_version} has no {manifest.kind}"
            return Verdict((Problem("apiVersion", "version", text, f"it is in {', '.join(others)}"),))
        return Verdict(twice, (f"no schema for {manifest.api_version} {manifest.kind} in kubernetes-validate",))
    value = {key: one for key, one in manifest.object.items() if key != "metadata"}
    problems = [*found.structure.problems(value, found.schema)]
    named = metadata_problems(manifest.object.get("metadata"), namespaced=found.namespaced)
    return Verdict((*twice, *named, *problems), (), found.release)


def _custom_problems(value: dict[str, Any], kind: Kind, unchecked: set[str]) -> Iterator[Problem]:
    filled = with_defaults(_without_status(value) if kind.has_status else value, kind.schema)
    problems = list(metadata_problems(value.get("metadata"), namespaced=kind.namespaced))
    problems += Structure().problems({**filled, "metadata": {}}, _root_schema(kind.schema))
    if kind.has_status and "status" in value:
        status = kind.schema.get("properties", {}).get("status", {})
        found = Structure().problems(value["status"], status, "status")
        problems += (each for each in found if each.rule == "unknown-field")
    yield from problems
    if not any(problem.rule in BLOCKING for problem in problems):
        yield from rule_problems(filled, kind.schema, unchecked)


def _without_status(value: dict[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in value.items() if key != "status"}


def _root_schema(schema: Schema) -> Schema:
    """A whole object also has what every object has; its metadata is checked apart."""
    properties = {**schema.get("properties", {}), "apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    return {**schema, "properties": {**properties, "metadata": {"type": "object"}}}


def _with_releases(problem: Problem, manifest: Manifest, schemas: Schemas, kind: Kind) -> Problem:
    """An unknown field that another release knows is most likely meant for that one."""
    if problem.rule != "unknown-field":
        return problem
    others = schemas.releases_with_field(manifest.group, manifest.version, manifest.kind, problem.path)
    if not others:
        return problem
    names, first = ", ".join(map(str, others)), others[0]
    hint = f"check with --release {first.product}={first.version}" if first.version else "check with that one"
    fix = f"{names} has it: {hint} if your cluster runs it; {problem.fix}"
    return Problem(problem.path, problem.rule, f"{problem.text} in {kind.release}", fix)
