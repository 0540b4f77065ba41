"""Shard: every rank holds 1/N of weights, gradients and optimizer state (FSDP2, one group per decoder layer).

Embedding and head are groups of their own, or one group where they are tied: as two groups torch 2.13 raises and 2.11
silently unties them. The mesh is explicit: on a machine that also has a GPU, FSDP2 would take the GPU by itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from coremill.engines.base import LossFunction, StepTotals, sum_of_squares
from coremill.engines.optimizers import OptimizerSettings
from coremill.engines.shard.embedding import ShardedEmbedding
from coremill.engines.shard.fsdp_rules import (
    check_layers_share_nothing,
    check_runs_all_layers,
    forget_other_names,
    order_gathers,
    sum_in_fp32,
)
from coremill.engines.update import OptimizerUpdate, row_slice
from coremill.engines.wire.codec import Codec
from coremill.engines.wire.collectives import AllGather, BufferPool, ReduceScatter, install
from coremill.engines.wire.exchange import Exchange
from coremill.model.build import LayerMap, find_layers, has_plain_lookup
from coremill.model.slices import RowSlice, check_has_rows, has_base_apart, is_saved, materialise, narrow
from coremill.plan.types import Choice
from coremill.world.group import World

# FSDP2 lays out zeros in the place of gradients that backward did not make; since torch 2.13.
FILLS_IN = "set_reduce_scatter_unused_params"


class ShardEngine(OptimizerUpdate):
    name = "shard"

    def __init__(
        self,
        world: World,
        optimizer: OptimizerSettings,
        *,
        compute_dtype: torch.dtype,
        gradient_codec: Codec,
        weight_wire_dtype: torch.dtype | None,
        keep_gathered: bool,
        accumulates: bool,
        head_in_backward: bool,
        why_wire: str,
        named_rows: bool = True,
    ) -> None:
        """`accumulates`: a step has several micro-batches; `why_wire`: why ranks do not share memory; `named_rows`:
        ranks fetch the rows of a lookup table that their tokens name."""
        super().__init__(world, optimizer)
        self._names_rows = named_rows and world.size > 1
        self._compute_dtype = compute_dtype
        self._keep_gathered = keep_gathered
        # Where weights stay whole through a step, so do gradients: added up in fp32 and sent once.
        self._whole_gradients = keep_gathered and accumulates
        self._head_in_backward = head_in_backward
        self._pool = BufferPool()
        self._gradient_codec = gradient_codec
        self._weight_wire_dtype = weight_wire_dtype
        self._wire = Exchange(self._meter, world.flows)
        shares_cards = world.nodes > 1 and world.nodes < world.size
        self._all_gather = AllGather(self._wire, weight_wire_dtype, as_ring=shares_cards)
        self._reduce_scatter = ReduceScatter(self._wire, self._pool, gradient_codec)
        self.exchange = Choice("wire", why_wire if world.size > 1 else "one rank: nothing is exchanged")
        self._table: ShardedEmbedding | None = None  # an embedding of which ranks fetch rows
        self._locals: list[tuple[str, DTensor, nn.Parameter]] = []
        self._locals_are_new = True  # no pass has been made with them
        self._by_name: dict[str, nn.Parameter] = {}  # these rows by every name that the model has for them
        self._runs: Counter[nn.Module] = Counter()  # of layers in this forward pass: HRM has them run several times
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}  # gradients of this step's earlier micro-batches

    def place(self, model: nn.Module) -> None:
        """Cut the model into groups while it is still on the meta device, then give each rank its empty share."""
        check_has_rows(model)
        if self._world.size > 1:
            check_runs_all_layers(model)
        parts = find_layers(model)
        check_layers_share_nothing(model, parts.layers)
        if has_base_apart(model) or not self._optimizer_settings.has_masters:
            narrow(model, self._compute_dtype, frozen_only=self._optimizer_settings.has_masters)
        # Gradients are laid out as backward made them where they travel like that, and summed in fp32 all the same.
        travel_as_made = self._gradient_codec.dtype == self._compute_dtype and not self._whole_gradients
        policy = MixedPrecisionPolicy(
            param_dtype=None if self._compute_dtype == torch.float32 else self._compute_dtype,
            reduce_dtype=self._compute_dtype if travel_as_made else torch.float32,
            # Rotary tables and masks arrive in fp32 on purpose; only weights decide the arithmetic.
            cast_forward_inputs=self._compute_dtype != torch.float32,
        )
        mesh = self._world.mesh()
        # FSDP2 pads each parameter to a multiple of the ranks; 1 % covers that for any layer worth sharding.
        largest_layer = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in parts.layers)
        self._pool.keep_up_to_numel = int(1.01 * largest_layer) + 4096 * self._world.size
        parameters_before = sum(parameter.numel() for parameter in model.parameters())

        def group(*modules: nn.Module) -> None:
            """Unless all their weights are kept in fp32 beside this engine: there is nothing to gather, and FSDP2 would
            round what goes into them."""
            if any(True for module in modules for _ in module.parameters()):
                fully_shard(list(modules), mesh=mesh, mp_policy=policy, reshard_after_forward=not self._keep_gathered)

        self._table = self._sharded_embedding(parts, mesh)
        other_names = forget_other_names(model, parts.head)
        if parts.tied:
            group(parts.embedding, parts.head)
        else:
            if self._table is None:
                group(parts.embedding)
            group(parts.head)
        for layer in parts.layers:
            group(layer)
            layer.register_forward_pre_hook(self._count_run)
        fully_shard(
            model,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=not self._keep_gathered,
            ignored_params=set() if self._table is None else {self._table.parameter},
        )
        parameters_after = sum(parameter.numel() for parameter in model.parameters())
        assert parameters_before == parameters_after, f"{parameters_before} parameters became {parameters_after}"

        install(model, self._all_gather, self._reduce_scatter)
        self._whole = UnshardedParameters(model, gradient_dtype=torch.float32 if self._whole_gradients else None)
        if not hasattr(FSDPModule, FILLS_IN):
            apart = {self._table.parameter} if self._table else set()
            self._reduce_scatter.whole_numels = frozenset(_laid_out_numels(model, apart, self._world.size))
        first = parts.embedding if isinstance(parts.embedding, FSDPModule) else model
        if self._table is not None:
            model.register_forward_pre_hook(self._ask_for_rows, prepend=True, with_kwargs=True)
        order_gathers(
            first,
            parts.layers,
            parts.head,
            tied=parts.tied,
            keep_gathered=self._keep_gathered,
            fetches_rows=self._table is not None,
            head_in_backward=self._head_in_backward,
        )
        materialise(model)
        for holder, name, head_name in other_names:
            holder._parameters[name] = parts.head._parameters[head_name]
        self.module = model

    def _ask_for_rows(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before FSDP2's own hook asks for weights: behind these on the wire, rows would come late."""
        token_ids = kwargs.get("input_ids", args[0] if args else None)
        if self._table is not None and isinstance(token_ids, torch.Tensor):
            self._table.ask(token_ids)

    def _sharded_embedding(self, parts: LayerMap, mesh: DeviceMesh) -> ShardedEmbedding | None:
        """Of an embedding that is a lookup and nothing else; None where there is one rank."""
        if parts.tied or not self._names_rows or not has_plain_lookup(parts.embedding):
            return None
        assert isinstance(parts.embedding, nn.Embedding)
        if parts.embedding._parameters["weight"] is None:  # kept in fp32 beside this engine
            return None
        return ShardedEmbedding(
            parts.embedding,
            mesh,
            self._wire,
            self._reduce_scatter,
            self._gradient_codec,
            wire_dtype=self._weight_wire_dtype or self._compute_dtype,
            compute_dtype=self._compute_dtype,
        )

    def start(self) -> None:
        """Have FSDP2 settle its storage, then take this rank's rows as plain tensors: no DTensor dispatch."""
        assert isinstance(self.module, FSDPModule)
        self.module.unshard()
        self.module.reshard()
        # Autograd's side holds hooks where no garbage collector looks: they must not hold the engine.
        engine = weakref.proxy(self)
        for name, parameter in self.module.named_parameters():
            assert isinstance(parameter, DTensor)
            local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
            if local.requires_grad and local.dtype != torch.float32:
                local.grad_dtype = parameter.grad_dtype = torch.float32
            self._locals.append((name, parameter, local))
            if local.requires_grad and self.moves_inside and self._world.size == 1:
                parameter.register_post_accumulate_grad_hook(lambda each: engine._is_placed(each))  # type: ignore[no-untyped-call]
        by_parameter: dict[torch.Tensor, nn.Parameter] = {parameter: local for _, parameter, local in self._locals}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            self._by_name[name] = by_parameter[parameter]
        if self._table is not None:
            whole: torch.Tensor = self._table.parameter
            self._table.rows = next(local for _, parameter, local in self._locals if parameter is whole)
        self._make_optimizer()

    def trainable(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's rows of what is trained; parameters with fewer rows than ranks may have none here."""
        return [(name, local) for name, _, local in self._locals if local.requires_grad and local.numel()]

    def slices(self) -> list[RowSlice]:
        rank, ranks = self._world.rank, self._world.size
        saved = [each for each in self._locals if is_saved(self.module, each[2])]
        return [row_slice(name, parameter, local, rank, ranks) for name, parameter, local in saved]

    def forward_backward(self, loss_function: LossFunction, *, is_last: bool) -> float:
        """One micro-batch; gathered weights stay through accumulation where the plan keeps them."""
        assert isinstance(self.module, FSDPModule)
        if self._keep_gathered:
            self.module.set_requires_gradient_sync(is_last)
            self.module.set_reshard_after_backward(is_last)
        self._runs.clear()
        self._reduce_scatter.is_whole = self._move_rows if self.moves_inside and is_last else None
        loss = loss_function(self.module)
        self._look_at_loss(loss)
        if self._locals_are_new and not self._optimizer_settings.has_masters:
            sum_in_fp32(self.module)
        self._locals_are_new = False
        self._reduce_scatter.waits = max(self._runs.values(), default=1) > 1
        if self._whole_gradients and is_last:
            self._whole.make_missing_gradients()
        loss.backward()
        if not self._keep_gathered and (not is_last or (self._earlier and not self.moves_inside)):
            self._set_aside()
        return float(loss.detach())

    def _count_run(self, layer: nn.Module, _: object) -> None:
        if torch.is_grad_enabled():
            self._runs[layer] += 1

    def _set_aside(self) -> None:
        """Add this micro-batch's gradients to the earlier ones; FSDP2 would add to results still on the wire."""
        self._reduce_scatter.flush()
        gradients = self._gradients()
        for local, gradient in gradients.items():
            if local in self._earlier:
                self._earlier[local] += gradient
            else:
                self._earlier[local] = gradient
        for _, parameter, _ in self._locals:  # those the model has now are whole where weights are kept
            parameter.grad = None

    def _gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        gradients = {}
        for _, parameter, local in self._locals:
            if self._table is not None and self._table.rows is local:
                gradient = self._table.take_gradient()
            else:
                gradient = None if parameter.grad is None else parameter.grad.to_local()  # type: ignore[attr-defined]
            if gradient is not None:
                gradients[local] = gradient
        return gradients

    def _move_rows(self, summed: torch.Tensor) -> None:
        """The gradients of a group have arrived, in this memory: nothing gathers its weights any more in this step."""
        memory = summed.untyped_storage().data_ptr()
        used = self._used_here()
        for _, parameter, local in self._locals:
            rows = None if parameter.grad is None else parameter.grad.to_local()  # type: ignore[attr-defined]
            if rows is None or not rows.numel() or rows.untyped_storage().data_ptr() != memory:
                continue
            self._move_whole(parameter, local, rows, is_used=local in used)

    def _used_here(self) -> set[nn.Parameter]:
        """What this rank has had a use for in this step so far."""
        return {self._by_name[name] for name in self._whole.used if name in self._by_name}

    def _move_whole(self, parameter: DTensor, local: nn.Parameter, rows: torch.Tensor, *, is_used: bool) -> None:
        if local in self._earlier:
            rows += self._earlier.pop(local)
        if self._move(local, rows, is_used=is_used):
            parameter.grad = None

    def _is_placed(self, parameter: DTensor) -> None:
        """One rank sends nothing: FSDP2 puts its gradients in place without asking for a sum."""
        if self._reduce_scatter.is_whole is None:
            return  # one more pass follows
        local = next(local for _, each, local in self._locals if each is parameter)
        if local in self._used_here():
            self._move_whole(parameter, local, parameter.grad.to_local(), is_used=True)  # type: ignore[union-attr]
        else:  # zeros
            parameter.grad = None

    def reduce(self, loss: float, votes: Sequence[float] = ()) -> StepTotals:
        """Wait for the last sums; norms of all ranks' rows add up to the whole."""
        self._reduce_scatter.flush()
        if self._earlier and self.moves_inside:
            self._set_aside()
        gradients, self._earlier = self._earlier or self._gradients(), {}
        for local, gradient in gradients.items():
            local.grad = gradient
        squares = sum_of_squares(gradients.values()) + self._squares  # of what has moved inside of backward
        used = {self._by_name[name] for name in self._whole.take_used() if name in self._by_name}
        if self._table is not None and self._table.rows is not None:
            used.add(self._table.rows)  # every rank looks something up
        is_used = {local: local in used for _, _, local in self._locals if local.requires_grad}
        return self._agree(loss, squares, votes, is_used)

    def examine(self, loss_function: LossFunction) -> bool:
        """A whole exchange, with a look at what this rank puts into it."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(True)
        self.module.set_reshard_after_backward(True)
        finite = True

        def look(gradients: torch.Tensor) -> None:
            nonlocal finite
            finite = finite and bool(gradients.isfinite().all())

        self._reduce_scatter.look, self._reduce_scatter.is_whole = look, None
        try:
            loss = loss_function(self.module)
            if self._whole_gradients:
                self._whole.make_missing_gradients()
            loss.backward()
            self._reduce_scatter.flush()
        finally:
            self._reduce_scatter.look = None
        self._whole.take_used()
        self.module.zero_grad(set_to_none=True)
        if self._table is not None:
            self._table.take_gradient()
        return finite

    def skip_step(self) -> None:
        for _, parameter, local in self._locals:
            parameter.grad = None
            local.grad = None

    def require_equal(self, moment: str) -> None:
        """Each rank moves rows of its own: there is nothing to compare."""


def _laid_out_numels(model: nn.Module, apart: Collection[nn.Parameter], ranks: int) -> Iterator[int]:
    """Of the gradients of each group, by how FSDP2 lays them out: as many rows for every rank."""
    taken = set(apart)
    for module in reversed(list(model.modules())):  # those inside of others first
        if isinstance(module, FSDPModule):
            own = [each for each in module.parameters() if each not in taken]
            taken.update(own)
            yield sum(-(-each.shape[0] // ranks) * ranks * each.shape[1:].numel() for each in own if each.requires_grad)


class UnshardedParameters:
    """What FSDP2 computes with, known from each group's first forward on: whether backward makes gradients of it.

    Ranks that use other parts of a layer (experts, say) must lay out the same gradients: FSDP2 puts zeros in the place
    of those that were not made, and from its sums nobody can tell them any more."""

    def __init__(self, model: nn.Module, gradient_dtype: torch.dtype | None) -> None:
        """`gradient_dtype`: in which gradients are added up while they are whole; None: as they are made."""
        self._gradient_dtype = gradient_dtype
        self._trained: set[nn.Parameter] = set()
        self._used: set[str] = set()
        if isinstance(model, FSDPModule) and hasattr(model, FILLS_IN):
            model.set_reduce_scatter_unused_params(True)
        for name, module in model.named_modules():
            self._watch(name, module)

    def _watch(self, group_name: str, group: nn.Module) -> None:
        if not isinstance(group, FSDPModule):
            return
        used = self._used  # autograd's side holds what is given to it: not the engine

        def see(module: nn.Module, _: object) -> None:
            handle.remove()
            for name, parameter in module.named_parameters(group_name):
                if isinstance(parameter, DTensor) or not parameter.requires_grad or parameter in self._trained:
                    continue
                self._trained.add(parameter)
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: used.add(name))  # type: ignore[misc]
                if self._gradient_dtype is not None:
                    parameter.grad_dtype = self._gradient_dtype

        handle = group.register_forward_pre_hook(see)

    def make_missing_gradients(self) -> None:
        """Zeros where no earlier pass made one, before the pass that sends: FSDP2's would have another dtype."""
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=self._gradient_dtype)

    @property
    def used(self) -> set[str]:
        """Names of parameters of which a gradient was made since they were taken last."""
        return set(self._used)

    def take_used(self) -> set[str]:
        taken = self.used
        self._used.clear()
        return taken
