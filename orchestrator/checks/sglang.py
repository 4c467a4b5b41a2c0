"""Which configurations of SGLang engines cannot be right."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.checks import sglang_fields
from orchestrator.checks.megatron_fields import accepts
from orchestrator.config import Config
from orchestrator.options.load import nearest
from orchestrator.options.problems import Problem
from workers.rollout.sglang_options import DECIDED, OURS, SglangOptions

SECTION = "rollout.sglang"


def sglang(config: Config) -> Iterator[Problem]:
    section, engine = config.rollout.sglang, config.rollout.engine
    if config.rollout.pause_mode == "retract":
        yield from _retracting(config)
    if engine != "sglang":
        if section:
            yield Problem(SECTION, f"is set, but rollout.engine is {engine}; set that to sglang, or leave this out")
        return
    yield from _ours(config)
    yield from _sizes(config)


def _retracting(config: Config) -> Iterator[Problem]:
    key = "rollout.pause_mode"
    if config.rollout.engine != "sglang":
        yield Problem(
            key, f"retract needs a server that keeps requests; with {config.rollout.engine} engines use abort"
        )
    elif config.loop.mode != "fully_async":
        yield Problem(
            key, f"retract changes nothing: no publish of a loop that is {config.loop.mode} meets a response; use abort"
        )
    if config.algorithm.old_logprobs != "engine":
        yield Problem(
            "algorithm.old_logprobs",
            "rollout.pause_mode retract makes responses that several weights wrote, whose log-probs only the engine "
            "has; set it to engine",
        )


def _ours(config: Config) -> Iterator[Problem]:
    """Every key is one of ours, or an option of the server that is there."""
    section = config.rollout.sglang
    if not isinstance(section.get("env", {}), dict):
        yield Problem(f"{SECTION}.env", f"given {section['env']!r}; expected variables, each with its value")
        return
    options = SglangOptions.of({**section, "tp_size": 1})
    if "/" in options.python and not options.python.startswith("/"):
        yield Problem(
            f"{SECTION}.python", f"{options.python} is relative, and engines run elsewhere; give the whole path"
        )
        return
    try:
        known = sglang_fields.fields(options.python, options.env.get("PYTHONPATH"))
        says_who_wrote = sglang_fields.says_who_wrote(options.python, options.env.get("PYTHONPATH"))
    except sglang_fields.NoSglang as error:
        yield Problem(f"{SECTION}.python", str(error))
        return
    if config.rollout.pause_mode == "retract" and not says_who_wrote:
        yield Problem(
            "rollout.pause_mode",
            f"retract needs a server that says which weights wrote which tokens; the SGLang of {options.python} does "
            "not (0.5.23 does): use abort, or another rollout.sglang.python",
        )
    for key, value in section.items():
        dotted = f"{SECTION}.{key}"
        if key in OURS:
            continue
        if key in DECIDED:
            instead = DECIDED[key]
            yield Problem(
                dotted, f"is set by Slotwise; use {instead}" if instead else "is set by Slotwise; leave it out"
            )
        elif key not in known:
            yield Problem(dotted, f"this SGLang server has no option {key!r}{nearest(key, known)}")
        elif not accepts(known[key], value):
            yield Problem(dotted, f"given {value!r}; accepted: {known[key]}")


def _sizes(config: Config) -> Iterator[Problem]:
    tp_size = config.rollout.sglang.get("tp_size", 1)
    if not isinstance(tp_size, int) or tp_size < 1:
        yield Problem(f"{SECTION}.tp_size", f"given {tp_size!r}; expected a whole number of processes, at least 1")
        return
    if tp_size > 1 and config.weights.transport == "ipc":
        yield Problem(
            "weights.transport", f"ipc reaches engines of one process, not of {tp_size}; use distributed or disk"
        )
    gpus = config.rollout.gpus_per_engine
    if gpus and gpus != tp_size and not (tp_size == 1 and gpus < 1):
        yield Problem(
            "rollout.gpus_per_engine", f"is {gpus:g}, but an engine has {tp_size} processes (rollout.sglang.tp_size)"
        )
    heads = (config.model.config or {}).get("num_attention_heads")
    if isinstance(heads, int) and heads % tp_size:
        yield Problem(f"{SECTION}.tp_size", f"{tp_size} does not divide num_attention_heads {heads} of model.config")
