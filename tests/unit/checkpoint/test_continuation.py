"""What may differ between the config of a checkpoint and that of its continuation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import make_store, save

from coremill.checkpoint.changed_settings import changes_of, describe_changes, fixed_keys
from coremill.checkpoint.continuation import (
    asks_for_more,
    refuse_another_run,
    refuse_fewer_steps,
    refuse_other_base,
    refuse_other_data,
    scores_of,
    words_of_changes,
    written_config,
)
from coremill.checkpoint.manifest import Checkpoint
from coremill.config.load import load_config
from coremill.config.schema import RunConfig
from coremill.config.show import show
from coremill.data.packed import PackedData
from coremill.errors import InputError
from coremill.model.lora_base import Base

KEY = "data.special_tokens"
RULES = {"n_best": 20, "max_answer_tokens": 30, "null_threshold": 0.0}  # as they are by themselves


def test_a_checkpoint_older_than_a_key_is_continued() -> None:
    config = RunConfig()
    earlier = config.model_dump(mode="json")
    del earlier["model"]["trust_remote_code"], earlier["model"]["code_sha256"], earlier["numerics"]
    assert fixed_keys(earlier, config) == []
    earlier["train"]["weight_decay"] = 9.0
    assert fixed_keys(earlier, config) == ["train.weight_decay"]
    trusting = config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": True})})
    assert fixed_keys(earlier, trusting) == ["model.trust_remote_code", "train.weight_decay"]


def test_another_optimizer_goes_on_and_what_becomes_of_its_state_is_said() -> None:
    earlier = RunConfig().model_dump(mode="json")
    earlier["train"].update(optimizer="adamw-8bit", update="inside")
    assert fixed_keys(earlier, RunConfig()) == []
    assert describe_changes(earlier, RunConfig(), done=4, steps_before=8, steps=8) == [
        "train.optimizer: adamw-8bit -> adamw: weights and moments are converted",
        "train.update: inside -> auto",
    ]
    auto = RunConfig.model_validate({"train": {"optimizer": "auto"}})  # may take the one that it was
    assert describe_changes(RunConfig().model_dump(mode="json"), auto, done=4, steps_before=8, steps=8) == [
        "train.optimizer: adamw -> auto: weights and moments are converted where auto takes another one"
    ]


def of_0_1_0(config: RunConfig) -> dict[str, Any]:
    """What 0.1.0 wrote into its checkpoints."""
    earlier = config.model_dump(mode="json")
    del earlier["data"]["special_tokens"]
    return earlier


def a_checkpoint(folder: Path, config: dict[str, Any], *, step: int = 4, key: str = "old") -> Checkpoint:
    """One that holds this config and this name of its data."""
    return save(make_store(folder), step, config=config, loader={"key": key})


def some_data(key: str, *, is_plain: bool = True) -> PackedData:
    return PackedData(
        folder=Path("data"),
        evaluation_folder=None,
        key=key,
        train_rows=9,
        evaluation_rows=0,
        sequence_length=8,
        tokens=72,
        dropped_tokens=0,
        documents=1,
        eos_id=0,
        from_cache=True,
        seconds=0.0,
        is_plain=is_plain,
    )


def configured(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def test_a_run_of_0_1_0_may_name_its_special_tokens(tmp_path: Path) -> None:
    """The cure for changed data must not be refused as a changed config, neither at a checkpoint nor when finished."""
    for special in ("auto", "none"):
        config = configured(data={"special_tokens": special}, train={"steps": 9})
        assert fixed_keys(of_0_1_0(RunConfig()), config) == []
        assert fixed_keys(RunConfig().model_dump(mode="json"), config) == ([] if special == "auto" else [KEY])
        path = tmp_path / f"{special}.yaml"
        path.write_text(show(load_config(None)))
        assert fixed_keys(written_config(load_config(path)), load_config(path).config) == []
        path.write_text("".join(line for line in path.read_text().splitlines(True) if "special_tokens" not in line))
        assert fixed_keys(written_config(load_config(path)), load_config(path, [f"{KEY}={special}"]).config) == []


def test_changed_data_is_refused_with_its_cause(tmp_path: Path) -> None:
    config = RunConfig()
    old = a_checkpoint(tmp_path / "old", of_0_1_0(config))
    refuse_other_data(config, old, some_data("old", is_plain=False))
    with pytest.raises(InputError, match=r"--set data\.special_tokens=none") as caught:
        refuse_other_data(config, old, some_data("new", is_plain=False))
    assert "step 4" in str(caught.value) and "coremill 0.1.0" in str(caught.value) and "--fresh" in str(caught.value)
    with pytest.raises(InputError, match="the text, the tokenizer"):
        refuse_other_data(config, old, some_data("new"))
    evaluated = configured(data={"evaluation_fraction": 0.1})
    with pytest.raises(InputError, match="held out rows; now whole documents") as caught:
        refuse_other_data(evaluated, old, some_data("new", is_plain=False))
    assert "finish this one with coremill 0.1.0" in str(caught.value)
    new = a_checkpoint(tmp_path / "new", evaluated.model_dump(mode="json"))
    with pytest.raises(InputError, match="the text, the tokenizer"):
        refuse_other_data(evaluated, new, some_data("new", is_plain=False))


def training(**more: Any) -> RunConfig:
    return configured(train={"learning_rate": 1.0, **more})


def test_another_end_says_what_becomes_of_the_learning_rate(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path, training(steps=8).model_dump(mode="json"))

    def words(config: RunConfig, checkpoint: Checkpoint = checkpoint) -> str:
        return "".join(words_of_changes(config, checkpoint, config.train.steps or 0))

    assert words(training(steps=8)) == ""
    assert words(training(steps=20)) == (
        "train.steps: 8 -> 20: the linear decay ends there now; the learning rate goes from 0.625 in step 4 to 0.8 in"
        " step 5, where it would have been 0.5"
    )
    assert "from 0.625 in step 4 to 0.2 in step 5" in words(training(steps=5))
    assert words(training(steps=4)) == "train.steps: 8 -> 4: no step is left"
    done = a_checkpoint(tmp_path / "done", training(steps=4).model_dump(mode="json"))
    assert words(training(steps=8), done).endswith("from 0.25 in step 4 to 0.5 in step 5")
    steady = a_checkpoint(tmp_path / "steady", training(steps=8, schedule="constant").model_dump(mode="json"))
    constant = words(training(steps=20, schedule="constant"), steady)
    assert constant == "train.steps: 8 -> 20: the learning rate stays as it was"


def test_every_setting_that_may_change_is_shown_with_its_old_value(tmp_path: Path) -> None:
    earlier = training(steps=8).model_dump(mode="json")
    del earlier["train"]["minimum_learning_rate"], earlier["train"]["warmup_share"]  # older than these keys
    checkpoint = a_checkpoint(tmp_path, earlier)
    config = configured(
        train={"learning_rate": 0.5, "steps": 8, "schedule": "cosine", "minimum_learning_rate": 0.1},
        evaluation={"rows": 1000},
        sample={"prompt": "once upon"},
        run={"folder": "elsewhere"},
    )
    refuse_another_run(config, checkpoint)
    assert words_of_changes(config, checkpoint, 8) == [
        "train.learning_rate: 1 -> 0.5, train.minimum_learning_rate: 0 -> 0.1, train.schedule: linear -> cosine:"
        " the learning rate goes from 0.625 in step 4 to 0.3 in step 5, where it would have been 0.5",
        "evaluation.rows: 64 -> 1,000: evaluations so far are not compared with later ones",
        'sample.prompt: null -> "once upon"',
    ]


@pytest.mark.parametrize(("key", "value"), [("n_best", 5), ("max_answer_tokens", 4), ("null_threshold", 1.5)])
def test_other_rules_of_scoring_begin_the_best_anew_and_say_so(tmp_path: Path, key: str, value: float) -> None:
    asks = {"model": {"name": "x"}, "task": "question-answering", "train": {"steps": 8, "samples_per_step": 8}}
    asks["data"] = {"source": "x.jsonl"}
    rules = {"every_steps": 2, "keep_best": "f1"}
    scores = [{"step": 2, "metrics": {"loss": 1.0, "f1": 80.0}, "rows": None, **RULES}]
    earlier = configured(**asks, evaluation=rules).model_dump(mode="json")
    checkpoint = save(make_store(tmp_path), 4, config=earlier, evaluations={"scores": scores, "is_due": False})
    assert scores_of(configured(**asks, evaluation=rules), checkpoint).best_step == 2
    config = configured(**asks, evaluation={**rules, key: value})
    assert scores_of(config, checkpoint).best_step is None
    (words,) = words_of_changes(config, checkpoint, 8)
    assert words.endswith("metrics so far, but for the loss, are not compared with later ones")


def test_epochs_may_change_and_say_it_in_steps(tmp_path: Path) -> None:
    earlier = training(epochs=2.0).model_dump(mode="json")
    checkpoint = save(make_store(tmp_path), 4, config=earlier, loader={"key": "old"}, steps=8)
    longer = training(epochs=5.0)
    assert words_of_changes(longer, checkpoint, 20) == [
        "train.epochs: 2 -> 5: the linear decay ends with step 20, not 8, now; the learning rate goes from 0.625 in"
        " step 4 to 0.8 in step 5, where it would have been 0.5"
    ]
    assert asks_for_more(longer, checkpoint) and not asks_for_more(training(epochs=2.0), checkpoint)
    assert not asks_for_more(training(steps=4), checkpoint) and asks_for_more(training(steps=5), checkpoint)
    refuse_fewer_steps(longer, checkpoint, 4)
    with pytest.raises(InputError, match=r"train\.epochs: 0\.5 is 2 steps, but 4 steps are done already"):
        refuse_fewer_steps(training(epochs=0.5), checkpoint, 2)
    # A checkpoint of an older coremill does not say how many steps its epochs were.
    older = save(make_store(tmp_path / "older"), 4, config=earlier, loader={"key": "old"})
    (words,) = words_of_changes(longer, older, 20)
    assert words.endswith("the run ends with step 20; the learning rate in step 5 is 0.8")


def test_the_commit_of_a_dataset_may_be_named_later() -> None:
    def asked(**data: object) -> RunConfig:
        return configured(train={"steps": 8}, data=data)

    earlier = asked(source="hf://a/b:plain").model_dump(mode="json")
    assert changes_of(earlier, asked(source="hf://a/b:plain@0123abc")) == []
    assert [change.key for change in changes_of(earlier, asked(source="hf://a/c:plain"))] == ["data.source"]
    pinned = asked(source="hf://a/b@v1").model_dump(mode="json")
    assert [change.key for change in changes_of(pinned, asked(source="hf://a/b@v2"))] == ["data.source"]
    beside = asked(source="a.txt", evaluation_source="hf://a/b").model_dump(mode="json")
    assert changes_of(beside, asked(source="a.txt", evaluation_source="hf://a/b@0123abc")) == []
    listed = asked(sources=["hf://a/b", {"source": "at@home.csv"}]).model_dump(mode="json")
    assert changes_of(listed, asked(sources=["hf://a/b@v1", {"source": "at@home.csv"}])) == []
    assert changes_of(listed, asked(sources=["hf://a/b", {"source": "at@work.csv"}])) != []


def test_what_may_not_change_says_the_value_it_had(tmp_path: Path) -> None:
    earlier = configured(train={"steps": 8}, data={"sequence_length": 64}).model_dump(mode="json")
    checkpoint = a_checkpoint(tmp_path, earlier)
    with pytest.raises(InputError) as caught:
        refuse_another_run(configured(train={"steps": 8, "freeze": ["lm_head.*"]}), checkpoint)
    message = str(caught.value)
    assert "where: data.sequence_length, train.freeze" in message
    assert "data.sequence_length was 64, is 512; train.freeze was [], is" in message
    assert "--set data.sequence_length=64 --set 'train.freeze=[]'" in message and "--fresh" in message
    assert "train.learning_rate" in message and "evaluation" in message  # what may


def test_adapters_beside_another_model_are_not_continued(tmp_path: Path) -> None:
    base = Base("/models/one", None, "aa11")
    checkpoint = save(make_store(tmp_path), 4, base=base.to_json())
    refuse_other_base(checkpoint, base, anew="")
    refuse_other_base(checkpoint, replace(base, name="/moved/one"), anew="")  # the same files elsewhere
    with pytest.raises(
        InputError, match=r"(?s)beside another model than /models/one is now.*aa11; here it is bb22"
    ) as said:
        refuse_other_base(checkpoint, replace(base, digest="bb22"), anew="; or start anew with --fresh")
    assert "bring those weights back; or start anew with --fresh" in str(said.value)
    refuse_other_base(save(make_store(tmp_path / "older"), 4), base, anew="")  # of a release that did not write it down
