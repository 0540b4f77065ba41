"""What one node refuses is told to the others of its run, and never to those of another one."""

from __future__ import annotations

import pytest

from coremill.errors import InputError
from coremill.world import refusal
from coremill.world.identity import NodeIdentity
from coremill.world.run_lock import FolderTaken


@pytest.mark.parametrize("node_rank", [0, 1])
@pytest.mark.parametrize(("error", "is_told"), [(InputError, True), (FolderTaken, False)])
def test_a_second_start_says_nothing_at_the_meeting_of_the_run_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    node_rank: int,
    error: type[InputError],
    is_told: bool,
) -> None:
    told: list[object] = []
    for name in ("_serve", "_knock"):
        monkeypatch.setattr(refusal, name, lambda node, words, deadline: told.append(words["text"]))
    node = NodeIdentity(node_rank=node_rank, nodes=2, master_address="node1", master_port=29500, ranks_per_node=None)
    with pytest.raises(error) as raised, refusal.refusals_told(node, {}, dry_run=False):
        raise error("no")
    assert told == (["no"] if is_told else [])
    assert raised.value.silent == is_told and ("telling the other nodes" in capsys.readouterr().err) == is_told
