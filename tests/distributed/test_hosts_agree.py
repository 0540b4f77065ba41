"""Hosts that would train different things train nothing; replicas that drift apart save nothing."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ranks
from coremill.errors import CoremillError
from coremill.world.group import join_world
from coremill.world.identity import RankIdentity
from end_to_end.scene import RUN_FILE, make_cache, write_text
from saved_training import train_saved
from tiny_models import make_model, make_tokenizer
from training import make_packed


def on_clones(identity: RankIdentity) -> dict[str, Any]:
    """Two ranks on each of two machines of one name, as torchrun tells them; each has a core of its own."""
    from coremill.engines.wire.link import measure_link
    from coremill.run.orders import _cpus_of_node

    node, local_rank = divmod(identity.rank, 2)
    core = 10 * node + local_rank
    os.sched_getaffinity = lambda _: {core}  # type: ignore[assignment]
    here = replace(identity, local_rank=local_rank, local_size=2, node_rank=node, launcher="torchrun")
    with join_world(here, timeout_seconds=60) as world:
        return {
            "node": (world.node_rank, world.nodes, world.node_of_rank),
            "hostnames": world.hostnames,
            "cpus": _cpus_of_node(world),
            "link": measure_link(world),
        }


def test_machines_of_one_name_are_told_apart() -> None:
    results = ranks.run_ranks(on_clones, 4, join=False)
    name = os.uname().nodename
    for rank, result in enumerate(results):
        assert result["node"] == (rank // 2, 2, (0, 0, 1, 1))
        assert result["hostnames"] == tuple(f"{name} (node {node})" for node in (0, 0, 1, 1))
        assert result["cpus"] == {10 * (rank // 2), 10 * (rank // 2) + 1}
        assert result["link"] == results[0]["link"] > 0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two hosts with a disk each, alike to the byte, and what differs on a third."""
    folder = tmp_path_factory.mktemp("hosts")
    alike = [folder / "a", folder / "b", folder / "other"]
    for host in alike:
        make_tokenizer(make_model(host / "model", "llama"))
        write_text(host / "text")
        (host / "run.yaml").write_text(RUN_FILE)
        make_cache(host / "cache")
    part = folder / "other" / "text" / "part.jsonl"
    part.write_text(part.read_text().replace("mill", "null", 1))
    flip_a_bit(folder / "other" / "model" / "model.safetensors")
    return alike


def flip_a_bit(file: Path) -> None:
    """The lowest of one weight."""
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)


def run_on(identity: RankIdentity, folders: list[str], settings: list[list[str]], launcher: str) -> dict[str, Any]:
    """`coremill train` as the only rank of a host: how it ended, in whose words."""
    from coremill.config.load import load_config
    from coremill.run.opening import Options
    from coremill.run.story import run_as_rank

    os.chdir(folders[identity.rank])
    os.environ["COREMILL_CACHE"] = str(Path(folders[identity.rank]) / "cache")
    here = replace(identity, local_rank=0, local_size=1, node_rank=identity.rank, launcher=launcher)  # type: ignore[arg-type]
    try:
        code = run_as_rank(lambda: load_config(Path("run.yaml"), settings[identity.rank]), here, Options(fresh=True))
    except CoremillError as error:
        return {"kind": type(error).__name__, "code": error.exit_code, "silent": error.silent, "text": str(error)}
    return {"kind": "", "code": code, "silent": True, "text": ""}


def on_two(
    first: Path, second: Path, *settings: str, only_first: tuple[str, ...] = (), launcher: str = "torchrun"
) -> list[dict[str, Any]]:
    common = ["parallel.engine=replicate", "train.steps=3", *settings]
    return ranks.run_ranks(
        run_on,
        2,
        join=False,
        folders=[str(first), str(second)],
        settings=[[*common, *only_first], common],
        launcher=launcher,
    )


def test_hosts_that_are_alike_train(hosts: list[Path]) -> None:
    """Also where the model lies elsewhere; two of one name are two in the report."""
    run = hosts[0].with_name("run")
    results = on_two(hosts[0], hosts[1], f"run.folder={run}", only_first=(f"model={hosts[1] / 'model'}",))
    assert [result["code"] for result in results] == [0, 0], results
    report = json.loads((run / "report.json").read_text())
    assert report["state"] == "finished" and report["steps"] == 3
    names = [f"{os.uname().nodename} (node {node})" for node in (0, 1)]
    assert report["environment"]["hosts"] == [row["hostname"] for row in report["ranks"]] == names


@pytest.mark.parametrize(
    ("other", "only_first", "words"),
    [
        ("text", (), ["the data: ", "60 documents"]),
        ("model", (), ["the model's weights: ", "bytes, hash "]),
        (None, ("train.steps=4",), ["train.steps: 4 on {0}; 3 on {1}"]),
        (None, ("train.learning_rate=0.5", "train.seed=8"), ["train.learning_rate: 0.5 on", "train.seed: 8 on"]),
    ],
    ids=["one word of data", "one weight", "steps", "settings"],
)
def test_hosts_that_differ_are_refused(hosts, tmp_path, other, only_first, words) -> None:
    second = tmp_path / "second"
    second.mkdir()
    for name in ("run.yaml", "model", "text", "cache"):
        (second / name).symlink_to((hosts[2] if name == other else hosts[1]) / name)
    results = on_two(hosts[0], second, only_first=only_first)
    names = [f"{os.uname().nodename} (node {node})" for node in (0, 1)]
    for result in results:  # each host may have a screen of its own
        assert (result["kind"], result["code"], result["silent"]) == ("InputError", 78, False)
        assert result["text"].startswith(f"{names[1]} and {names[0]} differ in ")
        for each in words:
            assert each.format(*names) in result["text"]
    assert results[0]["text"] == results[1]["text"]
    assert not (second / "run" / "events").exists()


def test_under_mpirun_one_rank_speaks_for_all(hosts: list[Path]) -> None:
    results = on_two(hosts[0], hosts[1], only_first=("train.steps=4",), launcher="open-mpi")
    assert [(result["kind"], result["code"], result["silent"]) for result in results] == [
        ("InputError", 78, False),
        ("PeerFailed", 78, True),
    ]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("replicas")
    for name in ("model", "other"):
        make_model(folder / name, "llama")
    flip_a_bit(folder / "other" / "model.safetensors")
    data = make_packed(folder / "data", rows=128, length=16, vocabulary=90)
    return {"folder": folder, "model_folder": str(folder / "model"), "data": data.to_json()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_replicas_that_drift_apart_are_not_saved(inputs, tmp_path, dtype) -> None:
    """One bit of one weight on one rank of three; in bf16 it is the master's, which the module does not see."""
    known = {name: inputs[name] for name in ("model_folder", "data")}
    results = ranks.run_ranks(train_saved, 3, folder=str(tmp_path), drift_at=6, steps=12, dtype=dtype, **known)
    name = os.uname().nodename
    for result in results:
        assert f"rank 2 on {name} holds different weights than the other 2 after step 8" in result["ended"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000004"]


def test_a_drift_after_the_last_save_is_found_at_the_end(inputs, tmp_path) -> None:
    known = {name: inputs[name] for name in ("model_folder", "data")}
    results = ranks.run_ranks(
        train_saved, 2, folder=str(tmp_path), drift_at=2, steps=3, every="never", model_folder_of_last=None, **known
    )
    name = os.uname().nodename
    for result in results:
        assert f"rank 0 on {name} and rank 1 on {name} hold different weights after the last step" in result["ended"]


def test_replicas_that_loaded_different_files_do_not_start(inputs, tmp_path) -> None:
    known = {name: inputs[name] for name in ("model_folder", "data")}
    with pytest.raises(ranks.RankError, match="hold different weights after loading") as caught:
        other = str(inputs["folder"] / "other")
        ranks.run_ranks(train_saved, 2, folder=str(tmp_path), model_folder_of_last=other, **known)
    assert caught.value.kind == "Drifted"
