"""What Services call a pod, and what NetworkPolicies let it send and receive, as rules of nftables. Pure.

A pod that no policy selects is open. All pods of a rehearsal are in one subnet and have the same labels, so that a
selector takes in all of them or none; nobody else is there. Replies to what was let through pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from coremill.errors import InputError
from coremill.k8s.rehearse.controllers import PlannedJob
from coremill.k8s.rehearse.pods import Pod
from coremill.k8s.rehearse.written import WrittenObjects


def has_service(pod: Pod, job: PlannedJob, objects: WrittenObjects) -> bool:
    """Whether HOST.SUBDOMAIN resolves: a JobSet makes its own; for a Job a headless one has to select the pod."""
    if pod.subdomain is None:
        return False
    service = objects.find("Service", pod.subdomain)
    if service is None:
        return job.replicated_job is not None
    selector = service.part("spec", "selector").value or {}
    is_headless = service.part("spec", "clusterIP").value == "None"
    return is_headless and bool(selector) and selects({"matchLabels": selector}, pod.labels)


def nft_rules(objects: WrittenObjects, labels: Mapping[str, str], subnet: str) -> str | None:
    """The rule set of a pod; None: no policy selects it."""
    policies = [
        one.value["spec"]
        for one in objects.of_kind("NetworkPolicy")
        if selects(one.value["spec"].get("podSelector") or {}, labels)
    ]
    lines = []
    for direction, hook, peers_key, address in (
        ("Ingress", "input", "from", "ip saddr"),
        ("Egress", "output", "to", "ip daddr"),
    ):
        own = [one for one in policies if direction in _types(one)]
        if not own:
            continue
        rules = [rule for one in own for rule in one.get(direction.lower()) or []]
        accepted = [line for rule in rules for line in _accepts(rule, peers_key, address, labels, subnet)]
        inner = ["ct state established,related accept", "iif lo accept" if hook == "input" else "oif lo accept"]
        body = "; ".join([f"type filter hook {hook} priority 0; policy drop", *inner, *accepted])
        lines.append(f"  chain {hook} {{ {body}; }}")
    return "\n".join(["table inet network_policy {", *lines, "}"]) + "\n" if lines else None


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels in; an empty one takes all."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for one in selector.get("matchExpressions") or []:
        has, values = one["key"] in labels, one.get("values") or []
        is_met = {
            "In": has and labels.get(one["key"]) in values,
            "NotIn": labels.get(one["key"]) not in values,
            "Exists": has,
            "DoesNotExist": not has,
        }[one["operator"]]
        if not is_met:
            return False
    return True


def _types(spec: Mapping[str, Any]) -> list[str]:
    return spec.get("policyTypes") or (["Ingress", "Egress"] if "egress" in spec else ["Ingress"])


def _accepts(
    rule: Mapping[str, Any], peers_key: str, address: str, labels: Mapping[str, str], subnet: str
) -> Iterable[str]:
    peers = rule.get(peers_key)
    sources = [""] if not peers else [text for peer in peers for text in _peer(peer, address, labels, subnet)]
    for source in sources:
        for ports in _ports(rule.get("ports")):
            yield " ".join(word for word in (source, ports, "accept") if word)


def _peer(peer: Mapping[str, Any], address: str, labels: Mapping[str, str], subnet: str) -> Iterable[str]:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        family = address if ":" not in block["cidr"] else address.replace("ip ", "ip6 ")
        but = [one for one in block.get("except") or []]
        yield f"{family} {block['cidr']}" + (f" {family} != {{ {', '.join(but)} }}" if but else "")
        return
    if "namespaceSelector" in peer and peer["namespaceSelector"]:
        return  # labels of namespaces are not in the objects: nobody here is selected by them
    if selects(peer.get("podSelector") or {}, labels):
        yield f"{address} {subnet}"


def _ports(ports: list[dict[str, Any]] | None) -> Iterable[str]:
    if not ports:
        yield ""
        return
    for one in ports:
        protocol = str(one.get("protocol", "TCP")).lower()
        if "port" not in one:
            yield f"meta l4proto {protocol}"
        elif not isinstance(one["port"], int):
            raise InputError(
                f"the port {one['port']} of a NetworkPolicy is a name, which is not rehearsed", do="write its number"
            )
        else:
            yield f"{protocol} dport {one['port']}" + (f"-{one['endPort']}" if "endPort" in one else "")
