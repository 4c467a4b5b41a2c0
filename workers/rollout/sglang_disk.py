"""How an SGLang server takes its weights from files: it is told the folder of each leader."""

from __future__ import annotations

from collections.abc import Callable

from workers.rollout.sglang_client import ServerRefused, ServerSilent, SglangClient
from workers.weights.buckets import TensorSpec
from workers.weights.disk import announced
from workers.weights.errors import TransportError
from workers.weights.rendezvous import Rendezvous, members
from workers.weights.send_plan import SendPlan


class SglangFromDisk:
    """The receiving side of one server. A server needs no session for this update, old or new."""

    def __init__(self, engine_id: str, client: SglangClient, *, tp_size: int, timeout_s: float) -> None:
        self._engine_id, self._client = engine_id, client
        self._tp_size, self._timeout_s = tp_size, timeout_s

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, arrives: Callable[[TensorSpec], None]) -> int:
        """See `SglangTransfer.receive`."""
        readers = members((self._engine_id,), self._tp_size)
        for stream in plan.streams:
            endpoint = rendezvous.endpoint(stream.leader)
            with announced(endpoint, readers, rendezvous, timeout_s=self._timeout_s) as folder:
                body = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": False}
                try:
                    self._client.post("/update_weights_from_disk", body, limit_s=self._timeout_s)
                except (ServerRefused, ServerSilent) as error:
                    raise TransportError(f"{self._engine_id}: {error}") from error
            for bucket in stream.buckets:
                for entry in bucket.entries:
                    arrives(entry.tensor)
        return plan.nbytes
