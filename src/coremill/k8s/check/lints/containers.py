"""What is wrong inside a pod, whatever node it is on: images, secrets in clear text, threads, memory, commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from coremill.k8s.check.findings import Problem, joined
from coremill.k8s.check.lints.pods import Container, Pod
from coremill.k8s.check.lints.reading import at, mapping, objects, quantity, text
from coremill.k8s.check.manifests import Manifest
from coremill.redaction import LEAST_LENGTH, SECRET_NAME, SECRET_VALUE

_GPU_IMAGE = re.compile(r"(?i)(^|[^a-z])(cuda|gpu|nvidia|nvcr|nccl|rocm)|[-_.:]cu\d{2,3}([-_.]|$)")
_REFERENCE = re.compile(r"\$(\{[^}]+\}|\([^)]+\)|\w+)\Z")
# export HF_TOKEN=..., --token ...: what follows the sign is the secret, or a variable that holds it.
_IN_COMMAND = re.compile(r"(?:--([\w-]+)[=\s]\s*|\b([A-Za-z_]\w*)=)[\"']?([^\s\"';&]+)")
_ABOUT_A_SECRET = re.compile(r"(?i)(name|file|path|mode|type|url|ref|dir)$")
_RANDOM = re.compile(rf"(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9][\w+=.-]{{{LEAST_LENGTH - 1},}}\Z")
_SHELLS = ("sh", "bash", "ash", "dash")
_TORCHRUN_SECONDS = 30  # after these it kills its workers, whatever the pod's grace
SECRET_FIX = "put it into a Secret and name that: valueFrom: {secretKeyRef: {name: ..., key: ...}}"


def pod_problems(pod: Pod) -> Iterator[Problem]:
    for container in pod.containers:
        yield from _image_problems(container, pod)
        yield from _token_problems(container)
        if pod.is_training and not pod.is_joined:
            yield from _command_problems(container, pod)
            yield from _thread_problems(container, pod)
    yield from _shared_memory_problems(pod)


def text_problems(manifest: Manifest) -> Iterator[Problem]:
    """Secrets in the plain text of other kinds: a ConfigMap, the user data of nodes."""
    places = {joined("data", key): value for key, value in mapping(manifest.object.get("data")).items()}
    if manifest.kind == "ConfigMap":
        for path, value in places.items():
            if SECRET_VALUE.search(text(value)) or _is_secret(path, text(value)):
                yield Problem(
                    path, "token", "a secret in clear text", "keep it in a Secret, which pods read as a variable"
                )
    user_data = text(at(manifest.object, "spec", "userData"))
    if SECRET_VALUE.search(user_data):
        yield Problem("spec.userData", "token", "a secret in clear text", "give nodes their rights by their role")


def _image_problems(container: Container, pod: Pod) -> Iterator[Problem]:
    image, where = container.image, container.path_of("image")
    if not image:
        return
    name, _, digest = image.partition("@")
    tag = name.rsplit("/", 1)[-1].partition(":")[2]
    if not digest and tag in ("", "latest"):
        words = f"{image} is another image tomorrow: a restarted pod may not fit the others"
        yield Problem(where, "unpinned", words, "name a version or a digest", "warning")
    if _GPU_IMAGE.search(image) and not pod.needs_gpu:
        words = f"{image} carries CUDA, and the pod asks for no GPU: gigabytes to pull on every node"
        yield Problem(where, "gpu-on-cpu", words, "take an image with CPU builds of torch", "warning")


def _token_problems(container: Container) -> Iterator[Problem]:
    for number, entry in enumerate(objects(container.spec.get("env"))):
        name, value = text(entry.get("name")), text(entry.get("value"))
        if SECRET_VALUE.search(value) or _is_secret(name, value):
            where = f"{container.path_of('env')}[{number}].value"
            yield Problem(where, "token", f"{name} in clear text: everyone who may read this object has it", SECRET_FIX)
    for key in ("command", "args"):
        line = " ".join(str(word) for word in container.spec.get(key) or () if isinstance(word, str))
        where = container.path_of(key)
        pairs = ((option or variable, value) for option, variable, value in _IN_COMMAND.findall(line))
        named = [(name, value) for name, value in pairs if SECRET_NAME.search(name)]
        if SECRET_VALUE.search(line) or any(_is_secret(name, value) for name, value in named):
            yield Problem(
                where, "token", "a secret in clear text: everyone who may read this object has it", SECRET_FIX
            )
        for name, value in dict(named).items():
            variable = value.strip("${}()")
            if _REFERENCE.match(value) and "valueFrom" not in container.env.get(variable, {}):
                words = (
                    f"{name} comes from ${variable}, which no Secret sets here: envsubst would write it in clear text"
                )
                yield Problem(where, "token", words, SECRET_FIX, "warning")


def _is_secret(name: str, value: str) -> bool:
    """Letters and digits in a row under the name of a secret; a word, a path, an option or another variable is none."""
    is_about_one = _ABOUT_A_SECRET.search(name) is not None
    return bool(SECRET_NAME.search(name)) and not is_about_one and bool(_RANDOM.match(value))


def _command_problems(container: Container, pod: Pod) -> Iterator[Problem]:
    words, where = container.words, container.path_of("command")
    line = " ".join(words)
    first = words[0].rsplit("/", 1)[-1] if words else ""
    if first in _SHELLS and re.search(r"\b(torchrun|python3?|coremill|mpirun|accelerate|deepspeed)\b", line):
        last = re.split(r"[;\n]|&&", words[-1].strip())[-1].strip()
        if not last.startswith("exec "):
            text_ = f"{first} is process 1 and keeps SIGTERM to itself: the job is killed without a save"
            yield Problem(where, "process-one", text_, "start the program itself, or `exec` it last", "warning")
    if not re.search(r"\btorchrun\b", line):
        return
    if "c10d" in line and "rdzv" in line:
        text_ = "with rdzv_backend=c10d torchrun ignores PET_NODE_RANK: ranks go by host name, not by pod"
        yield Problem(where, "torchrun", text_, "leave it out: torchrun reads PET_MASTER_ADDR by itself", "warning")
    set_by_env = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in container.env
    grace = quantity(pod.spec.get("terminationGracePeriodSeconds")) or 0
    if grace > _TORCHRUN_SECONDS and not set_by_env and "shutdown-timeout" not in line.replace("_", "-"):
        text_ = f"torchrun kills its workers {_TORCHRUN_SECONDS} s after SIGTERM, whatever the pod's {grace:g} s"
        fix = "add --shutdown-timeout (torch 2.12 and later), or start coremill itself"
        yield Problem(where, "torchrun", text_, fix, "warning")


def _thread_problems(container: Container, pod: Pod) -> Iterator[Problem]:
    if container is not pod.main:
        return
    cpus, processes = container.amount("cpu"), pod.processes or 1
    entry = container.env.get("OMP_NUM_THREADS")
    value = text(mapping(entry).get("value"))
    env_path = container.path_of("env")
    if value.isdigit() and cpus and int(value) * processes > cpus:
        words = f"{processes} x {value} threads on {cpus:g} CPUs: they wait for each other"
        fix = f"OMP_NUM_THREADS: at most {max(1, int(cpus // 2 // processes))}, one for each physical core"
        yield Problem(env_path, "threads", words, fix, "warning")
    if entry is None and processes > 1 and re.search(r"\btorchrun\b", " ".join(container.words)):
        words = f"torchrun gives each of {processes} processes one thread where OMP_NUM_THREADS is not set"
        each = max(1, int((cpus or 2 * processes) // 2 // processes))
        yield Problem(container.path, "threads", words, f"set OMP_NUM_THREADS: {each}", "warning")


def _shared_memory_problems(pod: Pod) -> Iterator[Problem]:
    """Memory-backed volumes count as the container's memory."""
    limit = pod.main.limit("memory") if pod.main else None
    for number, volume in enumerate(objects(pod.spec.get("volumes"))):
        backing = mapping(volume.get("emptyDir"))
        if backing.get("medium") != "Memory":
            continue
        size = quantity(backing.get("sizeLimit"))
        where = f"{pod.path_of('volumes')}[{number}].emptyDir" if "volumes" not in pod.paths else pod.path_of("volumes")
        name = text(volume.get("name"))
        fix = "leave it out (coremill needs no /dev/shm), or keep it well below the limit"
        if size is None:
            words = f"{name} has no sizeLimit: what is written there is memory of the container, until it is killed"
            yield Problem(where, "shared-memory", words, fix, "warning")
        elif limit is not None and size >= limit / 2:
            words = f"{name} may take {size / 2**30:g} GiB of the {limit / 2**30:g} GiB that the container has in all"
            yield Problem(where, "shared-memory", words, fix, "warning")


def restart_policy_of(spec: Any) -> str:
    """Kubernetes' default for pods is Always."""
    return text(mapping(spec).get("restartPolicy")) or "Always"
