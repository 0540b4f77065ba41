"""Everything that is found out, fetched and checked before the first rank starts: bad input ends here.

The launcher does it for the ranks it starts. Under torchrun or mpirun the first rank of each node does it for that
node.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coremill.config.schema import RunConfig
from coremill.data.packed import PackedData, Progress
from coremill.data.prepare import check_sources, prepare_data, require_rows_for_ranks
from coremill.hardware.facts import Fleet
from coremill.model.source import ModelFolder, resolve_model, resolve_tokenizer
from coremill.model.tokenizer_fit import require_fitting_tokenizer
from coremill.plan.card import ModelCard, read_card
from coremill.plan.planner import make_plan
from coremill.plan.stored import plan_from_json
from coremill.plan.types import Plan


@dataclass(frozen=True)
class Orders:
    """What a rank needs to know beside the config: where things lie on this node, how many steps, and the plan."""

    model: ModelFolder
    tokenizer: Path
    data: PackedData
    steps: int
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """Plain values for orders.json and for sending between ranks."""
        return {
            "model": {**asdict(self.model), "folder": str(self.model.folder)},
            "tokenizer": str(self.tokenizer),
            "data": self.data.to_json(),
            "steps": self.steps,
            "plan": self.plan.to_json(),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Orders:
        """The inverse of to_json."""
        return Orders(
            model=ModelFolder(**{**document["model"], "folder": Path(document["model"]["folder"])}),
            tokenizer=Path(document["tokenizer"]),
            data=PackedData.from_json(document["data"]),
            steps=document["steps"],
            plan=plan_from_json(document["plan"]),
        )

    @staticmethod
    def read(path: Path) -> Orders:
        """What the launcher wrote."""
        return Orders.from_json(json.loads(path.read_text()))


def card_for(config: RunConfig, model: ModelFolder) -> ModelCard:
    """The card of a model that lies in a folder."""
    return read_card(model.folder, name=config.model.name, pretrained=model.weights == "pretrained")


def prepare(
    config: RunConfig,
    find_fleet: Callable[[], Fleet],
    *,
    cache: Path,
    on_plan: Callable[[Plan], None],
    on_tokens: Callable[[Progress], None] | None = None,
    on_model: Callable[[str], None] | None = None,
) -> Orders:
    """Resolve the model, plan, tokenise; `on_plan` may refuse before the data is touched.

    The machine may have to be measured first, for 20 s or more: what is wrong with the files is said before that.
    """
    model = resolve_model(config.model, cache=cache, progress=on_model)
    card = card_for(config, model)
    check_sources(config.data, max_positions=card.max_positions)
    plan = make_plan(config, find_fleet(), card)
    on_plan(plan)
    tokenizer = resolve_tokenizer(config, model, cache=cache, progress=on_model, training_progress=on_tokens)
    doubt = require_fitting_tokenizer(config.tokenizer, tokenizer, model, card.vocabulary_rows)
    if doubt is not None and on_model is not None:
        on_model(doubt)
    data = prepare_data(
        config,
        tokenizer_folder=tokenizer,
        code_sha256=model.code_sha256 if tokenizer == model.folder else None,
        vocabulary_rows=card.vocabulary_rows,
        max_positions=card.max_positions,
        cache=cache,
        progress=on_tokens,
    )
    steps = count_steps(config, data, plan)
    return Orders(model=model, tokenizer=tokenizer, data=data, steps=steps, plan=replace(plan, steps=steps))


def count_steps(config: RunConfig, data: PackedData, plan: Plan) -> int:
    """Optimizer steps of the run; whole steps only, at least one."""
    require_rows_for_ranks(data, plan.world_size)
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None
    return max(1, int(config.train.epochs * data.train_rows / plan.rows_per_step))
