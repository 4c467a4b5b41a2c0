"""What every transport is: a sender in each trainer rank, a receiver in each engine, one plan between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from state.gang import ActorPermit
from state.store import LiveWeights
from workers.weights.buckets import TensorSpec
from workers.weights.rendezvous import Endpoint, Rendezvous
from workers.weights.send_plan import SendPlan

Sink = Callable[[TensorSpec, Tensor], None]
"""Takes one tensor that arrived. The tensor is a view of a buffer that is used again: copy what is to be kept."""


class Sender(Protocol):
    """Lives in a trainer rank for as long as the rank."""

    def listen(self, plan: SendPlan, engines: tuple[str, ...]) -> Endpoint | None:
        """Where the engines find this rank; None when it leads no stream of the plan."""
        ...

    def send(self, permit: ActorPermit, plan: SendPlan, weights: LiveWeights) -> int:
        """Sends this rank's part of the plan; returns the bytes it broadcast. Every rank of the gang must call it.

        The permit must be for publishing and is asked again before each bucket. Raises `PermitVoid`,
        `TransportError`, and `ValueError` when the plan is not of these weights.
        """
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """Lives in an engine for as long as the engine."""

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, sink: Sink) -> int:
        """Hands every tensor of the plan to `sink`, once; returns the bytes received. Raises `TransportError`.

        An error of the sink does not break the transfer for the others: it is raised at the end.
        """
        ...

    def close(self) -> None: ...
