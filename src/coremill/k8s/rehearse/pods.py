"""The pod of an index, as kubelet would start it: command, environment, mounts, user and limits. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coremill.errors import InputError
from coremill.k8s.check.lints.reading import quantity
from coremill.k8s.rehearse.controllers import COMPLETION_INDEX, PlannedJob
from coremill.k8s.rehearse.written import Written, WrittenObjects

HUB_TOKEN = "HF_TOKEN"
_DEFAULT_GRACE_SECONDS = 30
# What containerd leaves to a container that says nothing of capabilities.
_LEFT_BY_RUNTIMES = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
)
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_KEYED = re.compile(r"metadata\.(annotations|labels)\['([^']+)'\]")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """Something at a path inside a container."""

    kind: Literal["claim", "files", "temporary"]
    name: str  # of the volume in the pod; of a claim the claim's
    path: str
    read_only: bool
    files: tuple[tuple[str, str], ...] = ()  # of kind files: name and text


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container of a pod."""

    name: str
    image: str
    command: tuple[str, ...]
    working_folder: str
    environ: dict[str, str]
    mounts: tuple[Mount, ...]
    user: int
    group: int
    more_groups: tuple[int, ...]
    capabilities: tuple[str, ...]  # those it keeps
    has_read_only_root: bool
    may_gain_rights: bool
    memory_bytes: int | None
    cpus: float | None


@dataclass(frozen=True, kw_only=True)
class Pod:
    """What kubelet is told."""

    index: int
    name: str
    hostname: str
    subdomain: str | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    grace_seconds: int
    grace_line: Written
    init_containers: tuple[Container, ...]
    container: Container


@dataclass(frozen=True)
class Secrets:
    """What Secrets among the objects hold; and the hub's token of this shell, for an optional Secret that is not."""

    objects: WrittenObjects
    hub_token: str | None

    def read(self, name: str) -> dict[str, str] | None:
        """Its keys and values; None: it is not there."""
        written = self.objects.find("Secret", name)
        if written is None:
            return None
        decoded = {key: base64.b64decode(text).decode() for key, text in (written.value.get("data") or {}).items()}
        return decoded | (written.value.get("stringData") or {})


def make_pod(job: PlannedJob, index: int, suffix: str, address: str, objects: WrittenObjects, secrets: Secrets) -> Pod:
    """`suffix` is what a Job adds to the name of each new pod; `address` is this one's."""
    spec: dict[str, Any] = job.template["spec"]
    metadata = job.template["metadata"]
    hostname = f"{job.name}-{index}"
    annotations = {**(metadata.get("annotations") or {}), COMPLETION_INDEX: str(index)}
    labels = {**metadata["labels"], COMPLETION_INDEX: str(index)}
    own = {
        "metadata.name": f"{hostname}-{suffix}",
        "metadata.namespace": job.namespace,
        "status.podIP": address,
        "spec.nodeName": f"node-of-{hostname}-{suffix}",
        **{f"metadata.annotations['{key}']": str(value) for key, value in annotations.items()},
        **{f"metadata.labels['{key}']": str(value) for key, value in labels.items()},
    }
    written = job.spec.part("template", "spec")
    reader = _Reader(spec, own, objects, secrets, written)
    grace = written.part("terminationGracePeriodSeconds")
    given = {"JOB_COMPLETION_INDEX": str(index)}
    return Pod(
        index=index,
        name=f"{hostname}-{suffix}",
        hostname=hostname,
        subdomain=spec.get("subdomain"),
        labels=labels,
        annotations=annotations,
        grace_seconds=_DEFAULT_GRACE_SECONDS if grace.value is None else int(grace.value),
        grace_line=grace,
        init_containers=tuple(
            reader.container(one, written.part("initContainers", place), given)
            for place, one in enumerate(spec.get("initContainers") or [])
        ),
        container=reader.container(spec["containers"][0], written.part("containers", 0), given),
    )


class _Reader:
    """The containers of one pod."""

    def __init__(
        self,
        spec: dict[str, Any],
        own: Mapping[str, str],
        objects: WrittenObjects,
        secrets: Secrets,
        written: Written,
    ) -> None:
        self.spec, self.own, self.objects, self.secrets, self.written = spec, own, objects, secrets, written

    def container(self, raw: dict[str, Any], line: Written, given: Mapping[str, str]) -> Container:
        environ = {**given, **self._environment(raw, line)}
        words = [*(raw.get("command") or []), *(raw.get("args") or [])]
        if not raw.get("command"):
            raise InputError(
                "a container without a command cannot be rehearsed",
                where=line.place,
                why="its image would have to be asked for it",
                do="write its command",
            )
        limits = (raw.get("resources") or {}).get("limits") or {}
        rights = {**(self.spec.get("securityContext") or {}), **(raw.get("securityContext") or {})}
        user = int(rights.get("runAsUser", 0))
        if user == 0 and rights.get("runAsNonRoot"):
            raise InputError(
                "kubelet would not start this container: it may not run as root and names no other user",
                where=line.part("securityContext").place,
                do="set runAsUser",
            )
        memory, groups = quantity(limits.get("memory")), rights.get("supplementalGroups") or ()
        return Container(
            name=str(raw.get("name")),
            image=str(raw.get("image")),
            command=tuple(_expanded(str(word), environ) for word in words),
            working_folder=str(raw.get("workingDir") or "/"),
            environ=environ,
            mounts=tuple(self._mounts(raw, line)),
            user=user,
            group=int(rights.get("runAsGroup", user)),
            more_groups=tuple(int(one) for one in (*groups, rights.get("fsGroup")) if one is not None),
            capabilities=_capabilities(rights.get("capabilities") or {}),
            has_read_only_root=bool(rights.get("readOnlyRootFilesystem")),
            may_gain_rights=rights.get("allowPrivilegeEscalation") is not False,
            memory_bytes=None if memory is None else int(memory),
            cpus=quantity(limits.get("cpu")),
        )

    def _environment(self, raw: dict[str, Any], line: Written) -> dict[str, str]:
        environ: dict[str, str] = {}
        for place, one in enumerate(raw.get("envFrom") or []):
            kind, reference = ("secret", one["secretRef"]) if "secretRef" in one else ("map", one.get("configMapRef"))
            values = self._values(kind, reference, line.part("envFrom", place))
            environ |= {f"{one.get('prefix', '')}{key}": value for key, value in (values or {}).items()}
        for place, one in enumerate(raw.get("env") or []):
            where = line.part("env", place)
            value = one.get("value", "") if "valueFrom" not in one else self._from(one["valueFrom"], raw, where)
            if value is None and one["name"] == HUB_TOKEN:
                value = self.secrets.hub_token
            if value is not None:
                environ[one["name"]] = _expanded(str(value), environ)
        return environ

    def _from(self, source: dict[str, Any], raw: dict[str, Any], line: Written) -> str | None:
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            if path not in self.own and not _KEYED.fullmatch(path):
                raise InputError(f"the field {path} is not rehearsed", where=line.place, do="leave it out")
            return self.own.get(path, "")
        if "resourceFieldRef" in source:
            kind, _, name = source["resourceFieldRef"]["resource"].partition(".")
            amount = quantity(((raw.get("resources") or {}).get(kind) or {}).get(name)) or 0
            return str(int(amount))
        kind, reference = ("secret", source.get("secretKeyRef")) if "secretKeyRef" in source else (
            "map", source.get("configMapKeyRef"),
        )  # fmt: skip
        values = self._values(kind, reference, line)
        key = (reference or {}).get("key")
        if values is not None and key not in values and not (reference or {}).get("optional"):
            raise _stuck(f"the key {key} is not in {(reference or {}).get('name')}", line)
        return None if values is None else values.get(str(key))

    def _values(self, kind: str, reference: Mapping[str, Any] | None, line: Written) -> dict[str, str] | None:
        name = str((reference or {}).get("name"))
        if kind == "secret":
            found = self.secrets.read(name)
        else:
            written = self.objects.find("ConfigMap", name)
            found = None if written is None else dict(written.value.get("data") or {})
        if found is None and not (reference or {}).get("optional"):
            raise _stuck(f"the {'Secret' if kind == 'secret' else 'ConfigMap'} {name} is not among the objects", line)
        return found

    def _mounts(self, raw: dict[str, Any], line: Written) -> list[Mount]:
        volumes = {one["name"]: one for one in self.spec.get("volumes") or []}
        found = []
        for place, one in enumerate(raw.get("volumeMounts") or []):
            where = line.part("volumeMounts", place)
            if one["name"] not in volumes:
                raise InputError(f"the pod has no volume {one['name']}", where=where.place, do="name one it has")
            if "subPath" in one or "subPathExpr" in one:
                raise InputError("subPath is not rehearsed", where=where.place, do="leave it out")
            found.append(self._mount(one, volumes[one["name"]], where))
        return found

    def _mount(self, raw: dict[str, Any], volume: dict[str, Any], line: Written) -> Mount:
        path, read_only = str(raw["mountPath"]), bool(raw.get("readOnly"))
        if "persistentVolumeClaim" in volume:
            name = str(volume["persistentVolumeClaim"]["claimName"])
            return Mount(kind="claim", name=name, path=path, read_only=read_only)
        if "emptyDir" in volume:
            return Mount(kind="temporary", name=volume["name"], path=path, read_only=read_only)
        for key, kind in (("configMap", "map"), ("secret", "secret")):
            if key in volume:
                source = volume[key]
                reference = {"name": source.get("name") or source.get("secretName"), **source}
                files = tuple((self._values(kind, reference, line) or {}).items())
                return Mount(kind="files", name=volume["name"], path=path, read_only=True, files=files)
        kinds = ", ".join(key for key in volume if key != "name")
        raise InputError(f"a volume of the kind {kinds} is not rehearsed", where=line.place, do="leave it out")


def _capabilities(written: Mapping[str, Any]) -> tuple[str, ...]:
    """Those a container keeps: what runtimes leave to one, less `drop`, and `add`."""
    dropped = {str(one).removeprefix("CAP_") for one in written.get("drop") or ()}
    left = () if "ALL" in dropped else tuple(one for one in _LEFT_BY_RUNTIMES if one not in dropped)
    added = (str(one).removeprefix("CAP_") for one in written.get("add") or ())
    return tuple(dict.fromkeys((*left, *added)))


def _stuck(what: str, line: Written) -> InputError:
    return InputError(
        what,
        where=line.place,
        why="in the cluster the pod would wait for it (CreateContainerConfigError)",
        do="add it to the files you name: coremill k8s rehearse manifests/ with a Secret of that name in it",
    )


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """$(NAME) as kubelet replaces it; an unknown one stays as it is."""
    return _REFERENCE.sub(
        lambda found: "$" if found[0] == "$$" else environ.get(found[1], found[0]),
        text,
    )
