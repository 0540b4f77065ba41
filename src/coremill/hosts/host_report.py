"""What a host says of itself before a run starts on it: versions, clock, files, port, interfaces, memory.

    ssh HOST python -m coremill.hosts.host_report       stdin: the questions (JSON), stdout: the answers (JSON)

Standard library, psutil and coremill's probe; torch is not imported (2 s), its version is read from its metadata.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from coremill import __version__
from coremill.hardware.probe import probe_node, read_interfaces
from coremill.world.sockets import interface_towards

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate")  # ranks of different versions differ in what they send


def report(questions: dict[str, Any]) -> dict[str, Any]:
    arrived = time.time()
    node = probe_node(busy_seconds=0)
    folder = Path(questions["folder"])
    master = questions.get("master_address")
    return {
        "hostname": socket.gethostname(),
        "versions": versions(),
        "time": arrived,
        "folder": folder.is_dir(),
        "files": {name: digest(folder / name) for name in questions["files"]},
        "interfaces": {face.name: face.address for face in read_interfaces()},
        "interface": None if master is None else interface_towards(master),
        **free_port(questions["ports"]),
        "cores": node.usable_cores,
        "numa_nodes": len(node.numa_nodes),
        "memory_available_bytes": node.memory_available_bytes,
    }


def versions() -> dict[str, str]:
    """Of everything that must be the same on all hosts."""
    found = {"coremill": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def public_version(version: str) -> str:
    """Without the local part: torch 2.13.0 and 2.13.0+cpu compute the same on CPUs."""
    return version.partition("+")[0]


def digest(path: Path) -> str | None:
    """Of a file's content; None where there is no such file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def free_port(ports: Sequence[int]) -> dict[str, Any]:
    """The first of them that rank 0 could listen on, or why it could on none."""
    problem = None
    for port in ports:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            return {"port": port, "port_problem": None}
    return {"port": None, "port_problem": problem}


if __name__ == "__main__":
    json.dump(report(json.load(sys.stdin)), sys.stdout)
