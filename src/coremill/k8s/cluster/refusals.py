"""What an API server answers when it does not do what it was asked, in words that say what to do."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from coremill.errors import CoremillError, InputError
from coremill.k8s.cluster.kinds import INSTEAD, Kind

FORBIDDEN, NOT_FOUND, CONFLICT, INVALID = 403, 404, 409, 422
_BAD_REQUEST, _UNAUTHORIZED, _FIRST_OF_SERVER = 400, 401, 500
_TOO_MANY = 429
# Admission webhooks (Trainer's among them) and admission policies say no as if it were a permission.
DENIED = re.compile(r"admission webhook .* denied the request|ValidatingAdmissionPolicy .* denied request")


class Refused(InputError):
    """The server said no, and would again: no permission, no such kind, quota, a field it does not take."""

    status = 0
    said = ""  # the server's own words
    kind_is_missing = False


class Unavailable(CoremillError):
    """There is no answer, or none now: the same may work later."""


@dataclass(frozen=True)
class Asked:
    """What was asked of the server, for the words of its answer."""

    verb: str  # as RBAC calls it: get, list, create, patch, delete, watch
    kind: Kind
    namespace: str | None
    name: str | None
    context: str
    releases: tuple[tuple[str, str], ...] = ()  # what the run file names: trainer, karpenter

    @property
    def object(self) -> str:
        place = f" in namespace {self.namespace}" if self.kind.namespaced and self.namespace else ""
        return f"{self.kind.name} {self.name}{place}" if self.name else f"{self.kind.plural}{place}"


def refusal_of(status: int, body: str, asked: Asked) -> CoremillError:
    """The error for an answer that is none of 2xx."""
    document = _status_of(body)
    said = str(document.get("message") or body or "").strip().splitlines()
    words = said[0] if said else f"status {status}"
    if status in (_TOO_MANY,) or status >= _FIRST_OF_SERVER:
        return Unavailable(
            f"the cluster could not {asked.verb} {asked.object}",
            where=f"context {asked.context}",
            why=words,
            do="try again in a minute",
        )
    error = _refused(status, words, document, asked)
    error.status, error.said = status, words
    error.kind_is_missing = status == NOT_FOUND and not document and bool(asked.kind.product)
    return error


def _refused(status: int, words: str, document: dict[str, Any], asked: Asked) -> Refused:
    where = f"context {asked.context}"
    if status == _UNAUTHORIZED:
        return Refused(
            "the cluster does not know who you are",
            where=where,
            why=words,
            do="log in again; on EKS `aws sts get-caller-identity` shows as whom, and an access entry of the cluster"
            " lets you in",
        )
    if status == FORBIDDEN and "exceeded quota" in words:
        return Refused(
            f"the quota of namespace {asked.namespace} has no room for {asked.object}",
            where=where,
            why=words,
            do="ask for less (fleet.nodes, kubernetes.cpus, kubernetes.memory_gib), or have the ResourceQuota raised",
        )
    if DENIED.search(words):
        return Refused(
            f"a rule of the cluster refuses {asked.object}",
            where=where,
            why=words,
            do="mend what it names in the run file, or ask who runs the cluster: it is no question of permission",
        )
    if status == FORBIDDEN:
        place = f" -n {asked.namespace}" if asked.kind.namespaced and asked.namespace else ""
        more = "" if asked.kind.namespaced else "; it belongs to the whole cluster, an administrator may apply it"
        return Refused(
            f"you may not {asked.verb} {asked.object}",
            where=where,
            why=words,
            do=f"`kubectl auth can-i {asked.verb} {asked.kind.plural}{place}` asks; a role has to allow it{more}",
        )
    if status == NOT_FOUND and not document and asked.kind.product:
        return Refused(
            f"the cluster has no {asked.kind.name} ({asked.kind.api_version})",
            where=where,
            why=f"{asked.kind.product} is not installed, or serves another version",
            do=INSTEAD.get(asked.kind.name, f"install {asked.kind.product}").format(**dict(asked.releases)),
        )
    if status == CONFLICT and "conflict" in words:
        return Refused(
            f"somebody else has changed {asked.object}",
            where=where,
            why=words,
            do="take that change back, or `coremill k8s delete` the job and submit it anew",
        )
    if status in (_BAD_REQUEST, INVALID):
        return Refused(
            f"the cluster does not take {asked.object}",
            where=where,
            why=words,
            do="`coremill k8s check --schemas cluster` says which fields its schemas do not know",
        )
    return Refused(f"the cluster did not {asked.verb} {asked.object}", where=where, why=words)


def _status_of(body: str) -> dict[str, Any]:
    """The Status of an answer; empty where the server has not even the path."""
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) and document.get("kind") == "Status" else {}
