"""Why a pod is not running, in words: no node type fits, quota, image, volume, NodePool not ready. Pure: from `Seen`.

What is said last counts, and of several causes the one that has to be mended first: a volume or a pool that is not
there before machines that are short.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from coremill.k8s.cluster.conditions import (
    condition,
    container_status,
    ended_reason,
    exit_code,
    holds,
    ready_words,
)
from coremill.k8s.cluster.seen import Object, Seen
from coremill.k8s.names import REPLICATED_JOB

# What coremill's exit codes mean to a job.
CODE_WORDS = {
    0: "done",
    69: "a peer was lost",
    70: "numbers not to be trusted",
    74: "storage",
    75: "saved on request",
    78: "bad config or input",
    137: "killed: out of memory, or beyond its grace",
    143: "ended by SIGTERM",
}
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_SHORT = re.compile(r"InsufficientInstanceCapacity|insufficient capacity|ICE|UnfulfillableCapacity", re.IGNORECASE)
_ACCOUNT = re.compile(r"VcpuLimitExceeded|InstanceLimitExceeded|MaxSpotInstanceCountExceeded")
_VOLUME = re.compile(r"persistentvolumeclaim|PersistentVolumeClaims|volume node affinity", re.IGNORECASE)
_NO_TYPE = re.compile(r"no instance type|incompatible with nodepool|incompatible requirements|did not tolerate")


@dataclass(frozen=True)
class Reason:
    """Why something does not run yet: a kind for scripts, words, and what to do where that is known."""

    kind: str  # node-type, quota, capacity, image, volume, node-pool, node-start, node, queue, secret, scheduling, ...
    words: str
    do: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pod_reason(pod: Object, seen: Seen) -> Reason | None:
    """Why a pod does not run; None: it runs, or has ended by itself."""
    status = pod.get("status") or {}
    if status.get("phase") == "Failed":
        return _failed_before_it_ran(pod)
    if status.get("phase") != "Pending":
        return None
    if (condition(pod, "PodScheduled") or {}).get("status") != "True" and not pod.get("spec", {}).get("nodeName"):
        looks: tuple[Callable[[Object, Seen], Reason | None], ...] = (
            _gated,
            _claim_not_bound,
            _pool_not_ready,
            _said_by_the_scheduler,
            _short_of_machines,
            _node_starting,
        )
        found = (look(pod, seen) for look in looks)
        return next((reason for reason in found if reason is not None), Reason("scheduling", "waits for a node"))
    return _on_its_node(pod, seen)


def job_reasons(seen: Seen) -> list[Reason]:
    """Why there are no pods, or not all: quota of the namespace, a queue, a refusal that the job controller got."""
    found: list[Reason] = []
    if seen.live is None or len(seen.pods) >= seen.nodes or seen.live.get("spec", {}).get("suspend") is True:
        queue = _in_the_queue(seen)
        return [queue] if queue else []
    for event in reversed(seen.events):
        said = event.get("involvedObject") or {}
        names = (seen.name, f"{seen.name}-{REPLICATED_JOB}-0")
        of_job = said.get("kind") in ("TrainJob", "JobSet", "Job") and said.get("name") in names
        if not of_job or event.get("type") != "Warning":
            continue
        words = str(event.get("message") or event.get("reason"))
        if "exceeded quota" in words:
            do = "ask for less (fleet.nodes, kubernetes.cpus, kubernetes.memory_gib), or have the ResourceQuota raised"
            found.append(Reason("quota", f"the quota of namespace {seen.namespace} is used up: {_short(words)}", do))
        else:
            found.append(Reason("controller", f"{event.get('reason')}: {_short(words)}"))
        break
    queue = _in_the_queue(seen)
    return [*found, *([queue] if queue else [])]


def job_failure(seen: Seen) -> str:
    """Why a job failed: its own words, and what the pod that ended it ended with."""
    said = condition(seen.live, "Failed") or {}
    ends = [f"{pod['metadata']['name']} {words}" for pod in seen.pods if (words := _end_words(pod))]
    pods = "; ".join(ends[:3])
    return ": ".join(text for text in (str(said.get("message") or said.get("reason") or ""), pods) if text)


def _end_words(pod: Object) -> str:
    """How a pod failed; empty: it did not."""
    code, before = exit_code(pod), _failed_before_it_ran(pod)
    if code:
        return f"ended with {code} ({end_words(pod)})"
    return before.words if before is not None and code is None else ""


def end_words(pod: Object) -> str:
    """What a pod's exit code means."""
    if ended_reason(pod) == "OOMKilled":
        return "out of memory: beyond the pod's limit"
    code = exit_code(pod)
    return CODE_WORDS.get(code if code is not None else -1, "a failure")


def _gated(pod: Object, seen: Seen) -> Reason | None:
    if not pod.get("spec", {}).get("schedulingGates"):
        return None
    return _in_the_queue(seen) or Reason("queue", "held back by a scheduling gate")


def _in_the_queue(seen: Seen) -> Reason | None:
    """Kueue has not let the job in."""
    if seen.workload is None or holds(seen.workload, "Admitted"):
        return None
    if seen.workload.get("spec", {}).get("active") is False:
        return None  # stopped
    said = condition(seen.workload, "QuotaReserved") or {}
    words = said.get("message") or "it has not been looked at yet"
    return Reason(
        "queue",
        f"waits in its queue: {_short(str(words))}",
        "it starts when others end; `kubectl get workloads` shows who is before it",
    )


def _claim_not_bound(pod: Object, seen: Seen) -> Reason | None:
    claim = seen.claim
    if claim is None:
        if any(words.startswith("volume:") for words in seen.unseen):
            return None
        do = "make it, or have one made: kubernetes.storage: fsx or fsx-new"
        return Reason("volume", f"the claim {seen.claim_name} is not there, in namespace {seen.namespace}", do)
    phase = (claim.get("status") or {}).get("phase")
    if phase == "Bound":
        return None
    said = _last_event(seen, "PersistentVolumeClaim", seen.claim_name)
    words = f": {_short(said)}" if said else ""
    do = "the volume, its driver (FSx CSI) and its zone have to be there; a new file system takes some ten minutes"
    return Reason("volume", f"the claim {seen.claim_name} is {phase or 'not bound'}{words}", do)


def _pool_not_ready(pod: Object, seen: Seen) -> Reason | None:
    for kind, body in (("EC2NodeClass", seen.node_class), ("NodePool", seen.pool)):
        if body is None:
            continue
        is_ready, words = ready_words(body)
        if not is_ready:
            advice = _advice_for_pool(words)
            return Reason("node-pool", f"{kind} {body['metadata']['name']} is not ready: {words}", advice)
    if seen.pool_name is not None and seen.pool is None and not any(one.startswith("NodePool") for one in seen.unseen):
        return Reason("node-pool", f"the NodePool {seen.pool_name} is not there", "submit it again")
    return None


def _advice_for_pool(words: str) -> str | None:
    if "Subnet" in words or "SecurityGroup" in words:
        return "tag them karpenter.sh/discovery: CLUSTER, as kubernetes.cluster has it"
    if "InstanceProfile" in words or "role" in words.lower():
        return "kubernetes.role has to name the IAM role of Karpenter's nodes, and Karpenter may pass it (iam:PassRole)"
    return "kubernetes.ami names an image that is not there" if "AMI" in words else None


def _said_by_the_scheduler(pod: Object, seen: Seen) -> Reason | None:
    """What Karpenter, or without it the scheduler, last said of this pod."""
    karpenter = _last_event(seen, "Pod", pod["metadata"]["name"], "FailedScheduling", by="karpenter")
    said = karpenter or str((condition(pod, "PodScheduled") or {}).get("message") or "")
    if "exceed limits for nodepool" in said or "limits have been exhausted" in said:
        do = "machines of an earlier run still end; else raise spec.limits of the NodePool"
        return Reason("quota", f"the limit of the NodePool is used up: {_short(said)}", do)
    if _VOLUME.search(said):
        return Reason("volume", _short(said), "the claim has to be there and bound, in the zone of the nodes")
    if _NO_TYPE.search(said):
        do = "`coremill k8s check` names the field; or list more types (kubernetes.instances), leave the zone open"
        return Reason("node-type", f"no node type fits: {_short(said)}", do)
    if seen.pool_name is None and "nodes are available" in said:
        do = "nodes of the listed types have to be there, with room; `kubectl get nodes` shows them"
        return Reason("node-type", f"no node has room: {_short(said)}", do)
    return None


def _short_of_machines(pod: Object, seen: Seen) -> Reason | None:
    """EC2 has none, or the account may have no more: Karpenter takes such claims away again, but their events stay."""
    said = [str(one.get("message") or "") for claim in seen.node_claims if (one := condition(claim, "Launched"))]
    said += [
        str(event.get("message") or "")
        for event in seen.events
        if (event.get("involvedObject") or {}).get("kind") == "NodeClaim"
        and re.fullmatch(rf"{re.escape(str(seen.pool_name))}-[a-z0-9]+", str(event["involvedObject"].get("name", "")))
    ]
    for words in reversed(said):
        if _ACCOUNT.search(words):
            do = "have the quota of the account raised (Service Quotas, EC2, Running instances), or ask for less"
            return Reason("quota", f"the account may have no more of these machines: {_short(words)}", do)
        if _SHORT.search(words) and not any(holds(claim, "Launched") for claim in seen.node_claims):
            do = "list more types (kubernetes.instances), leave the zone open, or take capacity: spot-or-on-demand"
            return Reason("capacity", f"EC2 has none of these machines now: {_short(words)}", do)
    return None


def _node_starting(pod: Object, seen: Seen) -> Reason | None:
    if not seen.node_claims:
        return None
    registered = sum(holds(claim, "Registered") for claim in seen.node_claims)
    total = len(seen.node_claims)
    return Reason("node-start", f"its node is starting: {registered} of {total} have joined; some minutes each")


def _on_its_node(pod: Object, seen: Seen) -> Reason:
    waiting: dict[str, Any] = {}
    for of_init in (True, False):
        state = container_status(pod, of_init=of_init).get("state") or {}
        waiting = waiting or state.get("waiting") or {}
    failed = _failed_before_it_ran(pod)
    if failed is not None:
        return failed
    why, said = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if why in _IMAGE:
        image = container_status(pod).get("image") or "the image"
        do = "kubernetes.image has to be there, and nodes allowed to pull it (ECR: AmazonEC2ContainerRegistryPullOnly)"
        return Reason("image", f"{image} cannot be pulled: {_short(said or why)}", do)
    if why in _CONFIG:
        return Reason("secret" if "secret" in said else "starting", _short(said or why), "make what it names")
    mount = _last_event(seen, "Pod", pod["metadata"]["name"], "FailedMount", "FailedAttachVolume")
    if mount:
        do = "Lustre: TCP 988 and 1018 to 1023 from the nodes, same zone, FSx CSI driver on the nodes"
        return Reason("volume", f"the volume cannot be mounted: {_short(mount)}", do)
    pulling = _last_event(seen, "Pod", pod["metadata"]["name"], "Pulling", "Pulled")
    return Reason("starting", "its image is being pulled" if pulling.startswith("Pulling") else "its container starts")


def _failed_before_it_ran(pod: Object) -> Reason | None:
    """Its init container failed, or its node gave it up; what coremill itself ended with is told by its exit code."""
    status = pod.get("status") or {}
    ended = (container_status(pod, of_init=True).get("state") or {}).get("terminated") or {}
    if ended.get("exitCode"):
        return Reason(
            "volume",
            f"the folder on the volume could not be made (exit code {ended['exitCode']})",
            f"`kubectl logs {pod['metadata']['name']} -c make-folder` says why; kubernetes.make_folder: false where it"
            " is there",
        )
    if exit_code(pod) is None and status.get("reason"):
        return Reason("node", f"{status['reason']}: {_short(str(status.get('message') or 'its node gave it up'))}")
    return None


def _last_event(seen: Seen, kind: str, name: str, *reasons: str, by: str | None = None) -> str:
    for event in reversed(seen.events):
        said = event.get("involvedObject") or {}
        source = (event.get("source") or {}).get("component") or event.get("reportingComponent") or ""
        if said.get("kind") != kind or said.get("name") != name or (reasons and event.get("reason") not in reasons):
            continue
        if by is None or source == by:
            return str(event.get("message") or event.get("reason") or "")
    return ""


def _short(text: str, longest: int = 300) -> str:
    """Karpenter lists every requirement it had; the end of it, why, is kept."""
    plain = " ".join(text.split())
    if len(plain) <= longest:
        return plain
    return f"{plain[: longest * 2 // 3]} ... {plain[-(longest // 3) :]}"
