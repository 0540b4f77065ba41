"""Scripts as people write them, unmodified, started in every way there is: the same final loss everywhere.

In `make test` two scripts are started one way each; all ways, and the script with DeepSpeed, are in the long tests.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hosts.namespaces import Fleet, clean_environment, fake_hosts, free_port, why_not
from peer_scene import QA_ARGUMENTS, make_scene
from tiers import IS_LONG

TOLERANCE = 1e-4  # of the final loss
COREMILL = (sys.executable, "-m", "coremill", "launch")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml")
SCRIPTS = {"run_qa.py": QA_ARGUMENTS, "nlp_example.py": (), "train.py": ()}
DEADLINE_SECONDS = 290

Done = subprocess.CompletedProcess[str]

_reason = why_not()
pytestmark = [
    pytest.mark.skipif(_reason is not None, reason=f"no hosts here: {_reason}"),
    pytest.mark.timeout(1500),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two hosts that share a folder with the scripts and what they read."""
    folder = make_scene(tmp_path_factory.mktemp("peers"))
    with fake_hosts(2, folder) as hosts:
        yield hosts


def run(fleet: Fleet, *argv: str, on: int = 0, **environ: str) -> Done:
    return fleet.run(list(argv), on=on, timeout=DEADLINE_SECONDS, **offline(fleet), **environ)


# DeepSpeed compiles parts of itself at its first start, for minutes; kept here for the next tests of this environment.
ENVIRONMENT = f"{os.getuid()}-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]}"
OPS = Path(os.environ.get("TORCH_EXTENSIONS_DIR", f"{tempfile.gettempdir()}/coremill-torch-extensions-{ENVIRONMENT}"))


def offline(fleet: Fleet) -> dict[str, str]:
    home = {"HF_HOME": str(fleet.folder / "hf-home"), "TORCH_EXTENSIONS_DIR": str(OPS)}
    return {**home, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def deepspeed_ops() -> None:
    """All that train.py makes DeepSpeed compile, by one process."""
    for left in OPS.glob("*/lock"):  # of a start that was killed: torch waits for its owner without end
        left.unlink()
    if not (OPS / "built").exists():
        shutil.rmtree(OPS, ignore_errors=True)
        builders = ("ShareMemCommBuilder", "CPUAdamBuilder")
        program = "from deepspeed.accelerator import get_accelerator as a\n" + "\n".join(
            f"a().create_op_builder({name!r}).load()" for name in builders
        )
        environ = {**clean_environment(), "TORCH_EXTENSIONS_DIR": str(OPS)}
        subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=900)
        (OPS / "built").touch()


def on_two_hosts(*via: str) -> Callable[..., Done]:
    def start(fleet: Fleet, *script: str) -> Done:
        need(via[-1])
        hostfile = str(fleet.hostfile("node1 slots=1", "node2 slots=1"))
        return run(fleet, *COREMILL, "-q", "--ssh", fleet.ssh, "--hostfile", hostfile, *via, *script)

    return start


def by_hand(fleet: Fleet, *script: str) -> Done:
    """The user types it on both; the first one's output counts."""
    words = ("-q", "--nproc", "1", "--nnodes", "2", "--master", f"{fleet.hosts[0].address}:{free_port()}")
    second = subprocess.Popen(
        fleet.hosts[1].command([*COREMILL, *words, "--node-rank", "1", *script], fleet.folder),
        env={**clean_environment(), **offline(fleet)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        done = run(fleet, *COREMILL, *words, "--node-rank", "0", *script)
        assert second.wait(timeout=60) == done.returncode
    finally:
        second.kill()
        second.wait()
    return done


def inside(mpirun: str, *launcher: str) -> Callable[..., Done]:
    """The user's own mpirun, with one or the other launcher as its program."""

    def start(fleet: Fleet, *script: str) -> Done:
        need(mpirun)
        options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none") if "openmpi" in mpirun else ()
        return run(fleet, mpirun, *options, "-n", "2", *launcher, *script, MASTER_ADDR="127.0.0.1")

    return start


WAYS: dict[str, Callable[..., Done]] = {
    "--nproc 2": lambda fleet, *script: run(fleet, *COREMILL, "-q", "--nproc", "2", *script),
    "--accelerate": lambda fleet, *script: run(fleet, *COREMILL, "--accelerate", "accelerate.yaml", *script),
    "two hosts, torchrun": on_two_hosts("--via", "torchrun"),
    "two hosts, Open MPI": on_two_hosts("--via", "mpirun", "--mpirun", "mpirun.openmpi"),
    "two hosts, MPICH": on_two_hosts("--via", "mpirun", "--mpirun", "mpirun.mpich"),
    "two nodes by hand": by_hand,
    "mpirun coremill launch, Open MPI": inside("mpirun.openmpi", *COREMILL, "-q"),
    "mpirun coremill launch, MPICH": inside("mpirun.mpich", *COREMILL, "-q"),
    "mpirun accelerate launch, Open MPI": inside("mpirun.openmpi", *ACCELERATE),
    "mpirun accelerate launch, MPICH": inside("mpirun.mpich", *ACCELERATE),
}
# Of `make test`.
SHORT = {"run_qa.py": "--nproc 2", "nlp_example.py": "--accelerate"}
# accelerate launch tells its ranks of CPUs, and then leaves DeepSpeed's model unwrapped; coremill launch does not.
REFUSED = {(f"mpirun accelerate launch, {mpi}", "train.py"): "'weight' must be 2-D" for mpi in ("Open MPI", "MPICH")}


def need(program: str) -> None:
    if program.startswith("mpirun.") and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (make hosts-setup)")


def final_loss(script: str, folder: Path, output: str) -> float:
    """As each script leaves it, and only where two ranks trained together."""
    if script == "run_qa.py":
        results = json.loads((folder / "debug_squad" / "train_results.json").read_text())
        samples, steps = results["train_runtime"] * results["train_samples_per_second"], 18  # 144 windows, 2 x 4 a step
        assert round(results["train_runtime"] * results["train_steps_per_second"]) == steps, (samples, results)
        return float(results["train_loss"])
    if script == "nlp_example.py":
        # accelerate prints once on each host.
        found = dict(re.findall(r"epoch (\d): .* of 32 pairs, loss ([\d.]+) on 2 processes", output))
        assert sorted(found) == ["0", "1"], output
        return float(found["1"])
    states = list((folder / "llama3-training-output").glob("checkpoint-*/trainer_state.json"))
    state = json.loads(max(states, key=lambda path: path.stat().st_mtime).read_text())
    assert state["max_steps"] == 4  # 32 texts, 2 x 1 x 4 a step
    return float([entry["loss"] for entry in state["log_history"] if "loss" in entry][-1])


@pytest.fixture(scope="module")
def losses() -> dict[str, float]:
    """Of each script, as the first way it was started had it."""
    return {}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_loss_whoever_starts_it(
    request: pytest.FixtureRequest, fleet: Fleet, losses: dict[str, float], way: str, script: str
) -> None:
    if not IS_LONG and SHORT.get(script) != way:
        pytest.skip("one way each, DeepSpeed not at all; COREMILL_LONG_TESTS=1 tries all")
    if script == "train.py":
        request.getfixturevalue("deepspeed_ops")
    for left in ("debug_squad", "llama3-training-output"):
        shutil.rmtree(fleet.folder / left, ignore_errors=True)
    done = WAYS[way](fleet, script, *SCRIPTS[script])
    if (way, script) in REFUSED:
        assert done.returncode != 0 and REFUSED[way, script] in done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    loss = final_loss(script, fleet.folder, done.stdout)
    assert math.isfinite(loss)
    assert loss == pytest.approx(losses.setdefault(script, loss), abs=TOLERANCE)


def test_what_a_script_refuses_itself_has_its_note(fleet: Fleet) -> None:
    """The tutorial's own flags: transformers ends with its usage, and coremill's lines say why and what to write."""
    flags = ("--no_cuda", "--use_ipex", "--overwrite_output_dir")
    if not IS_LONG:
        pytest.skip("the notes are tested without a start; COREMILL_LONG_TESTS=1 starts it")
    done = run(fleet, *COREMILL, "--nproc", "1", "run_qa.py", *QA_ARGUMENTS, *flags)
    assert done.returncode != 0
    assert "are not used by the HfArgumentParser" in done.stderr
    for flag in flags:
        assert re.search(rf"^coremill: {flag}: transformers .+", done.stderr, re.MULTILINE), done.stderr
