"""The durable part of populations, in the orchestrator's Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from services.orchestrator.job_store import JobStore
from services.orchestrator.populations import on_demand
from services.orchestrator.redis_access import JobKeys, RedisAccess
from troupe.rpc import InvalidArgument, NotFound
from troupe.v1 import orchestrator_pb2 as orch

# Of a place in a list; Redis takes no larger ones.
_DIGITS: Final = 18

if TYPE_CHECKING:  # most jobs have none: libraries that solve games are imported for those that do
    from services.orchestrator.populations.state import PopulationState


class PopulationStore:
    """Records and matches by job. Who has lost a job to another orchestrator writes nothing."""

    def __init__(self, redis: RedisAccess, jobs: JobStore) -> None:
        self._redis = redis
        self._jobs = jobs
        # Matches and steps write beside each other; what was the case earlier must not come later.
        self._writing = WeakValueDictionary[str, asyncio.Lock]()

    async def load(self, job_id: str) -> PopulationState | None:
        """The population as it was last saved; None before that."""
        found = await self._redis.call("HGETALL", JobKeys(job_id).population)
        if not found:
            return None
        fields = {name.decode(): value.decode() for name, value in found.items()}
        state: PopulationState = (await on_demand("state")).PopulationState.from_fields(fields)
        return state

    async def save(self, job_id: str, epoch: int, state: PopulationState) -> None:
        """Replace all of it. Raises `Superseded`."""
        async with self._writing.setdefault(job_id, asyncio.Lock()):
            await self._write(job_id, epoch, state.to_fields())

    async def save_slots(
        self,
        job_id: str,
        epoch: int,
        state: PopulationState,
        loaded: Mapping[str, tuple[str, int]],
    ) -> None:
        """Replace what is said of slots; that some have `loaded` something else, `state` says only
        once it is durable. Raises `Superseded`."""
        async with self._writing.setdefault(job_id, asyncio.Lock()):
            slots = {**state.slots, **loaded}
            await self._write(job_id, epoch, replace(state, slots=slots).slot_fields())
            state.slots = slots

    async def _write(self, job_id: str, epoch: int, fields: list[str]) -> None:
        await self._fenced("population", [JobKeys(job_id).population], job_id, epoch, fields)

    async def answers(self, job_id: str, names: Collection[str]) -> dict[str, str]:
        """What `add_answers` kept of the named."""
        if not names:
            return {}
        found = await self._redis.call("HMGET", JobKeys(job_id).answers, *names)
        kept = zip(names, found, strict=True)
        return {name: one.decode() for name, one in kept if one is not None}

    async def forget_answers(self, job_id: str, epoch: int, *, but: Collection[str]) -> None:
        """Keep no answers but those of the named. Raises `Superseded`."""
        key = JobKeys(job_id).answers
        names = {name.decode() for name in await self._redis.call("HKEYS", key)}
        if over := names.difference(but):
            await self._jobs.check_epoch(job_id, epoch)
            await self._redis.call("HDEL", key, *over)

    async def add_answers(self, job_id: str, epoch: int, answers: Mapping[str, str]) -> None:
        """Keep what members answer in a game, as JSON by `{pool}/{member}`. Raises `Superseded`."""
        args = [part for item in answers.items() for part in item]
        await self._fenced("population", [JobKeys(job_id).answers], job_id, epoch, args)

    async def add_matches(self, job_id: str, epoch: int, matches: Mapping[str, orch.Match]) -> None:
        """Keep how matches ended, by trajectory id. Raises `Superseded`."""
        if not matches:
            return
        args = [part for name, one in matches.items() for part in (name, one.SerializeToString())]
        await self._fenced("matches", JobKeys(job_id).matches, job_id, epoch, args)

    async def matches(self, job_id: str, names: Collection[str]) -> dict[str, orch.Match]:
        """Those of the named matches that have ended."""
        if not names:
            return {}
        found = await self._redis.call("HMGET", JobKeys(job_id).matches[1], *names)
        return {
            name: orch.Match.FromString(one)
            for name, one in zip(names, found, strict=True)
            if one is not None
        }

    async def ended(self, job_id: str) -> int:
        """Matches that have ended, counted or not."""
        return int(await self._redis.call("LLEN", JobKeys(job_id).matches[0]))

    async def page(
        self, job_id: str, size: int, token: str, member_id: str = ""
    ) -> tuple[list[orch.Match], str]:
        """Up to `size` matches, newest first, after the match `token`; the next token.

        Raises InvalidArgument for a token of another list.
        """
        order, kept = JobKeys(job_id).matches
        # The list only grows, so that a place in it stays what it is.
        before = int(await self._redis.call("LLEN", order))
        if token:
            before = await self._place(order, token)
        page: list[orch.Match] = []
        place = before
        while before > 0 and len(page) < size:
            first = max(0, before - size)
            names = await self._redis.call("LRANGE", order, first, before - 1)
            found = await self._redis.call("HMGET", kept, *names)
            for at in range(before - 1, first - 1, -1):
                match = orch.Match.FromString(found[at - first])
                if member_id and member_id not in match.members.values():
                    continue
                page.append(match)
                place = at
                if len(page) == size:
                    break
            before = first
        more = bool(page) and len(page) == size and place > 0
        return page, f"{place}:{page[-1].trajectory_id}" if more else ""

    async def _place(self, order: str, token: str) -> int:
        """Where the match is that `token` names."""
        place, _, name = token.partition(":")
        if place.isdecimal() and len(place) < _DIGITS:
            found = await self._redis.call("LINDEX", order, int(place))
            if found is not None and found.decode() == name:
                return int(place)
        raise InvalidArgument(
            "is not a page of this list",
            field="page_token",
            value=token,
            remedy="Start from the first page.",
        )

    async def _fenced(
        self,
        script: str,
        where: Iterable[str],
        job_id: str,
        epoch: int,
        args: Iterable[str | bytes],
    ) -> None:
        """Run a script that writes only for who has the job. Raises `Superseded`."""
        keys = [JobKeys(job_id).record, *where]
        if await self._redis.run(script, keys, [str(epoch), *args]) != b"written":
            await self._jobs.check_epoch(job_id, epoch)


def no_population(job_id: str) -> NotFound:
    """Of a job that has none."""
    return NotFound(
        f"job {job_id} has no population",
        kind="no_population",
        field="job_id",
        value=job_id,
        remedy="Give its specification a `population:` section.",
    )
