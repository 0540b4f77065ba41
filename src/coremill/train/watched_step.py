"""Where the arithmetic of a step goes: in one step of an attempt every rank takes the time of its products and of its
attention.

A mode stands between torch's operations and who calls them, in forward and in backward. It changes no number and keeps
nothing (torch's profiler held 100 MB at the peak of a 60 M model); what its Python takes is left out, for a step is
compared with those that nobody watched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# The third of an attempt: memory has its size by then, and a short run has one.
WATCHED_STEP = 3

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "mkldnn_linear", "linear", "matmul", "addmm_"))
_ATTENTION = ("scaled_dot_product", "attention_backward")  # torch's, and model/quick_attention.py


class WatchedStep(TorchDispatchMode):
    """Around one step; afterwards the seconds of its products and of its attention, where that is one operation."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = {"products": 0.0, "attention": 0.0}

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        part = part_of(operation)
        if part is None:
            return operation(*args, **(kwargs or {}))
        began = time.perf_counter()
        try:
            return operation(*args, **(kwargs or {}))
        finally:
            self.seconds[part] += time.perf_counter() - began


def watched(is_due: bool) -> AbstractContextManager[WatchedStep | None]:
    return WatchedStep() if is_due else nullcontext()


def part_of(operation: Callable[..., Any]) -> str | None:
    """What an operation of torch counts as; None: it lies between."""
    name = getattr(operation, "_opname", "")
    if any(part in name for part in _ATTENTION):
        return "attention"
    return "products" if name in _PRODUCTS else None
