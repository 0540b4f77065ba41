"""The system calls that Python 3.11 has no name for: namespaces, mounts, capabilities. Standard library only."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 32, 4096, 8192, 16384, 1 << 18
_MS_NOATIME, _MS_NODIRATIME, _MS_RELATIME = 1024, 2048, 1 << 21
# What statvfs says of a mount, as mount() wants it: a mount of others keeps these, or the kernel refuses.
_KEPT = (
    (2, MS_NOSUID),
    (4, MS_NODEV),
    (8, MS_NOEXEC),
    (1024, _MS_NOATIME),
    (2048, _MS_NODIRATIME),
    (4096, _MS_RELATIME),
)
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
# By their numbers; kubelet knows them without CAP_.
_NAMES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER"),
    *("SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE"),
    *("SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP"),
)
CAPABILITIES = {name: number for number, name in enumerate(_NAMES)}
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def enter(descriptor: int, kind: int) -> None:
    """Into a namespace that is there."""
    _check(_libc.setns(descriptor, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(done, f"mount {source} at {target}")


def bind(source: str, target: str, *, read_only: bool) -> None:
    """What is at one path also at another; what is mounted below it too."""
    mount(source, target, "", MS_BIND | MS_REC)
    if read_only:
        have = os.statvfs(target).f_flag
        kept = sum(flag for said, flag in _KEPT if have & said)
        mount("", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def keep_capabilities(names: list[str]) -> None:
    """No program started from here on has any other, as root neither."""
    kept = {CAPABILITIES[name.removeprefix("CAP_")] for name in names}
    number = 0
    while number in kept or _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1  # up to the last that this kernel knows


def gain_no_rights() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
