"""What may differ between the config of a checkpoint and that of its continuation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import make_store, save

from coremill.checkpoint.continuation import describe_changed_steps, fixed_keys, refuse_other_data, written_config
from coremill.checkpoint.manifest import Checkpoint
from coremill.config.load import load_config
from coremill.config.schema import RunConfig
from coremill.config.show import show
from coremill.data.packed import PackedData
from coremill.errors import InputError

KEY = "data.special_tokens"


def test_a_checkpoint_older_than_a_key_is_continued() -> None:
    config = RunConfig()
    earlier = config.model_dump(mode="json")
    del earlier["model"]["trust_remote_code"], earlier["model"]["code_sha256"], earlier["numerics"]
    assert fixed_keys(earlier, config) == []
    earlier["train"]["learning_rate"] = 9.0
    assert fixed_keys(earlier, config) == ["train.learning_rate"]
    trusting = config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": True})})
    assert fixed_keys(earlier, trusting) == ["model.trust_remote_code", "train.learning_rate"]


def test_a_checkpoint_of_another_optimizer_is_not_continued() -> None:
    earlier = RunConfig().model_dump(mode="json")
    earlier["train"]["optimizer"] = "another"  # whose state this one could not read
    assert fixed_keys(earlier, RunConfig()) == ["train.optimizer"]


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


def test_another_end_says_what_becomes_of_the_learning_rate(tmp_path: Path) -> None:
    def train(**more: Any) -> RunConfig:
        return configured(train={"learning_rate": 1.0, **more})

    checkpoint = a_checkpoint(tmp_path, train(steps=8).model_dump(mode="json"))
    assert describe_changed_steps(train(steps=8), checkpoint) is None
    assert describe_changed_steps(train(steps=20), checkpoint) == (
        "train.steps: 8 -> 20: the linear decay ends there now; the learning rate goes from 0.625 in step 4 to 0.8 in"
        " step 5, where it would have been 0.5"
    )
    assert "from 0.625 in step 4 to 0.2 in step 5" in str(describe_changed_steps(train(steps=5), checkpoint))
    assert describe_changed_steps(train(steps=4), checkpoint) == "train.steps: 8 -> 4: no step is left"
    constant = describe_changed_steps(train(steps=20, schedule="constant"), checkpoint)
    assert constant == "train.steps: 8 -> 20: the learning rate stays as it was"
    done = a_checkpoint(tmp_path / "done", train(steps=4).model_dump(mode="json"))
    assert str(describe_changed_steps(train(steps=8), done)).endswith("from 0.25 in step 4 to 0.5 in step 5")
