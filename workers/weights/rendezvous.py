"""Where trainers and engines meet for a transfer. Plain values that the driver passes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.ports import host_port


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A leader's store. `token` is new for each group, so that nobody takes a former group for this one."""

    leader: int
    host: str
    port: int
    token: str

    @property
    def address(self) -> str:
        return host_port(self.host, self.port)


def member(engine_id: str, tp_rank: int, tp_size: int) -> str:
    """How one process of an engine is called in a group. An engine of a single process is called as itself."""
    return engine_id if tp_size == 1 else f"{engine_id}/tp{tp_rank}"


def members(engine_ids: Sequence[str], tp_size: int) -> tuple[str, ...]:
    """Every process of these engines, each `tp_size` in number."""
    return tuple(member(engine_id, rank, tp_size) for engine_id in engine_ids for rank in range(tp_size))


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Who takes part: the leader of each endpoint is rank 0 of its group, member i of `engines` is rank 1 + i."""

    engines: tuple[str, ...]
    endpoints: tuple[Endpoint, ...]

    def endpoint(self, leader: int) -> Endpoint:
        for endpoint in self.endpoints:
            if endpoint.leader == leader:
                return endpoint
        raise KeyError(f"no endpoint of leader {leader}; there are those of {[e.leader for e in self.endpoints]}")
