"""A pod's container as an OCI bundle, for runc: what kubelet and containerd would ask of it, from the manifest.

The bundle is config.json and a place for the root file system, in memory: config.json holds the environment, which may
hold secrets. No limits of processes are set (rlimits): raising them takes a right that is often withheld.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.k8s.rehearse.images import Image
from coremill.k8s.rehearse.pods import Container, Pod

RUNTIME = "runc"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # where an image names none
_SAFE = ["nosuid", "noexec", "nodev"]
# What runtimes hide of /proc and /sys, as containerd has it.
_MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug"),
    *("/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware"),
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the machine gives to a container beside the manifest."""

    network: str  # file of the namespace
    mounts: Sequence[tuple[str, str, bool]]  # path here, path in the container, read-only
    cpus: Sequence[int]
    environ: Mapping[str, str]
    group: str | None  # of its limits, as the runtime wants it; None: limits cannot be held here


def require_runtime() -> None:
    if shutil.which(RUNTIME) is None:
        raise InputError(
            "pods cannot be containers of an image here",
            where="--image",
            why=f"{RUNTIME} is not installed, which would run them",
            do=f"apt-get install {RUNTIME}, or leave --image out: pods then run the coremill of this machine",
        )


def make_bundle(folder: Path, image: Image, pod: Pod, container: Container, around: Surroundings) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(runtime_config(image, pod, container, around))
    (folder / "config.json").write_text(text)
    (folder / "config.json").chmod(0o600)


def runtime_config(image: Image, pod: Pod, container: Container, around: Surroundings) -> dict[str, Any]:
    """The bundle's config.json, by the OCI runtime specification 1.0."""
    rights = [f"CAP_{name.removeprefix('CAP_')}" for name in container.capabilities]
    environ = {"PATH": PATH, **image.environ, **around.environ, **container.environ}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {
                "uid": container.user,
                "gid": container.group,
                "additionalGids": list(container.more_groups),
                "umask": 0o022,
            },
            "args": list(container.command),
            "env": [f"{name}={value}" for name, value in environ.items()],
            "cwd": container.working_folder or image.working_folder,
            "capabilities": {kind: rights for kind in ("bounding", "effective", "permitted")},
            "noNewPrivileges": not container.may_gain_rights,
        },
        "root": {"path": "rootfs", "readonly": container.has_read_only_root},
        "hostname": pod.hostname,
        "mounts": [*_system_mounts(), *(_bind(*mount) for mount in around.mounts)],
        "linux": {
            "namespaces": [
                *({"type": kind} for kind in ("pid", "ipc", "uts", "mount", "cgroup")),
                {"type": "network", "path": around.network},
            ],
            **(
                {}
                if around.group is None
                else {"cgroupsPath": around.group, "resources": _resources(container, around.cpus)}
            ),
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
        },
    }


def _resources(container: Container, cpus: Sequence[int]) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "devices": [{"allow": False, "access": "rwm"}]
    }  # the runtime allows /dev/null and the like
    if container.memory_bytes is not None:
        limits["memory"] = {"limit": container.memory_bytes}
    if cpus:  # cores for itself, as kubelet's static CPU manager gives them
        limits["cpu"] = {"cpus": ",".join(str(cpu) for cpu in cpus)}
    return limits


def _system_mounts() -> list[dict[str, Any]]:
    def mount(target: str, kind: str, source: str, *options: str) -> dict[str, Any]:
        return {"destination": target, "type": kind, "source": source, "options": list(options)}

    return [
        mount("/proc", "proc", "proc", *_SAFE),
        mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        mount("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
        mount("/dev/shm", "tmpfs", "shm", *_SAFE, "mode=1777", "size=65536k"),
        mount("/dev/mqueue", "mqueue", "mqueue", *_SAFE),
        mount("/sys", "sysfs", "sysfs", *_SAFE, "ro"),
        mount("/sys/fs/cgroup", "cgroup", "cgroup", *_SAFE, "relatime", "ro"),
    ]


def _bind(source: str, target: str, read_only: bool) -> dict[str, Any]:
    options = ["rbind", "rprivate", "ro" if read_only else "rw"]
    return {"destination": target, "type": "bind", "source": source, "options": options}
