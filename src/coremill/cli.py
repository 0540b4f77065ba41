"""The command line: one function per command, no logic. Nothing here imports torch; a rank imports it later."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from coremill import __version__
from coremill.cli_config import AsJson, ConfigPath, DataSource, ModelName, Settings, config_app
from coremill.cli_k8s import k8s_app
from coremill.cli_launch import launch
from coremill.command_group import Commands
from coremill.errors import KnownEnding

app = typer.Typer(
    name="coremill",
    cls=Commands,
    help="Train and fine-tune Hugging Face models on CPUs.\n\n"
    "One YAML file describes a run; every key has a default. Start with [bold]coremill doctor[/bold], then "
    "[bold]coremill train[/bold] (the built-in example, no download), then [bold]coremill config schema[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(config_app, name="config")
data_app = typer.Typer(
    cls=Commands, help="Look at the data of a run, before and without training.", no_args_is_help=True
)
app.add_typer(data_app, name="data")
app.add_typer(k8s_app, name="k8s")

StartFrom = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="STEP|best",
        help="go on from this kept checkpoint instead of the newest; later ones are set aside, not deleted",
        show_default=False,
    ),
]


@app.command()
def train(
    config: ConfigPath = None,
    model: ModelName = None,
    data: DataSource = None,
    settings: Settings = None,
    nproc: Annotated[int | None, typer.Option(help="ranks on this machine; short for parallel.ranks_per_node")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="plan, check and tokenise, but start no rank")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="start anew where the run folder holds an earlier run")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="start even if the plan says it does not fit")] = False,
    start_from: StartFrom = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="train on these hosts, one a line (node1 slots=2)", show_default=False)
    ] = None,
    ppn: Annotated[
        int | None, typer.Option(help="with --hostfile: ranks per host; left out: by the run file, else its slots")
    ] = None,
    via: Annotated[
        Literal["torchrun", "mpirun"] | None,
        typer.Option(help="with --hostfile: who starts the ranks; left out: coremill, which restarts what is lost"),
    ] = None,
    interface: Annotated[str | None, typer.Option(help="with --hostfile: network device; left out: found")] = None,
    ssh: Annotated[str, typer.Option(help="with --hostfile: ssh program with its options")] = "ssh",
    mpirun: Annotated[str | None, typer.Option(help="with --via mpirun: the program; left out: found")] = None,
    page: Annotated[
        bool,
        typer.Option("--page", help="a live page of the run for a browser on this machine; its address is printed"),
    ] = False,
    port: Annotated[int | None, typer.Option(help="with --page: its port; left out: a free one")] = None,
) -> None:
    """Train a model: plan, tokenise, start ranks, watch them, export, report.

    A first try needs no run file: coremill train --model gpt2 --data 'notes/*.txt' takes one epoch, unless --set
    train.steps=N or train.epochs=N says otherwise. Beside a run file --model and --data go over it, as --set does.

    Under torchrun, mpirun or in a Kubeflow pod the same command acts as one rank (or starts one node's ranks).
    A run that was stopped or killed goes on from its newest whole checkpoint with the same command; ranks that die or
    hang are started again from there by themselves (section supervise of the run file).
    Exit codes: 0 done, 69 a peer was lost, 70 numbers not to be trusted, 74 storage, 75 stopped on request and saved,
    78 bad config or input, 130 ended at once by a second Ctrl-C.
    """
    if hostfile is not None:
        from coremill.config.first_try import Named
        from coremill.hardware.probe import environment_snapshot
        from coremill.launch.request import Request
        from coremill.run.on_hosts import train_on_hosts
        from coremill.run.opening import Options

        ranks = nproc if ppn is None else ppn
        request = Request(script="coremill", is_module=True, hostfile=hostfile, ppn=ranks, via=via)
        request = replace(request, interface=interface, ssh=ssh, mpirun=mpirun)
        options = Options(dry_run=dry_run, fresh=fresh, force=force, start_from=start_from, page=page, port=port)
        named, environ = Named(model, data), environment_snapshot()
        raise typer.Exit(train_on_hosts(config, settings or [], named, options, request, environ))
    from coremill.world.stop import REQUESTS

    REQUESTS.listen()  # before anything slow is imported
    from coremill import api

    try:
        result = api.train(
            config,
            settings or [],
            model=model,
            data=data,
            nproc=nproc,
            dry_run=dry_run,
            fresh=fresh,
            force=force,
            start_from=start_from,
            page=page,
            port=port,
            console=Console(),
        )
    except api.TrainingInterrupted as interrupted:  # saved, and said
        result = interrupted.result
    raise typer.Exit(result.exit_code)


@app.command()
def plan(
    config: ConfigPath = None,
    model: ModelName = None,
    data: DataSource = None,
    settings: Settings = None,
    fleet: Annotated[
        list[str] | None,
        typer.Option(
            help="4xc7i.8xlarge, a hostfile, or left out: this machine; repeat to compare", show_default=False
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="rank the fleets by cost and by time")] = False,
    learn: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="feed the measured rates of a finished run back into later plans", show_default=False
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="at the spot price of now (boto3 and credentials), not the table's")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell beforehand whether a run fits, how fast it will be, what it will cost, and why. Reads no weights.

    With a section kubernetes it plans for a pod, which gets less than its instance has: same ranks, threads and bytes
    as coremill k8s render writes.
    """
    from coremill import api
    from coremill.run.plan_command import learn_from, plan_on_fleets, plan_once

    if learn is not None:
        learn_from(learn, as_json=as_json, console=Console())
        return
    loaded = api.load_config(config, settings or [], model=model, data=data)
    if compare or len(fleet or []) > 1:
        plan_on_fleets(loaded, fleet or [], as_json=as_json, console=Console(), live=live)
    else:
        plan_once(loaded, fleet[0] if fleet else None, as_json=as_json, console=Console(), live=live)


@app.command()
def doctor(
    as_json: AsJson = False,
    self_test: Annotated[bool, typer.Option(help="run the two-rank collective and training step")] = True,
) -> None:
    """Show what this machine can do and what coremill would choose, then prove it with a real two-rank self-test."""
    from coremill.doctor import examine

    raise typer.Exit(examine(as_json=as_json, run_self_test=self_test, console=Console()))


app.command(context_settings={"allow_interspersed_args": False})(launch)


@app.command()
def stop(run: Annotated[Path, typer.Argument(help="run folder", show_default=False)]) -> None:
    """Ask a run to save and end; the next train goes on from there."""
    from coremill.run.opening import stop_run

    stop_run(run, Console())


@app.command()
def instances(
    family: Annotated[str | None, typer.Option(help="e.g. c7i")] = None,
    efa: Annotated[bool, typer.Option("--efa", help="only types with an Elastic Fabric Adapter")] = False,
    live: Annotated[
        bool, typer.Option("--live", help="ask AWS (boto3 and credentials) instead of the shipped table")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The AWS instance types coremill plans with: cores, memory, network, EFA, price. Answers offline."""
    from coremill.run.plan_command import show_instances

    show_instances(family=family, efa=efa, live=live, as_json=as_json, console=Console())


@app.command()
def report(
    run: Annotated[list[Path], typer.Argument(help="run folder; several are compared", show_default=False)],
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="write the page to this file", show_default=False)] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="a page that follows the run, for a browser on this machine, until Ctrl-C")
    ] = False,
    port: Annotated[int | None, typer.Option(help="with --serve: its port; left out: a free one")] = None,
) -> None:
    """The numbers of a run, finished or still going: plan beside measured, where the time went.

    Of several runs: figures side by side, what differs in their configs, which plan was right; with --html their
    curves in one chart.
    """
    from coremill.report.show import serve_report, show_report

    if serve or port is not None:
        serve_report(run, serve=serve, port=port, as_json=as_json, html=html, console=Console())
    else:
        show_report(run, as_json=as_json, html=html, console=Console())


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="run folder", show_default=False)],
    destination: Annotated[
        Path, typer.Argument(metavar="DEST", help="folder to make; refused where it holds anything", show_default=False)
    ],
    step: Annotated[
        str | None,
        typer.Option(
            metavar="N|best",
            help="which kept checkpoint; left out: the best where evaluation.keep_best keeps it, else the newest",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16"] | None, typer.Option(help="of the weights; left out: the run's", show_default=False)
    ] = None,
    merged: Annotated[
        bool,
        typer.Option(
            "--merged", help="of a run with adapters: the whole model with them added in; left out: as lora.merge says"
        ),
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="of a run with adapters: the adapter folder that peft loads")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="upload the folder to the Hugging Face hub too, with a model card; log in first: hf auth login",
            show_default=False,
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="with --push: only you see it")] = False,
) -> None:
    """Write a kept step of a run, finished, stopped or still going, as a plain Hugging Face folder.

    Of a run with adapters (lora) that is the adapter alone, which is small and loaded beside its model, or with
    --merged the whole model, in the dtype of the model's own files unless --dtype says otherwise.

    Every byte of the checkpoint is checked first; DEST is there only once it is whole. Its README.md is a model card
    with the numbers of the report.
    """
    from coremill.run.export_command import Wanted, export_run

    export_run(run, destination, Wanted(step, dtype, push, private, merged, adapter), Console())


@data_app.command("show")
def data_show(
    config: ConfigPath = None,
    model: ModelName = None,
    data: DataSource = None,
    settings: Settings = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", help="how many rows to show")] = 3,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="rows that are evaluated on, instead of those trained on")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rows as the model will see them: special tokens, where documents end, and in colour what is learned.

    Tokenises where that was not done before, and keeps it: the run that follows starts with it. Through a pipe the
    text is plain, and what is learned stands between marks.
    """
    from coremill import api
    from coremill.run.data_command import show_data

    loaded = api.load_config(config, settings or [], model=model, data=data)
    show_data(loaded, rows=rows, evaluation=evaluation, as_json=as_json, console=Console())


def _version(value: bool) -> None:
    """What a bug report needs: ours, then what numbers depend on. Versions are looked up, nothing is imported."""
    if value:
        from importlib.metadata import PackageNotFoundError, version

        from coremill.hardware.topology import read_cpu_model

        print(f"coremill {__version__}")
        for name in ("torch", "transformers"):
            try:
                print(f"{name} {version(name)}")
            except PackageNotFoundError:
                print(f"{name} not installed")
        print(f"CPU {read_cpu_model()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print versions and the CPU, and exit")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: one clear message and the right exit code for everything that can be foreseen."""
    from coremill.hardware.probe import environment_snapshot
    from coremill.redaction import guard_output
    from coremill.world.stop import REQUESTS

    guard_output(environment_snapshot())
    try:
        app()
    except KnownEnding as error:
        REQUESTS.leave()
        if not getattr(error, "silent", False):
            print(f"coremill: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        REQUESTS.leave()
        print("coremill: interrupted", file=sys.stderr)
        sys.exit(130)
