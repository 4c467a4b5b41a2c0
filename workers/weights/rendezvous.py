"""Where trainers and engines meet for a transfer. Plain values that the driver passes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A leader's store. `token` is new for each group, so that nobody takes a former group for this one."""

    leader: int
    host: str
    port: int
    token: str

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Who takes part: the leader of each endpoint is rank 0 of its group, engine i of `engines` is rank 1 + i."""

    engines: tuple[str, ...]
    endpoints: tuple[Endpoint, ...]

    def endpoint(self, leader: int) -> Endpoint:
        for endpoint in self.endpoints:
            if endpoint.leader == leader:
                return endpoint
        raise KeyError(f"no endpoint of leader {leader}; there are those of {[e.leader for e in self.endpoints]}")
