"""Safety through the real command line: no token is left anywhere, ports are loopback's, spot notices are heeded."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
from pathlib import Path

import psutil

from coremill.remote_code import code_sha256, read_code
from end_to_end.scene import MARKER, Running, Scene
from end_to_end.stand_in_hub import serve_gated_hub
from end_to_end.test_stop import FAULT, TRAIN, WITHOUT_END, events, wait_for
from own_code import add_own_code, add_own_tokenizer
from stand_in_metadata import SESSION, serve_metadata

TOKEN = "hf_SECRETsecretSECRETsecret0123"
KEY = "a secret of no particular form"
PASSWORD = "secretpassword"
# The third step's fault says all it knows, as libraries do.
LEAKY = FAULT.replace(
    'raise ArithmeticError("a fault of rank 1")',
    'print("env", dict(os.environ), file=sys.stderr)\n'
    + 24 * " "
    + 'raise ArithmeticError("cannot reach " + os.environ["ENDPOINT"] + str(dict(os.environ)))',
)


def processes_of(running: Running) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == running.marker:
                found.append(process)
        except psutil.Error:
            continue
    return found


def holding(secret: str, folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_failing_run_leaves_no_token_anywhere(scene: Scene) -> None:
    scene.path("leaky").mkdir()
    (scene.path("leaky") / "sitecustomize.py").write_text(LEAKY)
    source = scene.environ("", {})["PYTHONPATH"]
    secrets = {"HF_TOKEN": TOKEN, "TEAM_API_KEY": KEY, "ENDPOINT": f"https://user:{PASSWORD}@host/path"}
    environ = {**secrets, "PYTHONPATH": f"{scene.path('leaky')}:{source}"}
    running = scene.start([*TRAIN, "--set", "run.folder=leak", "--set", "supervise.restart=false"], environ)
    command_lines: set[str] = set()

    def look() -> None:  # beside `end`, which reads what the command prints: a full pipe would hold it up
        while running.process.poll() is None:
            for process in processes_of(running):
                with contextlib.suppress(psutil.Error):
                    command_lines.add(" ".join(process.cmdline()))
            time.sleep(1)

    threading.Thread(target=look, daemon=True).start()
    done = running.end()
    assert done.code == 1 and "ArithmeticError: cannot reach https://***@host/path" in done.err, str(done)
    assert any("-m coremill train" in line for line in command_lines)
    everything = "\n".join([done.out, done.err, *command_lines])
    assert "'HF_TOKEN': '***'" in (scene.path("leak") / "logs" / "rank-00001.log").read_text()
    for secret in (TOKEN, KEY, PASSWORD):
        assert secret not in everything
        assert holding(secret, scene.path("leak")) == []
        assert holding(secret, scene.cache) == []
    assert not done.left


def test_a_refused_download_names_no_token(scene: Scene) -> None:
    with serve_gated_hub() as hub:
        environ = {"HF_ENDPOINT": hub, "HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}
        done = scene.coremill("train", "run.yaml", "--set", "model=gated/model", environ=environ)
    assert done.code == 78 and "gated" in done.err, str(done)
    assert TOKEN not in done.out + done.err and holding(TOKEN, scene.cache) == []


def test_spot_notice_saves_and_stops_and_ports_are_loopbacks(scene: Scene) -> None:
    with serve_metadata() as service:
        environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.address}
        running = scene.start([*TRAIN, *WITHOUT_END, "--set", "run.folder=spot"], environ)
        folder = scene.path("spot")
        wait_for(lambda: any(event.get("step") == 3 for event in events(folder, 1)), running)
        listening = {
            (connection.laddr.ip, process.pid)
            for process in processes_of(running)
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }
        pids = {int(str(events(folder, rank)[0]["pid"])) for rank in (0, 1)}
        service.notice = {"action": "terminate", "time": "2026-01-02T03:04:05Z"}
        done = running.end()
    assert pids <= {pid for _, pid in listening}  # gloo listens in every rank
    assert {address for address, _ in listening} == {"127.0.0.1"}
    assert done.code == 75, str(done)
    assert "spot notice: EC2 will terminate this machine at 2026-01-02T03:04:05Z: saving, then stopping" in done.out
    step = int(re.search(r"stopped on request after step (\d+), which is saved", done.out)[1])  # type: ignore[index]
    last = [max(event["step"] for event in events(folder, rank) if event["kind"] == "step") for rank in (0, 1)]
    assert last == [step, step]
    (notice,) = [event for event in events(folder) if event["kind"] == "notice"]
    assert "EC2 will terminate" in str(notice["text"])
    assert json.loads((folder / "report.json").read_text())["state"] == "stopped"
    assert SESSION not in done.out + done.err and not holding(SESSION, folder)
    assert not done.left


def test_pinned_code_of_a_model_is_trained_exported_and_reloaded(scene: Scene) -> None:
    folder = add_own_tokenizer(add_own_code(Path(shutil.copytree(scene.path("model"), scene.path("own")))))
    pin = code_sha256(read_code(folder))
    settings = {"model.name": "own", "model.trust_remote_code": "true", "model.code_sha256": pin, "train.steps": "2"}
    settings |= {"run.folder": "trusted", "train.warmup_steps": "0", "sample.prompt": "mill", "sample.tokens": "2"}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = scene.coremill("train", "run.yaml", "--nproc", "1", *words)
    assert done.code == 0, str(done)
    export = scene.path("trusted") / "export"
    assert json.loads((export / "config.json").read_text())["architectures"] == ["OwnForCausalLM"]
    assert code_sha256(read_code(export)) == pin
    (sample,) = [event for event in events(scene.path("trusted")) if event["kind"] == "sample"]
    assert sample["prompt"] == "mill"  # the export was loaded with its code
    assert list((scene.cache / "code").iterdir()) == []  # copies go with their processes
    assert not (scene.cache / "hub" / "modules").exists()  # and transformers' own cache was not used

    with (folder / "modeling_own.py").open("a") as stream:
        stream.write("# changed after it was read\n")
    for command in (["train"], ["config", "show"]):
        done = scene.coremill(*command, "run.yaml", *words, "--set", "run.folder=changed")
        assert done.code == 78 and pin in done.err and code_sha256(read_code(folder)) in done.err, str(done)
    assert not list(scene.path("changed").rglob("rank-*"))
