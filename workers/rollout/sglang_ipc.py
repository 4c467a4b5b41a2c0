"""How an SGLang server takes its weights from shared memory: our plug-in in its process opens the leader's buffer."""

from __future__ import annotations

from collections.abc import Callable

from workers.rollout.sglang_client import ServerRefused, ServerSilent, SglangClient
from workers.rollout.sglang_plugin import load_action
from workers.weights.buckets import TensorSpec
from workers.weights.errors import TransportError
from workers.weights.ipc import shared_buckets
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan


class SglangFromMemory:
    """The receiving side of one server of a single process, on the leaders' own machine."""

    def __init__(self, engine_id: str, client: SglangClient, *, timeout_s: float) -> None:
        self._engine_id, self._client, self._timeout_s = engine_id, client, timeout_s

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, arrives: Callable[[TensorSpec], None]) -> int:
        """See `SglangTransfer.receive`. What the server rejects does not hold up the leaders: it is raised at the
        end."""
        if self._engine_id not in rendezvous.engines:
            raise TransportError(f"{self._engine_id} is not among the engines to send to: {rendezvous.engines}")
        problem: Exception | None = None
        for stream in plan.streams:
            endpoint = rendezvous.endpoint(stream.leader)
            for buffer, bucket in shared_buckets(stream, endpoint, self._engine_id, timeout_s=self._timeout_s):
                if problem is not None:
                    continue
                tensors = [(e.tensor.name, e.tensor.dtype, e.offset, e.tensor.shape) for e in bucket.entries]
                try:
                    body = {"action": load_action(buffer, tensors)}
                    self._client.post("/weights_checker", body, limit_s=self._timeout_s)
                except (ServerRefused, ServerSilent) as error:
                    problem = error
                    continue
                for entry in bucket.entries:
                    arrives(entry.tensor)
        if problem is not None:
            raise TransportError(f"{self._engine_id}: {problem}") from problem
        return plan.nbytes
