"""Where all ranks run on one host: each holds 1/N of gradients, optimizer state and fp32 weights; those that are
computed with lie once in memory they share (engines/one_host/slots.py).

FSDP2 has no part in it: with nothing to gather there is no order of gathers, and ranks meet only where gradients are
added up. A group of gradients (a layer's, an end's) leaves as soon as backward has made it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from coremill.engines.base import LossFunction, StepTotals, sum_of_squares
from coremill.engines.one_host.cost import RESIDENT_UP_TO_BYTES
from coremill.engines.one_host.shared_memory import HostPeers
from coremill.engines.one_host.slots import HostSums, HostWeight, HostWeights
from coremill.engines.optimizers import OptimizerSettings
from coremill.engines.update import OptimizerUpdate, row_slice
from coremill.errors import InputError
from coremill.model.build import LayerMap, find_layers
from coremill.model.slices import RowSlice, check_has_rows, has_base_apart, is_saved, keep_as
from coremill.plan.types import Choice
from coremill.world.group import World


@dataclass(eq=False)
class _Group:
    """Parameters whose gradients leave together."""

    weights: list[HostWeight]
    is_layer: bool
    made: int = 0  # gradients in this pass
    has_left: bool = False

    @property
    def trained(self) -> int:
        return sum(weight.is_trained for weight in self.weights)

    @property
    def nbytes(self) -> int:
        return sum(weight.whole.nbytes for weight in self.weights)


class OneHostEngine(OptimizerUpdate):
    def __init__(
        self,
        name: str,
        world: World,
        peers: HostPeers,
        optimizer: OptimizerSettings,
        *,
        compute_dtype: torch.dtype,
        in_any_order: bool = False,
    ) -> None:
        """`in_any_order`: a layer's gradients wait for all of them, whatever comes first; what has no use for one of
        its weights (experts, say) keeps all that follow until the end of backward."""
        super().__init__(world, optimizer)
        self.name = name
        self._in_any_order = in_any_order
        self._peers = peers
        self._compute_dtype = compute_dtype
        self.exchange = Choice("memory", f"all {world.size} ranks are on this host: they share it, nothing is sent")
        self._is_finite: bool | None = None  # while gradients are only looked at
        self._used: set[HostWeight] = set()  # by this rank, in this step

    def place(self, model: nn.Module) -> None:
        """Give every parameter its place in the shared memory, and each rank room for its rows."""
        check_has_rows(model)
        parts = find_layers(model)
        ordered = in_backward_order(model)
        parameters = [group.parameters for group in ordered]
        self._weights = HostWeights(
            self._peers,
            self._meter,
            parameters,
            self._compute_dtype,
            trained_have_masters=self._optimizer_settings.has_masters,
            frozen_have_masters=self._optimizer_settings.has_masters and not has_base_apart(model),
        )
        self._groups = [
            _Group(weights, group.is_layer) for weights, group in zip(self._weights.groups, ordered, strict=True)
        ]
        by_parameter = dict(zip((each for group in parameters for each in group), self._weights.weights, strict=True))
        mesh = self._world.mesh()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = by_parameter[parameter].whole
        for weight in by_parameter.values():
            whole = weight.whole
            rows = DTensor.from_local(
                weight.local.detach(), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            keep_as(whole, nn.Parameter(rows, requires_grad=whole.requires_grad))
        self._by_whole = {weight.whole: weight for weight in by_parameter.values()}
        self._named = [(name, self._by_whole[whole]) for name, whole in model.named_parameters()]
        layer_bytes = max(group.nbytes for group in self._groups if group.is_layer)
        self._sums = HostSums(self._peers, self._meter, whole_up_to_bytes=layer_bytes)
        self._unmaps = sum(group.nbytes for group in self._groups) > RESIDENT_UP_TO_BYTES
        self._hook(model, parts)
        self.module = model

    def _hook(self, model: nn.Module, parts: LayerMap) -> None:
        model.register_forward_pre_hook(lambda *_: self._weights.wait(), prepend=True)
        # Autograd's side holds these where no garbage collector looks: they must not hold the engine.
        engine = weakref.proxy(self)
        for place, group in enumerate(self._groups):
            for weight in group.weights:
                if weight.is_trained:
                    weight.whole.register_post_accumulate_grad_hook(lambda _, place=place: engine._is_made(place))  # type: ignore[misc]
        if self._unmaps:
            for module in (*parts.layers, parts.head):
                module.register_forward_hook(self._unmap_used)
            # The loss needs most memory besides the last gradient; until then no gradients of others are read.
            parts.head.register_forward_pre_hook(lambda *_: self._peers.unmap_others())

    def _unmap_used(self, module: nn.Module, *_: object) -> None:
        """After its forward; the head's weights are the lookup's too where these are tied. What is kept in fp32 beside
        this engine (engines/kept_in_fp32.py) lies elsewhere."""
        own = (self._by_whole.get(whole) for whole in module.parameters())
        self._weights.unmap_others([weight for weight in own if weight is not None])

    def start(self) -> None:
        """Rows are filled: show them to all."""
        self._weights.publish()
        self._make_optimizer()

    def trainable(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's rows of what is trained; parameters with fewer rows than ranks may have none here."""
        return [(name, weight.local) for name, weight in self._named if weight.is_trained and weight.local.numel()]

    def slices(self) -> list[RowSlice]:
        rank, ranks = self._world.rank, self._world.size
        saved = [(name, weight) for name, weight in self._named if is_saved(self.module, weight.whole)]
        return [row_slice(name, weight.whole, weight.local, rank, ranks) for name, weight in saved]

    def forward_backward(self, loss_function: LossFunction, *, is_last: bool) -> float:
        """One micro-batch; its gradients are added to those of the earlier ones as they leave."""
        loss = loss_function(self.module)
        self._look_at_loss(loss)
        self._sums.is_whole = self._move_rows if self.moves_inside and is_last else lambda weight: None
        loss.backward()
        self._leave(self._groups)
        for group in self._groups:
            group.has_left = False
            group.made = 0
        return float(loss.detach())

    def _is_made(self, place: int) -> None:
        """Autograd has put a gradient of this group in place. On every rank groups leave in the same order."""
        group = self._groups[place]
        if group.has_left:
            raise InputError(
                "a gradient was made after those of its layer had been sent",
                where="parallel.engine",
                why="the model uses weights in another order than its layers stand in",
                do="set parallel.engine=replicate",
            )
        group.made += 1
        if group.is_layer and not self._in_any_order:
            # Backward is through with the layers above, also with what it found no use for (experts, say).
            self._leave(self._groups[:place])
        # One that became whole before an earlier one leaves right after it.
        for first in self._groups:
            if first.made < first.trained:
                break
            self._leave([first])

    def _leave(self, groups: Sequence[_Group]) -> None:
        for group in groups:
            if group.has_left:
                continue
            group.has_left = True
            if self._unmaps:
                self._weights.unmap_others(group.weights)
            trained = [weight for weight in group.weights if weight.is_trained]
            if self._is_finite is None:
                self._used.update(weight for weight in trained if weight.whole.grad is not None)
                if trained:
                    self._sums.add(trained)
            else:
                for weight in trained:
                    gradient, weight.whole.grad = weight.whole.grad, None
                    self._is_finite &= gradient is None or bool(gradient.isfinite().all())

    def _move_rows(self, weight: HostWeight) -> None:
        """All ranks have made their gradients of it: none computes with it any more in this step."""
        gradient = weight.local.grad
        if gradient is None:
            return
        # The optimizer knows no weight of which this rank has no rows.
        if not gradient.numel() or self._move(weight.local, gradient, is_used=weight in self._used):
            weight.local.grad = None

    def reduce(self, loss: float, votes: Sequence[float] = ()) -> StepTotals:
        """Wait for the last sums; norms of all ranks' rows add up to the whole."""
        self._sums.flush()
        squares = sum_of_squares(weight.local.grad for _, weight in self._named if weight.local.grad is not None)
        squares += self._squares  # of what has moved inside of backward
        is_used = {weight.local: weight in self._used for _, weight in self._named if weight.is_trained}
        self._used.clear()
        return self._agree(loss, squares, votes, is_used)

    def examine(self, loss_function: LossFunction) -> bool:
        """Nothing is exchanged."""
        self._is_finite = True
        try:
            self.forward_backward(loss_function, is_last=True)
            return self._is_finite
        finally:
            self._is_finite = None

    def skip_step(self) -> None:
        """All ranks are through with the weights that were: they agreed on the norm. Show what this rank's became."""
        for _, weight in self._named:
            weight.local.grad = None
        self._weights.publish()

    def require_equal(self, moment: str) -> None:
        """Each rank moves rows of its own: there is nothing to compare."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose gradients are made one after the other."""

    parameters: list[nn.Parameter]
    is_layer: bool


def in_backward_order(model: nn.Module) -> list[ParameterGroup]:
    """The head, the layers from the last to the first, the rest, the lookup, which has what is tied to it: gradients
    leave in this order, the same on every rank."""
    parts = find_layers(model)
    seen: set[nn.Parameter] = set()

    def group(module: nn.Module, *, is_layer: bool = False) -> ParameterGroup:
        fresh = [parameter for parameter in module.parameters() if parameter not in seen]
        if is_layer:
            fresh = [parameter for parameter in fresh if uses[parameter] == 1]
        seen.update(fresh)
        return ParameterGroup(fresh, is_layer)

    # What layers share belongs to none: Zamba 2 uses one part of it in this layer, another part in that.
    uses = Counter(parameter for layer in parts.layers for parameter in layer.parameters())
    layers = [group(layer, is_layer=True) for layer in parts.layers]
    lookup, head = group(parts.embedding), group(parts.head)
    # Of the rest, a final norm's gradient is made early, that of learned positions last.
    ordered = [head, *reversed(layers), group(model), lookup]
    return [each for each in ordered if each.parameters]
