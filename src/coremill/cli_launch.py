"""The command `coremill launch`, which has more options than all others together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

AccelerateFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="take ranks, hosts, mixed precision and compilation from a file of accelerate config",
        show_default=False,
    ),
]
Via = Annotated[
    Literal["local", "torchrun", "mpirun"] | None,
    typer.Option(help="who starts the ranks; left out: coremill on this machine, torchrun over ssh on others"),
]


def launch(
    script: Annotated[str, typer.Argument(help="Python file, or a module's name after -m", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]", help="for the script", show_default=False)
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m")] = False,
    nproc: Annotated[int | None, typer.Option(help="ranks on this machine; left out: one per NUMA node")] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="hosts, one a line: node1, node1:2 or node1 slots=2", show_default=False)
    ] = None,
    ppn: Annotated[int | None, typer.Option(help="ranks per host of the hostfile; left out: its slots")] = None,
    via: Via = None,
    nnodes: Annotated[int | None, typer.Option(help="nodes, where you start this command on each by hand")] = None,
    node_rank: Annotated[int | None, typer.Option(help="with --nnodes: which of them this is, from 0")] = None,
    master: Annotated[
        str | None, typer.Option(metavar="ADDR[:PORT]", help="where rank 0 is found", show_default=False)
    ] = None,
    accelerate: AccelerateFile = None,
    interface: Annotated[str | None, typer.Option(help="network device for gloo; left out: found")] = None,
    threads: Annotated[int | None, typer.Option(help="per rank; left out: its physical cores")] = None,
    allocator: Annotated[
        Literal["auto", "tcmalloc", "jemalloc", "none"], typer.Option(help="memory allocator to preload")
    ] = "auto",
    bind_threads: Annotated[
        bool, typer.Option("--bind-threads", help="bind thread by thread too, not only each rank to its cores")
    ] = False,
    prefix: Annotated[bool, typer.Option("--prefix", help="put the rank in front of each line it prints")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="one log file per rank in here", show_default=False)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print commands and environment per host, start nothing")
    ] = False,
    check: Annotated[
        bool | None, typer.Option("--check/--no-check", help="ask all hosts first", show_default="unless --dry-run")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="do not say what is set and why")] = False,
    ssh: Annotated[str, typer.Option(help="ssh program with its options")] = "ssh",
    python: Annotated[
        str, typer.Option(help="Python interpreter on all hosts", show_default="this one")
    ] = sys.executable,
    mpirun: Annotated[str | None, typer.Option(help="mpirun program; left out: the first found")] = None,
) -> None:
    """Start any Python script on this machine or many, each rank with its cores, threads and environment.

    Works for HF Trainer, accelerate and plain torch.distributed scripts. What you have set in the environment stays.
    """
    from coremill.hardware.probe import environment_snapshot
    from coremill.launch.request import Request
    from coremill.launch.script import launch_script

    request = Request(
        script=script,
        arguments=tuple(arguments or ()),
        is_module=is_module,
        nproc=nproc,
        hostfile=hostfile,
        ppn=ppn,
        via=via,
        nnodes=nnodes,
        node_rank=node_rank,
        master=master,
        accelerate=accelerate,
        interface=interface,
        threads=threads,
        allocator=allocator,
        bind_threads=bind_threads,
        prefix=prefix,
        log_folder=log_dir,
        dry_run=dry_run,
        check=check,
        quiet=quiet,
        ssh=ssh,
        python=python,
        mpirun=mpirun,
    )
    raise typer.Exit(launch_script(request, environment_snapshot()))
