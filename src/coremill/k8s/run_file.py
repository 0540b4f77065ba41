"""The run file as pods get it: the user's, with what is different in a pod changed, and each change said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from coremill.config.durations import seconds_of
from coremill.config.places import PATH_KEYS, Places, is_there, relative_paths, value_at
from coremill.config.schema import AUTO, BUILT_IN, RunConfig, RunSection
from coremill.config.show import scalar_text
from coremill.k8s.times import Times

FOLDER = "coremill"  # on the volume: all that pods write lies in it


@dataclass(frozen=True)
class Change:
    """A key that pods get another value for."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class RunFile:
    """The text of the run file in the pod, and what in it is not the user's."""

    text: str
    changes: tuple[Change, ...]


def volume_folder(config: RunConfig) -> str:
    """Where everything that pods write lies."""
    return f"{config.kubernetes.mount_path}/{FOLDER}"


def make_run_file(
    config: RunConfig, name: str, ranks_per_node: int, threads_per_rank: int, times: Times, instance: str
) -> RunFile:
    """Folders on the volume, times that fit each other, ranks and threads as planned, and the type that was chosen."""
    changes = [
        change
        for change in (
            *_folders(config, name),
            *_times(config, times),
            *_layout(config, ranks_per_node, threads_per_rank),
            *_chosen_type(config, instance),
            *_metrics(config),
        )
        if _value(config, change.key) != change.value
    ]
    document = config.model_dump(mode="json", exclude_defaults=True)
    for change in changes:
        section, _, key = change.key.partition(".")
        document.setdefault(section, {})[key] = change.value
    order = {name: place for place, name in enumerate(RunConfig.model_fields)}
    document = dict(sorted(document.items(), key=lambda entry: order[entry[0]]))
    return RunFile(_text(document, {change.key: change.reason for change in changes}), tuple(changes))


def paths_pods_do_not_see(config: RunConfig, places: Places) -> list[str]:
    """A warning for each path that is here and not on the volume."""
    mount = config.kubernetes.mount_path
    named = {key.removesuffix(".name"): value_at(config, key) for key in PATH_KEYS}
    named |= {f"data.sources[{place}]": one.source for place, one in enumerate(config.data.sources or ())}
    relative = relative_paths(config)
    found = []
    for key, value in named.items():
        if value is None or value == BUILT_IN or "://" in value or _is_below(value, mount):
            continue
        full = "model.name" if key == "model" else f"{key}.source" if key.startswith("data.sources") else key
        is_path = value.startswith(("/", "~", ".")) or key.startswith("data.")
        if is_path or full in places.paths or (full in relative and is_there(full, value)):
            found.append(
                f"warning: {key}: {value} is a path of this machine, which pods do not see: copy it to the volume and"
                f" name it there ({mount}/...), or name it by its hub id"
            )
    return found


def folders_of_others(config: RunConfig) -> list[str]:
    """A warning for each folder that pods write to, is on the volume, and nobody gives to their user."""
    folder, mount = volume_folder(config), config.kubernetes.mount_path
    named = {"run.folder": config.run.folder, "checkpoint.folder": config.checkpoint.folder}
    return [
        f"warning: {key}: {value} is outside of {folder}, which pods own: it has to be there, and belong to user"
        f" {config.kubernetes.user_id}"
        for key, value in named.items()
        if value is not None and _is_below(value, mount) and not _is_below(value, folder)
    ]


def _folders(config: RunConfig, name: str) -> list[Change]:
    mount = config.kubernetes.mount_path
    changes = []
    if config.run.folder is None or not _is_below(config.run.folder, mount):
        changes.append(Change("run.folder", f"{volume_folder(config)}/{name}", "on the volume, which outlives pods"))
    if config.checkpoint.folder is not None and not _is_below(config.checkpoint.folder, mount):
        changes.append(Change("checkpoint.folder", None, "on the volume, in the run folder"))
    return changes


def _times(config: RunConfig, times: Times) -> list[Change]:
    section = config.kubernetes
    spot = "a spot notice leaves two minutes" if section.may_be_spot else "so long the plan gives a save"
    changes = []
    if config.checkpoint.grace == AUTO or seconds_of(config.checkpoint.grace) != times.checkpoint_grace_seconds:
        within = f"within the pod's grace of {times.pod_grace_seconds} s; {spot}"
        changes.append(Change("checkpoint.grace", f"{times.checkpoint_grace_seconds}s", within))
    if section.has_karpenter and config.checkpoint.spot_notices == AUTO:
        changes.append(Change("checkpoint.spot_notices", "off", "Karpenter hears them, and ends pods in time"))
    if seconds_of(config.supervise.wait_for_hosts) < times.wait_for_hosts_seconds:
        wait = f"{times.wait_for_hosts_seconds // 60}m"
        changes.append(Change("supervise.wait_for_hosts", wait, "so long a new node may take to start"))
    return changes


def _layout(config: RunConfig, ranks_per_node: int, threads_per_rank: int) -> list[Change]:
    reason = "as planned for the pod"
    return [
        Change("parallel.ranks_per_node", ranks_per_node, reason),
        Change("parallel.threads_per_rank", threads_per_rank, reason),
    ]


def _chosen_type(config: RunConfig, instance: str) -> list[Change]:
    """Where the run file names no type, the report could not tell what the run has cost."""
    is_named = config.fleet.instance is not None or config.kubernetes.instances
    return [] if is_named else [Change("fleet.instance", instance, "chosen as the cheapest per token that fits")]


def _metrics(config: RunConfig) -> list[Change]:
    """Whoever scrapes is outside of the pod; an interface that the user names stays."""
    default = RunSection.model_fields["metrics_host"].default
    if config.run.metrics_port is None or config.run.metrics_host != default:
        return []
    return [Change("run.metrics_host", "::", "Prometheus scrapes pods at their own address")]


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _is_below(path: str, folder: str) -> bool:
    parts = PurePosixPath(path)
    return ".." not in parts.parts and parts.is_relative_to(folder)


def _text(document: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    lines = ["# The run as its pods train it; made by coremill k8s render."]
    for section, value in document.items():
        if not isinstance(value, Mapping):
            lines.append(f"{section}: {scalar_text(value)}")
            continue
        lines.append(f"{section}:")
        for key, inner in value.items():
            reason = reasons.get(f"{section}.{key}")
            lines.append(f"  {key}: {scalar_text(inner)}" + (f"  # {reason}" if reason else ""))
    return "".join(f"{line}\n" for line in lines)
