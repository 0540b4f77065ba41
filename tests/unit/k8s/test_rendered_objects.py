"""`coremill k8s render`: every variant holds together, fits its releases' schemas, and says what the plan says."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from clusters import CAPACITIES, IMAGE, LONG, STORAGES, job_spec_of, loaded, of_kind, pod_of
from ruamel.yaml import YAML

import coremill.k8s
from coremill.config.load import load_config
from coremill.config.schema import RunConfig
from coremill.k8s.check.checking import check
from coremill.k8s.check.crds import shipped_schemas
from coremill.k8s.check.manifests import manifests_of
from coremill.k8s.render import Rendered, render_objects
from coremill.k8s.render_command import write_objects
from coremill.plan.stored import plan_from_json
from coremill.run.plan_command import plan_and_card

KINDS: dict[str, dict[str, Any]] = {
    "trainer-2.1": {"kind": "trainjob", "trainer": "2.1"},
    "trainer-2.2": {"kind": "trainjob", "trainer": "2.2"},
    "trainer-2.3": {"kind": "trainjob", "trainer": "2.3"},
    "jobset": {"kind": "jobset"},
    "job": {"kind": "job"},
}
KARPENTERS = ("1.8", "1.14", "none")
STORED = [(storage, capacity) for storage in STORAGES for capacity in CAPACITIES]
COMBINATIONS = list(itertools.product(KINDS, KARPENTERS, (False, True)))
# All 360 in the long tests; else 90, in which each storage and capacity meets each of the others.
VARIANTS = [
    (kind, karpenter, efa, *STORED[(3 * number + place) % len(STORED)])
    for number, (kind, karpenter, efa) in enumerate(COMBINATIONS)
    for place in range(len(STORED) if LONG else 3)
]
RELEASES = {
    "trainer.kubeflow.org": {"2.1": "trainer-v2.1.0", "2.2": "trainer-v2.2.1", "2.3": "trainer-v2.3.0"},
    "karpenter": {"1.8": "karpenter-provider-aws-v1.8.0", "1.14": "karpenter-provider-aws-v1.14.1"},
}
SCHEMAS = Path(coremill.k8s.__file__).parent / "check" / "crds"
SHIPPED = shipped_schemas()
KNOWN_BEFORE = {"cost"}  # who asks for types that are larger than the pod was told so by render


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def variant(folder: Path, kind: str, karpenter: str, efa: bool, storage: str, capacity: str) -> Rendered:
    section = KINDS[kind] | {"karpenter": karpenter, "efa": efa} | STORAGES[storage] | CAPACITIES[capacity]
    if karpenter == "none":
        section["reservation"] = None
    return render_objects(loaded(folder, section, fleet__instance="c7i.48xlarge" if efa else "c7i.8xlarge"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_holds_together(kind: str, tmp_path: Path) -> None:
    mine = [each for each in VARIANTS if each[0] == kind]
    assert len(mine) >= 18
    for each in mine:
        rendered = variant(tmp_path, *each)
        require_whole(rendered)
        require_schemas(rendered)
        require_checked(rendered)


def test_there_are_enough_variants() -> None:
    assert len(set(VARIANTS)) == len(VARIANTS) >= 90
    assert {each[3:] for each in VARIANTS} == set(STORED)


def require_whole(rendered: Rendered) -> None:
    objects, job = rendered.objects, rendered.job
    named = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects]
    assert len(set(named)) == len(named)
    assert all(one["apiVersion"] and len(one["metadata"]["name"]) <= 253 for one in objects)
    assert json.loads(json.dumps(objects)) == objects  # plain values
    for one in objects:
        for label in one["metadata"].get("labels", {}).values():
            assert len(label) <= 63
    pod, (container,) = pod_of(objects), pod_of(objects)["containers"]
    # A pod gets what it asks for, and asks for what the plan counts with.
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"]["cpu"] == str(job.pod.cpus)
    assert container["resources"]["limits"]["memory"] == f"{job.pod.memory_gib}Gi"
    assert job.plan is not None and job.plan.fits
    environ = {entry["name"]: entry for entry in container["env"]}
    assert environ["OMP_NUM_THREADS"]["value"] == str(job.plan.threads_per_rank.value)
    assert "value" not in environ["HF_TOKEN"]
    # Times: nobody is killed before it was to have ended.
    run = config_of(objects)
    grace, pod_grace = float(run.checkpoint.grace.rstrip("s")), pod["terminationGracePeriodSeconds"]
    assert grace < pod_grace
    if job.section.may_be_spot:
        assert pod_grace < 120
    if job.section.has_karpenter:
        pool = of_kind(objects, "NodePool")["spec"]
        node_grace = int(pool["template"]["spec"]["terminationGracePeriod"].rstrip("s"))
        assert pod_grace <= node_grace
        assert "karpenter.sh/do-not-disrupt" not in json.dumps(objects)
        taints = pool["template"]["spec"]["taints"]
        assert [taint["key"] for taint in taints] == [toleration["key"] for toleration in pod["tolerations"]]
        assert pod["nodeSelector"]["karpenter.sh/nodepool"] == of_kind(objects, "NodePool")["metadata"]["name"]
    else:
        assert not {"NodePool", "EC2NodeClass"} & {one["kind"] for one in objects}
    require_rights(pod, container)
    assert ("vpc.amazonaws.com/efa" in container["resources"]["limits"]) is job.efa


def require_rights(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False and pod["restartPolicy"] == "Never"
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert container["command"][0] == "coremill"  # process 1 itself
    written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    for variable in container["env"]:
        if variable["name"] in ("HOME", "HF_HOME", "COREMILL_CACHE"):
            assert any(Path(variable["value"]).is_relative_to(folder) for folder in written)


def config_of(objects: list[dict[str, Any]]) -> RunConfig:
    """The run file as coremill reads it in the pod."""
    text = of_kind(objects, "ConfigMap")["data"]["run.yaml"]
    return RunConfig.model_validate(YAML(typ="safe", pure=True).load(text))


def require_schemas(rendered: Rendered) -> None:
    """The structural schema of the named release, unknown fields refused."""
    section = rendered.job.section
    for one in rendered.objects:
        group = one["apiVersion"].partition("/")[0]
        release = {
            "trainer.kubeflow.org": RELEASES["trainer.kubeflow.org"][section.trainer],
            "karpenter.sh": RELEASES["karpenter"].get(section.karpenter),
            "karpenter.k8s.aws": RELEASES["karpenter"].get(section.karpenter),
            "jobset.x-k8s.io": "jobset-v0.12.0",
            "kueue.x-k8s.io": "kueue-v0.19.2",
        }.get(group)
        if release is not None:
            validator(release, one["kind"], one["apiVersion"].partition("/")[2]).validate(one)


def require_checked(rendered: Rendered) -> None:
    """`coremill k8s check` has nothing to say, of any object: schema, CEL of the named releases, and lints."""
    outcome = check(manifests_of(rendered, "run.yaml"), SHIPPED, {})
    assert outcome.objects == len(rendered.objects)
    assert all("no schema for monitoring.coreos.com/v1 PodMonitor" in words for words in outcome.unchecked)
    assert len(outcome.unchecked) == rendered.job.section.pod_monitor
    said = [str(finding) for finding in outcome.findings if finding.problem.rule not in KNOWN_BEFORE]
    assert not said, said


def test_schemas_are_there() -> None:
    assert {path.name for path in SCHEMAS.iterdir()} >= set(RELEASES["karpenter"].values())


@cache
def validator(release: str, kind: str, version: str) -> jsonschema.Draft202012Validator:
    for path in (SCHEMAS / release).glob("*.json.gz"):
        document = json.loads(gzip.decompress(path.read_bytes()))
        if document["spec"]["names"]["kind"] == kind:
            (found,) = (one for one in document["spec"]["versions"] if one["name"] == version)
            schema = strict(copy.deepcopy(found["schema"]["openAPIV3Schema"]))
            schema["properties"]["metadata"] = {"type": "object"}
            return jsonschema.Draft202012Validator(schema)
    raise AssertionError(f"{release} has no {kind}")


def strict(schema: Any) -> Any:
    """As the API server with strict fields reads it."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made.pop("pattern", None)
    known = isinstance(made.get("properties"), dict) and "type" in made
    if known and "additionalProperties" not in made and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    if isinstance(made.get("pattern"), dict) or made.get("type") == "array":
        made.pop("pattern", None)  # karpenter's NodePool has one on a list, which the server does not look at
        made.pop("maxLength", None)
    return made


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    each = (tmp_path, "trainer-2.3", "1.14", False, "fsx", "spot")
    first, second = variant(*each), variant(*each)
    assert first.to_yaml() == second.to_yaml()
    read = list(YAML(typ="safe", pure=True).load_all(first.to_yaml()))
    assert read == first.objects
    write_objects(first, tmp_path / "out")
    files = sorted((tmp_path / "out").iterdir())
    assert "---\n".join(path.read_text() for path in files) == first.to_yaml()
    assert files[0].name == "00-namespace.yaml" and files[-1].name.endswith("-trainjob.yaml")
    (tmp_path / "out" / "10-secret.yaml").write_text("kind: Secret\n")
    write_objects(variant(tmp_path, "job", "none", False, "claim", "spot"), tmp_path / "out")
    assert (tmp_path / "out" / "10-secret.yaml").exists(), "it is somebody else's"
    assert not list((tmp_path / "out").glob("*nodepool*"))  # kubectl would apply what is left there


def test_texts_that_yaml_would_take_for_something_else_are_quoted(tmp_path: Path) -> None:
    text = render_objects(loaded(tmp_path, {"namespace": "on", "claim": "1.14", "secrets": ["no"]})).to_yaml()
    assert "namespace: 'on'" in text and "claimName: '1.14'" in text and "name: 'no'" in text


def test_plan_and_manifest_agree(tmp_path: Path) -> None:
    for instance, ranks, threads in (("c7i.8xlarge", 1, 15), ("c7i.48xlarge", 2, 47)):
        run = loaded(tmp_path, fleet__instance=instance)
        plan, _ = plan_and_card(run, None)
        rendered = render_objects(run)
        trainer = of_kind(rendered.objects, "TrainJob")["spec"]["trainer"]
        in_pod = config_of(rendered.objects)
        assert (plan.ranks_per_node.value, plan.threads_per_rank.value) == (ranks, threads)
        assert trainer["numProcPerNode"] == ranks and trainer["numNodes"] == plan.nodes == 4
        assert (in_pod.parallel.ranks_per_node, in_pod.parallel.threads_per_rank) == (ranks, threads)
        assert plan.pod is not None
        cpus, gib = trainer["resourcesPerNode"]["limits"]["cpu"], trainer["resourcesPerNode"]["limits"]["memory"]
        assert plan.pod.value == f"{cpus} CPUs, {gib.removesuffix('Gi')} GiB" and instance in plan.pod.reason
        # Between all ranks of the pod: its memory, less the launcher's.
        of_pod = int(gib.removesuffix("Gi")) * 2**30
        assert of_pod - 2**28 < plan.memory.limit * ranks <= of_pod
        assert plan == rendered.job.plan and plan_from_json(plan.to_json()) == plan


def test_pods_know_each_other(tmp_path: Path) -> None:
    for kind, address in (("jobset", "tiny-node-0-0.tiny"), ("job", "tiny-0.tiny")):
        objects = render_objects(loaded(tmp_path, {"kind": kind})).objects
        environ = {entry["name"]: entry for entry in pod_of(objects)["containers"][0]["env"]}
        assert environ["PET_MASTER_ADDR"]["value"] == address
        assert environ["PET_NNODES"]["value"] == "4" and environ["PET_NPROC_PER_NODE"]["value"] == "1"
        assert "job-completion-index" in environ["PET_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    service = of_kind(objects, "Service")
    assert pod_of(objects)["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    trainjob = render_objects(loaded(tmp_path)).objects
    reserved = [entry["name"] for entry in pod_of(trainjob)["containers"][0]["env"] if "PET_" in entry["name"]]
    assert reserved == []  # the Trainer's own, and refused from others


@pytest.mark.parametrize("kind", ["trainjob", "jobset", "job"])
def test_how_a_job_ends_follows_the_exit_codes(kind: str, tmp_path: Path) -> None:
    objects = render_objects(loaded(tmp_path, {"kind": kind})).objects
    spec = next(job_spec_of(objects))

    def action(exit_code: int, *, disrupted: bool = False) -> str:
        """What the Job controller does: the first rule that matches; else it is counted."""
        for rule in spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes is not None and codes["operator"] == "In" and exit_code in codes["values"]:
                assert codes["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
                return str(rule["action"])
            if disrupted and any(one["type"] == "DisruptionTarget" for one in rule.get("onPodConditions", ())):
                return str(rule["action"])
        return "Count"

    assert [action(code) for code in (70, 78)] == ["FailJob", "FailJob"]
    assert action(75) == "Ignore" and action(137, disrupted=True) == "Ignore"
    assert {action(code) for code in (1, 69, 74, 127, 130, 137)} == {"Count"}
    assert spec["backoffLimit"] >= 4  # one fault may end every pod once
    assert spec["completionMode"] == "Indexed" and spec["template"]["spec"]["restartPolicy"] == "Never"


def test_the_run_file_in_the_pod(tmp_path: Path) -> None:
    rendered = render_objects(
        loaded(
            tmp_path,
            {"capacity": "spot"},
            checkpoint__folder="/home/me/checkpoints",
            checkpoint__grace="10m",
            run__folder="runs/mine",
            train__learning_rate=3e-4,
        )
    )
    inside = config_of(rendered.objects)
    assert inside.run.folder == "/fsx/coremill/tiny" and inside.checkpoint.folder is None
    assert inside.checkpoint.grace == "100s" and inside.checkpoint.spot_notices == "off"
    assert inside.supervise.wait_for_hosts == "15m" and inside.train.learning_rate == 3e-4
    for key in ("run.folder", "checkpoint.folder", "checkpoint.grace", "supervise.wait_for_hosts"):
        assert sum(f"{key} is " in note for note in rendered.notes) == 1, key
    # coremill itself reads it in the pod, with the same values.
    file = tmp_path / "inside.yaml"
    file.write_text(of_kind(rendered.objects, "ConfigMap")["data"]["run.yaml"])
    assert load_config(file).config == inside
    # What is on the volume already, and long enough, stays.
    kept = render_objects(
        loaded(tmp_path, run__folder="/fsx/me/run", supervise__wait_for_hosts="1h", checkpoint__spot_notices="on")
    )
    inside = config_of(kept.objects)
    assert (inside.run.folder, inside.supervise.wait_for_hosts) == ("/fsx/me/run", "1h")
    assert inside.checkpoint.spot_notices == "on"
    assert not any("run.folder is " in note for note in kept.notes)
    (warning,) = (note for note in kept.notes if "run.folder" in note)  # nobody gives that one to them
    assert "/fsx/me/run is outside of /fsx/coremill" in warning and "user 10001" in warning


def test_without_karpenter_pods_look_for_notices_themselves(tmp_path: Path) -> None:
    objects = render_objects(loaded(tmp_path, {"karpenter": "none", "capacity": "spot"})).objects
    assert config_of(objects).checkpoint.spot_notices == "auto"
    reached = json.dumps(of_kind(objects, "NetworkPolicy")["spec"]["egress"][-1])
    assert "169.254.169.254/32" in reached and "80" in reached
    types = pod_of(objects)["affinity"]["nodeAffinity"]
    assert "c7i.8xlarge" in json.dumps(types)


def test_efa_only_where_the_type_has_it(tmp_path: Path) -> None:
    some = render_objects(
        loaded(tmp_path, {"efa": True, "instances": ["c7i.24xlarge", "c7i.48xlarge"]}, fleet__instance=None)
    )
    pool = of_kind(some.objects, "NodePool")["spec"]["template"]["spec"]["requirements"]
    assert next(one["values"] for one in pool if "instance-type" in one["key"]) == ["c7i.48xlarge"]
    assert any("gloo" in note for note in some.notes)
    ami = of_kind(some.objects, "EC2NodeClass")["spec"]
    assert ami["amiSelectorTerms"] == [{"alias": "bottlerocket@latest"}] and "static" in ami["userData"]
    none = render_objects(loaded(tmp_path, {"efa": True}))
    assert "efa" not in json.dumps(of_kind(none.objects, "TrainJob"))
    assert any("c7i.8xlarge has no Elastic Fabric Adapter" in note for note in none.notes)


def test_a_queue(tmp_path: Path) -> None:
    objects = render_objects(loaded(tmp_path, {"queue": "cpu-amx"})).objects
    require_schemas(render_objects(loaded(tmp_path, {"queue": "cpu-amx"})))
    assert of_kind(objects, "TrainJob")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "cpu-amx"
    queue = of_kind(objects, "ClusterQueue")
    assert of_kind(objects, "LocalQueue")["spec"]["clusterQueue"] == queue["metadata"]["name"]
    (group,) = queue["spec"]["resourceGroups"]
    quotas = {one["name"]: one["nominalQuota"] for one in group["flavors"][0]["resources"]}
    assert quotas == {"cpu": 4 * 30, "memory": f"{4 * 55}Gi"} and group["coveredResources"] == list(quotas)
    assert group["flavors"][0]["name"] == of_kind(objects, "ResourceFlavor")["metadata"]["name"]
    there = render_objects(loaded(tmp_path, {"queue": "cpu-amx", "make_queue": False})).objects
    assert not {"ResourceFlavor", "ClusterQueue", "LocalQueue"} & {one["kind"] for one in there}
    assert of_kind(there, "TrainJob") == of_kind(objects, "TrainJob")


def test_the_folder_on_the_volume_belongs_to_the_pods_user(tmp_path: Path) -> None:
    pod = pod_of(render_objects(loaded(tmp_path, {"user_id": 2000})).objects)
    (maker,) = pod["initContainers"]
    assert maker["command"][0] == "install" and maker["command"][-1] == "/fsx/coremill"
    assert maker["command"].count("2000") == 2 and pod["securityContext"]["runAsUser"] == 2000
    assert maker["image"] == IMAGE and maker["securityContext"]["capabilities"]["add"] == ["CHOWN", "FOWNER"]
    theirs = render_objects(loaded(tmp_path, {"make_folder": False})).objects
    assert "initContainers" not in pod_of(theirs)
    assert of_kind(theirs, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/warn"] == "restricted"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user: needs root")
def test_the_init_container_does_what_it_is_for(tmp_path: Path) -> None:
    pod = pod_of(render_objects(loaded(tmp_path, {"mount_path": str(tmp_path / "volume")})).objects)
    (tmp_path / "volume").mkdir(mode=0o755)
    for _ in range(2):  # every pod does it
        subprocess.run(pod["initContainers"][0]["command"], check=True)
        made = (tmp_path / "volume" / "coremill").stat()
        assert (made.st_uid, made.st_gid, made.st_mode & 0o777) == (10001, 10001, 0o755)


def test_what_belongs_to_the_cluster_is_named_by_namespace_too(tmp_path: Path) -> None:
    """Two teams have a run of one name; no two pairs of namespace and name give one object."""
    sections = [{"namespace": "a", "name": "b-c", "claim": "d"}, {"namespace": "a-b", "name": "c", "claim": "d"}]
    sections += [{"namespace": "x" * 63, "name": f"{letter * 40}", "claim": letter * 250} for letter in "yz"]
    named = []
    for section in sections:
        objects = render_objects(loaded(tmp_path, section | STORAGES["fsx"] | {"queue": "q"})).objects
        named += [(one["kind"], one["metadata"]["name"]) for one in objects if "namespace" not in one["metadata"]]
        assert len(of_kind(objects, "NodePool")["metadata"]["name"]) <= 63  # a label of its nodes
        assert of_kind(objects, "PersistentVolume")["metadata"]["name"] == pvc_volume(objects)
    assert len(set(named)) == len(named) - 2  # the namespace and the queue that two of them share


def pvc_volume(objects: list[dict[str, Any]]) -> str:
    return str(of_kind(objects, "PersistentVolumeClaim")["spec"]["volumeName"])


def test_a_running_job_keeps_its_run_file(tmp_path: Path) -> None:
    """Applied anew with other settings, the file that a successor of a lost pod reads is still the old one."""
    first, other = (render_objects(loaded(tmp_path, train__learning_rate=rate)).objects for rate in (1e-4, 2e-4))
    assert of_kind(first, "ConfigMap")["metadata"]["name"] != of_kind(other, "ConfigMap")["metadata"]["name"]
    for objects in (first, other):
        (volume,) = (one for one in pod_of(objects)["volumes"] if "configMap" in one)
        assert volume["configMap"]["name"] == of_kind(objects, "ConfigMap")["metadata"]["name"]
        assert of_kind(objects, "ConfigMap")["immutable"] is True


def test_the_default_namespace_is_not_made(tmp_path: Path) -> None:
    objects = render_objects(loaded(tmp_path, {"namespace": "default"})).objects
    assert "Namespace" not in {one["kind"] for one in objects}
    assert of_kind(objects, "TrainJob")["metadata"]["namespace"] == "default"
