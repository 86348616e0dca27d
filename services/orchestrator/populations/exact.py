"""What members get in a game whose tree can be walked: `population.game`.

A rollout worker says what the players are asked in every information state, slots say how likely
members answer what, and the rest is arithmetic. Answers are durable, member by member: who takes
the job over computes with the same numbers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from math import factorial
from typing import Final, TypeVar, cast

from services.orchestrator.context import JobContext
from services.orchestrator.errors import Deadline, RetryBackoff, together
from services.orchestrator.placement.workers import WorkerHandle
from services.orchestrator.populations.decisions import sections
from services.orchestrator.populations.slots import Slots
from services.orchestrator.populations.state import (
    CANDIDATE,
    SETTLED,
    Mixture,
    PopulationState,
    PopulationStore,
)
from troupe.job.population import OpponentPool
from troupe.populations import seats
from troupe.populations.arrangements import agent_nash_conv, agent_values, mixed
from troupe.populations.enumerated import Enumeration, Question, probabilities, score_request
from troupe.populations.games import Array
from troupe.populations.slots import visible_cells
from troupe.rpc import FailedPrecondition, InvalidArgument, TroupeError, Unavailable
from troupe.v1 import rollout_pb2 as ro
from troupe.workflow import WorkflowError
from troupe.workflow.environments import IllegalRule
from troupe.workflow.environments.adapters.openspiel import OpenSpiel

# Characters of one call: it ends within `limits.turn_seconds`, and a worker that dies has done
# little for nothing. A prompt counts once per move, and some for the marks of its conversation.
_CALL_CHARACTERS: Final = 1 << 17
_MARKS: Final = 64
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Game:
    """A game whose tree was walked, as a job plays it."""

    tree: Enumeration
    seatings: list[list[int]]
    """Players of the population by seat, each as often as the others."""


class Inquiry:
    """Of one job. What is asked of an engine that is lost meanwhile is asked of another one."""

    def __init__(self, job: JobContext, slots: Slots, state: PopulationState) -> None:
        self._job, self._slots, self._state = job, slots, state
        self._population, self._pools = sections(job.spec)

    async def game(self, patience: Deadline) -> Game:
        """The game as the job's workflow puts it."""
        name = self._population.game
        assert name is not None, "nobody asks otherwise"
        request = ro.DescribeGameRequest(job_id=self._job.job_id, game=name)

        async def call(worker: WorkerHandle) -> ro.DescribeGameResponse:
            found: ro.DescribeGameResponse = await worker.rollout.DescribeGame(
                request, timeout=patience.left
            )
            return found

        told = await self._anybody(call, patience)
        agents = list(self._pools.agents)
        seatings = [[agents.index(one) for one in seating.agents] for seating in told.seatings]
        if any(sorted(one) != list(range(len(agents))) for one in seatings):
            raise self.impossible("a player sits on several seats")
        asked = tuple(
            Question(
                one.player,
                one.state,
                tuple({"role": m.role, "content": m.content} for m in one.messages),
                {move.name: move.action for move in one.moves},
            )
            for one in told.questions
        )
        rule = cast(IllegalRule, told.illegal)

        def walk() -> Enumeration:
            environment = OpenSpiel(name, illegal=rule, illegal_reward=told.illegal_reward)
            return Enumeration.told(environment, asked, rule, told.resamples)

        try:
            return Game(await asyncio.to_thread(walk), seatings)
        except (WorkflowError, ValueError, RuntimeError) as error:
            raise self.impossible(str(error)) from error

    async def answers(
        self, game: Game, pool: OpponentPool, slot: str, patience: Deadline
    ) -> list[list[float]]:
        """By question, the probability of each move's name, as the agents of the pool say it."""
        if self._job.spec.environment is not None:
            return await self._behaviour(slot, patience)
        agent = self._job.spec.agents[pool.agents[0]]
        version = self._state.slots[slot][1]
        found: list[list[float]] = []
        asked = [_with_system(one, agent.system_prompt) for one in game.tree.questions]
        for some in _calls(asked):
            request = score_request(
                some,
                self._job.job_id,
                slot,
                ends=agent.sampling.max_new_tokens > 1,
                version=version,
            )
            request.temperature = agent.sampling.temperature

            async def call(
                worker: WorkerHandle, request: ro.ScoreRequest = request
            ) -> ro.ScoreResponse:
                answer: ro.ScoreResponse = await worker.rollout.Score(
                    request, timeout=patience.left
                )
                return answer

            answer = await self._anybody(call, patience)
            found += [list(one.values()) for one in probabilities(some, answer)]
        return found

    async def _behaviour(self, slot: str, patience: Deadline) -> list[list[float]]:
        """The same of a network, which answers all questions at once."""
        request = ro.BehaveRequest(
            job_id=self._job.job_id,
            policy=slot,
            game=self._population.game or "",
            version=self._state.slots[slot][1],
        )

        async def call(worker: WorkerHandle) -> ro.BehaveResponse:
            answer: ro.BehaveResponse = await worker.rollout.Behave(request, timeout=patience.left)
            return answer

        told = await self._anybody(call, patience)
        return [list(one.probabilities) for one in told.behaviours]

    def impossible(self, message: str) -> FailedPrecondition:
        """Exact values cannot be had."""
        return FailedPrecondition(
            message,
            kind="game_not_enumerable",
            field="population.game",
            value=self._population.game,
            remedy="Remove the field: matches fill the payoff table.",
        )

    async def _anybody(
        self, call: Callable[[WorkerHandle], Awaitable[AnswerT]], patience: Deadline
    ) -> AnswerT:
        """The answer of a rollout worker whose slots serve what they should."""
        attempts, engines = RetryBackoff(patience), self._slots.engines
        while True:
            workers = engines.ready(self._slots.match_floors())
            if not workers:
                patience.say("asking members: waiting for a rollout worker")
                await patience.wait(engines.change())
                continue
            worker = workers[attempts.count % len(workers)]
            try:
                async with worker.while_alive():
                    return await call(worker)
            except InvalidArgument as error:
                raise self.impossible(error.message) from error
            except TroupeError as error:
                if error.kind == "job_not_prepared":
                    engines.lost_job(worker)
                if error.kind == "version_not_served":
                    error = Unavailable(str(error))
                await attempts.failed(error)


def _calls(questions: Sequence[Question]) -> Iterator[list[Question]]:
    """Questions in their order, cut into calls."""
    some: list[Question] = []
    size = 0
    for one in questions:
        text = sum(len(message["content"]) + _MARKS for message in one.messages)
        size += text * len(one.moves)
        if some and size > _CALL_CHARACTERS:
            yield some
            some, size = [], text * len(one.moves)
        some.append(one)
    if some:
        yield some


def _with_system(question: Question, system: str | None) -> Question:
    """As an agent with a system prompt is asked."""
    if system is None or question.messages[0]["role"] == "system":
        return question
    messages = ({"role": "system", "content": system}, *question.messages)
    return Question(question.player, question.state, messages, question.moves)


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
        patience = Deadline(
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

    def _visible(self, pool: OpponentPool) -> list[int]:
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
        self, game: Game, pool: OpponentPool, members: list[str], patience: Deadline
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
