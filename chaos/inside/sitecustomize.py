"""Faults that come from inside a rank. Found on PYTHONPATH by every Python of an experiment; acts in ranks only.

CHAOS_INSIDE holds JSON: what to do, on which rank, in which step. Nothing of coremill knows of it: functions are
wrapped as their modules are imported. That may be before a rank is one, in the fork server: which rank
this is, is asked only when the functions are called.

    {"kind": "raise", "rank": 1, "step": 12}            a fault in the model or the data
    {"kind": "nan-loss" | "inf-loss" | "nan-weight", ...}  numbers that are none
    {"kind": "clock", "rank": 1, "seconds": -60, "step": 12}   from that step on its clock is off
    {"kind": "orphan"}                                  on SIGUSR2 a rank leaves a child with its sockets and dies
    {"kind": "rows", "folder": "..."}                   nothing breaks: the rows each rank was given are written down
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

LOOP = "coremill.train.loop"


def _wrap(module: Any, order: dict[str, Any]) -> None:
    original = module.train_steps

    def train_steps(engine: Any, task: Any, loader: Any, *rest: Any, **named: Any) -> Any:
        rank = int(os.environ["RANK"])
        watch = _Watch(named.get("first_step", 1) - 1, loader.next_step, order, rank, engine)
        loader.next_step = watch.next_step
        return original(engine, _Poisoned(task, watch), loader, *rest, **named)

    module.train_steps = train_steps


class _Watch:
    """Counts steps and does what is due in one."""

    def __init__(self, step: int, next_step: Any, order: dict[str, Any], rank: int, engine: Any) -> None:
        self.step, self._next_step, self.order, self._rank, self._engine = step, next_step, order, rank, engine
        self.is_mine = order.get("rank", rank) == rank

    def next_step(self) -> Any:
        work = self._next_step()
        self.step += 1
        kind = self.order["kind"]
        if kind == "rows":
            rows = [int(row) for batch in work.batches for row in batch.row_ids]
            with (Path(self.order["folder"]) / f"rank-{self._rank}.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.step, "rows": rows}) + "\n")
        if self.is_mine and self.step == self.order.get("step"):
            if kind == "raise":
                raise ArithmeticError(f"poison in step {self.step}")
            if kind == "nan-weight":
                import torch

                with torch.no_grad():
                    for piece in reversed(list(self._engine.slices())):  # of the first, an embedding, few rows are read
                        if piece.local.numel():
                            piece.local.view(-1)[0] = float("nan")
                            break
            if kind == "clock":
                real, offset = time.time, float(self.order["seconds"])
                time.time = lambda: real() + offset
        return work


class _Poisoned:
    def __init__(self, task: Any, watch: _Watch) -> None:
        self._task, self._watch = task, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, *arguments: Any, **named: Any) -> Any:
        value = self._task.loss(*arguments, **named)
        watch = self._watch
        if watch.is_mine and watch.step == watch.order.get("step"):
            if watch.order["kind"] == "nan-loss":
                return value * float("nan")
            if watch.order["kind"] == "inf-loss":
                return value * float("inf")
        return value


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != LOOP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _wrap(module, self._order)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _leave_an_orphan(folder: str) -> None:
    """A child with all sockets, in a session of its own; the moment of death is written down first."""

    def die(_number: int, _frame: Any) -> None:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)
        (Path(folder) / f"died-{os.getpid()}").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGUSR2, die)


if "CHAOS_INSIDE" in os.environ:
    _order = json.loads(os.environ["CHAOS_INSIDE"])
    if _order["kind"] == "orphan":
        _leave_an_orphan(_order["folder"])
    else:
        sys.meta_path.insert(0, _Finder(_order))
