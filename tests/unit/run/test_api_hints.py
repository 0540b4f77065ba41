"""From Python: what is easily got wrong with the four functions is answered with how it is written."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from coremill import api
from coremill.config.load import load_config
from coremill.errors import InputError
from coremill.report.summary import summarise


@pytest.mark.parametrize("function", [api.load_config, api.plan, api.train])
@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"learning_rate": 1e-3}, "settings={'train.learning_rate': 0.001}"),
        ({"num_train_epochs": 2}, "settings={'train.epochs': 2}"),
        ({"steps": 5}, "settings={'train.steps': 5}"),
    ],
)
def test_keys_of_the_run_file_go_in_settings(function: Any, given: dict[str, Any], settings: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument") as caught:
        function("run.yaml", **given)
    assert str(caught.value).endswith(settings)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'frobnicate'$"):
        function(frobnicate=1)
    assert "settings" in inspect.signature(function).parameters and function.__doc__


def test_sections_are_in_config() -> None:
    loaded: Any = load_config(None, ["train.steps=5"])
    with pytest.raises(
        AttributeError, match=r"has no attribute 'train': sections are in its \.config.*\.config\.train"
    ):
        _ = loaded.train
    assert not hasattr(loaded, "frobnicate") and not hasattr(loaded, "__deepcopy__")
    assert copy.deepcopy(loaded) == loaded and pickle.loads(pickle.dumps(loaded)) == loaded


def test_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name the folder a run left"):
        summarise(tmp_path)
    for place, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text("{}")
        os.utime(tmp_path / name / "plan.json", (place, place))
    with pytest.raises(InputError) as caught:
        summarise(tmp_path)
    assert caught.value.why == "it holds 2 runs"
    assert caught.value.do == f"name one of them: {tmp_path}/new, {tmp_path}/old; several are compared"
