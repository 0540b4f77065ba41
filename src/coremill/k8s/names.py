"""Names of a job and of what belongs to it: what the API server, JobSet and DNS take, checked before anything else."""

from __future__ import annotations

import hashlib
import re

from coremill.config.load import LoadedConfig
from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.plan.types import Choice

LONGEST_LABEL = 63  # of a part of a DNS name, and of the value of a label
LONGEST_NAME = 253  # of most objects
REPLICATED_JOB = "node"  # what Kubeflow Trainer calls it too
_DIGEST = 8  # characters
_RANDOM_SUFFIX = 6  # -x7k2p, which a Job adds to the names of its pods
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035: begins with a letter, as Services and TrainJobs need it
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_WORDS = "lower-case letters, digits and dashes, beginning with a letter and not ending with a dash"


def job_name(loaded: LoadedConfig) -> Choice[str]:
    """The name of the job: as it is set, or made from the run file's."""
    config, written = loaded.config, loaded.config.kubernetes.name
    if written is not None:
        if not _LABEL.fullmatch(written):
            raise InputError(
                f"{written!r} cannot be the name of a job",
                where="kubernetes.name",
                why=f"a name is made of {_LABEL_WORDS}",
                do=f"did you mean {as_label(written)}?" if as_label(written) else "choose another name",
            )
        choice = Choice(written, "set by you")
    else:
        made = as_label(loaded.name) or "run"
        choice = Choice(
            made, f"the run file's name{'' if made == loaded.name else f', {loaded.name}, as DNS takes it'}"
        )
    longest = longest_job_name(config)
    if len(choice.value) > longest:
        pod = f"{choice.value}{_pod_ending(config)}-x7k2p"
        raise InputError(
            f"the name {choice.value} has {len(choice.value)} characters, and a job of {config.fleet.nodes}"
            f" pods may have {longest}",
            where="kubernetes.name",
            why=f"pods are called {pod}, of which DNS takes {LONGEST_LABEL} characters",
            do=f"set kubernetes.name to a shorter one, for instance {choice.value[:longest].rstrip('-')}",
        )
    return choice


def longest_job_name(config: RunConfig) -> int:
    """So that names of pods, their host names and labels stay within DNS limits."""
    return LONGEST_LABEL - len(_pod_ending(config)) - _RANDOM_SUFFIX


def cluster_wide(namespace: str, name: str, longest: int = LONGEST_NAME) -> str:
    """The name of an object that is in no namespace: two namespaces may each have a `name`, and never share it.

    No namespace has a dot, so that no two pairs give the same; what is too long ends with a digest of the whole.
    """
    whole = f"{namespace}.{name}"
    if len(whole) <= longest:
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST]
    return f"{whole[: longest - _DIGEST - 1].rstrip('-.')}-{digest}"


def require_names(config: RunConfig) -> None:
    """Of objects that are named by the run file, beside the job itself."""
    section = config.kubernetes
    for key, value in {"namespace": section.namespace, "metrics_namespace": section.metrics_namespace}.items():
        if value is None or (re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", value) and len(value) <= LONGEST_LABEL):
            continue
        raise InputError(
            f"{value!r} cannot be a namespace",
            where=f"kubernetes.{key}",
            why=f"a namespace is a part of DNS names: at most {LONGEST_LABEL} lower-case letters, digits and dashes",
            do=f"did you mean {as_label(value)[:LONGEST_LABEL]}?" if as_label(value) else None,
        )
    named = {"claim": section.claim, "queue": section.queue, "token_secret": section.token_secret}
    named |= {"secrets": next((name for name in section.secrets if not is_object_name(name)), None)}
    for key, value in named.items():
        longest = LONGEST_LABEL if key == "queue" else LONGEST_NAME  # a queue's is the value of a label
        if value is not None and (not is_object_name(value) or len(value) > longest):
            raise InputError(
                f"{value!r} cannot be the name of an object",
                where=f"kubernetes.{key}",
                why=f"names have at most {longest} characters: lower-case letters, digits, dashes and dots",
                do="give the name that it has in the cluster (kubectl get)",
            )


def is_object_name(text: str) -> bool:
    return len(text) <= LONGEST_NAME and _SUBDOMAIN.fullmatch(text) is not None


def as_label(text: str) -> str:
    """The nearest name that DNS takes: Llama3_8B becomes llama3-8b; empty where nothing is left."""
    made = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"run-{made}" if made and not made[0].isalpha() else made


def _pod_ending(config: RunConfig) -> str:
    """What is added to the job's name for its last pod, before the random part."""
    last = config.fleet.nodes - 1
    return f"-{last}" if config.kubernetes.kind == "job" else f"-{REPLICATED_JOB}-0-{last}"
