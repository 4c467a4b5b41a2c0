"""Is there a Ray cluster at an address? Asked before Ray tries by itself: for minutes, and deaf to signals."""

from __future__ import annotations

import socket
import subprocess
import sys

from orchestrator.options.problems import ConfigError, Problem

CONNECT_WITHIN_S, ANSWER_WITHIN_S = 5.0, 20.0
_HEALTH = ("-m", "ray.scripts.scripts", "health-check", "--address")


def require_cluster(address: str, option: str, instead: str) -> None:
    """`ConfigError` about `option` unless a cluster answers at `address`; `instead` is what would work. Addresses
    without a port are Ray's own affair."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_WITHIN_S).close()
    except OSError as error:
        raise _nobody(option, f"nobody answers at {address}: {error.strerror or error}", instead) from error
    if address.startswith("ray://"):
        return
    try:
        asked = subprocess.run(
            [sys.executable, *_HEALTH, address], capture_output=True, text=True, timeout=ANSWER_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        what = f"somebody listens at {address}, but no Ray cluster answers within {ANSWER_WITHIN_S:g} s"
        raise _nobody(option, what, instead) from error
    if asked.returncode:
        said = (asked.stderr.strip() or asked.stdout.strip() or "it says no").splitlines()[-1]
        raise _nobody(option, f"no Ray cluster of this version is healthy at {address}: {said}", instead)


def _nobody(option: str, what: str, instead: str) -> ConfigError:
    return ConfigError([Problem(option, f"{what}; {instead}")])
