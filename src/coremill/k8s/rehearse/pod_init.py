"""The first process of a pod: it makes the pod's own view of the machine, gives its rights away, becomes the command.

    python -m coremill.k8s.rehearse.pod_init < ORDER        one JSON object (machine.py); no secret is in argv

Two processes: the outer one passes SIGTERM on and ends with the command's exit code (128 + N for a signal N, as
container runtimes have it); the inner one is process 1 of the pod. Each dies with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from coremill.child import die_with_parent
from coremill.k8s.rehearse import system_calls as calls

_NOT_STARTED = 128  # what container runtimes say
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def main() -> int:
    order = json.load(sys.stdin)
    die_with_parent(order["parent_pid"])
    for group in order["groups"]:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    if order["cpus"]:
        os.sched_setaffinity(0, order["cpus"])
    descriptor = os.open(order["network"], os.O_RDONLY)
    calls.enter(descriptor, calls.CLONE_NEWNET)
    os.close(descriptor)
    calls.unshare(calls.CLONE_NEWNS | calls.CLONE_NEWUTS | calls.CLONE_NEWIPC | calls.CLONE_NEWPID)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    inner = os.fork()
    if inner == 0:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            become(order)
        except BaseException as error:
            print(f"the container cannot be started: {error}", file=sys.stderr, flush=True)
        os._exit(_NOT_STARTED)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(inner, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    return 128 - code if code < 0 else code


def become(order: dict[str, Any]) -> None:
    socket.sethostname(order["hostname"])
    calls.mount("none", "/", "", calls.MS_REC | calls.MS_PRIVATE)
    root = Path(order["root"])
    calls.mount("tmpfs", str(root), "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, "mode=755")
    if order["image"] is not None:
        root = image_root(root, order["image"])
    make_root(root, order)
    if order["has_read_only_root"]:
        calls.mount("", str(root), "", calls.MS_REMOUNT | calls.MS_BIND | calls.MS_RDONLY | calls.MS_NOSUID)
    os.chdir(root)
    calls.mount(".", "/", "", calls.MS_MOVE)
    os.chroot(".")
    os.chdir(order["working_folder"])
    os.umask(0o022)
    calls.keep_capabilities(order["capabilities"])
    os.setgroups(order["more_groups"])
    os.setgid(order["group"])
    os.setuid(order["user"])
    if not order["may_gain_rights"]:
        calls.gain_no_rights()
    die_with_parent()  # only now: a process that changes its user is not told any more
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with open("/dev/null") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    os.execvpe(order["command"][0], order["command"], order["environ"])


def image_root(folder: Path, image: str) -> Path:
    """The image below, and above it what a runtime adds: places to mount at."""
    upper, work, root = (folder / name for name in ("upper", "work", "root"))
    for path in (upper, work, root):
        path.mkdir()
    calls.mount("overlay", str(root), "overlay", 0, f"lowerdir={image},upperdir={upper},workdir={work}")
    return root


def make_root(root: Path, order: dict[str, Any]) -> None:
    """Without an image: programs and libraries of this machine, read-only; the rest of it is not there."""
    for path in order["shown"]:
        show(root, Path(path))
    if order["image"] is None:
        mirror(root, Path("/etc"))
    for name in ("proc", "dev", "sys", "tmp", "run"):
        (root / name).mkdir(exist_ok=True)
    calls.mount("proc", str(root / "proc"), "proc", calls.MS_NOSUID | calls.MS_NODEV | calls.MS_NOEXEC)
    calls.bind("/sys", str(root / "sys"), read_only=True)
    for name in _DEVICES:
        (root / "dev" / name).unlink(missing_ok=True)  # an image may have a file there
        (root / "dev" / name).touch()
        calls.bind(f"/dev/{name}", str(root / "dev" / name), read_only=False)
    for name, target in (("fd", "self/fd"), ("stdin", "self/fd/0"), ("stdout", "self/fd/1"), ("stderr", "self/fd/2")):
        (root / "dev" / name).unlink(missing_ok=True)
        (root / "dev" / name).symlink_to(f"/proc/{target}")
    (root / "dev/shm").mkdir(exist_ok=True)
    calls.mount("tmpfs", str(root / "dev/shm"), "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, "mode=1777,size=64m")
    for source, target, read_only in order["mounts"]:
        place = root / target.lstrip("/")
        if Path(source).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        calls.bind(source, str(place), read_only=read_only)


def show(root: Path, path: Path) -> None:
    """A folder of this machine at its own path; above it only the way to it."""
    place = root / str(path).lstrip("/")
    if place.is_symlink() or place.exists() or not path.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        place.symlink_to(path.readlink())
        return
    place.mkdir() if path.is_dir() else place.touch()
    calls.bind(str(path), str(place), read_only=True)


def mirror(root: Path, folder: Path) -> None:
    """A folder whose entries are this machine's, and which takes more of them."""
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):  # what cannot be seen is not there
            show(root, entry)


if __name__ == "__main__":
    sys.exit(main())
