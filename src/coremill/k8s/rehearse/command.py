"""`coremill k8s rehearse`: the words of the command line become a rehearsal; the screen, the summary, the exit code."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from coremill.config.load import load_config
from coremill.errors import InputError, Interrupted
from coremill.files import write_whole
from coremill.hardware.probe import environment_snapshot
from coremill.k8s.check.manifests import holds_a_run, manifests_in, manifests_take_no_settings, read_manifests
from coremill.k8s.rehearse.container import RUNTIME, require_runtime
from coremill.k8s.rehearse.controllers import PlannedSet, plan_set
from coremill.k8s.rehearse.disruptions import parse_disruption
from coremill.k8s.rehearse.images import find_image
from coremill.k8s.rehearse.judging import Judgement, judge
from coremill.k8s.rehearse.machine import Machine, become_root, require_programs_in_sight, require_rights
from coremill.k8s.rehearse.pods import HUB_TOKEN, Pod, Secrets, make_pod
from coremill.k8s.rehearse.provisions import provisions_for, put_on_volume, readable_mounts
from coremill.k8s.rehearse.rehearsal import Rehearsal, Seen
from coremill.k8s.rehearse.run_in_pods import RunEvents, on_this_machine, run_file_of
from coremill.k8s.rehearse.written import WrittenObjects
from coremill.k8s.render import render_objects
from coremill.k8s.render_command import file_texts
from coremill.redaction import redact
from coremill.report.terminal import format_bytes, format_loss, format_seconds, print_line

_MARK = "rehearsal.json"  # in every folder of a rehearsal: what it was, or that it began
_LAST_LINES = 12


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    source: Path  # a run file, a file of manifests, or a folder of them
    settings: tuple[str, ...]
    reclaims: tuple[str, ...]
    kills: tuple[str, ...]
    image: str | None
    folder: Path | None
    as_json: bool


def rehearse(request: Request) -> int:
    """0: the job came to its end and nothing is wrong with what is written; 1: it did not, or something is."""
    screen = Console(stderr=request.as_json)
    folder = (request.folder or Path("runs") / f"{request.source.stem}-rehearsal").absolute()
    given = _read(request, folder)
    planned = plan_set(given.objects)
    disruptions = [parse_disruption("reclaim", text, planned.job.completions) for text in request.reclaims]
    disruptions += [parse_disruption("kill", text, planned.job.completions) for text in request.kills]
    secrets = Secrets(given.objects, environment_snapshot().get(HUB_TOKEN))
    sample = make_pod(planned.job, 0, "xxxxx", "0.0.0.0", given.objects, secrets)
    found = None if request.image is None else find_image(request.image)
    if found is not None:
        require_runtime()
    else:
        require_programs_in_sight(sample.container.mounts)
    require_rights()
    become_root()
    run_file = run_file_of(sample.container)
    provisions = provisions_for(run_file, sample.container, given.beside)
    with _owned(folder):
        volumes = _lay_out(folder, given, sample)
        if found is not None and found.unpacked is None:
            print_line(screen, f"{found.name} is unpacked in {folder / 'image'}, unless it is already")
        image = None if found is None else found.unpack(folder / "image")
        notes = [*given.notes, *planned.notes, *provisions.notes]
        notes += put_on_volume(provisions, sample.container, volumes)
        if secrets.hub_token is not None and sample.container.environ.get(HUB_TOKEN) == secrets.hub_token:
            notes.append(f"{HUB_TOKEN} of this shell stands for the Secret with the hub's token")
        run_folder = None if run_file is None else str(run_file.get("run.folder"))
        events = RunEvents(None if run_folder is None else on_this_machine(run_folder, sample.container, volumes))
        threads, words = _threads(planned, sample)
        # Without a way out the hub is not asked in vain.
        environ = {"HF_HUB_OFFLINE": "1"} if provisions.hub else {}
        mounts = readable_mounts(provisions, folder / "provided")
        with Machine(folder, volumes, mounts, image, environ) as machine:
            notes += [*words, *_of_the_machine(machine, planned, sample, given.objects)]
            for note in notes:
                print_line(screen, note, style="yellow" if note.startswith("warning:") else "")
            seen = _run(
                Rehearsal(planned, given.objects, secrets, machine, disruptions, events, threads, _Screen(screen).say)
            )
        judgement = judge(seen, planned, run_file)
        summary = {**judgement.summary, "notes": notes, "folder": str(folder), "run_folder": str(events.folder)}
        write_whole(folder / _MARK, json.dumps(summary, indent=2) + "\n")
    if request.as_json:
        print(json.dumps(summary, indent=2))
    _show(screen, judgement, seen, folder)
    return 0 if judgement.passed else 1


@dataclass(frozen=True)
class _Given:
    """The objects, each with the file it stands in, or will."""

    objects: WrittenObjects
    notes: tuple[str, ...]
    beside: Path | None  # the folder of the run file
    files: tuple[tuple[Path, str], ...]  # to be written: those that were rendered


def _read(request: Request, folder: Path) -> _Given:
    source = request.source
    if source.is_dir() or not holds_a_run(source):
        if request.settings:
            raise manifests_take_no_settings(f"CONFIG {source}")
        files = [source] if source.is_file() else sorted(source.glob("*.y*ml"))
        if not files:
            raise InputError(
                f"{source} has no manifests", where="CONFIG", do="name a run file, or a folder of YAML files"
            )
        return _Given(WrittenObjects(tuple(read_manifests([str(file) for file in files]))), (), None, ())
    rendered = render_objects(load_config(source, list(request.settings)))
    texts = tuple((folder / "manifests" / name, text) for name, text in file_texts(rendered))
    shown = [(os.path.relpath(path), text) for path, text in texts]
    manifests = [one for name, text in shown for one in manifests_in(text, name)]
    # Of paths of this machine the provisions say what becomes of them here.
    notes = tuple(one for one in rendered.notes if one.startswith("warning:") and "pods do not see" not in one)
    return _Given(WrittenObjects(tuple(manifests)), notes, source.parent, texts)


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """The folder of this rehearsal, and of no other at the same time; what an earlier one left in it goes."""
    mark = folder / _MARK
    if folder.exists() and any(folder.iterdir()) and not mark.is_file():
        raise InputError(
            f"{folder} is not empty, and not of a rehearsal",
            where="-o",
            why="a rehearsal begins with an empty volume: it would delete what is there",
            do="name another folder",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(mark, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written", where="-o", why=error.strerror, do="name another folder"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise InputError(
            f"a rehearsal is under way in {folder}", where="-o", do="wait for it, or name another"
        ) from error
    try:
        for name in ("volumes", "logs", "manifests", "temporary", "provided"):
            shutil.rmtree(folder / name, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def _lay_out(folder: Path, given: _Given, sample: Pod) -> Path:
    """The manifests as files, and an empty volume for each claim: its root is root's, as a Lustre root is."""
    for path, text in given.files:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, text)
    volumes = folder / "volumes"
    for container in (sample.container, *sample.init_containers):
        for mount in container.mounts:
            if mount.kind == "claim":
                (volumes / mount.name).mkdir(parents=True, exist_ok=True)
                if not sample.init_containers:  # nobody makes a folder for the pods: the volume is said to be theirs
                    os.chown(volumes / mount.name, sample.container.user, sample.container.group)
    return volumes


def _threads(planned: PlannedSet, sample: Pod) -> tuple[int, list[str]]:
    """Threads of a rank that this machine has room for, and a word where the manifest has more."""
    cpus = len(os.sched_getaffinity(0))
    ranks = planned.job.parallelism * int(sample.container.environ.get("PET_NPROC_PER_NODE", "1") or 1)
    most = max(1, cpus // ranks)
    written = sample.container.environ.get("OMP_NUM_THREADS", "")
    if not written.isdigit() or int(written) <= most:
        return most, []
    return most, [
        f"{most} thread{'' if most == 1 else 's'} a rank instead of {written}: {ranks} ranks share {cpus} CPUs here"
    ]


def _of_the_machine(machine: Machine, planned: PlannedSet, sample: Pod, objects: WrittenObjects) -> Iterator[str]:
    """What is different here from a cluster."""
    limit = sample.container.memory_bytes
    if machine.groups.why_not is not None:
        yield f"warning: memory limits are not held: {machine.groups.why_not}"
    elif limit is not None:
        have = psutil.virtual_memory().total
        words = f"each pod is held to {format_bytes(limit)} of memory"
        asked = planned.job.parallelism * limit
        yield words + (
            f"; together {format_bytes(asked)}, of which this machine has {format_bytes(have)}" if asked > have else ""
        )
    if next(objects.of_kind("NetworkPolicy"), None) is not None and not machine.has_filter:
        yield "warning: the NetworkPolicy is not held: nft is not installed (apt-get install nftables)"
    if next(objects.of_kind("LocalQueue"), None) is not None:
        yield "Kueue is not rehearsed: the job is admitted at once"
    if machine.image is None:
        yield f"pods run the coremill of this machine, not the image {sample.container.image} (--image)"
    else:
        yield f"pods are containers of {machine.image.name}, run by {RUNTIME}, for {sample.container.image}"


def _run(rehearsal: Rehearsal) -> Seen:
    """Ctrl-C and SIGTERM end it, and no pod stays."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        return rehearsal.run()
    except KeyboardInterrupt:
        raise Interrupted("the rehearsal was interrupted; its pods have been ended") from None
    finally:
        signal.signal(signal.SIGTERM, before)


class _Screen:
    """What each pod is doing, a line each."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.monotonic()

    def say(self, pod: int | None, text: str) -> None:
        who = "job   " if pod is None else f"pod {pod:<2}"
        print_line(self._console, f"{time.monotonic() - self._began:6.1f} s  {who}  {text}")


def _show(screen: Console, judgement: Judgement, seen: Seen, folder: Path) -> None:
    summary, times = judgement.summary, judgement.summary["times"]
    saved = times["longest_save_seconds"]
    if seen.state == "failed" and seen.last is not None:
        log = folder / "logs" / f"{seen.last.pod.name}.log"
        print_line(screen, f"the end of {log}:")
        for line in log.read_text(errors="replace").splitlines()[-_LAST_LINES:]:
            print_line(screen, f"  {redact(line)}")
    print_line(
        screen,
        f"{summary['state']}: {summary['steps']} steps, {summary['steps_lost']} lost, {summary['restarts']}"
        f" pods replaced ({summary['restarts_counted']} counted), loss {format_loss(summary['loss_last'])},"
        f" {format_seconds(summary['seconds'])}",
        style="bold",
    )
    if times["longest_end_after_sigterm_seconds"] is not None:
        print_line(
            screen,
            f"pods ended at most {format_seconds(times['longest_end_after_sigterm_seconds'])} after SIGTERM, of"
            f" {format_seconds(times['pod_grace_seconds'])} of grace"
            + ("" if saved is None else f"; a save took at most {format_seconds(saved)}"),
        )
    if times["longest_away_seconds"] is not None:
        print_line(
            screen,
            f"a pod was away for at most {format_seconds(times['longest_away_seconds'])}, and the others wait"
            f" {format_seconds(times['wait_for_hosts_seconds'])}: the start of a node comes on top",
        )
    for fault in judgement.faults:
        print_line(screen, f"wrong: {fault}", style="red")
    print_line(screen, f"{'passed' if judgement.passed else 'failed'}; logs, manifests and volume are in {folder}")
