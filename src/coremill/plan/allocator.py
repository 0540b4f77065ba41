"""What a process takes beyond what is alive in it: what the allocator keeps, threads, and code that is paged in.

Ranks keep freed memory (rank_environment.py), so a rank's resident memory is the allocator's high-water mark: what is
alive at the peak, plus holes. Torch allocates through mimalloc in its ARM wheels and through glibc's malloc elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MIB = 2**20
HUGE_PAGE_BYTES = 2 * MIB

# A block as large as all logits is freed and taken several times a step; in between, smaller ones are laid into the
# hole it left, and the next one of its size lies elsewhere. Of these blocks, besides the moving share (three runs
# with 201 and 268 MB of them, fp32, glibc).
WHOLE_LOGITS_SHARE = 0.9
# Beside a base, fitted to 15 runs of 27 to 196 M parameters (fp32, two Skylake cores): of the state's share, since no
# gradients of its size come and go; of the moving share, where adapters have dropout (one run); and of what moves,
# where layers are computed again: small gradients of adapters lie between blocks that go at once (six runs).
BASE_SHARE = 1 / 3
DROPOUT_HOLES = 3
RECOMPUTED_SHARE = 0.75


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """What a rank's memory has beside its tensors on one platform, measured."""

    runtime_bytes: int  # thread stacks, oneDNN, autograd and loader code, beyond an interpreter that did one tiny step
    gloo_bytes: int  # its threads and rings
    state_share: (
        float  # of weights and optimizer state: rounding to huge pages, holes that gradients of their size left
    )
    moving_share: float  # of what comes and goes in a step: holes between blocks of different sizes
    linear_copies_weight: bool  # whether a product makes a turned copy of its weight
    keeps_holes_of_weights: bool = False  # that building leaves, where the first bytes of each were
    differing_rows_bytes: int = 0  # where passes differ in length: what products keep for each, and holes between

    def slack_bytes(self, *, state: int, moving: int, whole_logits: int = 0, base: BaseSlack | None = None) -> int:
        """Holes and rounding at the peak; whole logits, which are part of what moves, leave more.

        Gradients fill the holes that building left of weights. Beside a base there are none of their sizes: activations
        lie in them, and make holes of their own only where these are not enough."""
        holes = self.moving_share * moving
        if base is not None:
            holes *= DROPOUT_HOLES if base.has_dropout else 1
            of_building = base.hole_bytes if self.keeps_holes_of_weights else 0
            holes = max(holes, of_building) + BASE_SHARE * self.state_share * base.bytes
            holes += RECOMPUTED_SHARE * moving if base.recomputes else 0
        return int(self.state_share * state + holes + WHOLE_LOGITS_SHARE * whole_logits)


@dataclass(frozen=True, kw_only=True)
class BaseSlack:
    """A model that adapters are trained beside, as far as holes depend on it."""

    bytes: int  # of it on this rank
    hole_bytes: int  # that building left of its weights
    has_dropout: bool
    recomputes: bool  # its layers in backward


MIMALLOC = Allocator(
    runtime_bytes=45 * MIB, gloo_bytes=4 * MIB, state_share=0.10, moving_share=0.40, linear_copies_weight=True
)
GLIBC = Allocator(
    runtime_bytes=30 * MIB,
    gloo_bytes=4 * MIB,
    state_share=0.03,
    moving_share=0.25,
    linear_copies_weight=False,
    keeps_holes_of_weights=True,
)
# The same allocator under fp32 products, fitted to 23 runs of 6 to 196 M parameters on two Skylake cores, whose own
# memory scatters by 6 % around it.
GLIBC_FP32 = Allocator(
    runtime_bytes=50 * MIB,
    gloo_bytes=4 * MIB,
    state_share=0.18,
    moving_share=0.22,
    linear_copies_weight=False,
    keeps_holes_of_weights=True,
    differing_rows_bytes=45 * MIB,  # nine runs of encoders
)


def hole_bytes_of(weight_numels: Iterable[int]) -> int:
    """What building leaves resident of weights that were made for a moment, in fp32: their first huge page."""
    return sum(min(HUGE_PAGE_BYTES, 4 * numel) for numel in weight_numels)


def allocator_of(architecture: str, dtype: str) -> Allocator:
    """What torch's wheels allocate with on an architecture, as fitted for a dtype."""
    return MIMALLOC if architecture == "aarch64" else GLIBC_FP32 if dtype == "fp32" else GLIBC
