"""What every command on a cluster begins with: the packages, the job as it is rendered, the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from coremill.config.load import LoadedConfig
from coremill.k8s.cluster.connection import Cluster, connect
from coremill.k8s.job import Job, make_job
from coremill.k8s.packages import require_packages
from coremill.k8s.render import Rendered, render_objects

NEEDED = ("kubernetes", "yaml", "cel_expr_python", "kubernetes_validate")


@dataclass(frozen=True)
class Opened:
    """A job and the cluster that it is, or will be, in."""

    job: Job
    cluster: Cluster


def open_job(loaded: LoadedConfig, context: str | None, command: str) -> Opened:
    """One that was submitted. Bad input ends here: packages, run file, kubeconfig, in this order; the cluster is not
    asked yet."""
    require_packages(f"coremill k8s {command}", NEEDED)
    job = make_job(loaded.with_answers(), is_there=True)
    return Opened(job, connect(job.section, context))


def open_rendered(loaded: LoadedConfig, context: str | None) -> tuple[Rendered, Opened]:
    """One that is to be submitted, with its objects."""
    require_packages("coremill k8s submit", NEEDED)
    rendered = render_objects(loaded)
    return rendered, Opened(rendered.job, connect(rendered.job.section, context))
