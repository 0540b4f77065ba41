"""Hosts on one machine: network namespaces joined by a bridge, each with its own address, name and sshd.

Needs root (or the right to make namespaces), iproute2 and openssh-server; `make hosts-setup` installs them on Debian.
What a test may use is found out first: `why_not()` says in one line what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "eth0"  # what each host calls its end of the link
SUBNET = "10.231.77"
SSHD = "/usr/sbin/sshd"


@dataclass(frozen=True)
class FakeHost:
    """One namespace."""

    name: str
    address: str
    namespace: str
    sshd_pid: int
    link: str  # this machine's end of the host's link
    cpus: str | None = None  # those it may use, as taskset writes them; None: all

    def command(self, argv: list[str], folder: Path = Path("/")) -> list[str]:
        """Argv that runs inside this host: its network, its name, its hosts file, its processor."""
        inside = ["nsenter", "--target", str(self.sshd_pid), "--net", "--uts", "--mount"]
        return [*inside, "--", *_on(self.cpus), "env", "-C", str(folder), *argv]

    @property
    def sent_bytes(self) -> int:
        """All it has sent so far, packet headers included; what arrives at this end of its link."""
        return int(Path(f"/sys/class/net/{self.link}/statistics/rx_bytes").read_text())


@dataclass(frozen=True)
class Fleet:
    """Several hosts and how to get to them."""

    hosts: tuple[FakeHost, ...]
    folder: Path

    @property
    def ssh(self) -> str:
        """The ssh command that reaches them without a question."""
        return f"ssh -F {self.folder / 'ssh_config'}"

    def hostfile(self, *lines: str) -> Path:
        """A hostfile of these lines; without any, of the hosts' names."""
        path = self.folder / "hostfile"
        path.write_text("".join(f"{line}\n" for line in lines or [host.name for host in self.hosts]))
        return path

    def run(
        self, argv: list[str], *, on: int = 0, timeout: float = 280, folder: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside one of the hosts."""
        return subprocess.run(
            self.hosts[on].command(argv, folder or self.folder),
            env={**clean_environment(), **environ},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def launch(self, *words: str, on: int = 0, **options: object) -> subprocess.CompletedProcess[str]:
        """`coremill launch WORDS` inside one of the hosts."""
        return self.run([sys.executable, "-m", "coremill", "launch", "--ssh", self.ssh, *words], on=on, **options)  # type: ignore[arg-type]

    def left_behind(self, mark: str) -> list[str]:
        """Command lines of processes that have the mark in theirs or in their environment, on any of the hosts."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes()
                if int(folder.name) != os.getpid() and (
                    mark.encode() in command or mark.encode() in (folder / "environ").read_bytes()
                ):
                    found.append(command.replace(b"\0", b" ").decode(errors="replace"))
        return found

    def assert_nothing_left(self, mark: str, within_seconds: float = 120) -> None:
        """No process of a run is left, on any host."""
        deadline = time.monotonic() + within_seconds
        while (left := self.left_behind(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == []


def clean_environment() -> dict[str, str]:
    """Ours, without what would choose things for the launcher."""
    dropped = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}


def why_not() -> str | None:
    """Why there can be no hosts here; None: there can."""
    missing = [name for name in ("ip", "ssh", "ssh-keygen", "nsenter", "unshare") if shutil.which(name) is None]
    if not Path(SSHD).exists():
        missing.append("sshd")
    if missing:
        return f"{', '.join(missing)} not installed (make hosts-setup)"
    name = f"coremill-try-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode != 0:
        return f"no right to make network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return None


@contextlib.contextmanager
def fake_hosts(
    count: int, folder: Path, *, link_bits_per_second: float | None = None, cpus: Sequence[str] = ()
) -> Iterator[Fleet]:
    """Hosts node1, node2, ... for the time of the block; nothing of them is left afterwards.

    Links have the given rate each way; hosts get one each of `cpus`, in turn: a processor, or several as taskset writes
    them.
    """
    mark = str(os.getpid())
    bridge = f"cm{mark}"
    with contextlib.ExitStack() as undo:
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "delete", bridge, check=False)
        _ip("link", "set", bridge, "up")
        _write_ssh_files(folder, count)
        names = "".join(f"{SUBNET}.{index} node{index}\n" for index in range(1, count + 1))
        hosts = []
        for index in range(1, count + 1):
            namespace = f"coremill-{mark}-{index}"
            _ip("netns", "add", namespace)
            undo.callback(_ip, "netns", "delete", namespace, check=False)
            _ip("link", "add", f"cm{mark}-{index}", "type", "veth", "peer", "name", DEVICE, "netns", namespace)
            # A namespace goes when its last process does; the link must not outlive this block with it.
            undo.callback(_ip, "link", "delete", f"cm{mark}-{index}", check=False)
            _ip("link", "set", f"cm{mark}-{index}", "master", bridge, "up")
            _ip("-n", namespace, "address", "add", f"{SUBNET}.{index}/24", "dev", DEVICE)
            _ip("-n", namespace, "link", "set", DEVICE, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            if link_bits_per_second is not None:
                _shape("-n", namespace, "qdisc", "add", "dev", DEVICE, rate=link_bits_per_second)
                _shape("qdisc", "add", "dev", f"cm{mark}-{index}", rate=link_bits_per_second)
            etc = Path("/etc/netns") / namespace  # iproute2 lays these files over /etc inside
            etc.mkdir(parents=True)
            undo.callback(shutil.rmtree, etc, ignore_errors=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            mine = cpus[(index - 1) % len(cpus)] if cpus else None
            process = _start_sshd(namespace, f"node{index}", folder, mine)
            undo.callback(_end, process)
            address, link = f"{SUBNET}.{index}", f"cm{mark}-{index}"
            hosts.append(FakeHost(f"node{index}", address, namespace, process.pid, link, mine))
        fleet = Fleet(tuple(hosts), folder)
        for host in hosts:
            _wait_for_sshd(fleet, host)
        yield fleet


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _shape(*words: str, rate: float) -> None:
    """A token bucket: 1 ms worth of it, and at least two of the largest packets that TCP hands down in one piece."""
    burst = max(2 * 65536, int(rate / 8 / 1000))
    shape = ["root", "tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "latency", "50ms"]
    done = subprocess.run(["tc", *words, *shape], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"tc {' '.join([*words, *shape])}: {done.stderr.strip()}")


def _on(cpus: str | None) -> list[str]:
    return [] if cpus is None else ["taskset", "--cpu-list", cpus]


def _write_ssh_files(folder: Path, count: int) -> None:
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\nPrintMotd no\nMaxStartups 64\n"
    )
    names = " ".join(f"node{index} {SUBNET}.{index}" for index in range(1, count + 1))
    (folder / "ssh_config").write_text(
        f"Host {names}\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n"
        "Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )


def _start_sshd(namespace: str, hostname: str, folder: Path, cpus: str | None) -> subprocess.Popen[bytes]:
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists
    # exec all the way: the process we hold is sshd itself, inside the namespaces.
    program = f"hostname {hostname} && exec {SSHD} -D -e -f {folder}/sshd_config"
    return subprocess.Popen(
        [*_on(cpus), "ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / f"sshd-{hostname}.log").open("wb"),
        start_new_session=True,
    )


def _wait_for_sshd(fleet: Fleet, host: FakeHost) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        done = subprocess.run(
            host.command(["bash", "-c", f"exec 3<>/dev/tcp/{host.address}/22"]), capture_output=True, timeout=60
        )
        if done.returncode == 0:
            return
        time.sleep(0.1)
    log = (fleet.folder / f"sshd-{host.name}.log").read_text()
    raise RuntimeError(f"the sshd of {host.name} does not answer: {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
