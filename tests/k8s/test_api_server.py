"""`coremill k8s check` beside a real API server and real kubectl: what one refuses, both do."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coremill.config.load import load_config
from coremill.k8s.check.checking import check_object
from coremill.k8s.check.crds import Schemas, shipped_schemas
from coremill.k8s.check.manifests import Manifest, read_manifests
from coremill.k8s.render import render_objects
from k8s.api_server import ApiServer, running, why_not
from k8s.front import Front, serving
from k8s.mutations import mutations

GOOD = Path(__file__).parent / "manifests/good"
EXAMPLE = Path(__file__).parents[2] / "examples/tiny-from-scratch.yaml"
KUBECTL = Path(sys.executable).parent / "kubectl"
SEED = 20
LONG = "COREMILL_LONG_TESTS" in os.environ
MUTATIONS_PER_OBJECT = 300 if LONG else 36
LEAST_MUTATIONS = 3000 if LONG else 300
# Which releases stand together, and which files are meant for them.
CLUSTERS: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    ({"trainer": "2.3", "karpenter": "1.14"}, ("nodes.yaml", "train-v23.yaml", "jobset.yaml", "kueue.yaml")),
    ({"trainer": "2.1", "karpenter": "1.8"}, ("train-v21.yaml",)),
) + (LONG * (({"trainer": "2.2", "karpenter": "1.8"}, ("train-v23.yaml", "nodes.yaml")),))

_reason = why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=f"no API server here: {_reason}")


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    return shipped_schemas()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with running(tmp_path_factory.mktemp("k8s")) as found:
        yield found


@pytest.fixture(scope="module")
def front(server: ApiServer) -> Iterator[Front]:
    with serving(server) as found:
        yield found


def install(server: ApiServer, schemas: Schemas, wanted: dict[str, str]) -> None:
    files = [file for release in schemas.chosen(wanted) for file in release.files]
    server.install([json.loads(gzip.decompress(file.read_bytes())) for file in files])


@pytest.mark.parametrize(("wanted", "files"), CLUSTERS[:2], ids=lambda value: str(value))
def test_good_manifests_are_taken_by_both(server, schemas, wanted, files):
    install(server, schemas, wanted)
    for manifest in read_manifests([str(GOOD / name) for name in files]):
        status, answer = server.dry_run(manifest.object)
        assert status == 201, (manifest.name, answer["message"])
        assert check_object(manifest, schemas, wanted).problems == (), manifest.name


def test_check_and_server_agree_on_mutated_manifests(server, schemas):
    """Structure, metadata and CEL: the same verdict, and every field the server names is among ours."""
    asked, refused, disagreements = 0, 0, []
    for wanted, files in CLUSTERS:
        install(server, schemas, wanted)
        for manifest in read_manifests([str(GOOD / name) for name in files]):
            kind = schemas.kind_of(manifest.group, manifest.version, manifest.kind, wanted)
            assert kind is not None
            path = server.path_of(manifest.object)
            for mutation in mutations(manifest.object, kind.schema, MUTATIONS_PER_OBJECT, SEED):
                status, answer = server.dry_run(mutation.object, path)
                verdict = check_object(Manifest("mutated", mutation.object, {}), schemas, wanted)
                asked, refused = asked + 1, refused + (status != 201)
                ours = {_plain(problem.path) for problem in verdict.problems if problem.level == "error"}
                if (status == 201) != (not ours) or not all(_is_among(field, ours) for field in fields_of(answer)):
                    said = answer.get("message", "taken")
                    disagreements.append((manifest.name, mutation.words, said, verdict.problems, verdict.unchecked))
    assert asked >= LEAST_MUTATIONS and refused >= asked // 2
    assert not disagreements, f"{len(disagreements)} of {asked}: {disagreements[:5]}"


def fields_of(answer: dict[str, Any]) -> set[str]:
    """Fields an answer blames; some of the server's messages name none."""
    causes = answer.get("details", {}).get("causes", ()) if answer.get("kind") == "Status" else ()
    named = {_plain(cause.get("field", "")) for cause in causes} - {"", "<nil>"}
    return named | {_plain(field) for field in re.findall(r'unknown field "([^"]+)"', answer.get("message") or "")}


def _plain(path: str) -> str:
    """Of owner references the server does not say which one it means."""
    dotted = re.sub(r"[\[\].]+", ".", path).strip(".")
    return re.sub(r"^(metadata\.ownerReferences)\.\d+", r"\1", dotted)


def _is_among(field: str, ours: set[str]) -> bool:
    """The server blames `metadata.labels` where we blame the label, and `metadata.name` where we miss all metadata."""
    return any(each == field or each.startswith(f"{field}.") or field.startswith(f"{each}.") for each in ours)


def kubectl(front: Front, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(KUBECTL), "--server", front.address, *words]
    environment = {"HOME": "/nonexistent", "PATH": os.environ["PATH"]}
    return subprocess.run(command, capture_output=True, text=True, input=stdin, env=environment, timeout=120)


def test_kubectl_applies_good_manifests(front, server, schemas, tmp_path):
    install(server, schemas, {})
    names = ("core.yaml", "nodes.yaml", "kueue.yaml", "train-v23.yaml", "jobset.yaml", "indexed-job.yaml")
    pipe = "\n---\n".join((GOOD / name).read_text() for name in names)
    tried = kubectl(front, "apply", "--dry-run=server", "-f", "-", stdin=pipe)
    assert tried.returncode == 0, tried.stderr
    assert tried.stdout.count("(server dry run)") == 13 and not front.objects
    done = kubectl(front, "apply", "-f", "-", stdin=pipe)
    assert done.returncode == 0, done.stderr
    assert "trainjob.trainer.kubeflow.org/cpu-llama3 created" in done.stdout
    again = kubectl(front, "apply", "-f", "-", stdin=pipe)
    assert again.returncode == 0, again.stderr
    found = kubectl(front, "get", "-n", "train", "trainjobs", "cpu-llama3", "-o", "jsonpath={.spec.trainer.numNodes}")
    assert found.stdout == "4", found.stderr


def test_kubectl_refuses_what_check_refuses(front, server, schemas):
    """Of core kinds too, by another reader of the same schemas."""
    install(server, schemas, {})
    job = yaml.safe_load((GOOD / "train-v21.yaml").read_text())
    broken = [
        ("spec.podTemplateOverrides", job),
        ("spec.completons", core_job(completons=4)),
        ("spec.completions", core_job(completions="four")),
        ("spec.template.spec.containers", core_job(template={"spec": {"restartPolicy": "Never"}})),
    ]
    for field, body in broken:
        done = kubectl(front, "apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(body))
        assert done.returncode == 1, (field, done.stdout)
        assert field.rsplit(".", 1)[-1] in done.stderr, (field, done.stderr)
        paths = [problem.path for problem in check_object(Manifest("broken", body, {}), schemas, {}).problems]
        assert paths == [field]


def core_job(**changed: Any) -> dict[str, Any]:
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "node", "image": "a:1"}]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j"},
        "spec": {"template": template, **changed},
    }


def test_schemas_come_from_a_cluster(front, server, schemas, tmp_path):
    install(server, schemas, {"trainer": "2.1"})
    script = tmp_path / "kubectl"
    script.write_text(f'#!/bin/sh\nexec {KUBECTL} --server {front.address} "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "coremill", "k8s", "check", "--schemas", "cluster"]
    for name, code in (("train-v21.yaml", 0), ("train-v23.yaml", 78)):
        done = subprocess.run(
            [*command, str(GOOD / name)], capture_output=True, text=True, env=environment, timeout=120
        )
        assert done.returncode == code, done.stdout + done.stderr


RENDERED = [
    ({}, "kind: trainjob, capacity: spot, queue: q, karpenter: '1.14'"),
    ({}, "kind: jobset, karpenter: '1.14'"),
    ({}, "kind: job, karpenter: none"),
    ({"trainer": "2.2"}, "kind: trainjob, trainer: '2.2', karpenter: '1.14'"),
    ({"trainer": "2.1", "karpenter": "1.8"}, "kind: trainjob, trainer: '2.1', karpenter: '1.8'"),
]


@pytest.mark.parametrize(("wanted", "shape"), RENDERED, ids=lambda value: str(value))
def test_rendered_objects_are_taken_through_a_pipe(front, server, schemas, tmp_path, wanted, shape):
    install(server, schemas, wanted)
    file = tmp_path / "run.yaml"
    section = f"kubernetes: {{image: 'example.com/coremill:0.1', cluster: demo, role: R, {shape}}}\n"
    file.write_text(f"{EXAMPLE.read_text()}\nfleet: {{nodes: 4, instance: c7i.8xlarge}}\n{section}")
    rendered = render_objects(load_config(file))
    done = kubectl(front, "apply", "--dry-run=server", "-f", "-", stdin=rendered.to_yaml())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(server dry run)") == len(rendered.objects)
