"""Models that shard between hosts cannot train: what FSDP2 gathers and sums is one layer's weights, once in a pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from coremill.errors import InputError


def refuse_what_cannot_be_gathered(model: nn.Module, layers: Sequence[nn.Module], *, ranks: int) -> None:
    """Raise now, or in the first forward pass where only that tells; before any weight has moved."""
    if ranks > 1:
        _check_runs_all_layers(model)
    _check_layers_share_nothing(model, layers)
    _watch_for_layers_that_run_twice(model, layers)


def _check_runs_all_layers(model: nn.Module) -> None:
    """Raise where a rank would leave out layers whose weights the others gather."""
    for name in ("layerdrop", "decoder_layerdrop"):
        if share := getattr(getattr(model, "config", None), name, 0.0):
            raise InputError(
                f"{name} {share:g} leaves out layers at random, on each rank others",
                where="config.json of the model",
                why="with shard over the wire all ranks take part in gathering each layer's weights",
                do=f"set {name} to 0.0 there, or set parallel.engine=replicate",
            )


def _check_layers_share_nothing(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """FSDP2 would make of a weight that several layers use (Zamba's) one for each."""
    held = [id(parameter) for layer in layers for parameter in layer.parameters()]
    if len(set(held)) < len(held):
        raise InputError(
            f"layers of {type(model).__name__} share weights",
            where="parallel.engine",
            why="between hosts, shard gathers the weights of one layer at a time",
            do="set parallel.engine=replicate",
        )


def _watch_for_layers_that_run_twice(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """A layer that a pass goes through again and again (HRM's) sends its gradients before they are whole. Recomputing
    in backward is no second time."""
    seen: set[nn.Module] = set()
    in_forward = False

    def begin(*_: object) -> None:
        nonlocal in_forward
        seen.clear()
        in_forward = True

    def end(*_: object) -> None:
        nonlocal in_forward
        in_forward = False

    def enter(layer: nn.Module, *_: object) -> None:
        if in_forward and layer in seen:
            raise InputError(
                f"a pass through {type(model).__name__} uses the same layer more than once",
                where="parallel.engine",
                why="between hosts, shard sends a layer's gradients as soon as backward has been through it",
                do="set parallel.engine=replicate",
            )
        seen.add(layer)

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)
    for layer in layers:
        layer.register_forward_pre_hook(enter)
