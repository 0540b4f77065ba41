"""Waiting for a cluster, without one: answers that fail to come, jobs that go slowly, words for what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coremill.errors import CoremillError, InputError
from coremill.k8s import job as job_module
from coremill.k8s.cluster import commands, connection, ending, log_following, seen, submitting
from coremill.k8s.cluster.kinds import KINDS
from coremill.k8s.cluster.refusals import Asked, Unavailable, refusal_of
from coremill.k8s.job import Job, make_job
from coremill.k8s.render import render_objects
from unit.k8s.clusters import loaded


class Cluster:
    """What is there changes with every look: `shown` gives the objects by kind and name, a step later each time."""

    context = "here"

    def __init__(self, shown: Iterator[dict[tuple[str, str], dict[str, Any]] | Exception]) -> None:
        self._shown, self._now = shown, {}
        self.asked: list[str] = []

    def get(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        self.asked.append(f"get {kind}/{name}")
        found = next(self._shown, self._now)
        if isinstance(found, Exception):
            raise found
        self._now = found
        return found.get((kind, name))

    def list_all(self, kind: str, namespace: str | None = None, labels: str | None = None) -> list[dict[str, Any]]:
        return [one for (found, _), one in self._now.items() if found == kind]

    def delete(self, live: dict[str, Any]) -> None:
        self.asked.append(f"delete {live['kind']}/{live['metadata']['name']}")

    def wait_for_change(self, *_: Any) -> None:
        pass


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    for module in (seen, ending):
        monkeypatch.setattr(f"{module.__name__}.time.sleep", lambda _: None)
    return make_job(loaded(tmp_path, {"karpenter": "none"}))


def body(kind: str, name: str, **status: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "namespace": "coremill"}, "spec": {}, "status": status}


def test_a_cluster_that_does_not_answer_is_asked_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    away = Unavailable("the cluster does not answer", why="connection refused")
    cluster = Cluster(iter([away, away, {("TrainJob", "tiny"): body("TrainJob", "tiny")}]))
    assert seen.look_again(cluster, job, said.append).live is not None  # type: ignore[arg-type]
    assert len(said) == 1 and "does not answer (connection refused)" in said[0]
    monkeypatch.setattr(seen, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(Unavailable):
        seen.look_again(Cluster(iter([away])), job, said.append)  # type: ignore[arg-type]


def test_a_deleted_job_is_gone_only_with_what_was_made_of_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a new TrainJob would take the failed JobSet of the old one for its own."""
    live, job_set = body("TrainJob", "tiny"), body("JobSet", "tiny")
    steps = [{("TrainJob", "tiny"): live, ("JobSet", "tiny"): job_set}] * 4 + [{("JobSet", "tiny"): job_set}] * 4
    said: list[str] = []
    cluster = Cluster(iter([*steps, {}]))
    ending.delete_job(cluster, job, live, said.append)  # type: ignore[arg-type]
    assert cluster.asked[0] == "delete TrainJob/tiny" and "get Job/tiny-node-0" in cluster.asked
    assert any(words.endswith("JobSet/tiny") for words in said)
    monkeypatch.setattr(ending, "_PATIENCE_SECONDS", -1.0)
    with pytest.raises(Unavailable, match="does not go"):
        ending.delete_job(Cluster(iter([*steps])), job, live, said.append)  # type: ignore[arg-type]


def asked(verb: str = "patch", kind: str = "TrainJob") -> Asked:
    return Asked(verb, KINDS[kind], "coremill", "run", "here")


def status(code: int, message: str) -> str:
    return json.dumps({"kind": "Status", "code": code, "message": message})


@pytest.mark.parametrize(
    ("code", "words", "told"),
    [
        (403, 'trainjobs "run" is forbidden: User "ana" cannot patch resource', "you may not patch TrainJob run"),
        (403, 'admission webhook "v.trainer" denied the request: spec: Invalid', "a rule of the cluster refuses"),
        (422, "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no", "a rule of the cluster refuses"),
        (422, 'TrainJob "run" is invalid: spec.x', "the cluster does not take"),
        (409, "Apply failed with 1 conflict: .spec.suspend", "somebody else has changed"),
    ],
)
def test_refusals(code: int, words: str, told: str) -> None:
    error = refusal_of(code, status(code, words), asked())
    assert isinstance(error, InputError) and told in error.what and words in str(error.why)


@pytest.mark.parametrize(
    ("code", "words", "is_raised"),
    [
        (422, 'JobSet "run" is invalid: spec.x', False),
        (403, 'admission webhook "vjobset.kb.io" denied the request: spec.replicatedJobs: field is immutable', False),
        (403, 'jobsets "run" is forbidden: User "ana" cannot patch resource', True),
        (403, 'admission webhook "x.gatekeeper.sh" denied the request: image is not allowed', True),
    ],
)
def test_a_job_that_cannot_be_changed_is_another_job(tmp_path: Path, code: int, words: str, is_raised: bool) -> None:
    """JobSet's CRD lets its pods be changed, its webhook does not: 403, as a rule of the cluster would say it."""
    rendered = render_objects(loaded(tmp_path, {"karpenter": "none", "kind": "jobset"}))
    live = {submitting.name_of(one): one for one in rendered.objects}
    refusing = Cluster(iter([]))

    def apply(one: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        raise refusal_of(code, status(code, words), asked(kind="JobSet"))

    refusing.apply = apply  # type: ignore[attr-defined]
    with pytest.raises(InputError) if is_raised else contextlib.nullcontext():
        assert not submitting._is_same(refusing, rendered, live)  # type: ignore[arg-type]


def test_a_job_that_is_deleted_meanwhile_is_not_waited_for(job: Job) -> None:
    opened = SimpleNamespace(cluster=Cluster(iter([{}])), job=job)
    with pytest.raises(CoremillError, match="was deleted while it was waited for"):
        commands._wait_for_pods(opened, lambda text: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [429, 500, 503])
def test_what_may_work_later_is_no_bad_input(code: int) -> None:
    assert isinstance(refusal_of(code, "busy", asked()), Unavailable)


def test_how_far_back_a_log_is_read_again() -> None:
    assert log_following._seconds_since("") is None
    assert (log_following._seconds_since("2026-01-01T00:00:01.123456789Z") or 0) > 600
    assert log_following._seconds_since("2199-01-01T00:00:01.123456789+09:00") == 1


KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: COMMAND, args: ARGS}}}]
contexts: [{name: here, context: {cluster: c, user: u}}]
current-context: here
"""


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        (KUBECONFIG.replace("COMMAND", "no-such-aws").replace("ARGS", "[]"), "way to log in", "no-such-aws"),
        (
            KUBECONFIG.replace("COMMAND", "sh").replace("ARGS", '["-c", "echo expired >&2; exit 255"]'),
            "way to log in",
            "expired",
        ),
        ("clusters: [", "no kubeconfig that names a cluster", "expected"),
        ("just words", "no kubeconfig that names a cluster", ""),
        (KUBECONFIG.replace("current-context: here", ""), "no kubeconfig that names a cluster", "current-context"),
    ],
)
def test_a_kubeconfig_that_does_not_work_is_bad_input(
    tmp_path: Path,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    text: str,
    what: str,
    why: str,
) -> None:
    pytest.importorskip("kubernetes")
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(InputError, match=what) as refused:
        connection.connect(job.section, None)
    assert why in str(refused.value.why) and refused.value.do
    assert capfd.readouterr() == ("", "")


def test_a_job_that_is_there_is_known_without_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping what costs money must not wait for the hub, nor for a run that fits."""
    before = make_job(loaded(tmp_path))

    def out_of_reach(config: Any) -> Any:
        raise InputError("the hub cannot be reached")

    monkeypatch.setattr(job_module, "card_without_weights", out_of_reach)
    with pytest.raises(InputError, match="the hub"):
        make_job(loaded(tmp_path))
    now = make_job(loaded(tmp_path), is_there=True)
    for each in ("name", "namespace", "labels", "pool", "nodes", "ranks_per_node"):
        assert getattr(now, each) == getattr(before, each)
    unnamed = {"fleet__instance": None}
    with pytest.raises(InputError, match="the hub"):  # which type it took only the model says
        make_job(loaded(tmp_path, **unnamed), is_there=True)
