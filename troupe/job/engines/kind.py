"""`EngineKind`: what a job may say about engines of one kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineKind:
    """A kind of engines, as `policies.X.engine` knows it.

    `is_server`: its engines are model servers, launched or attached to, which compute outside the
    rollout process. `without_effect`: fields of `engine` that this kind does not read.
    `spread_arguments`: arguments of a launched server that say over how many devices it spreads,
    and on which; the job's field `tensor_parallel` sets them.
    """

    name: str
    is_server: bool
    without_effect: tuple[str, ...] = ()
    spread_arguments: frozenset[str] = frozenset()
