"""A team on one server: policies that train adapters over one base, and the base itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.servers.engine import ServerEngine
from services.rollout.engines.servers.host import ServerHost
from tests.rollout.engines.asking import ask
from tests.rollout.engines.models import policy_spec, publish_tensors, reference_logprobs
from tests.rollout.engines.trained_adapters import TrainedAdapter
from troupe.job import LoraSpec, PolicySpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

RANKS = {"planner": 4, "solver": 2, "checker": 4}
BASE = "judge"


def team_specs(ranks: Mapping[str, int] = RANKS, **engine: object) -> dict[str, PolicySpec]:
    """Policies by name: one adapter of each rank, and the frozen base."""
    plain = policy_spec(**engine)
    found = {
        name: plain.model_copy(update={"lora": LoraSpec(rank=rank, alpha=2 * rank)})
        for name, rank in ranks.items()
    }
    return {**found, BASE: plain.model_copy(update={"trainable": False})}


@dataclass
class Team:
    """The engines of a team, with what they should compute."""

    host: ServerHost
    transfer: Transfer
    roles: dict[str, TrainedAdapter]
    engines: dict[str, ServerEngine] = field(init=False)
    # Adapters by policy and version.
    wanted: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engines = {name: self.host.engine(f"job.{name}.0@w", name) for name in self.host.specs}

    def publish(self, name: str, version: int) -> common_pb.WeightsRef:
        """A version of a policy: another adapter each, or the base."""
        if name == BASE:
            base = next(iter(self.roles.values())).base
            return publish_tensors(self.transfer, dict(base.named_parameters()), version, name)
        seed = 100 * version + 7 * list(self.roles).index(name) + 1
        self.wanted[name, version] = seed
        self.roles[name].step(seed)
        return self.roles[name].publish(self.transfer, version, name)

    async def update(self, name: str, version: int) -> float:
        """Bring a policy to a version."""
        return await self.engines[name].update_weights(self.publish(name, version), self.transfer)

    async def begin(self, version: int = 0) -> None:
        """Start all engines and bring them to a version, all at once."""
        await asyncio.gather(*(engine.start() for engine in self.engines.values()))
        refs = [self.publish(name, version) for name in self.engines]
        await asyncio.gather(
            *(self.engines[ref.policy].update_weights(ref, self.transfer) for ref in refs)
        )

    def logprobs(self, name: str, version: int, prompt: list[int], ids: list[int]) -> list[float]:
        """Return the trainer's log-probs of a response under a version."""
        if name == BASE:
            return reference_logprobs(next(iter(self.roles.values())).base, prompt, ids)
        self.roles[name].step(self.wanted[name, version])
        return self.roles[name].logprobs(prompt, ids)

    def off(self, name: str, prompt: list[int], answer: EngineResponse) -> float:
        """Return how far a turn's log-probs are from its versions' log-probs of the same tokens."""
        worst = 0.0
        for span in answer.versions:
            wanted = self.logprobs(name, span.version, prompt, answer.token_ids)
            pairs = zip(answer.logprobs, wanted, strict=True)
            rows = [abs(one - other) for one, other in pairs][span.start : span.end]
            worst = max(worst, *rows)
        return worst

    async def check(self, version: dict[str, int], request: str) -> None:
        """A turn of every policy is drawn by its version."""
        prompt = [5, 6, 7]
        answers = await asyncio.gather(
            *(ask(self.engines[name], f"{request}-{name}", prompt) for name in version)
        )
        for (name, number), answer in zip(version.items(), answers, strict=True):
            assert {span.version for span in answer.versions} == {number}
            assert self.off(name, prompt, answer) < 2e-4

    async def stop(self) -> None:
        """End all engines."""
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))
