import errno
import json
import math
import os
from pathlib import Path

import pytest

from coremill.errors import StorageError
from coremill.redaction import redact
from coremill.report import events as events_module
from coremill.report.events import EventFollower, EventWriter, event_file, read_events, reset_events


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 3) as events:
        events.write("step", step=1, loss=2.5, cpus=(0, 1), folder="x")
    (event,) = read_events(tmp_path)
    assert (event.kind, event.rank, event.get("loss"), event.get("cpus")) == ("step", 3, 2.5, [0, 1])
    assert event_file(tmp_path, 3).name == "rank-00003.jsonl"


def test_events_of_all_ranks_come_by_time(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 1) as one, EventWriter(tmp_path, 0) as zero:
        one.write("a")
        zero.write("b")
        one.write("c")
    assert [event.kind for event in read_events(tmp_path)] == ["a", "b", "c"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path: Path, value: float) -> None:
    with EventWriter(tmp_path, 0) as events:
        events.write("step", loss=value, step=1)
    line = event_file(tmp_path, 0).read_text()
    document = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert document["loss"] is None and document["non_finite"] == {"loss": str(value)}
    loss = read_events(tmp_path)[0].get("loss")
    assert loss == value or (math.isnan(loss) and math.isnan(value))


def test_tokens_never_reach_the_file(tmp_path: Path) -> None:
    token = "hf_" + "aB3" * 12
    with EventWriter(tmp_path, 0) as events:
        events.write("error", message=f"401 for {token}", traceback=None, details={"url": [f"https://x/?t={token}"]})
    text = event_file(tmp_path, 0).read_text()
    assert token not in text and text.count("***") == 2
    assert redact("hf_hub_download") == "hf_hub_download"


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 0) as events:
        events.write("start")
    with event_file(tmp_path, 0).open("a") as file:
        file.write('[1, 2]\nnot json\n{"kind": "step", "time": "soon", "rank": 0}\n{"kind":"step","time":1.0,"ra')
    assert [event.kind for event in read_events(tmp_path)] == ["start"]
    with EventWriter(tmp_path, 0) as events:  # the launcher says what became of the rank
        events.write("error", message="killed", exit_code=137)
    assert [event.kind for event in read_events(tmp_path)] == ["start", "error"]


def test_follower_sees_new_lines_new_ranks_and_new_attempts(tmp_path: Path) -> None:
    follower = EventFollower(tmp_path)
    assert follower.poll() == []
    with EventWriter(tmp_path, 0) as zero:
        zero.write("start")
        assert [event.kind for event in follower.poll()] == ["start"]
        assert follower.poll() == []
        with event_file(tmp_path, 0).open("a") as file:
            file.write('{"kind":"step","time":5.0,')
            file.flush()
            assert follower.poll() == []  # half a line is left for later
            file.write('"rank":0}\n')
        with EventWriter(tmp_path, 1) as one:
            one.write("start")
        assert [(event.kind, event.rank) for event in follower.poll()] == [("step", 0), ("start", 1)]
    reset_events(tmp_path)
    with EventWriter(tmp_path, 0) as zero:
        zero.write("again")
    assert [event.kind for event in follower.poll()] == ["again"]


def test_a_file_made_anew_under_the_inode_of_the_former_one_is_read_from_its_start(tmp_path: Path) -> None:
    follower = EventFollower(tmp_path)
    with EventWriter(tmp_path, 0) as events:
        events.write("start", pid=1)
        assert len(follower.poll()) == 1 and follower.poll() == []
    path = event_file(tmp_path, 0)
    with path.open("r+b") as file:  # the kernel gives inodes back; this one is the same for sure
        file.truncate()
        later = [{"kind": kind, "time": 7.0 + step, "rank": 0} for step, kind in enumerate(("start", "step", "step"))]
        file.write("".join(json.dumps(one | {"pid": 2}) + "\n" for one in later).encode())
    assert [event.kind for event in follower.poll()] == ["start", "step", "step"] and follower.begun_anew


def test_a_file_that_cannot_be_read_for_a_moment_costs_no_event(tmp_path: Path) -> None:
    follower = EventFollower(tmp_path)
    with EventWriter(tmp_path, 0) as zero:
        zero.write("start")
        event_file(tmp_path, 1).mkdir()  # cannot be opened as a file
        assert [event.rank for event in follower.poll()] == [0]
        event_file(tmp_path, 1).rmdir()
    with EventWriter(tmp_path, 1) as one:
        one.write("start")
    assert [event.rank for event in follower.poll()] == [1]


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file in the way")
    with pytest.raises(StorageError, match="cannot write the events"):
        EventWriter(tmp_path, 0)


def test_numbers_of_other_libraries_become_plain(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with EventWriter(tmp_path, 0) as events:
        events.write("step", loss=numpy.float32(1.5), tokens=numpy.int64(7), folder=tmp_path)
    event = read_events(tmp_path)[0]
    assert (event.get("loss"), event.get("tokens"), event.get("folder")) == (1.5, 7, str(tmp_path))


def test_a_full_disk_ends_no_run_and_lines_follow_once_there_is_room(tmp_path, monkeypatch):
    room = 10**6
    write = os.write

    def limited(descriptor, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(descriptor, bytes(data[:room]))
        room -= taken
        return taken

    monkeypatch.setattr(events_module.os, "write", limited)
    with EventWriter(tmp_path, 0) as events:
        events.write("step", step=1)
        room = 20  # half a line
        for step in (2, 3, 4):
            events.write("step", step=step)
        assert [event.get("step") for event in read_events(tmp_path)] == [1]
        room = 10**6
        events.write("step", step=5)
    assert [event.get("step") for event in read_events(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_disk_that_fails_otherwise_is_told(tmp_path, monkeypatch):
    with EventWriter(tmp_path, 0) as events:
        failing = OSError(errno.EIO, os.strerror(errno.EIO))
        monkeypatch.setattr(events_module.os, "write", lambda *_: (_ for _ in ()).throw(failing))
        with pytest.raises(StorageError, match="Input/output error"):
            events.write("step", step=1)
