"""An image as a registry would hold it becomes a root file system: layers over each other, whiteouts, owners.

    python -m coremill.k8s.rehearse.unpack LAYOUT ROOT

LAYOUT is an OCI layout: a folder, or an archive of one (buildah push NAME oci-archive:FILE, docker save). Layers are
unpacked inside ROOT as their root (chroot), so that no link in them leads out of it.
"""

from __future__ import annotations

import bz2  # noqa: F401  (tarfile asks for these when it needs them, and inside ROOT they are not to be found)
import gzip  # noqa: F401
import json
import lzma  # noqa: F401
import os
import platform
import shutil
import sys
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, Any

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # as images call them
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


class Layout:
    """An OCI layout, in a folder or an archive. What it lacks is an OSError, what it is not a KeyError."""

    def __init__(self, path: Path) -> None:
        self._folder = path if path.is_dir() else None
        self._archive = None if path.is_dir() else tarfile.open(path)  # noqa: SIM115  (for as long as this process is)
        self.manifest = self._find(self.json("index.json"))
        self.digest = str(self.manifest["config"]["digest"])
        self.config = self.json(_blob(self.digest))

    def open(self, name: str) -> IO[bytes]:
        if self._folder is not None:
            return (self._folder / name).open("rb")
        assert self._archive is not None
        for one in (name, f"./{name}"):
            if one in self._archive.getnames() and (found := self._archive.extractfile(one)) is not None:
                return found
        raise FileNotFoundError(f"there is no {name} in it")

    def json(self, name: str) -> Any:
        with self.open(name) as file:
            return json.load(file)

    def _find(self, index: dict[str, Any]) -> dict[str, Any]:
        """The manifest for this machine; an index may hold others."""
        own = MACHINES.get(platform.machine(), platform.machine())
        for entry in index["manifests"]:
            if entry.get("platform", {}).get("architecture", own) == own:
                found: dict[str, Any] = self.json(_blob(entry["digest"]))
                return self._find(found) if "manifests" in found else found
        raise FileNotFoundError(f"there is no image for {own} in it")

    def layers(self) -> list[IO[bytes]]:
        if any(str(one.get("mediaType")).endswith("zstd") for one in self.manifest["layers"]):
            raise OSError("its layers are compressed by zstd: write it anew with gzip, or uncompressed")
        return [self.open(_blob(one["digest"])) for one in self.manifest["layers"]]


def unpack(layout: Layout, root: Path) -> None:
    """This process is inside `root` from here on."""
    layers = layout.layers()
    os.chroot(root)
    os.chdir("/")
    os.umask(0)
    for layer in layers:
        with tarfile.open(fileobj=layer, mode="r|*") as archive:
            # Links to anywhere are right here; older releases of 3.11 have no filters.
            archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            apply(archive)


def apply(archive: tarfile.TarFile) -> None:
    """One layer over those before it."""
    own: set[str] = set()
    for member in archive:
        path = Path("/", os.path.normpath(f"/{member.name}").lstrip("/"))
        if path == Path("/") or member.ischr() or member.isblk():  # a runtime makes /dev
            continue
        if path.name == _OPAQUE:
            for below in list(path.parent.iterdir()) if path.parent.is_dir() else ():
                if str(below) not in own:
                    remove(below)
            continue
        if path.name.startswith(_WHITEOUT):
            remove(path.with_name(path.name.removeprefix(_WHITEOUT)))
            continue
        if not (member.isdir() and path.is_dir() and not path.is_symlink()):
            remove(path)
        archive.extract(member, "/", numeric_owner=True)
        own.update(str(one) for one in (path, *path.parents))


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _blob(digest: str) -> str:
    kind, _, value = digest.partition(":")
    return str(PurePosixPath("blobs", kind, value))


def main(arguments: list[str]) -> int:
    try:
        unpack(Layout(Path(arguments[0])), Path(arguments[1]))
    except (OSError, KeyError, tarfile.TarError, zlib.error, EOFError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
