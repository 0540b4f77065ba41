"""Which runs are compared, and what a change may add."""

from __future__ import annotations

from benchmarks.same_bits import NEW_KEYS, cases, commands_in, without_new_keys


def test_both_engines_on_every_number_of_ranks_and_both_models():
    plain = {(case.model, case.engine, case.ranks) for case in cases() if not case.settings}

    assert plain == {
        (model, engine, ranks)
        for model in ("tied", "untied")
        for engine in ("replicate", "shard")
        for ranks in (1, 2, 4)
    }
    assert len({case.name for case in cases()}) == len(cases())


def test_a_run_that_goes_on_brings_the_one_it_goes_on_from():
    chosen = cases("shard 2 from-step-10-of-4")

    assert [case.name for case in chosen] == ["untied shard 4", "untied shard 2 from-step-10-of-4"]


def test_only_the_keys_the_change_is_for_may_be_new():
    schema = {
        f"{NEW_KEYS['train.optimizer']}.default": '"adamw"',
        "$defs.TrainSection.properties.steps.type": '"integer"',
    }

    assert list(without_new_keys(schema)) == ["$defs.TrainSection.properties.steps.type"]


def test_names_in_the_box_of_commands():
    options = "╭─ Options ─╮\n│ --help  x │\n╰─\n"
    text = f"{options}╭─ Commands ─╮\n│ train   Train a │\n│         model   │\n│ config  Look    │\n╰──╯\n"

    assert commands_in(text) == ["train", "config"]
    assert commands_in("╭─ Options ─╮\n│ train  x │\n") == []
