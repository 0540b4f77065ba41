"""The commands `coremill k8s ...`: a run in a Kubernetes cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coremill.command_group import Commands

k8s_app = typer.Typer(
    cls=Commands,
    help="A run in a Kubernetes cluster (EKS): manifests from the run file and its section kubernetes.",
    no_args_is_help=True,
)

RunFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="run file with a section kubernetes", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="override one key, e.g. kubernetes.capacity=spot; repeat as needed",
        show_default=False,
    ),
]


@k8s_app.command()
def render(
    config: RunFile,
    settings: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="one file for each object, numbered", show_default=False),
    ] = None,
) -> None:
    """The manifests of a run, as YAML on stdout: the same bytes every time, without a cluster and without torch.

    coremill k8s render run.yaml | kubectl apply --server-side -f -

    Nodes that fit the pods (Karpenter), volume, run file, network policy, queue, and the job: a TrainJob, a JobSet or
    an Indexed Job, which ends and starts again by coremill's exit codes. What was decided, what is changed in the pods'
    run file and what is missing is said on stderr. A least section: kubernetes: {image: NAME:TAG, karpenter: none}.
    docs/eks.md tells what is rendered and why.
    """
    from coremill import api
    from coremill.k8s.render_command import render as render_run

    render_run(api.load_config(config, settings or []), output, Console(stderr=True))
