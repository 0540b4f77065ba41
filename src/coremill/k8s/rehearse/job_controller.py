"""A pod has ended: what the Job makes of it, and the JobSet of a failed Job. Pure: it is told, and answers.

As kube-controller-manager does it: the first rule of the pod failure policy that matches counts; what is ignored is
replaced and not counted, what is counted is replaced until backoffLimit is exceeded. New pods wait 10 s from the last
failure on, and twice as long for every further pod that failed, up to 10 minutes, until one succeeds; ignored failures
are no exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coremill.k8s.rehearse.controllers import PlannedJob, PlannedSet
from coremill.k8s.rehearse.written import Written

FIRST_DELAY_SECONDS = 10.0
LONGEST_DELAY_SECONDS = 600.0
DISRUPTED = "DisruptionTarget"  # the condition of a pod that was evicted, or whose node is gone
BY_POLICY = "PodFailurePolicy"
BY_LIMIT = "BackoffLimitExceeded"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What happens after a pod has ended."""

    action: Literal["done", "replace", "fail"]
    counted: bool
    line: Written  # what in the manifest says so
    reason: str = ""  # of a failed Job, as its condition has it
    delay_seconds: float = 0.0


class JobController:
    """The state of one Job."""

    def __init__(self, job: PlannedJob) -> None:
        self.job = job
        self.succeeded: set[int] = set()
        self.counted = 0
        self.failures_since_success = 0

    @property
    def is_complete(self) -> bool:
        return len(self.succeeded) == self.job.completions

    def pod_ended(self, index: int, exit_code: int, *, is_disrupted: bool, container: str | None = None) -> Answer:
        """`container`: whose exit code it is, an init container's too; None: that of the one which trains."""
        spec = self.job.spec
        if exit_code == 0:
            self.succeeded.add(index)
            self.failures_since_success = 0
            return Answer(action="done", counted=False, line=spec)
        action, line = self._matching_rule(container, exit_code, is_disrupted)
        self.failures_since_success += 1
        if action == "FailJob":
            return Answer(action="fail", counted=True, line=line, reason=BY_POLICY)
        delay = min(FIRST_DELAY_SECONDS * 2.0 ** (self.failures_since_success - 1), LONGEST_DELAY_SECONDS)
        if action == "Ignore":
            return Answer(action="replace", counted=False, line=line, delay_seconds=delay)
        self.counted += 1
        if self.counted > self.job.backoff_limit:
            return Answer(action="fail", counted=True, line=spec.part("backoffLimit"), reason=BY_LIMIT)
        return Answer(action="replace", counted=True, line=line, delay_seconds=delay)

    def _matching_rule(self, container: str | None, exit_code: int, is_disrupted: bool) -> tuple[str, Written]:
        container = container or self.job.template["spec"]["containers"][0].get("name")
        for rule in self.job.spec.parts("podFailurePolicy", "rules"):
            codes, conditions = rule.part("onExitCodes"), rule.part("onPodConditions")
            by_code = (
                codes.value is not None
                and codes.value.get("containerName", container) == container
                and (exit_code in codes.value["values"]) == (codes.value["operator"] == "In")
            )
            by_condition = is_disrupted and any(
                one["type"] == DISRUPTED and one.get("status", "True") == "True" for one in conditions.value or []
            )
            if by_code or by_condition:
                return str(rule.value["action"]), rule
        return "Count", self.job.spec.part("podFailurePolicy", "rules")


class SetController:
    """The restarts of a JobSet."""

    def __init__(self, planned: PlannedSet) -> None:
        self.planned = planned
        self.restarts = 0
        self.counted = 0

    def job_failed(self, reason: str) -> tuple[Literal["restart", "fail"], Written]:
        """All Jobs start anew, or the set has failed; and the line that says so."""
        policy = self.planned.failure_policy
        if policy is None:
            return "fail", self.planned.job.spec
        action, line = "RestartJobSet", policy.part("maxRestarts")
        for rule in policy.parts("rules"):
            reasons, targets = rule.value.get("onJobFailureReasons"), rule.value.get("targetReplicatedJobs")
            if (not reasons or reason in reasons) and (not targets or self.planned.job.replicated_job in targets):
                action, line = str(rule.value["action"]), rule
                break
        if action == "FailJobSet":
            return "fail", line
        if action != "RestartJobSetAndIgnoreMaxRestarts":
            if self.counted >= int(policy.part("maxRestarts").value or 0):
                return "fail", policy.part("maxRestarts")
            self.counted += 1
        self.restarts += 1
        return "restart", line
