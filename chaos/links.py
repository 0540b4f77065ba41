"""X7, X8: the link between two hosts is cut, for ever or for some seconds. Hosts are network namespaces with sshd.

The cut is silent, as a switch that dies: each host believes the other at an address where nobody is, packets leave and
no answer comes. Nothing is closed and nothing is reset.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.namespaces import DEVICE, Fleet, fake_hosts, why_not

from chaos.campaign import STOPPED
from chaos.experiment import Rig, Trial
from chaos.running import Broken, Run, compare, environment, make_scene
from coremill.child import wrapped
from coremill.report.events import EventFollower

NOBODY = "02:00:00:00:00:99"
PEER_LOST = 69
WAIT_SECONDS = 20  # how long the run of X7 waits for the other host
OUTAGES = {"X8a": 2.0, "X8b": 8.0, "X8c": 20.0}

__all__ = ["links", "why_not"]


@dataclass
class HostsRun(Run):
    """The same run on two hosts, one rank each, started on the first."""

    fleet: Fleet | None = None
    words: tuple[str, ...] = field(default=())

    def start(self, *settings: str, **_: object) -> None:  # type: ignore[override]
        """`coremill train --hostfile`."""
        assert self.fleet is not None and self.process is None
        hostfile = self.fleet.hostfile("node1 slots=1", "node2 slots=1")
        command = [sys.executable, "-m", "coremill", "train", str(self.run_file), "--hostfile", str(hostfile)]
        for word in (f"run.folder={self.folder}", *self.settings, *settings):
            command += ["--set", word]
        command += ["--ssh", self.fleet.ssh]
        self._follower = self._follower or EventFollower(self.folder)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        inside = self.fleet.hosts[0].command(command, self.run_file.parent)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                wrapped(inside, launcher_pid=os.getpid(), cpus=None),
                env=environment(self.shared),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def links(rig: Rig, counts: dict[str, int]) -> Generator[tuple[str, Trial], None, str | None]:
    """Outages that heal on one run, which is compared in the end; one run for each that does not."""
    scene = make_scene(rig.shared)
    random = rig.random("links")
    hosts = rig.folder / "hosts"
    hosts.mkdir()
    with fake_hosts(2, hosts) as fleet:
        run = HostsRun(scene, rig.folder / "run", rig.shared, fleet=fleet)
        try:
            for key, seconds in OUTAGES.items():
                for _ in range(counts.get(key, 0)):
                    try:
                        yield key, _outage(run, fleet, seconds, random.randint(4, 10))
                    except Broken as error:
                        run.kill()
                        yield key, Trial(passed=False, fault=key, outcome=str(error))
            difference = _finish(run, fleet, rig) if any(counts.get(key) for key in OUTAGES) else None
        finally:
            run.kill()
        for number in range(counts.get("X7", 0)):
            yield "X7", _for_ever(rig, scene, fleet, number, random.randint(4, 10))
    return difference


def _cut(fleet: Fleet) -> None:
    for host, other in zip(fleet.hosts, reversed(fleet.hosts), strict=True):
        _ip(host.namespace, "neigh", "replace", other.address, "lladdr", NOBODY, "dev", DEVICE, "nud", "permanent")


def _heal(fleet: Fleet) -> None:
    for host, other in zip(fleet.hosts, reversed(fleet.hosts), strict=True):
        _ip(host.namespace, "neigh", "delete", other.address, "dev", DEVICE)


def _ip(namespace: str, *words: str) -> None:
    done = subprocess.run(["ip", "-n", namespace, *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise Broken(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _outage(run: HostsRun, fleet: Fleet, seconds: float, steps: int) -> Trial:
    if run.process is None:
        run.start()
    run.wait_steps(steps)
    since = time.time()
    done = run.last_step
    _cut(fleet)
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            run.look()
            time.sleep(0.05)
    finally:
        _heal(fleet)
    healed = time.time()
    run.wait_for(lambda: len(run.of("step", rank=0, since=healed)) >= 3, f"steps after an outage of {seconds:.0f} s")
    again = run.of("start", rank=0, since=since)
    faults = run.of("fault", since=since)
    first = run.of("step", rank=0, since=again[-1].time if again else healed)[0]
    restart_is_allowed = seconds >= OUTAGES["X8c"]
    return Trial(
        passed=restart_is_allowed or not faults,
        fault=f"link cut for {seconds:.0f} s",
        outcome="no restart" if not again else "restarted by itself",
        detected_seconds=faults[0].time - since if faults else None,
        resumed_seconds=first.time - since,
        steps_lost=max(0, done - int(first.number("step")) + 1) if again else 0,
    )


def _finish(run: HostsRun, fleet: Fleet, rig: Rig) -> str | None:
    if run.process is None:
        run.start()
    run.wait_steps(3)
    os.kill(run.launcher_pid, signal.SIGTERM)
    if (code := run.wait_end()) != STOPPED:
        return f"the run could not be stopped: {code}"
    last = run.newest()
    if last is None:
        return "no checkpoint is left"
    reference = HostsRun(run.run_file, rig.folder / "peace", rig.shared, fleet=fleet)
    try:
        reference.start(f"train.steps={last.step}")
        if (code := reference.wait_end()) != 0:
            return f"the undisturbed run ended with {code}"
        return compare(run, reference)
    finally:
        reference.kill()


def _for_ever(rig: Rig, scene: Path, fleet: Fleet, number: int, steps: int) -> Trial:
    """Odd ones may go on with one host, even ones may not."""
    alone = number % 2 == 1
    settings = [f"supervise.wait_for_hosts={WAIT_SECONDS}s", *(["fleet.min_nodes=1"] if alone else [])]
    run = HostsRun(scene, rig.folder / f"cut{number}", rig.shared, settings=settings, fleet=fleet)
    fault = "link cut for ever" + (", one host is enough" if alone else "")
    try:
        run.start()
        run.wait_steps(steps)
        since, done = time.time(), run.last_step
        _cut(fleet)
        try:
            if not alone:
                code = run.wait_end()
                faults = run.of("fault", since=since)
                return Trial(
                    passed=code == PEER_LOST,
                    fault=fault,
                    outcome="ended, the lost host named" if code == PEER_LOST else f"ended with {code}",
                    detected_seconds=faults[0].time - since if faults else None,
                    resumed_seconds=time.time() - since,
                    exit_code=code,
                    is_compared=False,
                )
            first = run.wait_for(
                lambda: (
                    [e for e in run.of("start", rank=0, since=since) if e.number("world_size") == 1]
                    and run.of("step", rank=0, since=run.of("start", rank=0, since=since)[-1].time)
                ),
                "a step on one host",
            )[0]
            faults = run.of("fault", since=since)
            return Trial(
                passed=True,
                fault=fault,
                outcome="went on with one host",
                detected_seconds=faults[0].time - since if faults else None,
                resumed_seconds=first.time - since,
                steps_lost=max(0, done - int(first.number("step")) + 1),
                is_compared=False,
            )
        finally:
            _heal(fleet)
    except Broken as error:
        return Trial(passed=False, fault=fault, outcome=str(error), is_compared=False)
    finally:
        run.kill()
