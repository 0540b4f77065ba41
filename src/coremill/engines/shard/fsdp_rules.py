"""What FSDP2 asks of a model: told here before it cuts one, or made so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from coremill.errors import InputError


def check_runs_all_layers(model: nn.Module) -> None:
    """Raise where a rank would leave out layers whose weights the others gather."""
    for name in ("layerdrop", "decoder_layerdrop"):
        if share := getattr(getattr(model, "config", None), name, 0.0):
            raise InputError(
                f"{name} {share:g} skips layers at random, different ones on each rank",
                where="config.json of the model",
                why="with shard over the wire all ranks take part in gathering each layer's weights",
                do=f"set {name} to 0.0 there, or set parallel.engine=replicate",
            )


def check_layers_share_nothing(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """FSDP2 would make of a weight that several layers use (Zamba's) one for each."""
    held = [id(parameter) for layer in layers for parameter in layer.parameters()]
    if len(set(held)) < len(held):
        raise InputError(
            f"layers of {type(model).__name__} share weights",
            where="parallel.engine",
            why="between hosts, shard gathers the weights of one layer at a time",
            do="set parallel.engine=replicate",
        )


def forget_other_names(model: nn.Module, head: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Take a head's parameters out of the modules around it, which name them too but compute nothing with them (BERT's
    bias): FSDP2 would make a second parameter of each. Where they were, by which name, and which one of the head's."""
    names = {id(parameter): name for name, parameter in head._parameters.items() if parameter is not None}
    around = [module for module in model.modules() if module is not head and head in set(module.modules())]
    found = [
        (module, name, names[id(parameter)])
        for module in around
        for name, parameter in module._parameters.items()
        if id(parameter) in names
    ]
    for module, name, _ in found:
        del module._parameters[name]
    return found


def sum_in_fp32(model: nn.Module) -> None:
    """Have FSDP2 leave sums of gradients as the reduction makes them (engines/wire/collectives.py): it would round them
    to the dtype of the weights at once, before they have arrived. Between the first forward, in which it settles its
    dtypes, and the first backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # One before 2.13.
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            for group in groups:
                if group is not None and group._orig_dtype is not None:
                    group._orig_dtype = torch.float32


def order_gathers(
    first: nn.Module,
    layers: Sequence[nn.Module],
    head: nn.Module,
    *,
    tied: bool,
    keep_gathered: bool,
    fetches_rows: bool,
    head_in_backward: bool,
) -> None:
    """Ask for the next groups' weights before computing with this one's.

    Where all are kept through backward, for all at once, which takes no more memory: the wire never stands still
    between two layers, and no rank waits because another has not come as far."""
    in_order = [first, *layers] if tied else [first, *layers, head]
    forward_order: list[FSDPModule] = [module for module in in_order if isinstance(module, FSDPModule)]
    ahead = len(forward_order) if keep_gathered else 1
    for index, module in enumerate(forward_order):
        module.set_modules_to_forward_prefetch(forward_order[index + 1 : index + 1 + ahead])
    # A lookup's backward reads no weight; neither does a head whose gradients were made in forward. A lookup that
    # brings weights of its own along (Inkling's norm) would read freed memory.
    only_looks_up = isinstance(first, nn.Embedding) and len(list(first.parameters())) == 1
    if not tied and not fetches_rows and only_looks_up:
        first.set_unshard_in_backward(False)  # type: ignore[operator]
    last = first if tied else head
    if not head_in_backward and (only_looks_up or not tied) and isinstance(last, FSDPModule):
        last.set_unshard_in_backward(False)
