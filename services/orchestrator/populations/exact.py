"""Exact payoffs and NashConv of members in a game with an enumerable tree (`population.game`).

A rollout worker lists the prompts of all information states, and engines score each member's
probability of every move; payoffs then follow without matches. Each member's answers are stored, so
that a runner that takes the job over computes with the same numbers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import factorial
from typing import Final, TypeVar, cast

from services.orchestrator.context import JobContext
from services.orchestrator.errors import Deadline, RetryBackoff, run_all
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
from troupe.contracts import kinds
from troupe.job.sections.population import OpponentPool
from troupe.populations import seats
from troupe.populations.enumerated import Enumeration, Question, probabilities, score_request
from troupe.populations.games import Array
from troupe.populations.slots import visible_cells
from troupe.populations.tree import agent_nash_conv, agent_values, mixed
from troupe.rpc import FailedPrecondition, InvalidArgument, TroupeError, Unavailable
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import WorkflowError
from troupe.workflow.environments import IllegalRule
from troupe.workflow.environments.adapters.openspiel import OpenSpiel

# Maximum characters of one scoring call, so that it ends within `limits.turn_seconds` and little
# work is lost with a worker. A prompt counts once per move.
_CALL_CHARACTERS: Final = 1 << 17
# Characters added per message, for the chat template.
_TEMPLATE_CHARACTERS: Final = 64
AnswerT = TypeVar("AnswerT")
# (pool, member id): the member as the pool's agents play it.
_Player = tuple[str, str]


class ExactPayoffs:
    """Exact payoffs and NashConv of one job's members."""

    def __init__(
        self, job: JobContext, store: PopulationStore, slots: Slots, state: PopulationState
    ) -> None:
        self._job, self._store, self._slots, self._state = job, store, slots, state
        self._population, self._pools = sections(job.spec)
        self._probabilities = MoveProbabilities(job, slots, state)
        self._game: Game | None = None
        self._plans: dict[_Player, list[Array]] = {}

    async def settle(self) -> None:
        """Collect the policies of all members, and fill the payoff table.

        Raises `TroupeError`: FailedPrecondition of kind "game_not_enumerable" for games that are
        unknown, too large, not the workflow's, or whose members' answers have no probabilities.
        """
        deadline = Deadline(
            "asking members", self._job.spec.limits.step_seconds, "limits.step_seconds"
        )
        if self._game is None:
            self._game = await self._probabilities.game(deadline)
        game = self._game
        players = [
            (pool.name, self._state.pools[pool.name][at])
            for pool in self._pools.pools
            for at in self._visible(pool)
        ]
        await self._load_plans(game, players)
        for pool in self._pools.pools:
            unknown = [
                one for name, one in players if name == pool.name and (name, one) not in self._plans
            ]
            while unknown:
                served = len(pool.match_slots)
                await self._ask_members(game, pool, unknown[:served], deadline)
                unknown = unknown[served:]
        if not self._population.by_wins:
            await asyncio.to_thread(self._settle_cells, game)

    async def nash_conv(self, mixtures: dict[str, Mixture]) -> float:
        """Return the NashConv of the `mixtures` of members by pool: the sum of the gains from best
        responses."""
        assert self._game is not None, "after `settle`"
        game = self._game
        played = {
            pool: mixed([self._plans[pool, name] for name in mixture], list(mixture.values()))
            for pool, mixture in mixtures.items()
        }
        agents = [played[self._pools.pool_of(agent).name] for agent in self._pools.agents]
        try:
            found = await asyncio.to_thread(agent_nash_conv, game.tree.form, agents, game.seatings)
        except ValueError as error:
            raise self._probabilities.impossible(str(error)) from error
        # Rounding may give a small negative value at an equilibrium.
        return max(found, 0.0)

    def _visible(self, pool: OpponentPool) -> list[int]:
        return self._state.places(pool.name, SETTLED, CANDIDATE)

    async def _load_plans(self, game: Game, players: list[_Player]) -> None:
        """Load the stored answers of `players`, and delete all other members' answers."""
        self._plans = {one: self._plans[one] for one in players if one in self._plans}
        names = {"/".join(one): one for one in players}
        await self._store.forget_answers(self._job.job_id, self._job.epoch, but=names)
        unknown = [name for name, one in names.items() if one not in self._plans]
        kept = await self._store.answers(self._job.job_id, unknown)
        for name, text in kept.items():
            await self._add_plan(game, names[name], json.loads(text))

    async def _ask_members(
        self, game: Game, pool: OpponentPool, members: list[str], deadline: Deadline
    ) -> None:
        """Load members into slots, as many as there are slots, and score all of them at once."""
        places = self._state.pools[pool.name]
        wanted: dict[str, list[int]] = {one.name: [] for one in self._pools.pools}
        wanted[pool.name] = [places.index(one) for one in members]
        await self._slots.load_matches(wanted, deadline)
        slot_of = self._slots.places()
        found: dict[str, str] = {}

        async def ask(member: str) -> None:
            slot = slot_of[pool.name, member]
            answer = await self._probabilities.answers(game, pool, slot, deadline)
            await self._add_plan(game, (pool.name, member), answer)
            found[f"{pool.name}/{member}"] = json.dumps(answer)

        if not self._slots.separate_match_slots:
            self._job.show(f"asking members: {', '.join(members)}", step=self._state.began)
        await run_all(*(ask(member) for member in members))
        await self._store.add_answers(self._job.job_id, self._job.epoch, found)

    async def _add_plan(self, game: Game, player: _Player, answer: list[list[float]]) -> None:
        def plans() -> list[Array]:
            given = [
                dict(zip(question.moves.values(), one, strict=True))
                for question, one in zip(game.tree.questions, answer, strict=True)
            ]
            return game.tree.plans(game.tree.behaviours(given))

        try:
            self._plans[player] = await asyncio.to_thread(plans)
        except ValueError as error:
            raise self._probabilities.impossible(f"{player[1]}: {error}") from error

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
    """Return the orders in which the members of a symmetric game take turns as agents, as in
    matches.

    If the agents change seats themselves, fewer orders cover all arrangements.
    """
    count = factorial(players) if seatings == 1 else players
    return [seats(players, turn) for turn in range(count)]


@dataclass(frozen=True)
class Game:
    """An enumerated game, and the seatings in which a job plays it."""

    tree: Enumeration
    seatings: list[list[int]]
    """Agents' indices by seat, each seating equally often."""


class MoveProbabilities:
    """Members' move probabilities in every information state, from a job's rollout workers.

    A call to a worker that is lost is repeated at another worker.
    """

    def __init__(self, job: JobContext, slots: Slots, state: PopulationState) -> None:
        self._job, self._slots, self._state = job, slots, state
        self._population, self._pools = sections(job.spec)

    async def game(self, deadline: Deadline) -> Game:
        """Return the game with the prompts of the job's workflow."""
        name = self._population.game
        assert name is not None, "only for jobs with population.game"
        request = rollout_pb.DescribeGameRequest(job_id=self._job.job_id, game=name)

        reply = await self._call_any_worker(
            lambda worker: worker.rollout.DescribeGame(request, timeout=deadline.left), deadline
        )
        agents = list(self._pools.agents)
        seatings = [[agents.index(one) for one in seating.agents] for seating in reply.seatings]
        if any(sorted(one) != list(range(len(agents))) for one in seatings):
            raise self.impossible("a player takes several seats")
        asked = tuple(
            Question(
                one.player,
                one.state,
                tuple({"role": m.role, "content": m.content} for m in one.messages),
                {move.name: move.action for move in one.moves},
            )
            for one in reply.questions
        )
        rule = cast(IllegalRule, reply.illegal)

        def walk() -> Enumeration:
            environment = OpenSpiel(name, illegal=rule, illegal_reward=reply.illegal_reward)
            return Enumeration.of_questions(environment, asked, rule, reply.resamples)

        try:
            return Game(await asyncio.to_thread(walk), seatings)
        except (WorkflowError, ValueError, RuntimeError) as error:
            raise self.impossible(str(error)) from error

    async def answers(
        self, game: Game, pool: OpponentPool, slot: str, deadline: Deadline
    ) -> list[list[float]]:
        """Return the probability of each move, by question, for the member in a slot of the
        pool."""
        if self._job.spec.environment is not None:
            return await self._behaviour(slot, deadline)
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

            answer = await self._call_any_worker(partial(_score, request, deadline), deadline)
            found += [list(one.values()) for one in probabilities(some, answer)]
        return found

    async def _behaviour(self, slot: str, deadline: Deadline) -> list[list[float]]:
        """Return the move probabilities of a network policy, for all questions in one call."""
        request = rollout_pb.BehaveRequest(
            job_id=self._job.job_id,
            policy=slot,
            game=self._population.game or "",
            version=self._state.slots[slot][1],
        )

        reply = await self._call_any_worker(
            lambda worker: worker.rollout.Behave(request, timeout=deadline.left), deadline
        )
        return [list(one.probabilities) for one in reply.behaviours]

    def impossible(self, message: str) -> FailedPrecondition:
        """Return the error of a game whose values cannot be computed exactly."""
        return FailedPrecondition(
            message,
            kind="game_not_enumerable",
            field="population.game",
            value=self._population.game,
            remedy="Remove the field: matches fill the payoff table.",
        )

    async def _call_any_worker(
        self, call: Callable[[WorkerHandle], Awaitable[AnswerT]], deadline: Deadline
    ) -> AnswerT:
        """Return the answer of any rollout worker that serves the slots' versions."""
        attempts, engines = RetryBackoff(deadline), self._slots.engines
        while True:
            workers = engines.ready(self._slots.match_floors())
            if not workers:
                deadline.report("asking members: waiting for a rollout worker")
                await deadline.wait(engines.change())
                continue
            worker = workers[attempts.count % len(workers)]
            try:
                async with worker.while_alive():
                    return await call(worker)
            except InvalidArgument as error:
                raise self.impossible(error.message) from error
            except TroupeError as error:
                if error.kind == kinds.JOB_NOT_PREPARED:
                    engines.lost_job(worker)
                if error.kind == kinds.VERSION_NOT_SERVED:
                    error = Unavailable(str(error))
                await attempts.failed(error)


async def _score(
    request: rollout_pb.ScoreRequest, deadline: Deadline, worker: WorkerHandle
) -> rollout_pb.ScoreResponse:
    return await worker.rollout.Score(request, timeout=deadline.left)


def _calls(questions: Sequence[Question]) -> Iterator[list[Question]]:
    """Split the questions, in order, into calls of at most `_CALL_CHARACTERS`."""
    some: list[Question] = []
    size = 0
    for one in questions:
        text = sum(len(message["content"]) + _TEMPLATE_CHARACTERS for message in one.messages)
        size += text * len(one.moves)
        if some and size > _CALL_CHARACTERS:
            yield some
            some, size = [], text * len(one.moves)
        some.append(one)
    if some:
        yield some


def _with_system(question: Question, system: str | None) -> Question:
    """Return the question with an agent's system prompt before it."""
    if system is None or question.messages[0]["role"] == "system":
        return question
    messages = ({"role": "system", "content": system}, *question.messages)
    return Question(question.player, question.state, messages, question.moves)
