"""What controllers do with rendered objects, without a process: failure policy, pods, network, disruptions."""

from __future__ import annotations

import base64
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coremill.config.durations import Interval
from coremill.errors import InputError
from coremill.k8s.check.manifests import Manifest, manifests_in
from coremill.k8s.rehearse.controllers import PlannedSet, plan_set
from coremill.k8s.rehearse.disruptions import parse_disruption, reclaim_times
from coremill.k8s.rehearse.job_controller import BY_LIMIT, BY_POLICY, JobController, SetController
from coremill.k8s.rehearse.judging import _lost_after
from coremill.k8s.rehearse.machine import require_programs_in_sight
from coremill.k8s.rehearse.pods import Mount, Pod, Secrets, make_pod
from coremill.k8s.rehearse.policy import has_service, nft_rules, selects
from coremill.k8s.rehearse.provisions import provisions_for, put_on_volume, readable_mounts
from coremill.k8s.rehearse.run_in_pods import PodRunFile, PodWords, RunEvents, run_file_of, with_fewer_threads
from coremill.k8s.rehearse.written import WrittenObjects
from coremill.k8s.render import render_objects, to_yaml
from unit.k8s.clusters import loaded, of_kind

SUBNET = "10.231.0.0/16"
KINDS = {
    "job": {"kind": "job"},
    "jobset": {"kind": "jobset"},
    **{f"trainer {release}": {"kind": "trainjob", "trainer": release} for release in ("2.1", "2.2", "2.3")},
}
Change = Callable[[list[dict[str, Any]]], None]


def objects_of(folder: Path, section: dict[str, Any] | None = None, change: Change | None = None) -> WrittenObjects:
    rendered = copy.deepcopy(render_objects(loaded(folder, section)).objects)
    if change is not None:
        change(rendered)
    return WrittenObjects(tuple(manifests_in(to_yaml(rendered), "all.yaml")))


def job_spec(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return of_kind(objects, "Job")["spec"]


def pod_of(objects: WrittenObjects, index: int = 0, token: str | None = None) -> Pod:
    return make_pod(plan_set(objects).job, index, "abcde", "10.231.0.9", objects, Secrets(objects, token))


@pytest.mark.parametrize("section", KINDS.values(), ids=KINDS)
def test_every_kind_makes_the_same_pods(tmp_path: Path, section: dict[str, Any]) -> None:
    objects = objects_of(tmp_path, section)
    planned = plan_set(objects)
    assert (planned.job.completions, planned.job.parallelism, planned.job.backoff_limit) == (4, 4, 12)
    pod = pod_of(objects, 3)
    environ = pod.container.environ
    host = "tiny-0" if section["kind"] == "job" else "tiny-node-0-0"
    assert environ["PET_MASTER_ADDR"] == f"{host}.tiny" and environ["PET_MASTER_PORT"] == "29500"
    assert (environ["PET_NNODES"], environ["PET_NPROC_PER_NODE"], environ["PET_NODE_RANK"]) == ("4", "1", "3")
    assert (pod.hostname, pod.subdomain) == (host[:-1] + "3", "tiny")
    assert pod.name == f"{pod.hostname}-abcde" and environ["JOB_COMPLETION_INDEX"] == "3"
    assert (pod.container.user, pod.container.group, pod.container.capabilities) == (10001, 10001, ())
    assert pod.container.has_read_only_root and not pod.container.may_gain_rights
    assert pod.container.memory_bytes == 55 * 2**30 and pod.container.cpus == 30
    assert [one.path for one in pod.container.mounts] == ["/fsx", "/etc/coremill", "/tmp"]
    (folder_maker,) = pod.init_containers
    assert folder_maker.user == 0 and folder_maker.capabilities == ("CHOWN", "FOWNER")
    assert folder_maker.environ == {"JOB_COMPLETION_INDEX": "3"} and has_service(pod, planned.job, objects)
    run_file = run_file_of(pod.container)
    assert run_file is not None and run_file.get("run.folder") == "/fsx/coremill/tiny"


def test_without_processes_per_node_the_trainer_counts_cpus(tmp_path: Path) -> None:
    def forget(objects: list[dict[str, Any]]) -> None:
        del of_kind(objects, "TrainJob")["spec"]["trainer"]["numProcPerNode"]

    assert pod_of(objects_of(tmp_path, None, forget)).container.environ["PET_NPROC_PER_NODE"] == "30"

    def parts(objects: list[dict[str, Any]]) -> None:
        forget(objects)
        of_kind(objects, "TrainJob")["spec"]["trainer"]["resourcesPerNode"] = {"limits": {"cpu": "3500m"}}

    assert pod_of(objects_of(tmp_path, None, parts)).container.environ["PET_NPROC_PER_NODE"] == "4"


@pytest.mark.parametrize(
    ("code", "disrupted", "action", "counted", "rule"),
    [
        (0, False, "done", False, ""),
        (70, False, "fail", True, "rules[0]"),
        (78, True, "fail", True, "rules[0]"),
        (75, False, "replace", False, "rules[1]"),
        (75, True, "replace", False, "rules[1]"),
        (137, True, "replace", False, "rules[2]"),
        (137, False, "replace", True, "rules"),
        (1, False, "replace", True, "rules"),
    ],
)
def test_exit_codes(tmp_path: Path, code: int, disrupted: bool, action: str, counted: bool, rule: str) -> None:
    answer = JobController(plan_set(objects_of(tmp_path, KINDS["job"])).job).pod_ended(1, code, is_disrupted=disrupted)
    assert (answer.action, answer.counted) == (action, counted)
    assert answer.line.path.endswith(rule) and answer.line.place.startswith("all.yaml:")
    assert answer.reason == (BY_POLICY if action == "fail" else "")


def test_the_first_rule_counts_and_others_codes_are_not_taken_for_ours(tmp_path: Path) -> None:
    def count_75(objects: list[dict[str, Any]]) -> None:
        rules = job_spec(objects)["podFailurePolicy"]["rules"]
        rules[1]["action"] = "Count"
        rules[0]["onExitCodes"]["containerName"] = "another"

    objects = objects_of(tmp_path, KINDS["job"], count_75)
    controller = JobController(plan_set(objects).job)
    answer = controller.pod_ended(0, 75, is_disrupted=True)
    line = int(answer.line.place.split(":")[1])
    text = to_yaml([one.object for one in objects.manifests]).splitlines()
    assert answer.counted and "Count" in text[line - 1], text[line - 1]
    assert controller.pod_ended(0, 78, is_disrupted=False).action == "replace"


def test_rules_of_a_container_leave_the_codes_of_others_alone(tmp_path: Path) -> None:
    def of_all(objects: list[dict[str, Any]]) -> None:
        for rule in job_spec(objects)["podFailurePolicy"]["rules"][:2]:
            del rule["onExitCodes"]["containerName"]

    for change, action in ((None, "replace"), (of_all, "fail")):
        controller = JobController(plan_set(objects_of(tmp_path, KINDS["job"], change)).job)
        answer = controller.pod_ended(0, 78, is_disrupted=False, container="make-folder")
        assert (answer.action, answer.counted) == (action, True)


def test_names_are_those_of_a_headless_service_that_selects_the_pod(tmp_path: Path) -> None:
    def found(section: str, change: Change | None = None) -> tuple[str | None, bool]:
        objects = objects_of(tmp_path, KINDS[section], change)
        return pod_of(objects).subdomain, has_service(pod_of(objects), plan_set(objects).job, objects)

    def service(**spec: Any) -> Change:
        return lambda all: of_kind(all, "Service")["spec"].update(spec)

    def network(**values: Any) -> Change:
        return lambda all: of_kind(all, "JobSet")["spec"].update(network=values)

    assert found("job") == ("tiny", True) and found("jobset") == ("tiny", True)
    assert found("job", service(clusterIP="10.0.0.1")) == ("tiny", False)
    assert found("job", service(selector={"app": "another"})) == ("tiny", False)
    assert found("job", lambda all: all.remove(of_kind(all, "Service"))) == ("tiny", False)
    assert found("jobset", network(enableDNSHostnames=False)) == (None, False)
    assert found("jobset", network(subdomain="mine")) == ("mine", True)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    def change(objects: list[dict[str, Any]]) -> None:
        spec = job_spec(objects)
        spec["ttlSecondsAfterFinished"] = 60
        spec["template"]["spec"]["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})

    assert plan_set(objects_of(tmp_path, KINDS["job"])).notes == ()
    deadline, memory = plan_set(objects_of(tmp_path, KINDS["job"], change)).notes
    assert deadline.startswith("not rehearsed: all.yaml:") and deadline.endswith("spec.ttlSecondsAfterFinished")
    assert memory.startswith("on disk here") and memory.endswith("volumes[3].emptyDir.medium")


def test_rights_that_nobody_takes_away_are_those_of_a_runtime(tmp_path: Path) -> None:
    def rights(written: dict[str, Any]) -> Change:
        def change(objects: list[dict[str, Any]]) -> None:
            spec = job_spec(objects)["template"]["spec"]
            spec["securityContext"] |= {"fsGroup": 7, "supplementalGroups": [8]}
            spec["containers"][0]["securityContext"]["capabilities"] = written

        return change

    def kept(written: dict[str, Any]) -> tuple[str, ...]:
        return pod_of(objects_of(tmp_path, KINDS["job"], rights(written))).container.capabilities

    assert "CHOWN" in kept({}) and "SYS_ADMIN" not in kept({}) and len(kept({})) == 14
    assert "CHOWN" not in kept({"drop": ["CAP_CHOWN"]}) and "KILL" in kept({"drop": ["CAP_CHOWN"]})
    assert kept({"drop": ["ALL"], "add": ["NET_ADMIN"]}) == ("NET_ADMIN",)
    assert pod_of(objects_of(tmp_path, KINDS["job"], rights({}))).container.more_groups == (8, 7)


def test_backoff_doubles_until_a_pod_succeeds_and_ends_at_the_limit(tmp_path: Path) -> None:
    controller = JobController(plan_set(objects_of(tmp_path, KINDS["job"])).job)
    # What is ignored waits too, and does not count.
    delays = [
        controller.pod_ended(1, code, is_disrupted=False).delay_seconds for code in (75, 1, 75, 1, 75, 75, 75, 75)
    ]
    assert delays == [10, 20, 40, 80, 160, 320, 600, 600] and controller.counted == 2
    controller.pod_ended(2, 0, is_disrupted=False)
    answers = [controller.pod_ended(1, 1, is_disrupted=False) for _ in range(11)]
    assert answers[0].delay_seconds == 10
    assert [answer.action for answer in answers] == ["replace"] * 10 + ["fail"]
    assert answers[-1].reason == BY_LIMIT and answers[-1].line.path == "spec.backoffLimit"
    for index in (0, 1, 3):
        controller.pod_ended(index, 0, is_disrupted=False)
    assert controller.is_complete


def set_controller(objects: WrittenObjects) -> SetController:
    planned: PlannedSet = plan_set(objects)
    return SetController(planned)


def test_a_job_set_ends_with_its_job_unless_it_may_restart(tmp_path: Path) -> None:
    assert set_controller(objects_of(tmp_path, KINDS["job"])).job_failed(BY_LIMIT)[0] == "fail"
    action, line = set_controller(objects_of(tmp_path, KINDS["jobset"])).job_failed(BY_POLICY)
    assert action == "fail" and line.path == "spec.failurePolicy.rules[0]"
    action, line = set_controller(objects_of(tmp_path, KINDS["trainer 2.3"])).job_failed(BY_LIMIT)
    assert action == "fail" and line.path == "spec.template.spec.failurePolicy.maxRestarts"

    def restart(objects: list[dict[str, Any]]) -> None:
        policy = of_kind(objects, "JobSet")["spec"]["failurePolicy"]
        policy["maxRestarts"] = 1
        policy["rules"][0]["action"] = "RestartJobSetAndIgnoreMaxRestarts"

    controller = set_controller(objects_of(tmp_path, KINDS["jobset"], restart))
    reasons = (BY_POLICY, BY_POLICY, BY_LIMIT, BY_POLICY, BY_LIMIT)
    assert [controller.job_failed(reason)[0] for reason in reasons] == ["restart"] * 4 + ["fail"]
    assert (controller.restarts, controller.counted) == (4, 1)


def refusals() -> dict[str, tuple[dict[str, Any], Change, str]]:
    def pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
        return job_spec(objects)["template"]["spec"]

    def rule(**values: Any) -> Change:
        return lambda all: of_kind(all, "JobSet")["spec"]["failurePolicy"]["rules"][0].update(values)

    job = KINDS["job"]
    return {
        "restarted in place": (job, lambda all: pod(all).update(restartPolicy="OnFailure"), "restarted in place"),
        "no index": (job, lambda all: job_spec(all).update(completionMode="NonIndexed"), "without an index"),
        "limit by index": (job, lambda all: job_spec(all).update(backoffLimitPerIndex=1), "backoffLimitPerIndex"),
        "sidecar": (job, lambda all: pod(all)["containers"].append({"name": "side"}), "one container"),
        "suspended": (job, lambda all: job_spec(all).update(suspend=True), "suspended"),
        "no volume": (job, lambda all: pod(all)["volumes"].pop(0), "no volume"),
        "host path": (
            job,
            lambda all: pod(all)["volumes"][0].update(hostPath=1, persistentVolumeClaim=None),
            "hostPath",
        ),
        "no ConfigMap": (job, lambda all: all.remove(of_kind(all, "ConfigMap")), "ConfigMap tiny-run"),
        "root": (job, lambda all: pod(all)["securityContext"].pop("runAsUser"), "may not run as root"),
        "no job": (job, lambda all: all.remove(of_kind(all, "Job")), "no job"),
        "one job anew": ({"kind": "jobset"}, rule(action="RestartJob"), "action: RestartJob is not rehearsed"),
        "by message": ({"kind": "jobset"}, rule(onJobFailureMessagePatterns=["x"]), "MessagePatterns is not rehearsed"),
        "two jobs": (job, lambda all: all.append(copy.deepcopy(of_kind(all, "Job"))), "2 jobs"),
        "no runtime": ({}, lambda all: all.remove(of_kind(all, "TrainingRuntime")), "TrainingRuntime tiny"),
        "reserved": (
            {},
            lambda all: of_kind(all, "TrainJob")["spec"]["trainer"].update(env=[{"name": "PET_NNODES", "value": "2"}]),
            "the Trainer's own",
        ),
    }


@pytest.mark.parametrize(("section", "change", "words"), refusals().values(), ids=refusals())
def test_what_is_not_rehearsed_is_refused_by_its_line(
    tmp_path: Path, section: dict[str, Any], change: Change, words: str
) -> None:
    def broken(objects: list[dict[str, Any]]) -> None:
        change(objects)
        for one in objects:
            if one["kind"] == "Job":
                volumes = one["spec"]["template"]["spec"]["volumes"]
                volumes[:] = [{key: value for key, value in each.items() if value is not None} for each in volumes]

    with pytest.raises(InputError, match=words) as refused:
        pod_of(objects_of(tmp_path, section, broken))
    assert "all.yaml" in str(refused.value.where) or "Job/" in str(refused.value.where)


def test_secrets_by_reference(tmp_path: Path) -> None:
    section = {"kind": "job", "secrets": ["tracker"]}
    objects = objects_of(tmp_path, section)
    with pytest.raises(InputError, match="the Secret tracker is not among the objects"):
        pod_of(objects)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tracker"}}
    value = base64.b64encode(b"kept").decode()
    objects = WrittenObjects((*objects.manifests, Manifest("s.yaml", {**secret, "data": {"WANDB_API_KEY": value}}, {})))
    assert pod_of(objects).container.environ["WANDB_API_KEY"] == "kept"
    assert "HF_TOKEN" not in pod_of(objects).container.environ  # optional
    assert pod_of(objects, token="hub").container.environ["HF_TOKEN"] == "hub"


def test_what_pods_find_here(tmp_path: Path) -> None:
    """Paths of this machine are mounted where the pod looks for them; what is on the volume or built in is not."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_text("{}\n")
    pod = pod_of(objects_of(tmp_path, KINDS["job"]))
    values = {"model": "owner/name", "tokenizer": "/fsx/tokenizer", "data": {"source": "text/*.jsonl"}}
    found = provisions_for(PodRunFile(path="/etc/coremill/run.yaml", values=values), pod.container, tmp_path)
    assert found.mounts == ((str((tmp_path / "text").resolve()), "/etc/coremill/text"),)
    assert found.hub == ("models--owner--name",) and "a cluster has none" in found.notes[0]
    assert readable_mounts(found, tmp_path / "provided") == list(found.mounts)
    (tmp_path / "text/a.jsonl").chmod(0o600)
    ((copy, _),) = readable_mounts(found, tmp_path / "provided")
    assert Path(copy, "a.jsonl").stat().st_mode & 0o777 == 0o644 and Path(copy).is_relative_to(tmp_path / "provided")
    assert (tmp_path / "text/a.jsonl").stat().st_mode & 0o777 == 0o600
    values = {"data": {"sources": [{"source": str(tmp_path / "text/a.jsonl")}, {"source": "hf://a/b:c@d"}]}}
    found = provisions_for(PodRunFile(path="/etc/coremill/run.yaml", values=values), pod.container, None)
    assert found.mounts == ((str((tmp_path / "text/a.jsonl").resolve()), str(tmp_path / "text/a.jsonl")),)
    assert found.hub == ("datasets--a--b",)
    with pytest.raises(InputError, match="a/b is not in this machine's hub cache"):
        list(put_on_volume(found, pod.container, tmp_path / "volumes"))


def test_threads_are_cut_in_the_pods_files_only(tmp_path: Path) -> None:
    pod = pod_of(objects_of(tmp_path, KINDS["job"]))
    assert run_file_of(pod.container).get("parallel.threads_per_rank") == 15  # type: ignore[union-attr]
    cut = with_fewer_threads(pod, 2).container
    assert run_file_of(cut).get("parallel.threads_per_rank") == 2  # type: ignore[union-attr]
    assert cut.environ["OMP_NUM_THREADS"] == "2" and cut.environ["PET_NPROC_PER_NODE"] == "1"
    assert with_fewer_threads(pod, 99) == pod


def test_network_policy_as_a_packet_filter(tmp_path: Path) -> None:
    objects = objects_of(tmp_path, KINDS["job"])
    labels = pod_of(objects).labels
    rules = nft_rules(objects, labels, SUBNET)
    assert rules is not None and rules.count("policy drop") == 2
    assert f"ip saddr {SUBNET} accept" in rules and f"ip daddr {SUBNET} accept" in rules
    assert "ip daddr 0.0.0.0/0 ip daddr != { 169.254.169.254/32 } tcp dport 443 accept" in rules
    assert nft_rules(objects, {"app": "another"}, SUBNET) is None

    def one_port(objects: list[dict[str, Any]]) -> None:
        rule = of_kind(objects, "NetworkPolicy")["spec"]["ingress"][0]
        rule["ports"] = [{"port": 29500}, {"port": 30000, "endPort": 30009, "protocol": "UDP"}]

    rules = nft_rules(objects_of(tmp_path, KINDS["job"], one_port), labels, SUBNET) or ""
    assert f"ip saddr {SUBNET} tcp dport 29500 accept; ip saddr {SUBNET} udp dport 30000-30009 accept" in rules
    assert f"ip saddr {SUBNET} accept" not in rules


def test_selectors() -> None:
    labels = {"app": "a", "tier": "b"}
    expressions = [
        ({"key": "app", "operator": "In", "values": ["a"]}, True),
        ({"key": "app", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "app", "operator": "Exists"}, True),
        ({"key": "zone", "operator": "DoesNotExist"}, True),
        ({"key": "zone", "operator": "NotIn", "values": ["x"]}, True),
    ]
    assert selects({}, labels) and not selects({"matchLabels": {"app": "b"}}, labels)
    for expression, expected in expressions:
        assert selects({"matchExpressions": [expression]}, labels) is expected, expression


def test_which_pod_and_when() -> None:
    assert parse_disruption("reclaim", "2@1.5m", 4).when == Interval(seconds=90.0)
    assert parse_disruption("kill", "0@20steps", 4).when == Interval(steps=20)
    for text, words in (
        ("4@10s", "no pod 4"),
        ("0", "which pod and when"),
        ("a@3s", "which pod"),
        ("0@3", "which pod"),
    ):
        with pytest.raises(InputError, match=words):
            parse_disruption("reclaim", text, 4)


@pytest.mark.parametrize(
    ("section", "node_grace", "annotations", "expected"),
    [
        ({"capacity": "spot"}, None, {}, (True, 110, "terminationGracePeriodSeconds")),
        ({"capacity": "spot"}, "30s", {}, (True, 30, "terminationGracePeriod")),
        ({"capacity": "spot"}, "Never", {"karpenter.sh/do-not-disrupt": "true"}, (False, 110, "")),
        ({"capacity": "spot"}, "2m", {"karpenter.sh/do-not-disrupt": "true"}, (True, 100, "")),
        ({"karpenter": "none"}, None, {}, (True, 70, "terminationGracePeriodSeconds")),
    ],
)
def test_what_a_machine_that_goes_leaves_its_pods(
    tmp_path: Path, section: dict[str, Any], node_grace: str | None, annotations: dict[str, str], expected: Any
) -> None:
    def change(objects: list[dict[str, Any]]) -> None:
        job_spec(objects)["template"]["metadata"]["annotations"] = annotations
        if node_grace is not None:
            of_kind(objects, "NodePool")["spec"]["template"]["spec"]["terminationGracePeriod"] = node_grace
        if "karpenter" in section:
            job_spec(objects)["template"]["spec"]["terminationGracePeriodSeconds"] = 70

    objects = objects_of(tmp_path, {"kind": "job", **section}, change)
    times = reclaim_times(pod_of(objects), objects)
    assert (times.is_told, times.grace_seconds) == expected[:2]
    assert expected[2] in times.line.path


def test_lost_work_is_what_was_done_twice() -> None:
    events = RunEvents(
        None, steps=[(float(moment), step) for moment, step in enumerate([1, 2, 3, 2, 3, 4, 5, 4, 5, 6])]
    )
    assert events.lost() == [(3.0, 2), (7.0, 2)] and events.done == 6


def test_what_pods_say_is_said_once(tmp_path: Path) -> None:
    words, token = PodWords(tmp_path), "hf_" + "abcdefgh" * 4
    assert words.of("a") == ""
    (tmp_path / "a.log").write_text("measuring\nreading\n\nhalf a li")
    (tmp_path / "b.log").write_text("reading\n")
    assert (words.of("a"), words.of("b"), words.of("a")) == ("reading", "", "")
    (tmp_path / "a.log").open("a").write("ne " + token + "x" * 200 + "\n")
    assert words.of("a").startswith("half a line ***") and token not in words.of("a")
    (tmp_path / "b.log").open("a").write("step 1/4 loss 2\n")
    assert words.of("b") == ""
    words.begin_anew()
    (tmp_path / "c.log").write_text("reading\n")
    assert words.of("c") == "reading"


def test_lost_work_is_laid_to_the_disruption_that_cost_it() -> None:
    """Of a reclaim, a kill after it, and a reclaim while the others still wait for the killed pod."""

    def life(kind: str, at: float) -> Any:
        disruption = SimpleNamespace(kind=kind)
        return SimpleNamespace(disruption=disruption, disrupted_at=at)

    first, killed, second = life("reclaim", 10.0), life("kill", 50.0), life("reclaim", 70.0)
    steps = [(1.0, 1), (11.0, 2), (30.0, 3), (50.5, 4), (90.0, 3), (95.0, 4)]
    seen: Any = SimpleNamespace(lives=[first, killed, second], events=RunEvents(None, steps=steps))
    assert [_lost_after(seen, one) for one in (first, killed, second)] == [0, 2, 0]
    seen.lives = [first, second]
    assert [_lost_after(seen, one) for one in (first, second)] == [0, 2]


def test_volumes_that_would_hide_coremill_are_refused() -> None:
    mounts = [Mount(kind="temporary", name="tmp", path=path, read_only=False) for path in ("/nowhere", sys.prefix)]
    require_programs_in_sight(mounts[:1])
    with pytest.raises(InputError, match="pods would not see") as error:
        require_programs_in_sight(mounts)
    assert sys.prefix in error.value.why and "--image" in error.value.do
