"""What `coremill k8s render` refuses or warns of, before anything is written; and the seeds' case."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from clusters import LLAMA3_8B, LONG, loaded, of_kind
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from coremill.config.load import load_config
from coremill.errors import InputError
from coremill.hardware.instances import instance_named
from coremill.hardware.pods import room_for_a_pod
from coremill.k8s.names import as_label, job_name, longest_job_name
from coremill.k8s.render import render_objects
from coremill.k8s.render_command import render
from coremill.run.plan_command import plan_and_card


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def refused(
    folder: Path, section: dict[str, Any] | None = None, *, name: str = "tiny.yaml", **values: Any
) -> InputError:
    with pytest.raises(InputError) as caught:
        render_objects(loaded(folder, section, name=name, **values))
    assert caught.value.exit_code == 78
    return caught.value


def test_an_unknown_type_is_answered_with_the_nearest(tmp_path: Path) -> None:
    wrong = refused(tmp_path, fleet__instance="c7i.8xlarg")
    assert "c7i.8xlarge" in (wrong.do or "") and "fleet.instance" in (wrong.where or "")
    wrong = refused(tmp_path, {"instances": ["c7i.8xlarge", "24xlarge, 48xlarge"]})
    assert "24xlarge, 48xlarge" in wrong.what and "kubernetes.instances" in (wrong.where or "")


def test_no_image(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 1}\n")
    with pytest.raises(InputError, match="no kubernetes.image") as caught:
        render_objects(load_config(path))
    assert "--set kubernetes.image" in (caught.value.do or "")


def test_names_beyond_dns(tmp_path: Path) -> None:
    long = refused(tmp_path, name="x" * 60 + ".yaml")
    assert "60 characters" in long.what and "63" in (long.why or "") and "kubernetes.name" in (long.do or "")
    assert "llama3-8b" in (refused(tmp_path, {"name": "Llama3_8B"}).do or "")
    assert "kubernetes.namespace" in (refused(tmp_path, {"namespace": "My_Team"}).where or "")
    assert "kubernetes.queue" in (refused(tmp_path, {"queue": "q" * 64}).where or "")
    assert "kubernetes.claim" in (refused(tmp_path, {"claim": "Volume!"}).where or "")
    # The longest that is taken: pods, host names and labels all fit.
    for kind in ("trainjob", "job"):
        for nodes in (1, 11, 101):
            run = loaded(tmp_path, {"kind": kind}, fleet__nodes=nodes)
            longest = "x" * longest_job_name(run.config)
            objects = render_objects(loaded(tmp_path, {"kind": kind, "name": longest}, fleet__nodes=nodes)).objects
            pod = f"{longest}-{'' if kind == 'job' else 'node-0-'}{nodes - 1}-x7k2p"
            assert len(pod) <= 63 and all(len(one["metadata"]["name"]) <= 63 for one in objects[1:3])


@pytest.mark.parametrize("path", ["/tmp", "/etc", "/etc/coremill", "/usr", "/proc/x", "/dev/shm", "/a/../etc", "/a/."])
def test_a_volume_where_pods_have_something_else(path: str, tmp_path: Path) -> None:
    words = str(refused(tmp_path, {"mount_path": path}))
    assert f"kubernetes.mount_path is {path}\n" in words and "for instance /fsx" in words


@given(st.text(min_size=1, max_size=40))
@settings(max_examples=200 if LONG else 50, deadline=None)
def test_any_file_name_makes_a_name_or_none(text: str) -> None:
    made = as_label(text)
    assert made == "" or (made[0].isalpha() and made[-1].isalnum() and made == made.lower() and made.isascii())
    assert as_label(made) == made


def test_a_run_that_fits_no_pod(tmp_path: Path) -> None:
    values = {f"model__{key}": value for key, value in LLAMA3_8B.items()} | {"tokenizer": "built-in"}
    wrong = refused(tmp_path, fleet__nodes=1, **values)
    assert "does not fit into its pods" in wrong.what and "30 CPUs, 55 GiB" in (wrong.why or "")
    assert "--set train.optimizer=adamw-8bit" in (wrong.do or "") and "coremill plan" in (wrong.do or "")
    # Larger types are tried as pods too, and named where the section lists types.
    plan, _ = plan_and_card(loaded(tmp_path, {"instances": ["c7i.8xlarge"]}, fleet__nodes=1, **values), None)
    (larger,) = (remedy for remedy in plan.remedies if "kubernetes.instances" in " ".join(remedy.settings))
    named = larger.settings[0].removeprefix("fleet.instance=")
    assert larger.settings[1] == f"kubernetes.instances=[{named}]"
    room = room_for_a_pod(instance_named(named))[1] * 2**30
    assert larger.total_bytes_per_rank <= room
    asked = refused(tmp_path, {"memory_gib": 40_000})
    assert "larger than any node" in asked.what and "kubernetes.memory_gib" in (asked.where or "")


def test_the_seeds_case_fits_and_its_times_are_told(tmp_path: Path) -> None:
    """Four pods of Llama-3-8B, on spot: the state is more than two minutes can save."""
    values = {f"model__{key}": value for key, value in LLAMA3_8B.items()} | {"tokenizer": "built-in"}
    rendered = render_objects(loaded(tmp_path, {"capacity": "spot", "zone": "us-west-2a"}, **values))
    assert rendered.job.plan is not None and rendered.job.plan.usd_per_hour == pytest.approx(5.712)
    (warning,) = (note for note in rendered.notes if note.startswith("warning:"))
    assert "spot" in warning and "last save" in warning
    slow = render_objects(loaded(tmp_path, {"zone": "us-west-2a"}, **values))
    assert not [note for note in slow.notes if note.startswith("warning:")]
    # On demand a pod is given as long as its save takes.
    assert slow.job.plan is not None and slow.job.plan.save is not None
    assert slow.job.times.pod_grace_seconds > slow.job.plan.save.seconds + slow.job.plan.step_seconds.total


def test_where_no_type_is_named_the_cheapest_that_fits_is_taken(tmp_path: Path) -> None:
    rendered = render_objects(loaded(tmp_path, {"memory_gib": 100, "cpus": 30}, fleet__instance=None))
    chosen = rendered.job.pod.instances[0]
    assert "cheapest" in rendered.job.pod.reason and chosen.name in rendered.job.pod.reason
    requirements = of_kind(rendered.objects, "NodePool")["spec"]["template"]["spec"]["requirements"]
    assert {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": [chosen.name]} in requirements


def test_paths_that_pods_do_not_see(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512} | shape))
    (tmp_path / "notes.txt").write_text("text")
    values: dict[str, Any] = {"model__weights": "random", "tokenizer": "built-in", "data__source": "notes.txt"}

    def warnings(**more: Any) -> str:
        rendered = render_objects(loaded(tmp_path, {"zone": "us-west-2a"}, **(values | more)))
        return "\n".join(note for note in rendered.notes if note.startswith("warning:"))

    said = warnings(model__name="my-model")  # beside the run file
    assert "model: my-model is a path of this machine" in said and "data.source: notes.txt" in said
    assert str(model) in warnings(model__name=str(model))
    assert warnings(data__source="/fsx/notes.txt") == "" == warnings(data__source="hf://owner/name")
    # A model on the volume cannot be seen from here: it is rendered, unplanned, and said so.
    on_volume = warnings(model__name="/fsx/models/mine", data__source="/fsx/notes.txt")
    assert "/fsx/models/mine is not seen from here" in on_volume
    wrong = refused(tmp_path, model__name="/fsx/models/mine", fleet__instance=None)
    assert "no instance type is named" in wrong.what


def test_the_command_writes_yaml_alone_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = io.StringIO()
    render(loaded(tmp_path), None, Console(file=messages, width=80))
    out = capsys.readouterr().out
    assert out == render_objects(loaded(tmp_path)).to_yaml() and out.startswith("apiVersion: v1\nkind: Namespace\n")
    assert "4 x 30 CPUs, 55 GiB, 1 rank of 15 threads each" in messages.getvalue()
    assert "$5.71 per hour" in messages.getvalue()
    render(loaded(tmp_path), tmp_path / "out", Console(file=io.StringIO()))
    assert capsys.readouterr().out == "" and (tmp_path / "out" / "00-namespace.yaml").is_file()
    with pytest.raises(InputError, match="cannot be written"):
        render(loaded(tmp_path), tmp_path / "tiny.yaml", Console(file=io.StringIO()))


def test_the_name_of_the_job(tmp_path: Path) -> None:
    assert job_name(loaded(tmp_path, name="Llama3_8B.yaml")).value == "llama3-8b"
    assert job_name(loaded(tmp_path, name="8b.yaml")).value == "run-8b"
    assert job_name(loaded(tmp_path, {"name": "mine"})).reason == "set by you"
