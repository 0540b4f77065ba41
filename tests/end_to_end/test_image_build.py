"""The image, built for real on a base made by mmdebstrap, weighed, examined by its own doctor, and rehearsed.

Long form only: a base, a torch wheel and a hundred packages take some ten minutes. Where pip finds packages
here is in this machine's configuration, which goes into the build as a secret. COREMILL_IMAGE names an image that is
built already (buildah images): then that one is looked at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from end_to_end.scene import RUN_FILE, Scene
from k8s.rehearsing import manifests, rehearse, why_not
from k8s.test_image_pods import LOOK_AROUND

ROOT = Path(__file__).resolve().parents[2]
NAME, BASE = "localhost/coremill-under-test:0.2.0", "localhost/bookworm-under-test:1"
BUILT = os.environ.get("COREMILL_IMAGE")
MOST_BYTES = 2.5e9
OF_THE_HOST = {"busy", "clock", "huge pages"}  # no image changes these


def _why_not() -> str | None:
    if not os.environ.get("COREMILL_LONG_TESTS"):
        return "ten minutes: COREMILL_LONG_TESTS=1 runs it"
    missing = [name for name in ("buildah", "mmdebstrap", "runc") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        return f"not installed: {', '.join(missing)} (make image-setup)" if missing else "a build takes root"
    return why_not()


_reason = _why_not()
pytestmark = [
    pytest.mark.skipif(_reason is not None, reason=f"no image here: {_reason}"),
    pytest.mark.timeout(2400),
]


def run(command: list[str], unreached: str | None = None, **environ: str) -> str:
    """What it prints. `unreached`: it needs the network, and without it the tests are skipped with this reason."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environ})
    if done.returncode != 0 and unreached is not None:
        pytest.skip(f"{unreached}: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def pip_of_this_machine(file: Path) -> list[str]:
    """Its configuration as a file for the build, and what it names of this machine, mounted."""
    listed = run([sys.executable, "-m", "pip", "config", "list"])
    values = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    lines, mounted = ["[global]"], []
    for key in ("index-url", "extra-index-url", "find-links", "trusted-host"):
        if key in values:
            lines.append(f"{key} = {values[key]}")
            paths = [word.removeprefix("file://") for word in values[key].split()]
            mounted += [path for path in paths if path.startswith("/") and Path(path).is_dir()]
    words = [word for path in mounted for word in ("--volume", f"{path}:{path}:ro")]
    if Path(values.get("cert", "")).is_file():
        lines.append("cert = /run/certificates-of-pip.crt")
        words += ["--volume", f"{values['cert']}:/run/certificates-of-pip.crt:ro"]
    file.write_text("\n".join(lines) + "\n")
    return ["--secret", f"id=pip.conf,src={file}", *words]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A storage of the tests' own, for buildah here and for the rehearsal."""
    if BUILT is not None:
        yield os.environ.get("CONTAINERS_STORAGE_CONF", "/etc/containers/storage.conf")
        return
    folder = tmp_path_factory.mktemp("storage")
    file = folder / "storage.conf"
    file.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n')
    yield str(file)
    subprocess.run(["buildah", "rmi", "--all", "--force"], env={**os.environ, "CONTAINERS_STORAGE_CONF": str(file)})
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def image(storage: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    if BUILT is not None:
        return BUILT
    folder = tmp_path_factory.mktemp("build")
    build = ["buildah", "build", "--isolation", "chroot", "--pull-never", "--quiet"]
    base = ["mmdebstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(folder / "base.tar")]
    run(base, "no Debian packages are reached")
    (folder / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
    run([*build, "--tag", BASE, str(folder)], CONTAINERS_STORAGE_CONF=storage)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch=="))
    wheels = folder / "wheels"
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), torch]
    run(download, "no wheel of torch is reached")
    words = ["--build-arg", f"BASE={BASE}", "--build-arg", "TORCH_INDEX=/wheels", "--build-context", f"wheels={wheels}"]
    words += [*pip_of_this_machine(folder / "pip.conf"), "--file", "containers/Containerfile", "--tag", NAME, "."]
    run([*build, *words], CONTAINERS_STORAGE_CONF=storage)
    return NAME


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all rehearsals here: the first one unpacks the image, the others find it there."""
    return tmp_path_factory.mktemp("rehearsals")


def test_it_says_what_it_is(image: str, storage: str) -> None:
    about = json.loads(run(["buildah", "inspect", "--type", "image", image], CONTAINERS_STORAGE_CONF=storage))
    config = about["OCIv1"]["config"]
    assert config["Labels"]["org.opencontainers.image.version"] == "0.2.0"
    assert (config["User"], config["Entrypoint"]) == ("10001:10001", ["coremill"])
    assert not [line for line in config["Env"] if "PIP" in line]
    assert "certificates-of-pip" not in json.dumps(about)  # of this machine


def test_its_doctor_finds_nothing_to_complain_of(image: str, storage: str, place: Path) -> None:
    script = "coremill doctor --json > /fsx/coremill/$HOSTNAME.json"
    file = manifests(place, f"{LOOK_AROUND}\n{script}")
    done = rehearse(file, "--image", image, CONTAINERS_STORAGE_CONF=storage, timeout=900)
    assert done.code == 0, done
    found = json.loads((done.folder / "volumes/coremill/coremill/tiny-0.json").read_text())
    assert found["problems"] == [] and found["self_test"]["passed"]
    subjects = {one["subject"]: one for one in found["findings"] if one["level"] == "warning" or one["do"]}
    assert {name: one for name, one in subjects.items() if name not in OF_THE_HOST} == {}
    text = done.log(0)
    assert "cannot touch '/x': Read-only file system" in text and "'/fsx/x': Permission denied" in text


def test_a_run_in_it_comes_to_its_end(image: str, storage: str, place: Path, scene: Scene) -> None:
    """As the pods' user, with a read-only root, on a volume whose root is another's; and one pod is taken back."""
    section = 'kubernetes: {image: "example.com/coremill:0.2.0", karpenter: none, kind: job, cpus: 4, memory_gib: 4}\n'
    scene.path("contained.yaml").write_text(f"{RUN_FILE}fleet: {{nodes: 2, instance: c7i.8xlarge}}\n{section}")
    words = ["contained.yaml", "--json", "-o", str(place / "out"), "--image", image, "--reclaim", "0@3steps"]
    command = [sys.executable, "-m", "coremill", "k8s", "rehearse", *words]
    ended = scene.start(command, {"CONTAINERS_STORAGE_CONF": storage}).end(900)
    assert ended.code == 0 and ended.left == [], ended
    summary = json.loads(ended.out)
    assert (summary["state"], summary["steps"], summary["steps_lost"]) == ("complete", 8, 0)
    volume = place / "out/volumes/coremill"
    assert volume.stat().st_uid == 0
    assert {path.stat().st_uid for path in (volume / "coremill").rglob("*") if not path.is_symlink()} == {10001}
    assert "run by runc" in ended.err


def test_its_weight_is_known_and_nothing_of_it_is_cuda(image: str, storage: str, place: Path) -> None:
    unpacked = place / "out/image"
    words = [sys.executable, "scripts/image_weight.py", str(unpacked) if unpacked.is_dir() else image, "--json"]
    weight: dict[str, Any] = json.loads(run(words, CONTAINERS_STORAGE_CONF=storage))
    assert weight["cuda"] == [] and weight["bytes"] < MOST_BYTES
    assert next(iter(weight["packages"])) == "Python: torch"
    names = {name.removeprefix("Debian: ") for name in weight["packages"] if name.startswith("Debian: ")}
    assert not names & {"gcc-12", "g++-12", "binutils", "make"} and "Python: pip" not in weight["packages"]
