"""Which kernels a training step really runs: `python -m benchmarks.amx_kernels [--dtype auto|bf16|fp32]`.

One step of coremill's own command under ONEDNN_VERBOSE=1; every matmul and inner product that oneDNN executes is
counted by form (forward, input gradient, weight gradient) and implementation. On a CPU with AMX in bf16 each linear
should be a `brg...amx` one in all three forms, and there should be none missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import coremill_run, peers, processes
from benchmarks.workload import LLAMA_SHAPE, SEQUENCE_LENGTH

# One micro-batch of four rows: 2048 tokens is no dimension of the model, so that shapes can be told apart.
ROWS = 4
FORMS = ("forward", "input gradient", "weight gradient")


@dataclass(frozen=True)
class Product:
    """One executed product: [M, K] times [K, N]."""

    primitive: str  # matmul, inner_product
    implementation: str
    prop_kind: str
    source_dtype: str
    weights_tag: str  # memory layout: ab as stored, ba transposed, else a packed one
    m: int
    k: int
    n: int


def read_products(lines: Iterable[str]) -> Iterator[Product]:
    """The products among oneDNN's verbose lines; lines of others, prefixed or not, are passed over."""
    for line in lines:
        start = line.find("onednn_verbose,")
        if start < 0:
            continue
        fields = line[start:].strip().split(",")
        # Newer versions put "v1" and a time stamp may follow it: look for the word exec instead of counting.
        if "exec" not in fields:
            continue
        after = fields[fields.index("exec") + 1 :]
        if len(after) < 7 or after[1] not in ("matmul", "inner_product"):
            continue
        shape = _shape(after[1], after[-2])
        if shape is None:
            continue
        memories = _memories(after[4])
        yield Product(after[1], after[2], after[3], memories["src"][0], memories["wei"][1], *shape)


def _memories(descriptors: str) -> dict[str, tuple[str, str]]:
    """{src: (dtype, layout), wei: ...} out of `src:bf16::blocked:ab::f0 wei:...`; oneDNN before 3.5 wrote src_bf16."""
    found: dict[str, tuple[str, str]] = {"src": ("?", "?"), "wei": ("?", "?")}
    for descriptor in descriptors.split():
        fields = descriptor.split(":")
        if "_" in fields[0]:
            fields = [*fields[0].split("_", 1), *fields[1:]]
        if len(fields) > 4 and fields[0] in found:
            found[fields[0]] = (fields[1], fields[4])
    return found


def _shape(primitive: str, problem: str) -> tuple[int, int, int] | None:
    """(M, K, N); None for batched products, which belong to attention."""
    try:
        if primitive == "inner_product":  # mb2048ic512oc1536
            rest = problem.removeprefix("mb")
            tokens, rest = rest.split("ic")
            inputs, outputs = rest.split("oc")
            return int(tokens), int(inputs), int(outputs)
        left, right = (part.split("x") for part in problem.split(":")[:2])
        if len(left) != 2 or len(right) != 2:
            return None
        return int(left[0]), int(left[1]), int(right[1])
    except ValueError:
        return None


def form_of(product: Product, dimensions: frozenset[int], vocabulary: int) -> str | None:
    """Forward, input gradient or weight gradient; None for products that are no linear of this model.

    A weight gradient sums over tokens: K is no dimension of the model and M and N are (for the head M alone tells: a
    piece of it may have as many tokens as the model is wide). The other two differ in how they read the weight: the
    forward pass transposed (ba), the input gradient as it is stored (ab).
    """
    if product.primitive == "inner_product":
        return {"backward_data": "input gradient", "backward_weights": "weight gradient"}.get(
            product.prop_kind, "forward"
        )
    if product.k not in dimensions or product.m == vocabulary:
        return "weight gradient" if {product.m, product.n} <= dimensions else None
    if product.n not in dimensions:
        return None
    return "input gradient" if product.weights_tag == "ab" else "forward"


def expected_products(shape: dict[str, Any]) -> int:
    """Linears of one forward pass: seven a layer, and the head (once or more: the loss may cut it into pieces)."""
    return 7 * int(shape["num_hidden_layers"]) + 1


def table(products: Iterable[Product], shape: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """A Markdown table by form and implementation, and the share of AMX kernels by form.

    A linear that oneDNN never saw went to another library: it counts against the share.
    """
    names = ("hidden_size", "intermediate_size", "vocab_size")
    dimensions = frozenset(int(shape[name]) for name in names)
    counts: Counter[tuple[str, str, str]] = Counter()
    for product in products:
        form = form_of(product, dimensions, int(shape["vocab_size"]))
        if form is not None:
            counts[form, product.implementation, product.source_dtype] += 1
    lines = [
        f"| form | implementation | dtype | count (at least {expected_products(shape)} per form) |",
        "|---|---|---|---:|",
    ]
    shares: dict[str, float] = {}
    for form in FORMS:
        mine = {key: count for key, count in counts.items() if key[0] == form}
        for (_, implementation, dtype), count in sorted(mine.items()):
            lines.append(f"| {form} | {implementation} | {dtype} | {count} |")
        total = sum(mine.values())
        if not total:
            lines.append(f"| {form} | none seen by oneDNN | | 0 |")
        amx = sum(count for key, count in mine.items() if "amx" in key[1])
        shares[form] = amx / max(total, expected_products(shape))
    return "\n".join(lines), shares


def main(argv: list[str] | None = None) -> int:
    """Train one step under ONEDNN_VERBOSE and print the table; 1 where the run failed, 0 whatever the kernels are."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.amx_kernels", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--dtype", choices=["auto", "bf16", "fp32"], default="auto", help="parallel.dtype (default auto)"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds the run may take (default 900)")
    parser.add_argument("--folder", type=Path, default=peers.FOLDER, help="workload, caches, logs (default runs/peers)")
    arguments = parser.parse_args(argv)
    cache = arguments.folder.resolve()
    out = cache / time.strftime("amx-kernels-%Y%m%d-%H%M%S")
    out.mkdir(parents=True)
    work = peers.prepare_workload(cache, out / "workload.log")
    run_file, run = out / "coremill.yaml", out / "run"
    coremill_run.write_run_file(
        run_file, work, run=run, steps=1, tokens_per_step=ROWS * SEQUENCE_LENGTH, seed=peers.SEED
    )
    settings = [f"parallel.dtype={arguments.dtype}", f"train.micro_batch_rows={ROWS}", "parallel.ranks_per_node=1"]
    finished = processes.run_tree(
        coremill_run.train_command(run_file, settings),
        environment=peers.environment(cache, {"ONEDNN_VERBOSE": "1"}),
        folder=peers.ROOT,
        log=out / "log.txt",
        timeout_seconds=arguments.timeout,
    )
    if finished.returncode != 0:
        print(f"coremill ended with {finished.returncode}; see {finished.log}")
        return 1
    text, shares = table(read_products(_rank_lines(run)), LLAMA_SHAPE)
    print(text)
    print("share of AMX kernels: " + ", ".join(f"{form} {share:.0%}" for form, share in shares.items()))
    print(f"the whole verbose output is in {run / 'logs'}")
    return 0


def _rank_lines(run: Path) -> Iterator[str]:
    """What the ranks wrote. Calibration also multiplies under ONEDNN_VERBOSE, but in a process of its own, not here."""
    for path in sorted((run / "logs").rglob("*")):
        if path.is_file():
            with path.open(errors="replace") as file:
                yield from file


if __name__ == "__main__":
    sys.exit(main())
