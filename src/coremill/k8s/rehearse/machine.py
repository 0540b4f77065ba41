"""What this machine gives to pods: a network each, their view of its files, and their limits.

Everything belongs to processes: networks and mounts are in namespaces of this process and of the pods, which the kernel
takes away with the last of them, and pods die with this process. Only memory groups have to be removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import coremill
from coremill.errors import CoremillError, InputError
from coremill.hardware.probe import environment_snapshot
from coremill.k8s.rehearse import pod_init
from coremill.k8s.rehearse import system_calls as calls
from coremill.k8s.rehearse.container import PATH, RUNTIME, Surroundings, make_bundle
from coremill.k8s.rehearse.images import Image
from coremill.k8s.rehearse.memory_groups import MemoryGroups
from coremill.k8s.rehearse.pods import Container, Mount, Pod

SUBNET = "10.231.0.0/16"
DEVICE = "eth0"  # as pods see it
_BRIDGE = "pods"
_PROGRAMS = ("ip", "nsenter", "unshare")
# Programs and libraries; homes, data and secrets of this machine are not for pods.
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/opt", "/nix")


def require_rights() -> None:
    """Programs and rights for namespaces; without them one message, before anything is made."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise InputError(
            "pods cannot be given a network of their own here",
            why=f"not installed: {', '.join(missing)}",
            do="apt-get install iproute2 util-linux",
        )
    tried = subprocess.run([*_as_root(), "unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        raise InputError(
            "this process may not make namespaces, and pods are made of them",
            why=tried.stderr.strip() or f"unshare ended with {tried.returncode}",
            do="run it as root, or as a user with lines in /etc/subuid and /etc/subgid and newuidmap installed "
            "(apt-get install uidmap); in a container it needs CAP_SYS_ADMIN",
        )


def _as_root() -> list[str]:
    """Whoever is not root becomes root of a user namespace, with the users that /etc/subuid leaves to them."""
    return [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--map-auto", "--"]


def become_root() -> None:
    """The same command again, in a user namespace, where this process is not root; else it returns."""
    if os.geteuid() != 0:
        argv = [*_as_root(), sys.executable, "-m", "coremill", *sys.argv[1:]]
        os.execvp(argv[0], argv)


@dataclass(frozen=True, kw_only=True)
class PodNetwork:
    """The network of one pod."""

    address: str
    file: str  # the namespace
    link: str  # this machine's end


class Machine:
    """For the time of a block; of what it makes nothing stays but the folder with volumes and logs."""

    def __init__(
        self,
        folder: Path,
        volumes: Path,
        extra: Sequence[tuple[str, str]],
        image: Image | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.volumes = volumes
        self.image = image  # None: pods see programs and packages of this machine
        self.extra = extra  # further read-only mounts: path here, path in pods
        self.environ = dict(environ or {})  # of all pods, beside the manifest's
        self.logs = folder / "logs"
        self._inside = folder / "machine"
        self._lives = 0
        self.has_filter = shutil.which("nft") is not None

    def __enter__(self) -> Machine:
        for path in (self.logs, self._inside, self.folder / "temporary"):
            path.mkdir(parents=True, exist_ok=True)
        self.groups = MemoryGroups()
        calls.unshare(calls.CLONE_NEWNET | calls.CLONE_NEWNS)
        calls.mount("none", "/", "", calls.MS_REC | calls.MS_PRIVATE)
        calls.mount("tmpfs", str(self._inside), "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, "mode=700")
        _run(["ip", "link", "set", "lo", "up"])
        _run(["ip", "link", "add", _BRIDGE, "type", "bridge"])
        _run(["ip", "link", "set", _BRIDGE, "up"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.groups.close()
        for name in ("temporary", "provided"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        _unmount(self._inside)
        with contextlib.suppress(OSError):
            self._inside.rmdir()

    def make_network(self) -> PodNetwork:
        """An address that no pod had before."""
        self._lives += 1
        high, low = divmod(self._lives, 250)
        network = PodNetwork(
            address=f"10.231.{high}.{low + 1}",
            file=str(self._inside / f"net-{self._lives}"),
            link=f"pod{self._lives}",
        )
        Path(network.file).touch()
        _run(["unshare", f"--net={network.file}", "true"])
        _run(["ip", "link", "add", network.link, "type", "veth", "peer", "name", DEVICE, "netns", network.file])
        _run(["ip", "link", "set", network.link, "master", _BRIDGE, "up"])
        lines = ["link set lo up", f"address add {network.address}/16 dev {DEVICE}", f"link set {DEVICE} up"]
        _run(["nsenter", f"--net={network.file}", "ip", "-batch", "-"], "\n".join(lines))
        return network

    def let_through(self, network: PodNetwork, rules: str) -> None:
        """The packet filter of a pod, inside its own network, where the pod may not change it."""
        _run(["nsenter", f"--net={network.file}", "nft", "-f", "-"], rules)

    def remove_network(self, network: PodNetwork) -> None:
        _unmount(Path(network.file))
        subprocess.run(["ip", "link", "delete", network.link], capture_output=True)

    def name_pods(self, pods: Sequence[tuple[Pod, str]], names: Mapping[str, Sequence[str]]) -> None:
        """What names lead to now, seen by pods at once, in /etc/hosts: those of the service, and a pod's own.

        `pods`: each with its address; `names`: address and what the headless service calls it.
        """
        shared = ["127.0.0.1 localhost", *(f"{address} {' '.join(words)}" for address, words in names.items())]
        for pod, address in pods:
            text = "".join(f"{line}\n" for line in (*shared, f"{address} {pod.hostname}")).encode()
            # In place: it is mounted into the pod by its inode.
            descriptor = os.open(self._hosts_of(pod), os.O_RDWR | os.O_CREAT, 0o644)
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
            os.close(descriptor)

    def _hosts_of(self, pod: Pod) -> Path:
        return self._inside / f"hosts-{pod.name}"

    def start(
        self, pod: Pod, container: Container, network: PodNetwork, cpus: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """A container in the namespaces of its pod; what it prints goes to the pod's log."""
        place = self._inside / pod.name / container.name
        place.mkdir(parents=True, exist_ok=True)
        order: dict[str, Any] = {"parent_pid": os.getpid(), "cpus": list(cpus)}
        if self.image is None:
            order |= self._order(place, pod, container, network)
        else:
            order |= {"groups": [], "bundle": self._bundle(place, self.image, pod, container, network, cpus)}
        with (self.logs / f"{pod.name}.log").open("ab") as log, _sigterm_held_back():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", pod_init.__name__],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode())
        process.stdin.close()
        return process

    def _order(self, root: Path, pod: Pod, container: Container, network: PodNetwork) -> dict[str, Any]:
        """For a pod that sees programs and packages of this machine."""
        command = list(container.command)
        environ = {"PATH": PATH, "HOSTNAME": pod.hostname, **self.environ, **container.environ}
        if command[0] == "coremill":  # of this installation
            command[:1] = [sys.executable, "-P", "-m", "coremill"]
            environ["PYTHONPATH"] = str(Path(coremill.__file__).resolve().parents[1])
        return {
            "bundle": None,
            "groups": self.groups.make(pod.name, pod.container.memory_bytes),
            "network": network.file,
            "hostname": pod.hostname,
            "root": str(root),
            "shown": shown_folders(),
            "mounts": self._mounts(pod, container),
            "command": command,
            "environ": environ,
            "working_folder": container.working_folder or "/",
            "user": container.user,
            "group": container.group,
            "more_groups": list(container.more_groups),
            "capabilities": list(container.capabilities),
            "has_read_only_root": container.has_read_only_root,
            "may_gain_rights": container.may_gain_rights,
        }

    def _bundle(
        self,
        folder: Path,
        image: Image,
        pod: Pod,
        container: Container,
        network: PodNetwork,
        cpus: Sequence[int],
    ) -> dict[str, Any]:
        """For a container of the image."""
        name = f"{pod.name}-{container.name}"
        around = Surroundings(
            network=network.file,
            mounts=self._mounts(pod, container),
            cpus=cpus,
            environ={"HOSTNAME": pod.hostname, **self.environ},
            group=self.groups.of_container(name),
        )
        make_bundle(folder, image, pod, container, around)
        return {
            "name": name,
            "folder": str(folder),
            "image": str(image.root),
            "runtime": shutil.which(RUNTIME),
            "state": str(self._inside / "containers"),
            "pid_file": str(folder / "pid"),
        }

    def _mounts(self, pod: Pod, container: Container) -> list[tuple[str, str, bool]]:
        found = [(source, target, True) for source, target in self.extra]
        for place, mount in enumerate(container.mounts):
            if mount.kind == "claim":
                source = self.volumes / mount.name
            elif mount.kind == "temporary":
                source = self.folder / "temporary" / pod.name / mount.name
                source.mkdir(parents=True, exist_ok=True)
                source.chmod(0o777)
            else:
                source = self._inside / pod.name / f"{container.name}-files-{place}"  # in memory: it may hold secrets
                source.mkdir(parents=True, exist_ok=True)
                for name, text in mount.files:
                    (source / name).write_text(text)
                for _, target in self.extra:  # what is mounted below it needs a place there
                    if Path(target).is_relative_to(mount.path):
                        (source / Path(target).relative_to(mount.path)).mkdir(parents=True, exist_ok=True)
            found.append((str(source), mount.path, mount.read_only))
        found.sort(key=lambda one: one[1].count("/"))  # an outer mount before what lies in it
        return [*found, (str(self._hosts_of(pod)), "/etc/hosts", True)]


@contextlib.contextmanager
def _sigterm_held_back() -> Iterator[None]:
    """What is started inherits that, until it can pass the signal on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def first_process(pid: int) -> int | None:
    """The process 1 of a pod, by its number here; `pid`: its parent's. None: it is not there, or not any more."""
    with contextlib.suppress(OSError, IndexError):
        inner = _child_of(pid)
        while (program := Path(f"/proc/{inner}/cmdline").read_text().split("\0")[0]).rpartition("/")[2] == RUNTIME:
            inner = _child_of(inner)  # of an image the runtime, and what has yet to become the command, are around it
        return inner if program else None
    return None


def hears(pid: int) -> bool:
    """Whether the process 1 of a pod handles SIGTERM, which it is otherwise deaf to; `pid`: its parent's."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{first_process(pid)}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGTERM - 1) & 1)
    return False


def _child_of(pid: int) -> int:
    """The first one, of any thread."""
    texts = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    return int(" ".join(texts).split()[0])


def shown_folders() -> list[str]:
    """What pods see of this machine without an image: the system's programs, and Python with its packages."""
    here = str(Path.cwd())  # `python -m` looks for packages here first: that is no reason to show it
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, *(path for path in sys.path if path != here)]
    own += [str(Path(coremill.__file__).resolve().parents[1]), str(Path(sys.executable).resolve().parent.parent)]
    environ = environment_snapshot()
    own += environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    real = [one for path in own if path and Path(path).is_dir() for one in (path, os.path.realpath(path))]
    kept: list[str] = []
    for path in sorted({*_SYSTEM_FOLDERS, *real}, key=len):
        if path != "/" and not any(Path(path).is_relative_to(outer) for outer in kept):
            kept.append(path)
    return kept


def require_programs_in_sight(mounts: Sequence[Mount]) -> None:
    """Of pods without an image: what the manifest mounts must not hide Python and its packages."""
    needed = (sys.prefix, sys.base_prefix, str(Path(coremill.__file__).resolve().parents[1]))
    for mount in mounts:
        hidden = next((path for path in needed if Path(path).is_relative_to(mount.path)), None)
        if hidden is not None:
            raise InputError(
                f"pods would not see {hidden}, which coremill runs from",
                why=f"the manifest mounts a volume of its own at {mount.path}",
                do=f"install coremill elsewhere than under {mount.path}, or name an image (--image)",
            )


def _run(command: list[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise CoremillError(
            "this machine does not give a pod what it needs",
            where=" ".join(command),
            why=done.stderr.strip(),
            do="see that the kernel has bridges, veth pairs and nf_tables, and that nothing forbids them to you",
        )


def _unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], capture_output=True)
