"""More values of other tools -> ours (see translate.py): how ranks are started and share the work, example scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coremill.config.other_tools import table
from coremill.config.translate import Cure, Given, Translate, accepts, pads_rows
from coremill.config.translate_datasets import dataset_source

LEFT_OUT_RANKS = (
    "left out, coremill train on one machine takes the number the plan finds best;"
    " coremill launch and several machines one per NUMA node"
)

_OF_DEVICES = "it names GPUs or other devices; on CPUs the plan chooses how ranks share the work"
_SHARDED = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "true", "false", "1", "2", "auto_wrap")


def _engine(*, sharded: bool) -> str:
    """The engine that keeps a part of the model on each rank, or all of it."""
    return str(table()["engines"]["a part on each rank" if sharded else "all on each rank"])


def unless(off: Sequence[Any], why: str, on: Translate | None) -> Translate:
    """Values that only say a thing is off, or left to the tool, have nothing to set; for others, `on`."""
    words = {str(value).lower() for value in off}

    def unless_off(value: Any, given: Given) -> Cure | None:
        if str(value).lower() in words:
            return Cure(why=why or None)
        return on(value, given) if on is not None else None

    return unless_off


def whole_number(value: Any) -> int | None:
    """Also in quotes, as command lines and YAML have it."""
    if isinstance(value, bool):
        return None
    text = str(value).strip()
    return int(text) if text.isdecimal() else None


def machines(given: Given) -> int:
    """How many machines the settings beside say there are."""
    found = (whole_number(given.get(name)) for name in ("num_machines", "nnodes", "num_nodes"))
    return next((number for number in found if number), 1)


def ranks_of_all(value: Any, given: Given) -> Cure | None:
    """`num_processes: 16` with `num_machines: 4` is 4 on each."""
    total, hosts = whole_number(value), machines(given)
    if str(value).strip() == "-1":
        return Cure(why=f"-1 leaves it to accelerate; {LEFT_OUT_RANKS}")
    if not total or total % hosts:
        return None
    ranks = {"parallel.ranks_per_node": total // hosts}
    return Cure(ranks, f" ({total} ranks over {hosts} machines)" if hosts > 1 else "")


def distributed_type(value: Any, given: Given) -> Cure | None:
    """Every DistributedType of accelerate, and words of other tools for the same."""
    word = str(value).lower().removeprefix("distributedtype.")
    if word in ("no", "none", "false"):
        return Cure(why="no setting is needed for one rank; parallel.ranks_per_node says how many there are")
    if word in ("fsdp", "fsdp2"):
        return sharding(given.get("fsdp_sharding_strategy") or True, given) or sharding(True, given)
    if word in ("full_shard", "zero", "zero1", "zero2", "zero3", "hybrid_shard"):
        return Cure({"parallel.engine": _engine(sharded=True)})
    if word == "deepspeed":
        return _by_stage(given)
    if word in ("multi_cpu", "ddp", "data_parallel", "zero_0", "no_shard"):
        return Cure({"parallel.engine": _engine(sharded=False)})
    if word.startswith("multi_"):
        return Cure({"parallel.engine": _engine(sharded=False)}, why=_OF_DEVICES)
    if accepts("parallel.engine", word):
        return Cure({"parallel.engine": word})
    return Cure(why=_OF_DEVICES) if word in ("xla", "tpu", "mps", "megatron_lm") else None


def _by_stage(given: Given) -> Cure:
    """accelerate's file has the stage, or names a DeepSpeed file that does."""
    stage = given.get("zero_stage", given.get("stage"))
    why = "DeepSpeed itself is not run; shard keeps 1/N of the model on each rank too"
    return Cure({"parallel.engine": _engine(sharded=whole_number(stage) != 0)}, why=why)


def zero_stage(value: Any, _: Given) -> Cure | None:
    stage = whole_number(value)
    if stage is None or stage > 3:
        return None
    return Cure({"parallel.engine": _engine(sharded=stage > 0)})


def sharding(value: Any, _: Given) -> Cure | None:
    """Strategies of FSDP; what the section says of its details has rows of its own."""
    if value in ("", False, None) or value == [] or value == {}:
        return Cure()
    words = str(value).lower().split() if isinstance(value, str) else []
    if "no_shard" in words or value == 3:
        return Cure({"parallel.engine": _engine(sharded=False)})
    known = isinstance(value, Mapping | bool | int | list) or any(word in _SHARDED for word in words)
    return Cure({"parallel.engine": _engine(sharded=True)}) if known else None


def resharding(value: Any, given: Given) -> Cure | None:
    """FSDP2's switch, and FSDP's strategies, which newer files of accelerate have under the same name."""
    if not isinstance(value, bool):
        return sharding(value, given)
    return Cure({"parallel.engine": _engine(sharded=True), "parallel.keep_gathered": not value})


def dataset_of_config(value: Any, given: Given) -> Cure | None:
    """`--dataset_config_name` is a part of the address, beside the dataset's name."""
    named = next((given[name] for name in ("dataset_name", "dataset", "dataset_path") if given.get(name)), None)
    return dataset_source(named, given) if isinstance(named, str) and isinstance(value, str) else None


def row_length(value: Any, given: Given) -> Cure | None:
    """Tasks that pad take it as the longest row."""
    if not accepts("data.sequence_length", value):
        return None
    padded = "rows are at most this long; short ones are padded to the longest beside them"
    return Cure({"data.sequence_length": value}, why=padded if pads_rows(given) else None)


def betas(value: Any, _: Given) -> Cure | None:
    """DeepSpeed's list of two."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    both = dict(zip(("train.adam_beta1", "train.adam_beta2"), value, strict=True))
    return Cure(both) if all(accepts(key, one) for key, one in both.items()) else None


def glue_task(value: Any, _: Given) -> Cure | None:
    """A task of GLUE is a config of the dataset, with columns of its own."""
    name = str(value).lower()
    columns = table()["glue"].get(name)
    return None if columns is None else Cure({"data.source": f"hf://nyu-mll/glue:{name}", "data.text_columns": columns})


def column_list(value: Any, _: Given) -> Cure | None:
    """`sentence1,sentence2`."""
    columns = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    return Cure({"data.text_columns": columns}) if accepts("data.text_columns", columns) else None


def folder_of_name(value: Any, _: Given) -> Cure | None:
    return Cure({"run.folder": f"runs/{value}"}) if isinstance(value, str) and value else None


def evaluated(value: Any, given: Given) -> Cure | None:
    """`do_eval` beside a dataset of the hub: the example scripts take its validation rows."""
    named = [given.get(name) for name in ("dataset_name", "task_name")]
    if value is not True or not any(isinstance(name, str) and "." not in name for name in named):
        return Cure()
    return Cure({"data.evaluation_split": "validation_matched" if named[1] == "mnli" else "validation"})
