"""A model that is not trained, held once for all ranks of a host in the dtype it is computed with.

No masters, no gradients, no moments: adapters are trained beside it. Each rank of the host fills its part of the rows
straight from the files, and computes with all of them: nothing is copied.
"""

from __future__ import annotations

import mmap

import torch
from torch import nn

from coremill.engines.one_host.shared_memory import HostPeers, meet_host_peers
from coremill.errors import InputError
from coremill.hardware.process_memory import count_shared
from coremill.model.build import names_kept_in_fp32
from coremill.model.slices import fill_here, model_name, rows_of_rank
from coremill.world.group import World

ALIGNED_BYTES = 64  # what vector instructions read at once


class HeldBase:
    """Memory for the frozen parameters of a model on meta; `arrived` once every rank of the host filled its part."""

    def __init__(self, world: World, model: nn.Module, compute_dtype: torch.dtype) -> None:
        self._world = world
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        names: dict[nn.Parameter, str] = {}
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and not parameter.requires_grad:
                    places.setdefault(parameter, []).append((module, name))
                    names.setdefault(parameter, model_name(f"{prefix}.{name}"))
        kept = names_kept_in_fp32(model, compute_dtype)
        dtypes = {each: torch.float32 if name in kept else compute_dtype for each, name in names.items()}
        # Hosts may have different numbers of ranks: all meet where any two share a host.
        self._peers: HostPeers | None = None
        if world.size > world.nodes:
            met = meet_host_peers(world, on_every_host=True)
            if isinstance(met, str):
                raise InputError(
                    "ranks of a host cannot have one copy of the model in common",
                    where="parallel.ranks_per_node",
                    why=met,
                    do="set parallel.ranks_per_node: 1, or parallel.engine: shard",
                )
            self._peers = met
        if self._peers is None:
            made = {each: torch.empty(each.shape, dtype=dtype) for each, dtype in dtypes.items()}
        else:
            made = self._laid_out(self._peers, dtypes)
        for parameter, memory in made.items():
            held = nn.Parameter(memory, requires_grad=False)
            if self._peers is not None and parameter.dim():
                fill_here(held, *rows_of_rank(parameter.shape[0], self._peers.rank, self._peers.size))
            for module, name in places[parameter]:
                module._parameters[name] = held

    def _laid_out(self, peers: HostPeers, dtypes: dict[nn.Parameter, torch.dtype]) -> dict[nn.Parameter, torch.Tensor]:
        """In memory that the host's ranks have in common."""
        begin, begins = 0, {}
        for parameter, dtype in dtypes.items():
            begins[parameter] = begin
            begin += -(-parameter.numel() * dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
        self._slot = peers.keep(-(-begin // mmap.PAGESIZE) * mmap.PAGESIZE)
        count_shared(begin // peers.size, begin - begin // peers.size)
        return {
            each: torch.frombuffer(self._slot.map, dtype=dtype, offset=begins[each], count=each.numel()).view(
                each.shape
            )
            for each, dtype in dtypes.items()
        }

    def arrived(self) -> None:
        """All rows are filled, also those of the other ranks."""
        if self._peers is not None and self._peers.size > 1:
            self._peers.wait_for(self._peers.announce(self._slot), self._slot)
