"""Which configurations of SGLang engines cannot be right."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator import sglang_fields
from orchestrator.config import Config
from orchestrator.megatron_fields import accepts
from orchestrator.options import Problem, nearest
from workers.rollout.sglang_options import DECIDED, OURS, SglangOptions

SECTION = "rollout.sglang"


def sglang(config: Config) -> Iterator[Problem]:
    section, engine = config.rollout.sglang, config.rollout.engine
    if engine != "sglang":
        if section:
            yield Problem(SECTION, f"is set, but rollout.engine is {engine}; set that to sglang, or leave this out")
        return
    yield from _ours(config)
    yield from _sizes(config)


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
    except sglang_fields.NoSglang as error:
        yield Problem(f"{SECTION}.python", str(error))
        return
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
