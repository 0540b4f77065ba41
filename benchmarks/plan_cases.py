"""The runs that the plan is held to: `here` for two slow cores, `amx` for 16 cores with matrix units."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SHORT_DOCUMENTS = Path(__file__).resolve().parent.parent / "runs" / "plan-table" / "short-documents.jsonl"


def write_short_documents() -> None:
    """Four hundred of a hundred words each."""
    SHORT_DOCUMENTS.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps({"text": " ".join(str((number * 7919 + word * word) % 9973) for word in range(100))})
        for number in range(400)
    )
    SHORT_DOCUMENTS.write_text("\n".join(lines) + "\n")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama shape made on the spot, or one of its relatives."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    kv_heads: int | None = None
    tied: bool = False
    family: str = "llama"
    keys: dict[str, Any] = field(default_factory=dict)  # of the family's own

    def config(self) -> dict[str, Any]:
        """What config.json would hold."""
        heads = self.hidden // 64
        return {
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.kv_heads or heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": self.tied,
            **self.keys,
        }


@dataclass(frozen=True, kw_only=True)
class Case:
    """One short run."""

    name: str
    shape: Shape
    ranks: int = 1
    engine: str = "replicate"
    checkpointing: bool = False
    keep_gathered: bool | str = "auto"
    sequence_length: int = 256
    tokens_per_step: int = 1024
    micro_batch_rows: int | str = "auto"
    export: bool = False
    documents_apart: bool = False
    freeze: tuple[str, ...] = ()
    lora: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    update: str = "auto"
    quick: bool = field(default=False)  # part of --quick

    def prepare(self) -> None:
        """Documents, where those of the corpus will not do."""
        if self.documents_apart:
            write_short_documents()

    def run_file(self, run: Path, steps: int) -> str:
        """The run file: JSON is YAML. Documents that are to be kept apart are so short that every row has several."""
        source = {"source": str(SHORT_DOCUMENTS), "column": "text"} if self.documents_apart else {"source": "built-in"}
        document = {
            "model": {"weights": "random", "config": self.shape.config()},
            "tokenizer": "built-in",
            "data": {
                **source,
                "sequence_length": self.sequence_length,
                "attention_across_documents": not self.documents_apart,
            },
            "train": {
                "steps": steps,
                "tokens_per_step": self.tokens_per_step,
                "learning_rate": 1.0e-4,
                "micro_batch_rows": self.micro_batch_rows,
                "activation_checkpointing": self.checkpointing,
                "freeze": list(self.freeze),
                "optimizer": self.optimizer,
                "update": self.update,
            },
            "lora": self.lora,
            "parallel": {
                "engine": self.engine,
                "ranks_per_node": self.ranks,
                "keep_gathered": self.keep_gathered,
            },
            # A copy of the state would be held for a moment after the last step; saving has its own tests.
            "checkpoint": {"every": "never"},
            "run": {"folder": str(run), "export": self.export},
        }
        return json.dumps(document, indent=1) + "\n"


M7 = Shape(hidden=256, intermediate=704, layers=6, vocabulary=4096)
M30 = Shape(hidden=512, intermediate=1408, layers=8, vocabulary=4096)
M40 = Shape(hidden=384, intermediate=1056, layers=8, vocabulary=32768)
M27_TIED = Shape(hidden=384, intermediate=1056, layers=8, vocabulary=32768, tied=True)
M91 = Shape(hidden=768, intermediate=2048, layers=12, vocabulary=4096)
M196 = Shape(hidden=1024, intermediate=2816, layers=10, vocabulary=32768)
M10 = Shape(hidden=256, intermediate=704, layers=8, vocabulary=8192)
M60 = Shape(hidden=640, intermediate=1728, layers=8, vocabulary=16384)
M6_WINDOW = Shape(
    hidden=256, intermediate=704, layers=6, vocabulary=4096, kv_heads=2, family="mistral", keys={"sliding_window": 256}
)
M6_GROUPED = Shape(hidden=256, intermediate=704, layers=6, vocabulary=4096, kv_heads=2)
# Scales its logits, so that whole ones are made.
M19_EXPERTS = Shape(
    hidden=256,
    intermediate=384,
    layers=4,
    vocabulary=16384,
    family="granitemoe",
    keys={"num_local_experts": 8, "num_experts_per_tok": 2, "logits_scaling": 4.0},
)
M19_MIXTURE = replace(M19_EXPERTS, family="mixtral", keys={"num_local_experts": 8, "num_experts_per_tok": 2})
# Caps scores and logits: eager attention and whole logits.
M9_CAPPED = Shape(
    hidden=256,
    intermediate=704,
    layers=6,
    vocabulary=16384,
    tied=True,
    family="gemma2",
    keys={"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 256},
)

ALL_MAPS: dict[str, Any] = {"rank": 16}
QUERY_AND_VALUE: dict[str, Any] = {"rank": 16, "target_modules": ["q_proj", "v_proj"]}
LOOKUP = ("model.embed_tokens.*",)
LOWER_LAYERS = ("model.layers.[0-5].*",)

HERE = (
    Case(name="7M replicate 1", shape=M7, tokens_per_step=2048, export=True, quick=True),
    Case(name="7M replicate 4", shape=M7, ranks=4, tokens_per_step=2048, sequence_length=512),
    Case(name="40M replicate 1", shape=M40, sequence_length=512, export=True),
    Case(name="40M shard 2", shape=M40, ranks=2, engine="shard", export=True, quick=True),
    Case(name="40M shard 4", shape=M40, ranks=4, engine="shard", keep_gathered=False),
    Case(name="27M tied replicate 2", shape=M27_TIED, ranks=2, quick=True),
    Case(name="27M tied shard 2", shape=M27_TIED, ranks=2, engine="shard", keep_gathered=False, sequence_length=512),
    Case(name="30M replicate 2 recomputing", shape=M30, ranks=2, checkpointing=True, tokens_per_step=2048),
    Case(
        name="30M shard 2, two passes",
        shape=M30,
        ranks=2,
        engine="shard",
        keep_gathered=False,
        tokens_per_step=2048,
        micro_batch_rows=2,
    ),
    Case(name="30M replicate 4", shape=M30, ranks=4, export=True),
    Case(name="91M replicate 1 recomputing", shape=M91, checkpointing=True, sequence_length=512),
    Case(name="91M replicate 1", shape=M91),
    Case(
        name="91M shard 2 recomputing",
        shape=M91,
        ranks=2,
        engine="shard",
        checkpointing=True,
        keep_gathered=False,
        sequence_length=512,
    ),
    Case(name="196M replicate 1", shape=M196, tokens_per_step=512, sequence_length=512),
    Case(name="196M shard 2", shape=M196, ranks=2, engine="shard", tokens_per_step=512),
    Case(
        name="196M shard 4 recomputing",
        shape=M196,
        ranks=4,
        engine="shard",
        checkpointing=True,
        keep_gathered=False,
    ),
    Case(name="60M shard 2", shape=M60, ranks=2, engine="shard"),
    Case(name="60M shard 2, two passes", shape=M60, ranks=2, engine="shard", tokens_per_step=4096, sequence_length=512),
    Case(name="10M shard 4", shape=M10, ranks=4, engine="shard", tokens_per_step=2048),
    Case(name="6M window of 256, replicate 1", shape=M6_WINDOW, tokens_per_step=2048, sequence_length=2048),
    Case(name="6M window of 256, shard 2", shape=M6_WINDOW, ranks=2, engine="shard", sequence_length=512),
    Case(
        name="6M documents apart, replicate 1",
        shape=M6_GROUPED,
        tokens_per_step=2048,
        sequence_length=1024,
        documents_apart=True,
    ),
    Case(
        name="6M documents apart, shard 2",
        shape=M6_GROUPED,
        ranks=2,
        engine="shard",
        tokens_per_step=4096,
        sequence_length=1024,
        micro_batch_rows=2,
        documents_apart=True,
    ),
    Case(name="19M experts, whole logits, replicate 1", shape=M19_EXPERTS),
    Case(name="19M experts, whole logits, shard 2", shape=M19_EXPERTS, ranks=2, engine="shard", tokens_per_step=2048),
    Case(name="19M experts, shard 2", shape=M19_MIXTURE, ranks=2, engine="shard", tokens_per_step=2048),
    Case(name="9M eager, capped, replicate 1", shape=M9_CAPPED, sequence_length=512),
    Case(name="40M frozen lookup, replicate 2", shape=M40, ranks=2, freeze=LOOKUP),
    Case(name="40M frozen lookup, shard 2", shape=M40, ranks=2, engine="shard", freeze=LOOKUP),
    Case(name="27M frozen tied table, shard 2", shape=M27_TIED, ranks=2, engine="shard", freeze=LOOKUP),
    Case(name="91M lower half frozen, replicate 1", shape=M91, freeze=(*LOOKUP, *LOWER_LAYERS)),
    Case(name="91M lower half frozen, shard 2", shape=M91, ranks=2, engine="shard", freeze=(*LOOKUP, *LOWER_LAYERS)),
    Case(name="91M frozen layers above a lookup, replicate 1", shape=M91, freeze=LOWER_LAYERS),
    Case(name="91M frozen layers above a lookup, shard 2", shape=M91, ranks=2, engine="shard", freeze=LOWER_LAYERS),
    *(
        Case(
            name=f"{size} LoRA{where}, {engine} {ranks}{' recomputing' if recomputing else ''}",
            shape=shape,
            ranks=ranks,
            engine=engine,
            lora=lora,
            checkpointing=recomputing,
            tokens_per_step=512 * ranks,
        )
        for size, shape, engine, ranks, where, lora, recomputing in (
            ("91M", M91, "replicate", 1, "", ALL_MAPS, False),
            ("91M", M91, "replicate", 1, "", ALL_MAPS, True),
            ("91M", M91, "replicate", 1, " of q and v", QUERY_AND_VALUE, False),
            ("91M", M91, "replicate", 1, " of q and v", QUERY_AND_VALUE, True),
            ("91M", M91, "replicate", 1, " with dropout", {**ALL_MAPS, "dropout": 0.05}, False),
            ("196M", M196, "replicate", 1, "", ALL_MAPS, True),
            ("91M", M91, "replicate", 2, "", ALL_MAPS, False),
            ("91M", M91, "replicate", 2, " of q and v", QUERY_AND_VALUE, True),
            ("60M", M60, "shard", 2, "", ALL_MAPS, False),
            ("91M", M91, "shard", 2, "", ALL_MAPS, False),
            ("91M", M91, "shard", 2, "", ALL_MAPS, True),
            ("91M", M91, "shard", 2, " of q and v", QUERY_AND_VALUE, False),
            ("30M", M30, "replicate", 1, " of rank 64", {"rank": 64}, False),
            ("27M tied", M27_TIED, "replicate", 2, "", ALL_MAPS, True),
            ("40M", M40, "shard", 2, "", ALL_MAPS, False),
            ("10M", M10, "replicate", 2, "", ALL_MAPS, True),
            ("60M", M60, "replicate", 1, " of q and v", QUERY_AND_VALUE, True),
            ("40M", M40, "replicate", 1, "", ALL_MAPS, False),
        )
    ),
)

INSIDE: dict[str, str] = {"update": "inside"}
LEAN: dict[str, str] = {"optimizer": "adamw-8bit", "update": "after"}
LEAN_INSIDE: dict[str, str] = {"optimizer": "adamw-8bit", "update": "inside"}

HERE_LEAN = (
    Case(name="91M replicate 1, inside", shape=M91, **INSIDE),
    Case(name="91M replicate 1, 8 bit", shape=M91, **LEAN),
    Case(name="91M replicate 1, 8 bit, inside", shape=M91, quick=True, **LEAN_INSIDE),
    Case(
        name="91M replicate 1, 8 bit, inside, recomputing",
        shape=M91,
        checkpointing=True,
        sequence_length=512,
        **LEAN_INSIDE,
    ),
    Case(name="60M replicate 1, 8 bit, two passes", shape=M60, micro_batch_rows=2, **LEAN),
    Case(name="60M replicate 1, 8 bit, inside", shape=M60, export=True, **LEAN_INSIDE),
    Case(name="60M replicate 1, 8 bit, inside, two passes", shape=M60, micro_batch_rows=2, **LEAN_INSIDE),
    Case(name="27M tied replicate 1, 8 bit, inside", shape=M27_TIED, **LEAN_INSIDE),
    Case(name="60M replicate 2, 8 bit, inside", shape=M60, ranks=2, **LEAN_INSIDE),
    Case(name="60M shard 2, inside", shape=M60, ranks=2, engine="shard", **INSIDE),
    Case(name="60M shard 2, 8 bit", shape=M60, ranks=2, engine="shard", **LEAN),
    Case(name="60M shard 2, 8 bit, inside", shape=M60, ranks=2, engine="shard", **LEAN_INSIDE),
    Case(name="91M shard 4, 8 bit, inside", shape=M91, ranks=4, engine="shard", **LEAN_INSIDE),
)

B1 = Shape(hidden=2048, intermediate=8192, layers=16, vocabulary=128256, kv_heads=8, tied=True)
M350 = Shape(hidden=1024, intermediate=2816, layers=24, vocabulary=32768)
M52 = Shape(hidden=512, intermediate=1536, layers=8, vocabulary=24000)

AMX = (
    Case(name="52M replicate 1", shape=M52, tokens_per_step=8192, sequence_length=512, quick=True),
    Case(name="375M replicate 1", shape=M350, tokens_per_step=8192, sequence_length=512),
    Case(
        name="375M shard 2 recomputing",
        shape=M350,
        ranks=2,
        engine="shard",
        checkpointing=True,
        tokens_per_step=8192,
    ),
    Case(name="375M replicate 2", shape=M350, ranks=2, tokens_per_step=8192, sequence_length=512),
    Case(name="1.2B replicate 1", shape=B1, tokens_per_step=4096, sequence_length=512),
    Case(
        name="1.2B shard 4",
        shape=B1,
        ranks=4,
        engine="shard",
        keep_gathered=False,
        tokens_per_step=4096,
        sequence_length=512,
    ),
)

B3 = Shape(hidden=3072, intermediate=8192, layers=28, vocabulary=128256, kv_heads=8, tied=True, keys={"head_dim": 128})
# Llama-3-8B.
B8 = Shape(hidden=4096, intermediate=14336, layers=32, vocabulary=128256, kv_heads=8, keys={"num_attention_heads": 32})
B14 = Shape(
    hidden=5120,
    intermediate=17408,
    layers=40,
    vocabulary=151936,
    kv_heads=8,
    family="qwen3",
    keys={"num_attention_heads": 40, "head_dim": 128},
)

AMX_LEAN = (
    *(
        Case(name=f"1.2B replicate 1{words}", shape=B1, tokens_per_step=4096, sequence_length=512, **way)
        for words, way in ((", inside", INSIDE), (", 8 bit", LEAN), (", 8 bit, inside", LEAN_INSIDE))
    ),
    Case(
        name="1.2B shard 4, 8 bit, inside",
        shape=B1,
        ranks=4,
        engine="shard",
        tokens_per_step=4096,
        sequence_length=512,
        **LEAN_INSIDE,
    ),
    *(
        Case(
            name=f"{size}{' recomputing' if recomputing else ''} 8 bit, inside",
            shape=shape,
            checkpointing=recomputing,
            tokens_per_step=tokens,
            sequence_length=512,
            quick=size == "8B" and recomputing,
            **LEAN_INSIDE,
        )
        for size, shape, recomputing, tokens in (
            ("3B", B3, True, 4096),
            ("8B", B8, True, 4096),
            ("8B", B8, False, 2048),
        )
    ),
    Case(
        name="14B shard 4 recomputing, 8 bit, inside",
        shape=B14,
        ranks=4,
        engine="shard",
        checkpointing=True,
        tokens_per_step=4096,
        sequence_length=512,
        **LEAN_INSIDE,
    ),
)
