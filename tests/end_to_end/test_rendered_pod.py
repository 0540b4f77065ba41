"""What `coremill k8s render` writes is run as a pod would run it: its command, its environment, its run file."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from ruamel.yaml import YAML

from end_to_end.scene import Scene

SECTION = """
fleet: {nodes: 1, instance: c7i.8xlarge}
kubernetes:
  image: example.com/coremill:0.1.0
  kind: job
  karpenter: none
  cpus: 4
  memory_gib: 8
  mount_path: VOLUME
"""


def test_the_pods_command_trains_on_the_volume(scene: Scene, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    shutil.copytree(scene.path("model"), volume / "model")
    shutil.copytree(scene.path("text"), volume / "text")
    (volume / "coremill").mkdir()
    written = scene.path("run.yaml").read_text().replace("model: model", f"model: {volume}/model")
    written = written.replace("text/*", f"{volume}/text/*").replace("  threads_per_rank: 1\n", "")
    scene.path("pod.yaml").write_text(written + SECTION.replace("VOLUME", str(volume)))
    rendered = scene.coremill("k8s", "render", "pod.yaml")
    assert rendered.code == 0, rendered
    assert "threads_per_rank is 2" in rendered.err and rendered.err.count("warning") == 1
    assert "warning: half or more of c7i.8xlarge would be paid for and idle" in rendered.err
    objects = {one["kind"]: one for one in YAML(typ="safe", pure=True).load_all(rendered.out)}
    container = objects["Job"]["spec"]["template"]["spec"]["containers"][0]
    mounted = tmp_path / "etc"
    mounted.mkdir()
    (mounted / "run.yaml").write_text(objects["ConfigMap"]["data"]["run.yaml"])
    environ = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    assert environ["PET_NNODES"] == "1" and environ["COREMILL_CACHE"].startswith(str(volume))
    environ |= {"PET_NODE_RANK": "0", "COREMILL_CACHE": str(scene.cache)}  # the rates of this machine are there
    program, command, _ = container["command"]
    assert program == "coremill"
    ended = scene.run([sys.executable, "-m", "coremill", command, mounted / "run.yaml"], environ)
    assert ended.code == 0, ended
    assert ended.left == []
    report = json.loads((volume / "coremill" / "pod" / "report.json").read_text())
    assert report["steps"] == 8 and report["state"] == "finished"


def test_bad_input_is_one_message_and_78(scene: Scene) -> None:
    refused = scene.coremill("k8s", "render", "run.yaml")
    assert (refused.code, refused.out) == (78, "") and "no kubernetes.image" in refused.err
