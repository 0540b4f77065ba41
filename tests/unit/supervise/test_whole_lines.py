"""What several ranks print into one pipe: every line arrives as it was written."""

from __future__ import annotations

import os
import threading

from coremill.supervise.output import write_lines

LINES = 3000


def test_lines_of_two_writers_do_not_run_into_each_other() -> None:
    """Both hand over far more than a pipe holds at once, as a rank does that prints a table."""
    source, target = os.pipe()
    said = [b"".join(b"%d %d %s\n" % (writer, line, b"x" * (line % 200)) for line in range(LINES)) for writer in (0, 1)]
    writers = [threading.Thread(target=write_lines, args=(target, content)) for content in said]
    for thread in writers:
        thread.start()

    def close_after_all() -> None:
        for thread in writers:
            thread.join()
        os.close(target)

    closer = threading.Thread(target=close_after_all)
    closer.start()
    with os.fdopen(source, "rb") as pipe:
        heard = pipe.read().splitlines(keepends=True)
    closer.join()
    for writer, content in enumerate(said):
        assert b"".join(line for line in heard if line.startswith(b"%d " % writer)) == content
    assert len(heard) == 2 * LINES


def test_nobody_listens() -> None:
    source, target = os.pipe()
    os.close(source)
    write_lines(target, b"into the void\n")
    os.close(target)
