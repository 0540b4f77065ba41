"""What kubectl and clients need besides `api_server.py`: discovery, OpenAPI, core kinds, logs; the rest is passed on.

Core kinds are held in memory and checked by kubernetes-validate, strict: a second opinion beside coremill's own reading
of the same schemas. Plain HTTP on loopback. `Rules` makes it behave like a cluster with users, quotas and webhooks, in
the words that a real one has for them.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    ("v1", "events", "Event", True, ["ev"]),
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


_NO_PATH = "404 page not found\n"  # what a server says of a group that it does not have
_TRAIN_JOBS = "/trainjobs"


@dataclass
class Rules:
    """What a cluster has beside schemas; none of it unless a test asks for it."""

    token: str | None = None  # of the only user who is let in
    forbidden: set[tuple[str, str]] = field(default_factory=set)  # verb and plural that the user may not
    quota: dict[str, str] = field(default_factory=dict)  # plural -> why no more may be made
    without: set[str] = field(default_factory=set)  # groups that are not installed
    namespaces_must_be_there: bool = False
    runtimes_must_be_there: bool = False  # as the webhook of Kubeflow Trainer has it, also in a dry run
    afterwards: Callable[[str, str, dict[str, Any]], None] | None = None  # controllers: method, path, what was made


@dataclass(frozen=True)
class Request:
    """One that was made, for tests to look at."""

    method: str
    path: str
    query: dict[str, list[str]]
    text: str


class Front:
    """A server for kubectl and clients over an API server of custom resources."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.objects: dict[str, dict[str, Any]] = {}  # core ones, by path
        self.logs: dict[str, list[str]] = {}  # lines by pod, each with its time in front
        self.rules = Rules()
        self.requests: list[Request] = []
        self.address = ""
        self.changes = 0  # counted, for those who watch

    def put(self, body: dict[str, Any]) -> dict[str, Any]:
        """An object as a controller or kubelet would make it, whole."""
        version, plural, namespaced = next((one[0], one[1], one[3]) for one in CORE if one[2] == body["kind"])
        metadata = body["metadata"]
        inner = f"/namespaces/{metadata['namespace']}" if namespaced else ""
        root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        self.objects[f"{root}{inner}/{plural}/{metadata['name']}"] = body
        self.changes += 1
        return body

    def take(self, kind: str) -> None:
        """All objects of a kind are gone."""
        for path in [path for path, one in self.objects.items() if one["kind"] == kind]:
            del self.objects[path]
        self.changes += 1

    def refusal(self, request: Request, token: str | None) -> tuple[int, Any] | None:
        """Who may not, what has no room, and what is not there."""
        parts, rules = _ITEM.match(request.path.removesuffix("/log")), self.rules
        if rules.token is not None and token != f"Bearer {rules.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        if parts is None:
            return None
        plural, name, namespace = parts["plural"], parts["name"], parts["namespace"]
        group = parts["base"].split("/")[2] if parts["base"].startswith("/apis") else ""
        if group in rules.without:
            return 404, _NO_PATH
        if plural == "customresourcedefinitions" and name and name.split(".", 1)[1] in rules.without:
            return _status(404, "NotFound", f'{plural}.{group} "{name}" not found')
        verb = {"GET": "get" if name else "list", "POST": "create"}.get(request.method, request.method.lower())
        if (verb, plural) in rules.forbidden:
            where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            full = f"{plural}.{group}" if group else plural
            who = f'User "ana" cannot {verb} resource "{plural}" in API group "{group}" {where}'
            return _status(403, "Forbidden", f'{full} "{name}" is forbidden: {who}')
        if request.method not in ("PATCH", "POST"):
            return None
        if rules.namespaces_must_be_there and namespace and f"/api/v1/namespaces/{namespace}" not in self.objects:
            return _status(404, "NotFound", f'namespaces "{namespace}" not found')
        if plural in rules.quota and request.path not in self.objects:
            return _status(403, "Forbidden", f'{plural} "{name}" is forbidden: {rules.quota[plural]}')
        if rules.runtimes_must_be_there and _TRAIN_JOBS in request.path:
            return self._without_runtime(request, str(name))
        return None

    def _without_runtime(self, request: Request, name: str) -> tuple[int, Any] | None:
        spec = (yaml.safe_load(request.text) or {}).get("spec") or {}
        if "runtimeRef" not in spec:
            return None
        place = f"{request.path.split(_TRAIN_JOBS)[0]}/trainingruntimes/{spec['runtimeRef']['name']}"
        if self.server.ask("GET", place)[0] == 200:
            return None
        words = (
            'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.runtimeRef: Invalid'
        )
        return _status(403, "Forbidden", f"{words} value: specified trainingRuntime must be created before {name}")

    def resources(self) -> list[tuple[str, str, str, bool, list[str]]]:
        found = list(CORE)
        for document in self.server.installed.values():
            spec = document["spec"]
            for version in (each["name"] for each in spec["versions"] if each["served"]):
                names, namespaced = spec["names"], spec["scope"] == "Namespaced"
                found.append((f"{spec['group']}/{version}", names["plural"], names["kind"], namespaced, []))
        return found

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
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

    def _core(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        parts = _ITEM.match(path)
        if parts is None or parts["plural"] not in {each[1] for each in CORE}:
            return 404, _NO_PATH
        if method == "GET" and not parts["name"]:
            return 200, self._list(path, parts["plural"], query.get("labelSelector", [""])[0])
        if method == "GET":
            if path in self.objects:
                return 200, self.objects[path]
            return _status(404, "NotFound", f'{parts["plural"]} "{parts["name"]}" not found')
        if method == "DELETE":
            self.changes += 1
            return (200, self.objects.pop(path)) if path in self.objects else _status(404, "NotFound", f"no {path}")
        before = self.objects.get(path, {})
        if method == "PATCH":
            body = _merged(before, body)
            if before.get("kind") == "Job" and before["spec"].get("template") != body["spec"].get("template"):
                return _status(422, "Invalid", f'Job "{parts["name"]}" is invalid: spec.template: field is immutable')
        problem = _problem(body)
        if problem is not None:
            return _status(422, "Invalid", f'{body.get("kind")} "{body["metadata"].get("name")}" is invalid: {problem}')
        target = path if parts["name"] else f"{path}/{body['metadata']['name']}"
        if method == "POST" and target in self.objects:
            return _status(409, "AlreadyExists", f"{target} already exists")
        version = {"uid": f"uid-{len(self.objects)}", "resourceVersion": str(self.changes + 1)}
        version |= {
            key: before["metadata"][key] for key in ("uid", *(["resourceVersion"] * (body == before))) if before
        }
        made = {**body, "metadata": {**body["metadata"], **version}}
        if parts["namespace"]:
            made["metadata"]["namespace"] = parts["namespace"]
        if "dryRun" not in query:
            self.objects[target] = made
            self.changes += 1
        return (201 if method == "POST" else 200), made

    def _list(self, path: str, plural: str, selector: str) -> dict[str, Any]:
        """As a server lists core kinds: the items do not say what they are."""
        kind = next(each[2] for each in CORE if each[1] == plural)
        wanted = dict(one.split("=", 1) for one in selector.split(",") if one)
        namespace = _ITEM.match(path)["namespace"]  # type: ignore[index]
        found = [
            {key: value for key, value in one.items() if key not in ("kind", "apiVersion")}
            for place, one in self.objects.items()
            if one["kind"] == kind
            and (namespace is None or place.startswith(f"{path}/"))
            and wanted.items() <= (one["metadata"].get("labels") or {}).items()
        ]
        version = {"resourceVersion": str(self.changes)}
        return {"kind": f"{kind}List", "apiVersion": "v1", "metadata": version, "items": found}

    def watched(self, path: str, query: dict[str, list[str]]) -> Iterator[str]:
        """One event when something has changed since the version that was asked from, else none until time is up."""
        since, end = int(query["resourceVersion"][0]), time.monotonic() + float(query["timeoutSeconds"][0])
        while time.monotonic() < end:
            if self.changes > since:
                rows = self._list(path, "pods", query.get("labelSelector", [""])[0])["items"]
                for row in rows[:1]:
                    yield json.dumps({"type": "MODIFIED", "object": {"kind": "Pod", "apiVersion": "v1", **row}}) + "\n"
                return
            time.sleep(0.02)

    def log(self, pod: str, query: dict[str, list[str]]) -> Iterator[str]:
        """Lines so far; with follow until the container has ended or the pod is gone."""
        name, given = pod.rsplit("/", 1)[1], 0
        tail = query.get("tailLines")
        if tail:
            given = max(0, len(self.logs.get(name, [])) - int(tail[0]))
        while True:
            is_over = pod not in self.objects or not _is_running(self.objects[pod])
            lines = self.logs.get(name, [])
            yield from (f"{line}\n" for line in lines[given:])
            given = len(lines)
            if is_over or query.get("follow", [""])[0].lower() != "true":
                return
            time.sleep(0.02)


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
            query = parse_qs(parts.query)
            request = Request(self.command, parts.path, query, raw.decode())
            front.requests.append(request)
            refusal = front.refusal(request, self.headers.get("Authorization"))
            if refusal is not None:
                return self._send(*refusal)
            if parts.path.endswith("/log"):
                return self._stream(front.log(parts.path.removesuffix("/log"), query), "text/plain")
            kind = self.headers.get("Content-Type") or "application/json"
            groups = {each["spec"]["group"] for each in front.server.installed.values()}
            segments = parts.path.split("/")
            is_custom = len(segments) > 4 and segments[2] in groups or parts.path.startswith(CRDS)
            if not is_custom and query.get("watch", [""])[0].lower() == "true":
                return self._stream(front.watched(parts.path, query), "application/json")
            if is_custom:
                status, answer = front.server.ask(self.command, self.path, raw or None, kind)
            else:
                body = yaml.safe_load(raw) if raw else None  # JSON is YAML, and server-side apply sends YAML
                status, answer = front.answer(self.command, parts.path, query, body)
            if status in (200, 201) and self.command != "GET" and "dryRun" not in query and front.rules.afterwards:
                front.rules.afterwards(self.command, parts.path, answer)
            return self._send(status, answer)

        def _send(self, status: int, answer: Any) -> None:
            is_text = isinstance(answer, str)
            text = answer.encode() if is_text else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if is_text else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _stream(self, lines: Iterator[str], kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in lines:
                self.wfile.write(f"{len(line.encode()):x}\r\n{line}\r\n".encode())
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _do

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _is_running(pod: dict[str, Any]) -> bool:
    found = (pod.get("status") or {}).get("containerStatuses") or ()
    return any("running" in (one.get("state") or {}) for one in found)


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
