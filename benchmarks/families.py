"""Every causal language model family of the installed transformers, trained by coremill beside transformers itself.

    python -m benchmarks.families                                   every family, a line each
    python -m benchmarks.families --only llama,bloom                 some
    python -m benchmarks.families --markdown docs/families.md        the page

Of each family a small model is made on the spot, with random weights and every kind of layer its default config has.
Three AdamW steps by transformers' own forward are the reference. coremill goes its own way (`run/story.py`): on one
rank, on two that share a host, and on two that talk as hosts do; its losses must be transformers' to 1e-5 (fp32), and
its export, read by transformers, must give the logits of the model that transformers trained. A family is `exact`,
`refused` with a reason before anything is trained, or it `fails`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coremill.tasks.causal_lm.known_models import causal_families

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Row:
    """What became of a family."""

    family: str
    one_rank: str
    two_ranks: str  # of one host, through memory
    two_hosts: str  # two ranks that talk as those of two hosts do
    layers: str
    loss_path: str
    documents: str
    reason: str
    seconds: float

    @property
    def fails(self) -> bool:
        """Neither exact nor refused."""
        return "fails" in (self.one_rank, self.two_ranks, self.two_hosts, self.documents)


def main(arguments: Sequence[str] | None = None) -> int:
    """A line per family; ends with 1 where one fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families")
    parser.add_argument("--only", help="families, separated by commas")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else causal_families()
    rows = []
    for name in names:
        rows.append(try_family(name))
        print(_line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(page(rows))
    counts = {outcome: sum(_outcome(row) == outcome for row in rows) for outcome in ("exact", "refused", "fails")}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    _ranks().close_nursery()
    return 1 if counts["fails"] else 0


def try_family(family: str) -> Row:
    """On one rank, then on two in both ways; what crashes or hangs is a row like any other."""
    ranks, began = _ranks(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:

        def outcome(function: str, world_size: int, **how: Any) -> dict[str, Any]:
            try:
                found: dict[str, Any] = ranks.run_ranks(
                    f"beside_transformers:{function}", world_size, timeout_seconds=TIMEOUT_SECONDS, folder=folder, **how
                )[0]
                return found
            except ranks.RankError as error:
                return {"outcome": "fails", "reason": f"{error.kind}: {_last_line(str(error))}"}

        made = outcome("make_and_train_by_transformers", 1, family=family)
        if made["outcome"] != "made":
            empty = dict.fromkeys(("one_rank", "two_ranks", "two_hosts", "documents"), made["outcome"])
            reason = made["reason"]
            return Row(family, **empty, layers="", loss_path="", reason=reason, seconds=time.perf_counter() - began)
        ways = {
            "one_rank": outcome("train_by_coremill", 1, engine="replicate"),
            "two_ranks": outcome("train_by_coremill", 2, engine="shard"),
            "two_hosts": outcome("train_by_coremill", 2, engine="shard", through_memory=False),
        }
    reasons = {way.get("reason", "") for way in ways.values()}
    one = ways["one_rank"]
    return Row(
        family,
        **{name: way["outcome"] for name, way in ways.items()},
        layers=one.get("layers", ""),
        loss_path=one.get("loss_path", ""),
        documents=made["documents"],
        reason="; ".join(sorted(reasons - {""})),
        seconds=time.perf_counter() - began,
    )


# --- the page ---


def page(rows: Sequence[Row]) -> str:
    """docs/families.md."""
    import torch
    import transformers

    exact, refused = (sum(_outcome(row) == outcome for row in rows) for outcome in ("exact", "refused"))
    lines = [
        "# Families",
        "",
        "Made by `python -m benchmarks.families --markdown docs/families.md` with transformers"
        f" {transformers.__version__} and torch {torch.__version__.split('+')[0]}: every family that"
        " `AutoModelForCausalLM` knows, as a small model with random weights. *Exact*: the losses of three AdamW steps"
        " in fp32 are those of transformers itself to 1e-5, and the export, read by transformers, gives the same"
        " logits. *Refused*: ended with 78 and the reason before anything is trained.",
        "",
        f"{len(rows)} families: {exact} exact, {refused} refused, {len(rows) - exact - refused} fail.",
        "",
        "Two ranks: sharded over two on one host, through memory. Two hosts: the same through gloo, as between hosts."
        " Documents: whether `data.attention_across_documents: false` keeps the documents of a row apart, seen by"
        " changing a neighbour; where it does not, the setting is refused. Layers: *fused* where norms and MLPs are"
        " replaced by forms that keep less for backward. Loss: *chunked* where the logits are never held whole.",
        "",
        "Encoders (bert, roberta, electra, xlm and their like) are tried as decoders here (`is_decoder: true` or what"
        " stands for it). As the hub has them they are refused as causal language models (78): [BERT](guide/bert.md)"
        " has their tasks.",
        "",
        "| family | one rank | two ranks | two hosts | layers | loss | documents | reason |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.family, row.one_rank, row.two_ranks, row.two_hosts, row.layers, row.loss_path, row.documents)
        lines.append("| " + " | ".join((*cells, row.reason.replace("|", "/"))) + " |")
    return "\n".join(lines) + "\n"


def _outcome(row: Row) -> str:
    if row.fails:
        return "fails"
    return "refused" if row.one_rank == "refused" else "exact"


def _line(row: Row) -> str:
    ways = f"{row.one_rank:8} {row.two_ranks:8} {row.two_hosts:8} documents {row.documents:8}"
    return f"{row.family:26} {ways} {row.layers:12} {row.loss_path:8} {row.seconds:5.1f} s  {row.reason}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("(rank", "[rank"))]
    return " ".join(lines[-1].split())[:200]


def _ranks() -> Any:
    sys.path[:0] = [path for path in (str(ROOT / "src"), str(ROOT / "tests")) if path not in sys.path]
    import ranks

    return ranks


if __name__ == "__main__":
    sys.exit(main())
