"""The cluster that the user's kubeconfig names, through the official client; every refusal becomes one clear error."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from coremill.config.kubernetes_section import KubernetesSection
from coremill.errors import InputError
from coremill.hardware.probe import environment_snapshot
from coremill.k8s.cluster.kinds import KINDS, Kind
from coremill.k8s.cluster.refusals import NOT_FOUND, Asked, Refused, Unavailable, refusal_of

FIELD_MANAGER = "coremill"
# Fields that stop and resume set: were they the field manager's above, the next apply would take them away.
STOP_MANAGER = "coremill-stop"
_TIMEOUT_SECONDS = (10, 60)  # to connect, to answer
_QUIET_SECONDS = 120  # so long a log may say nothing before it is asked for anew
_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
# How EKS and eksctl call a cluster in a kubeconfig.
_EKS_NAMES = (
    re.compile(r"arn:aws[\w-]*:eks:[\w-]+:\d+:cluster/(?P<name>.+)"),
    re.compile(r"(?P<name>[\w-]+)\.[\w-]+\.eksctl\.io"),
)


class Cluster:
    """An API server, as the user of one context of the kubeconfig sees it."""

    def __init__(self, client: Any, context: str, releases: Mapping[str, str]) -> None:
        from kubernetes.client import CoreV1Api
        from kubernetes.dynamic import DynamicClient

        self.context = context
        self._releases = tuple(releases.items())
        self._core = CoreV1Api(client)
        # Without discovery, which asks for dozens of lists and keeps them in /tmp: our kinds are known.
        self._client = DynamicClient(client, discoverer=lambda *_: None)

    def get(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        """One object; None where it is not there. That its kind is not there is an error."""
        try:
            return self._ask("get", KINDS[kind], namespace, name)
        except Refused as error:
            if error.status == NOT_FOUND and not error.kind_is_missing:
                return None
            raise

    def list_all(
        self, kind: str, namespace: str | None = None, labels: str | None = None, fields: str | None = None
    ) -> list[dict[str, Any]]:
        """All objects of a kind, in a namespace or everywhere, with these labels or fields (`a=b,c=d`)."""
        selectors = (("labelSelector", labels), ("fieldSelector", fields))
        query = [(name, value) for name, value in selectors if value is not None]
        found = self._ask("list", KINDS[kind], namespace, None, query=query).get("items") or ()
        # In lists of core kinds objects do not say what they are.
        return [{**one, "kind": kind, "apiVersion": KINDS[kind].api_version} for one in found]

    def apply(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Server-side apply: fields that others own stay theirs. A dry run goes as far as admission, and keeps none."""
        query = [("fieldManager", FIELD_MANAGER), ("fieldValidation", "Strict"), ("force", "false")]
        query += [("dryRun", "All")] if dry_run else []
        return self._on("patch", body, query=query, body=body, content_type=_APPLY)

    def merge(self, live: Mapping[str, Any], change: dict[str, Any]) -> dict[str, Any]:
        """Changes some fields of an object that is there."""
        return self._on("patch", live, query=[("fieldManager", STOP_MANAGER)], body=change, content_type=_MERGE)

    def delete(self, live: Mapping[str, Any]) -> None:
        """Takes an object away, and what it owns after it (left to itself, the API would leave the pods of a Job)."""
        try:
            self._on("delete", live, query=[("propagationPolicy", "Background")])
        except Refused as error:
            if error.status != NOT_FOUND:
                raise

    def wait_for_change(self, namespace: str, labels: str, seconds: float) -> None:
        """Until a pod changes, or some seconds are over."""
        from kubernetes.client.exceptions import ApiException
        from kubernetes.watch import Watch
        from urllib3.exceptions import HTTPError

        began, watch = time.monotonic(), Watch()
        limit = max(1, int(seconds))
        try:
            version = self._ask("list", KINDS["Pod"], namespace, None, query=[("labelSelector", labels)])["metadata"]
            stream = watch.stream(
                self._core.list_namespaced_pod,
                namespace,
                label_selector=labels,
                resource_version=version.get("resourceVersion"),
                timeout_seconds=limit,
                _request_timeout=(_TIMEOUT_SECONDS[0], limit + _TIMEOUT_SECONDS[1]),
            )
            for _ in stream:
                watch.stop()
        except (ApiException, HTTPError, ValueError):  # a role may allow list and not watch; a pod it cannot read
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        time.sleep(0.2)  # of many changes at once the first wakes us

    def log_lines(
        self, namespace: str, pod: str, container: str, *, follow: bool, tail: int | None, since: int | None = None
    ) -> Iterator[str]:
        """Lines of a container's log, each with its time in front, of the last `since` seconds or all.

        With `follow` until the container ends, or says nothing for so long that the connection may be lost: a load
        balancer between drops idle ones without a word.
        """
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        asked = Asked("get", KINDS["Pod"], namespace, f"{pod}, its log", self.context, self._releases)
        options = {"tail_lines": tail, "since_seconds": since}
        try:
            answer = self._core.read_namespaced_pod_log(
                pod,
                namespace,
                container=container,
                follow=follow,
                timestamps=True,
                _preload_content=False,
                _request_timeout=(_TIMEOUT_SECONDS[0], _QUIET_SECONDS if follow else _TIMEOUT_SECONDS[1]),
                **{name: value for name, value in options.items() if value is not None},
            )
            rest = b""
            for chunk in answer.stream(4096):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in lines)
            if rest:
                yield rest.decode("utf-8", "replace")
        except ApiException as error:
            raise refusal_of(error.status or 0, _text(error), asked) from error
        except ReadTimeoutError as error:
            if not follow:
                raise _no_answer(self.context, error) from error
        except HTTPError as error:
            raise _no_answer(self.context, error) from error

    def _on(self, verb: str, target: Mapping[str, Any], **request: Any) -> dict[str, Any]:
        metadata = target["metadata"]
        return self._ask(verb, KINDS[target["kind"]], metadata.get("namespace"), metadata["name"], **request)

    def _ask(
        self,
        verb: str,
        kind: Kind,
        namespace: str | None,
        name: str | None,
        *,
        query: list[tuple[str, str]] | None = None,
        body: dict[str, Any] | None = None,
        content_type: str | None = None,
    ) -> dict[str, Any]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        asked = Asked(verb, kind, namespace, name, self.context, self._releases)
        try:
            answer = self._client.request(
                "get" if verb == "list" else verb,
                kind.path(namespace, name),
                body=body,
                query_params=list(query or ()),
                content_type=content_type,
                _request_timeout=_TIMEOUT_SECONDS,
                serialize=False,
            )
            return dict(json.loads(answer.data))
        except ApiException as error:
            raise refusal_of(error.status or 0, _text(error), asked) from error
        except (HTTPError, OSError, ValueError) as error:
            raise _no_answer(self.context, error) from error


def connect(section: KubernetesSection, context: str | None) -> Cluster:
    """The cluster of a context of the kubeconfig, the current one unless named; nothing is asked of it yet."""
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException
    from yaml import YAMLError

    login = f"aws eks update-kubeconfig --name {section.cluster or 'CLUSTER'}"
    login += f" --region {section.region}" if section.region else ""
    try:
        file = environment_snapshot().get("KUBECONFIG") or None  # the client reads it once, when it is imported
        contexts, current = config.list_kube_config_contexts(file)
        known = {one["name"]: one["context"] for one in contexts}
        if context is not None and context not in known:
            raise InputError(
                f"the kubeconfig has no context {context}",
                where="--context",
                why=f"it has {', '.join(sorted(known)) or 'none'}",
                do="name one of these",
            )
        name = context or current["name"]
        _require_cluster(section, name, str(known[name].get("cluster", "")), login)
        with _errors_told() as told:
            client = config.new_client_from_config(file, context=name, persist_config=False)
    except (ConfigException, YAMLError, AttributeError, TypeError, KeyError, OSError) as error:
        raise InputError(
            "there is no kubeconfig that names a cluster",
            where="KUBECONFIG, or ~/.kube/config",
            why=" ".join(str(error).split()) or type(error).__name__,
            do=login,
        ) from error
    if told:
        raise InputError(
            "the kubeconfig's way to log in does not work",
            where=f"context {name}",
            # In a terminal the client lets the program speak for itself, and then trips over having no words of it.
            why="; ".join("what it says stands above" if "NoneType" in words else words for words in told),
            do="`kubectl get namespaces` shows what it says; on EKS it runs `aws eks get-token`: is the AWS CLI there,"
            " and logged in (`aws sts get-caller-identity`, `aws sso login`)?",
        )
    client.configuration.retries = False  # urllib3 would try, and tell of it, three times
    client.rest_client.pool_manager.connection_pool_kw["retries"] = False
    releases = {"trainer": section.trainer, "karpenter": section.karpenter}
    return Cluster(client, name, releases)


@contextlib.contextmanager
def _errors_told() -> Iterator[list[str]]:
    """What the client logs as an error where it should fail: a login program that is not there, or ends badly."""
    told: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: told.append(" ".join(record.getMessage().split()))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)  # with none there, the first error would make one that stays
    try:
        yield told
    finally:
        logging.getLogger().removeHandler(handler)


def _require_cluster(section: KubernetesSection, context: str, cluster: str, login: str) -> None:
    """The run file may name another cluster than the kubeconfig: then one of them is meant for something else."""
    found = next((match["name"] for form in _EKS_NAMES if (match := form.fullmatch(cluster))), None)
    if section.cluster is not None and found is not None and found != section.cluster:
        raise InputError(
            f"the kubeconfig talks to the cluster {found}, and the run file names {section.cluster}",
            where=f"context {context}, kubernetes.cluster",
            do=f"--context NAME for another context, or {login}",
        )


def _text(error: Any) -> str:
    body = error.body
    return body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body or error.reason or "")


def _no_answer(context: str, error: Exception) -> Unavailable:
    return Unavailable(
        "the cluster does not answer",
        where=f"context {context}",
        why=str(error).splitlines()[0],
        do="`kubectl cluster-info` has to work: is the cluster there, and reached from this network (VPN, public"
        " endpoint)?",
    )
