"""`coremill train --hostfile`: a launcher of our own on every host, after a plan and a look at the hosts.

With `--via` torchrun or mpirun starts the ranks instead, and restarts are theirs to make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from coremill.config.durations import seconds_of
from coremill.config.first_try import Named
from coremill.config.load import load_config
from coremill.config.schema import AUTO
from coremill.hardware.probe import probe_node
from coremill.hosts.host_restarts import HostRestarts, check_policy
from coremill.launch.request import Request, check_request, hosts_of, via_of
from coremill.launch.script import launch_script, say
from coremill.plan.planner import make_plan
from coremill.run.attempts import grace_of
from coremill.run.cards import card_without_weights
from coremill.run.machines import fleet_of_hosts
from coremill.run.opening import Options
from coremill.run.prepare import refuse_what_does_not_fit
from coremill.run.story import run_as_launcher


def train_on_hosts(
    config: Path | None,
    settings: Sequence[str],
    named: Named,
    options: Options,
    request: Request,
    environ: Mapping[str, str],
) -> int:
    """Bad config, too little memory and hosts that are not ready are told here, before any rank starts."""
    check_request(request)
    asked = load_config(config, settings, model=named.model, data=named.data).config.parallel.ranks_per_node
    if request.ppn is None and asked != AUTO:  # as a plan has it: the run file goes before slots
        request = replace(request, ppn=asked, ppn_setting="parallel.ranks_per_node:")
    assert request.hostfile is not None
    hosts = hosts_of(request, probe_node(busy_seconds=0))
    settings = [*settings, f"parallel.ranks_per_node={hosts[0].ranks}"]
    loaded = load_config(config, settings, model=named.model, data=named.data).with_answers()
    if via_of(request, hosts) == "local":
        return run_as_launcher(loaded, options, None, Console())
    run_config = loaded.located
    fleet = fleet_of_hosts(request.hostfile, say, busy_seconds=0)
    plan = make_plan(run_config, fleet, card_without_weights(run_config))
    refuse_what_does_not_fit(plan, force=options.force)
    wanted = run_config.supervise
    policy = HostRestarts(
        restart=wanted.restart,
        wait_seconds=seconds_of(wanted.wait_for_hosts),
        min_nodes=run_config.fleet.min_nodes,
    )
    check_policy(policy, len(hosts))
    flags = [f"--{name}" for name in ("dry-run", "fresh", "force", "page") if getattr(options, name.replace("-", "_"))]
    flags += [f"--port={options.port}"] if options.port is not None else []
    start_from = [] if options.start_from is None else [f"--from={options.start_from}"]
    return launch_script(
        replace(
            request,
            arguments=(
                "train",
                *([str(config)] if config is not None else []),
                *(word for option, _, value in named.options() for word in (option, value)),
                *(word for setting in settings for word in ("--set", setting)),
                *flags,
                *start_from,
            ),
            same_files=(str(config),) if config is not None else (),
            memory_bytes_per_rank=None if options.force else plan.memory.peak.total,
            nodes=policy,
            only_first=("--fresh", *start_from),
            stop_seconds=grace_of(run_config, plan),  # ranks save before they leave
            ends_itself=run_config.checkpoint.grace == AUTO,
        ),
        environ,
    )
