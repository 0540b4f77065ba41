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
Context = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="of the kubeconfig; left out: the current one", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, nothing else")]


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
    docs/guide/eks.md tells what is rendered and why.
    """
    from coremill import api
    from coremill.k8s.render_command import render as render_run

    render_run(api.load_config(config, settings or []), output, Console(stderr=True))


@k8s_app.command()
def check(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="manifests (YAML of one or many documents, JSON, - for stdin), or a run file, which is rendered first",
            show_default=False,
        ),
    ],
    schemas: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|cluster",
            help="a folder with a subfolder per release (trainer-v2.3.0) of CustomResourceDefinitions, or those of the "
            "cluster kubectl talks to; left out: the releases shipped with coremill",
            show_default=False,
        ),
    ] = None,
    release: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VERSION",
            help="which release your cluster runs, e.g. trainer=2.1, karpenter=1.8, kubernetes=1.33; left out: the "
            "newest there is; repeat as needed",
            show_default=False,
        ),
    ] = None,
    settings: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """What an API server, a controller or the bill would say of manifests, before they leave this machine.

    Schemas and CEL rules of Kubeflow Trainer, JobSet, Kueue, Karpenter and of core kinds, as an API server has them;
    then what none of them tells: label values no node matches, instance types that do not exist, pods that fit no type,
    tokens in clear text, saves cut short, spot nodes without a SIGTERM, cost. Give all files of a job at once: a pod is
    judged with its runtime and its NodePool.

    One finding a line: file:line, object, field, what is wrong, what to do, and the rule. Exit code 78 with errors
    (schema, CEL, labels, unknown types, fits nothing, token), 0 with warnings alone. What has no schema is said. No
    cluster, no torch; needs the extra k8s.
    """
    from coremill.k8s.check.command import check_files

    raise typer.Exit(check_files(files, schemas, release or [], settings or [], as_json=as_json))


@k8s_app.command()
def rehearse(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="run file with a section kubernetes, which is rendered first, or manifests: a file or a folder",
            show_default=False,
        ),
    ],
    settings: Overrides = None,
    reclaim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POD@TIME",
            help="the machine of a pod is taken back (spot): SIGTERM, the manifest's grace, SIGKILL, a new pod with a "
            "new address; 0@30s, or 1@20steps: once 20 steps are done; repeat as needed",
            show_default=False,
        ),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="POD@TIME", help="a pod is killed without a word; repeat as needed", show_default=False),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE|FOLDER",
            help="pods are containers of this image, by runc: a name of `buildah images`, an OCI archive (docker save, "
            "buildah push NAME oci-archive:FILE), or a folder it was unpacked into; nothing is pulled; left out: they "
            "run the coremill of this machine",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="volume, logs and manifests of the rehearsal; left out: runs/NAME-rehearsal",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout, the screen on stderr")] = False,
) -> None:
    """The job on this machine, as the controllers of a cluster would run it, from the rendered objects alone.

    coremill k8s rehearse run.yaml --reclaim 0@20steps

    TrainJob to JobSet to Job to pods: each with a network, a host name, a user, mounts and a memory limit of its own,
    as the manifest says; exit codes, failure policy, backoff and restarts are carried out as written there. At the end:
    steps, restarts, lost work, whether the manifest's times were enough, and which line is wrong. Exit code 0: the job
    came to its end, and nothing is; 1: it did not, or something is; 78: bad input.

    As root, or as a user with subordinate ids (newuidmap). Nothing is left behind but the folder of -o.
    """
    from coremill.k8s.rehearse.command import Request
    from coremill.k8s.rehearse.command import rehearse as rehearse_job

    request = Request(config, tuple(settings or ()), tuple(reclaim or ()), tuple(kill or ()), image, output, as_json)
    raise typer.Exit(rehearse_job(request))


@k8s_app.command()
def dashboard() -> None:
    """A Grafana dashboard of runs that serve metrics (run.metrics_port), as JSON on stdout.

    coremill k8s dashboard > coremill.json

    In Grafana: Dashboards, New, Import. It asks for the Prometheus that scrapes; for runs outside of a cluster too.
    docs/k8s-reference.md lists the metrics.
    """
    import json

    from coremill.report.readers.prometheus.dashboard import dashboard as made

    print(json.dumps(made(), indent=2))


@k8s_app.command()
def submit(
    config: RunFile,
    settings: Overrides = None,
    context: Context = None,
    wait: Annotated[bool, typer.Option(help="until all pods run, saying what they wait for")] = True,
    as_json: AsJson = False,
) -> None:
    """Send a run to the cluster: check, server-side dry run, server-side apply, progress until its pods run.

    What `coremill k8s check` rejects is not submitted, and what the cluster would refuse is refused before anything is
    made: no permission, a kind that is not installed, another release of Trainer or Karpenter than the run file names,
    a quota, a name that is taken. Objects of others are never changed.

    A job that was stopped goes on from its newest checkpoint; so does one that failed, or whose run file has changed
    since it was stopped (it is made anew). Ctrl-C ends the waiting, not the job. Needs the extra k8s and a kubeconfig.
    """
    from coremill import api
    from coremill.k8s.cluster.commands import submit_run

    submit_run(api.load_config(config, settings or []), str(config), context, wait=wait, as_json=as_json)


@k8s_app.command()
def status(config: RunFile, settings: Overrides = None, context: Context = None, as_json: AsJson = False) -> None:
    """A run in the cluster: its pods, and in words why one does not run; its nodes, and whether they can be started.

    No node type fits, EC2 has none, a quota, the image, the volume, a NodePool that is not ready and why. `state` in
    JSON is absent, queued, pending, starting, running, stopping, stopped, complete, failed or deleting.
    """
    from coremill import api
    from coremill.k8s.cluster.commands import show_status_of

    show_status_of(api.load_config(config, settings or []), context, as_json=as_json, console=Console())


@k8s_app.command()
def logs(
    config: RunFile,
    settings: Overrides = None,
    rank: Annotated[int, typer.Option(metavar="N", help="whose pod to read")] = 0,
    follow: Annotated[bool, typer.Option(help="go on until the job ends, through new pods too")] = True,
    tail: Annotated[
        int | None, typer.Option(metavar="N", help="begin with the last N lines", show_default=False)
    ] = None,
    context: Context = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line: pod, time, text")] = False,
) -> None:
    """What the pod of rank 0 prints, as it prints it; where a node was taken, what its successor prints.

    Rank 0 tells of the whole run. The pods of other ranks say what is their own; full logs of all ranks are in the run
    folder on the volume. Ctrl-C ends the reading, not the job.
    """
    from coremill import api
    from coremill.k8s.cluster.commands import show_logs

    loaded = api.load_config(config, settings or [])
    show_logs(loaded, context, rank=rank, follow=follow, tail=tail, as_json=as_json)


@k8s_app.command()
def stop(
    config: RunFile,
    settings: Overrides = None,
    context: Context = None,
    wait: Annotated[bool, typer.Option(help="until ranks have saved and pods have gone")] = True,
    as_json: AsJson = False,
) -> None:
    """Suspend a run in the cluster: ranks save, pods end, none come back; coremill k8s submit goes on from there.

    `coremill stop` in a pod would be answered by new pods: an end with 75 is not counted. Nodes that Karpenter started
    go some five minutes later.
    """
    from coremill import api
    from coremill.k8s.cluster.commands import stop_run

    stop_run(api.load_config(config, settings or []), context, wait=wait, as_json=as_json)


@k8s_app.command()
def delete(
    config: RunFile,
    settings: Overrides = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """Take a run out of the cluster: job, runtime, network policy, queue, NodePool, and with it the nodes.

    Asks before. A run that is going saves first. The volume is never touched, nor is the namespace: checkpoints, model
    and report stay, and the run goes on from there when it is submitted again.
    """
    from coremill import api
    from coremill.k8s.cluster.commands import delete_run

    loaded = api.load_config(config, settings or [])
    delete_run(loaded, context, is_sure=yes, as_json=as_json, ask=lambda text: typer.confirm(text, err=True))
