"""What the slots serve: members are loaded into frozen policies as any new version is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from services.orchestrator.context import JobContext
from services.orchestrator.engines import Engines
from services.orchestrator.faults import Patience, together
from services.orchestrator.populations.decisions import sections
from services.orchestrator.populations.pool import MemberWeights, slot_ref
from services.orchestrator.populations.state import (
    Casting,
    Mixture,
    PopulationState,
    live_policy,
)
from services.orchestrator.populations.store import PopulationStore
from troupe.populations.slots import share_slots, training_seat
from troupe.v1 import common_pb2 as pb


class Slots:
    """Loads members into slots, and says who plays whom in training.

    That a slot is to serve a member as its version n is durable before any engine hears of it: one
    version of a slot is one content.
    """

    def __init__(
        self,
        job: JobContext,
        weights: MemberWeights,
        store: PopulationStore,
        state: PopulationState,
    ) -> None:
        self._job, self._weights, self._store = job, weights, store
        self._state = state
        self._population, self._pools = sections(job.spec)
        # Held by who publishes members for slots, or drops those that are in none.
        self._moving = asyncio.Lock()
        self.engines: Engines

    @property
    def apart(self) -> bool:
        """Whether matches have slots of their own."""
        return self._population.evaluation_slots > 0

    async def refs(self, patience: Patience) -> dict[str, pb.WeightsRef]:
        """What each slot serves, published."""
        held = dict.fromkeys(member for member, _ in self._state.slots.values())
        published = {
            name: await self._weights.publish(self._state.members[name], patience) for name in held
        }
        return {
            slot: slot_ref(slot, version, published[member])
            for slot, (member, version) in self._state.slots.items()
        }

    async def republish(self, slot: str) -> None:
        """The weights of a slot are not where they were."""
        seconds = self._job.shared.settings.bind_timeout_seconds
        member, _ = self._state.slots[slot]
        patience = Patience(f"publishing {member} again", seconds, "bind_timeout_seconds")
        await self._weights.publish(self._state.members[member], patience)

    async def load_matches(self, wanted: Mapping[str, list[int]], patience: Patience) -> None:
        """Have members, by pool, in the slots of matches."""
        members = {
            pool.name: [self._state.pools[pool.name][at] for at in wanted[pool.name]]
            for pool in self._pools.pools
        }
        slots = {pool.name: pool.match_slots for pool in self._pools.pools}
        await self._bring(self._place(members, slots), patience)

    def places(self) -> dict[tuple[str, str], str]:
        """The slot of matches where a member of a pool is."""
        return {
            (pool.name, self._state.slots[slot][0]): slot
            for pool in self._pools.pools
            for slot in reversed(pool.match_slots)
        }

    def match_floors(self) -> dict[str, int] | None:
        """Matches beside training do not wait for learners to have their newest versions."""
        if not self.apart:
            return None
        training = [slot for pool in self._pools.pools for slot in pool.slots]
        return dict.fromkeys([*self._job.spec.trained_policies, *training], 0)

    @property
    def training_floors(self) -> dict[str, int]:
        """Training does not wait for the slots of matches."""
        return {slot: 0 for pool in self._pools.pools for slot in pool.evaluation_slots}

    async def cast(self, step: int, patience: Patience) -> None:
        """Draw who the opponents of the steps from `step` on are, and load them."""
        state = self._state
        if self._pools.together:
            return
        if self._redraws(step):
            seed, wanted = self._job.spec.seed, {}
            shares: dict[str, dict[str, Mixture]] = {name: {} for name in self._pools.learners}
            for number, pool in enumerate(self._pools.pools):
                mixtures = [state.mixtures[name][pool.name] for name in shares]
                frozen = [_frozen(one) for one in mixtures]
                some = [one for one in frozen if one]
                loaded, parts = share_slots(some, len(pool.slots), (seed, step, number))
                wanted[pool.name] = loaded
                drawn = iter(parts)
                for name, mixture, own in zip(shares, mixtures, frozen, strict=True):
                    rest = {one: p for one, p in mixture.items() if live_policy(one)}
                    left = 1.0 - sum(rest.values())
                    part = next(drawn) if own else {}
                    shares[name][pool.name] = rest | {m: left * p for m, p in part.items()}
            taken = {pool.name: pool.slots for pool in self._pools.pools}
            placed = self._place(wanted, taken)
            by_pool = {
                (pool.name, member): slot
                for pool in self._pools.pools
                for slot, member in placed.items()
                if slot in pool.slots
            }
            state.casting = Casting(
                step,
                placed,
                {
                    learner: {
                        pool: {
                            one if live_policy(one) else by_pool[pool, one]: share
                            for one, share in mixture.items()
                        }
                        for pool, mixture in pools.items()
                    }
                    for learner, pools in shares.items()
                },
            )
        assert state.casting is not None, "drawn above, or before"
        await self._bring(state.casting.members, patience)

    def _redraws(self, step: int) -> bool:
        casting, every = self._state.casting, self._population.redraw_steps
        return casting is None or bool(every and step >= casting.step + every)

    def cast_of(self, index: int) -> tuple[dict[str, str], list[str]]:
        """Who plays whom in the training query at `index`, and who learns from it.

        A function of the job's seed and the draw: whoever takes the step up says the same.
        """
        casting = self._state.casting
        if self._pools.together or casting is None:
            return {}, []
        places = self._pools.places
        learner, seats = places[index % len(places)]
        own = seats[training_seat(index // len(places), len(seats))]
        rng = np.random.default_rng((self._job.spec.seed, index))
        cast = {own: learner}
        for agent in self._pools.agents:
            if agent != own:
                mixture = casting.shares[learner][self._pools.pool_of(agent).name]
                names, shares = list(mixture), np.array(list(mixture.values()))
                drawn = names[int(rng.choice(len(names), p=shares / shares.sum()))]
                cast[agent] = live_policy(drawn) or drawn
        return cast, [learner]

    def _place(
        self, wanted: Mapping[str, list[str]], slots: Mapping[str, tuple[str, ...]]
    ) -> dict[str, str]:
        """A slot for every member that is wanted; who is loaded stays."""
        placed: dict[str, str] = {}
        for pool, members in wanted.items():
            free = list(slots[pool])
            missing = []
            for member in members:
                there = [slot for slot in free if self._state.slots[slot][0] == member]
                if there:
                    placed[there[0]] = member
                    free.remove(there[0])
                else:
                    missing.append(member)
            placed |= dict(zip(free, missing, strict=False))
        return placed

    async def _bring(self, members: Mapping[str, str], patience: Patience) -> None:
        state = self._state
        # Steps and matches bring members at once: what one has published the other may not drop
        # before it is said where it is.
        async with self._moving:
            changed = {slot: one for slot, one in members.items() if state.slots[slot][0] != one}
            before = {state.slots[slot][0] for slot in changed}
            refs: dict[str, pb.WeightsRef] = {}
            for member in dict.fromkeys(changed.values()):
                refs[member] = await self._weights.publish(state.members[member], patience)
            loaded = {slot: (one, state.slots[slot][1] + 1) for slot, one in changed.items()}
            await self._store.save_slots(self._job.job_id, self._job.epoch, state, loaded)
        loads: list[Any] = [
            self.engines.update(slot_ref(slot, version, refs[member]), patience)
            for slot, (member, version) in loaded.items()
        ]
        await together(*loads)
        async with self._moving:
            held = {member for member, _ in state.slots.values()}
            over = {one.member_id for one in state.unneeded()}
            for member in sorted(before - held):
                await self._weights.drop(state.members[member], files=member in over)


def _frozen(mixture: Mixture) -> Mixture:
    return {name: share for name, share in mixture.items() if live_policy(name) is None}
