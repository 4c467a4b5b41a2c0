"""Whether a gang that failed is built anew, for every kind of failure. A table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.exit_codes import ExitCode
from orchestrator.resume.resuming import continues_itself
from orchestrator.running.rebuilding import Failure, Situation, decide
from tests.orchestrator.valid_config import with_flags

FAILED = Failure(ExitCode.FAILED, of_gang=True, kind="death when it was to train", rollout_id=7)
WORTH_IT = Situation(FAILED, earlier=(), budget=3, started=True, trained=4, continues_itself=True)
OTHERS = tuple(replace(FAILED, rollout_id=rollout_id) for rollout_id in (2, 3, 4))


def about(**changes: object) -> Situation:
    return replace(WORTH_IT, failure=replace(FAILED, **changes))  # type: ignore[arg-type]


REBUILT = {
    "a first failure": (WORTH_IT, "restart 1 of 3"),
    "the last in the budget": (replace(WORTH_IT, earlier=OTHERS[:2]), "restart 3 of 3"),
    "of another kind over the same rollout": (
        replace(WORTH_IT, earlier=(replace(FAILED, kind="OutOfMemoryError when it was to train"),)),
        "restart 2 of 3",
    ),
    "nothing to lose, where nothing is saved": (
        replace(WORTH_IT, trained=0, continues_itself=False),
        "restart 1 of 3",
    ),
    "before anything was trained": (replace(WORTH_IT, trained=0), "restart 1 of 3"),
    "a rebuilt gang that did not come up": (replace(WORTH_IT, trained=0, earlier=OTHERS[:1]), "restart 2 of 3"),
}
GIVEN_UP = {
    "a wrong configuration": (about(code=ExitCode.CONFIG), "the same would be found again"),
    "nothing right to continue from": (about(code=ExitCode.RESUME), "the same would be found again"),
    "wrong weights": (about(code=ExitCode.INVARIANT), "weights were not what they had to be"),
    "asked to end": (about(code=ExitCode.INTERRUPTED), "asked to end"),
    "engines, data or the driver failed": (about(of_gang=False), "no training rank failed"),
    "a gang that never came up": (replace(WORTH_IT, started=False), "never come up"),
    "no budget": (replace(WORTH_IT, budget=0), "cluster.max_gang_restarts is 0"),
    "a budget that is spent": (replace(WORTH_IT, earlier=OTHERS), "cluster.max_gang_restarts = 3 are spent"),
    "trained and not saved": (replace(WORTH_IT, continues_itself=False), "4 rollouts would be lost"),
    "the same over the same rollout": (
        replace(WORTH_IT, earlier=(FAILED,)),
        "the same happened before, over rollout 7",
    ),
    "the same, with others in between": (
        replace(WORTH_IT, earlier=(FAILED, replace(FAILED, rollout_id=8))),
        "the same happened before",
    ),
}


@pytest.mark.parametrize("name", REBUILT)
def test_it_is_built_anew(name: str) -> None:
    situation, why = REBUILT[name]
    verdict = decide(situation)
    assert (verdict.rebuild, verdict.why) == (True, why)


@pytest.mark.parametrize("name", GIVEN_UP)
def test_the_run_ends(name: str) -> None:
    situation, why = GIVEN_UP[name]
    verdict = decide(situation)
    assert not verdict.rebuild
    assert why in verdict.why


@pytest.mark.parametrize(
    ("flags", "continues"),
    [
        ((), False),
        (("--checkpoint.save_interval", "2"), True),
        (("--checkpoint.save_interval", "2", "--checkpoint.load", "elsewhere"), True),
        (("--checkpoint.save_interval", "2", "--checkpoint.load", "elsewhere", "--checkpoint.weights_only"), True),
        (("--checkpoint.save_interval", "2", "--checkpoint.weights_only"), False),
        (("--checkpoint.save_interval", "2", "--checkpoint.ckpt_step", "4"), False),
        (("--checkpoint.save_interval", "2", "--loop.start_rollout_id", "4"), False),
    ],
)
def test_which_commands_continue_from_what_they_save(tmp_path: Path, flags: tuple[str, ...], continues: bool) -> None:
    assert continues_itself(with_flags(tmp_path, *flags)) is continues
