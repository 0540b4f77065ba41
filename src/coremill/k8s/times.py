"""Times that have to fit each other: from the word that a machine goes to the last byte of a checkpoint.

    spot       notice ....... SIGTERM ........................ SIGKILL, machine gone
               |-- reaches --|------- grace of the pod -------|      together: the two minutes that EC2 gives
                             |--- checkpoint.grace ---|-leave-|

On machines that nobody takes back, a pod's grace is as long as the plan says that a save takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from coremill.config.durations import seconds_of
from coremill.config.schema import AUTO, RunConfig
from coremill.plan.saving import SPOT_NOTICE_SECONDS
from coremill.plan.types import Plan

# From EC2's notice through the queue that Karpenter reads to SIGTERM in the pod.
NOTICE_REACHES_POD_SECONDS = 10
# From the end of checkpoint.grace, when ranks are killed, until the launcher has written its report and left.
LEAVE_SECONDS = 10
# A node is ordered, boots, joins and pulls the image: some five minutes; capacity may be short for some more.
NODE_START_SECONDS = 900
# Karpenter counts a node's grace from its first step, before it evicts pods.
NODE_MARGIN_SECONDS = 60
GRACE_WITHOUT_PLAN_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Times:
    """What pods, nodes and the run file are told."""

    pod_grace_seconds: int
    checkpoint_grace_seconds: int
    node_grace_seconds: int  # of NodePool: never less than the pod's, or pods are given less
    wait_for_hosts_seconds: int  # at least


def times_of(config: RunConfig, plan: Plan | None) -> Times:
    """Without a plan nobody knows how long a save takes."""
    is_spot = config.kubernetes.may_be_spot
    asked = config.checkpoint.grace
    save = None if plan is None else plan.save
    if asked != AUTO:
        wanted = ceil(seconds_of(asked))
    else:
        wanted = GRACE_WITHOUT_PLAN_SECONDS if save is None else ceil(save.grace_seconds.value)
    most = int(SPOT_NOTICE_SECONDS) - NOTICE_REACHES_POD_SECONDS - LEAVE_SECONDS
    grace = min(wanted, most) if is_spot else wanted
    pod_grace = grace + LEAVE_SECONDS
    return Times(
        pod_grace_seconds=pod_grace,
        checkpoint_grace_seconds=grace,
        node_grace_seconds=int(SPOT_NOTICE_SECONDS) if is_spot else pod_grace + NODE_MARGIN_SECONDS,
        wait_for_hosts_seconds=NODE_START_SECONDS,
    )
