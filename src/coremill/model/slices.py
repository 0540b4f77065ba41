"""Which rows of a parameter this rank holds, and the memory they live in.

A parameter is a plain tensor (all rows) or a DTensor cut on dim 0 over a one-dimensional mesh, by FSDP2's rule: rank r
of N holds rows [r*c, (r+1)*c) with c = ceil(rows/N), the last ranks fewer or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from coremill.errors import InputError

# Where a parameter is something to compute with, what holds its values (engines/one_host/engine.py).
_KEPT_AS = "_coremill_kept_as"

# Of a parameter that lies once for several ranks: the rows that this one fills.
_FILLED_HERE = "_coremill_filled_here"
# On a model whose frozen weights stay in the files they come from: only what is trained is saved (model/lora.py).
_BASE_APART = "_coremill_base_apart"

# Wrappers put their own step into a parameter's name; the model's own name is what files and seeds go by.
WRAPPER_STEPS = ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer.")


@dataclass(frozen=True)
class RowSlice:
    """This rank's rows of one parameter: `local` is the memory to write, `start` its first row in the whole."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    stop: int
    local: torch.Tensor

    @property
    def row_elements(self) -> int:
        return torch.Size(self.shape[1:]).numel()

    @property
    def bytes(self) -> int:
        return self.local.numel() * self.local.element_size()


def rows_of_rank(rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row and end of what one rank holds."""
    chunk = -(-rows // size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def check_has_rows(model: nn.Module) -> None:
    """Raise where a parameter cannot be cut by rows."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise InputError(
                f"shard gives each rank rows of every parameter, and {model_name(name)} is a single number",
                where="parallel.engine",
                do="set parallel.engine=replicate",
            )


def keep_as(parameter: nn.Parameter, holder: nn.Parameter) -> None:
    """A parameter's values are read from and written to another; it only follows."""
    setattr(parameter, _KEPT_AS, holder)


def kept(parameter: nn.Parameter) -> nn.Parameter:
    """What holds a parameter's values: as a rule itself."""
    holder: nn.Parameter = getattr(parameter, _KEPT_AS, parameter)
    return holder


def fill_here(parameter: nn.Parameter, start: int, stop: int) -> None:
    """Only these rows of it are this rank's to fill; others of the host fill the rest of the same memory."""
    setattr(parameter, _FILLED_HERE, (start, stop))


def keep_base_apart(model: nn.Module) -> None:
    """Frozen weights are those of the model's files and stay there."""
    setattr(model, _BASE_APART, True)


def has_base_apart(model: nn.Module) -> bool:
    return getattr(model, _BASE_APART, False)


def is_saved(model: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a parameter belongs to the state of a run."""
    return parameter.requires_grad or not has_base_apart(model)


@torch.no_grad()
def slice_of(name: str, tensor: torch.Tensor, rank: int, world_size: int) -> RowSlice:
    """The rows that this rank holds of a parameter or buffer."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        start, stop = getattr(tensor, _FILLED_HERE, (0, shape[0] if shape else 1))
        local = tensor.detach()
        return RowSlice(name, shape, start, stop, local[start:stop] if shape else local)
    if tuple(tensor.placements) != (Shard(0),):
        raise NotImplementedError(f"{name} is placed as {tensor.placements}, not as Shard(0) on one mesh dimension")
    start, stop = rows_of_rank(shape[0], rank, world_size)
    local = tensor.to_local().detach()
    if tuple(local.shape) != (stop - start, *shape[1:]):
        held = f"rank {rank} of {world_size} holds {tuple(local.shape)} of {name}"
        raise AssertionError(f"{held}, not rows {start} to {stop}")
    return RowSlice(name, shape, start, stop, local)


def model_name(name: str) -> str:
    """A parameter's name without the steps that wrappers add."""
    for step in WRAPPER_STEPS:
        name = name.replace(step, "")
    return name


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of the model holds: parameters by every name they have, and buffers that are saved."""
    tensors: dict[str, torch.Tensor] = {
        model_name(name): kept(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[model_name(f"{prefix}.{name}" if prefix else name)] = buffer
    return tensors


def materialise(model: nn.Module) -> None:
    """Give every meta parameter, plain or DTensor, uninitialised CPU memory; buffers and ties stay as they are.

    `Module.to_empty` would do the same to real buffers, and make two parameters out of a tied one.
    """
    fresh: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in fresh:
                empty = torch.empty_like(parameter, device="cpu")
                fresh[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = fresh[id(parameter)]
    if isinstance(model, FSDPModule):
        # FSDP2 overrides _apply: it swaps the tensors in place, pads uneven shards and keeps its references.
        apply: Callable[[Callable[[torch.Tensor], torch.Tensor]], nn.Module] = model._apply
        apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)


def narrow(model: nn.Module, dtype: torch.dtype, *, but: Collection[str] = (), frozen_only: bool = False) -> None:
    """Parameters on meta in the dtype that they are computed with, `but` those of these names; tied ones still one."""
    narrowed: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or (frozen_only and parameter.requires_grad):
                continue
            if model_name(f"{prefix}.{name}" if prefix else name) in but:
                continue
            if parameter not in narrowed:
                narrowed[parameter] = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
            module._parameters[name] = narrowed[parameter]
