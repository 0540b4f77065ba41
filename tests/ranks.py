"""Real gloo ranks for tests: `run_ranks(function, 2, ...)` runs `function(world, ...)` on each and returns the results.

One nursery process per session imports torch once (6 s) and forks every rank from itself, so a call costs milliseconds
and each rank is a fresh process: no state of an earlier test, its own peak memory. The nursery computes nothing itself,
for OpenMP does not survive a fork. Ranks die with the nursery and the nursery dies with pytest.

The function must be importable: defined at the top of a test module or of a helper in tests/. Arguments and results are
pickled between these processes only.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"
PRELOADED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "coremill.world.group",
    "coremill.checkpoint.saver",  # and with it model, parallel and train: 2 s in every rank otherwise
    "coremill.engines.replicate.engine",
    "coremill.tasks.causal_lm.training",
    "coremill.tasks.encoder.training",
    "coremill.train.loop",
)
PEER_LOST = 69


class RankError(AssertionError):
    """A rank raised, died or did not end; the text holds its traceback."""

    def __init__(self, text: str, *, rank: int, kind: str) -> None:
        super().__init__(text)
        self.rank = rank
        self.kind = kind  # name of the exception class, "timeout" or "died"


@dataclass(frozen=True)
class _Job:
    module_file: str | None
    module_name: str
    function_name: str
    world_size: int
    kwargs: dict[str, Any]
    timeout_seconds: float
    environ: dict[str, str]
    join: bool


@dataclass(frozen=True)
class _Result:
    value: Any = None
    error: str | None = None  # traceback
    kind: str = ""
    is_follower: bool = False


def run_ranks(
    function: Callable[..., Any] | str,
    world_size: int,
    *,
    timeout_seconds: float = 280.0,
    environ: dict[str, str] | None = None,
    join: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Results of `function(world, **kwargs)` by rank; `function` may also be "package.module:name".

    Raises RankError with the traceback of the rank that failed first for a reason of its own. `environ` adds variables
    for the ranks. With `join=False` the function gets the RankIdentity instead, not yet joined.
    """
    module_file, module_name, function_name = _reference(function)
    job = _Job(module_file, module_name, function_name, world_size, kwargs, timeout_seconds, environ or {}, join)
    results = _nursery().run(job)
    failures = [(rank, result) for rank, result in enumerate(results) if result.error is not None]
    if failures:
        rank, result = min(failures, key=lambda failure: (failure[1].is_follower, failure[0]))
        others = ", ".join(f"rank {other}: {result.kind}" for other, result in failures if other != rank)
        text = f"rank {rank} of {world_size}: {result.kind}\n{result.error}" + (f"\n({others})" if others else "")
        raise RankError(text, rank=rank, kind=result.kind)
    return [result.value for result in results]


def close_nursery() -> None:
    """End the nursery and with it every rank; the next `run_ranks` starts a new one."""
    global _open_nursery
    if _open_nursery is not None:
        _open_nursery.close()
        _open_nursery = None


_open_nursery: _Nursery | None = None


def _nursery() -> _Nursery:
    global _open_nursery
    if _open_nursery is None or _open_nursery.process.poll() is not None:
        _open_nursery = _Nursery()
    return _open_nursery


def _reference(function: Callable[..., Any] | str) -> tuple[str | None, str, str]:
    if isinstance(function, str):
        module_name, _, function_name = function.partition(":")
        return None, module_name, function_name
    if "." in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is not at the top of its module: a rank could not find it")
    return sys.modules[function.__module__].__file__, function.__module__, function.__name__


class _Nursery:
    """The pytest side of the nursery process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environ.update(
            OMP_NUM_THREADS="1",  # tests share the machine
            TOKENIZERS_PARALLELISM="false",
            PYTHONPATH=os.pathsep.join([str(SOURCE), str(TESTS), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        )
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "ranks.py"), str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,  # Ctrl-C ends pytest, which ends this
        )
        theirs.close()
        self.connection = Connection(ours.detach())

    def run(self, job: _Job) -> list[_Result]:
        try:
            self.connection.send(job)
            # Beyond the job's own time: the import of torch, and 30 s for the nursery to clean up.
            if not self.connection.poll(job.timeout_seconds + 90):
                raise RankError("the nursery does not answer", rank=-1, kind="timeout")
            results: list[_Result] = self.connection.recv()
            return results
        except BaseException:  # a half-done exchange cannot be taken up again
            close_nursery()
            raise

    def close(self) -> None:
        self.connection.close()  # the nursery ends when its peer is gone
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# --- inside the nursery ---


def _serve(descriptor: int, parent_pid: int) -> None:
    from coremill.child import die_with_parent

    die_with_parent(parent_pid)
    gc.disable()  # as in coremill's own template (forked_rank.py)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    connection = Connection(descriptor)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            os._exit(0)  # taking torch down in order takes 2 s
        connection.send(_run_job(job))


def _run_job(job: _Job) -> list[_Result]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    pids: list[int] = []
    readers: list[Connection] = []
    nursery_pid = os.getpid()
    for rank in range(job.world_size):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, job, listener, writer, nursery_pid)
        os.close(writer)
        pids.append(pid)
        readers.append(Connection(reader, writable=False))
    listener.close()
    try:
        return _collect(readers, job.timeout_seconds)
    finally:
        for pid in pids:
            _end(pid)
        for connection in readers:
            connection.close()


def _end(pid: int) -> None:
    """A rank that has answered is about to leave; one that has not is killed with its children."""
    for _ in range(100):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(0.01)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _collect(readers: list[Connection], timeout_seconds: float) -> list[_Result]:
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, _Result] = {}
    with selectors.DefaultSelector() as selector:
        for rank, reader in enumerate(readers):
            selector.register(reader, selectors.EVENT_READ, rank)
        while len(results) < len(readers):
            left = deadline - time.monotonic()
            # After a failure the others have a minute to notice.
            if any(result.error for result in results.values()):
                left = min(left, 60.0)
            ready = selector.select(max(0.0, left))
            if not ready:
                break
            for key, _ in ready:
                try:
                    results[key.data] = readers[key.data].recv()
                except EOFError:
                    results[key.data] = _Result(error="it ended without a word", kind="died")
                selector.unregister(key.fileobj)
    late = _Result(error=f"it had not ended after {timeout_seconds:.0f} s", kind="timeout", is_follower=bool(results))
    return [results.get(rank, late) for rank in range(len(readers))]


def _be_rank(rank: int, job: _Job, listener: socket.socket, writer: int, nursery_pid: int) -> None:
    """Runs in the forked child and never returns."""
    connection = Connection(writer, readable=False)
    try:
        from coremill.child import die_with_parent

        os.setsid()
        die_with_parent(nursery_pid)
        os.environ.update(job.environ)
        result = _rank_result(rank, job, listener)
        try:
            connection.send(result)
        except (pickle.PicklingError, AttributeError, TypeError):
            connection.send(_Result(error=traceback.format_exc(), kind="unpicklable result"))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _rank_result(rank: int, job: _Job, listener: socket.socket) -> _Result:
    from coremill.world.group import join_world
    from coremill.world.identity import RankIdentity

    identity = RankIdentity(
        rank=rank,
        size=job.world_size,
        local_rank=rank,
        local_size=job.world_size,
        node_rank=0,
        master_address="127.0.0.1",
        master_port=listener.getsockname()[1],
        launcher="environment",
        store_fd=listener.detach() if rank == 0 else None,
    )
    if rank != 0:
        listener.close()
    try:
        function = getattr(_module(job), job.function_name)
        if not job.join:
            return _Result(function(identity, **job.kwargs))
        with join_world(identity, timeout_seconds=job.timeout_seconds) as world:
            return _Result(function(world, **job.kwargs))
    except BaseException as error:
        follower = getattr(error, "exit_code", None) == PEER_LOST or getattr(error, "silent", False)
        return _Result(error=traceback.format_exc(), kind=type(error).__name__, is_follower=follower)


def _module(job: _Job) -> ModuleType:
    """The module of the function; a test module is found by its file, for pytest may know it by another name."""
    if job.module_file is None:
        return importlib.import_module(job.module_name)
    spec = importlib.util.spec_from_file_location(job.module_name, job.module_file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[job.module_name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    # Under its importable name, so that what is pickled here is known there.
    importlib.import_module("ranks")._serve(int(sys.argv[1]), int(sys.argv[2]))
