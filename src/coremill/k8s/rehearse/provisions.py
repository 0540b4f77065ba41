"""What pods find on this machine that a cluster would give them: models, data and caches.

Pods have no way out of the rehearsal. A path of this machine that the run file names is mounted read-only where the pod
looks for it, with a word, as a cluster has no such path; what comes from the hub is taken from this machine's cache, as
if an earlier run had left it on the volume.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from coremill.config.schema import BUILT_IN
from coremill.errors import InputError
from coremill.files import at_home
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.k8s.check.lints.reading import listed, mapping
from coremill.k8s.rehearse.pods import Container
from coremill.k8s.rehearse.run_in_pods import PodRunFile, on_this_machine
from coremill.nearby import is_pattern


@dataclass(frozen=True, kw_only=True)
class Provisions:
    """What to mount and what to copy, with a word for each."""

    mounts: tuple[tuple[str, str], ...]  # path here, path in the pod; read-only
    hub: tuple[str, ...]  # folders of the hub's cache: models--OWNER--NAME
    notes: tuple[str, ...]


def provisions_for(run_file: PodRunFile | None, container: Container, beside: Path | None) -> Provisions:
    """`beside`: the folder of the user's own run file, where one was named."""
    mounts: dict[str, str] = {}
    hub: dict[str, None] = {}
    notes: list[str] = []
    volumes = [mount.path for mount in container.mounts if mount.kind == "claim"]
    for key, value in _sources(run_file) if run_file is not None else ():
        if value == BUILT_IN or any(PurePosixPath(value).is_relative_to(path) for path in volumes):
            continue
        if value.startswith("hf://"):
            hub["datasets--" + value[5:].partition("@")[0].partition(":")[0].replace("/", "--")] = None
            continue
        here = _here(value, beside)
        if here is not None and run_file is not None:
            inside = _without_pattern(value)
            target = str(PurePosixPath(run_file.folder, inside)) if not inside.startswith(("/", "~")) else inside
            target = target.replace("~", container.environ.get("HOME", ""), 1)
            mounts[str(here)] = target
            notes.append(
                f"{key}: {value} is a path of this machine: mounted read-only for the rehearsal; a cluster has none"
            )
        elif key in ("model", "tokenizer") and not value.startswith(("/", "~", ".")):
            hub["models--" + value.replace("/", "--")] = None
    return Provisions(mounts=tuple(mounts.items()), hub=tuple(hub), notes=tuple(notes))


def put_on_volume(provisions: Provisions, container: Container, volumes: Path) -> Iterator[str]:
    """Copies what the hub would give to the caches of the pods, and says so."""
    cache = on_this_machine(container.environ.get("HF_HOME", "/"), container, volumes)
    environ = environment_snapshot()
    own = at_home(environ.get("HF_HOME") or "~/.cache/huggingface")
    for name in provisions.hub:
        shown = name.partition("--")[2].replace("--", "/")
        if cache is None or not (own / "hub" / name).is_dir():
            raise InputError(
                f"{shown} is not in this machine's hub cache",
                where=str(own / "hub"),
                why="pods of a rehearsal have no way out: they cannot download it",
                do=f"get it first: hf download {'--repo-type dataset ' if name.startswith('datasets') else ''}{shown}",
            )
        _copy(own / "hub" / name, cache / "hub" / name, container)
        prepared = own / "datasets" / name.partition("--")[2].replace("--", "___")
        if prepared.is_dir():
            _copy(prepared, cache / "datasets" / prepared.name, container)
        yield f"{shown} is taken from this machine's hub cache: pods have no way out"
    if cache is not None and provisions.hub:
        _give(cache, container, volumes)
    # Rates of this machine that are known already: pods would measure them anew, each at its start.
    rates = on_this_machine(container.environ.get("COREMILL_CACHE", "/"), container, volumes)
    known = cache_folder(environ) / "calibration"
    if rates is not None and known.is_dir():
        target = rates / "calibration"
        target.mkdir(parents=True)
        for file in known.glob("*.json"):
            shutil.copy(file, target)
            os.chown(target / file.name, container.user, container.group)
        os.chown(target, container.user, container.group)
        _give(rates, container, volumes)


def readable_mounts(provisions: Provisions, folder: Path) -> list[tuple[str, str]]:
    """The mounts, with a copy in `folder` of what only its owner may read: pods are another user."""
    found = []
    for place, (source, target) in enumerate(provisions.mounts):
        path = Path(source)
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.exists()]
        if not all(_is_readable(one) for one in (path, *files)):
            copy = folder / str(place) / path.name
            copy.parent.mkdir(parents=True)
            if path.is_dir():
                shutil.copytree(path, copy, copy_function=_link)
            else:
                _link(str(path), str(copy))
            for one in (copy, *(each for each in copy.rglob("*") if each.is_dir())):
                one.chmod(0o755 if one.is_dir() else 0o644)
            path = copy
        found.append((str(path), target))
    return found


def _is_readable(path: Path) -> bool:
    needed = 0o5 if path.is_dir() else 0o4
    return path.stat().st_mode & needed == needed


def _link(source: str, target: str) -> str:
    """Hard links where the disk is the same, as models are large; a copy where others may not read it."""
    if _is_readable(Path(source)):
        with contextlib.suppress(OSError):
            os.link(source, target)
            return target
    shutil.copy2(source, target)
    Path(target).chmod(0o644)
    return target


def _copy(source: Path, target: Path, container: Container) -> None:
    shutil.copytree(source, target, symlinks=True, copy_function=_link)
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir() and not path.is_symlink())):
        os.chown(folder, container.user, container.group)


def _give(folder: Path, container: Container, volumes: Path) -> None:
    """Folders on the way to the cache belong to the pods' user, as if a pod had made them."""
    for path in (folder, folder / "hub", folder / "datasets", *folder.parents):
        if path.is_dir() and path.is_relative_to(volumes) and len(path.relative_to(volumes).parts) > 1:
            os.chown(path, container.user, container.group)


def _sources(run_file: PodRunFile) -> Iterator[tuple[str, str]]:
    model = run_file.get("model")
    values = {
        "model": mapping(model).get("name") if isinstance(model, dict) else model,
        "tokenizer": run_file.get("tokenizer"),
        "data.source": run_file.get("data.source")
        or (run_file.get("data") if isinstance(run_file.get("data"), str) else None),
        "data.evaluation_source": run_file.get("data.evaluation_source"),
        "data.chat_template": run_file.get("data.chat_template"),
        "lora.start_from": run_file.get("lora.start_from"),
    }
    values |= {
        f"data.sources[{place}]": one.get("source") if isinstance(one, dict) else one
        for place, one in enumerate(listed(run_file.get("data.sources")))
    }
    for key, value in values.items():
        if isinstance(value, str) and value:
            yield key, value


def _here(value: str, beside: Path | None) -> Path | None:
    """The file or folder of this machine that a value means; of a pattern the folder above it."""
    bare = at_home(_without_pattern(value))
    for folder in (Path.cwd(), beside):
        if folder is not None and str(bare) not in ("", ".") and (folder / bare).exists():
            return (folder / bare).resolve()
    return None


def _without_pattern(value: str) -> str:
    parts = PurePosixPath(value).parts
    kept = [part for place, part in enumerate(parts) if not any(map(is_pattern, parts[: place + 1]))]
    return str(PurePosixPath(*kept)) if kept else ""
