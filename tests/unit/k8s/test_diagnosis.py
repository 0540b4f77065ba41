"""Why a pod waits, in words: from what a cluster shows, without one."""

from __future__ import annotations

from typing import Any

import pytest

from coremill.errors import CoremillError, InputError
from coremill.k8s.cluster.conditions import newest_of, ready_words
from coremill.k8s.cluster.diagnosis import job_failure, job_reasons, pod_reason
from coremill.k8s.cluster.kinds import KINDS
from coremill.k8s.cluster.refusals import Asked, Refused, Unavailable, refusal_of
from coremill.k8s.cluster.seen import Seen, event_time
from coremill.k8s.cluster.status import state_of, status_of, told_reasons

POOL = "coremill.run"
READY = {"metadata": {"name": POOL}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
BOUND = {"metadata": {"name": "coremill"}, "status": {"phase": "Bound"}}
JOB: dict[str, Any] = {"kind": "TrainJob", "metadata": {"name": "run", "namespace": "coremill"}, "spec": {}}


def seen(*pods: dict[str, Any], **changes: Any) -> Seen:
    values = {
        "kind": "TrainJob",
        "name": "run",
        "namespace": "coremill",
        "nodes": 2,
        "ranks_per_node": 2,
        "pool_name": POOL,
        "live": JOB,
        "pods": pods,
        "pool": {**READY, "kind": "NodePool"},
        "node_class": READY,
        "claim_name": "coremill",
        "claim": BOUND,
    }
    return Seen(**{**values, **changes})


def pod(index: int = 0, phase: str = "Pending", made: str = "1", **status: Any) -> dict[str, Any]:
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": f"run-node-0-{index}-{made}", "annotations": annotations, "creationTimestamp": made}
    return {"kind": "Pod", "metadata": metadata, "spec": {}, "status": {"phase": phase, **status}}


def event(kind: str, name: str, reason: str, message: str, by: str = "") -> dict[str, Any]:
    said = {"kind": kind, "name": name}
    source = {"component": by}
    body = {"metadata": {}, "involvedObject": said, "reason": reason, "message": message, "source": source}
    return {**body, "type": "Warning", "lastTimestamp": "2026-01-01T00:00:00Z"}


def claim(**conditions: tuple[str, str]) -> dict[str, Any]:
    rows = [{"type": kind, "status": status, "message": text} for kind, (status, text) in conditions.items()]
    return {"metadata": {"name": f"{POOL}-abc12"}, "status": {"conditions": rows}}


def on_node(**state: Any) -> dict[str, Any]:
    rows = [{"name": "node", "image": "a:1", "state": state}]
    return pod(conditions=[{"type": "PodScheduled", "status": "True"}], containerStatuses=rows)


WAITING = pod()
NAME = WAITING["metadata"]["name"]
NOT_READY = {"type": "SecurityGroupsReady", "status": "False", "message": "did not match any SecurityGroups"}
BROKEN_CLASS = {"metadata": {"name": POOL}, "status": {"conditions": [NOT_READY]}}
SHORT = "creating instance, insufficient capacity, with fleet error(s), InsufficientInstanceCapacity: no c7i.8xlarge"
VCPUS = "VcpuLimitExceeded: You have requested more vCPU capacity than your current vCPU limit of 32 allows"
SCHEDULER = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
PULL = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
SECRET = {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "wandb" not found'}}
GATED = {**WAITING, "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
LIMIT = 'all available instance types exceed limits for nodepool: "coremill.run"'
KARPENTER = 'incompatible with nodepool "coremill.run", no instance type has enough resources'
UNSCHEDULED = pod(conditions=[{"type": "PodScheduled", "status": "False", "message": SCHEDULER}])


@pytest.mark.parametrize(
    ("one", "changes", "kind", "words"),
    [
        (WAITING, {}, "scheduling", "waits for a node"),
        (WAITING, {"claim": None}, "volume", "is not there, in namespace coremill"),
        (WAITING, {"claim": {"status": {"phase": "Pending"}}}, "volume", "the claim coremill is Pending"),
        (WAITING, {"node_class": BROKEN_CLASS}, "node-pool", "SecurityGroupsReady: did not match any"),
        (WAITING, {"pool": None}, "node-pool", f"the NodePool {POOL} is not there"),
        (WAITING, {"events": (event("Pod", NAME, "FailedScheduling", KARPENTER, "karpenter"),)}, "node-type", "fits"),
        (WAITING, {"events": (event("Pod", NAME, "FailedScheduling", LIMIT, "karpenter"),)}, "quota", "NodePool"),
        (WAITING, {"events": (event("NodeClaim", f"{POOL}-x", "Ice", SHORT),)}, "capacity", "EC2 has none"),
        (WAITING, {"events": (event("NodeClaim", f"{POOL}-x", "Failed", VCPUS),)}, "quota", "the account"),
        (WAITING, {"node_claims": (claim(Launched=("False", VCPUS)),)}, "quota", "limit of 32"),
        (WAITING, {"node_claims": (claim(Launched=("True", "")),)}, "node-start", "0 of 1 have joined"),
        (UNSCHEDULED, {"pool_name": None, "pool": None, "node_class": None}, "node-type", "no node has room"),
        (GATED, {}, "queue", "scheduling gate"),
        (on_node(**PULL), {}, "image", "a:1 cannot be pulled: not found"),
        (on_node(**SECRET), {}, "secret", "wandb"),
        (on_node(), {"events": (event("Pod", NAME, "FailedMount", "timed out"),)}, "volume", "cannot be mounted"),
        (on_node(), {"events": (event("Pod", NAME, "Pulling", "Pulling image a:1"),)}, "starting", "being pulled"),
        (on_node(), {}, "starting", "its container starts"),
    ],
)
def test_why_a_pod_waits(one, changes, kind, words):
    reason = pod_reason(one, seen(one, **changes))
    assert reason is not None and reason.kind == kind and words in reason.words


def test_events_of_other_pools_and_pods_do_not_count():
    events = (event("NodeClaim", "other-x", "Ice", SHORT), event("Pod", "other", "FailedScheduling", KARPENTER))
    events += (event("NodeClaim", f"{POOL}-2-abc12", "Ice", SHORT),)  # of a run whose name begins like ours
    assert pod_reason(WAITING, seen(WAITING, events=events)).kind == "scheduling"


def test_what_may_not_be_read_is_not_called_missing():
    unseen = ("volume: you may not get it", "NodePool: you may not get it")
    hidden = seen(WAITING, claim=None, pool=None, node_class=None, unseen=unseen)
    assert pod_reason(WAITING, hidden).kind == "scheduling"
    assert status_of(hidden)["unseen"] == list(unseen)


def test_an_init_container_that_failed():
    state = {"terminated": {"exitCode": 1}}
    one = {**on_node()}
    one["status"] = {**one["status"], "initContainerStatuses": [{"name": "make-folder", "state": state}]}
    for phase in ("Pending", "Failed"):  # the second is what restartPolicy: Never makes of it
        one["status"]["phase"] = phase
        assert "folder on the volume could not be made (exit code 1)" in pod_reason(one, seen(one)).words
    over = {**JOB, "status": {"conditions": [{"type": "Failed", "status": "True", "message": "BackoffLimitExceeded"}]}}
    assert "BackoffLimitExceeded: run-node-0-0-1 the folder on the volume" in job_failure(seen(one, live=over))


def test_a_pod_that_its_node_gave_up_or_the_kernel_killed():
    evicted = pod(0, "Failed", reason="Evicted", message="The node was low on resource: memory.")
    reason = pod_reason(evicted, seen(evicted))
    assert reason.kind == "node" and reason.words == "Evicted: The node was low on resource: memory."
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    killed = pod(1, "Failed", containerStatuses=[{"name": "node", "state": ended}])
    assert pod_reason(killed, seen(killed)) is None
    assert status_of(seen(killed))["pods"][1]["state"] == "ended with 137: out of memory: beyond the pod's limit"


def test_a_quota_of_the_namespace_leaves_no_pods():
    said = event("Job", "run-node-0", "FailedCreate", "exceeded quota: team-a")
    (reason,) = job_reasons(seen(events=(said,)))
    assert reason.kind == "quota" and "team-a" in reason.words
    assert job_reasons(seen(events=(event("Job", "run-2", "FailedCreate", "exceeded quota: team-a"),))) == []
    assert job_reasons(seen(pod(0), pod(1), events=(said,))) == []  # an old word: now they are there


QUEUED = {
    **JOB,
    "metadata": {**JOB["metadata"], "labels": {"kueue.x-k8s.io/queue-name": "q"}},
    "spec": {"suspend": True},
}
WORKLOAD = {"metadata": {"name": "w"}, "spec": {}, "status": {"conditions": []}}


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (seen(live=None), "absent"),
        (seen(), "pending"),
        (seen(pod(0, "Running")), "starting"),
        (seen(pod(0, "Running"), pod(1, "Running")), "running"),
        (seen(live={**JOB, "spec": {"suspend": True}}), "stopped"),
        (seen(pod(0, "Running"), live={**JOB, "spec": {"suspend": True}}), "stopping"),
        (seen(live={**JOB, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}), "complete"),
        (seen(live={**JOB, "status": {"conditions": [{"type": "Completed", "status": "True"}]}}), "complete"),
        (seen(live={**JOB, "status": {"conditions": [{"type": "Failed", "status": "True"}]}}), "failed"),
        (seen(live={**JOB, "metadata": {"name": "run", "deletionTimestamp": "now"}}), "deleting"),
        (seen(live=QUEUED), "queued"),  # Kueue has not even made its Workload: suspended, and nobody stopped it
        (seen(live=QUEUED, workload=WORKLOAD), "queued"),
        (seen(live=QUEUED, workload={**WORKLOAD, "spec": {"active": False}}), "stopped"),
    ],
)
def test_states(found, state):
    assert state_of(found) == state
    assert status_of(found)["state"] == state


def test_a_failed_job_names_the_pod_that_ended_it():
    ended = pod(1, "Failed", containerStatuses=[{"name": "node", "state": {"terminated": {"exitCode": 70}}}])
    over = {**JOB, "status": {"conditions": [{"type": "Failed", "status": "True", "message": "PodFailurePolicy"}]}}
    words = job_failure(seen(ended, live=over))
    assert "PodFailurePolicy" in words and "ended with 70 (numbers not to be trusted)" in words


def test_the_newest_pod_of_a_number_counts():
    old, new = pod(0, "Failed", "2026-01-01T00:00:00Z"), pod(0, "Pending", "2026-01-01T00:00:00Z")
    assert newest_of((new, old), 0) is new and newest_of((old, new), 0) is new
    assert newest_of((old,), 1) is None
    row = status_of(seen(old, new))["pods"][0]
    assert row["earlier_pods"] == 1 and row["ranks"] == "0-1"


def test_a_reason_that_several_pods_share_is_told_once():
    document = status_of(seen(pod(0), pod(1), claim=None))
    ((text, _),) = told_reasons(document)
    assert text.startswith("pods 0, 1: the claim coremill is not there")


def test_a_pool_that_nobody_has_looked_at():
    assert ready_words({"metadata": {}})[1] == "Karpenter has not seen it yet"


def test_events_are_ordered_by_the_time_they_have():
    assert event_time({"metadata": {}, "series": {"lastObservedTime": "3"}, "lastTimestamp": "2"}) == "3"
    assert event_time({"metadata": {"creationTimestamp": "1"}, "eventTime": None}) == "1"


def refused(status: int, body: str, kind: str = "NodePool") -> CoremillError:
    return refusal_of(status, body, Asked("patch", KINDS[kind], "coremill", "run", "here", (("karpenter", "1.14"),)))


def test_answers_become_errors():
    gone = refused(404, "404 page not found\n")
    assert isinstance(gone, Refused) and gone.kind_is_missing and "install Karpenter 1.14" in str(gone)
    absent = refused(404, '{"kind": "Status", "message": "nodepools \\"run\\" not found"}')
    assert isinstance(absent, Refused) and not absent.kind_is_missing
    assert isinstance(refused(503, "etcdserver: leader changed"), Unavailable)
    for status in (400, 401, 403, 409, 422):
        error = refused(status, '{"kind": "Status", "message": "Apply failed with 1 conflict"}')
        assert isinstance(error, InputError) and error.exit_code == 78 and "context here" in str(error)


def test_paths():
    assert KINDS["Pod"].path("a", "b") == "/api/v1/namespaces/a/pods/b"
    assert KINDS["NodePool"].path("a", "b") == "/apis/karpenter.sh/v1/nodepools/b"
