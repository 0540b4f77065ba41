"""Rules between run.metrics_port and what goes with it; the form is that of rules.py."""

from __future__ import annotations

from coremill.config.rule import Breach, Rule
from coremill.config.schema import RunConfig, RunSection

SYSTEM_PORTS = 1024  # below, only root may listen
MEETING_PORT = 29500  # of rank 0 in pods (world.identity.DEFAULT_PORT)
EXAMPLE_PORT = 9400


def _metrics_have_a_port(config: RunConfig) -> Breach | None:
    """`run.metrics_host` and the keys for Prometheus in `kubernetes` go with `run.metrics_port`."""
    section = config.kubernetes
    given = {
        "run.metrics_host": config.run.metrics_host != RunSection.model_fields["metrics_host"].default,
        "kubernetes.pod_monitor": section.pod_monitor,
        "kubernetes.metrics_namespace": section.metrics_namespace is not None,
    }
    named = [key for key, is_given in given.items() if is_given]
    if config.run.metrics_port is not None or not named:
        return None
    return Breach(
        named[0],
        f"{named[0]} is given without run.metrics_port",
        "nobody listens, so there is nothing to scrape",
        f"add run.metrics_port: {EXAMPLE_PORT}, or remove {named[0]}",
        others=tuple(named[1:]),
    )


def _labels_are_of_a_monitor(config: RunConfig) -> Breach | None:
    """`kubernetes.pod_monitor_labels` goes with `kubernetes.pod_monitor`."""
    if config.kubernetes.pod_monitor or not config.kubernetes.pod_monitor_labels:
        return None
    return Breach(
        "kubernetes.pod_monitor_labels",
        "kubernetes.pod_monitor_labels is given, but there is to be no PodMonitor",
        "they are the labels of that object",
        "add kubernetes.pod_monitor: true, or remove the labels",
    )


def _pods_can_listen(config: RunConfig) -> Breach | None:
    """In pods `run.metrics_port` is 1024 or above, and not 29500, where ranks meet."""
    port = config.run.metrics_port
    if config.kubernetes.image is None or port is None or (port >= SYSTEM_PORTS and port != MEETING_PORT):
        return None
    why = (
        "the pods' ranks meet at that port"
        if port == MEETING_PORT
        else "a free port of a pod is known to nobody outside"
        if port == 0
        else "pods do not run as root: ports below 1024 are the system's"
    )
    return Breach(
        "run.metrics_port",
        f"run.metrics_port is {port}, with a section kubernetes",
        why,
        f"set run.metrics_port: {EXAMPLE_PORT}",
        others=("kubernetes.image",),
    )


METRICS_RULES = (
    Rule(
        ("run.metrics_port", "run.metrics_host", "kubernetes.pod_monitor", "kubernetes.metrics_namespace"),
        _metrics_have_a_port,
    ),
    Rule(("kubernetes.pod_monitor", "kubernetes.pod_monitor_labels"), _labels_are_of_a_monitor),
    Rule(("run.metrics_port", "kubernetes.image"), _pods_can_listen),
)
