"""What members get in a game whose tree can be walked: `population.game`.

A rollout worker says what the players are asked in every information state, slots say how likely
members answer what, and the rest is arithmetic. Answers are durable, member by member: who takes
the job over computes with the same numbers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from math import factorial

from services.orchestrator.context import JobContext
from services.orchestrator.faults import Patience, together
from services.orchestrator.populations.decisions import sections
from services.orchestrator.populations.inquiry import Game, Inquiry
from services.orchestrator.populations.slots import Slots
from services.orchestrator.populations.state import CANDIDATE, SETTLED, Mixture, PopulationState
from services.orchestrator.populations.store import PopulationStore
from troupe.job.pools import Pool
from troupe.populations import seats
from troupe.populations.arrangements import agent_nash_conv, agent_values, mixed
from troupe.populations.games import Array
from troupe.populations.slots import visible_cells

# A member as the agents of a pool play it.
_Player = tuple[str, str]


class ExactPayoffs:
    """Payoffs and NashConv of one job's members."""

    def __init__(
        self, job: JobContext, store: PopulationStore, slots: Slots, state: PopulationState
    ) -> None:
        self._job, self._store, self._slots, self._state = job, store, slots, state
        self._population, self._pools = sections(job.spec)
        self._inquiry = Inquiry(job, slots, state)
        self._game: Game | None = None
        self._plans: dict[_Player, list[Array]] = {}

    async def settle(self) -> None:
        """Know what all members do, and what they get against each other.

        Raises `TroupeError`: FailedPrecondition of kind "game_not_enumerable" for games that are
        unknown, too large, not the workflow's, or whose members' answers have no probabilities.
        """
        patience = Patience(
            "asking members", self._job.spec.limits.step_seconds, "limits.step_seconds"
        )
        if self._game is None:
            self._game = await self._inquiry.game(patience)
        game = self._game
        players = [
            (pool.name, self._state.pools[pool.name][at])
            for pool in self._pools.pools
            for at in self._visible(pool)
        ]
        await self._recall(game, players)
        for pool in self._pools.pools:
            unknown = [
                one for name, one in players if name == pool.name and (name, one) not in self._plans
            ]
            while unknown:
                served = len(pool.match_slots)
                await self._ask_members(game, pool, unknown[:served], patience)
                unknown = unknown[served:]
        if not self._population.by_wins:
            await asyncio.to_thread(self._settle_cells, game)

    async def nash_conv(self, mixtures: dict[str, Mixture]) -> float:
        """What all agents would gain by best responses to `mixtures` (by pool) of members."""
        assert self._game is not None, "members are known first"
        game = self._game
        played = {
            pool: mixed([self._plans[pool, name] for name in mixture], list(mixture.values()))
            for pool, mixture in mixtures.items()
        }
        agents = [played[self._pools.pool_of(agent).name] for agent in self._pools.agents]
        try:
            found = await asyncio.to_thread(agent_nash_conv, game.tree.form, agents, game.seatings)
        except ValueError as error:
            raise self._inquiry.impossible(str(error)) from error
        # An equilibrium to the last bit may come out below.
        return max(found, 0.0)

    def _visible(self, pool: Pool) -> list[int]:
        return self._state.places(pool.name, SETTLED, CANDIDATE)

    async def _recall(self, game: Game, players: list[_Player]) -> None:
        """Know what is kept of `players`, and nothing of others: nobody meets them any more."""
        self._plans = {one: self._plans[one] for one in players if one in self._plans}
        names = {"/".join(one): one for one in players}
        await self._store.forget_answers(self._job.job_id, self._job.epoch, but=names)
        unknown = [name for name, one in names.items() if one not in self._plans]
        kept = await self._store.answers(self._job.job_id, unknown)
        for name, text in kept.items():
            await self._learn(game, names[name], json.loads(text))

    async def _ask_members(
        self, game: Game, pool: Pool, members: list[str], patience: Patience
    ) -> None:
        """Load as many as there are slots, and ask all at once."""
        places = self._state.pools[pool.name]
        wanted: dict[str, list[int]] = {one.name: [] for one in self._pools.pools}
        wanted[pool.name] = [places.index(one) for one in members]
        await self._slots.load_matches(wanted, patience)
        slot_of = self._slots.places()
        found: dict[str, str] = {}

        async def ask(member: str) -> None:
            slot = slot_of[pool.name, member]
            answer = await self._inquiry.answers(game, pool, slot, patience)
            await self._learn(game, (pool.name, member), answer)
            found[f"{pool.name}/{member}"] = json.dumps(answer)

        if not self._slots.apart:
            self._job.show(f"asking members: {', '.join(members)}", step=self._state.began)
        await together(*(ask(member) for member in members))
        await self._store.add_answers(self._job.job_id, self._job.epoch, found)

    async def _learn(self, game: Game, player: _Player, answer: list[list[float]]) -> None:
        def plans() -> list[Array]:
            given = [
                dict(zip(question.moves.values(), one, strict=True))
                for question, one in zip(game.tree.questions, answer, strict=True)
            ]
            return game.tree.plans(game.tree.behaviours(given))

        try:
            self._plans[player] = await asyncio.to_thread(plans)
        except ValueError as error:
            raise self._inquiry.impossible(f"{player[1]}: {error}") from error

    def _settle_cells(self, game: Game) -> None:
        agents, table = self._pools.agents, self._state.table
        pool_of = [self._pools.pool_of(agent) for agent in agents]
        symmetric = self._pools.symmetric
        turns = _turns(len(agents), len(game.seatings)) if symmetric else [range(len(agents))]
        for cell in visible_cells([self._visible(pool) for pool in pool_of], symmetric=symmetric):
            known = table.cell(cell)
            if known is not None and known.exact:
                continue
            names = [
                self._state.pools[pool.name][place]
                for pool, place in zip(pool_of, cell, strict=True)
            ]
            total: Array | None = None
            for turn in turns:
                plans = [
                    self._plans[pool_of[agent].name, names[turn.index(agent)]]
                    for agent in range(len(agents))
                ]
                got = agent_values(game.tree.form, plans, game.seatings)[list(turn)]
                total = got if total is None else total + got
            assert total is not None, "there are players"
            table.settle(cell, (total / len(turns)).tolist())


def _turns(players: int, seatings: int) -> list[Sequence[int]]:
    """Who is whom: as in matches, members of a symmetric game take turns as agents. Where these
    change seats themselves everybody sits behind everybody anyway."""
    count = factorial(players) if seatings == 1 else players
    return [seats(players, turn) for turn in range(count)]
