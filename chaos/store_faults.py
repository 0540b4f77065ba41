"""Faults of storage, on the bare store: kills inside a save, files that rot, clocks that lie, disks that are full."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from chaos.bare_store import (
    KEEP,
    RANKS,
    Shape,
    die_at_call,
    file_name,
    holds_its_step,
    make_store,
    resume,
    save,
    start_save,
)
from chaos.experiment import Rig, Trial
from chaos.mounts import mounted_tmpfs
from coremill.checkpoint.manifest import Unusable, survey

SMALL = Shape(64 * 1024)  # where what matters is which bytes, not how many
FILES = (*(file_name(rank) for rank in range(RANKS)), "state.json", "manifest.json")


# --- X2: killed inside a save ---


def killed_in_save(rig: Rig, trials: int) -> Iterator[Trial]:
    """One run's folder, save after save; a rank dies in each, between two system calls or at any microsecond."""
    random, shape, folder = rig.random("X2"), Shape(), rig.folder / "checkpoints"
    for step in (1, 2):
        save(make_store(folder, f"first{step}"), step, shape=shape)
    calls = {rank: _calls_of_a_save(rig.folder / f"count{rank}", rank, shape) for rank in range(RANKS)}
    usual_seconds = _seconds_of_a_save(rig.folder / "timed", shape)
    done, attempt = 0, 0
    while done < trials:
        attempt += 1
        store = make_store(folder, f"attempt{attempt}")
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        step = survey(folder).sound[0].step + 1
        victim = random.randrange(RANKS)
        if attempt % 2:
            moment = random.randint(1, calls[victim])
            fault = f"rank {victim} killed before system call {moment} of {calls[victim]}"
            status = _killed_by_hook(store, step, victim, moment, shape)
        else:
            share = random.random()
            fault = f"rank {victim} killed {share:.0%} into the usual time of a save"
            status = _killed_by_clock(store, step, victim, share * usual_seconds, shape)
        if not os.WIFSIGNALED(status):
            continue  # it had ended before the blow fell: not a trial
        done += 1
        yield _after_kill(folder, step, fault, shape, left)


def _after_kill(folder: Path, step: int, fault: str, shape: Shape, left: list[str]) -> Trial:
    found = survey(folder)
    valid = []
    for checkpoint in found.sound:
        try:
            checkpoint.verify()
        except Unusable:
            continue
        if holds_its_step(checkpoint, shape):
            valid.append(checkpoint.step)
    invalid = len(found.sound) - len(valid) + len(found.passed_over)
    passed = invalid == 0 and len(valid) >= KEEP and valid[0] in (step - 1, step) and not left
    outcome = f"{invalid} invalid accepted, at least {min(len(valid), KEEP)} valid present"
    if left:
        outcome += f", {len(left)} leftovers not swept"
    return Trial(passed=passed, fault=fault, outcome=outcome)


def _calls_of_a_save(folder: Path, rank: int, shape: Shape) -> int:
    """How many moments there are to die at, the removal of an older checkpoint included."""
    counter = mmap.mmap(-1, 4)
    for step in (1, 2, 3):
        counter[:4] = bytes(4)
        pids = start_save(make_store(folder, f"s{step}"), step, shape, {rank: lambda: die_at_call(None, counter)})
        for pid in pids.values():
            os.waitpid(pid, 0)
    shutil.rmtree(folder)
    return int.from_bytes(counter[:4], "little")


def _seconds_of_a_save(folder: Path, shape: Shape) -> float:
    times = []
    for step in range(1, 6):
        began = time.monotonic()
        for pid in start_save(make_store(folder, f"s{step}"), step, shape).values():
            os.waitpid(pid, 0)
        times.append(time.monotonic() - began)
    shutil.rmtree(folder)
    return sorted(times)[2]


def _killed_by_hook(store: object, step: int, victim: int, moment: int, shape: Shape) -> int:
    pids = start_save(store, step, shape, {victim: lambda: die_at_call(moment, mmap.mmap(-1, 4))})  # type: ignore[arg-type]
    return _end_of(pids, victim)


def _killed_by_clock(store: object, step: int, victim: int, delay_seconds: float, shape: Shape) -> int:
    pids = start_save(store, step, shape)  # type: ignore[arg-type]
    time.sleep(delay_seconds)
    os.kill(pids[victim], signal.SIGKILL)  # not reaped yet: the number is still its own
    return _end_of(pids, victim)


def _end_of(pids: dict[int, int], victim: int) -> int:
    """The victim's wait status. The others end by themselves: rank 0 hears that a report is missing."""
    statuses = {rank: os.waitpid(pid, 0)[1] for rank, pid in pids.items()}
    return statuses[victim]


# --- X17: what rots, is cut, swapped, mixed ---


def altered(rig: Rig, trials: int) -> Iterator[Trial]:
    """Two whole checkpoints; the newer is altered in one place, and a run asks where to go on."""
    random, folder = rig.random("X17"), rig.folder / "checkpoints"
    kinds: list[tuple[str, Callable[[Path, Path, Random], tuple[str, str]]]] = [
        ("flip", _flip), ("flip", _flip), ("flip", _flip), ("cut", _cut), ("delete", _delete),
        ("swap", _swap), ("mix", _mix), ("grow", _grow), ("rename", _rename), ("zero", _zero),
    ]  # fmt: skip
    store = make_store(folder, "a1")
    for step in (11, 12):
        save(store, step, number=step, shape=SMALL)
    whole = rig.folder / "whole"
    shutil.copytree(folder, whole)
    for number in range(trials):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        folder.chmod(0o755)
        kind, alter = kinds[number % len(kinds)]
        what, named = alter(folder / "step-00000012", folder / "step-00000011", random)
        origin, passed_over = resume(folder)
        texts = [f"{each['checkpoint']}: {each['reason']}" for each in passed_over]
        is_named = len(texts) == 1 and named in texts[0]
        yield Trial(
            passed=is_named and origin.step == 11,
            fault=f"{kind}: {what}",
            outcome="passed over by name for the one before" if is_named and origin.step == 11 else f"{texts}",
        )


def _flip(newer: Path, _: Path, random: Random) -> tuple[str, str]:
    path = newer / random.choice(FILES)
    data = bytearray(path.read_bytes())
    place, bit = random.randrange(len(data)), random.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place} of {path.name}", path.name


def _cut(newer: Path, _: Path, random: Random) -> tuple[str, str]:
    path = newer / random.choice(FILES)
    left = random.randrange(path.stat().st_size)
    os.truncate(path, left)
    return f"{path.name} cut to {left} bytes", path.name


def _grow(newer: Path, _: Path, random: Random) -> tuple[str, str]:
    path = newer / random.choice(FILES)
    with path.open("ab") as file:
        file.write(random.randbytes(random.randint(1, 9)))
    return f"bytes added to {path.name}", path.name


def _zero(newer: Path, _: Path, random: Random) -> tuple[str, str]:
    """What a lost page looks like after a crash on a file system that grows files before it writes them."""
    path = newer / random.choice(FILES)
    data = bytearray(path.read_bytes())
    start = random.randrange(max(1, len(data) - 512))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)
    return f"512 zeros at {start} of {path.name}", path.name


def _delete(newer: Path, _: Path, random: Random) -> tuple[str, str]:
    path = newer / random.choice(FILES)
    path.unlink()
    return f"{path.name} deleted", path.name


def _swap(newer: Path, _: Path, random: Random) -> tuple[str, str]:
    one, other = newer / FILES[0], newer / FILES[1]
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return "the files of two ranks swapped", "rank-0000"


def _mix(newer: Path, older: Path, random: Random) -> tuple[str, str]:
    name = random.choice(FILES)
    shutil.copy(older / name, newer / name)
    return f"{name} of the checkpoint before", "of step 11" if name == "manifest.json" else name


def _rename(newer: Path, older: Path, random: Random) -> tuple[str, str]:
    step = random.randint(13, 99_999)
    newer.rename(newer.with_name(f"step-{step:08d}"))
    return f"step 12 under the name of step {step}", "of step 12"


# --- X14: clocks ---


def scrambled_times(rig: Rig, trials: int) -> Iterator[Trial]:
    """Files and folders get any time between 1970 and 2100 before each save and each look."""
    random, folder = rig.random("X14"), rig.folder / "checkpoints"
    save(make_store(folder, "a0"), 10, shape=SMALL)
    for number in range(1, trials + 1):
        step = 10 + number
        save(make_store(folder, f"a{number}"), step, shape=SMALL)
        for path in (folder, *folder.rglob("*")):
            moment = random.uniform(0, 4.1e9)
            os.utime(path, (moment, moment))
        origin, _ = resume(folder)
        kept = [checkpoint.step for checkpoint in survey(folder).sound]
        right = origin.step == step and kept == [step, step - 1]
        yield Trial(
            passed=right,
            fault=f"times of {KEEP} checkpoints scrambled after step {step}",
            outcome="the newest step is found and kept" if right else f"step {origin.step} of {kept}",
        )


# --- X15: a full disk; X16: one writer fails ---


def full_disk(rig: Rig, trials: int) -> Iterator[Trial]:
    """A disk of 1.5 checkpoints, filled by somebody else up to any point of the second save; then space comes back."""
    random, shape = rig.random("X15s"), Shape(1024 * 1024)
    size = 3 * shape.bytes_per_rank  # two ranks: 1.5 checkpoints
    for _ in range(trials):
        with mounted_tmpfs(rig.folder / "disk", size) as disk:
            folder = disk.path / "checkpoints"
            store = make_store(folder, "a1")
            save(store, 1, shape=shape)
            filled = int(random.random() * 0.9 * shape.bytes_per_rank)
            (disk.path / "ballast").write_bytes(bytes(filled))
            shortage = store.shortage(2 * shape.bytes_per_rank) or ""
            said = re.search(r"([\d,]+) bytes needed, ([\d,]+) free", shortage)
            error = _failed_save(store, 2, shape)
            origin, _ = resume(folder)
            clean = sorted(path.name for path in folder.iterdir()) == ["step-00000001"]
            disk.resize(4 * size)
            save(store, 2, number=2, shape=shape)
            recovered = resume(folder)[0].step == 2
        good = error == errno.ENOSPC and origin.step == 1 and clean and recovered and said is not None
        yield Trial(
            passed=good,
            fault=f"{filled:,} of {size:,} bytes taken by others",
            outcome="save failed and told, the one before whole, nothing left over, next save works"
            if good
            else f"errno {error}, step {origin.step}, clean {clean}, recovered {recovered}, said {shortage!r}",
        )


def failing_writer(rig: Rig, trials: int) -> Iterator[Trial]:
    """One rank may write only so many bytes a file (EFBIG) or gets EIO: nothing is committed."""
    random, shape, folder = rig.random("X16s"), Shape(), rig.folder / "checkpoints"
    save(make_store(folder, "a0"), 1, shape=shape)
    for number in range(1, trials + 1):
        victim = random.randrange(RANKS)
        limit = random.randrange(shape.bytes_per_rank)

        def too_large(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        def broken(limit: int = limit) -> None:
            write, written = os.write, 0

            def failing(descriptor: int, data: memoryview) -> int:
                nonlocal written
                written += len(data)
                if written > limit:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return write(descriptor, data)

            os.write = failing  # type: ignore[assignment]

        store = make_store(folder, f"a{number}")
        kind, hook = (("EFBIG", too_large), ("EIO", broken))[number % 2]
        statuses = {
            rank: os.waitpid(pid, 0)[1] for rank, pid in start_save(store, 1 + number, shape, {victim: hook}).items()
        }
        origin, passed_over = resume(folder)
        failed = os.waitstatus_to_exitcode(statuses[victim]) == 1
        good = failed and origin.step == 1 and not passed_over
        yield Trial(
            passed=good,
            fault=f"{kind} for rank {victim} after {limit} bytes",
            outcome="nothing committed" if good else f"step {origin.step}, passed over {passed_over}",
        )


def _failed_save(store: object, step: int, shape: Shape) -> int | None:
    """The errno of a save that fails, cleaned up as the saver does; None where it does not fail."""
    try:
        save(store, step, shape=shape)  # type: ignore[arg-type]
    except OSError as error:
        store.abandon(store.partial(step, 1))  # type: ignore[attr-defined]
        return error.errno
    return None


# --- X19: the order of system calls ---

CALL = re.compile(r"^(\d+)\s+(\w+)\((.*)\)\s+= \d+")
BEGUN = re.compile(r"^(\d+)\s+(\w+)\((.*?),? <unfinished \.\.\.>$")
ENDED = re.compile(r"^(\d+)\s+<\.\.\. (\w+) resumed>.*= \d+")


def traced_order(rig: Rig, trials: int) -> Iterator[Trial]:
    """A save under strace: what is on disk when the rename makes it count."""
    folder = rig.folder / "checkpoints"
    for number in range(1, trials + 1):
        log = rig.folder / f"trace{number}"
        traced = "trace=write,fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat"
        subprocess.run(
            ["strace", "-f", "-y", "-s", "0", "-e", traced, "-o", str(log)]
            + [sys.executable, "-m", "chaos.bare_store", str(folder), f"a{number}", str(number)],
            check=True,
            capture_output=True,
        )
        problem = _wrong_order(log.read_text(), number)
        yield Trial(passed=problem is None, fault=f"save {number} traced", outcome=problem or "synced before it counts")


def _wrong_order(trace: str, step: int) -> str | None:
    calls = _calls_when_done(trace)
    target = f"step-{step:08d}"
    renames = [
        index for index, (name, words) in enumerate(calls) if name.startswith("rename") and words.count(target) >= 2
    ]
    if len(renames) != 1:
        return f"{len(renames)} renames to {target}"
    before, after = calls[: renames[0]], calls[renames[0] + 1 :]
    for name in FILES:
        touched = [call for call, words in before if f"/{name}>" in words and call in ("write", "fsync", "fdatasync")]
        if not touched or touched[-1] == "write" or "write" not in touched:
            return f"{name} was not synced after its last write: {touched}"
    last_write = max(index for index, (call, words) in enumerate(before) if call == "write" and target in words)
    if not any(
        call == "fsync" and re.search(rf"\.partial-{target}[^/]*>", words) for call, words in before[last_write:]
    ):
        return "the folder was not synced before the rename"
    if not after or after[0][0] != "fsync" or not after[0][1].rstrip(")").endswith("checkpoints>"):
        return f"the parent was not synced right after the rename: {after[:1]}"
    return None


def _calls_when_done(trace: str) -> list[tuple[str, str]]:
    """Names and arguments of calls that succeeded, in the order in which they returned."""
    calls: list[tuple[str, str]] = []
    begun: dict[tuple[str, str], str] = {}
    for line in trace.splitlines():
        if match := CALL.match(line):
            calls.append((match[2], match[3]))
        elif match := BEGUN.match(line):
            begun[match[1], match[2]] = match[3]
        elif match := ENDED.match(line):
            calls.append((match[2], begun.pop((match[1], match[2]), "")))
    return calls
