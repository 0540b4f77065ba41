"""What `coremill export` finds in the folder of a run that goes on meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coremill.checkpoint.manifest import PassedOver, Survey, survey
from coremill.config.load import load_config
from coremill.errors import InputError
from coremill.run import export_command
from coremill.run.folder import RunFolder
from unit.checkpoint.small_checkpoints import make_store, save


@pytest.fixture
def run(tmp_path: Path) -> Any:
    (tmp_path / "run.yaml").write_text(f"run: {{folder: {tmp_path / 'run'}}}\ntrain: {{steps: 10}}\n")
    return load_config(tmp_path / "run.yaml").config, RunFolder(tmp_path / "run")


def test_a_checkpoint_that_is_replaced_while_it_is_looked_at_is_looked_for_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one is kept, its folder was listed and is gone; what replaced it came too late for the list."""
    config, folder = run
    save(make_store(folder.path), 9)
    looks = iter([Survey((), (PassedOver("step-00000008", "manifest.json is missing"),))])
    monkeypatch.setattr(export_command, "survey", lambda place: next(looks, None) or survey(place))
    assert [each.step for each in export_command._candidates(config, folder, None)] == [9]


def test_one_that_is_there_and_damaged_is_not_waited_for(run: Any) -> None:
    config, folder = run
    store = make_store(folder.path)
    save(store, 9)
    (store.folder / "step-00000009" / "manifest.json").unlink()
    with pytest.raises(InputError, match="there is no checkpoint to export") as refused:
        export_command._candidates(config, folder, None)
    assert "step-00000009 passed over" in str(refused.value)


def test_a_second_export_to_the_same_place_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    """Both would write one hidden folder: the first to end showed what the other was in the middle of."""
    place = tmp_path / "exports" / "model"
    with export_command._place_of(place):
        with pytest.raises(InputError, match=f"another export is being written to {place}"):
            with export_command._place_of(place):
                pytest.fail("two of them write there")
        place.mkdir()
        (place / "config.json").touch()
    with pytest.raises(InputError, match="is not empty"):  # it was, when the command looked first
        with export_command._place_of(place):
            pytest.fail("the first one's folder is written over")
    assert list(place.parent.iterdir()) == [place]
