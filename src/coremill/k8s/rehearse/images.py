"""The image that pods are made from, where one is named. Nothing is pulled: it is on this machine, or it is not there.

NAME[:TAG]     an image that was built or pulled here (the storage of buildah and podman)
FILE           an archive of one: buildah push NAME oci-archive:FILE, docker save -o FILE NAME
FOLDER         an OCI layout; an unpacked root file system; or a bundle of an OCI runtime (rootfs and config.json)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coremill.errors import CoremillError, InputError
from coremill.files import at_home, write_whole
from coremill.k8s.check.lints.reading import at, mapping, texts
from coremill.k8s.rehearse import unpack
from coremill.nearby import nearest_path

_KEPT = "image.json"  # beside an unpacked image: which one it is, and what it says of processes


@dataclass(frozen=True, kw_only=True)
class Image:
    """A root file system, and what its image says of the processes in it."""

    name: str
    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    working_folder: str = "/"


@dataclass(frozen=True, kw_only=True)
class FoundImage:
    """An image that is on this machine, in one of the forms."""

    name: str
    key: str = ""  # the same for the same image
    unpacked: Image | None = None
    layout: Path | None = None  # folder or archive; neither: it is in the storage

    def unpack(self, folder: Path) -> Image:
        """Into `folder`, unless it is unpacked; what an earlier rehearsal of the same image left there is taken."""
        if self.unpacked is not None:
            return self.unpacked
        kept, root = folder / _KEPT, folder / "rootfs"
        about = json.loads(kept.read_text()) if kept.is_file() else {}
        if about.get("key") != self.key:
            shutil.rmtree(folder, ignore_errors=True)
            root.mkdir(parents=True)
            config = self._fill(root, self.layout or self._exported(folder / "layout"))
            shutil.rmtree(folder / "layout", ignore_errors=True)
            about = {"key": self.key, "environ": _variables(config.get("Env")), "cwd": config.get("WorkingDir")}
            write_whole(kept, json.dumps(about))
        working_folder = about["cwd"] or "/"
        return Image(name=self.name, root=root.resolve(), environ=about["environ"], working_folder=working_folder)

    def _exported(self, folder: Path) -> Path:
        command = ["buildah", "push", "--quiet", "--disable-compression", self.name, f"oci:{folder}:image"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise CoremillError(
                f"the image {self.name} cannot be read",
                where=" ".join(command),
                why=done.stderr.strip(),
                do="write it to an archive yourself, and name that",
            )
        return folder

    def _fill(self, root: Path, path: Path) -> dict[str, Any]:
        """All layers into `root`; returns what the image says of its processes."""
        words = [sys.executable, "-P", "-m", unpack.__name__, str(path), str(root)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            raise InputError(
                f"{self.name} cannot be unpacked",
                where="--image",
                why=done.stderr.strip(),
                do="write the archive anew, or name a folder it was unpacked into",
            )
        return mapping(_layout(path).config.get("config"))


def find_image(name: str) -> FoundImage:
    """An image that is not there is bad input, before anything is made."""
    path = at_home(name)
    if (path / "oci-layout").is_file() or path.is_file():
        return FoundImage(name=name, key=_layout(path).digest, layout=path.resolve())
    root = path / "rootfs" if (path / "rootfs").is_dir() else path
    if (root / "bin").exists() and (root / "etc").is_dir():
        return FoundImage(name=name, unpacked=_unpacked(name, path, root))
    if shutil.which("buildah") is None:
        why = "buildah is not installed, in whose storage it might be"
    else:
        command = ["buildah", "inspect", "--type", "image", "--format", "{{.FromImageID}}", name]
        known = subprocess.run(command, capture_output=True, text=True)
        if known.returncode == 0:
            return FoundImage(name=name, key=known.stdout.strip())
        why = "it is not among `buildah images`, and nothing is pulled"
    if path.is_dir():
        why = f"the folder holds neither oci-layout nor bin and etc, as a root file system does; {why}"
    near = None if path.exists() else nearest_path(name, Path.exists)
    advice = "build it (containers/Containerfile), or name an archive of it (docker save -o FILE NAME)"
    raise InputError(
        f"there is no image {name} on this machine",
        where="--image",
        why=why,
        do=f"did you mean {near}?" if near else advice,
    )


def _layout(path: Path) -> unpack.Layout:
    try:
        return unpack.Layout(path)
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise InputError(
            f"{path} is not an image",
            where="--image",
            why=str(error),
            do="name an OCI archive: buildah push NAME oci-archive:FILE, or docker save (25 and newer)",
        ) from error


def _unpacked(name: str, folder: Path, root: Path) -> Image:
    config = folder / "config.json"
    if root == folder or not config.is_file():
        return Image(name=name, root=root.resolve())
    try:
        process = at(json.loads(config.read_text()), "process")
    except ValueError as error:
        raise InputError(f"{config} is not JSON", where="--image", why=str(error), do="unpack it anew") from error
    working_folder = str(at(process, "cwd") or "/")
    return Image(name=name, root=root.resolve(), environ=_variables(at(process, "env")), working_folder=working_folder)


def _variables(lines: object) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition("=") for line in texts(lines))}
