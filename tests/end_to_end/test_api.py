"""coremill.api from Python: a script that is interrupted, goes on in a thread, and is refused; and a notebook's kernel.

None of them has a terminal. One training each: importing torch is most of what they take.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys

import pytest

from end_to_end.scene import Ended, Scene

SCRIPT = """\
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from coremill import api

def interrupt_when_training():
    events = Path("from-python/events/rank-00000.jsonl")
    while not (events.is_file() and '"kind":"step"' in events.read_text()):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have had it ignored
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
threading.Thread(target=interrupt_when_training, daemon=True).start()
settings = {"run.folder": "from-python", "train.steps": 100000}
try:
    api.train("run.yaml", settings)
except KeyboardInterrupt as interrupted:
    stopped = interrupted.result
    print("interrupted:", interrupted)
assert (stopped.state, stopped.exit_code) == ("stopped", 75), stopped
assert stopped.folder == Path("from-python").absolute()
assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

results = []
settings["train.steps"] = stopped.summary["steps"] + 3
thread = threading.Thread(target=lambda: results.append(api.train("run.yaml", settings)))
thread.start()
while thread.is_alive() and not Path("from-python/run.lock").exists():
    time.sleep(0.02)
try:
    api.train("run.yaml")
except api.CoremillError as error:
    second = error.what  # printed when the thread is done: it prints too, also between the two writes of one print()
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
thread.join()
assert own.poll() is None, "a process of the script was ended with the ranks"
own.kill()
print("refused:", second)
(result,) = results
assert (result.state, result.exit_code) == ("finished", 0), result
assert result.summary["steps"] == stopped.summary["steps"] + 3
assert api.report(result.folder)["loss_last"] == result.summary["loss_last"]
assert api.train("run.yaml", settings, dry_run=True).state == "planned"
try:
    api.train("run.yaml", settings, data="absent/*.txt", fresh=True)
except api.CoremillError as refused:
    print("refused:", refused.exit_code, refused.what)
assert api.plan(api.load_config("run.yaml", settings), fleet="2xc7i.8xlarge").fits
assert "torch" not in sys.modules
print("done")
"""


@pytest.fixture(scope="module")
def ended(scene: Scene) -> Ended:
    scene.path("script.py").write_text(SCRIPT)
    return scene.run([sys.executable, "script.py"])


def test_a_script_trains_is_interrupted_and_goes_on_in_a_thread(ended: Ended) -> None:
    assert ended.code == 0 and ended.out.splitlines()[-1] == "done", str(ended)
    assert not ended.left


def test_what_it_says(ended: Ended) -> None:
    assert re.search(r"^interrupted: the training in .*from-python was stopped after step \d+;", ended.out, re.M)
    assert "refused: this process is training already" in ended.out
    assert "refused: 78 no file matches" in ended.out
    assert "dry run: nothing is left to train" in ended.out


def test_progress_is_lines(ended: Ended) -> None:
    assert re.search(r"^step \d+/\d+  loss ", ended.out, re.M) and "\x1b" not in ended.out


CELL = """\
from coremill import api
result = api.train("run.yaml", {"run.folder": "from-a-notebook"})
print("state:", result.state)
"""
KERNEL = """\
import sys
from jupyter_client import KernelManager
command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
manager = KernelManager(kernel_cmd=command)
manager.start_kernel()
client = manager.blocking_client()
client.start_channels()
client.wait_for_ready(timeout=120)
asked = client.execute(open("cell.py").read())
while True:
    message = client.get_iopub_msg(timeout=200)
    content = message["content"]
    if message["msg_type"] == "stream":
        print(content["text"], end="")
    elif message["msg_type"] == "error":
        print(content["ename"], content["evalue"])
    elif content.get("execution_state") == "idle" and message["parent_header"].get("msg_id") == asked:
        break
manager.shutdown_kernel(now=True)
"""


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"),
    reason="half a minute; a thread of a script trains in any case: COREMILL_LONG_TESTS=1 runs it",
)
def test_a_cell_of_a_notebook_trains(scene: Scene) -> None:
    missing = [name for name in ("ipykernel", "jupyter_client") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: 100 MB for one test")
    scene.path("cell.py").write_text(CELL)
    scene.path("kernel.py").write_text(KERNEL)
    done = scene.run([sys.executable, "kernel.py"], {"FORCE_COLOR": "1"})  # as ipykernel has it
    assert "state: finished" in done.out and "\x1b" not in done.out, str(done)
    assert re.search(r"^step \d+/8  loss ", done.out, re.M), str(done)
