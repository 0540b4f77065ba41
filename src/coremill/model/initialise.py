"""Random weights that are the same for any number of ranks, made where they live.

What a model does to each of its parameters is recorded once, on meta: its own `_init_weights` runs with transformers'
initialisation functions replaced by recorders. Each rank then replays the record on its own rows only. Rows come in
blocks, and every block has a generator of its own, seeded by (seed, parameter, block): who draws a block, and what was
drawn before it, does not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, initialization

from coremill.errors import InputError
from coremill.model.slices import RowSlice
from coremill.world.heartbeat import HEARTBEAT

BLOCK_ROWS = 64
# A block that only partly belongs to a rank is drawn into a temporary: keep it small where rows are long (experts).
BLOCK_BYTES = 16 * 2**20

CONSTANTS = {"zeros_": 0.0, "ones_": 1.0}
RANDOM = ("normal_", "uniform_", "trunc_normal_")
# Torch draws with one thread whatever is free: several blocks at once take the others.
DRAWN_BY_ONE_THREAD = ("normal_", "uniform_")


@dataclass(frozen=True)
class InitialOperation:
    """One call of an initialisation function on a parameter, or on a view into it."""

    function: str
    arguments: dict[str, Any]
    offset: int  # where the view starts in the parameter, in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    rows: tuple[int, int] | None  # the rows it covers, None where it does not cover whole rows

    @property
    def by_rows(self) -> bool:
        """Whether a rank can replay it on its own rows without the others."""
        return self.rows is not None and (self.function in RANDOM or self.function in ("constant_", *CONSTANTS))


@dataclass(frozen=True)
class MadeByModule:
    """What a module's own initialisation computes where its parameter lies, or from what it has drawn (mamba2,
    Qwen3-Next): on meta there are no values to copy."""

    model: PreTrainedModel
    module: nn.Module
    parameter: str

    def values(self, generator: torch.Generator) -> torch.Tensor:
        """Of that module alone, in memory of its own."""
        with _with_memory(self.module), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(generator.initial_seed())
            self.model._init_weights(self.module)  # itself and no copy: xLSTM looks for it in the model
            return self.module.get_parameter(self.parameter).detach()


Record = dict[str, list[InitialOperation]]
_Place = tuple[PreTrainedModel, nn.Module]  # a module that is initialised just now, and the model whose it is
_Drawn = tuple[int, int, torch.Tensor]  # rows [first, last) of a parameter, and what they are to be


def record_initialisation(blueprint: PreTrainedModel, seed: int = 0) -> Record:
    """What the model's own initialisation does to each parameter, in order; all on meta, so it needs no memory."""
    names = {parameter.untyped_storage()._cdata: (name, parameter) for name, parameter in blueprint.named_parameters()}
    record: Record = {}

    def note(function: str, tensor: torch.Tensor, arguments: dict[str, Any], place: _Place | None) -> None:
        name, parameter = names.get(tensor.untyped_storage()._cdata, (None, None))
        if name is None or parameter is None:
            return  # a buffer: it has its value from the constructor
        if function == "copy_" and arguments["other"].is_meta and place is not None:
            arguments = {"other": _made_by(*place, tensor)}
        function, arguments = _in_plain_terms(function, arguments, tensor)
        rows = _rows(tensor, parameter)
        operation = InitialOperation(
            function, arguments, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), rows
        )
        whole = tensor.shape == parameter.shape
        record[name] = [operation] if whole else [*record.get(name, ()), operation]

    # Values that are drawn on the CPU meanwhile are copied as they are: the same by every rank and whenever asked.
    with _recorders(note), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blueprint.initialize_weights()
    return record


def initialise(target: RowSlice, record: Record, seed: int) -> None:
    """Write this rank's rows of one parameter as the model's own initialisation would, in distribution."""
    operations = record.get(target.name)
    if not operations:
        raise InputError(
            f"no random initialisation is known for parameter {target.name}",
            why="the model's own initialisation does not touch it",
            do="start from pretrained weights",
        )
    if all(operation.by_rows for operation in operations):
        for order, operation in enumerate(operations):
            _replay_rows(target, operation, order, seed)
    else:
        _replay_whole(target, operations, seed)


def _replay_rows(target: RowSlice, operation: InitialOperation, order: int, seed: int) -> None:
    """One operation on the rows this rank holds."""
    assert operation.rows is not None
    start, stop = max(target.start, operation.rows[0]), min(target.stop, operation.rows[1])
    if start >= stop or target.local.numel() == 0:
        return
    local = target.local.view(target.stop - target.start, target.row_elements)
    if operation.function == "constant_":
        local[start - target.start : stop - target.start].fill_(operation.arguments["val"])
        return
    total_rows = target.shape[0] if target.shape else 1
    block_rows = max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, target.row_elements * 4)))

    def draw(block: int) -> _Drawn:
        """Where it begins and ends, and what was drawn for it: in place where that can be."""
        first, last = block * block_rows, min((block + 1) * block_rows, total_rows)
        # In bf16 others would be drawn: what is held so is rounded.
        is_in_place = start <= first and last <= stop and local.dtype == torch.float32
        rows = slice(first - target.start, last - target.start)
        drawn = local.detach()[rows] if is_in_place else torch.empty(last - first, target.row_elements)
        _draw(drawn, operation, _generator(seed, target.name, order, block))
        return first, last, drawn

    for first, last, drawn in _at_once(draw, range(start // block_rows, -(-stop // block_rows)), operation.function):
        HEARTBEAT.mark()
        low, high = max(first, start), min(last, stop)
        if drawn.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
            local[low - target.start : high - target.start].copy_(drawn[low - first : high - first])


def _at_once(draw: Callable[[int], _Drawn], blocks: range, function: str) -> Iterator[_Drawn]:
    """All blocks in order, drawn by as many threads as there are cores for."""
    threads = min(torch.get_num_threads(), len(blocks)) if function in DRAWN_BY_ONE_THREAD else 1
    if threads <= 1:
        yield from map(draw, blocks)
        return
    with ThreadPoolExecutor(threads) as pool:
        for some in range(0, len(blocks), threads):  # no more are held at a time
            yield from pool.map(draw, blocks[some : some + threads])


def _replay_whole(target: RowSlice, operations: list[InitialOperation], seed: int) -> None:
    """Operations that need the whole parameter (orthogonal, copied values): make it whole, keep this rank's rows."""
    whole = torch.empty(target.shape)
    for order, operation in enumerate(operations):
        view = whole.as_strided(operation.shape, operation.stride, operation.offset)
        _draw(view, operation, _generator(seed, target.name, order, 0))
    target.local.copy_(whole[target.start : target.stop] if target.shape else whole)


def _draw(tensor: torch.Tensor, operation: InitialOperation, generator: torch.Generator) -> None:
    if operation.function == "copy_":
        other = operation.arguments["other"]
        tensor.copy_(other.values(generator) if isinstance(other, MadeByModule) else other)
        return
    function = initialization.TORCH_INIT_FUNCTIONS[operation.function]
    arguments = dict(operation.arguments)
    if "generator" in inspect.signature(function).parameters:
        arguments["generator"] = generator
    function(tensor, **arguments)


def _generator(seed: int, name: str, order: int, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{order}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _rows(tensor: torch.Tensor, parameter: nn.Parameter) -> tuple[int, int] | None:
    """The rows of the parameter that a view covers; None where it covers parts of rows."""
    row_elements = max(1, math.prod(parameter.shape[1:]))
    offset, count = int(tensor.storage_offset()), tensor.numel()
    if not tensor.is_contiguous() or offset % row_elements or count % row_elements:
        return None
    return offset // row_elements, (offset + count) // row_elements


@contextlib.contextmanager
def _with_memory(module: nn.Module) -> Iterator[None]:
    """Its parameters are on the CPU for as long as it lasts, one that has two names is one."""
    on_meta = [
        (each, name, old) for each in module.modules() for name, old in each._parameters.items() if old is not None
    ]
    made = {old: nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=False) for _, _, old in on_meta}
    try:
        for owner, name, old in on_meta:
            owner._parameters[name] = made[old]
        yield
    finally:
        for owner, name, old in on_meta:
            owner._parameters[name] = old


def _made_by(model: PreTrainedModel, module: nn.Module, tensor: torch.Tensor) -> MadeByModule:
    storage = tensor.untyped_storage()._cdata
    name = next(name for name, each in module.named_parameters() if each.untyped_storage()._cdata == storage)
    return MadeByModule(model, module, name)


def _in_plain_terms(function: str, arguments: dict[str, Any], tensor: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """Scaled initialisations look at the whole shape: put them as a normal or uniform draw of known width."""
    if function in CONSTANTS:
        return "constant_", {"val": CONSTANTS[function]}
    if function in ("xavier_uniform_", "xavier_normal_"):
        fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(tensor)
        deviation = arguments.get("gain", 1.0) * math.sqrt(2.0 / (fan_in + fan_out))
    elif function in ("kaiming_uniform_", "kaiming_normal_"):
        fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(tensor)
        gain = nn.init.calculate_gain(arguments.get("nonlinearity", "leaky_relu"), arguments.get("a", 0))
        deviation = gain / math.sqrt(fan_in if arguments.get("mode", "fan_in") == "fan_in" else fan_out)
    else:
        return function, arguments
    if function.endswith("normal_"):
        return "normal_", {"mean": 0.0, "std": deviation}
    bound = math.sqrt(3.0) * deviation
    return "uniform_", {"a": -bound, "b": bound}


@contextlib.contextmanager
def _recorders(note: Callable[[str, torch.Tensor, dict[str, Any], _Place | None], None]) -> Iterator[None]:
    """Replace transformers' initialisation functions by ones that only take notes.

    `initialize_weights` itself points torch's own functions at these for as long as it runs.
    """
    originals = {name: getattr(initialization, name) for name in (*initialization.TORCH_INIT_FUNCTIONS, "copy_")}

    def recorder(name: str) -> Callable[..., torch.Tensor]:
        signature = inspect.signature(originals[name])

        def record(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = signature.bind(*args, **kwargs).arguments
            tensor: torch.Tensor = bound.pop("tensor")
            bound.pop("generator", None)
            note(name, tensor, dict(bound), places[-1] if places else None)
            return tensor

        return record

    def initialise_module(model: PreTrainedModel, module: nn.Module, *args: Any) -> None:
        places.append((model, module))
        try:
            of_one_module(model, module, *args)
        finally:
            places.pop()

    places: list[_Place] = []
    of_one_module = PreTrainedModel._initialize_weights
    PreTrainedModel._initialize_weights = initialise_module  # type: ignore[method-assign, assignment]
    try:
        for name in originals:
            setattr(initialization, name, recorder(name))
        yield
    finally:
        PreTrainedModel._initialize_weights = of_one_module  # type: ignore[method-assign]
        for name, original in originals.items():
            setattr(initialization, name, original)
