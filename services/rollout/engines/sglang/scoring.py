"""Scoring by an SGLang server: the log-probs that it reports of a prompt's own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from services.rollout.engines.errors import BadTurn, EngineDied, ReplyBroken, ScoreRefused
from services.rollout.engines.front import EngineFront
from services.rollout.engines.scoring import Asked
from services.rollout.engines.sglang.client import BrokenReply, Refused, ServerGone
from services.rollout.engines.sglang.replies import prompt_logprobs
from services.rollout.engines.sglang.server import Server
from services.rollout.engines.sglang.versions import AdapterVersions, Served
from troupe.rpc.ids import new_id

# Continuations that the server is given at once.
_AT_ONCE: Final = 64
_BAD_REQUEST: Final = 400
# Nothing is to be drawn.
_SAMPLING: Final[dict[str, Any]] = {"max_new_tokens": 0, "temperature": 1.0}


class ScoresPrompts(EngineFront):
    """`_score` of an engine that is a server. Log-probs are at temperature 1, whatever it samples
    with: servers divide by the temperature only what they draw."""

    _server: Server
    _versions: AdapterVersions
    _open: asyncio.Event
    _loaded: int | None
    _updates: int

    async def _lost(self, error: Exception) -> EngineDied | None:
        """The connection broke: is the server gone, or only this answer?"""
        raise NotImplementedError

    async def _score(
        self, asked: Sequence[Asked], temperature: float
    ) -> tuple[list[list[float]], int] | None:
        if temperature != 1.0:
            raise ScoreRefused(
                "SGLang reports the log-probs of given tokens at temperature 1",
                field="temperature",
                value=temperature,
                remedy="Ask for temperature 1, or serve the policy with `kind: embedded`.",
            )
        await self._open.wait()
        # Nothing is awaited in between: it is this version that answers, or an update is seen.
        served, updates, loaded = self._versions.begin(None), self._updates, self._loaded
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(item: Asked) -> list[float]:
            async with places:
                return await self._of(item, served)

        try:
            async with asyncio.TaskGroup() as tasks:
                rows = [tasks.create_task(one(item)) for item in asked]
        except* (ServerGone, BrokenReply, Refused) as errors:
            raise await self._broken(errors.exceptions[0]) from errors
        finally:
            self._versions.ended(served)
        version = loaded if served.version is None else served.version
        if version is None or updates != self._updates:
            return None
        return [row.result() for row in rows], version

    async def _of(self, asked: Asked, served: Served) -> list[float]:
        meta = await self._server.client.generate(
            new_id("score"),
            [*asked.prompt_ids, *asked.ids],
            _SAMPLING,
            logprobs_from=len(asked.prompt_ids) - 1,
            adapter=served.name,
        )
        found = prompt_logprobs(meta)
        if len(found) != len(asked.ids):
            raise BrokenReply(f"{len(found)} log-probs for {len(asked.ids)} tokens")
        return found

    async def _broken(self, error: BaseException) -> Exception:
        if isinstance(error, ServerGone) and (died := await self._lost(error)) is not None:
            return died
        if isinstance(error, Refused) and error.status == _BAD_REQUEST:  # too long, for example
            return BadTurn(
                f"the server refuses to score it: {error.message}",
                field="prompts",
                remedy="Shorten prompt and continuation, or what the message says.",
            )
        return ReplyBroken(self.engine_id, "score", str(error))
