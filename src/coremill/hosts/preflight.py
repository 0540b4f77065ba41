"""Looks at every host before anything starts: one line per host that is not ready, and nothing is left running.

Hosts are asked side by side; a host that does not answer costs its ssh timeout once, not once per host.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.hosts.host_report import digest, public_version, versions
from coremill.hosts.ssh import Host, Remote

ANSWER_SECONDS = 90.0  # a Python start from a cold network file system
# Leases and file times are compared between hosts; torch's elastic rendezvous takes a node for dead at 15 s.
CLOCK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What every host must have."""

    folder: Path
    files: tuple[str, ...]  # that must be the same everywhere, relative to the folder or absolute
    master: Host
    ports: tuple[int, ...]  # to choose from; one where the user chose
    interface: str | None
    memory_bytes_per_rank: int | None = None  # needed, where known


@dataclass(frozen=True, kw_only=True)
class HostAnswer:
    """What one host said, and what is wrong with it."""

    host: Host
    report: dict[str, Any] | None
    problem: str | None  # one line


def check_hosts(hosts: Sequence[Host], remote: Remote, questions: Questions) -> list[HostAnswer]:
    """Ask all hosts; raises InputError with one line per bad host."""
    here = {"versions": versions(), "files": {name: digest(questions.folder / name) for name in questions.files}}
    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        answers = list(pool.map(lambda host: _ask(host, remote, questions, here), hosts))
    bad = [answer.problem for answer in answers if answer.problem is not None]
    if bad:
        raise InputError("\n".join(bad))
    return answers


def _ask(host: Host, remote: Remote, questions: Questions, here: dict[str, Any]) -> HostAnswer:
    asked = {
        "folder": str(questions.folder),
        "files": list(questions.files),
        "master_address": questions.master.address,
        "ports": list(questions.ports) if host == questions.master else [],
    }
    before = time.time()
    try:
        done = subprocess.run(
            remote.command(host, "coremill.hosts.host_report"),
            input=json.dumps(asked),
            env=dict(remote.environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
        )
    except OSError:
        return _bad(host, _no_python(remote))
    except subprocess.TimeoutExpired:
        return _bad(host, f"no answer within {ANSWER_SECONDS:.0f} s; is its file system or its login hanging?")
    if done.returncode != 0:
        return _bad(host, _why_no_answer(done, remote))
    try:
        report = json.loads(done.stdout[done.stdout.index("{") :])  # after what a login script may print
    except ValueError:
        return _bad(host, f"answered {done.stdout[:80]!r}; is something printed by its login scripts?")
    problem = _problem(host, report, questions, here, before, time.time())
    return HostAnswer(host=host, report=report, problem=None if problem is None else f"host {host.name}: {problem}")


def _bad(host: Host, problem: str) -> HostAnswer:
    return HostAnswer(host=host, report=None, problem=f"host {host.name}: {problem}")


def _why_no_answer(done: subprocess.CompletedProcess[str], remote: Remote) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {done.returncode}"
    if done.returncode == 255:
        # The last line is ssh's verdict; warnings about known hosts stand above it.
        return f"cannot be reached by ssh: {last.removeprefix('ssh: ')}"
    if done.returncode in (126, 127):
        return _no_python(remote)
    if "No module named 'coremill.hosts" in last or "No module named coremill.hosts" in last:
        return f"has another version of coremill for {remote.python}; install the same one"
    if "No module named" in last:
        return f"coremill is not installed for {remote.python} there ({last})"
    return f"could not be asked: {last}"


def _no_python(remote: Remote) -> str:
    return f"has no {remote.python}; install the same environment there, or name the interpreter with --python"


def _problem(
    host: Host, report: dict[str, Any], questions: Questions, here: dict[str, Any], before: float, after: float
) -> str | None:
    """The first thing that is wrong, in one line."""
    differing = [
        f"{name} {report['versions'].get(name, 'none')} (here {version})"
        for name, version in here["versions"].items()
        if public_version(report["versions"].get(name, "none")) != public_version(version)
    ]
    if differing:
        return f"has other versions: {', '.join(differing)}; install the same ones"
    off = max(before - report["time"], report["time"] - after, 0.0)
    if off > CLOCK_SECONDS:
        return f"its clock is {off:.0f} s off; synchronise it (chrony, systemd-timesyncd)"
    if not report["folder"]:
        return f"has no folder {questions.folder}; share it between the hosts, or copy it there"
    for name, own in here["files"].items():
        theirs = report["files"].get(name)
        if theirs is None:
            return f"has no file {name} in {questions.folder}; share the folder, or copy it there"
        if theirs != own:
            return f"{name} is another version of the file than here; copy it there"
    if questions.interface is not None and questions.interface not in report["interfaces"]:
        names = ", ".join(report["interfaces"]) or "none"
        return f"has no interface {questions.interface} that is up; it has {names}"
    if report["port_problem"] is not None:
        return f"port {questions.ports[-1]} cannot be used for the rendezvous: {report['port_problem']}; choose another"
    needed = host.ranks * (questions.memory_bytes_per_rank or 0)
    free = report["memory_available_bytes"]
    if free < needed:
        return f"has {free / 1e9:.1f} GB of memory free, the ranks there need {needed / 1e9:.1f} GB"
    return None
