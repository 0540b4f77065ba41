"""`coremill k8s rehearse` with pods of a shell script: what a pod sees, how jobs end, what is said, what is left."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from k8s.rehearsing import command, environment, lines_of, made_by, manifests, rehearse, wait_until, why_not
from unit.k8s.clusters import job_spec_of, of_kind

_reason = why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=f"no pods here: {_reason}")
TOKEN = "hf_" + "RehearsedFakeToken" * 2

# Each pod listens at two ports and tries those of the other; the second one is shut by the policy of the test.
LOOK_AROUND = f"""
id -u; hostname; ls -d /home /var/lib | sed 's/^/seen /'
touch /x /fsx/x 2>&1; touch /fsx/coremill/from-$HOSTNAME /tmp/x && echo written
grep -E 'CapPrm|CapBnd|NoNewPrivs' /proc/self/status; tr '\\0' ' ' < /proc/1/cmdline | head -c 6
{sys.executable} -I -S - <<'EOF'
import os, socket, time
for port in (4000, 4001):
    server = socket.socket(); server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("", port)); server.listen(); globals()[f"server{{port}}"] = server
other = f"tiny-{{1 - int(os.environ['PET_NODE_RANK'])}}.tiny"
for port in (4000, 4001):
    for attempt in range(1200):
        try:
            socket.create_connection((other, port), timeout=20 if port == 4000 else 1).close()
            print(port, "open"); break
        except (ConnectionRefusedError, socket.gaierror):
            time.sleep(0.1)
        except OSError as error:
            print(port, "shut"); break
try:
    print("known", socket.gethostbyname(other.split(".")[0]))  # only its own pod knows a host by this name
except socket.gaierror:
    print("not known;", socket.gethostbyname(os.environ["HOSTNAME"]))
open(f"/fsx/coremill/done-{{os.environ['PET_NODE_RANK']}}", "w")
while len([name for name in os.listdir("/fsx/coremill") if name.startswith("done")]) < 2:
    time.sleep(0.1)
EOF
limit=/sys/fs/cgroup/memory/`grep memory /proc/self/cgroup | cut -d: -f3`/memory.limit_in_bytes
test -e $limit && cat $limit
"""


def test_a_pod_is_what_the_manifest_says(tmp_path: Path) -> None:
    def one_port(objects: list[dict[str, Any]]) -> None:
        of_kind(objects, "NetworkPolicy")["spec"]["ingress"][0]["ports"] = [{"port": 4000}]

    done = rehearse(manifests(tmp_path, LOOK_AROUND, one_port))
    assert done.code == 0, done
    told = [done.log(pod) for pod in (0, 1)]
    for pod, text in enumerate(told):
        assert text.startswith(f"10001\ntiny-{pod}\n"), text
        assert "cannot touch '/x': Read-only file system" in text and "'/fsx/x': Permission denied" in text
        assert "written" in text and "NoNewPrivs:\t1" in text
        assert set(re.findall(r"Cap\w+:\t(\w+)", text)) == {"0" * 16}
        assert "sh -c" in text and "4000 open" in text and "not known; 10.231." in text
        assert ("4001 shut" in text) == (shutil.which("nft") is not None)
        assert not [line for line in text.splitlines() if line.startswith("seen /")]
    if Path("/sys/fs/cgroup/memory").is_dir():
        assert told[0].rstrip().endswith(str(4 * 2**30))
    assert (done.folder / "volumes/coremill").stat().st_uid == 0
    assert (done.folder / "volumes/coremill/coremill/from-tiny-1").stat().st_uid == 10001


# Saves on SIGTERM; the second life of a pod has nothing left to do. A step is done once all pods can hear SIGTERM.
SAVES = """
trap 'sleep 0.2; exit 75' TERM
if test -e /fsx/coremill/was-$HOSTNAME; then exit 0; fi
touch /fsx/coremill/was-$HOSTNAME
if test $PET_NODE_RANK = 0; then
  until test `ls /fsx/coremill | grep -c was` -ge PODS; do sleep 0.1; done
  mkdir -p /fsx/coremill/tiny/events
  echo '{"kind": "step", "step": 1, "time": 1}' > /fsx/coremill/tiny/events/rank-00000.jsonl
fi
for n in `seq 1200`; do sleep 0.1; done
"""
BOTH = SAVES.replace("PODS", "2")
ALONE = "test $PET_NODE_RANK = 0 || exit 0\n" + SAVES.replace("PODS", "1")  # one pod is enough for a fault


def test_a_reclaim_and_a_kill_are_followed_by_new_pods_with_new_addresses(tmp_path: Path) -> None:
    done = rehearse(manifests(tmp_path, BOTH, capacity="spot"), "--reclaim", "0@1step", "--kill", "1@1step")
    assert done.code == 0, done
    summary = done.summary
    lives = [(one["pod"], one["exit_code"], one["disruption"], one["counted"]) for one in summary["pods"]]
    assert sorted(lives, key=str) == sorted(
        [(0, 75, "reclaim", False), (1, 137, "kill", True), (0, 0, None, False), (1, 0, None, False)], key=str
    )
    addresses = [one["address"] for one in summary["pods"]]
    assert len(set(addresses)) == 4 and (summary["restarts"], summary["restarts_counted"]) == (2, 1)
    # One waits 10 s, the other 20 s: the Job counts both as failures of its own.
    assert summary["times"]["longest_away_seconds"] >= 20
    assert 0.2 <= summary["times"]["longest_end_after_sigterm_seconds"] < summary["times"]["pod_grace_seconds"]
    assert "its machine is taken back" in done.err and "not counted; a new pod in" in done.err


def test_75_counted_is_a_fault_of_its_line(tmp_path: Path) -> None:
    def count(objects: list[dict[str, Any]]) -> None:
        for spec in job_spec_of(objects):
            spec["podFailurePolicy"]["rules"][1]["action"] = "Count"

    file = manifests(tmp_path, ALONE, count)
    done = rehearse(file, "--reclaim", "0@1step")
    assert done.code == 1 and done.summary["state"] == "complete", done
    (fault,) = done.summary["faults"]
    (line,) = lines_of(file, ["action: Count"])
    assert fault["where"] == f"{file}:{line}: Job/coremill/tiny spec.podFailurePolicy.rules[1]"
    assert "the exit code 75 of a pod that was taken back is counted" in fault["problem"]
    assert f"wrong: {fault['where']}" in done.err


def test_grace_below_a_save_is_a_fault_of_its_line(tmp_path: Path) -> None:
    def hurry(objects: list[dict[str, Any]]) -> None:
        for spec in job_spec_of(objects):
            spec["template"]["spec"]["terminationGracePeriodSeconds"] = 1

    file = manifests(tmp_path, ALONE.replace("sleep 0.2;", "sleep 30;"), hurry, kind="jobset")
    done = rehearse(file, "--reclaim", "0@1step")
    assert done.code == 1, done
    (fault,) = done.summary["faults"]
    (line,) = lines_of(file, ["terminationGracePeriodSeconds: 1"])
    assert fault["where"].startswith(f"{file}:{line}: JobSet/coremill/tiny spec.replicatedJobs[0]")
    assert "1 s of grace were not enough for pod 0" in fault["problem"]
    assert [one["killed_at_end_of_grace"] for one in done.summary["pods"]].count(True) == 1


# One pod fails once the other can hear SIGTERM: process 1 is not ended by a signal that it does not wait for.
FAILS = """
trap 'exit 75' TERM; touch /fsx/coremill/hears-$HOSTNAME
if test $PET_NODE_RANK = {index}; then
  until test `ls /fsx/coremill | grep -c hears` = 2; do sleep 0.1; done
  {end}
fi
sleep 120 & wait
"""


@pytest.mark.parametrize(("kind", "code"), [("trainjob", 78), ("job", 70)])
def test_what_would_give_the_same_again_ends_the_job(tmp_path: Path, kind: str, code: int) -> None:
    script = FAILS.format(index=1, end=f"echo the cause is here; exit {code}")
    file = manifests(tmp_path, script, kind=kind)
    done = rehearse(file)
    assert done.code == 1, done
    assert (done.summary["state"], done.summary["reason"], done.summary["restarts"]) == (
        "failed",
        "PodFailurePolicy",
        0,
    )
    assert {one["pod"]: one["exit_code"] for one in done.summary["pods"]} == {0: 75, 1: code}
    assert "the cause is here" in done.err and "rules[0]" in done.summary["faults"][0]["where"]


def test_a_job_set_that_may_restart_starts_all_pods_anew(tmp_path: Path) -> None:
    def restart(objects: list[dict[str, Any]]) -> None:
        of_kind(objects, "JobSet")["spec"]["failurePolicy"] = {"maxRestarts": 1}
        for spec in job_spec_of(objects):
            del spec["template"]["spec"]["initContainers"]  # then the volume itself is the pods'

    script = FAILS.format(index=0, end="touch /fsx/coremill/again; exit 78")
    script = f"mkdir -p /fsx/coremill; test -e /fsx/coremill/again && exit 0; {script}"
    done = rehearse(manifests(tmp_path, script, restart, kind="jobset"))
    assert done.code == 0, done
    summary = done.summary
    assert (summary["job_set_restarts"], summary["restarts"]) == (1, 2)
    lives = [(one["pod"], one["exit_code"]) for one in summary["pods"]]
    assert sorted(lives) == [(0, 0), (0, 78), (1, 0), (1, 75)]
    assert "the JobSet starts anew" in done.err and "spec.failurePolicy.maxRestarts" in done.err


def test_a_crash_loop_ends_with_its_cause(tmp_path: Path) -> None:
    def once(objects: list[dict[str, Any]]) -> None:
        for spec in job_spec_of(objects):
            spec["backoffLimit"] = 1

    script = FAILS.format(index=0, end="echo boom $HF_TOKEN; exit 1")
    file = manifests(tmp_path, script, once)
    done = rehearse(file, HF_TOKEN=TOKEN)
    assert done.code == 1, done
    assert done.summary["reason"] == "BackoffLimitExceeded" and done.summary["restarts"] == 1
    (line,) = lines_of(file, ["backoffLimit: 1"])
    assert done.summary["faults"][0]["where"] == f"{file}:{line}: Job/coremill/tiny spec.backoffLimit"
    assert "boom ***" in done.err and TOKEN not in done.err + done.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends_and_no_token_is_seen(tmp_path: Path, number: signal.Signals) -> None:
    def hold_a_secret(objects: list[dict[str, Any]]) -> None:
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hf-token"}}
        objects.append({**secret, "data": {"token": base64.b64encode(TOKEN.encode()).decode()}})

    script = "trap '' TERM; sleep 300 & test -n \"$HF_TOKEN\" && touch /fsx/coremill/up-$HOSTNAME; wait"
    file = manifests(tmp_path, script, hold_a_secret)
    folder = tmp_path / "out"
    process = subprocess.Popen(
        command(file, "-o", str(folder)),
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
        # The rehearsal's own network and mounts, and of each pod network, mounts, processes and host name.
        assert len(made.namespaces) >= 2 + 2 * 4 and len(made.processes) >= 1 + 2 * 3
        assert not [words for words in all_command_lines() if TOKEN in words]
        time.sleep(0.2)
        process.send_signal(number)
        text, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == (-9 if number == signal.SIGKILL else 130), text
    assert wait_until(lambda: made.left() == {}, 120), made.left()
    for path in folder.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in text


def all_command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def test_bad_input_is_one_message_and_78(tmp_path: Path) -> None:
    file = manifests(tmp_path, "true")
    cases: list[tuple[list[str], str]] = [
        ([str(file), "--reclaim", "2@3s"], "there is no pod 2"),
        ([str(file), "--kill", "soon"], "does not say which pod and when"),
        ([str(file), "--set", "train.steps=3"], "--set changes a run file"),
        ([str(tmp_path / "nowhere.yaml")], "nowhere.yaml"),
        ([str(file), "--image", "example.com/coremill:0.1.0"], "there is no image example.com/coremill:0.1.0"),
        ([str(file), "-o", str(tmp_path)], "is not empty, and not of a rehearsal"),
    ]
    for words, expected in cases:
        run = [sys.executable, "-m", "coremill", "k8s", "rehearse", *words]
        done = subprocess.run(run, capture_output=True, text=True, env=environment(), cwd=tmp_path)
        assert done.returncode == 78 and expected in done.stderr and "Traceback" not in done.stderr, done
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(
    shutil.which("setpriv") is None or os.geteuid() != 0, reason="needs setpriv, and rights to give away"
)
def test_without_rights_for_namespaces_it_is_said(tmp_path: Path) -> None:
    file = manifests(tmp_path, "true")
    without = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    done = subprocess.run([*without, *command(file)], capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.returncode == 78 and "may not make namespaces" in done.stderr, done
    assert not (tmp_path / "runs").exists()
