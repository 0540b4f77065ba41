"""What exchanging costs, told on a machine whose speed wavers: `python -m benchmarks.in_turns [--seconds N]`.

Two hosts as in the scale model, at 1 Gbit/s. coremill on single hosts, `shard` and `replicate` take turns of a few
seconds there (`benchmarks/turns.py`), and ratios say what an exchange costs. One part is nobody's exchange: hosts that
step together go at the pace of the slower one just then. How much that is can be seen on the single hosts: in each
turn, the slower one's progress over that of both. Neighbours on the same machine have a part in that, in bursts: turns
in which they took little of either processor are told once more by themselves.
Needs root, iproute2 and openssh-server (`make hosts-setup`). Prints figures and targets; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from tests.hosts.namespaces import Fleet, fake_hosts

from benchmarks import peers, results, scale_model, turns
from benchmarks.workload import SEQUENCE_LENGTH

CONTENDERS = ("single", "bf16", "replicate")
HOSTS = 2
CALM = 0.02  # of a processor, that neighbours on the same machine may take in a turn


def main(argv: list[str] | None = None) -> int:
    """Take turns for so long; 1 where a contender ended early, else 0, whatever the figures are."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.in_turns", description=(__doc__ or "").split("\n\n")[0].replace("%", "%%")
    )
    parser.add_argument("--seconds", type=float, default=300, help="of turns, after all have started (default 300)")
    parser.add_argument("--turn", type=float, default=3.0, help="seconds of a turn (default 3)")
    parser.add_argument("--cores", type=int, default=1, help="of a host (default 1)")
    parser.add_argument("--gigabits", type=float, default=1.0, help="a second of a host's link (default 1)")
    parser.add_argument("--tokens", type=int, default=scale_model.TOKENS_PER_STEP, help="a step, of both hosts")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="who takes turns (default all)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all: lora.rank=16")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--folder", type=Path, default=peers.ROOT / "runs" / "peers", help="workload, caches, logs")
    arguments = parser.parse_args(argv)
    keys = arguments.only.split(",")
    if not set(keys) <= set(CONTENDERS):
        parser.error(f"--only takes some of {', '.join(CONTENDERS)}")
    if arguments.tokens < HOSTS * SEQUENCE_LENGTH or arguments.tokens % (HOSTS * SEQUENCE_LENGTH):
        parser.error(f"--tokens takes multiples of {HOSTS * SEQUENCE_LENGTH}: whole rows for each host")
    ours = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    if not 1 <= arguments.cores <= len(ours) // HOSTS:
        parser.error(f"--cores: there are {len(ours)} for {HOSTS} hosts")
    hosts = [",".join(ours[host * arguments.cores :][: arguments.cores]) for host in range(HOSTS)]
    cache = arguments.folder.resolve()
    folder = scale_model.begin(cache, "in-turns")
    work = peers.prepare_workload(cache, folder / "workload.log", "13M")
    go = scale_model.Go(
        folder=folder,
        cache=cache,
        work=work,
        packed=scale_model.pack(folder, cache, work),
        tokens_per_step=arguments.tokens,
        timed_steps=turns.ENDLESS_STEPS,
        timeout_seconds=0,
        settings=tuple(arguments.set),
    )
    contenders: dict[str, turns.Contender] = {}
    with tempfile.TemporaryDirectory(prefix="coremill-hosts-") as hosts_folder:
        rate = 1e9 * arguments.gigabits
        with fake_hosts(HOSTS, Path(hosts_folder), link_bits_per_second=rate, cpus=hosts) as fleet:
            try:
                for key in keys:
                    contenders[key] = _start(go, fleet, key)
                turns.take_turns(list(contenders.values()), arguments.seconds, arguments.turn)
            finally:
                for contender in contenders.values():
                    turns.end(contender)
    return _tell(contenders, arguments, go.tokens_per_step)


def _start(go: scale_model.Go, fleet: Fleet, key: str) -> turns.Contender:
    out = go.folder / key
    out.mkdir()
    seed = peers.SEED
    if key == "single":
        commands = [scale_model.single_host(go, host, out / host.name, seed, len(fleet.hosts)) for host in fleet.hosts]
    else:
        commands = [scale_model.coremill_hosts(go, fleet, out, seed, scale_model.COREMILL[key])]
    program = scale_model.together(commands, out)
    return turns.start(scale_model.NAMES[key], program, out, ranks=HOSTS, cache=go.cache)


def _tell(contenders: dict[str, turns.Contender], arguments: argparse.Namespace, tokens_per_step: int) -> int:
    rates = {key: contender.tokens_per_second_by_turn(tokens_per_step) for key, contender in contenders.items()}
    print(f"\nturns of {arguments.turn:g} s; by step and rank, seconds of the compute thread:\n")
    by_name = {contenders[key].name: each for key, each in rates.items()}
    print(turns.table(list(contenders.values()), by_name, tokens_per_step))
    stolen = {key: contender.stolen_by_turn() for key, contender in contenders.items()}
    slower: list[float] = []
    if "single" in contenders:
        slower = [min(done) / statistics.fmean(done) for _, done in contenders["single"].steps_by_turn()]
    found_ratios, paces = [], []
    for key in (key for key in rates if key != "single" and slower):
        name = f"tokens/s at {arguments.gigabits:g} Gbit/s, {key} on 2 hosts / single hosts"
        every = range(min(len(rates[key]), len(slower)))
        calm = [turn for turn in every if max(stolen[key][turn], stolen["single"][turn]) <= CALM]
        for which, chosen in (("", every), (f", calm turns ({len(calm)} of {len(every)})", calm)):
            mine, alone = ([rates[who][turn] for turn in chosen] for who in (key, "single"))
            found_ratios.append(turns.ratio(name + which, mine, alone, ">= 0.95"))
            if chosen:
                pace = statistics.fmean(slower[turn] for turn in chosen)
                paces.append(f"single hosts{which}: in a turn the slower one did {pace:.3f} of the average of both")
    print("\n" + results.ratio_table(found_ratios) + "\n\n" + "\n".join(dict.fromkeys(paces)))
    if arguments.json:
        document = {"tokens_per_second_by_turn": rates, "slower_of_two_by_turn": slower, "stolen_by_turn": stolen}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(rates.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
