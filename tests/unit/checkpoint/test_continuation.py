"""What may differ between the config of a checkpoint and that of its continuation."""

from __future__ import annotations

from coremill.checkpoint.continuation import fixed_keys
from coremill.config.schema import RunConfig


def test_a_checkpoint_older_than_a_key_is_continued() -> None:
    config = RunConfig()
    earlier = config.model_dump(mode="json")
    del earlier["model"]["trust_remote_code"], earlier["model"]["code_sha256"], earlier["numerics"]
    assert fixed_keys(earlier, config) == []
    earlier["train"]["learning_rate"] = 9.0
    assert fixed_keys(earlier, config) == ["train.learning_rate"]
    trusting = config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": True})})
    assert fixed_keys(earlier, trusting) == ["model.trust_remote_code", "train.learning_rate"]
