"""When a run goes on by itself: exit codes, progress and requests in; restart or end out."""

from __future__ import annotations

import pytest

from coremill.supervise.ranks import Outcome
from coremill.supervise.restarts import Decision, RestartBudget, cause_of, is_worth_a_restart, supervise
from coremill.supervise.stuck import Stuck


def ended(exit_code: int, **more: object) -> Outcome:
    fields: dict[str, object] = {
        "exit_code": exit_code,
        "failed_rank": 1 if exit_code else None,
        "signal": exit_code - 128 if exit_code > 128 else None,
        "message": f"rank 1 ended with {exit_code}",
        "exit_codes": (0, exit_code),
        "log_tail": "",
        "log_file": None,
        "settings": (),
    }
    return Outcome(**{**fields, **more})  # type: ignore[arg-type]


class Attempts:
    """Attempts that end as told; each may have committed a step by then."""

    def __init__(self, *endings: tuple[Outcome, int], met: bool = True) -> None:
        self.endings = list(endings)
        self.committed = 0
        self.has_met = met
        self.has_trained = True
        self.decisions: list[Decision] = []
        self.numbers: list[int] = []

    def run(self, number: int) -> Outcome:
        self.numbers.append(number)
        outcome, self.committed = self.endings.pop(0)
        return outcome

    def under(self, budget: RestartBudget) -> Outcome:
        def on_fault(outcome: Outcome, decision: Decision, committed: int) -> None:
            self.decisions.append(decision)

        return supervise(self, budget, lambda: self.committed, on_fault)


@pytest.mark.parametrize("code", [1, 69, 74, 134, 137, 139, 143])
def test_what_is_tried_again(code: int) -> None:
    assert is_worth_a_restart(code)
    attempts = Attempts((ended(code), 0), (ended(0), 0))
    assert attempts.under(RestartBudget()).exit_code == 0
    assert attempts.numbers == [0, 1]


@pytest.mark.parametrize("code", [70, 75, 78, 127, 130])
def test_what_is_never_tried_again(code: int) -> None:
    attempts = Attempts((ended(code, signal=None), 0))
    assert attempts.under(RestartBudget()).exit_code == code
    assert attempts.decisions == [Decision(False, 0)]


def test_a_request_to_stop_is_final() -> None:
    attempts = Attempts((ended(137, on_request=True), 0))
    assert attempts.under(RestartBudget()).exit_code == 137


def test_a_crash_loop_ends_with_the_last_cause() -> None:
    last = ended(139)
    attempts = Attempts((ended(137), 10), (ended(1), 10), (ended(74), 10), (last, 10))
    assert attempts.under(RestartBudget(committed_step=10)) is last
    assert attempts.numbers == [0, 1, 2, 3]
    assert attempts.decisions[-1].why_not == "restarted 3 times without a new committed step"


def test_restarts_are_spent_on_lack_of_progress() -> None:
    """Fifty faults, each after two attempts that got nowhere: every new committed step gives the budget back."""
    endings = [(ended(137), committed) for committed in range(1, 51) for _ in range(3)]
    attempts = Attempts(*endings, (ended(0), 51))
    assert attempts.under(RestartBudget()).exit_code == 0
    assert [decision.number for decision in attempts.decisions[:7]] == [1, 2, 3, 1, 2, 3, 1]


def test_a_checkpoint_that_went_away_is_no_progress() -> None:
    attempts = Attempts(*[(ended(137), committed) for committed in (20, 10, 20, 10)])
    assert attempts.under(RestartBudget()).exit_code == 137
    assert attempts.numbers == [0, 1, 2, 3]


def test_the_config_may_forbid_it_or_count_otherwise() -> None:
    assert Attempts((ended(137), 0)).under(RestartBudget(enabled=False)).exit_code == 137
    attempts = Attempts((ended(137), 0), (ended(137), 0))
    assert attempts.under(RestartBudget(without_progress=1)).exit_code == 137
    assert attempts.decisions[-1].why_not == "restarted once without a new committed step"


def test_a_rank_that_cannot_be_ended_ends_the_run() -> None:
    attempts = Attempts((ended(74, unkillable=(0,)), 0))
    attempts.under(RestartBudget())
    assert "rank 0 hangs in the kernel" in attempts.decisions[0].why_not


def test_hosts_that_are_away_have_a_time_and_cost_no_restart() -> None:
    budget = RestartBudget(wait_for_hosts_seconds=60.0)
    for now in (0.0, 20.0, 40.0, 59.0):
        assert budget.decide(ended(69), 0, has_met=False, now=now) == Decision(True, 0)
    assert budget.decide(ended(69), 0, has_met=True, now=61.0).restart  # they came, and one died
    assert budget.decide(ended(69), 0, has_met=False, now=100.0).restart
    decision = budget.decide(ended(69), 0, has_met=False, now=161.0)
    assert not decision.restart and "did not come back within 61 s" in decision.why_not


def test_what_fails_before_ranks_meet_for_a_reason_of_its_own_costs_restarts() -> None:
    budget = RestartBudget(wait_for_hosts_seconds=600.0)
    decisions = [budget.decide(ended(1), 0, has_met=False, now=float(now)).restart for now in range(4)]
    assert decisions == [True, True, True, False]


def test_causes() -> None:
    assert cause_of(ended(137)) == "killed"
    assert cause_of(ended(137, memory_kills=1)) == "out of memory"
    assert cause_of(ended(69, stuck=Stuck(0, "is stopped", 10.0))) == "stuck"
    assert cause_of(ended(74, stuck=Stuck(0, "writes", 10.0, by_storage=True))) == "storage"
    assert cause_of(ended(69)) == "peer lost" and cause_of(ended(1)) == "failed"


def test_what_fails_before_the_first_step_is_not_tried_again() -> None:
    budget = RestartBudget()
    assert not budget.decide(ended(1), 0, has_met=True, has_trained=False, now=0.0).restart
    for exit_code in (69, 74, 137):  # a host, the storage, memory of the moment: that may pass
        assert budget.decide(ended(exit_code), 0, has_met=True, has_trained=False, now=0.0).restart
    assert RestartBudget().decide(ended(1), 0, has_met=True, has_trained=True, now=0.0).restart
