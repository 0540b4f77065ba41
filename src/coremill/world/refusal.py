"""A node that refuses its input tells the other nodes, whose ranks would else wait for it for minutes.

The meeting's own store carries the words. Another node than the first leaves them in the store of rank 0, which then
ends the roll with them. The first node has no rank 0 when it refuses, so its launcher serves a store in which the roll
is over already. Either way all ranks read it as they read any roll, and end with 78. `train --hostfile` has a head for
that. Torch is imported only inside functions: a launcher that refuses nothing has none.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

from coremill.errors import InputError, Interrupted, Stopped
from coremill.redaction import redact
from coremill.world.identity import HEAD, NodeIdentity, RankIdentity
from coremill.world.meeting import POLL_SECONDS, REFUSAL, SLOWEST_POLL_SECONDS, TELLING_SECONDS, all_heard, serve_store
from coremill.world.run_lock import FolderTaken
from coremill.world.sockets import reaches

ANSWER_SECONDS = 5.0


@contextlib.contextmanager
def refusals_told(node: NodeIdentity | None, environ: Mapping[str, str], *, dry_run: bool) -> Iterator[None]:
    """What is refused inside is said here first, then to the other nodes of the run, then raised on.

    Not where another run has the folders: it may meet at the same port, and its nodes would take the words for theirs.
    """
    try:
        yield
    except FolderTaken:
        raise
    except InputError as error:
        if node is not None and node.nodes > 1 and HEAD not in environ and not dry_run:
            others = f"telling the other nodes, for up to {TELLING_SECONDS / 60:.0f} minutes; Ctrl-C ends that"
            with contextlib.suppress(Stopped, Interrupted, KeyboardInterrupt):
                error.silent = True
                print(f"coremill: {error}\ncoremill: {others}", file=sys.stderr, flush=True)
                words = {"node": node.node_rank, "host": socket.gethostname(), "text": redact(str(error))}
                # In this thread, and never long inside torch: a thread there would hold up the end after Ctrl-C.
                (_serve if node.node_rank == 0 else _knock)(node, words, time.monotonic() + TELLING_SECONDS)
        raise


def _serve(node: NodeIdentity, words: Mapping[str, object], deadline: float) -> None:
    """As the first node: until every other node has heard it."""
    identity = RankIdentity(
        rank=0, size=node.nodes, local_rank=0, local_size=1, node_rank=0,
        master_address=node.master_address, master_port=node.master_port, launcher="coremill",
    )  # fmt: skip
    with contextlib.suppress(InputError, RuntimeError):  # the port is taken: then nobody can be told
        store, _ = serve_store(identity, timedelta(seconds=TELLING_SECONDS))
        store.set("roll", json.dumps({"refused": words}))
        while time.monotonic() < deadline and not all_heard(store, node.nodes):
            time.sleep(POLL_SECONDS)


def _knock(node: NodeIdentity, words: Mapping[str, object], deadline: float) -> None:
    """As another node: until rank 0, or a first node that refuses as well, has ended the roll."""
    from torch._C._distributed_c10d import TCPStore

    host, port, answer = node.master_address, node.master_port, timedelta(seconds=ANSWER_SECONDS)
    while time.monotonic() < deadline:
        if reaches(host, port):
            with contextlib.suppress(RuntimeError):  # that store is gone: of an attempt before, perhaps
                store = TCPStore(host, port, node.nodes, is_master=False, timeout=answer, wait_for_workers=False)
                if store.add("refusals", 1) == 1:
                    store.set(REFUSAL, json.dumps(words))
                while time.monotonic() < deadline:
                    # A roll without it is that of ranks at work; when they start again, it is at another store.
                    if store.check(["roll"]) and "refused" in json.loads(store.get("roll")):
                        store.add(f"heard/{node.node_rank}", 1)
                        return
                    time.sleep(POLL_SECONDS)
        time.sleep(SLOWEST_POLL_SECONDS)
