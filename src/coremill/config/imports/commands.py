"""`coremill config import -- COMMAND ...`: the coremill command that does the same, and the run file for `train`.

How many ranks on which hosts is brought together from all launchers of the command; the arguments of an example script
whose task coremill has become a run file.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coremill.config.document import read_document
from coremill.config.foreign import find_foreign
from coremill.config.imports.accelerate_file import AccelerateFile, read_accelerate_file
from coremill.config.imports.fates import Brought, Fate, by_name, fate_of, settings_in
from coremill.config.imports.files import named_file, settings_of_deepspeed
from coremill.config.imports.launchers import Option, Start
from coremill.config.imports.run_file import Composed, compose
from coremill.config.other_tools import Script, flags, launcher_word, lists, scripts, variable
from coremill.config.translate import LENGTH
from coremill.config.translate_starts import LEFT_OUT_RANKS
from coremill.config.unknown_keys import plain_name

_HOSTFILE = "hosts.txt"
_COUNTED = "ranks are counted per machine, and hosts are named in a file"
# A number of threads is right for one machine; of 24 cores tutorials leave one to oneCCL's worker, which gloo has not.
_THREADS = "; train takes the cores of each machine by itself (parallel.threads_per_rank: auto)"
_PLACES = ("total", "per_node", "nodes", "hostfile", "hosts", "node_rank", "master", "port", "threads")
_MANY_BY_DEFAULT = ("mpirun", "deepspeed", "ipexrun")  # the others start one rank unless they are told


@dataclass(frozen=True)
class Places:
    """How many ranks run where, as far as the command says."""

    ranks_per_node: int | None = None
    nodes: int | None = None
    hostfile: str | None = None
    hosts: tuple[str, ...] = ()
    node_rank: str | None = None
    master: str | None = None
    threads: int | None = None
    total: int | None = None  # ranks of all machines, where a command says that alone

    @property
    def on_hosts(self) -> bool:
        return self.hostfile is not None or bool(self.hosts)

    def launch_words(self) -> list[str]:
        words: list[str] = []
        if self.on_hosts:
            words += ["--hostfile", self.hostfile or _HOSTFILE]
            words += ["--ppn", str(self.ranks_per_node)] if self.ranks_per_node else []
        else:
            if self.nodes is not None and self.nodes > 1:
                words += ["--nnodes", str(self.nodes), "--node-rank", self.node_rank or "0"]
                words += ["--master", self.master or "ADDRESS"]
            words += ["--nproc", str(self.ranks_per_node)] if self.ranks_per_node else []
        return words + (["--threads", str(self.threads)] if self.threads else [])

    def train_words(self) -> list[str]:
        """`train` takes ranks and threads from the run file; hosts are named at its start."""
        if self.on_hosts:
            ppn = ["--ppn", str(self.ranks_per_node)] if self.ranks_per_node else []
            return ["--hostfile", self.hostfile or _HOSTFILE, *ppn]
        return ["--hostfile", "HOSTFILE"] if self.nodes is not None and self.nodes > 1 else []


@dataclass(frozen=True)
class ImportedCommand:
    """What a command is in coremill."""

    launch: tuple[str, ...]  # words of the command line
    train: tuple[str, ...]
    composed: Composed
    script: Script | None
    notes: tuple[str, ...] = ()


@dataclass
class _Work:
    """What is gathered on the way."""

    fates: list[Fate] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)  # of launch, besides places
    notes: list[str] = field(default_factory=list)


def import_start(start: Start, default_accelerate_file: Path | None = None) -> ImportedCommand:
    """Every option, variable and argument with its fate."""
    script = scripts().get(start.script_name)
    arguments = arguments_of(start.arguments, script)
    accelerate = _accelerate_file(start, default_accelerate_file)
    places = _places(start, accelerate)
    work = _Work()
    brought = [*arguments, *_deepspeed_file(arguments, work)]
    devices = places.ranks_per_node * (places.nodes or 1) if places.ranks_per_node else places.total
    given = by_name(brought, **({} if devices is None else {"num_processes": devices}))
    if script is not None:
        # A length has many names: the script's own counts only where none was typed.
        typed_length = any(name in given for name in LENGTH.split())
        defaults = {
            name: value for name, value in script.defaults.items() if not typed_length or name not in LENGTH.split()
        }
        given = {**defaults, **given, "task": script.task}
    _places_fates(start, places, accelerate, work)
    for name in start.variables:
        work.fates.append(_variable_fate(name, start, places, work))
    work.fates += [_argument_fate(each, given) for each in brought]
    if script is not None:
        work.fates += _defaults(script, brought, given)
    if accelerate is not None:
        work.fates += _fates_of_file(accelerate, places)
    composed = compose(work.fates, script.task if script is not None else None)
    today = start.arguments if script is None else _today(start.arguments)
    if "srun" in start.tools and places.hostfile == _HOSTFILE and not places.hosts:
        work.notes.append(f"  scontrol show hostnames > {_HOSTFILE}")
    if places.hosts and places.hostfile is None:
        work.notes.append(f"  printf '%s\\n' {shlex.join(places.hosts)} > {_HOSTFILE}")
    launch = [f"{name}={value}" for name, value in work.environment.items()]
    launch += ["coremill", "launch", *(word for pair in work.options.items() for word in pair if word)]
    if accelerate is not None:
        launch += ["--accelerate", str(accelerate.path)]
        beside = start.tools != ["accelerate"] or any(start.fact(says) is not None for says in _PLACES)
        launch += places.launch_words() if beside else []
    else:
        launch += places.launch_words()
    launch += [*(["-m"] if start.is_module else []), start.script, *today]
    train = ("coremill", "train", "run.yaml", *places.train_words())
    return ImportedCommand(tuple(launch), train, composed, script, tuple(work.notes))


def arguments_of(words: Sequence[str], script: Script | None) -> list[Brought]:
    """`--name value`, `--name=value`, `--flag`; what has no name is left alone."""
    found = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--") or word == "--":
            continue
        text, equals, value = word.partition("=")
        name = plain_name(text.lstrip("-"))
        following = words[position] if position < len(words) else None
        taken: str | None = value if equals else None
        may_follow = name not in flags() or str(following).lower() in ("true", "false", "yes", "no", "1", "0")
        if taken is None and following is not None and may_follow and not following.startswith("--"):
            taken, position = following, position + 1
        read: Any = True if taken is None else read_document(taken).value
        more = list(itertools.takewhile(lambda each: not each.startswith("-"), words[position:]))
        if taken is not None and not equals and more and name in lists():
            taken, read, position = " ".join([taken, *more]), [taken, *more], position + len(more)
        found.append(Brought(text, (name,), taken if read is None else read, "examples" if script else "script", taken))
    return found


def _places(start: Start, accelerate: AccelerateFile | None) -> Places:
    """Options before variables before accelerate's file."""
    total, per_node, nodes = (_count(start.fact(says)) for says in ("total", "per_node", "nodes"))
    mapped = start.fact("map_by")
    if per_node is None and mapped is not None and (mapped.value or "").startswith("ppr:"):
        unit = (mapped.value or "").split(":")
        per_node = int(unit[1]) if unit[2:3] in (["node"], []) and unit[1].isdecimal() else None
    hostfile = _text(start.fact("hostfile"))
    hosts, slots = _hosts(start.fact("hosts"))
    per_node = slots if per_node is None and total is None else per_node
    if accelerate is not None:
        total = total if total is not None or per_node is not None else accelerate.processes
        nodes = nodes if nodes is not None else accelerate.machines if accelerate.machines > 1 else None
        hostfile = hostfile or accelerate.hostfile
    nodes = nodes if nodes is not None else len(hosts) or None
    if nodes is None and total and per_node and total % per_node == 0 and hostfile is not None:
        nodes = total // per_node
    if per_node is None and total is not None and (hostfile is None or nodes):
        per_node = total // (nodes or 1) if total % (nodes or 1) == 0 else None
    if "srun" in start.tools:
        if per_node is None and total is None:  # one task a node, where nothing is said
            per_node = 1
        hostfile = hostfile or (_HOSTFILE if (nodes or 1) > 1 and not hosts else None)
    said = total or nodes or hostfile or hosts or start.fact("per_node") or start.fact("many")
    if per_node is None and not said and not set(start.tools) & set(_MANY_BY_DEFAULT):
        per_node = 1
    rank_of_file = None if accelerate is None or accelerate.machine_rank is None else str(accelerate.machine_rank)
    address = (
        _text(start.fact("master")) or start.variables.get("MASTER_ADDR") or (accelerate and accelerate.main_address)
    )
    port = _text(start.fact("port")) or start.variables.get("MASTER_PORT") or (accelerate and accelerate.main_port)
    master = f"{address}:{port}" if address and port and ":" not in address else address
    threads = _count(start.fact("threads")) or _whole(start.variables.get("OMP_NUM_THREADS"))
    node_rank = _text(start.fact("node_rank")) or rank_of_file
    return Places(per_node, nodes, hostfile, hosts, node_rank, master or None, threads, total)


def _places_fates(start: Start, places: Places, accelerate: AccelerateFile | None, work: _Work) -> None:
    """Options of launchers: words of `coremill launch`, keys of the run file, or why neither."""
    for option in start.options:
        word = option.word
        value = True if option.value is None else _read(option.value)
        brought = Brought(option.text, (option.name,), value, option.tool, option.value)
        says = word.says if word is not None else ""
        if word is None:
            work.fates.append(fate_of(brought, by_name([brought])))
        elif option.tool == "srun" and says in _PLACES and start.fact(says) is not option:
            work.fates.append(Fate(brought, "dropped", "the launcher behind srun says it"))
        elif says in _PLACES:
            work.fates.append(_place_fate(brought, says, places))
        elif says == "map_by" and places.ranks_per_node and (option.value or "").startswith("ppr:"):
            work.fates.append(_place_fate(brought, "per_node", places))
        elif says == "module" or (says == "config_file" and accelerate is not None):
            command = "-m" if says == "module" else f"--accelerate {accelerate.path if accelerate else ''}"
            work.fates.append(Fate(brought, "mapped", word.why, command=command))
        elif says.startswith(("log_dir", "allocator")):
            name, _, fixed = says.partition("=")
            work.options[f"--{name.replace('_', '-')}"] = fixed or option.value or ""
            work.fates.append(Fate(brought, "mapped", word.why, command=word.becomes.format(option.value)))
        elif says.startswith("environment"):
            work.fates.append(_environment_fate(brought, option, work))
        elif says == "folder":
            work.notes.append(f"  cd {shlex.quote(option.value or '.')}")
            work.fates.append(Fate(brought, "mapped", word.why, command=word.becomes.format(option.value)))
        elif says == "config_file":
            why = "there is no such file here: what is in it is not known"
            work.options["--accelerate"] = option.value or "FILE"
            work.fates.append(Fate(brought, "mapped", why, command=f"--accelerate {option.value}", note=f"; {why}"))
        else:
            work.fates.append(Fate(brought, "retired" if word.retired else "dropped", word.why))


def _place_fate(brought: Brought, says: str, places: Places) -> Fate:
    ranks = {"parallel.ranks_per_node": places.ranks_per_node} if places.ranks_per_node else {}
    nodes = {"fleet.nodes": places.nodes} if places.nodes else {}
    of_hosts = {**nodes, **(ranks if ":" in str(brought.value) else {})}  # node1:2
    settings: Mapping[str, Any] = {
        "total": {**ranks, **nodes}, "per_node": ranks, "nodes": nodes, "hosts": of_hosts
    }.get(says, {})  # fmt: skip
    words = places.launch_words()
    option = {"hostfile": "--hostfile", "hosts": "--hostfile", "threads": "--threads", "node_rank": "--node-rank"}.get(
        says, "--master" if says in ("master", "port") else "--nnodes" if says == "nodes" else "--nproc"
    )
    option = "--hostfile" if says == "nodes" and brought.tool == "srun" and places.on_hosts else option
    option = "--ppn" if option in ("--nproc", "--nnodes") and places.on_hosts else option
    if option in words:
        note = _THREADS if says == "threads" else ""
        command = f"{option} {words[words.index(option) + 1]}"
        return Fate(brought, "mapped", note.lstrip("; ") or _COUNTED, settings, command=command, note=note)
    if settings:
        return Fate(brought, "mapped", _COUNTED, settings)
    if says in ("master", "port", "node_rank", "nodes"):
        why = (
            "rank 0 is on the first host, and a free port is found"
            if places.on_hosts
            else "all ranks are on this machine"
        )
        return Fate(brought, "dropped", why)
    if brought.value in ("auto", "cpu", "gpu"):
        return Fate(brought, "dropped", LEFT_OUT_RANKS)
    return Fate(brought, "dropped", "without the number of hosts it does not say how many ranks each has; --ppn does")


def _environment_fate(brought: Brought, option: Option, work: _Work) -> Fate:
    """accelerate launch hands these to the script by the environment; coremill launch hands on what is set."""
    name = (option.word.says.partition(" ")[2] if option.word else "") or f"ACCELERATE_{option.name.upper()}"
    work.environment[name] = "true" if option.value is None else option.value
    fate = fate_of(brought, by_name([brought]))
    return Fate(brought, "mapped", fate.why, fate.settings, command=f"{name}={work.environment[name]}", note=fate.note)


def _variable_fate(name: str, start: Start, places: Places, work: _Work) -> Fate:
    value, typed = start.variables[name], start.variable_texts[name]
    is_option = typed.startswith("-")
    said = typed.partition(" ")[2]
    brought = Brought(typed.split()[0], (name.lower(),), said, "mpirun", said)
    brought = brought if is_option else Brought(name, (name.lower(),), value, "environment", value)
    row = variable(name)
    if row is not None and row.says in ("threads", "master", "port"):
        return _place_fate(brought, row.says, places)
    if row is not None and row.says == "interface":
        work.options["--interface"] = value
        return Fate(brought, "mapped", row.why, command=f"--interface {value}")
    if row is not None and row.says != "keep":
        return Fate(brought, "retired" if row.retired else "dropped", row.why)
    work.environment[name] = value
    return Fate(brought, "mapped", "what is set stays", command=f"{name}={value}")


def _argument_fate(brought: Brought, given: Mapping[str, Any]) -> Fate:
    """An argument that nobody knows is the script's own, and stays with it."""
    fate = fate_of(brought, given)
    if fate.kind != "unknown" or not brought.name.startswith("-"):
        return fate
    return Fate(brought, "mapped", "it is the script's own", command="stays an argument of the script")


def _defaults(script: Script, brought: Sequence[Brought], given: Mapping[str, Any]) -> list[Fate]:
    """What the script does where its arguments do not say: coremill's own defaults differ."""
    named = {each.path[-1] for each in brought}
    taken: set[str] = set()
    for each in brought:
        row = find_foreign(each.path)
        taken |= set(row.targets) if row is not None else set()
    found = []
    for name, value in script.defaults.items():
        fate = fate_of(Brought(f"default of {script.names[0]}, {name}", (name,), value, "examples"), given)
        if name not in named and not taken & fate.settings.keys():
            found.append(fate)
    return [fate for fate in found if fate.kind == "mapped"]


def _deepspeed_file(arguments: Sequence[Brought], work: _Work) -> list[Brought]:
    """`--deepspeed ds.json`: the settings in it, where it is here."""
    found, notes = settings_of_deepspeed(arguments)
    work.notes += notes
    return found


def _accelerate_file(start: Start, default: Path | None) -> AccelerateFile | None:
    if "accelerate" not in start.tools:
        return None
    named = start.fact("config_file")
    path = named_file(named.value) if named is not None and named.value else default
    return read_accelerate_file(path) if path is not None and path.is_file() else None


def _fates_of_file(file: AccelerateFile, places: Places) -> list[Fate]:
    """What accelerate's file says, of the places too."""
    found = [
        Brought(f"{file.path.name}, {each.name}", each.path, each.value, "accelerate")
        for each in settings_in(file.values, "accelerate")
    ]
    given = by_name(found)
    return [
        _place_fate(each, _says(each), places) if _says(each) in _PLACES else fate_of(each, given) for each in found
    ]


def _says(brought: Brought) -> str:
    """Which fact of a start a setting of accelerate's file is."""
    word = launcher_word("accelerate", brought.path[-1]) if brought.value is not None else None
    return word.says if word is not None else ""


def _today(words: Sequence[str]) -> list[str]:
    """Arguments of an example script as transformers takes them today."""
    kept: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        text, equals, value = word.partition("=")
        name = plain_name(text.lstrip("-"))
        row = find_foreign((name,)) if word.startswith("--") else None
        position += 1
        if row is None or row.today is None:
            kept.append(word)
            continue
        if not equals and position < len(words) and not words[position].startswith("--"):
            value, position = words[position], position + 1
        if name == "ddp_backend":
            kept += ["--ddp_backend", value if value not in ("ccl", "mpi", "nccl") else "gloo"]
        else:
            kept += [row.today] if row.today and row.today not in words else []
    return kept


def _hosts(option: Option | None) -> tuple[tuple[str, ...], int | None]:
    """Lines of a hostfile, and the ranks on each where all have as many.

    Open MPI's `node1:2,node2:2` has slots behind the name, deepspeed's `node1:0,2@node2:0,2` numbers of devices.
    """
    named = (option.value or "") if option is not None else ""
    of_deepspeed = option is not None and option.tool == "deepspeed"
    parts = [part.partition(":") for part in named.split("@" if of_deepspeed else ",") if part]
    counts = {len(told.split(",")) if of_deepspeed and told else _whole(told) for _, _, told in parts}
    if of_deepspeed and [name for name, _, _ in parts] == ["localhost"]:
        parts = []
    hosts = tuple(name if of_deepspeed else "".join((name, colon, told)) for name, colon, told in parts)
    return hosts, counts.pop() if len(counts) == 1 else None


def _count(option: Option | None) -> int | None:
    return _whole(option.value) if option is not None else None


def _whole(text: str | None) -> int | None:
    """The last number of torchrun's MIN:MAX."""
    last = (text or "").rpartition(":")[2].strip()
    return int(last) if last.isdecimal() and int(last) > 0 else None


def _text(option: Option | None) -> str | None:
    return option.value if option is not None else None


def _read(text: str) -> Any:
    value = read_document(text).value
    return text if value is None or isinstance(value, dict | list) else value
