"""`coremill k8s status`: a job, its pods and its nodes, with the reasons in words; on screen or as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from coremill.k8s.cluster.conditions import condition, exit_code, holds, index_of, newest_of, ready_words
from coremill.k8s.cluster.diagnosis import Reason, end_words, job_failure, job_reasons, pod_reason
from coremill.k8s.cluster.seen import Object, Seen
from coremill.k8s.objects.nodes import INSTANCE_TYPE_LABEL
from coremill.k8s.objects.queue import QUEUE_LABEL
from coremill.report.terminal import NONE, print_heading, print_line, print_rows

COMPLETE, FAILED = ("Complete", "Completed"), ("Failed",)
OVER = ("complete", "failed")


def state_of(seen: Seen) -> str:
    """absent, deleting, complete, failed, stopping, stopped, queued, pending, starting or running."""
    live = seen.live
    if live is None:
        return "absent"
    if live["metadata"].get("deletionTimestamp"):
        return "deleting"
    if any(holds(live, name) for name in COMPLETE):
        return "complete"
    if any(holds(live, name) for name in FAILED):
        return "failed"
    if is_stopped(seen):
        return "stopping" if live_pods(seen) else "stopped"
    if is_in_queue(seen) and not holds(seen.workload, "Admitted") and not live_pods(seen):
        return "queued"
    running = sum(phase_of(pod) in ("Running", "Succeeded") for pod in current_pods(seen))
    return "running" if running >= seen.nodes else "starting" if running else "pending"


def is_stopped(seen: Seen) -> bool:
    """By `coremill k8s stop`, or by hand; a job that waits in a queue is suspended too, but nobody stopped it."""
    if is_in_queue(seen):
        return seen.workload is not None and seen.workload.get("spec", {}).get("active") is False
    return bool(seen.live and seen.live.get("spec", {}).get("suspend") is True)


def is_in_queue(seen: Seen) -> bool:
    """Kueue decides when the job starts."""
    return seen.live is not None and QUEUE_LABEL in (seen.live["metadata"].get("labels") or {})


def live_pods(seen: Seen) -> list[Object]:
    return [pod for pod in seen.pods if phase_of(pod) not in ("Succeeded", "Failed")]


def current_pods(seen: Seen) -> list[Object]:
    """One for each number that has any: the newest."""
    return [pod for index in range(seen.nodes) if (pod := newest_of(seen.pods, index)) is not None]


def phase_of(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "Unknown")


def status_of(seen: Seen) -> dict[str, Any]:
    """What `coremill k8s status --json` prints."""
    state = state_of(seen)
    reasons = [] if state in OVER else job_reasons(seen)
    return {
        "job": seen.name,
        "namespace": seen.namespace,
        "kind": seen.kind,
        "state": state,
        "words": _words(seen, state),
        "reasons": [reason.to_json() for reason in reasons],
        "pods": [_pod_row(index, seen) for index in range(seen.nodes)],
        "node_pool": _readiness(seen.pool),
        "node_class": _readiness(seen.node_class),
        "nodes": [_node_row(claim) for claim in seen.node_claims],
        "claim": {"name": seen.claim_name, "phase": ((seen.claim or {}).get("status") or {}).get("phase")},
        "unseen": list(seen.unseen),
    }


def headline(document: dict[str, Any]) -> str:
    """The job in one line."""
    return f"{document['kind']} {document['namespace']}/{document['job']}: {document['words']}"


def told_reasons(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Each reason once, with whom it keeps waiting."""
    found: dict[tuple[str, str | None], list[str]] = {}
    for reason in document["reasons"]:
        found.setdefault((reason["words"], reason["do"]), []).append("the job")
    for pod in document["pods"]:
        if pod["reason"]:
            found.setdefault((pod["reason"]["words"], pod["reason"]["do"]), []).append(f"pod {pod['index']}")
    return [(f"{_together(who)}: {words}" + (f"; {do}" if do else ""), words) for (words, do), who in found.items()]


def show_status(document: dict[str, Any], console: Console) -> None:
    """The screen: the job, its pods, why they wait, and the nodes as `kubectl get nodepool,ec2nodeclass` shows them."""
    print_heading(console, headline(document))
    if document["state"] == "absent":
        print_line(console, "it is not in the cluster; coremill k8s submit CONFIG sends it there")
    pods = [
        (str(pod["index"]), pod["pod"] or NONE, pod["state"], pod["node"] or NONE, pod["ranks"])
        for pod in document["pods"]
        if pod["pod"]
    ]
    if pods:
        print_rows(console, "pod", ("", "name", "state", "node", "ranks"), pods)
    for text, _ in told_reasons(document):
        print_line(console, text, style="yellow")
    pools = [
        (kind, one["name"], str(one["nodes"]) if one["nodes"] is not None else NONE, str(one["ready"]), one["why"])
        for kind, one in (("NodePool", document["node_pool"]), ("EC2NodeClass", document["node_class"]))
        if one
    ]
    if pools:
        print_heading(console, "Nodes")
        print_rows(console, "", ("", "name", "nodes", "ready", "why not"), pools)
    nodes = [(one["name"], one["instance"] or NONE, one["state"]) for one in document["nodes"]]
    if nodes:
        print_rows(console, "node", ("", "type", "state"), nodes)
    for words in document["unseen"]:
        print_line(console, f"not seen: {words}", style="yellow")


def _words(seen: Seen, state: str) -> str:
    if state == "failed":
        why = job_failure(seen)
        return f"failed: {why}" if why else "failed"
    running = sum(phase_of(pod) == "Running" for pod in current_pods(seen))
    words = {
        "absent": "not submitted",
        "deleting": "being deleted",
        "complete": "complete",
        "stopping": f"stopping: {len(live_pods(seen))} pods save and end",
        "stopped": "stopped; coremill k8s submit goes on from its newest checkpoint",
        "queued": "in its queue",
    }
    return words.get(state, f"{state}, {running} of {seen.nodes} pods run")


def _pod_row(index: int, seen: Seen) -> dict[str, Any]:
    pod, first = newest_of(seen.pods, index), index * seen.ranks_per_node
    last = first + seen.ranks_per_node - 1
    ranks = str(first) if first == last else f"{first}-{last}"
    row: dict[str, Any] = {"index": index, "ranks": ranks, "pod": None, "state": "absent", "node": None}
    if pod is None:
        return {**row, "exit_code": None, "earlier_pods": 0, "reason": None}
    reason: Reason | None = pod_reason(pod, seen)
    code = exit_code(pod)
    phase = phase_of(pod)
    state = f"ended with {code}: {end_words(pod)}" if code is not None else phase.lower()
    if pod["metadata"].get("deletionTimestamp"):
        state = "ending: it saves"
    return {
        **row,
        "pod": pod["metadata"]["name"],
        "state": state,
        "node": (pod.get("spec") or {}).get("nodeName"),
        "exit_code": code,
        "earlier_pods": sum(index_of(one) == index for one in seen.pods) - 1,
        "reason": None if reason is None else reason.to_json(),
    }


def _readiness(body: Object | None) -> dict[str, Any] | None:
    if body is None:
        return None
    ready, why = ready_words(body)
    nodes = ((body.get("status") or {}).get("resources") or {}).get("nodes")
    count = int(nodes) if nodes is not None else 0 if body.get("kind") == "NodePool" else None
    return {"name": body["metadata"]["name"], "ready": ready, "why": why, "nodes": count}


def _node_row(claim: Object) -> dict[str, Any]:
    labels = claim["metadata"].get("labels") or {}
    said = condition(claim, "Launched") or {}
    state = "launched" if holds(claim, "Launched") else f"not launched: {said.get('message') or 'asked for'}"
    for name in ("Registered", "Ready"):
        state = name.lower() if holds(claim, name) else state
    if claim["metadata"].get("deletionTimestamp"):
        state = "going"
    return {
        "name": (claim.get("status") or {}).get("nodeName") or claim["metadata"]["name"],
        "instance": labels.get(INSTANCE_TYPE_LABEL),
        "capacity": labels.get("karpenter.sh/capacity-type"),
        "state": state,
    }


def _together(who: list[str]) -> str:
    pods = [one.removeprefix("pod ") for one in who if one.startswith("pod ")]
    if len(pods) < 2:
        return who[0]
    return f"pods {', '.join(pods)}"
