"""The environment a training script wants on this machine, each variable with its reason; what the user set stays.

What a script computes with is looked up, not guessed: the OpenMP runtime that torch brings, the allocators and pages
this machine has. Cores are given by the mask of the process (child.py), which every thread inherits.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coremill.config.foreign import find_foreign
from coremill.config.other_tools import variable, variables
from coremill.errors import InputError
from coremill.hardware.cores import hardware_threads
from coremill.hardware.facts import NodeFacts
from coremill.hosts.forwarding import shown
from coremill.plan.layout import Layout
from coremill.plan.types import Choice
from coremill.supervise.rank_environment import KEEP_MEMORY, Setting, unless_set_by_user
from coremill.world.sockets import flows_of, interface_for_flows, interface_towards

Allocator = Literal["auto", "tcmalloc", "jemalloc", "none"]
# Big blocks from an arena of their own, freed pages returned by a thread of the allocator and not by the step.
JEMALLOC_CONF = "oversize_threshold:1,background_thread:true,metadata_thp:auto"

_MASK_BINDS = "the rank's core mask binds; thread by thread, gloo and data loaders would share its first core"


@dataclass(frozen=True, kw_only=True)
class OpenMp:
    """The OpenMP runtime the ranks will compute with."""

    runtime: Literal["libgomp", "libiomp5", "unknown"]
    preload: str | None  # the library to preload so that it is the one
    reason: str


def find_openmp(node: NodeFacts, torch_folder: Path | None, environ: Mapping[str, str]) -> OpenMp:
    """What the user preloads; Intel's where it is installed on x86; else the one that torch carries in its own folder.

    A preload of the user's stands as it is, so with one of something else Intel's runtime cannot be added.
    """
    preloaded = environ.get("LD_PRELOAD", "")
    for runtime in ("libiomp5", "libgomp"):
        if runtime in preloaded:
            return OpenMp(runtime=runtime, preload=None, reason=f"you preload {runtime}")  # type: ignore[arg-type]
    if node.openmp is not None and node.architecture == "x86_64" and not preloaded:
        return OpenMp(runtime="libiomp5", preload=node.openmp, reason="Intel's OpenMP runtime is installed")
    if torch_folder is not None:
        # conda's torch links libiomp5; the wheels carry their own copy of libgomp.
        for runtime, pattern in (("libiomp5", "libiomp5.so*"), ("libgomp", "libgomp*.so*")):
            for folder in (torch_folder / "lib", torch_folder.parent / "torch.libs"):
                if any(folder.glob(pattern)):
                    return OpenMp(runtime=runtime, preload=None, reason=f"torch brings {runtime}")  # type: ignore[arg-type]
    return OpenMp(runtime="unknown", preload=None, reason="torch does not say which OpenMP runtime it loads")


def find_torch_folder() -> Path | None:
    """Where torch is installed, without importing it (2 s)."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def script_settings(
    node: NodeFacts,
    layout: Layout,
    environ: Mapping[str, str],
    *,
    openmp: OpenMp,
    interface: Choice[str] | None,
    allocator: Allocator = "auto",
    bind_threads: bool = False,
    deepspeed: bool = False,
) -> tuple[Setting, ...]:
    """What all ranks of this machine share, besides their rank variables.

    `deepspeed`: the script trains by it, and ranks see each other that way; told of CPUs, accelerate would not wrap the
    model, whose weights ZeRO-3 has taken apart by then ("'weight' must be 2-D", accelerate 1.15).
    """
    wanted = [
        Setting("OMP_NUM_THREADS", str(layout.threads_per_rank.value), layout.threads_per_rank.reason),
        *_binding(openmp, bind_threads),
        *_memory(node, environ, openmp, allocator),
        Setting("PYTHONUNBUFFERED", "1", "the last lines of a rank that is killed reach its log"),
    ]
    if not deepspeed:
        reason = "without it accelerate's ranks do not see each other: each trains alone"
        wanted.append(Setting("ACCELERATE_USE_CPU", "true", reason))
    if interface is not None:
        wanted.append(Setting("GLOO_SOCKET_IFNAME", interface.value, interface.reason))
    return tuple(unless_set_by_user(setting, environ) for setting in wanted)


def asked_threads(option: int | None, environ: Mapping[str, str]) -> int | None:
    """The user's word on threads, by option or variable; --threads is the louder one."""
    if option is not None:
        return option
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is for nested regions
    return int(text) if text.isdigit() and int(text) > 0 else None


def threads_warning(node: NodeFacts, ranks: int, threads: int | None, own: int) -> str | None:
    """What it costs where the user's threads are more than this host has for its ranks; None where they are not.

    `ranks` share what `node` has; `own` is what coremill would have taken.
    """
    there = hardware_threads(node)
    if threads is None or threads * ranks <= there:
        return None
    each = "threads" if ranks == 1 else f"threads for each of {ranks} ranks"
    share = "1 hardware thread" if there == 1 else f"{there} hardware threads"
    return (
        f"warning: {threads} {each} share {share} on {node.hostname}: they take turns and wait for each other;"
        f" it stays as you set it, coremill would take {own} (OMP_NUM_THREADS, --threads)"
    )


def choose_interface(asked: str | None, master: str | None, hosts: int) -> Choice[str] | None:
    """The device gloo takes: the user's, the one that leads to `master`, or loopback where nothing has to leave.

    On several hosts it is named as often as there should be connections to each peer.
    """
    name = asked or interface_towards(master)
    if name is None:
        return None
    if asked is not None:
        reason = "chosen by you (--interface)"
    elif master is None:
        reason = "all ranks are on this machine: nothing leaves it"
    else:
        reason = f"leads to {master}, the host of rank 0"
    value = interface_for_flows(name, hosts)
    if value != name:
        reason += f"; named {flows_of(value)} times for as many connections to each peer, since clouds cap a single one"
    return Choice(value, reason)


def _binding(openmp: OpenMp, bind_threads: bool) -> list[Setting]:
    """Threads to cores.

    Bound one by one, the main thread sits on the rank's first core, and whatever it starts afterwards inherits that:
    gloo's threads, data loader workers, and, where several hosts are one machine, everybody's first thread (seen with
    libgomp and torch 2.13). So the rank's mask does it, unless asked.
    """
    settings = []
    if openmp.runtime == "libiomp5":
        reason = f"{openmp.reason}; idle threads sleep after 1 ms and leave their core to gloo"
        settings.append(Setting("KMP_BLOCKTIME", "1", reason))
        if bind_threads:
            reason = "one thread per core, as asked (--bind-threads)"
            settings.append(Setting("KMP_AFFINITY", "granularity=fine,compact,1,0", reason))
        else:
            settings.append(Setting("KMP_AFFINITY", "none", _MASK_BINDS))
        return settings
    if bind_threads:
        reason = f"{openmp.reason}; one thread per core, as asked (--bind-threads)"
        return [Setting("OMP_PROC_BIND", "close", reason), Setting("OMP_PLACES", "cores", reason)]
    return [Setting("OMP_PROC_BIND", "false", f"{openmp.reason}; {_MASK_BINDS}")]


def _memory(node: NodeFacts, environ: Mapping[str, str], openmp: OpenMp, allocator: Allocator) -> list[Setting]:
    """Preloaded libraries and huge pages."""
    settings = []
    chosen = _allocator(node, allocator)
    libraries = [path for path in (chosen[1] if chosen else None, openmp.preload) if path is not None]
    if libraries and not environ.get("LD_PRELOAD"):
        libraries = [path for path in libraries if can_preload(path)]
    if libraries:
        names = " and ".join(Path(path).name.split(".")[0].removeprefix("lib") for path in libraries)
        reason = f"{names}: found here; buffers of a step are reused instead of being faulted in anew"
        settings.append(Setting("LD_PRELOAD", ":".join(libraries), reason))
    if chosen and chosen[1] in libraries and chosen[0] == "jemalloc":
        reason = "big blocks apart, freed pages returned in the background"
        settings.append(Setting("MALLOC_CONF", JEMALLOC_CONF, reason))
    if not chosen or chosen[1] not in libraries:
        settings += KEEP_MEMORY
    if node.huge_pages == "madvise":
        reason = "huge pages are given to those who ask: torch asks for blocks of 2 MB and more"
        settings.append(Setting("THP_MEM_ALLOC_ENABLE", "1", reason))
    return settings


def _allocator(node: NodeFacts, wanted: Allocator) -> tuple[str, str] | None:
    """Name and path of the allocator to preload."""
    found = dict(node.allocators)
    if wanted == "none":
        return None
    if wanted == "auto":
        return next(((name, found[name]) for name in ("tcmalloc", "jemalloc") if name in found), None)
    if wanted not in found:
        raise InputError(
            f"{wanted} is not installed on {node.hostname}",
            where="--allocator",
            do=f"install it ({'libgoogle-perftools4' if wanted == 'tcmalloc' else 'libjemalloc2'} on Debian), or leave"
            " the option out",
        )
    return wanted, found[wanted]


def can_preload(library: str) -> bool:
    """Whether a program starts with it: a build for another page size or with missing parts breaks every process."""
    try:
        trial = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ""], env={"LD_PRELOAD": library}, capture_output=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return trial.returncode == 0 and b"ld.so" not in trial.stderr


def setting_lines(settings: tuple[Setting, ...], where: str = "") -> list[str]:
    """One line per variable, with its reason."""
    return [
        f"coremill: {where}{setting.variable}={shown(setting.variable, setting.value)}  ({setting.reason})"
        for setting in settings
    ]


def notes_on(
    environ: Mapping[str, str], arguments: tuple[str, ...], openmp: OpenMp, *, script_text: str = ""
) -> list[str]:
    """One line for each setting of another stack that does nothing here or means something else.

    An argument that the script's own text names is the script's own, whatever it is called elsewhere.
    """
    notes = []
    for row in variables():
        found = sorted(name for name in environ if variable(name) is row)
        if row.only_if_on:
            found = [name for name in found if environ[name].lower() in ("1", "true", "yes")]
        if found and row.in_launch and row.with_openmp in (None, openmp.runtime):
            notes.append(f"{', '.join(found)}: {row.in_launch}")
    for word in dict.fromkeys(arguments):
        name = word.partition("=")[0].lstrip("-")
        row_of_flag = find_foreign((name,)) if word.startswith("--") else None
        if row_of_flag is not None and row_of_flag.in_launch and name not in script_text:
            notes.append(f"{word}: {row_of_flag.in_launch}")
    if "--ddp_backend=ccl" in arguments or ("--ddp_backend", "ccl") in zip(arguments, arguments[1:], strict=False):
        retired = variable("CCL_WORKER_COUNT")
        notes.append(f"--ddp_backend ccl: use gloo; {retired.why if retired else ''}")
    return notes
