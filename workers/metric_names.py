"""The metrics that a run exports, and what a journal entry says about them. Pure.

Ray exports each under the prefix `ray_`, with labels of its own (`NodeAddress`, `WorkerId`, ...) beside these. Labels
take few values: never a step, a digest or an id that is new each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from state.entries import role_of
from state.slots import Slot

Labels = Mapping[str, str]
_RANK = ("run", "role", "rank")


@dataclass(frozen=True, slots=True)
class Metric:
    """`one_of`: labels within which exactly one combination of the others holds, with value 1; the rest are 0."""

    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    about: str
    one_of: tuple[str, ...] | None = None


METRICS: Mapping[str, Metric] = {
    "slotwise_slot_state": Metric("gauge", (*_RANK, "slot", "state"), "1 for the slot and state of a rank", _RANK),
    "slotwise_slot_version": Metric("gauge", _RANK, "version of the weights that a rank trains"),
    "slotwise_incarnation": Metric("gauge", _RANK, "which start of the gang a rank belongs to"),
    "slotwise_transitions_total": Metric("counter", (*_RANK, "trigger"), "transitions of a rank's slot machine"),
    "slotwise_refusals_total": Metric("counter", _RANK, "what a rank's slot machine refused to do"),
    "slotwise_engine_state": Metric("gauge", ("run", "engine", "state"), "1 for an engine's state", ("run", "engine")),
    "slotwise_engine_version": Metric("gauge", ("run", "engine"), "version that an engine serves"),
    "slotwise_published_version": Metric("gauge", ("run",), "version of the newest committed publish"),
    "slotwise_publishes_total": Metric("counter", ("run", "outcome"), "publishes by how they ended"),
    "slotwise_saves_total": Metric("counter", ("run",), "checkpoints that were committed"),
    "slotwise_last_step_timestamp_seconds": Metric("gauge", ("run",), "wall time at which a rollout was trained last"),
    "slotwise_reward_mean": Metric("gauge", ("run",), "mean reward of the newest rollout"),
    "slotwise_kl_loss": Metric("gauge", ("run",), "KL loss of the newest rollout"),
    "slotwise_grad_norm": Metric("gauge", ("run",), "gradient norm of the newest rollout"),
    "slotwise_step_seconds": Metric("gauge", ("run",), "wall time of the newest rollout step"),
}
STEP_METRICS: Mapping[str, str] = {
    "reward/mean": "slotwise_reward_mean",
    "train/kl_loss": "slotwise_kl_loss",
    "train/grad_norm": "slotwise_grad_norm",
    "perf/step_s": "slotwise_step_seconds",
}
"""Of what a rollout reports, and what it is called here."""


@dataclass(frozen=True, slots=True)
class Update:
    """A gauge is set to `value`, or forgotten when it is None; a counter grows by `value`."""

    name: str
    labels: Labels
    value: float | None


def updates(run: str, entry: Mapping[str, Any]) -> tuple[Update, ...]:
    """What one journal entry changes. Entries of other kinds change nothing."""
    match entry.get("kind"):
        case "transition":
            return _of_rank(run, entry)
        case "refusal":
            return (Update("slotwise_refusals_total", _rank(run, entry), 1),)
        case "engine":
            return _of_engine(run, entry)
        case "publish":
            counted = Update("slotwise_publishes_total", {"run": run, "outcome": str(entry["outcome"])}, 1)
            if entry["outcome"] != "committed":
                return (counted,)
            return counted, Update("slotwise_published_version", {"run": run}, entry["version"])
        case "save" if role_of(entry) == Slot.ACTOR:
            return (Update("slotwise_saves_total", {"run": run}, 1),)
        case "trained":
            return (Update("slotwise_last_step_timestamp_seconds", {"run": run}, entry["at"]),)
    return ()


def of_step(run: str, metrics: Mapping[str, Any]) -> tuple[Update, ...]:
    """What the metrics of one rollout change; one that was not measured is forgotten."""
    found = {name: metrics.get(reported) for reported, name in STEP_METRICS.items()}
    return tuple(
        Update(name, {"run": run}, float(value) if isinstance(value, int | float) else None)
        for name, value in found.items()
    )


def _rank(run: str, entry: Mapping[str, Any]) -> dict[str, str]:
    return {"run": run, "role": str(entry["role"]), "rank": str(entry["rank"])}


def _of_rank(run: str, entry: Mapping[str, Any]) -> tuple[Update, ...]:
    rank = _rank(run, entry)
    state = {"slot": str(entry["slot"]), "state": str(entry["after"]).split(".")[0]}
    changed = [
        Update("slotwise_slot_state", rank | state, 1),
        Update("slotwise_incarnation", rank, entry["incarnation"]),
        Update("slotwise_transitions_total", rank | {"trigger": str(entry["trigger"])}, 1),
    ]
    if entry["slot"] == entry["role"] and entry.get("version") is not None:
        changed.append(Update("slotwise_slot_version", rank, entry["version"]))
    return tuple(changed)


def _of_engine(run: str, entry: Mapping[str, Any]) -> tuple[Update, ...]:
    engine = {"run": run, "engine": str(entry["engine"]).rsplit("/", 1)[-1]}
    return (
        Update("slotwise_engine_state", engine | {"state": str(entry["state"])}, 1),
        Update("slotwise_engine_version", engine, entry["version"]),
    )
