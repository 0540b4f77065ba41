"""Whether ranks that should hold the same weights do, to the bit.

Replicas that drifted apart would train on without a word: gradients are summed over all, and only the weights they are
applied to differ. So weights are compared where a wrong one would spread: after loading, before every save, and after
the last step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from coremill.errors import Drifted
from coremill.world.group import World

# Summed to one number of 64 bits, which is hashed: 256 words are 2 KiB of weights.
WORDS_PER_SUM = 256


def require_equal_replicas(world: World, parameters: Sequence[tuple[str, torch.Tensor]], moment: str) -> None:
    """Every rank calls it with the fp32 weights it holds, in the same order; raises Drifted on all alike."""
    if world.size == 1:
        return
    digests = [digest_of_bits(weight) for _, weight in parameters]
    whole = hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
    told = world.gather(whole)
    if len(set(told)) == 1:
        return
    by_tensor = list(zip(*world.gather(digests), strict=True))
    names = [name for (name, _), each in zip(parameters, by_tensor, strict=True) if len(set(each)) > 1]
    cpus = world.gather(torch.backends.cpu.get_cpu_capability())
    error = drifted(told, world.hostnames, names, moment, cpus)
    # Each host may have a screen of its own; under mpirun there is one.
    one_screen = world.identity.launcher in ("open-mpi", "hydra")
    error.silent = world.rank != 0 if one_screen else world.local_rank != 0
    raise error


def digest_of_bits(weight: torch.Tensor) -> str:
    """Of the bits: sums of words as integers, by all threads, then a hash of these: over ten times as quick."""
    bits = weight.detach().reshape(-1)
    if bits.storage_offset() * bits.element_size() % 8:
        bits = bits.clone()
    bits = bits.view(torch.uint8)
    whole = bits.numel() - bits.numel() % (8 * WORDS_PER_SUM)
    digest = hashlib.blake2b(bits[whole:].numpy().data, digest_size=8)
    digest.update(bits[:whole].view(torch.int64).view(-1, WORDS_PER_SUM).sum(1).numpy().data)
    return digest.hexdigest()


def drifted(
    told: Sequence[str], hostnames: Sequence[str], names: Sequence[str], moment: str, cpus: Sequence[str]
) -> Drifted:
    """The words, from the digest of each rank and the parameters that differ. The majority is taken to be right."""
    groups = [[rank for rank, other in enumerate(told) if other == digest] for digest in dict.fromkeys(told)]
    largest = max(groups, key=len)
    if 2 * len(largest) > len(told):
        odd = [rank for rank in range(len(told)) if rank not in largest]
        holds = "holds" if len(odd) == 1 else "hold"
        who = f"{_listed(odd, hostnames)} {holds} different weights than the other {len(largest)}"
    else:
        who = " and ".join(_listed(group, hostnames) for group in groups) + " hold different weights"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    kinds = "" if len(set(cpus)) == 1 else f"; their CPUs compute differently: {', '.join(dict.fromkeys(cpus))}"
    return Drifted(
        f"{who} {moment}",
        where=f"{names[0]}{more}" if names else None,
        why="replicas start from the same weights and get the same gradients: these are not to be trusted" + kinds,
        do="compare the model's files on these hosts (sha256sum), then their CPUs and memory; the same command goes on"
        " from the newest checkpoint, which was compared before it was saved",
    )


def _listed(ranks: Sequence[int], hostnames: Sequence[str]) -> str:
    named = [f"rank {rank} on {hostnames[rank]}" for rank in ranks[:4]]
    return ", ".join(named) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
