"""Images for tests: a shell and little else, as a root file system and as an archive."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coremill.k8s.rehearse.unpack import MACHINES

PROGRAMS = ("sh", "ls", "touch", "install", "id", "grep", "cat", "sleep")
Entry = tuple[str, str | bytes | None]  # a path and what is there: bytes, the target of a link, None for a folder


def tiny_root(root: Path, programs: Sequence[str] = PROGRAMS) -> Path:
    for name in ("bin", "etc", "opt/tools"):
        (root / name).mkdir(parents=True)
    for program in programs:
        found = str(shutil.which(program))
        shutil.copy(found, root / "bin" / program)
        listed = subprocess.run(["ldd", found], capture_output=True, text=True).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            (root / library.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, root / library.lstrip("/"))
    (root / "opt/tools/greet").write_text("#!/bin/sh\necho from the image as $HOSTNAME\n")
    (root / "opt/tools/greet").chmod(0o755)
    return root


def layer(*entries: Entry) -> bytes:
    """One layer from a list of paths."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in entries:
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return stream.getvalue()


def layer_of(root: Path) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(root, ".")
    return stream.getvalue()


def oci_archive(file: Path, layers: Sequence[bytes], config: dict[str, Any] | None = None) -> Path:
    """As `buildah push NAME oci-archive:FILE` writes it, with an image for another machine in front."""
    blobs: dict[str, bytes] = {}

    def put(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"digest": f"sha256:{digest}", "size": len(content)}

    manifests = []
    for architecture in ("s390x", *MACHINES.values()):
        own = put(json.dumps({"architecture": architecture, "config": config or {}}).encode())
        of_machine = [] if architecture == "s390x" else list(layers)
        manifest = put(json.dumps({"config": own, "layers": [put(one) for one in of_machine]}).encode())
        manifests.append({**manifest, "platform": {"architecture": architecture, "os": "linux"}})
    blobs["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    blobs["index.json"] = json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()
    with tarfile.open(file, "w") as archive:
        for name, content in blobs.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file
