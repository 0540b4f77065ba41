"""Whether a model keeps the documents of a row apart is tried on a small copy, and where it does not, it is refused."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

from coremill.config.schema import DataSection
from coremill.errors import InputError
from coremill.model import documents
from coremill.model.documents import Influence, documents_of, require_documents_apart
from coremill.model.small_copy import small_copy

APART = DataSection(attention_across_documents=False, sequence_length=512)


def of_family(family: str, **changes: Any) -> PreTrainedModel:
    """At its real size, as a rank has it: on meta."""
    with torch.device("meta"), no_init_weights():
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**changes), dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "mixtral", "deepseek_v32"])
def test_families_that_go_by_position_ids_keep_documents_apart(family: str) -> None:
    choice = documents_of(of_family(family), APART)
    assert choice.value == "apart"
    assert "small copy" in choice.reason


@pytest.mark.parametrize("family", ["bloom", "mpt", "mamba", "falcon_h1", "gpt_oss"])
def test_families_that_let_position_ids_pass_are_refused(family: str) -> None:
    model = of_family(family)
    with pytest.raises(InputError, match="does not keep the documents of a row apart") as caught:
        documents_of(model, APART)
    assert caught.value.where == "data.attention_across_documents"
    assert "attention_across_documents: true" in str(caught.value.do)
    assert documents_of(model, DataSection()).value == "joined"


def test_a_vocabulary_of_letters_is_enough() -> None:
    assert documents_of(of_family("llama", vocab_size=40), APART).value == "apart"


def test_what_is_no_number_keeps_nothing_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Influence(of_previous=math.nan, of_place=0.0)
    monkeypatch.setattr(documents, "influence_of_documents", lambda small: nothing)
    with pytest.raises(InputError, match="does not keep"):
        documents_of(of_family("llama"), APART)


def test_attention_in_chunks_of_the_row_is_refused_where_rows_are_longer() -> None:
    """Llama 4's chunks are counted from the row's first token, so a document may be cut in two."""
    within = of_family("llama4_text", attention_chunk_size=512)
    assert documents_of(within, APART).value == "apart"
    shorter = of_family("llama4_text", attention_chunk_size=256)
    with pytest.raises(InputError, match="in the middle of a row"):
        documents_of(shorter, APART)


def test_where_nothing_can_be_tried_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*args: Any, **kwargs: Any) -> None:
        raise TypeError("it wants pictures")

    model = of_family("llama")
    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(InputError, match="cannot tell whether LlamaForCausalLM keeps documents apart") as caught:
        documents_of(model, APART)
    assert caught.value.why == "TypeError: it wants pictures"


@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama", 2), ("gemma3_text", 6), ("deepseek_v3", 4), ("jamba", 5), ("qwen3_next", 4)],
)
def test_a_small_copy_has_every_kind_of_layer(family: str, layers: int) -> None:
    """Gemma 3: every sixth layer sees all; DeepSeek: the first three are dense; Jamba and Qwen3-Next are mixed."""
    model = of_family(family)
    small = small_copy(model, row_tokens=512)
    assert type(small) is type(model)
    assert small.config.num_hidden_layers == layers
    assert sum(parameter.numel() for parameter in small.parameters()) < 1e6


def test_making_a_small_copy_leaves_random_numbers_and_model_alone() -> None:
    model = of_family("llama")
    before, state = model.config.to_dict(), torch.get_rng_state()
    small_copy(model, row_tokens=512)
    assert model.config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_what_transformers_says_of_a_small_copy_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_family("llama")
    levels = []

    def noisy(small: PreTrainedModel) -> Influence:
        levels.append(logging.get_verbosity())
        warnings.warn("of a model that the user does not have", stacklevel=1)
        raise RuntimeError("whatever happens")

    monkeypatch.setattr("coremill.model.documents.influence_of_documents", noisy)
    before = logging.get_verbosity()
    with warnings.catch_warnings(record=True) as seen, pytest.raises(InputError):
        require_documents_apart(model, row_tokens=512)
    assert (levels, seen, logging.get_verbosity()) == ([logging.CRITICAL], [], before)
