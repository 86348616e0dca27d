"""Asks rollout workers what members say in a game: its questions, and how likely each answer is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, cast

from services.orchestrator.context import JobContext
from services.orchestrator.faults import Attempts, Patience
from services.orchestrator.populations.decisions import sections
from services.orchestrator.populations.slots import Slots
from services.orchestrator.populations.state import PopulationState
from services.orchestrator.workers import Worker
from troupe.job.pools import Pool
from troupe.populations.asking import probabilities, score_request
from troupe.populations.enumerated import Enumeration, Question
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

    async def game(self, patience: Patience) -> Game:
        """The game as the job's workflow puts it."""
        name = self._population.game
        assert name is not None, "nobody asks otherwise"
        request = ro.DescribeGameRequest(job_id=self._job.job_id, game=name)

        async def call(worker: Worker) -> ro.DescribeGameResponse:
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
        self, game: Game, pool: Pool, slot: str, patience: Patience
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

            async def call(worker: Worker, request: ro.ScoreRequest = request) -> ro.ScoreResponse:
                answer: ro.ScoreResponse = await worker.rollout.Score(
                    request, timeout=patience.left
                )
                return answer

            answer = await self._anybody(call, patience)
            found += [list(one.values()) for one in probabilities(some, answer)]
        return found

    async def _behaviour(self, slot: str, patience: Patience) -> list[list[float]]:
        """The same of a network, which answers all questions at once."""
        request = ro.BehaveRequest(
            job_id=self._job.job_id,
            policy=slot,
            game=self._population.game or "",
            version=self._state.slots[slot][1],
        )

        async def call(worker: Worker) -> ro.BehaveResponse:
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
        self, call: Callable[[Worker], Awaitable[AnswerT]], patience: Patience
    ) -> AnswerT:
        """The answer of a rollout worker whose slots serve what they should."""
        attempts, engines = Attempts(patience), self._slots.engines
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
