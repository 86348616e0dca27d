"""The remembered state of a population: in order, and no longer than needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from services.orchestrator.populations.exact import ExactPayoffs
from services.orchestrator.populations.state import (
    CANDIDATE,
    RETIRED,
    FrozenMember,
    PopulationState,
    PopulationStore,
)
from services.orchestrator.state.event_log import EventLog
from services.orchestrator.state.job_store import JobStore, Superseded
from services.orchestrator.state.redis import JobKeys, RedisAccess
from troupe.populations.payoffs import PayoffTable
from troupe.rpc import new_id


def member(version: int, state: str) -> FrozenMember:
    name = f"player@{version}"
    return FrozenMember(name, "player", "main", version, "", version, version, "", state, 0, 0.0)


def population(*members: FrozenMember) -> PopulationState:
    names = {one.member_id: one for one in members}
    return PopulationState({"all": list(names)}, PayoffTable([len(names)], True), names)


def test_a_retired_version_is_needed_while_it_is_served_or_may_be_drawn() -> None:
    state = population(*(member(n, RETIRED) for n in range(4)), member(4, CANDIDATE))
    state.slots = {"all--0": ("player@1", 7)}
    state.mixtures = {"player": {"all": {"player@2": 1.0}}}
    assert [one.version for one in state.unneeded()] == [0, 3]
    assert [one.version for one in state.unneeded(since=1)] == [3]


class SlowFirst(RedisAccess):
    """The first write is on its way for longer than those after it, as after a lost connection."""

    async def run_script(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        if script == "population" and not hasattr(self, "first"):
            self.first = args
            await asyncio.sleep(0.05)
        return await super().run_script(script, keys, args)


async def test_an_earlier_population_state_does_not_overwrite_a_later_one(redis_url: str) -> None:
    redis = SlowFirst(redis_url)
    jobs = JobStore(redis, EventLog(redis))
    store, job_id = PopulationStore(redis, jobs), new_id("job")
    await redis.call("HSET", JobKeys(job_id).record, "epoch", "1")
    state = population(member(0, CANDIDATE))
    state.slots = {"all--0": ("player@0", 0)}
    # A round of matches is counted during a step...
    saving = asyncio.create_task(store.save(job_id, 1, state))
    await asyncio.sleep(0)
    # ... before which another member is loaded.
    await store.save_slots(job_id, 1, state, {"all--0": ("player@0", 1)})
    await saving
    found = await store.load(job_id)
    assert found is not None
    assert state.slots == {"all--0": ("player@0", 1)}
    assert found.slots == state.slots, "a version of a slot would have two contents"
    # A failed write has no effect.
    with pytest.raises(Superseded):
        await store.save_slots(job_id, 0, state, {"all--0": ("player@0", 2)})
    assert state.slots == found.slots
    await redis.call("DEL", JobKeys(job_id).record, JobKeys(job_id).population)
    await redis.close()


async def test_answers_of_members_that_nobody_meets_are_not_kept(redis_url: str) -> None:
    redis = RedisAccess(redis_url)
    store = PopulationStore(redis, JobStore(redis, EventLog(redis)))
    job_id = new_id("job")
    await redis.call("HSET", JobKeys(job_id).record, "epoch", "2")
    state = population(member(0, CANDIDATE), member(1, CANDIDATE))
    learned: list[Any] = []

    async def learn(game: Any, player: tuple[str, str], answer: Any) -> None:
        learned.append(answer)
        exact._plans[player] = answer

    def fresh() -> ExactPayoffs:
        limits = SimpleNamespace(step_seconds=60.0)
        section = SimpleNamespace(by_wins=True)
        spec = SimpleNamespace(population=section, pools=pools, limits=limits)
        job: Any = SimpleNamespace(job_id=job_id, epoch=2, spec=spec)
        slots: Any = None
        found = ExactPayoffs(job, store, slots, state)
        found._game = SimpleNamespace()  # type: ignore[assignment]
        found._add_plan = learn  # type: ignore[method-assign]
        return found

    pools = SimpleNamespace(pools=[SimpleNamespace(name="all")])
    await store.add_answers(job_id, 2, {f"all/player@{n}": f"[[{n}]]" for n in range(2)})
    exact = fresh()
    await exact.settle()
    assert learned == [[[0]], [[1]]]
    state.members["player@0"].state = RETIRED
    with pytest.raises(Superseded):
        await store.forget_answers(job_id, 1, but=[])
    await exact.settle()
    assert list(exact._plans) == [("all", "player@1")]
    assert len(learned) == 2, "what is known is not read again"
    exact = fresh()
    await exact.settle()
    assert learned[2:] == [[[1]]], "the next runner reads what was kept"
    assert list(await store.answers(job_id, ["all/player@0", "all/player@1"])) == ["all/player@1"]
    await redis.call("DEL", JobKeys(job_id).record, JobKeys(job_id).answers)
    await redis.close()
