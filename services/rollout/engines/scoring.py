"""Scoring: the log-probs of given tokens under what an engine serves. Nothing is drawn."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from services.rollout.engines.errors import BadTurn, NonFiniteLogits, ScoreDeadline, ScoreRefused
from services.rollout.engines.state import EngineState


@dataclass(frozen=True, slots=True)
class Asked:
    """A continuation `ids` of a prompt; neither is empty."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs of continuations, in the order in which they were asked, all by one version."""

    logprobs: list[list[float]]
    """One per id of each, under softmax(logits / temperature), given all ids before it."""
    version: int
    checksum: str


class Scoring(ABC):
    """`base.Engine.score` over one verb."""

    kind: ClassVar[str]
    engine_id: str
    policy: str
    max_context: int
    vocabulary: int
    _life: EngineState
    _settled: asyncio.Event

    async def score(
        self, asked: Sequence[Asked], temperature: float, *, deadline_seconds: float
    ) -> Scored:
        """Log-probs of continuations; see `base.Engine.score`."""
        if not asked:
            raise BadTurn("nothing is asked for", field="prompts", remedy="Give a continuation.")
        for one in asked:
            self._check(one)
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    await self._serving()
                    found = await self._score(asked, temperature)
                    # Weights that changed under way, or are not verified yet: once more.
                    await self._settled.wait()
                    if found is not None and found[1] == self._life.version:
                        break
        except TimeoutError as error:
            raise ScoreDeadline(self.engine_id, len(asked), deadline_seconds) from error
        logprobs, version = found
        if not all(math.isfinite(value) for row in logprobs for value in row):
            raise NonFiniteLogits(self.engine_id, version)
        return Scored(logprobs, version, self._life.checksum)

    async def _score(
        self, asked: Sequence[Asked], temperature: float
    ) -> tuple[list[list[float]], int] | None:
        """Log-probs and the version that computed them all; None when it changed under way."""
        raise ScoreRefused(
            f"a '{self.kind}' engine scores nothing",
            field=f"policies.{self.policy}.engine.kind",
            value=self.kind,
            remedy="Ask a policy that an embedded engine or SGLang serves.",
        )

    @abstractmethod
    async def _serving(self) -> None:
        """Wait out an update. Raises `EngineDied` or `EngineStale` when nothing is served."""

    def _check(self, one: Asked) -> None:
        if not one.prompt_ids or not one.ids:
            raise BadTurn(
                "a prompt or a continuation without tokens has no log-probs",
                field="prompts",
                remedy="Give at least one token of each.",
            )
        if self.vocabulary:
            low, high = min(*one.prompt_ids, *one.ids), max(*one.prompt_ids, *one.ids)
            if low < 0 or high >= self.vocabulary:
                raise BadTurn(
                    f"the vocabulary of policy '{self.policy}' has {self.vocabulary} tokens",
                    field="prompts",
                    value=low if low < 0 else high,
                    remedy="Use the policy's own tokenizer.",
                )
        length = len(one.prompt_ids) + len(one.ids)
        if self.max_context and length > self.max_context:
            raise BadTurn(
                f"prompt and continuation have {length} tokens, a context has {self.max_context}",
                field=f"policies.{self.policy}.engine.max_context",
                value=self.max_context,
                remedy="Shorten them, or raise max_context up to what the model's positions allow.",
            )
