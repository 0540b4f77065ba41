"""Conditions, as Kubernetes objects have them in their status: which hold, which do not, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremill.k8s.objects.pods import CONTAINER

INDEX = "batch.kubernetes.io/job-completion-index"


def condition(body: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    """One condition; None where the object has it not."""
    found = ((body or {}).get("status") or {}).get("conditions") or ()
    return next((one for one in found if one.get("type") == name), None)


def holds(body: Mapping[str, Any] | None, name: str) -> bool:
    return (condition(body, name) or {}).get("status") == "True"


def ready_words(body: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a NodePool or EC2NodeClass is ready; if not why, by the conditions that it waits for."""
    if holds(body, "Ready"):
        return True, ""
    found = (body.get("status") or {}).get("conditions") or ()
    failing = [one for one in found if one.get("status") != "True" and one.get("type") != "Ready"]
    # Of those that are false something is wrong; what is unknown was not looked at yet.
    failing = [one for one in failing if one.get("status") == "False"] or failing
    words = [f"{one['type']}: {one.get('message') or one.get('reason') or 'not yet'}" for one in failing]
    last = condition(body, "Ready") or {}
    return False, "; ".join(words) or str(last.get("message") or last.get("reason") or "Karpenter has not seen it yet")


def index_of(pod: Mapping[str, Any]) -> int | None:
    """The number of a pod among those of its job."""
    metadata = pod["metadata"]
    found = (metadata.get("annotations") or {}).get(INDEX, (metadata.get("labels") or {}).get(INDEX))
    return int(found) if found is not None and str(found).isdigit() else None


def newest_of(pods: tuple[dict[str, Any], ...], index: int) -> dict[str, Any] | None:
    """The pod that has a number now: pods that ended stay for a while beside their successors."""
    own = [pod for pod in pods if index_of(pod) == index]
    # A pod that ends or has ended is older than its successor even where both were made in the same second.
    return max(own, key=lambda pod: (_created(pod), not _is_over(pod)), default=None)


def container_status(pod: Mapping[str, Any], *, of_init: bool = False) -> Mapping[str, Any]:
    """Of coremill's container; or of the init container that has not ended well."""
    status = pod.get("status") or {}
    if not of_init:
        found = status.get("containerStatuses") or ()
        return next((one for one in found if one.get("name") == CONTAINER), {})
    found = status.get("initContainerStatuses") or ()
    over = [one for one in found if ((one.get("state") or {}).get("terminated") or {}).get("exitCode") == 0]
    return next((one for one in found if one not in over), {})


def exit_code(pod: Mapping[str, Any]) -> int | None:
    """What coremill ended with."""
    ended = (container_status(pod).get("state") or {}).get("terminated") or {}
    return ended.get("exitCode")


def ended_reason(pod: Mapping[str, Any]) -> str:
    """Why coremill's container ended, as the kubelet has it: Completed, Error, OOMKilled."""
    ended = (container_status(pod).get("state") or {}).get("terminated") or {}
    return str(ended.get("reason") or "")


def _created(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def _is_over(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
