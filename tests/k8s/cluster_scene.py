"""A run file, a kubeconfig and a front that behaves like a cluster: users, webhooks, and controllers that make pods."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from coremill import cli
from coremill.k8s.check.crds import shipped_schemas
from k8s.api_server import ApiServer
from k8s.front import Front, Rules

EXAMPLE = Path(__file__).parents[2] / "examples/tiny-from-scratch.yaml"
USER_TOKEN = "k8s-user-token-5Qx9dRz"  # of the kubeconfig
HUB_TOKEN = "hf_secretSeededFakeToken0123456789"  # of the user's environment
NAMESPACE, NAME, NODES = "coremill", "run", 2
INDEX = "batch.kubernetes.io/job-completion-index"
CUSTOM = {
    "trainer.kubeflow.org/v1alpha1": ("trainjobs", "trainingruntimes"),
    "jobset.x-k8s.io/v1alpha2": ("jobsets",),
    "karpenter.sh/v1": ("nodepools", "nodeclaims"),
    "karpenter.k8s.aws/v1": ("ec2nodeclasses",),
    "kueue.x-k8s.io/v1beta2": ("resourceflavors", "clusterqueues", "localqueues", "workloads"),
}
READY = [
    {"type": "Ready", "status": "True", "reason": "Ready", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
]


@dataclass
class Outcome:
    code: int
    out: str
    error: str

    @property
    def document(self) -> dict[str, Any]:
        return dict(json.loads(self.out))


@dataclass
class ClusterScene:
    """The parts of a test; `pods_run`: whether pods come up at once."""

    front: Front
    server: ApiServer
    folder: Path
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]
    pods_run: bool = True
    said: list[str] = field(default_factory=list)  # all that any command printed

    @property
    def file(self) -> Path:
        return self.folder / "run.yaml"

    def write(self, section: str = "", *, steps: int = 5, cluster: str = "demo") -> None:
        text = EXAMPLE.read_text()
        document = {**yaml.safe_load(text), "fleet": {"nodes": NODES, "instance": "c7i.8xlarge"}}
        document.setdefault("train", {})["steps"] = steps
        document["kubernetes"] = {"image": "example.com/coremill:0.1", "cluster": cluster, "role": "R"}
        document["kubernetes"] |= {"zone": "us-west-2a", **(yaml.safe_load(f"{{{section}}}") or {})}
        self.file.write_text(yaml.safe_dump(document))

    def kubeconfig(self, address: str | None = None, *, cluster: str = "tests", token: str = USER_TOKEN) -> None:
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": cluster, "cluster": {"server": address or self.front.address}}],
            "users": [{"name": "ana", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": cluster, "user": "ana"}}],
            "current-context": "here",
        }
        (self.folder / "kubeconfig").write_text(yaml.safe_dump(document))

    def coremill(self, command: str, *words: str) -> Outcome:
        self.capture.readouterr()
        self.patch.setattr(sys, "argv", ["coremill", "k8s", command, str(self.file), *words])
        streams, code = (sys.stdout, sys.stderr), 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout, sys.stderr = streams
        out, error = self.capture.readouterr()
        self.said += [out, error]
        return Outcome(code, out, error)

    def install(self, wanted: dict[str, str]) -> None:
        files = [file for release in shipped_schemas().chosen(wanted) for file in release.files]
        self.server.install([json.loads(gzip.decompress(file.read_bytes())) for file in files])

    def custom(self, version: str, plural: str, name: str = NAME) -> dict[str, Any] | None:
        inner = (
            f"/namespaces/{NAMESPACE}" if plural in ("trainjobs", "trainingruntimes", "jobsets", "workloads") else ""
        )
        status, found = self.server.ask("GET", f"/apis/{version}{inner}/{plural}/{name}")
        return found if status == 200 else None

    def train_job(self) -> dict[str, Any] | None:
        return self.custom("trainer.kubeflow.org/v1alpha1", "trainjobs")

    def set_status(self, version: str, plural: str, status: dict[str, Any], name: str = NAME) -> None:
        inner = f"/namespaces/{NAMESPACE}" if plural in ("trainjobs", "jobsets", "workloads") else ""
        path = f"/apis/{version}{inner}/{plural}/{name}/status"
        code, answer = self.server.ask("PATCH", path, {"status": status}, "application/merge-patch+json")
        assert code == 200, answer

    def controllers(self, method: str, path: str, made: dict[str, Any]) -> None:
        """What Trainer, JobSet and the Job controller do with a job; Karpenter with its pool."""
        if path.rsplit("/", 2)[-2] in ("trainjobs", "jobsets", "jobs"):
            if method == "DELETE" or made.get("spec", {}).get("suspend"):
                self.front.take("Pod")
            elif not any(one["kind"] == "Pod" for one in self.front.objects.values()):
                for index in range(NODES):
                    self.pod(index, phase="Running" if self.pods_run else "Pending")

    def pod(self, index: int, *, phase: str, suffix: str = "a1b2c", made: int = 0, **status: Any) -> dict[str, Any]:
        """A pod of the job, as the API server would show it."""
        labels = {"app.kubernetes.io/name": "coremill", "app.kubernetes.io/instance": NAME}
        labels["app.kubernetes.io/managed-by"] = "coremill"
        name = f"{NAME}-node-0-{index}-{suffix}"
        state: dict[str, Any] = {"running": {}} if phase == "Running" else {}
        containers = [{"name": "node", "image": "example.com/coremill:0.1", "state": state}] if state else []
        metadata = {"name": name, "namespace": NAMESPACE, "labels": labels, "annotations": {INDEX: str(index)}}
        metadata["creationTimestamp"] = f"2026-01-01T00:00:{made:02}Z"
        spec: dict[str, Any] = {"containers": [{"name": "node", "image": "example.com/coremill:0.1"}]}
        spec |= {"nodeName": f"node-{index}"} if phase != "Pending" else {}
        shown = {"phase": phase, "containerStatuses": containers, **status}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": shown}
        return self.front.put(body)

    def event(self, kind: str, name: str, reason: str, message: str, *, by: str = "kubelet") -> None:
        namespace = NAMESPACE if kind not in ("NodeClaim", "NodePool") else "default"
        number = len(self.front.objects)
        self.front.put(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"event-{number}", "namespace": namespace},
                "involvedObject": {"kind": kind, "name": name, "namespace": namespace},
                "type": "Normal" if reason in ("Pulling", "Pulled") else "Warning",
                "reason": reason,
                "message": message,
                "source": {"component": by},
                "lastTimestamp": f"2026-01-01T00:01:{number:02}Z",
            }
        )

    def claim(self, phase: str = "Bound") -> None:
        metadata = {"name": "coremill", "namespace": NAMESPACE}
        body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "status": {"phase": phase}}
        self.front.put(body)

    def clear(self) -> None:
        for version, plurals in CUSTOM.items():
            for plural in plurals:
                status, found = self.server.ask("GET", f"/apis/{version}/{plural}")
                for one in found.get("items", ()) if status == 200 else ():
                    metadata = one["metadata"]
                    inner = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
                    self.server.ask("DELETE", f"/apis/{version}{inner}/{plural}/{metadata['name']}")
        self.front.objects.clear()
        self.front.logs.clear()
        self.front.requests.clear()
        self.front.rules = Rules(
            token=USER_TOKEN,
            namespaces_must_be_there=True,
            runtimes_must_be_there=True,
            afterwards=self.controllers,
        )
