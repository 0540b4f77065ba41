"""Pods on nodes: whether they fit, what they cost, and what happens to them when a node goes.

What a pod gets of a node is the type's allocatable share, less what DaemonSets of a usual EKS cluster ask for
(`hardware/pods.py`); both come from our tables, not from the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from coremill.hardware.instances import Instance, all_instances, table
from coremill.hardware.pods import DAEMONSETS_CPU_MILLI, DAEMONSETS_MEMORY_MIB
from coremill.k8s.check.findings import Problem
from coremill.k8s.check.lints.pods import Pod
from coremill.k8s.check.lints.pools import CAPACITY, FAMILY, POOL, SIZE, TYPE, ZONE, Pool, unknown_value
from coremill.k8s.check.lints.reading import at, listed, mapping, objects, quantity, text, texts
from coremill.k8s.check.manifests import Manifest
from coremill.k8s.check.object_meta import LABEL_FIX, is_label_value, label_problems

_DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
_LEAST_GRACE_SECONDS = 60  # a save of some gigabytes to a shared volume, and the way there
_DEFAULT_GRACE_SECONDS = 30
_SPOT_SECONDS = 120
_WORTH_SAYING = 1.1  # a tenth dearer than it could be
_LESS_WOULD_DO = 0.8  # of what is asked for: who asks for 32 CPUs means the machine with 32 CPUs


@dataclass(frozen=True)
class Bill:
    """The cheapest way to run some pods on machines of one type."""

    instance: Instance
    machines: int
    usd_per_hour: float

    def __str__(self) -> str:
        return f"{self.machines} x {self.instance.name} for ${self.usd_per_hour:.2f} an hour"


def placement_problems(pod: Pod, pools: list[Pool], manifests: list[Manifest]) -> Iterator[Problem]:
    yield from _selector_problems(pod)
    if pod.is_joined:
        return
    taking = [pool for pool in pools if _selects(pod, pool)]
    tolerating = [pool for pool in taking if _tolerates(pod, pool)]
    means_them = pod.is_training or bool(_selected(pod))  # another pod without a selector has nodes elsewhere
    theirs = (tolerating or taking) if means_them else []
    if taking and not tolerating and means_them:
        taint = objects(taking[0].template.get("taints"))[0]
        words = f"it does not tolerate the taint {taint.get('key')} of NodePool {taking[0].name}, and never starts"
        fix = f"add a toleration: {{key: {taint.get('key')}, operator: Exists, effect: {taint.get('effect')}}}"
        yield Problem(pod.path_of("tolerations"), "taint", words, fix, "warning")
    elif pools and not taking and pod.is_training:
        words = f"no NodePool here has nodes it selects ({', '.join(pool.name for pool in pools)})"
        yield Problem(pod.path_of("nodeSelector"), "taint", words, f"select one: {POOL}: {pools[0].name}", "warning")
    if (pod.cpu_milli or pod.memory_bytes) and not pod.needs_gpu:
        yield from _size_problems(pod, theirs)
    if pod.is_training:
        yield from _grace_problems(pod, theirs, manifests)
    yield from _core_problems(pod, theirs)


def bill_of(pod: Pod, types: list[Instance], pods: int, share: float = 1.0) -> Bill | None:
    """The cheapest of the types that hold a pod (or `share` of it), all machines of one type."""
    bills = []
    for one in types:
        each = 1 if _is_alone(pod) else _pods_on(one, pod, share)
        if _pods_on(one, pod, share) >= 1 and one.usd_per_hour is not None:
            machines = ceil(pods / each)
            bills.append(Bill(one, machines, machines * one.usd_per_hour))
    return min(bills, key=lambda bill: (bill.usd_per_hour, bill.machines, bill.instance.name), default=None)


def _pods_on(one: Instance, pod: Pod, share: float = 1.0, *, with_daemon_sets: bool = True) -> int:
    if one.allocatable_cpu_milli is None or one.allocatable_memory_mib is None or (pod.needs_efa and not one.efa):
        return 0
    cpu = one.allocatable_cpu_milli - (DAEMONSETS_CPU_MILLI if with_daemon_sets else 0)
    memory = (one.allocatable_memory_mib - (DAEMONSETS_MEMORY_MIB if with_daemon_sets else 0)) * 2**20
    by_cpu = int(cpu // (pod.cpu_milli * share)) if pod.cpu_milli else 10**6
    return min(by_cpu, int(memory // (pod.memory_bytes * share)) if pod.memory_bytes else 10**6)


def _size_problems(pod: Pod, pools: list[Pool]) -> Iterator[Problem]:
    where = pod.main.path_of("resources") if pod.main else pod.path
    selected = _selected(pod)
    judged = [pool for pool in pools if pool.is_in_table]
    if pools and not judged:
        return
    narrowed = {one.name: one for pool in judged for one in pool.types(selected)}
    types = list(narrowed.values()) if judged else _of_selector(pod)
    size = f"{pod.cpu_milli / 1000:g} CPUs and {pod.memory_bytes / 2**30:g} GiB" + (
        " with EFA" if pod.needs_efa else ""
    )
    listed_types = f"NodePool {', '.join(pool.name for pool in judged)}" if judged else "the types it selects"
    if not types:
        return
    if not any(_pods_on(one, pod, with_daemon_sets=False) for one in types):
        largest = max(types, key=lambda one: (one.allocatable_cpu_milli or 0, one.allocatable_memory_mib or 0))
        words = f"{size} fit no type of {listed_types}: {_room(largest)}"
        fits = bill_of(pod, _everyday_types(), 1)
        fix = f"ask for less, or allow {fits.instance.name}" if fits else "ask for less: no type of the table holds it"
        yield Problem(where, "fits-nothing", words, fix)
        return
    bill = bill_of(pod, types, pod.count)
    if bill is None:
        tight = next(one for one in types if _pods_on(one, pod, with_daemon_sets=False))
        words = f"{size} fit {tight.name} only without DaemonSets ({_room(tight)} before them)"
        fix = f"leave them {DAEMONSETS_CPU_MILLI}m CPU and {DAEMONSETS_MEMORY_MIB} MiB"
        yield Problem(where, "fit", words, fix, "warning")
        return
    if pod.is_training:
        yield from _cost_problems(pod, bill, types, where, size)


def _cost_problems(pod: Pod, bill: Bill, types: list[Instance], where: str, size: str) -> Iterator[Problem]:
    """Dearer than need be: a little less would fit half the machine, or the cheap types are not listed."""
    note = f"on demand, {table().region}, {table().price_date}"
    pods = f"{pod.count} pod{'' if pod.count == 1 else 's'} of {size}"
    less = bill_of(pod, types, pod.count, _LESS_WOULD_DO)
    if less is not None and less.usd_per_hour * _WORTH_SAYING < bill.usd_per_hour:
        cpu = (less.instance.allocatable_cpu_milli or 0) - DAEMONSETS_CPU_MILLI
        memory = ((less.instance.allocatable_memory_mib or 0) - DAEMONSETS_MEMORY_MIB) // 1024
        each = max(1, ceil(pod.count / less.machines))
        words = f"{pods} need {bill} ({note}); a little smaller they fit {less}"
        fix = f"ask for at most {cpu // 1000 // each // 2 * 2} CPUs and {memory // each} GiB each"
        yield Problem(where, "cost", words, fix, "warning")
        return
    cheapest = bill_of(pod, _everyday_types(), pod.count)
    if cheapest is not None and cheapest.usd_per_hour * _WORTH_SAYING < bill.usd_per_hour:
        words = f"{pods} need {bill} ({note}); {cheapest} would hold them"
        yield Problem(where, "cost", words, f"allow {cheapest.instance.name} too", "warning")


def _room(one: Instance) -> str:
    cpu, memory = one.allocatable_cpu_milli or 0, one.allocatable_memory_mib or 0
    return f"{one.name} has {cpu / 1000:g} CPUs and {memory / 1024:.1f} GiB"


def _everyday_types() -> list[Instance]:
    """What one would compare with: no flex types, which promise less, and no bare metal."""
    return [one for one in all_instances() if not one.is_flex and not one.bare_metal and one.usd_per_hour is not None]


def _of_selector(pod: Pod) -> list[Instance]:
    """Types a pod selects itself, where it names them; else those one would compare with."""
    names = set(_values_of(pod, TYPE))
    return [one for one in all_instances() if one.name in names] if names else _everyday_types()


def _selected(pod: Pod) -> dict[str, Any]:
    return {key: value for key, value in mapping(pod.spec.get("nodeSelector")).items() if isinstance(value, str)}


def _expressions(pod: Pod) -> Iterator[tuple[dict[str, Any], str]]:
    """What nodes must have by the pod's affinity."""
    path = "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"
    where = f"{pod.path_of('affinity')}.{'.'.join(path)}"
    for number, term in enumerate(objects(at(pod.spec.get("affinity"), *path))):
        for place, expression in enumerate(objects(term.get("matchExpressions"))):
            yield expression, f"{where}[{number}].matchExpressions[{place}]"


def _values_of(pod: Pod, key: str) -> list[str]:
    values = [text(_selected(pod).get(key))] if key in _selected(pod) else []
    for expression, _ in _expressions(pod):
        values += texts(expression.get("values")) if expression.get("key") == key else []
    return values


def _selector_problems(pod: Pod) -> Iterator[Problem]:
    where = pod.path_of("nodeSelector")
    yield from label_problems(_selected(pod), where)
    for key, value in _selected(pod).items():
        if is_label_value(value):
            yield from _unknown_types(key, value, f"{where}[{key}]")
    for expression, path in _expressions(pod):
        for number, value in enumerate(texts(expression.get("values"))):
            spot = f"{path}.values[{number}]"
            if not is_label_value(value):
                yield Problem(spot, "label", f"{value!r} is no label value", LABEL_FIX)
            else:
                yield from _unknown_types(text(expression.get("key")), value, spot)


def _unknown_types(key: str, value: str, where: str) -> Iterator[Problem]:
    """Of families we know: a pod may as well be meant for another cloud."""
    families = {one.family for one in all_instances()}
    problem = unknown_value(key, value, where) if key in (TYPE, FAMILY, SIZE, CAPACITY) else None
    if problem is not None and (key != TYPE or value.split(".")[0] in families):
        yield problem


def _selects(pod: Pod, pool: Pool) -> bool:
    """Whether a pool's nodes have the labels a pod asks for; well-known labels are the nodes' own."""
    for key, value in _selected(pod).items():
        allowed = [each for each in pool.requirements if each.get("key") == key and each.get("operator") == "In"]
        if key in pool.labels:
            if pool.labels[key] != value:
                return False
        elif allowed:
            if value not in texts(allowed[0].get("values")):
                return False
        elif not (key in (TYPE, ZONE, CAPACITY) or "kubernetes.io/" in key or "karpenter.k8s.aws/" in key):
            return False
    return True


def _tolerates(pod: Pod, pool: Pool) -> bool:
    tolerations = objects(pod.spec.get("tolerations"))
    for taint in objects(pool.template.get("taints")):
        if taint.get("effect") == "PreferNoSchedule":
            continue
        fitting = (
            each
            for each in tolerations
            if each.get("key") in (None, taint.get("key"))
            and each.get("effect") in (None, "", taint.get("effect"))
            and (each.get("operator") == "Exists" or each.get("value") == taint.get("value"))
        )
        if next(fitting, None) is None:
            return False
    return True


def _is_alone(pod: Pod) -> bool:
    """One pod on a machine, by the pod's own word."""
    path = "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution"
    terms = objects(at(pod.spec.get("affinity"), *path))
    return any(term.get("topologyKey") == "kubernetes.io/hostname" for term in terms)


def _grace_problems(pod: Pod, pools: list[Pool], manifests: list[Manifest]) -> Iterator[Problem]:
    value, where = pod.annotations.get(_DO_NOT_DISRUPT, (None, ""))
    spot = [pool for pool in pools if pool.may_be_spot]
    if value is not None and str(value).lower() != "false":
        graceless = [pool for pool in spot if pool.grace_seconds is None]
        if graceless or not pools:
            nodes = f"a node of {graceless[0].name}" if graceless else "a spot node"
            words = f"a pod that forbids disruption is not evicted when {nodes} is taken back: no SIGTERM, no save"
            fix = "drop it (consolidationPolicy: WhenEmpty is enough), or set the NodePool's terminationGracePeriod: 2m"
            yield Problem(where, "disruption", words, fix, "warning")
    grace = quantity(pod.spec.get("terminationGracePeriodSeconds"))
    seconds = _DEFAULT_GRACE_SECONDS if grace is None else grace
    needed, why = _save_seconds(pod, manifests)
    where = pod.path_of("terminationGracePeriodSeconds")
    if seconds < needed:
        words = f"{seconds:g} s{'' if grace is not None else ' (the default)'} from SIGTERM to SIGKILL; {why}"
        fix = f"set terminationGracePeriodSeconds: {max(100, ceil(needed))}"
        fix += " in a runtime of your own, or from Trainer 2.3 on here" if pod.manifest.kind == "TrainJob" else ""
        yield Problem(where, "grace", words, fix, "warning")
    for pool in spot:
        if pool.grace_seconds is not None and seconds > pool.grace_seconds:
            words = (
                f"{seconds:g} s, but nodes of {pool.name} are gone after {pool.grace_seconds:g} s: the pod gets less"
            )
            yield Problem(where, "grace", words, "keep it below the NodePool's terminationGracePeriod", "warning")
    if spot and seconds >= _SPOT_SECONDS and all(pool.grace_seconds is None for pool in spot):
        words = f"{seconds:g} s, but a spot machine is gone {_SPOT_SECONDS} s after its notice"
        yield Problem(where, "grace", words, "at most 110", "warning")


def _save_seconds(pod: Pod, manifests: list[Manifest]) -> tuple[float, str]:
    """How long a save may take: coremill's run file says it, of other programs we assume it."""
    maps = {text(at(each.object, "metadata", "name")): each for each in manifests if each.kind == "ConfigMap"}
    for volume in objects(pod.spec.get("volumes")):
        found = maps.get(text(at(volume, "configMap", "name")))
        for content in mapping(found.object.get("data")).values() if found else ():
            written = re.search(
                r"(?m)^checkpoint:(?:\n +.*)*?\n? *\{?.*?\bgrace: *[\"']?(\d+(?:\.\d+)?)s", text(content)
            )
            if written:
                return float(written[1]), f"checkpoint.grace of the run file is {written[1]} s"
    return _LEAST_GRACE_SECONDS, f"saving a checkpoint takes more, say {_LEAST_GRACE_SECONDS} s"


def _core_problems(pod: Pod, pools: list[Pool]) -> Iterator[Problem]:
    """Where nodes give whole cores, only pods that ask rightly get them."""
    classes = [pool.node_class for pool in pools if pool.node_class is not None]
    data = " ".join(text(at(each.object, "spec", "userData")) for each in classes)
    main = pod.main
    if main is None or "static" not in data or not re.search(r"cpu-?manager-?policy", data, re.IGNORECASE):
        return
    cpu, where = main.amount("cpu"), main.path_of("resources")
    if cpu is None:
        return
    same = all(main.limit(key) is not None and main.limit(key) == main.amount(key) for key in ("cpu", "memory"))
    if not same or cpu != int(cpu):
        words = "the nodes give exclusive cores, but only to pods with whole CPUs and requests equal to limits"
        yield Problem(where, "cores", words, "set requests and limits alike, in whole CPUs", "warning")
    elif "full-pcpus-only" in data and int(cpu) % 2:
        words = f"{cpu:g} CPUs on nodes with full-pcpus-only: the kubelet refuses an odd number (SMTAlignmentError)"
        yield Problem(where, "cores", words, f"ask for {int(cpu) - 1}", "warning")


def template_label_problems(manifest: Manifest) -> Iterator[Problem]:
    """Label values inside templates, which the API server does not look at in custom resources."""
    stack: list[tuple[Any, str]] = [(manifest.object.get("spec"), "spec")]
    while stack:
        value, path = stack.pop()
        for key, one in mapping(value).items():
            if key in ("labels", "matchLabels", "nodeLabels") and isinstance(one, dict):
                yield from label_problems(one, f"{path}.{key}")
            else:
                stack.append((one, f"{path}.{key}"))
        stack += [(one, f"{path}[{number}]") for number, one in enumerate(listed(value))]
