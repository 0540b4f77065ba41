"""The image that pods are made from, where one is named: an unpacked one, as there need be no container engine here.

FOLDER                        its root file system (podman mount, docker export | tar x)
FOLDER/rootfs + config.json   a bundle of an OCI runtime (umoci unpack, runc spec): its environment counts too
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from coremill.errors import InputError
from coremill.k8s.check.lints.reading import at, texts
from coremill.nearby import PATH_ADVICE, nearest_path


@dataclass(frozen=True)
class Image:
    """A root file system, and what its image puts into the environment."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)


def find_image(name: str) -> Image:
    """`name` is that of a folder; an image that is not there is bad input."""
    folder = Path(name).expanduser()
    root = folder / "rootfs" if (folder / "rootfs").is_dir() else folder
    if not folder.is_dir():
        near = nearest_path(name, Path.is_dir)
        raise InputError(
            f"there is no image {name} on this machine",
            where="--image",
            why="it names the folder of an unpacked image: nothing is pulled",
            do=f"did you mean {near}?"
            if near
            else "unpack it first (podman image mount, docker export | tar x, umoci unpack) and name the folder; "
            + PATH_ADVICE,
        )
    if not (root / "bin").exists() or not (root / "etc").is_dir():
        raise InputError(
            f"{root} holds no image",
            where="--image",
            why="a root file system has bin and etc",
            do="name the folder that an image was unpacked into",
        )
    environ: dict[str, str] = {}
    config = folder / "config.json"
    if root != folder and config.is_file():
        try:
            variables = texts(at(json.loads(config.read_text()), "process", "env"))
        except ValueError as error:
            raise InputError(f"{config} is not JSON", where="--image", why=str(error), do="unpack it anew") from error
        environ = {name: value for name, _, value in (variable.partition("=") for variable in variables)}
    return Image(root.resolve(), environ)
