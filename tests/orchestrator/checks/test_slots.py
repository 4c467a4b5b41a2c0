"""Options about slots that cannot be right together; and that whatever is accepted survives on a toy worker."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from orchestrator.checks.configuration import problems
from orchestrator.options.problems import ConfigError
from orchestrator.resume.changing_slots import changing
from orchestrator.resume.resuming import protected
from orchestrator.resume.slot_plan import keep_old_actors
from state.gang import agree
from state.slots import Slot, Tier
from tests.orchestrator.valid_config import said, with_flags
from tests.state.toy import bytes_of, cold_worker, values_of

OPD = ("--algorithm.use_opd", "true", "--teacher.load", "/teacher")
SAVING = ("--checkpoint.save", "ckpt", "--checkpoint.save_interval", "1")
ASYNC = ("--loop.mode", "async")
OLD_ACTOR = ("--algorithm.old_logprobs", "old_actor")
FULLY = ("--loop.mode", "fully_async")
ENGINE = (*FULLY, "--algorithm.old_logprobs", "engine")

REFUSED = [
    ("an asynchronous loop that does not say whose log-probs", ASYNC,
     "algorithm.old_logprobs", ("`engine`", "`old_actor`", "`recompute`")),
    ("the moved actor as behaviour policy", (*ASYNC, "--algorithm.old_logprobs", "recompute"),
     "algorithm.old_logprobs", ("`engine` or `old_actor`",)),
    ("engines behind the actor that is recomputed with", ("--loop.update_weights_interval", "2"),
     "algorithm.old_logprobs", ("`engine` or `old_actor`", "interval of 1")),
    ("a continuous loop that does not say whose log-probs", FULLY,
     "algorithm.old_logprobs", ("`engine`", "`old_actor`", "`recompute`", "cut off")),
    ("the moved actor as behaviour policy of a continuous loop", (*FULLY, "--algorithm.old_logprobs", "recompute"),
     "algorithm.old_logprobs", ("`engine` or `old_actor`",)),
    ("fewer versions than samples may wait of", (*FULLY, *OLD_ACTOR, "--loop.max_staleness", "2"),
     "old_actor.keep", ("samples of 3 may wait", "at least 3", "old_logprobs engine")),
    ("one old actor for samples that several wrote", (*FULLY, *OLD_ACTOR, "--rollout.generate", "a.b:c"),
     "algorithm.old_logprobs", ("use `engine`",)),
    ("a bound of what is not stale", (*ASYNC, "--loop.max_staleness", "2"), "loop.max_staleness", ("mode is async",)),
    ("engines that are staler than the bound", (*ENGINE, "--loop.update_weights_interval", "3"),
     "loop.max_staleness", ("1 is less", "at least 2", "publish after every 2 rollouts")),
    ("versions that count from elsewhere", (*ENGINE, "--loop.start_rollout_id", "7"),
     "loop.start_rollout_id", ("leave it out",)),
    ("staleness without versions", (*ENGINE, "--debug.rollout_only", "true"), "debug.rollout_only", ("`sync`",)),
    ("freeing what trains beside generation", (*ENGINE, "--cluster.offload_train", "true"),
     "cluster.offload_train", ("`sync`",)),
    ("a ring of nothing", ("--old_actor.keep", "3"), "old_actor.keep", ("algorithm.old_logprobs",)),
    ("distillation without a teacher", ("--algorithm.use_opd", "true"), "teacher.load", ("same architecture",)),
    ("distillation that weighs nothing", (*OPD, "--algorithm.opd_kl_coef", "0"), "algorithm.opd_kl_coef", ("above 0",)),
    ("a teacher who does not teach", ("--teacher.load", "/teacher"), "teacher.load", ("algorithm.use_opd",)),
    ("learning from nobody", ("--algorithm.advantage_estimator", "on_policy_distillation"),
     "algorithm.advantage_estimator", ("algorithm.use_opd", "teacher.load")),
    ("an iteration of no teacher", (*OPD[:2], "--teacher.ckpt_step", "3"), "teacher.ckpt_step", ("teacher.load",)),
    ("a teacher who is saved over", (*OPD[:2], "--teacher.load", "ckpt", *SAVING), "teacher.load",
     ("teacher.ckpt_step",)),
    ("an empty path of a teacher", (*OPD[:2], "--teacher.load", ""), "teacher.load", ("is empty",)),
    ("a refreshed reference that nothing uses",
     ("--ref.update_interval", "2", "--algorithm.use_kl_loss", "false", "--algorithm.kl_loss_coef", "0"),
     "ref.update_interval", ("KL term",)),
    ("freeing what trains", (*ASYNC, *OLD_ACTOR, "--cluster.offload_train", "true"),
     "cluster.offload_train", ("`sync`",)),
    ("captured addresses of weights that are freed",
     ("--train.megatron.enable_cuda_graph", "true", "--cluster.offload_train", "true"),
     "train.megatron.enable_cuda_graph", ("cluster.offload_train",)),
    ("captured addresses of a teacher's place",
     ("--train.megatron.enable_cuda_graph", "true", *OPD, "--teacher.tier", "device"),
     "train.megatron.enable_cuda_graph", ("teacher.tier copy",)),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "key", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(tmp_path: Path, flags: tuple[str, ...], key: str, words: tuple[str, ...]) -> None:
    found = said(tmp_path, *flags)
    assert key in found
    for word in words:
        assert word in found[key]


@pytest.mark.parametrize(
    "flags",
    [
        (*ASYNC, *OLD_ACTOR, "--loop.update_weights_interval", "3"),
        (*OLD_ACTOR, "--loop.update_weights_interval", "3", "--old_actor.keep", "4"),
        ENGINE,
        (*ENGINE, "--loop.update_weights_interval", "4", "--loop.max_staleness", "3", "--rollout.generate", "a.b:c"),
        (*ENGINE, "--loop.max_staleness", "0"),
        (*FULLY, *OLD_ACTOR),
        (*FULLY, *OLD_ACTOR, "--loop.max_staleness", "3", "--old_actor.keep", "4"),
        (*OPD, "--algorithm.opd_mode", "loss", "--algorithm.advantage_estimator", "on_policy_distillation"),
        (*OPD[:2], "--teacher.load", "ckpt", "--teacher.ckpt_step", "0", *SAVING),
        ("--ref.update_interval", "2", "--cluster.offload_train", "true"),
    ],
    ids=" ".join,
)
def test_accepted(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert said(tmp_path, *flags) == {}


def test_retention_leaves_a_teacher_that_the_run_saves_around(tmp_path: Path) -> None:
    flags = (*OPD[:2], "--teacher.load", "ckpt", "--teacher.ckpt_step", "5", *SAVING)
    assert protected(with_flags(tmp_path, *flags)) == (5,)


def test_as_many_versions_are_kept_as_samples_in_flight_can_be_of(tmp_path: Path) -> None:
    for flags, kept in [
        ((), 0),
        (OLD_ACTOR, 2),
        ((*ASYNC, *OLD_ACTOR), 2),
        ((*ASYNC, *OLD_ACTOR, "--old_actor.keep", "5"), 5),
    ]:
        assert keep_old_actors(with_flags(tmp_path, *flags)) == kept


def test_a_ring_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"old_actor\.keep"):
        with_flags(tmp_path, *OLD_ACTOR, "--old_actor.keep", "1")


def test_slots_that_change_are_those_that_a_checkpoint_must_hold(tmp_path: Path) -> None:
    for flags, slots in [
        ((*OPD,), set()),
        (OLD_ACTOR, {Slot.OLD_ACTOR}),
        (("--ref.update_interval", "2"), {Slot.REF}),
        (("--ref.update_interval", "2", *OLD_ACTOR, *OPD), {Slot.REF, Slot.OLD_ACTOR}),
    ]:
        assert changing(with_flags(tmp_path, *flags)) == slots


# ---- no accepted combination leaves a slot without bytes to come back from --------------------------------------

TIERS = ("copy", "device")
OLD = ("recompute", "engine", "old_actor")
TABLE = list(product(("sync", "async", "fully_async"), (False, True), TIERS, TIERS, OLD))


@pytest.mark.parametrize(("mode", "offload", "ref", "teacher", "old"), TABLE)
def test_what_is_accepted_survives_sleep_wake_and_update(
    tmp_path: Path, mode: str, offload: bool, ref: str, teacher: str, old: str
) -> None:
    config = with_flags(
        tmp_path, *OPD, "--loop.mode", mode, "--cluster.offload_train", str(offload).lower(), "--ref.tier", ref,
        "--teacher.tier", teacher, "--algorithm.old_logprobs", old,
    )  # fmt: skip
    accepted = problems(config) == ()
    assert accepted == (mode == "sync" or (not offload and old != "recompute"))
    if not accepted:
        return
    tiers = {Slot.ACTOR: Tier.COPY, Slot.REF: Tier(config.ref.tier), Slot.TEACHER: Tier(config.teacher.tier)}
    keep = keep_old_actors(config)
    worker = cold_worker(tmp_path, tiers=tiers | ({Slot.OLD_ACTOR: Tier.COPY} if keep else {}), keep_old_actors=keep)
    for value, slot in enumerate((Slot.ACTOR, Slot.REF, Slot.TEACHER), 1):
        worker.load(slot, value)
    machine = worker.machine
    machine.ready()
    for rollout_id in range(3):
        with machine.publishing(agree([machine.attest()], f"p{rollout_id}")):
            pass
        if keep:
            machine.snapshot(Slot.OLD_ACTOR)
        before = bytes_of(worker.model)
        if config.cluster.offload_train:
            machine.sleep()
            machine.wake()
        assert bytes_of(worker.model) == before
        for value, slot in ((2, Slot.REF), (3, Slot.TEACHER)):
            with machine.borrow(slot):
                assert values_of(worker.model) == {value}
        if keep:
            with machine.borrow(Slot.OLD_ACTOR, rollout_id):
                assert bytes_of(worker.model) == before
        assert bytes_of(worker.model) == before
        with machine.step(rollout_id) as scope:
            scope.before_write()
            worker.masters.step(1)
        assert worker.masters.master_mismatches() == []
