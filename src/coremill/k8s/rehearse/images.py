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

from coremill.errors import CoremillError, InputError
from coremill.files import write_whole
from coremill.k8s.check.lints.reading import at, texts
from coremill.k8s.rehearse import unpack
from coremill.nearby import nearest_path

_DIGEST = "digest"  # beside an unpacked image: which one it is


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
    unpacked: Image | None = None
    layout: Path | None = None  # folder or archive; neither: it is in the storage

    def unpack(self, folder: Path) -> Image:
        """Into `folder`, unless it is unpacked; what an earlier rehearsal of the same image left there is taken."""
        if self.unpacked is not None:
            return self.unpacked
        exported = folder.with_name(f"{folder.name}.layout")
        try:
            layout = self.layout or self._exported(exported)
            return self._from_layout(layout, folder)
        finally:
            shutil.rmtree(exported, ignore_errors=True)

    def _exported(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
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

    def _from_layout(self, path: Path, folder: Path) -> Image:
        layout = _layout(path)
        root = folder / "rootfs"
        if not (folder / _DIGEST).is_file() or (folder / _DIGEST).read_text() != layout.digest:
            shutil.rmtree(folder, ignore_errors=True)
            root.mkdir(parents=True)
            words = [sys.executable, "-P", "-m", unpack.__name__, str(path), str(root)]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode != 0:
                shutil.rmtree(folder, ignore_errors=True)
                raise InputError(f"{self.name} cannot be unpacked", where="--image", why=done.stderr.strip())
            write_whole(folder / _DIGEST, layout.digest)
        config = layout.config.get("config") or {}
        return Image(
            name=self.name,
            root=root.resolve(),
            environ=_variables(config.get("Env")),
            working_folder=config.get("WorkingDir") or "/",
        )


def find_image(name: str) -> FoundImage:
    """An image that is not there is bad input, before anything is made."""
    path = Path(name).expanduser()
    if (path / "oci-layout").is_file() or path.is_file():
        _layout(path)
        return FoundImage(name=name, layout=path.resolve())
    root = path / "rootfs" if (path / "rootfs").is_dir() else path
    if (root / "bin").exists() and (root / "etc").is_dir():
        return FoundImage(name=name, unpacked=_unpacked(name, path, root))
    if shutil.which("buildah") is None:
        why = "buildah is not installed, in whose storage it might be"
    elif subprocess.run(["buildah", "inspect", "--type", "image", name], capture_output=True).returncode == 0:
        return FoundImage(name=name)
    else:
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
