"""`coremill k8s rehearse --image`: pods are containers of runc, with the rights and limits of the manifest."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from k8s.rehearsing import command, environment, made_by, manifests, rehearse, wait_until, why_not
from k8s.tiny_images import layer_of, oci_archive, tiny_root
from unit.k8s.clusters import job_spec_of

_reason = why_not() or (None if shutil.which("runc") else "runc is not installed (make image-setup)")
pytestmark = pytest.mark.skipif(_reason is not None, reason=f"no containers here: {_reason}")

long_test = pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"), reason="covered mostly by the others: COREMILL_LONG_TESTS=1 runs it"
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its name has what overlays take for their own."""
    folder = tmp_path_factory.mktemp("images") / "tiny:1,0"
    tiny_root(folder / "rootfs")
    config = {"process": {"env": ["PATH=/opt/tools:/bin", "OF_THE_IMAGE=yes"], "cwd": "/opt"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LOOK_AROUND = """
greet; echo $OF_THE_IMAGE; id -u; ls -d /*; touch /x; touch /fsx/x; touch /fsx/coremill/$HOSTNAME && echo written
grep -E 'Cap(Prm|Bnd)|NoNewPrivs|Cpus_allowed_list' /proc/self/status; cat /proc/kcore | head -c 1
cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max; cat /proc/1/cmdline
"""


def test_a_container_is_what_the_manifest_says(tmp_path: Path, bundle: Path) -> None:
    before = sorted(str(path) for path in bundle.rglob("*"))
    done = rehearse(manifests(tmp_path, LOOK_AROUND), "--image", str(bundle))
    assert done.code == 0, done
    for pod in (0, 1):
        text = done.log(pod)
        assert text.startswith(f"from the image as tiny-{pod}\nyes\n10001\n") and "written" in text, text
        assert "cannot touch '/x': Read-only file system" in text and "'/fsx/x': Permission denied" in text
        assert "/home" not in text and "/opt" in text  # of the image, and nothing of this machine
        assert set(re.findall(r"Cap\w+:\t(\w+)", text)) == {"0" * 16} and "NoNewPrivs:\t1" in text
        assert "sh\0-c" in text  # the command is process 1
        if "memory limits are not held" not in done.err:
            assert str(4 * 2**30) in text, text
    cpus = {found for pod in (0, 1) for found in re.findall(r"Cpus_allowed_list:\t(\S+)", done.log(pod))}
    assert len(cpus) == min(2, len(os.sched_getaffinity(0)))  # each has its own
    assert "run by runc" in done.err
    assert sorted(str(path) for path in bundle.rglob("*")) == before  # the image stays as it was
    assert (done.folder / "volumes/coremill").stat().st_uid == 0


@long_test
def test_an_archive_is_an_image_and_what_it_lacks_is_said(tmp_path: Path, bundle: Path) -> None:
    """The exit code is that of a container that cannot be started; the job's failure policy counts it."""
    archive = oci_archive(tmp_path / "tiny.tar", [layer_of(bundle / "rootfs")], {"Env": ["PATH=/opt/tools:/bin"]})
    assert rehearse(manifests(tmp_path, "greet"), "--image", str(archive)).code == 0

    def once(objects: list[dict[str, Any]]) -> None:
        for spec in job_spec_of(objects):
            spec["backoffLimit"] = 0
            spec["template"]["spec"]["containers"][0]["command"] = ["coremill", "train"]

    done = rehearse(manifests(tmp_path, None, once), "--image", str(archive))
    assert done.code == 1 and 128 in [one["exit_code"] for one in done.summary["pods"]], done
    assert "executable file not found" in done.err


@long_test
def test_a_reclaim_waits_until_the_container_hears_and_not_only_its_runtime(tmp_path: Path, bundle: Path) -> None:
    listens = "sleep 1; trap 'exit 75' TERM; touch /fsx/coremill/was; while true; do sleep 0.1; done"
    script = f"test $PET_NODE_RANK = 0 || exit 0; test -e /fsx/coremill/was && exit 0; {listens}"
    done = rehearse(manifests(tmp_path, script), "--image", str(bundle), "--reclaim", "0@0s")
    assert done.code == 0, done
    assert [one["exit_code"] for one in done.summary["pods"] if one["pod"] == 0] == [75, 0]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=long_test), signal.SIGKILL])
def test_no_container_is_left_however_it_ends(tmp_path: Path, bundle: Path, number: signal.Signals) -> None:
    """Nor its mounts, namespaces and groups, of any controller."""
    script = "trap '' TERM; sleep 300 & touch /fsx/coremill/up-$HOSTNAME; wait; sleep 300"
    folder = tmp_path / "out"
    process = subprocess.Popen(
        command(manifests(tmp_path, script), "-o", str(folder), "--image", str(bundle)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        up = folder / "volumes/coremill/coremill"
        is_up = wait_until(lambda: len(list(up.glob("up-*"))) == 2)
        assert is_up, (process.kill(), process.communicate())
        made = made_by(process.pid, folder)
        assert len(made.namespaces) >= 2 + 2 * 5 and len(made.processes) >= 1 + 2 * 4
        if Path("/sys/fs/cgroup/memory").is_dir():
            assert "groups" in made.left()
        process.send_signal(number)
        text, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == (-9 if number == signal.SIGKILL else 130), text
    assert wait_until(lambda: made.left() == {}, 25), made.left()
