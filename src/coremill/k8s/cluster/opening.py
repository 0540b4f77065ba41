"""What every command on a cluster begins with: the packages, the job as it is rendered, the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from coremill.config.load import LoadedConfig
from coremill.k8s.cluster.connection import Cluster, connect
from coremill.k8s.packages import require_packages
from coremill.k8s.render import Rendered, render_objects

NEEDED = ("kubernetes", "yaml", "cel_expr_python", "kubernetes_validate")


@dataclass(frozen=True)
class Opened:
    """A job and the cluster that it is, or will be, in."""

    rendered: Rendered
    cluster: Cluster


def open_job(loaded: LoadedConfig, context: str | None, command: str) -> Opened:
    """Bad input ends here: packages, run file, kubeconfig, in this order; the cluster is not asked yet."""
    require_packages(f"coremill k8s {command}", NEEDED)
    rendered = render_objects(loaded)
    return Opened(rendered, connect(rendered.job.section, context))
