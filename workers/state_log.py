"""Puts the states that a process goes through into its log, where Ray's dashboard shows it beside the actor."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("slotwise")


def to_stderr() -> None:
    """For a process of its own, whose log is what it prints. Ray shows extra fields nowhere: all is in the message."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def log_state(entry: Mapping[str, Any]) -> None:
    """A line for each entry of a journal that changes a state or refuses to (`Journal.listen`)."""
    if (told := line(entry)) is not None:
        level = logging.WARNING if entry["kind"] == "refusal" or entry.get("trigger") == "fail" else logging.INFO
        logger.log(level, told)


def line(entry: Mapping[str, Any]) -> str | None:
    """`actor/0 #12 step: resident.actor -> stepping, actor@3 4a349333f921a3d7`."""
    match entry.get("kind"):
        case "transition":
            about = f"{entry['slot']}@{entry['version']}" if entry.get("version") is not None else str(entry["slot"])
            words = [f"{entry['before']} -> {entry['after']}, {about}", entry.get("digest"), entry.get("publish_id")]
            told = f"{entry['source']} #{entry['transition']} {entry['trigger']}: {' '.join(filter(None, words))}"
            return f"{told} ({entry['detail']})" if entry.get("detail") else told
        case "refusal":
            return f"{entry['source']} refused in {entry['state']}: {entry['what']}"
        case "engine":
            weights = "" if entry["version"] is None else f", weights {entry['incarnation']}.{entry['version']}"
            told = f"{entry['engine']} #{entry['transition']} {entry['trigger']}: {entry['before']} -> {entry['state']}"
            return f"{told}{weights} ({entry['reason']})" if entry["reason"] else told + weights
    return None
