"""Causal language models are told from others without importing transformers."""

from __future__ import annotations

from typing import Any

import pytest

from coremill.errors import InputError
from coremill.tasks.causal_lm import known_models
from tiny_models import FAMILIES, MERGED_FAMILIES


def require(**config: Any) -> None:
    known_models.require_causal(config, description="the model", where="config.json")


@pytest.mark.parametrize("family", [*FAMILIES, *MERGED_FAMILIES])
def test_every_tested_family_passes(family: str) -> None:
    require(**(FAMILIES | MERGED_FAMILIES)[family])


def test_what_is_none_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="not a causal language model(?s:.)*model_type is vit"):
        require(model_type="vit")
    with pytest.raises(InputError, match="own code would have to be run(?s:.)*model.trust_remote_code: true"):
        require(model_type="brandnew", auto_map={"AutoModelForCausalLM": "modeling.Brandnew"})
    with pytest.raises(InputError, match="encoder(?s:.)*is_decoder"):
        require(model_type="bert")
    require(model_type="bert", is_decoder=True)
    require(model_type="bart", is_encoder_decoder=True)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [("bert-generation", "is_decoder", True), ("xlm", "causal", True), ("xlnet", "attn_type", "uni")],
)
def test_families_that_are_causal_by_their_config_only(family: str, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"sees the tokens it is to predict, unless its config has {key}"):
        require(model_type=family)
    require(model_type=family, **{key: value})


def test_big_bird_in_blocks_sees_what_comes_later() -> None:
    with pytest.raises(InputError, match='is_decoder: true and attention_type: "original_full"'):
        require(model_type="big_bird", is_decoder=True, attention_type="block_sparse")
    require(model_type="big_bird", is_decoder=True, attention_type="original_full")


@pytest.mark.parametrize("family", ["git", "musicgen", "prophetnet", "gemma4_assistant", "cpmant"])
def test_families_that_learn_something_else_are_refused(family: str) -> None:
    with pytest.raises(InputError, match=f"next token of a text(?s:.)*model_type is {family}: it "):
        require(model_type=family)


def test_tables_that_cannot_be_read_refuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_models, "_tables", dict)
    require(model_type="vit")
