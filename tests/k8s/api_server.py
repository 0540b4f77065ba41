"""A real API server for custom resources: etcd and apiextensions-apiserver of `make k8s-setup`, on loopback.

It has structural schemas, CEL, strict field validation and server-side dry run, but no discovery and no core kinds
(`front.py` has those). Everything lives in one folder and ends with this process.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coremill import child

BUILT = Path(os.environ.get("COREMILL_K8S_FOLDER", Path.home() / ".cache/coremill-k8s"))
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
STRICT_DRY_RUN = "?dryRun=All&fieldValidation=Strict"
_SECONDS = 60
_NOBODY = "http://127.0.0.1:9"  # it wants a kube-apiserver to ask; nothing the tests do needs an answer


def why_not() -> str | None:
    """Why there is no server here, for a skip; None: there is one."""
    missing = [name for name in ("etcd", "apiextensions-apiserver") if not (BUILT / name).is_file()]
    return f"no {' and no '.join(missing)} in {BUILT}: run `make k8s-setup`" if missing else None


class ApiServer:
    """Talks to a server that is up; `install` decides which CustomResourceDefinitions it has."""

    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        self.address = address
        self.installed: dict[str, dict[str, Any]] = {}  # documents by name
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))

    def ask(
        self, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data=data, method=method, headers={"Content-Type": kind})
        try:
            with self._opener.open(request, timeout=30) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, {"message": text.decode()}

    def install(self, documents: list[dict[str, Any]]) -> None:
        """Makes these the only definitions of their names, and waits until each is served."""
        changed = [one for one in documents if self.installed.get(one["metadata"]["name"]) != one]
        for document in changed:
            name = document["metadata"]["name"]
            if name in self.installed:
                self.ask("DELETE", f"{CRDS}/{name}")
                wait_until(lambda name=name: self.ask("GET", f"{CRDS}/{name}")[0] == 404, f"{name} to go")
            status, answer = self.ask("POST", CRDS, document)
            assert status == 201, (name, answer.get("message"))
            self.installed[name] = document
        for document in changed:
            spec = document["spec"]
            served = [each["name"] for each in spec["versions"] if each["served"]]
            path = f"/apis/{spec['group']}/{served[0]}/{spec['names']['plural']}"
            wait_until(lambda path=path: self.ask("GET", path)[0] == 200, f"{path} to be served")

    def path_of(self, body: dict[str, Any]) -> str:
        """Where an object of a custom resource is posted."""
        group, version = body["apiVersion"].rsplit("/", 1)
        kinds = {
            (each["spec"]["group"], each["spec"]["names"]["kind"]): each["spec"] for each in self.installed.values()
        }
        spec = kinds[group, body["kind"]]
        metadata = body.get("metadata")
        namespace = (metadata.get("namespace") if isinstance(metadata, dict) else None) or "default"
        inner = f"namespaces/{namespace}/" if spec["scope"] == "Namespaced" else ""
        return f"/apis/{group}/{version}/{inner}{spec['names']['plural']}"

    def dry_run(self, body: dict[str, Any], path: str | None = None) -> tuple[int, dict[str, Any]]:
        """What `kubectl create --dry-run=server` does."""
        return self.ask("POST", (path or self.path_of(body)) + STRICT_DRY_RUN, body)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[ApiServer]:
    """A server with its files in `folder`; both processes are gone afterwards, and with this process."""
    certificates = _certificates(folder)
    client_port, peer_port, port = _free_ports(3)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "nobody", "cluster": {"server": _NOBODY}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "nobody", "context": {"cluster": "nobody", "user": "nobody"}}],
        "current-context": "nobody",
    }
    (folder / "nobody.json").write_text(json.dumps(config))
    nobody = folder / "nobody.json"
    etcd_address, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    etcd = [
        BUILT / "etcd",
        "--data-dir",
        folder / "data",
        "--listen-client-urls",
        etcd_address,
        "--advertise-client-urls",
    ]
    etcd += [etcd_address, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    etcd += ["--initial-cluster", f"default={peer}", "--unsafe-no-fsync"]
    plugins = "NamespaceLifecycle,MutatingAdmissionPolicy,MutatingAdmissionWebhook,ValidatingAdmissionPolicy"
    server = [BUILT / "apiextensions-apiserver", "--etcd-servers", etcd_address, "--bind-address", "127.0.0.1"]
    server += ["--secure-port", port, "--cert-dir", folder / "serving", "--client-ca-file", certificates / "ca.crt"]
    server += [
        "--authentication-skip-lookup",
        "--authentication-kubeconfig",
        nobody,
        "--authorization-kubeconfig",
        nobody,
    ]
    server += ["--kubeconfig", nobody, "--disable-admission-plugins", f"{plugins},ValidatingAdmissionWebhook"]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # its certificate is made at the start, for loopback
    context.load_cert_chain(certificates / "client.crt", certificates / "client.key")
    found = ApiServer(f"https://127.0.0.1:{port}", context)
    with _process(etcd, folder / "etcd.log"), _process(server, folder / "server.log") as process:
        wait_until(lambda: _is_ready(found, process), f"the API server ({folder}/server.log)")
        yield found


def wait_until(holds: Any, what: str) -> None:
    end = time.monotonic() + _SECONDS
    while not holds():
        assert time.monotonic() < end, f"waited {_SECONDS} s for {what}"
        time.sleep(0.1)


def _is_ready(server: ApiServer, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the API server ended; its log says why"
    try:
        # The one left out waits for the kube-apiserver that nobody is.
        return server.ask("GET", "/readyz?exclude=informer-sync")[0] == 200
    except OSError:
        return False


@contextlib.contextmanager
def _process(command: list[Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), "-", *map(str, command)]
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _certificates(folder: Path) -> Path:
    """An authority of our own and a client it vouches for, who may do everything. For a day."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject: x509.Name, issuer: x509.Name, key: Any, signer: Any, *, is_authority: bool) -> bytes:
        builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        usage = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder if is_authority else builder.add_extension(usage, critical=False)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def name(**parts: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(getattr(NameOID, key), text) for key, text in parts.items()])

    authority_key, client_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority, client = name(COMMON_NAME="test-ca"), name(ORGANIZATION_NAME="system:masters", COMMON_NAME="tests")
    (folder / "ca.crt").write_bytes(certificate(authority, authority, authority_key, authority_key, is_authority=True))
    (folder / "client.crt").write_bytes(certificate(client, authority, client_key, authority_key, is_authority=False))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "client.key").write_bytes(client_key.private_bytes(*private))
    return folder
