"""`run.metrics_port` in a cluster: Prometheus finds the pods, reaches this port and no other, and they listen there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clusters import job_spec_of, loaded, of_kind, pod_of
from test_rendered_objects import config_of

from coremill.errors import InputError
from coremill.k8s.check.checking import check
from coremill.k8s.check.crds import find_schemas, shipped_schemas
from coremill.k8s.check.manifests import manifests_of
from coremill.k8s.cluster.kinds import KINDS
from coremill.k8s.render import Rendered, render_objects


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def rendered(folder: Path, section: dict[str, Any], **settings: Any) -> Rendered:
    return render_objects(loaded(folder, {"kind": "job", **section}, **settings))


def pod_metadata(objects: list[dict[str, Any]]) -> dict[str, Any]:
    metadata: dict[str, Any] = next(job_spec_of(objects))["template"]["metadata"]
    return metadata


def test_without_a_port_nothing_is_open(tmp_path: Path) -> None:
    objects = rendered(tmp_path, {}).objects
    assert "ports" not in pod_of(objects)["containers"][0] and "annotations" not in pod_metadata(objects)
    assert len(of_kind(objects, "NetworkPolicy")["spec"]["ingress"]) == 1
    assert "PodMonitor" not in {one["kind"] for one in objects}


@pytest.mark.parametrize("kind", ["trainjob", "jobset", "job"])
def test_a_port_is_named_annotated_and_open(tmp_path: Path, kind: str) -> None:
    made = rendered(tmp_path, {"kind": kind}, run__metrics_port=9400)
    (container,) = pod_of(made.objects)["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": 9400, "protocol": "TCP"}]
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": "9400", "prometheus.io/path": "/metrics"}
    assert pod_metadata(made.objects)["annotations"] == annotations
    own, metrics = of_kind(made.objects, "NetworkPolicy")["spec"]["ingress"]
    assert set(own) == {"from"} and metrics == {"ports": [{"protocol": "TCP", "port": 9400}]}
    run = config_of(made.objects).run
    assert (run.metrics_host, run.metrics_port) == ("::", 9400)
    assert any('run.metrics_host is "::": Prometheus' in note for note in made.notes)
    outcome = check(manifests_of(made, "run.yaml"), shipped_schemas(), {})
    assert not outcome.errors and not outcome.unchecked


def test_an_interface_that_the_user_names_stays(tmp_path: Path) -> None:
    made = rendered(tmp_path, {}, run__metrics_port=9400, run__metrics_host="0.0.0.0")
    assert config_of(made.objects).run.metrics_host == "0.0.0.0"


def test_a_pod_monitor_selects_the_pods_and_their_port(tmp_path: Path) -> None:
    section = {"pod_monitor": True, "pod_monitor_labels": {"release": "stack"}, "metrics_namespace": "monitoring"}
    made = rendered(tmp_path, section, run__metrics_port=9400)
    monitor, pod = of_kind(made.objects, "PodMonitor"), pod_metadata(made.objects)
    assert monitor["apiVersion"] == KINDS["PodMonitor"].api_version
    assert monitor["metadata"]["labels"].items() >= {"release": "stack", **made.job.labels}.items()
    assert pod["labels"].items() >= monitor["spec"]["selector"]["matchLabels"].items()
    assert "annotations" not in pod  # it would be scraped twice
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in pod_of(made.objects)["containers"][0]["ports"]}
    (source,) = of_kind(made.objects, "NetworkPolicy")["spec"]["ingress"][1]["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    kinds = [one["kind"] for one in made.objects]
    assert kinds.index("PodMonitor") < kinds.index("Job")
    with pytest.raises(InputError, match="cannot be a namespace"):
        rendered(tmp_path, {"metrics_namespace": "No_Such"}, run__metrics_port=9400)


CRD = """\
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: podmonitors.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  names: {kind: PodMonitor, plural: podmonitors}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        required: [spec]
        properties:
          spec:
            type: object
            required: [selector]
            properties:
              selector: {type: object, x-kubernetes-preserve-unknown-fields: true}
              podMetricsEndpoints: {type: array, items: {type: object, properties: {port: {type: string}}}}
"""


def test_check_says_what_it_has_no_schema_of_and_takes_one_that_is_given(tmp_path: Path) -> None:
    made = rendered(tmp_path, {"pod_monitor": True}, run__metrics_port=9400)
    outcome = check(manifests_of(made, "run.yaml"), shipped_schemas(), {})
    (words,) = outcome.unchecked
    assert "no schema for monitoring.coreos.com/v1 PodMonitor" in words and not outcome.errors
    folder = tmp_path / "schemas" / "prometheus-operator-v0.1.0"
    folder.mkdir(parents=True)
    (folder / "podmonitors.yaml").write_text(CRD)
    given = check(manifests_of(made, "run.yaml"), find_schemas(str(tmp_path / "schemas")), {})
    # That schema has no `path`: found by the object's name and field.
    said = [str(finding) for finding in given.findings if "PodMonitor" in finding.object]
    assert len(said) == 1 and "podMetricsEndpoints[0].path" in said[0], said
