"""`coremill k8s submit | status | logs | stop | delete` against a real API server for custom resources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k8s.api_server import ApiServer, running, why_not
from k8s.cluster_scene import HUB_TOKEN, NAME, NAMESPACE, NODES, READY, USER_TOKEN, ClusterScene
from k8s.front import Front, serving

_reason = why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=f"no API server here: {_reason}")
KARPENTER = ("karpenter.sh/v1", "nodepools"), ("karpenter.k8s.aws/v1", "ec2nodeclasses")
POOL = f"{NAMESPACE}.{NAME}"
LONG = "COREMILL_LONG_TESTS" in os.environ  # a change of definitions takes the server half a minute
KUBECTL = Path(sys.executable).parent / "kubectl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with running(tmp_path_factory.mktemp("k8s")) as found:
        yield found


@pytest.fixture(scope="module")
def front(server: ApiServer) -> Iterator[Front]:
    with serving(server) as found:
        yield found


@pytest.fixture
def scene(front, server, tmp_path, monkeypatch, capsys) -> Iterator[ClusterScene]:
    found = ClusterScene(front, server, tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path / "cache"))
    for module in ("commands", "ending", "log_following"):
        monkeypatch.setattr(f"coremill.k8s.cluster.{module}.LOOK_SECONDS", 1.0)
    found.install({})
    found.clear()
    found.kubeconfig()
    found.write()
    found.claim()
    yield found
    texts = [*found.said, *(request.text for request in front.requests), *(one.path for one in front.requests)]
    texts += [json.dumps(one) for one in front.objects.values()]
    for token in (HUB_TOKEN, USER_TOKEN):
        assert not any(token in text for text in texts), "a token was written down"


def during(scene: ClusterScene, change: Callable[[], Any], when: Callable[[], bool]) -> threading.Thread:
    """Does something as soon as something holds, while a command runs."""

    def wait() -> None:
        end = time.monotonic() + 60
        while not when() and time.monotonic() < end:
            time.sleep(0.02)
        change()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def mutating(scene: ClusterScene) -> list[tuple[str, str]]:
    """Requests that would change something."""
    return [(one.method, one.path) for one in scene.front.requests if one.method != "GET" and "dryRun" not in one.query]


def test_submit_tries_everything_before_it_makes_it(scene):
    done = scene.coremill("submit")
    assert done.code == 0, done.error
    asked = [one for one in scene.front.requests if one.method == "PATCH"]
    order = [(one.path.rsplit("/", 2)[1], "dryRun" in one.query) for one in asked]
    pool, runtime, job = (
        (order.index((plural, True)), order.index((plural, False)))
        for plural in ("nodepools", "trainingruntimes", "trainjobs")
    )
    assert max(pool[0], runtime[0]) < min(pool[1], runtime[1]) < job[0] < job[1]
    assert all(one.query["fieldManager"] == ["coremill"] and one.query["force"] == ["false"] for one in asked)
    assert scene.train_job()["spec"]["trainer"]["numNodes"] == NODES
    assert "TrainJob/run created" in done.out and f"running, {NODES} of {NODES} pods run" in done.out
    assert "next: coremill k8s logs" in done.out


def test_submit_twice_changes_nothing(scene):
    assert scene.coremill("submit", "--no-wait").code == 0
    before = scene.train_job()["metadata"]["resourceVersion"]
    done = scene.coremill("submit", "--json")
    assert done.code == 0 and {one["action"] for one in done.document["objects"]} == {"unchanged"}
    assert scene.train_job()["metadata"]["resourceVersion"] == before


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_other_kinds_are_submitted_stopped_and_deleted(scene, kind):
    scene.write(f"kind: {kind}")
    done = scene.coremill("submit", "--json")
    assert done.code == 0 and done.document["state"] == "running", done.error
    assert scene.coremill("stop", "--json").document["state"] == "stopped"
    again = scene.coremill("submit", "--json").document
    assert again["state"] == "running" and again["objects"][-1]["action"] == "resumed"
    assert scene.coremill("delete", "--yes").code == 0
    assert scene.coremill("status", "--json").document["state"] == "absent"


def test_stop_suspends_and_submit_goes_on(scene):
    scene.coremill("submit")
    stopped = scene.coremill("stop")
    assert stopped.code == 0 and "ranks save" in stopped.out
    assert scene.train_job()["spec"]["suspend"] is True
    assert not [one for one in scene.front.objects.values() if one["kind"] == "Pod"]
    shown = scene.coremill("status")
    assert "coremill k8s submit goes on from its newest checkpoint" in shown.out
    again = scene.coremill("submit", "--json")
    assert again.document["objects"][-1] == {"object": "TrainJob/run", "action": "resumed"}
    assert scene.train_job()["spec"]["suspend"] is False
    assert again.document["state"] == "running"


def test_a_stopped_job_with_a_changed_run_file_is_made_anew(scene):
    scene.coremill("submit")
    uid = scene.train_job()["metadata"]["uid"]
    scene.write(steps=9)
    refused = scene.coremill("submit")
    assert refused.code == 78 and "the name of TrainJob/run is taken" in refused.error
    assert "coremill k8s stop" in refused.error
    assert scene.coremill("stop").code == 0
    again = scene.coremill("submit", "--json")
    assert again.code == 0, again.error
    assert again.document["objects"][-1]["action"] == "made anew"
    assert scene.train_job()["metadata"]["uid"] != uid


def test_a_failed_job_is_made_anew_and_a_complete_one_left(scene):
    scene.coremill("submit")
    uid = scene.train_job()["metadata"]["uid"]
    scene.set_status("trainer.kubeflow.org/v1alpha1", "trainjobs", {"conditions": [ended("Complete")]})
    done = scene.coremill("submit")
    assert done.code == 0 and "is complete" in done.out
    assert scene.train_job()["metadata"]["uid"] == uid
    scene.set_status("trainer.kubeflow.org/v1alpha1", "trainjobs", {"conditions": [ended("Failed")]})
    assert scene.coremill("submit", "--json").document["objects"][-1]["action"] == "made anew"
    assert scene.train_job()["metadata"]["uid"] != uid


def ended(kind: str, message: str = "") -> dict[str, str]:
    last = "2026-01-01T00:00:00Z"
    return {"type": kind, "status": "True", "reason": "Over", "message": message, "lastTransitionTime": last}


def test_a_job_that_fails_while_pods_start_is_told(scene):
    scene.pods_run = False

    def fail() -> None:
        state = {"terminated": {"exitCode": 78}}
        scene.pod(0, phase="Failed", containerStatuses=[{"name": "node", "state": state}])
        condition = ended("Failed", "Pod failed with exit code 78")
        scene.set_status("trainer.kubeflow.org/v1alpha1", "trainjobs", {"conditions": [condition]})

    thread = during(scene, fail, lambda: any(one["kind"] == "Pod" for one in scene.front.objects.values()))
    done = scene.coremill("submit")
    thread.join()
    assert done.code == 78 and "ended with 78 (bad config or input)" in done.error


def test_delete_takes_nodes_but_never_the_volume(scene):
    scene.write("storage: fsx, file_system: fs-0123456789abcdef0, mount_name: abc")
    scene.coremill("submit")
    refused = scene.coremill("delete")
    assert refused.code == 78 and "--yes" in refused.error and f"the NodePool {POOL} would go" in refused.error
    assert scene.train_job() is not None
    scene.patch.setattr("sys.stdin", Terminal())
    scene.patch.setattr("typer.confirm", lambda *_, **__: False)
    assert "nothing was deleted" in scene.coremill("delete").out and scene.train_job() is not None
    done = scene.coremill("delete", "--yes", "--json")
    assert done.code == 0 and f"NodePool/{POOL}" in done.document["deleted"]
    assert scene.train_job() is None and all(scene.custom(*place, POOL) is None for place in KARPENTER)
    kinds = {one["kind"] for one in scene.front.objects.values()}
    assert kinds == {"Namespace", "PersistentVolume", "PersistentVolumeClaim"}
    assert not [path for method, path in mutating(scene) if method == "DELETE" and "persistentvolume" in path]
    deletions = [one for one in scene.front.requests if one.method == "DELETE"]
    assert all(one.query["propagationPolicy"] == ["Background"] for one in deletions)
    assert "nothing of coremill/run is in the cluster" in scene.coremill("delete", "--yes").out


class Terminal:
    def isatty(self) -> bool:
        return True


def test_a_volume_that_is_there_is_left_as_it_is(scene):
    scene.write("storage: fsx, file_system: fs-0123456789abcdef0, mount_name: abc")
    done = scene.coremill("submit", "--json")
    actions = {one["object"]: one["action"] for one in done.document["objects"]}
    assert actions["PersistentVolumeClaim/coremill"] == "left"
    assert actions[f"PersistentVolume/{NAMESPACE}.coremill"] == "created"


# What users see when it does not work: each one message, and nothing was changed.


def test_no_permission(scene):
    scene.front.rules.forbidden.add(("patch", "nodepools"))
    done = scene.coremill("submit")
    assert done.code == 78 and f"you may not patch NodePool {POOL}" in done.error
    assert 'User "ana" cannot patch resource "nodepools"' in done.error
    assert "kubectl auth can-i patch nodepools" in done.error
    assert [path for _, path in mutating(scene)] == [f"/api/v1/namespaces/{NAMESPACE}"]


def test_an_unknown_user(scene):
    scene.kubeconfig(token="expired-token-0123456789")
    done = scene.coremill("status")
    assert done.code == 78 and "does not know who you are" in done.error and "expired-token" not in done.error


def test_no_cluster(scene):
    scene.kubeconfig("http://127.0.0.1:9")
    for command in ("submit", "status", "logs", "stop", "delete"):
        done = scene.coremill(command)
        assert done.code == 1 and "the cluster does not answer" in done.error, (command, done)
        assert "kubectl cluster-info" in done.error and done.error.count("\n") <= 4


def test_no_kubeconfig(scene):
    (scene.folder / "kubeconfig").unlink()
    for command in ("submit", "status", "logs", "stop", "delete"):
        done = scene.coremill(command)
        assert done.code == 78 and "there is no kubeconfig" in done.error, (command, done)
        assert "aws eks update-kubeconfig --name demo --region us-west-2" in done.error


def test_an_unknown_context_and_another_cluster(scene):
    done = scene.coremill("status", "--context", "there")
    assert done.code == 78 and "no context there" in done.error and "it has here" in done.error
    scene.kubeconfig(cluster="arn:aws:eks:us-west-2:123456789012:cluster/production")
    done = scene.coremill("submit")
    assert done.code == 78 and "talks to the cluster production, and the run file names demo" in done.error
    assert not scene.front.requests


@pytest.mark.parametrize(
    ("section", "group", "words", "instead"),
    [
        ("", "trainer.kubeflow.org", "no TrainJob", "install Kubeflow Trainer 2.3, or set kubernetes.kind: job"),
        ("kind: jobset", "jobset.x-k8s.io", "no JobSet", "install JobSet 0.12"),
        ("", "karpenter.k8s.aws", "no EC2NodeClass", "install Karpenter 1.14"),
        ("queue: q", "kueue.x-k8s.io", "no ResourceFlavor", "leave kubernetes.queue out"),
    ],
)
def test_a_kind_that_is_not_installed(scene, section, group, words, instead):
    scene.write(section)
    scene.front.rules.without.add(group)
    done = scene.coremill("submit")
    assert done.code == 78 and words in done.error and instead in done.error
    assert not mutating(scene)


OTHER_RELEASES = (
    ({"trainer": "2.1"}, "trainer: '2.3'", "the cluster runs Kubeflow Trainer 2.1, and the job is rendered for 2.3"),
    ({"trainer": "2.3"}, "trainer: '2.2'", "the cluster runs Kubeflow Trainer 2.3, and the job is rendered for 2.2"),
    ({"karpenter": "1.8"}, "karpenter: '1.14'", "the cluster runs Karpenter 1.8, and the job is rendered for 1.14"),
)


@pytest.mark.parametrize(("there", "wanted", "words"), OTHER_RELEASES if LONG else OTHER_RELEASES[:1])
def test_another_release_is_said_by_name(scene, there, wanted, words):
    scene.install(there)
    scene.write(wanted)
    done = scene.coremill("submit")
    assert done.code == 78 and words in done.error and "--set kubernetes." in done.error
    assert not mutating(scene)
    scene.install({})


def test_a_release_that_may_not_be_read_is_said(scene):
    scene.front.rules.forbidden.add(("get", "customresourcedefinitions"))
    done = scene.coremill("submit")
    assert done.code == 0 and "which release of Kubeflow Trainer the cluster runs is not known" in done.out


def test_a_quota(scene):
    words = "exceeded quota: team-a, requested: count/configmaps=1, used: count/configmaps=10, limited: 10"
    scene.front.rules.quota["configmaps"] = words
    done = scene.coremill("submit")
    assert done.code == 78 and f"the quota of namespace {NAMESPACE} has no room for ConfigMap" in done.error
    assert words in done.error and "ResourceQuota" in done.error


def test_a_name_that_is_taken(scene):
    metadata = {"name": NAME, "namespace": NAMESPACE, "labels": {"app.kubernetes.io/managed-by": "Helm"}}
    spec = {"podSelector": {}, "policyTypes": ["Ingress"]}
    scene.front.put({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec})
    done = scene.coremill("submit")
    assert done.code == 78 and f"the name of NetworkPolicy/{NAME} is taken" in done.error
    assert "coremill did not make it" in done.error and not mutating(scene)


def test_what_check_rejects_is_not_submitted(scene):
    scene.patch.setattr("coremill.k8s.render.node_pool", broken_pool)
    done = scene.coremill("submit")
    assert done.code == 78 and "nothing was submitted: coremill k8s check finds" in done.error
    assert not scene.front.requests


def broken_pool(job):
    from coremill.k8s.objects.nodes import node_pool

    body = node_pool(job)
    body["spec"]["template"]["spec"]["requirements"][3]["values"] = ["24xlarge, 48xlarge"]
    return body


# Status: why pods wait, in words.

KARPENTER_SAYS = (
    'Failed to schedule pod, incompatible with nodepool "coremill.run", daemonset overhead={"cpu":"310m"}, no instance'
    ' type satisfied resources {"cpu":"30310m","memory":"55Gi"} and requirements karpenter.sh/capacity-type In [spot]'
    " (no instance type has enough resources)"
)
POD_0 = f"{NAME}-node-0-0-a1b2c"


def waiting(scene: ClusterScene) -> dict[str, Any]:
    scene.pods_run = False
    scene.coremill("submit", "--no-wait")
    for version, plural in KARPENTER:
        scene.set_status(version, plural, {"conditions": READY}, POOL)
    return {}


def test_status_names_a_pool_that_is_not_ready(scene):
    waiting(scene)
    failing = [
        {**READY[0], "type": "SubnetsReady", "status": "False", "message": "SubnetSelector did not match any Subnets"},
        {**READY[0], "status": "False", "reason": "UnhealthyDependents", "message": "SubnetsReady=False"},
    ]
    scene.set_status("karpenter.k8s.aws/v1", "ec2nodeclasses", {"conditions": failing}, POOL)
    done = scene.coremill("status")
    assert f"EC2NodeClass {POOL} is not ready: SubnetsReady: SubnetSelector did not match any Subnets" in done.out
    assert "karpenter.sh/discovery" in done.out and "False" in done.out
    document = scene.coremill("status", "--json").document
    assert document["node_class"]["ready"] is False and document["node_pool"]["ready"] is True
    assert {pod["reason"]["kind"] for pod in document["pods"]} == {"node-pool"}


def test_status_names_what_no_node_fits_image_volume_and_quota(scene):
    waiting(scene)
    scene.event("Pod", POD_0, "FailedScheduling", KARPENTER_SAYS, by="karpenter")
    pull = {"name": "node", "image": "example.com/coremill:0.1"}
    pull["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "manifest unknown"}}
    scheduled = [{"type": "PodScheduled", "status": "True"}]
    scene.pod(1, phase="Pending", conditions=scheduled, containerStatuses=[pull])
    document = scene.coremill("status", "--json").document
    assert [pod["reason"]["kind"] for pod in document["pods"]] == ["node-type", "image"]
    assert document["state"] == "pending" and "no instance type has enough resources" in json.dumps(document)
    scene.pod(1, phase="Pending", conditions=scheduled)
    scene.event("Pod", f"{NAME}-node-0-1-a1b2c", "FailedMount", "mount.lustre: Connection timed out")
    assert "988" in scene.coremill("status").out
    scene.claim("Pending")
    kinds = [pod["reason"]["kind"] for pod in scene.coremill("status", "--json").document["pods"]]
    assert kinds == ["volume", "volume"]
    scene.front.take("Pod")
    quota = 'Error creating: pods "run-node-0-0-x" is forbidden: exceeded quota: team-a, requested: cpu=30'
    scene.event("Job", f"{NAME}-node-0", "FailedCreate", quota, by="job-controller")
    document = scene.coremill("status", "--json").document
    assert document["reasons"][0]["kind"] == "quota" and "team-a" in document["reasons"][0]["words"]


def test_status_without_permission_for_nodes_says_so(scene):
    waiting(scene)
    scene.front.rules.forbidden |= {("get", "nodepools"), ("list", "nodeclaims")}
    done = scene.coremill("status")
    assert done.code == 0 and "not seen: NodePool: you may not get NodePool" in done.out


# Logs.


def test_logs_follow_the_pod_of_a_rank_and_its_successor(scene):
    scene.coremill("submit")
    first, second = POD_0, f"{NAME}-node-0-0-zzzzz"
    scene.front.logs[first] = ["2026-01-01T00:00:01.1Z step 1", "2026-01-01T00:00:02.1Z step 2"]
    scene.front.logs[second] = ["2026-01-01T00:01:01.1Z step 3"]

    def taken() -> None:
        time.sleep(0.3)
        over = [{"name": "node", "state": {"terminated": {"exitCode": 75}}}]
        scene.pod(0, phase="Failed", containerStatuses=over)
        scene.pod(0, phase="Running", suffix="zzzzz", made=9)
        time.sleep(0.5)
        done = [{"name": "node", "state": {"terminated": {"exitCode": 0}}}]
        scene.set_status("trainer.kubeflow.org/v1alpha1", "trainjobs", {"conditions": [ended("Complete")]})
        scene.pod(0, phase="Succeeded", suffix="zzzzz", made=9, containerStatuses=done)

    thread = during(scene, taken, lambda: any(one.path.endswith("/log") for one in scene.front.requests))
    done = scene.coremill("logs")
    thread.join()
    assert done.code == 0 and done.out.splitlines() == ["step 1", "step 2", "step 3"]
    assert "complete" in done.error


def test_logs_so_far_of_another_rank_as_json(scene):
    scene.coremill("submit")
    scene.front.logs[f"{NAME}-node-0-1-a1b2c"] = [f"2026-01-01T00:00:0{n}.0Z {HUB_TOKEN} step {n}" for n in range(3)]
    done = scene.coremill("logs", "--rank", "1", "--no-follow", "--tail", "2", "--json")
    assert done.code == 0, done.error
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["text"] for row in rows] == ["*** step 1", "*** step 2"]  # a token in a log is not passed on
    scene.front.logs.clear()


def test_logs_of_what_is_not_there(scene):
    done = scene.coremill("logs", "--no-follow")
    assert done.code == 78 and "there is no pod 0" in done.error and "not submitted" in done.error
    done = scene.coremill("logs", "--rank", "7")
    assert done.code == 78 and "there is no rank 7" in done.error and "0 to 1" in done.error


def test_kubectl_sees_stops_and_deletes_the_same_job(scene):
    scene.coremill("submit")
    scene.front.logs[POD_0] = ["2026-01-01T00:00:01.1Z step 1"]
    kubectl = [str(KUBECTL), "--server", scene.front.address, "-n", NAMESPACE]

    scene.front.rules.token = None  # kubectl sends none without TLS

    def ask(*words: str) -> str:
        done = subprocess.run([*kubectl, *words], capture_output=True, text=True, timeout=60, env={"HOME": "/nowhere"})
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "step 1" in ask("logs", POD_0, "-c", "node")
    ask("patch", "trainjob", NAME, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    assert scene.coremill("status", "--json").document["state"] == "stopped"
    assert scene.coremill("submit", "--json").document["objects"][-1]["action"] == "resumed"
    ask("delete", "trainjob", NAME, "--wait=false")
    assert scene.coremill("status", "--json").document["state"] == "absent"


def test_stop_of_what_is_not_there(scene):
    done = scene.coremill("stop")
    assert done.code == 78 and f"there is no TrainJob {NAMESPACE}/{NAME}" in done.error


def test_in_a_queue_the_workload_is_put_aside(scene):
    """Kueue would start a suspended job again: its own object decides."""
    scene.server.install([workloads()])
    scene.write("queue: q")
    assert scene.coremill("submit", "--no-wait").code == 0
    early = scene.coremill("stop")
    assert early.code == 1 and "Kueue has not looked at TrainJob/run yet" in early.error
    uid = scene.train_job()["metadata"]["uid"]
    owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": NAME, "uid": uid}
    template = {"spec": {"containers": [{"name": "node", "image": "a:1"}], "restartPolicy": "Never"}}
    body = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": "trainjob-run", "namespace": NAMESPACE, "ownerReferences": [owner]},
        "spec": {"queueName": "q", "podSets": [{"name": "node", "count": NODES, "template": template}]},
    }
    path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads"
    status, answer = scene.server.ask("POST", path, body)
    assert status == 201, answer
    waits = {**READY[0], "type": "QuotaReserved", "status": "False", "message": "insufficient unused quota for cpu"}
    scene.set_status("kueue.x-k8s.io/v1beta2", "workloads", {"conditions": [waits]}, "trainjob-run")
    scene.front.take("Pod")
    document = scene.coremill("status", "--json").document
    assert document["state"] == "queued" and "insufficient unused quota" in document["reasons"][0]["words"]
    assert scene.coremill("stop", "--no-wait").code == 0
    workload = scene.custom("kueue.x-k8s.io/v1beta2", "workloads", "trainjob-run")
    assert workload["spec"]["active"] is False and scene.train_job()["spec"]["suspend"] is False
    assert scene.coremill("submit", "--no-wait").code == 0
    workload = scene.custom("kueue.x-k8s.io/v1beta2", "workloads", "trainjob-run")
    assert workload["spec"]["active"] is True


def workloads() -> dict[str, Any]:
    """Kueue's definition is not among those shipped, as nobody writes a Workload: any fields will do."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1beta2", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    version["subresources"] = {"status": {}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "workloads.kueue.x-k8s.io",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": "kueue.x-k8s.io",
            "scope": "Namespaced",
            "names": {"plural": "workloads", "singular": "workload", "kind": "Workload", "listKind": "WorkloadList"},
            "versions": [version],
        },
    }
