"""How a transfer fails. Without torch: whoever only decides what to do about it needs none."""

from __future__ import annotations

from state.errors import SlotwiseError


class TransportError(SlotwiseError):
    """A transfer did not come to its end: who waited for what, how long, and what was seen instead."""
