"""What kubectl needs besides `api_server.py`: discovery, OpenAPI and core kinds; custom resources are passed on.

Core kinds are held in memory and checked by kubernetes-validate, strict: a second opinion beside coremill's own reading
of the same schemas. Plain HTTP on loopback.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

from k8s.api_server import CRDS, ApiServer

RELEASE = kubernetes_validate.latest_version()
# Group and version, plural, kind, namespaced, short names.
CORE = (
    ("v1", "namespaces", "Namespace", False, ["ns"]),
    ("v1", "configmaps", "ConfigMap", True, ["cm"]),
    ("v1", "secrets", "Secret", True, []),
    ("v1", "services", "Service", True, ["svc"]),
    ("v1", "serviceaccounts", "ServiceAccount", True, ["sa"]),
    ("v1", "pods", "Pod", True, ["po"]),
    ("v1", "persistentvolumes", "PersistentVolume", False, ["pv"]),
    ("v1", "persistentvolumeclaims", "PersistentVolumeClaim", True, ["pvc"]),
    ("batch/v1", "jobs", "Job", True, []),
    ("storage.k8s.io/v1", "storageclasses", "StorageClass", False, ["sc"]),
    ("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", True, ["netpol"]),
    ("rbac.authorization.k8s.io/v1", "roles", "Role", True, []),
    ("rbac.authorization.k8s.io/v1", "rolebindings", "RoleBinding", True, []),
    ("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", False, ["pc"]),
    ("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", False, ["crd"]),
)
_VERBS = ["create", "delete", "get", "list", "patch", "update"]
_ITEM = re.compile(
    r"(?P<base>/api/v1|/apis/[^/]+/[^/]+)(/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(/(?P<name>[^/]+))?$"
)


class Front:
    """A server for kubectl over an API server of custom resources."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.objects: dict[str, dict[str, Any]] = {}  # core ones, by path
        self.address = ""

    def resources(self) -> list[tuple[str, str, str, bool, list[str]]]:
        found = list(CORE)
        for document in self.server.installed.values():
            spec = document["spec"]
            for version in (each["name"] for each in spec["versions"] if each["served"]):
                names, namespaced = spec["names"], spec["scope"] == "Namespaced"
                found.append((f"{spec['group']}/{version}", names["plural"], names["kind"], namespaced, []))
        return found

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, dict[str, Any]]:
        """For everything that is not a custom resource."""
        if path == "/version":
            major, minor = RELEASE.split(".")[:2]
            return 200, {"major": major, "minor": minor, "gitVersion": f"v{RELEASE}", "platform": "linux/amd64"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()}
        if path.startswith("/openapi/v3"):
            return self._openapi(path.removeprefix("/openapi/v3").strip("/"))
        version = path.removeprefix("/api/").removeprefix("/apis/")
        if any(version == each[0] for each in self.resources()):
            return 200, self._resource_list(version)
        return self._core(method, path, query, body)

    def _groups(self) -> list[dict[str, Any]]:
        versions: dict[str, list[dict[str, str]]] = {}
        for name in dict.fromkeys(each[0] for each in self.resources() if "/" in each[0]):
            group, version = name.split("/")
            versions.setdefault(group, []).append({"groupVersion": name, "version": version})
        return [{"name": group, "versions": each, "preferredVersion": each[-1]} for group, each in versions.items()]

    def _resource_list(self, version: str) -> dict[str, Any]:
        rows = [
            {"name": plural, "kind": kind, "namespaced": namespaced, "verbs": _VERBS, "shortNames": short}
            for group, plural, kind, namespaced, short in self.resources()
            if group == version
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": rows}

    def _openapi(self, version: str) -> tuple[int, dict[str, Any]]:
        """Only what kubectl looks for: that a kind can be patched with dryRun and fieldValidation."""
        versions = list(dict.fromkeys(each[0] for each in self.resources()))
        if not version:
            places = {("apis/" if "/" in each else "api/") + each: each for each in versions}
            return 200, {"paths": {place: {"serverRelativeURL": f"/openapi/v3/{place}"} for place in places}}
        wanted = version.removeprefix("apis/").removeprefix("api/")
        parameters = [
            {"name": name, "in": "query", "schema": {"type": "string"}} for name in ("dryRun", "fieldValidation")
        ]
        paths = {}
        for group, plural, kind, namespaced, _ in self.resources():
            if group == wanted:
                name, _, number = group.rpartition("/")
                place = f"/{version}/{'namespaces/{namespace}/' if namespaced else ''}{plural}/{{name}}"
                what = {"group": name, "version": number, "kind": kind}
                paths[place] = {"patch": {"parameters": parameters, "x-kubernetes-group-version-kind": what}}
        info = {"title": "Kubernetes", "version": RELEASE}
        return 200, {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}

    def _core(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, dict[str, Any]]:
        parts = _ITEM.match(path)
        if parts is None:
            return _status(404, "NotFound", f"the server could not find {path}")
        if method == "GET":
            if path in self.objects:
                return 200, self.objects[path]
            return _status(404, "NotFound", f'{parts["plural"]} "{parts["name"]}" not found')
        if method == "DELETE":
            return (200, self.objects.pop(path)) if path in self.objects else _status(404, "NotFound", f"no {path}")
        if method == "PATCH":
            body = _merged(self.objects.get(path, {}), body)
        problem = _problem(body)
        if problem is not None:
            return _status(422, "Invalid", f'{body.get("kind")} "{body["metadata"].get("name")}" is invalid: {problem}')
        target = path if parts["name"] else f"{path}/{body['metadata']['name']}"
        if method == "POST" and target in self.objects:
            return _status(409, "AlreadyExists", f"{target} already exists")
        made = {**body, "metadata": {**body["metadata"], "uid": f"uid-{len(self.objects)}", "resourceVersion": "1"}}
        if parts["namespace"]:
            made["metadata"]["namespace"] = parts["namespace"]
        if "dryRun" not in query:
            self.objects[target] = made
        return (201 if method == "POST" else 200), made


@contextlib.contextmanager
def serving(server: ApiServer) -> Iterator[Front]:
    """A front on a free port, gone afterwards."""
    front = Front(server)
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(front))
    front.address = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield front
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _handler(front: Front) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw, parts = self.rfile.read(length), urlsplit(self.path)
            kind = self.headers.get("Content-Type") or "application/json"
            groups = {each["spec"]["group"] for each in front.server.installed.values()}
            segments = parts.path.split("/")
            is_custom = len(segments) > 4 and segments[2] in groups or parts.path.startswith(CRDS)
            if is_custom:
                status, answer = front.server.ask(self.command, self.path, raw or None, kind)
            else:
                body = yaml.safe_load(raw) if raw else None  # JSON is YAML, and server-side apply sends YAML
                status, answer = front.answer(self.command, parts.path, parse_qs(parts.query), body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _do

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _problem(body: dict[str, Any]) -> str | None:
    try:
        kubernetes_validate.validate(body, RELEASE, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(str(part) for part in error.path)}: {error.message}"
    return None


def _merged(below: Any, above: Any) -> Any:
    """A merge patch: null takes a field away."""
    if not isinstance(above, dict) or not isinstance(below, dict):
        return above
    kept = {key: one for key, one in below.items() if key not in above}
    return kept | {key: _merged(below.get(key), one) for key, one in above.items() if one is not None}


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }
