"""How an SGLang server takes part in a transfer: it joins the leaders' groups, and is told what each bucket holds.

The server's own update endpoints do the work: `/init_weights_update_group`, then for each bucket
`/update_weights_from_distributed`, whose flattened buckets are laid out as ours are. Newer servers want a session
around the updates; one that knows no sessions answers 404.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from workers.device import Device
from workers.rollout.sglang_client import ServerRefused, ServerSilent, SglangClient
from workers.weights.buckets import TensorSpec
from workers.weights.errors import TransportError
from workers.weights.rendezvous import Endpoint, Rendezvous, member
from workers.weights.send_plan import SendPlan

_CLEANUP_S = 5.0
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class SglangTransfer:
    """The receiving side of one server. Its groups live until the leaders open others."""

    def __init__(self, engine_id: str, client: SglangClient, *, device: Device, tp_size: int, timeout_s: float) -> None:
        self._engine_id, self._client = engine_id, client
        self._backend, self._tp_size, self._timeout_s = _BACKENDS[device], tp_size, timeout_s
        self._groups: dict[Endpoint, str] = {}

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, arrives: Callable[[TensorSpec], None]) -> int:
        """Fill the server's model with everything in the plan; returns its bytes. `arrives` is called for each tensor
        that the server has loaded. Raises `TransportError` with the server's reason."""
        try:
            endpoints = [rendezvous.endpoint(leader) for leader in plan.leaders]
            for former in self._groups.keys() - set(endpoints):
                self._leave(former)
            for endpoint in endpoints:
                if endpoint not in self._groups:
                    self._join(endpoint, rendezvous)
            has_sessions = self._begin()
            for stream, endpoint in zip(plan.streams, endpoints, strict=True):
                for bucket in stream.buckets:
                    tensors = [entry.tensor for entry in bucket.entries]
                    self._load(tensors, self._groups[endpoint])
                    for tensor in tensors:
                        arrives(tensor)
            if has_sessions:
                self._post("/end_weight_update", {})
        except BaseException as error:
            self._give_up()
            if isinstance(error, ServerRefused | ServerSilent):
                raise TransportError(f"{self._engine_id}: {error}") from error
            raise
        return plan.nbytes

    def _join(self, endpoint: Endpoint, rendezvous: Rendezvous) -> None:
        self._groups[endpoint] = endpoint.token
        self._post(
            "/init_weights_update_group",
            {
                "master_address": endpoint.host,
                "master_port": endpoint.port,
                "rank_offset": 1 + rendezvous.engines.index(member(self._engine_id, 0, self._tp_size)),
                "world_size": 1 + len(rendezvous.engines),
                "group_name": endpoint.token,
                "backend": self._backend,
            },
        )

    def _leave(self, endpoint: Endpoint) -> None:
        """Of a group that is broken the server may say so; what counts is that the next one is another."""
        name = self._groups.pop(endpoint)
        self._try("/destroy_weights_update_group", {"group_name": name})

    def _begin(self) -> bool:
        """Whether the server has sessions; then one is open."""
        try:
            self._post("/begin_weight_update", {})
        except ServerRefused as refusal:
            if refusal.status != 404:
                raise
            return False
        return True

    def _load(self, tensors: list[TensorSpec], group: str) -> None:
        """Never flushes in passing: on servers without sessions that ends the scheduler while requests wait."""
        self._post(
            "/update_weights_from_distributed",
            {
                "names": [tensor.name for tensor in tensors],
                "dtypes": [tensor.dtype for tensor in tensors],
                "shapes": [list(tensor.shape) for tensor in tensors],
                "group_name": group,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            },
        )

    def _give_up(self) -> None:
        """So that the next update starts anew: no group, no session."""
        for endpoint in list(self._groups):
            self._leave(endpoint)
        self._try("/end_weight_update", {})

    def _try(self, path: str, body: dict[str, object]) -> None:
        """A server that waits for a leader that left does not answer, and is not waited for."""
        with suppress(ServerRefused, ServerSilent):
            self._client.post(path, body, limit_s=min(_CLEANUP_S, self._timeout_s))

    def _post(self, path: str, body: dict[str, object]) -> None:
        self._client.post(path, body, limit_s=self._timeout_s)
