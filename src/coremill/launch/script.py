"""`coremill launch`: any Python script on this machine or many, each rank with its cores, threads and environment.

one machine        --nproc N                                coremill's own launcher (supervise/ranks.py)
many, one command  --hostfile F --ppn K                     torchrun over ssh, or mpirun; ranks through rank_shim
many, by hand      --nnodes N --node-rank I --master A:P    coremill's own launcher on each
inside a rank      under torchrun or mpirun                 becomes that rank; the mask stays as it is
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from coremill.errors import InputError
from coremill.hardware.facts import NodeFacts
from coremill.hardware.probe import affinity_mask, probe_node
from coremill.hosts.across_hosts import HostCommand, run_on_hosts
from coremill.hosts.forwarding import forwarded
from coremill.hosts.host_report import free_port
from coremill.hosts.host_restarts import run_nodes
from coremill.hosts.mpirun import find_mpirun, hostfile_text, mpirun_command, mpirun_environment
from coremill.hosts.preflight import HostAnswer, Questions, check_hosts
from coremill.hosts.ssh import Host, Remote, ssh_program
from coremill.hosts.torchrun import torchrun_command
from coremill.launch.accelerate import with_accelerate_file
from coremill.launch.dry_run import show_hosts, show_local
from coremill.launch.node_command import node_commands
from coremill.launch.rank_shim import SHIM, ShimOrder, is_bound_by_parent, run_rank, start_of_rank
from coremill.launch.request import (
    Request,
    check_request,
    hosts_of,
    master_address,
    node_by_hand,
    ports_to_try,
    via_of,
)
from coremill.launch.script_notes import notes_on_script, text_of_script, uses_deepspeed
from coremill.launch.settings import (
    asked_threads,
    choose_interface,
    find_openmp,
    find_torch_folder,
    notes_on,
    script_settings,
    setting_lines,
    threads_warning,
)
from coremill.plan.layout import Layout, lay_out
from coremill.supervise.output import LogFollower, last_words
from coremill.supervise.rank_environment import Setting
from coremill.supervise.ranks import run_local_ranks
from coremill.world.identity import RankIdentity, identify


def launch_script(request: Request, environ: Mapping[str, str]) -> int:
    """Start the script as asked and wait for it; returns the exit code."""
    identity = identify(environ)
    if request.accelerate is not None:
        taken = with_accelerate_file(request, request.accelerate, environ, is_rank=identity is not None)
        request, environ = taken.request, taken.environ
        if not request.quiet and (identity is None or identity.rank == 0):
            for note in taken.notes:
                say(note)
    check_request(request)
    if identity is not None:
        return _become_rank(request, identity, environ)
    node = probe_node(busy_seconds=0)
    _check_interface(request, node)
    hosts = hosts_of(request, node)
    via = via_of(request, hosts)
    if not request.quiet:
        for note in _notes(request, node, environ):
            say(note)
    if request.by_hand or via == "local":
        return _run_here(request, node, hosts[0], environ)
    return _run_across(request, node, hosts, environ)


def _notes(request: Request, node: NodeFacts, environ: Mapping[str, str]) -> list[str]:
    """What of the environment, the arguments and the script means nothing here, or will not work."""
    text = "" if request.is_module else text_of_script(request.script)
    openmp = find_openmp(node, find_torch_folder(), environ)
    notes = notes_on(environ, request.arguments, openmp, script_text=text)
    in_bf16 = "--bf16" in request.arguments or environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    if in_bf16 and request.hostfile is None and not node.has_bf16_units:
        notes.append("bf16: this CPU has no units for it, and products in it are many times slower than in fp32")
    said = {note.partition(":")[0] for note in notes}
    of_script = notes_on_script(request.script, request.arguments, text)
    return [*notes, *(note for note in of_script if note.partition(":")[0] not in said)]


def say(text: str) -> None:
    """One finding, one line, off the script's own output."""
    print(f"coremill: {text}", file=sys.stderr, flush=True)


# --- on this machine


def _run_here(request: Request, node: NodeFacts, host: Host, environ: Mapping[str, str]) -> int:
    """coremill's own launcher: all ranks of this machine, which may be one node of several started by hand."""
    base = node_by_hand(request) if request.by_hand else None
    ranks = request.nproc if request.hostfile is None else host.ranks
    if request.threads is not None:
        environ = {name: value for name, value in environ.items() if name != "OMP_NUM_THREADS"}
    layout, warning = _layout_of(request, node, ranks, environ)
    master, nodes = (None, 1) if base is None else (base.master_address, base.nodes)
    settings = _settings_here(request, node, layout, environ, master=master, hosts=nodes)
    if request.dry_run:
        show_local(request, layout, base, settings, warning)
        return 0
    if base is not None and base.node_rank == 0:
        problem = free_port([base.master_port])["port_problem"]
        if problem is not None:
            raise InputError(f"port {base.master_port} cannot be used for the rendezvous: {problem}; choose another")
    if not request.quiet:
        print("\n".join(setting_lines(settings)), file=sys.stderr, flush=True)
        if warning is not None:
            say(warning)
    first = 0 if base is None else base.node_rank * layout.ranks_per_node.value
    with _log_folder(request) as folder:
        follower = LogFollower(
            folder, range(first, first + layout.ranks_per_node.value), _write_out, prefix=request.prefix
        )
        outcome = run_local_ranks(
            argv=request.program,
            plan=layout,
            environ=environ,
            log_folder=folder,
            on_tick=follower.poll,
            identity_base=base,
            stop_grace_seconds=request.stop_seconds,
            settings=settings,
            serves_store=False,
        )
        follower.poll(is_end=True)
        words = last_words(outcome.log_tail)
    _explain(outcome.message, words, outcome.log_file if request.log_folder is not None else None)
    return outcome.exit_code


def _settings_here(
    request: Request,
    node: NodeFacts,
    layout: Layout,
    environ: Mapping[str, str],
    *,
    master: str | None,
    hosts: int,
) -> tuple[Setting, ...]:
    return script_settings(
        node,
        layout,
        environ,
        openmp=find_openmp(node, find_torch_folder(), environ),
        interface=choose_interface(request.interface, master, hosts),
        allocator=request.allocator,
        bind_threads=request.bind_threads,
        deepspeed=_uses_deepspeed(request),
    )


def _uses_deepspeed(request: Request) -> bool:
    return uses_deepspeed(request.arguments, "" if request.is_module else text_of_script(request.script))


def _check_interface(request: Request, node: NodeFacts) -> None:
    if request.interface is None or request.hostfile is not None:
        return  # on several hosts each is asked
    names = [face.name for face in node.interfaces]
    if request.interface not in names:
        raise InputError(
            f"there is no interface {request.interface} that is up here; there are {', '.join(names)} (--interface)"
        )


def _layout_of(
    request: Request, node: NodeFacts, ranks: int | None, environ: Mapping[str, str]
) -> tuple[Layout, str | None]:
    """Ranks and cores of this host, and what is to be said of the user's threads here."""
    threads = asked_threads(request.threads, environ)
    layout = lay_out(node, ranks=ranks, threads=threads, any_threads=True)
    count = layout.ranks_per_node.value
    own = lay_out(node, ranks=count, threads=None).threads_per_rank.value
    return layout, threads_warning(node, count, threads, own)


@contextlib.contextmanager
def _log_folder(request: Request) -> Iterator[Path]:
    if request.log_folder is not None:
        try:
            request.log_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the log folder {request.log_folder} cannot be made", where="--log-dir", why=error.strerror or ""
            ) from error
        yield request.log_folder
        return
    with tempfile.TemporaryDirectory(prefix="coremill-launch-") as folder:
        yield Path(folder)


def _write_out(content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(content)
        sys.stdout.flush()


def _explain(message: str, words: str, log_file: Path | None = None) -> None:
    """The first failing rank's error, below everything that was printed: where people look first."""
    if not message:
        return
    say(message + (f"; its log is {log_file}" if log_file else ""))
    if words:
        print("\n".join(f"  {line}" for line in words.splitlines()[-40:]), file=sys.stderr, flush=True)


# --- inside a rank of somebody else's launcher


def _become_rank(request: Request, identity: RankIdentity, environ: Mapping[str, str]) -> int:
    inherited = affinity_mask()
    order = replace(_shim_order(request), user_threads=_threads_are_the_users(environ))
    start = start_of_rank(
        identity, environ, order, inherited=inherited, is_bound=is_bound_by_parent(inherited), may_pin=False
    )
    if not request.quiet and identity.local_rank == 0:
        print("\n".join(start.lines()), file=sys.stderr, flush=True)
    if request.dry_run:
        return 0
    return run_rank(request.program, start, identity.rank, order)


def _threads_are_the_users(environ: Mapping[str, str]) -> bool:
    """torchrun writes 1 by itself where there are several ranks and nothing is set; that is no wish of the user."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ and environ.get("LOCAL_WORLD_SIZE") != "1"
    return "OMP_NUM_THREADS" in environ and not (by_torchrun and environ["OMP_NUM_THREADS"] == "1")


# --- on many machines


def _run_across(request: Request, node: NodeFacts, hosts: tuple[Host, ...], environ: Mapping[str, str]) -> int:
    """torchrun or mpirun, after a look at every host."""
    elsewhere = any(not host.is_here for host in hosts)
    ssh = ssh_program(request.ssh) if elsewhere and not request.dry_run else tuple(shlex.split(request.ssh))
    remote = Remote(ssh=ssh, python=request.python, environ=environ)
    address, ports = master_address(request, hosts), ports_to_try(request)
    check = request.check if request.check is not None else not request.dry_run
    answers: list[HostAnswer] = []
    if check:
        questions = Questions(
            folder=Path.cwd(),
            files=request.files,
            master=hosts[0],
            ports=ports,
            interface=request.interface,
            memory_bytes_per_rank=request.memory_bytes_per_rank,
        )
        answers = check_hosts(hosts, remote, questions)
        port = next((answer.report["port"] for answer in answers if answer.report and answer.report["port"]), ports[0])
    else:
        port = ports[0]
    with tempfile.TemporaryDirectory(prefix="coremill-launch-") as scratch:
        commands = _commands(request, hosts, address, port, ssh, environ, Path(scratch))
        if request.dry_run:
            if request.threads is not None:
                environ = {name: value for name, value in environ.items() if name != "OMP_NUM_THREADS"}
            likely = min(hosts[0].ranks, 64 * node.usable_cores)  # hosts may be larger than this one
            layout, _ = _layout_of(request, node, likely, environ)
            master = address if len(hosts) > 1 else None
            here = _settings_here(request, node, layout, environ, master=master, hosts=len(hosts))
            show_hosts(commands, remote, answers, here, environ)
            return 0
        if request.nodes is not None and via_of(request, hosts) == "torchrun" and request.via is None:
            outcome = run_nodes(
                hosts,
                lambda left, is_first: node_commands(request, left, port, environ, is_first=is_first),
                remote,
                request.nodes,
                say,
            )
        else:
            outcome = run_on_hosts(commands, remote)
    _explain(outcome.message, outcome.last_words)
    return outcome.exit_code


def _commands(
    request: Request,
    hosts: tuple[Host, ...],
    address: str,
    port: int,
    ssh: tuple[str, ...],
    environ: Mapping[str, str],
    scratch: Path,
) -> list[HostCommand]:
    """What runs where: a launcher of ours or one torchrun per host, or one mpirun here."""
    if request.nodes is not None and request.via is None:
        return node_commands(request, hosts, port, environ, is_first=True)
    order = replace(_shim_order(request), user_threads="OMP_NUM_THREADS" in environ, announce=not request.quiet)
    told = {**forwarded(environ), SHIM: order.to_json()}
    folder = Path.cwd()
    if "OMP_NUM_THREADS" not in environ:
        told["OMP_NUM_THREADS"] = "1"  # else torchrun warns and writes the same; each rank's shim counts on its host
    shim = [request.python, "-m", "coremill.launch.rank_shim", *request.program]
    if via_of(request, hosts) == "torchrun":
        return [
            HostCommand(
                host=host,
                argv=tuple(torchrun_command(hosts, index, request.python, address, port, request.program)),
                folder=folder,
                environ=told,
                grace_seconds=request.stop_seconds,
            )
            for index, host in enumerate(hosts)
        ]
    mpirun = find_mpirun(request.mpirun)
    told |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    hostfile = None
    if len(hosts) > 1 or not hosts[0].is_here:
        hostfile = scratch / "hosts"
        hostfile.write_text(hostfile_text(hosts, mpirun.family))
    argv = mpirun_command(mpirun, hosts, hostfile, folder, sorted(told), ssh, request.interface, shim)
    here = Host(name="localhost", ranks=sum(host.ranks for host in hosts), is_here=True)
    told |= mpirun_environment(mpirun, hosts, ssh, environ)
    return [HostCommand(host=here, argv=tuple(argv), folder=folder, environ=told, grace_seconds=request.stop_seconds)]


def _shim_order(request: Request) -> ShimOrder:
    return ShimOrder(
        threads=request.threads,
        allocator=request.allocator,
        bind_threads=request.bind_threads,
        interface=request.interface,
        prefix=request.prefix,
        log_folder=None if request.log_folder is None else os.path.abspath(request.log_folder),
        deepspeed=_uses_deepspeed(request),
    )
