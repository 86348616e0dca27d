"""The engine of a policy that is a network: verified weights, to be played with in this process.

Weights come as they come to every engine: by transfer, verified while the version before serves.
Whoever plays takes the tensors of one version for whole episodes, so nothing runs here that an
update could disturb.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from services.rollout.engines.base import Generation, Memory, SamplingParams
from services.rollout.engines.errors import BadTurn, EngineStale
from services.rollout.engines.front import EngineFront, Tensors
from services.rollout.engines.weights import check_fit, verify
from troupe.job import NetworkSpec
from troupe.v1 import common_pb2 as pb

if TYPE_CHECKING:
    import torch

    from services.rollout.engines.adapted import Adapted
    from services.rollout.engines.turns import Turn
    from troupe.networks.vector import Spaces


@dataclass(frozen=True)
class Served:
    """One verified version of a policy. Nobody writes into the tensors."""

    version: int
    checksum: str
    tensors: dict[str, torch.Tensor]


class NetworkEngine(EngineFront):
    """Holds the verified weights of one policy."""

    kind: ClassVar[str] = "network"

    def __init__(
        self, engine_id: str, policy: str, spec: NetworkSpec, spaces: Spaces, agents: int
    ) -> None:
        """`agents`: how many the policy plays."""
        super().__init__(engine_id, policy)
        self._spec, self._spaces, self._agents = spec, spaces, agents
        self._model: torch.nn.Module | None = None
        self._held: dict[str, torch.Tensor] = {}

    @property
    def served(self) -> Served:
        """What to play with. Raises `EngineStale` where nothing verified is here."""
        if self.version is None:
            raise EngineStale(self.engine_id, self._life.name)
        return Served(self.version, self.checksum, self._held)

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        deadline_seconds: float,
        priority: int = 0,
        adapter: str | None = None,
    ) -> Generation:
        """A network knows no tokens: always raises `BadTurn`."""
        raise BadTurn(
            "the policy is a network: it moves in its environment and generates no text",
            field="policy",
            value=self.policy,
            remedy="Ask a policy that is a language model.",
        )

    async def abort(self, request_id: str) -> None:
        """There are no turns."""

    async def check(self) -> pb.EngineState.ValueType:
        """The state: there is nothing that could hang."""
        return self.state

    async def stop(self) -> None:
        """Let go of the weights; the state is STOPPED. Repeatable."""
        self._life.stopped()
        self._held = {}

    async def _begin(self) -> None:
        # A model to compare weights with; what is played with is the actors'.
        self._model = await asyncio.to_thread(self._build)

    def _build(self) -> torch.nn.Module:
        from troupe.networks.acting import ActingNetwork

        return ActingNetwork(self._spec, self._spaces, self._agents)

    async def _serve(self, turn: Turn) -> Generation:
        raise AssertionError("`generate` takes no turns")

    def _drop(self, turn: Turn) -> None:
        raise AssertionError("`generate` takes no turns")

    def _fail_turns(self, error: Exception) -> None:
        """There are none."""

    async def _release(self, tags: frozenset[Memory]) -> None:
        self._held = {}

    async def _resume(self, tags: frozenset[Memory]) -> None:
        """An update brings the weights."""

    async def _fits(self, tensors: Tensors, ref: pb.WeightsRef) -> None:
        assert self._model is not None, "`start` has built it"
        check_fit(tensors, self._model, ref.key)

    async def _prepared(
        self, tensors: Tensors, ref: pb.WeightsRef, adapted: Adapted | None
    ) -> tuple[Tensors, pb.WeightsRef]:
        return await asyncio.to_thread(self._verified, tensors, ref), ref

    def _verified(self, tensors: Tensors, ref: pb.WeightsRef) -> Tensors:
        # Copies: what is published goes when two versions have followed.
        held = {name: tensor.clone() for name, tensor in tensors.items()}
        assert self._model is not None
        verify(held, self._model, ref)
        return held

    async def _apply(self, tensors: Tensors, ref: pb.WeightsRef) -> float:
        self._held = dict(tensors)
        return 0.0
