"""What no API server says: values that match no node, pods that fit none, bills, and saves that never happen.

Facts of several manifests are joined here (a TrainJob, its runtime, the NodePool its pods go to); a rule takes them and
gives problems. Errors are what can never work; the rest are warnings.
"""

from __future__ import annotations

from collections.abc import Iterator

from coremill.k8s.check.findings import Finding
from coremill.k8s.check.lints.containers import pod_problems, text_problems
from coremill.k8s.check.lints.placement import placement_problems, template_label_problems
from coremill.k8s.check.lints.pods import find_pods
from coremill.k8s.check.lints.pools import find_pools, node_class_problems, pool_problems
from coremill.k8s.check.lints.workloads import workload_problems
from coremill.k8s.check.manifests import Manifest


def lint(manifests: list[Manifest]) -> Iterator[Finding]:
    """All findings of all rules, object by object."""
    pools, pods = find_pools(manifests), find_pods(manifests)
    for pool in pools:
        yield from map(pool.manifest.finding, pool_problems(pool))
    for manifest in manifests:
        if manifest.kind == "EC2NodeClass":
            yield from map(manifest.finding, node_class_problems(manifest, pools))
        yield from map(manifest.finding, text_problems(manifest))
        yield from map(manifest.finding, workload_problems(manifest, manifests))
        yield from map(manifest.finding, template_label_problems(manifest))
    for pod in pods:
        yield from map(pod.manifest.finding, pod_problems(pod))
        yield from map(pod.manifest.finding, placement_problems(pod, pools, manifests))
