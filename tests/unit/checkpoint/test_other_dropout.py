"""When a continuation drops other places than the run would have dropped, and that it says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import RANKS, make_store, save

torch = pytest.importorskip("torch")

from coremill.checkpoint.dropout import DRAWN, LOOKED_UP, dropout_of, other_dropout  # noqa: E402
from coremill.model.quick_dropout import QuickDropout  # noqa: E402


def of(masks: str, rows: int | None = 4) -> dict[str, Any]:
    return {"masks": masks, "micro_batch_rows": rows}


@pytest.mark.parametrize(
    ("earlier", "now", "said"),
    [
        (of(LOOKED_UP), of(LOOKED_UP), None),
        (of(DRAWN), of(DRAWN), None),
        (None, of(DRAWN), None),
        (of(DRAWN), None, None),
        (of(LOOKED_UP), of(DRAWN), "masks were looked up and are drawn now (model.fused)"),
        (of(LOOKED_UP, 8), of(LOOKED_UP), "8 rows were computed at a time, and now 4"),
        (of(DRAWN, 8), of(LOOKED_UP), "(model.fused); 8 rows were computed"),
        (None, of(LOOKED_UP), "written by an earlier coremill, whose masks torch drew"),
    ],
)
def test_it_is_said_why(tmp_path: Path, earlier: Any, now: Any, said: str | None) -> None:
    checkpoint = save(make_store(tmp_path), 4, **({} if earlier is None else {"dropout": earlier}))
    found = other_dropout(checkpoint, now, RANKS)
    assert (found is None) == (said is None) and other_dropout(None, now, RANKS) is None
    if found is not None and said is not None:
        assert found.value == "other masks" and said in found.reason
        assert found.reason.endswith(
            "what is dropped from here on, and with it the loss, is not what it would have been"
        )
    more = other_dropout(checkpoint, now, RANKS + 1)
    assert (more is None) == (now is None) and (more is None or more.value == "drawn anew")


def test_what_masks_depend_on() -> None:
    nothing = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    nothing[0].attention_dropout = 0.0
    assert dropout_of(nothing, 4) is None
    assert dropout_of(torch.nn.Sequential(torch.nn.Dropout(0.1)), 4) == of(DRAWN)
    assert dropout_of(torch.nn.Sequential(QuickDropout(0.1), torch.nn.Dropout(0.1)), 4) == of(LOOKED_UP)
    nothing[0].attention_dropout = 0.1  # as modules of transformers have it
    assert dropout_of(nothing, 2) == of(DRAWN, 2)
