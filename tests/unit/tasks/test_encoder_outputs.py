"""Encoders that give more than logits, or give them without names: their losses and those of a filler."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coremill.config.schema import RunConfig  # noqa: E402
from coremill.data.encoded_batches import EncodedBatch  # noqa: E402
from coremill.data.labels import Labels  # noqa: E402
from coremill.data.loader import FILLER  # noqa: E402
from coremill.tasks.question_answering.training import QuestionAnsweringTraining  # noqa: E402
from coremill.tasks.sequence_classification.training import ClassificationTraining  # noqa: E402
from tiny_encoders import encoder_config  # noqa: E402

MORE = ({"output_hidden_states": True, "output_attentions": True}, {"return_dict": False})


@pytest.mark.parametrize("more", MORE, ids=("hidden states", "a tuple"))
@pytest.mark.parametrize("task", ["questions", "classes"])
def test_what_else_a_model_gives_changes_no_loss(task: str, more: dict[str, bool]) -> None:
    import transformers

    config = transformers.BertConfig(**encoder_config("bert"), attn_implementation="eager")
    training: Any
    if task == "questions":
        kind, training = transformers.BertForQuestionAnswering, QuestionAnsweringTraining(RunConfig())
        names = ("start_positions", "end_positions")
    else:
        kind = transformers.BertForSequenceClassification
        training, names = ClassificationTraining(RunConfig(), Labels(kind="classes", count=2)), ("labels",)
    model = kind(config).eval()
    training.prepare(model, fused=True)
    batch = EncodedBatch(
        torch.ones(1, 4).long(), None, None, {name: torch.ones(1).long() for name in names}, (5,), (0,), (4,)
    )
    plain = training.loss(model, batch, 1.0)
    model.config.update(more)
    assert torch.equal(training.loss(model, batch, 1.0), plain)
    with torch.no_grad():
        assert len(training.evaluate(model, batch, 1.0)[1]) == 1
    nobody = EncodedBatch(
        torch.zeros(1, 1).long(), None, None, {name: torch.zeros(0).long() for name in names}, (FILLER,), (0,), (1,)
    )
    loss = training.loss(model, nobody, 1.0)
    assert loss == 0.0 and training.evaluate(model, nobody, 1.0)[1] == []
    loss.backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not unused or unused == ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
