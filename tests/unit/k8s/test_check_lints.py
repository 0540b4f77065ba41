"""What no API server says of manifests: every defect of the bad ones is found with its fix, good ones have no error."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
from clusters import LONG

from coremill.k8s.check.checking import check
from coremill.k8s.check.crds import shipped_schemas
from coremill.k8s.check.findings import Finding
from coremill.k8s.check.lints import lint
from coremill.k8s.check.lints.pools import FAMILY, unknown_value
from coremill.k8s.check.manifests import Manifest, read_manifests
from k8s.mutations import mutations

MANIFESTS = Path(__file__).parents[2] / "k8s/manifests"
GOOD = sorted(each.name for each in (MANIFESTS / "good").iterdir())


@cache
def findings(*files: str, trainer: str = "2.3") -> tuple[Finding, ...]:
    manifests = read_manifests([str(MANIFESTS / file) for file in files])
    return check(manifests, shipped_schemas(), {"trainer": trainer}).findings


@pytest.mark.parametrize("file", GOOD)
def test_good_manifests_have_no_error(file):
    found = findings(f"good/{file}", trainer="2.1" if "v21" in file else "2.3")
    assert [str(each) for each in found if each.problem.level == "error"] == []


def test_nodes_and_job_together_are_without_a_word():
    assert findings("good/nodes.yaml", "good/train-v23.yaml", "good/kueue.yaml") == ()


# Files, level, rule, where (object and field end like this), part of the problem, part of the fix.
DEFECTS = [
    (
        "nodes",
        "error",
        "label",
        "requirements[3].values[2]",
        "'24xlarge, 48xlarge'",
        "write them apart: 24xlarge, 48xlarge",
    ),
    ("nodes", "warning", "disruption", "template.spec", "no SIGTERM", "terminationGracePeriod: 2m"),
    ("nodes", "warning", "disruption", "spec.expireAfter", "720h", "expireAfter: Never"),
    ("nodes", "warning", "webhook", "taints[1]", "same key and effect", "keep one"),
    ("nodes", "warning", "gpu-on-cpu", "amiSelectorTerms[0].name", "GPU drivers", "al2023"),
    ("nodes", "warning", "host-install", "spec.userData", "dnf, pip", "into the image"),
    ("job", "warning", "processes", "spec.trainer", "32 processes", "numProcPerNode: 1"),
    ("job", "warning", "grace", "spec.trainer", "30 s (the default)", "terminationGracePeriodSeconds: 100"),
    ("job", "warning", "gpu-on-cpu", "trainer.image", "carries CUDA", "CPU builds"),
    ("job", "warning", "process-one", "trainer.command", "keeps SIGTERM to itself", "exec"),
    ("job", "warning", "torchrun", "trainer.command", "ignores PET_NODE_RANK", "leave it out"),
    ("job", "warning", "token", "trainer.command", "envsubst", "secretKeyRef"),
    ("job", "warning", "threads", "trainer.env", "64 threads on 32 CPUs", "at most 16"),
    ("job", "warning", "webhook", "trainer.env[0]", "PET_NNODES", "remove it"),
    ("job", "error", "token", "env[2].value", "WANDB_API_KEY in clear text", "secretKeyRef"),
    ("job", "warning", "cost", "resourcesPerNode", "4 x c7i.16xlarge for $11.42", "30 CPUs and 54 GiB"),
    (
        "job",
        "warning",
        "disruption",
        "[karpenter.sh/do-not-disrupt]",
        "a node of cpu-amx",
        "terminationGracePeriod: 2m",
    ),
    ("job", "warning", "webhook", "spec.containers[0]", "no container 'trainer'", "it has node"),
    ("job", "warning", "shared-memory", "spec.volumes", "64 GiB of the 64 GiB", "coremill needs no /dev/shm"),
    ("newer", "error", "unknown-field", "spec.podTemplateOverrides", "in trainer 2.3.0", "--release trainer=2.1.0"),
    ("sets", "warning", "webhook", "too-early spec.runtimeRef", "comes after it", "runtime first"),
    ("sets", "warning", "threads", "too-early spec.trainer", "each of 2 processes one thread", "OMP_NUM_THREADS"),
    ("sets", "warning", "torchrun", "trainer.command", "30 s after SIGTERM", "--shutdown-timeout"),
    ("sets", "warning", "webhook", "containers[0].env", "no variables for node", "spec.trainer.env"),
    ("sets", "warning", "webhook", "containers[1]", "no container 'side'", "it has node"),
    ("sets", "warning", "webhook", "replicatedJobs[1].template.spec.template", "'launcher'", "it has node"),
    ("sets", "warning", "ttl", "spec.ttlSecondsAfterFinished", "anew each time", "delete the TrainJob"),
    ("sets", "warning", "unpinned", "containers[0].image", "registry.example/torch is", "a version or a digest"),
    ("sets", "warning", "unpinned", "containers[0].image", "torch:latest", "a version or a digest"),
    ("sets", "warning", "webhook", "metadata.name", "66 characters", "shorten it by 3"),
    ("sets", "warning", "webhook", "successPolicy.targetReplicatedJobs[0]", "'nobody'", "there is node"),
    ("sets", "warning", "webhook", "rules[1].targetReplicatedJobs[0]", "'nobody'", "there is node"),
    ("sets", "warning", "webhook", "rules[1].name", "twice", "name of its own"),
    ("sets", "warning", "webhook", "dependsOn[0].name", "'later' before this one", "stands before"),
    ("sets", "warning", "webhook", "podFailurePolicy", "not OnFailure", "restartPolicy: Never"),
    ("sets", "warning", "grace", "spec.template.spec", "30 s (the default)", "terminationGracePeriodSeconds: 100"),
    ("sets", "error", "label", "nodeSelector.team", "'a b'", "letters, digits"),
    ("sets", "error", "unknown-instance", "[node.kubernetes.io/instance-type]", "c7i.9xlarge", "did you mean"),
    ("sets", "error", "token", "env[0].value", "HF_TOKEN in clear text", "secretKeyRef"),
    ("cores", "error", "unknown-instance", "requirements[0].values[0]", "'spott'", "did you mean spot?"),
    ("cores", "error", "unknown-instance", "requirements[1].values[0]", "is no zone", "us-east-1a"),
    ("cores", "error", "unknown-instance", "requirements[3].values[1]", "'24xlarg'", "did you mean 24xlarge?"),
    ("cores", "warning", "cores", "Job/odd spec.template.spec.containers[0].resources", "odd number", "ask for 30"),
    (
        "cores",
        "warning",
        "cores",
        "Job/shared spec.template.spec.containers[0].resources",
        "exclusive cores",
        "whole CPUs",
    ),
    ("cores", "warning", "taint", "Job/shared spec.template.spec", "does not tolerate", "key: intel.com/amx"),
    ("cores", "warning", "cost", "Job/shared spec.template.spec.containers[0].resources", "$1.43", "allow c7i.4xlarge"),
    (
        "cores",
        "error",
        "fits-nothing",
        "Job/large spec.template.spec.containers[0].resources",
        "with EFA",
        "c7i.48xlarge",
    ),
]
SCENES = {
    "nodes": (("bad/nodes.yaml",), "2.3"),
    "job": (("bad/nodes.yaml", "bad/train-job.yaml"), "2.1"),
    "newer": (("bad/train-job.yaml",), "2.3"),
    "sets": (("bad/job-set.yaml",), "2.3"),
    "cores": (("bad/cores.yaml",), "2.3"),
}


@pytest.mark.parametrize(
    ("scene", "level", "rule", "where", "words", "fix"), DEFECTS, ids=lambda value: str(value)[:30]
)
def test_every_defect_is_found(scene, level, rule, where, words, fix):
    files, trainer = SCENES[scene]
    fitting = [
        each
        for each in findings(*files, trainer=trainer)
        if (each.problem.level, each.problem.rule) == (level, rule)
        and f"{each.object} {each.problem.path}".endswith(where)
        and words in each.problem.text
        and fix in each.problem.fix
    ]
    assert len(fitting) == 1, [str(each) for each in findings(*files, trainer=trainer)]


@pytest.mark.parametrize("scene", SCENES)
def test_nothing_else_is_found(scene):
    files, trainer = SCENES[scene]
    last = str(MANIFESTS / files[-1])
    found = [each for each in findings(*files, trainer=trainer) if each.file == last]
    expected = [row for row in DEFECTS if row[0] == scene]
    if scene == "newer":  # the rest of it is the scene `job`
        found = [each for each in found if each.problem.rule == "unknown-field"]
    assert len(found) == len(expected), [str(each) for each in found]


def job(**spec):
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 100, **spec}
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": {"template": {"spec": pod}}}
    return [Manifest("f", body, {})]


def container(**fields):
    return {"name": "node", "image": "a:1", "command": ["coremill", "train", "x"], **fields}


def rules(manifests):
    return sorted((each.problem.level, each.problem.rule) for each in lint(manifests))


def env(name, value):
    return [{"name": name, "value": value}]


CASES = [
    (container(), []),
    (container(image="a"), [("warning", "unpinned")]),
    (container(image="host:5000/a"), [("warning", "unpinned")]),
    (container(image="a@sha256:0123"), []),
    (container(image="nvcr.io/nvidia/pytorch:26.01-py3"), [("warning", "gpu-on-cpu")]),
    (container(image="a:cu128", resources={"limits": {"nvidia.com/gpu": 1}}), []),
    (container(image="calculus:1"), []),
    (container(env=env("HF_TOKEN", "hf_secretsecretsecret")), [("error", "token")]),
    (container(env=env("ANYTHING", "hf_secretsecretsecret")), [("error", "token")]),
    (container(env=env("HF_TOKEN_PATH", "/run/secrets/token")), []),
    (container(env=env("TOKENIZERS_PARALLELISM", "false")), []),
    (container(args=["--token", "hf_secretsecretsecret"]), [("error", "token")]),
    (container(args=["--api-key=0123456789abcdef"]), [("error", "token")]),
    (container(args=["--auth-mode=kubernetes-serviceaccount", "--private", "--no-resume-from-5"]), []),
    (container(env=env("HF_SECRET_NAME", "coremill-hub-token-1")), []),
    (container(args=["--tokenizer", "meta-llama/Meta-Llama-3-8B"]), []),
    (container(command=["sh", "-c", "cd /x && exec python train.py"]), []),
    (container(command=["sh", "-c", "python train.py"]), [("warning", "process-one")]),
    (container(resources={"limits": {"cpu": "5000", "memory": "1Gi"}}), [("error", "fits-nothing")]),
    (container(resources={"limits": {"cpu": 30, "memory": "54Gi"}}), []),
    (container(env=env("OMP_NUM_THREADS", "15"), resources={"limits": {"cpu": 30, "memory": "54Gi"}}), []),
    (
        container(env=env("OMP_NUM_THREADS", "31"), resources={"limits": {"cpu": 30, "memory": "54Gi"}}),
        [("warning", "threads")],
    ),
]


@pytest.mark.parametrize(("one", "expected"), CASES, ids=lambda value: str(value)[:60])
def test_containers(one, expected):
    assert rules(job(containers=[one])) == expected


ELSEWHERE = [
    {
        "nodeSelector": {
            "node.kubernetes.io/instance-type": "n2-standard-8",
            "topology.kubernetes.io/zone": "europe-west1-b",
        }
    },
    {"nodeSelector": {"node.kubernetes.io/instance-type": "m5.large"}},
]


@pytest.mark.parametrize("spec", ELSEWHERE, ids=str)
def test_other_clouds_and_types_are_left_alone(spec):
    assert rules(job(containers=[container()], **spec)) == []


def test_other_work_is_left_alone():
    """A NodePool for training says nothing of a web server or of a job that fetches something."""
    nodes = read_manifests([str(MANIFESTS / "good/nodes.yaml")])
    small = {"name": "web", "image": "a:1", "resources": {"requests": {"cpu": 1, "memory": "1Gi"}}}
    fetch = {**small, "command": ["curl", "x"]}
    pod = {"restartPolicy": "Never", "containers": [fetch]}
    work = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": {"template": {"spec": pod}}}
    web = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "w"}}
    web["spec"] = {"template": {"spec": {"containers": [small]}}}
    assert rules([*nodes, Manifest("f", work, {}), Manifest("f", web, {})]) == []


def test_drivers_on_nodes_with_gpus_are_right():
    pool, nodes = (each.object for each in read_manifests([str(MANIFESTS / "bad/nodes.yaml")]))
    pool["spec"]["template"]["spec"]["requirements"] = [{"key": FAMILY, "operator": "In", "values": ["p5"]}]
    assert ("warning", "gpu-on-cpu") not in rules([Manifest("f", pool, {}), Manifest("f", nodes, {})])


def test_a_save_of_the_run_file_decides_about_the_grace():
    data = {"run.yaml": "train: {steps: 5}\ncheckpoint:\n  every: 10m\n  grace: 45s\nrun: {folder: /x}\n"}
    config = Manifest("f", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": data}, {})
    volumes = [{"name": "run", "configMap": {"name": "c"}}]
    for seconds, expected in ((50, []), (40, [("warning", "grace")])):
        pods = job(containers=[container()], volumes=volumes, terminationGracePeriodSeconds=seconds)
        assert rules([config, *pods]) == expected


@pytest.mark.parametrize(
    ("value", "level"),
    [("c7i", None), ("c7ii", "warning"), ("q7i", "error"), ("m5", "warning"), ("C7I!", "error"), ("x9i", "warning")],
)
def test_families(value, level):
    problem = unknown_value(FAMILY, value, "here")
    assert (problem.level if problem else None) == level


def test_lints_take_whatever_they_get():
    """Values of any form: a lint that stumbles would hide what the schema has to say."""
    schemas, count = shipped_schemas(), 0
    for file in GOOD:
        manifests = read_manifests([str(MANIFESTS / "good" / file)])
        for number, manifest in enumerate(manifests):
            kind = schemas.kind_of(
                manifest.group, manifest.version, manifest.kind, {"trainer": "2.1" if "v21" in file else "2.3"}
            )
            for mutation in mutations(manifest.object, dict(kind.schema) if kind else {}, 200 if LONG else 40, seed=22):
                changed = [*manifests[:number], Manifest("f", mutation.object, {}), *manifests[number + 1 :]]
                check(changed, schemas, {})
                count += 1
    assert count > 500


@pytest.mark.parametrize("field", ["name", "taint", "volume"])
def test_an_object_where_a_name_belongs(field):
    """What is looked up by a name is found by none."""
    nodes, job = (copy.deepcopy(read_manifests([str(MANIFESTS / "good" / f)])) for f in ("nodes.yaml", "jobset.yaml"))
    of_kind = {each.kind: each.object for each in (*nodes, *job)}
    if field == "name":
        of_kind["EC2NodeClass"]["metadata"]["name"] = {"a": "b"}
    elif field == "taint":
        of_kind["NodePool"]["spec"]["template"]["spec"]["taints"] = [{"key": {}, "effect": []}, {"key": {}}]
    else:
        template = of_kind["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        template["volumes"] = [{"name": [], "configMap": {"name": {}}}]
        job.append(Manifest("f", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": []}, "data": {}}, {}))
    assert check([*nodes, *job], shipped_schemas(), {}).errors
