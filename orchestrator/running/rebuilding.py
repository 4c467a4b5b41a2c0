"""A gang has failed: is it built anew, or does the run end? A pure function of what is known about it.

A gang that is built anew does what the same command would do, started again: it continues from the newest checkpoint.
So whatever the same command would only meet again ends the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.exit_codes import ExitCode


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended a gang.

    `code` is what the run would end with, `of_gang` whether a training rank failed. `rollout_id` was to be trained
    next. Failures of the same `kind` may have one cause.
    """

    code: ExitCode
    of_gang: bool
    kind: str
    rollout_id: int

    def repeats(self, earlier: Failure) -> bool:
        return (self.kind, self.rollout_id) == (earlier.kind, earlier.rollout_id)


@dataclass(frozen=True, slots=True)
class Situation:
    """`earlier`: failures that this process has rebuilt the gang after. `started`: it has had a gang that came up.

    `trained`: rollouts that it has trained. `continues_itself`: the same command would continue from what it saves.
    """

    failure: Failure
    earlier: tuple[Failure, ...]
    budget: int
    started: bool
    trained: int
    continues_itself: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    rebuild: bool
    why: str


def decide(situation: Situation) -> Verdict:
    """Whether to rebuild, and in words why."""
    objection = _objection(situation)
    if objection is not None:
        return Verdict(False, objection)
    attempt = len(situation.earlier) + 1
    return Verdict(True, f"restart {attempt} of {situation.budget}")


def _objection(situation: Situation) -> str | None:
    failure, spent, budget = situation.failure, len(situation.earlier), situation.budget
    match failure.code:
        case ExitCode.FAILED:
            pass
        case ExitCode.INTERRUPTED:
            return "the run was asked to end"
        case ExitCode.INVARIANT:
            return "weights were not what they had to be: that is to be looked into, not tried again"
        case _:
            return "the same would be found again"
    if not failure.of_gang:
        return "no training rank failed: another gang would not help"
    if not situation.started:
        return "the gang has never come up"
    if budget == 0:
        return "cluster.max_gang_restarts is 0"
    if spent >= budget:
        return f"cluster.max_gang_restarts = {budget} are spent"
    if not situation.continues_itself and situation.trained:
        return (
            f"{situation.trained} rollouts would be lost: the same command does not continue from what the run saves "
            "(that needs checkpoint.save_interval, and no checkpoint.ckpt_step or start of its own)"
        )
    if any(failure.repeats(one) for one in situation.earlier):
        return f"the same happened before, over rollout {failure.rollout_id} too"
    return None
