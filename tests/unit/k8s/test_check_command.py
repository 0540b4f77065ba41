"""`coremill k8s check` as users call it: files, stdin, releases, schemas, exit codes, JSON."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from coremill.errors import InputError
from coremill.k8s.check import command
from coremill.k8s.check.command import check_files
from coremill.k8s.check.manifests import read_manifests

MANIFESTS = Path(__file__).parents[2] / "k8s/manifests"
SHIPPED = Path(command.__file__).parent / "crds"
EXAMPLE = Path(__file__).parents[3] / "examples/tiny-from-scratch.yaml"
QUEUE = (
    "apiVersion: kueue.x-k8s.io/v1beta2\nkind: LocalQueue\nmetadata: {name: q, namespace: n}\nspec: {clusterQueue: c}\n"
)


def run(*files, schemas=None, releases=(), settings=(), as_json=False):
    return check_files([str(each) for each in files], schemas, list(releases), settings, as_json=as_json)


def test_a_good_file(capsys):
    assert run(MANIFESTS / "good/kueue.yaml") == 0
    out, error = capsys.readouterr()
    assert out == "" and error == "3 objects, 0 errors, 0 warnings against kueue 0.19.2\n"


def test_warnings_alone_are_no_failure(capsys):
    assert run(MANIFESTS / "good/indexed-job.yaml") == 0
    out, error = capsys.readouterr()
    assert out.count("\n") == 2 and all(": warning: Job/cpu-llama3 spec." in line for line in out.splitlines())
    assert "0 errors, 2 warnings" in error


def test_one_finding_a_line_with_file_line_object_field_and_fix(capsys):
    assert run(MANIFESTS / "bad/nodes.yaml") == 78
    file = MANIFESTS / "bad/nodes.yaml"
    line = next(line for line in capsys.readouterr().out.splitlines() if "error" in line)
    assert line == (
        f"{file}:14: error: NodePool/cpu-amx spec.template.spec.requirements[3].values[2]: '24xlarge, 48xlarge' is no"
        " label value: the API server takes it, and no node ever matches; write them apart: 24xlarge, 48xlarge [label]"
    )


def test_json(capsys):
    assert run(MANIFESTS / "bad/nodes.yaml", as_json=True) == 78
    out, error = capsys.readouterr()
    document = json.loads(out)
    assert error == "" and set(document) == {"objects", "errors", "warnings", "findings", "unchecked", "releases"}
    assert document["errors"] == 1 and document["objects"] == 2
    first = document["findings"][0]
    assert set(first) == {"file", "line", "object", "field", "level", "rule", "problem", "fix"}


def test_stdin_lists_and_json(capsys, monkeypatch, tmp_path):
    items = {
        "apiVersion": "v1",
        "kind": "List",
        "items": [{"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {}}],
    }
    monkeypatch.setattr("sys.stdin", io.StringIO(f"---\n{QUEUE}---\n---\n{json.dumps(items)}\n"))
    assert run("-") == 78
    out = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[2] for line in out] == ["Pod/? metadata.name", "Pod/? spec.containers"]
    assert out[0].startswith("stdin:8: error: ")


def test_yaml_is_read_as_kubectl_does(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: on, creationTimestamp: 2026-01-01}\n"
        "data: &d\n  a: yes\n  b: 010\n  c: 1.5\nmore: {<<: *d, d: x}\ndata2: 1\ndata2: 2\n"
    )
    (manifest,) = read_manifests([str(file)])
    assert manifest.object["data"] == {"a": True, "b": 8, "c": 1.5}
    assert manifest.object["metadata"] == {"name": True, "creationTimestamp": "2026-01-01"}
    assert manifest.object["more"] == {"a": True, "b": 8, "c": 1.5, "d": "x"}
    assert manifest.repeated == ("data2",) and manifest.line_of("data.b") == 6 and manifest.line_of("data.zz") == 4


def test_releases(capsys):
    file = MANIFESTS / "good/train-v21.yaml"
    assert run(file, releases=["trainer=2.1"]) == 0
    assert run(file, releases=["trainer=v2.1.0"]) == 0
    assert run(file) == 78
    assert run(MANIFESTS / "good/nodes.yaml", releases=["karpenter=1.8"]) == 78  # placementGroupSelector came later
    assert run(MANIFESTS / "good/core.yaml", releases=["kubernetes=1.30"]) == 0
    assert "against kubernetes 1.30" in capsys.readouterr().err


def test_schemas_of_a_folder(capsys, tmp_path):
    for name in ("trainer-v2.1.0", "trainer-v2.3.0"):
        shutil.copytree(SHIPPED / name, tmp_path / name)
    assert run(MANIFESTS / "good/train-v23.yaml", schemas=str(tmp_path)) == 0  # the newest
    (tmp_path / "queue.yaml").write_text(QUEUE)
    capsys.readouterr()
    assert run(tmp_path / "queue.yaml", schemas=str(tmp_path)) == 0
    out, error = capsys.readouterr()
    assert out.endswith(f"no schema for kueue.x-k8s.io/v1beta2 LocalQueue among those {tmp_path}\n")
    assert out.startswith("not checked: ") and "1 not checked" in error


BAD_INPUT = [
    ({"files": ["nowhere.yaml"]}, "nowhere.yaml cannot be read"),
    ({"files": ["."]}, ". is a folder"),
    ({"releases": ["trainer"]}, "'trainer' names no release"),
    ({"releases": ["trainer=9"]}, "no schemas of trainer 9"),
    ({"releases": ["trainr=2.1"]}, "did you mean trainer=2.1?"),
    ({"releases": ["kubernetes=1.2"]}, "no schemas of Kubernetes 1.2"),
    ({"schemas": "nowhere"}, "nowhere is no folder"),
    ({"schemas": str(MANIFESTS)}, "no CustomResourceDefinition in"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_INPUT, ids=lambda value: str(value)[:40])
def test_bad_input(changes, words):
    with pytest.raises(InputError) as error:
        run(*changes.pop("files", [MANIFESTS / "good/core.yaml"]), **changes)
    assert words in str(error.value) and error.value.do


@pytest.mark.parametrize(
    ("text", "words"), [("a: [", "this is not YAML"), ("- a\n", "this is no object"), ("", "no objects to check")]
)
def test_bad_files(tmp_path, text, words):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError, match=words):
        run(tmp_path / "a.yaml")


def test_without_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"coremill\[k8s\]"):
        run(MANIFESTS / "good/core.yaml")


def test_without_kubectl(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="kubectl was not found"):
        run(MANIFESTS / "good/core.yaml", schemas="cluster")


SHAPES = [
    "kind: trainjob, capacity: spot",
    "kind: trainjob, trainer: '2.1', karpenter: '1.8', queue: q",
    "kind: jobset, trainer: '2.2'",
    "kind: job, karpenter: none",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_file_is_rendered_and_checked_for_its_releases(shape, capsys, tmp_path):
    file = tmp_path / "run.yaml"
    section = f"kubernetes: {{image: 'example.com/coremill:0.1', cluster: demo, role: R, {shape}}}\n"
    file.write_text(f"{EXAMPLE.read_text()}\nfleet: {{nodes: 4, instance: c7i.8xlarge}}\n{section}")
    assert run(file) == 0
    out, error = capsys.readouterr()
    assert out == "" and "0 errors, 0 warnings" in error
    assert ("trainer 2.1.0" in error and "karpenter-provider-aws 1.8.0" in error) == ("1.8" in shape)


def test_findings_of_a_run_file_have_no_line(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    section = "kubernetes: {image: 'example.com/coremill:latest', karpenter: none}\n"
    file.write_text(f"{EXAMPLE.read_text()}\nfleet: {{instance: c7i.8xlarge}}\n{section}")
    assert run(file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith(f"{file}: warning: ") and line.endswith("[unpinned]") for line in lines)
    assert run(file, settings=["kubernetes.image=example.com/coremill:0.2"]) == 0
    assert capsys.readouterr().out == ""


def test_settings_without_a_run_file_are_refused():
    with pytest.raises(InputError, match="--set changes a run file"):
        run(MANIFESTS / "good/kueue.yaml", settings=["kubernetes.capacity=spot"])
