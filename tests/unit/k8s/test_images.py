"""Images: found or refused, unpacked layer by layer, and what the runtime is told of a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coremill.errors import InputError
from coremill.k8s.check.manifests import manifests_in
from coremill.k8s.rehearse.container import Surroundings, runtime_config
from coremill.k8s.rehearse.controllers import plan_set
from coremill.k8s.rehearse.images import Image, find_image
from coremill.k8s.rehearse.pods import Secrets, make_pod
from coremill.k8s.rehearse.written import WrittenObjects
from coremill.k8s.render import render_objects, to_yaml
from k8s.tiny_images import layer, oci_archive
from unit.k8s.clusters import loaded


@pytest.mark.skipif(os.geteuid() != 0, reason="layers are unpacked inside their root, which takes root")
def test_layers_lie_over_each_other_and_none_leads_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    layers = [
        layer(
            ("etc", None), ("etc/kept", b"1"), ("etc/gone", b"1"), ("opaque", None), ("opaque/old", b"1"),
            ("bin", None), ("bin/dash", b"dash"), ("bin/sh", "dash"), ("out", str(outside)), ("was-folder", None),
            (str(outside).lstrip("/"), None),
        ),
        layer(
            ("etc/.wh.gone", b""), ("opaque/new", b"2"), ("opaque/.wh..wh..opq", b""),
            ("bin/sh", b"a shell of its own"), ("was-folder", b"2"),
        ),
        layer(("out/escaped", b"3"), ("../../escaped", b"3")),
    ]  # fmt: skip
    config = {"Env": ["PATH=/bin", "A=b=c"], "WorkingDir": "/home/me"}
    found = find_image(str(oci_archive(tmp_path / "image.tar", layers, config)))
    image = found.unpack(tmp_path / "image")
    root = image.root
    assert (image.environ, image.working_folder) == ({"PATH": "/bin", "A": "b=c"}, "/home/me")
    assert sorted(path.name for path in (root / "etc").iterdir()) == ["kept"]
    assert [path.name for path in (root / "opaque").iterdir()] == ["new"]
    assert (root / "bin/dash").read_text() == "dash" and (root / "bin/sh").read_text() == "a shell of its own"
    assert (root / "was-folder").read_text() == "2" and (root / "escaped").read_text() == "3"
    assert list(outside.iterdir()) == [] and not (tmp_path / "escaped").exists()
    assert (root / str(outside).lstrip("/") / "escaped").read_text() == "3"
    assert (root / "etc/kept").stat().st_uid == 0

    kept = (root / "etc/kept").stat().st_ino
    assert find_image(str(tmp_path / "image.tar")).unpack(tmp_path / "image").root == root
    assert (root / "etc/kept").stat().st_ino == kept  # the same image is not unpacked again
    oci_archive(tmp_path / "image.tar", layers[1:2])
    assert not (find_image(str(tmp_path / "image.tar")).unpack(tmp_path / "image").root / "etc/kept").exists()


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_bytes(b"no archive")
    (tmp_path / "empty").mkdir()
    for name, words in {"image.tar": "is not an image", "empty": "holds neither", "imag.tar": "did you mean"}.items():
        with pytest.raises(InputError) as refused:
            find_image(str(tmp_path / name))
        assert words in str(refused.value) and refused.value.where == "--image"


def test_the_runtime_is_told_what_the_manifest_says(tmp_path: Path) -> None:
    text = to_yaml(
        render_objects(loaded(tmp_path, {"kind": "job", "karpenter": "none", "cpus": 4, "memory_gib": 4})).objects
    )
    objects = WrittenObjects(tuple(manifests_in(text, "all.yaml")))
    pod = make_pod(plan_set(objects).job, 0, "xxxxx", "10.0.0.1", objects, Secrets(objects, "token"))
    around = Surroundings(
        network="/networks/1", mounts=[("/here", "/fsx", False), ("/hosts", "/etc/hosts", True)], cpus=[2, 3],
        environ={"HOSTNAME": "tiny-0"}, group="groups/tiny-0",
    )  # fmt: skip
    image = Image(
        name="image", root=tmp_path, environ={"PATH": "/opt/coremill/bin", "HOME": "/image"}, working_folder="/w"
    )
    config = runtime_config(image, pod, pod.container, around)
    process, linux = config["process"], config["linux"]
    assert process["args"][:2] == ["coremill", "train"] and process["cwd"] == "/tmp"
    own = {"uid": 10001, "gid": 10001, "additionalGids": list(pod.container.more_groups), "umask": 0o022}
    assert process["user"] == own and process["noNewPrivileges"] is True
    assert set(map(tuple, process["capabilities"].values())) == {()} and "rlimits" not in process
    assert {"PATH=/opt/coremill/bin", "HOSTNAME=tiny-0", "HF_TOKEN=token"} <= set(process["env"])
    assert "HOME=/image" not in process["env"]  # the manifest has another
    assert config["root"] == {"path": "rootfs", "readonly": True} and config["hostname"] == pod.hostname
    assert linux["resources"]["memory"] == {"limit": 4 * 2**30} and linux["resources"]["cpu"] == {"cpus": "2,3"}
    assert {"type": "network", "path": "/networks/1"} in linux["namespaces"]
    assert [one["destination"] for one in config["mounts"]][-2:] == ["/fsx", "/etc/hosts"]
    assert "ro" in config["mounts"][-1]["options"] and "rw" in config["mounts"][-2]["options"]

    (first,) = pod.init_containers
    rights = runtime_config(image, pod, first, around)["process"]
    assert rights["cwd"] == "/w"  # it names none
    assert rights["user"]["uid"] == 0 and rights["capabilities"]["bounding"] == ["CAP_CHOWN", "CAP_FOWNER"]
