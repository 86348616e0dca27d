"""Playing of one episode: seating, prompts, reading moves from replies, rules for illegal moves."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import factorial
from types import MappingProxyType
from typing import Literal, TypeAlias, cast, get_args

from troupe.workflow.agent import Agents
from troupe.workflow.environments.host import COUNTERS, AsyncEnvironment
from troupe.workflow.environments.interface import (
    Action,
    IllegalRule,
    Observation,
    Properties,
    Step,
)
from troupe.workflow.errors import EntrypointError, IllegalMoveError, WorkflowError
from troupe.workflow.messages import Reply

ReadMove = Callable[[str, Observation, str], Action]
"""(text, observation, seat) -> action. Raises `IllegalMoveError`."""

# Maximum number of legal moves that a prompt lists.
_SHOWN_MOVES = 64


def read_move(text: str, seen: Observation, seat: str = "") -> Action:
    """Return the legal move that `text` names, or the trimmed text itself if the game lists no
    legal moves.

    Try, in this order, the whole text, the last [bracketed] part, and the legal move named last
    (players who think aloud name several), ignoring case. Raises `IllegalMoveError` if no legal
    move is found.
    """
    if seen.legal is None:
        return text.strip()
    moves = {_folded(label): action for label, action in seen.legal.items()}
    # Labels that differ only in case are matched exactly.
    exact = {label.strip(): action for label, action in seen.legal.items()}
    bracketed = re.findall(r"\[([^\[\]]+)\]", text)
    for candidate in [text, *reversed(bracketed[-1:])]:
        if candidate.strip() in exact:
            return exact[candidate.strip()]
        if _folded(candidate) in moves:
            return moves[_folded(candidate)]
    named = _named_last(_folded(text), moves)
    if named is not None:
        return moves[named]
    raise IllegalMoveError(
        f"{text[:80]!r} does not name a legal move of '{seat}'",
        seat=seat,
        value=text,
        remedy=legal_help(seen),
    )


def legal_help(seen: Observation) -> str:
    """Return the legal moves in one line; empty when any text is legal."""
    if seen.legal is None:
        return ""
    labels = list(seen.legal)
    more = len(labels) - _SHOWN_MOVES
    return f"Legal moves: {', '.join(labels[:_SHOWN_MOVES])}" + (
        f" and {more} more." if more > 0 else "."
    )


def _named_last(text: str, moves: Mapping[str, Action]) -> str | None:
    """Return the label that ends last in `text`, as whole words; if two end together, the
    longer."""
    best: tuple[int, int, str] | None = None
    for label in moves:
        if not label:
            continue
        start = text.rfind(label)
        while start >= 0:
            end = start + len(label)
            before, after = text[start - 1 : start], text[end : end + 1]
            if not (_joins(before, label[0]) or _joins(after, label[-1])):
                if best is None or (end, len(label)) > best[:2]:
                    best = (end, len(label), label)
                break
            start = text.rfind(label, 0, end - 1)
    return None if best is None else best[2]


def _joins(neighbour: str, edge: str) -> bool:
    """Return whether a word continues from character `edge` to `neighbour`."""
    return bool(neighbour) and neighbour.isalnum() and edge.isalnum()


def _folded(label: str) -> str:
    return " ".join(label.casefold().split())


Line: TypeAlias = dict[str, str] | Reply

History = Literal["all", "latest"]
"""Conversation of a seat. `all`: every observation and reply so far (token ids are reused).
`latest`: only the latest observation, for fully observable games and small contexts."""

Prompt = Callable[[Properties, str, Observation, bool], str]
"""(properties, seat, observation, first) -> text; `first`: the seat's first message."""


def prompt(properties: Properties, seat: str, seen: Observation, first: bool) -> str:
    """Return a seat's message: the rules (in the first message), the observation and the legal
    moves."""
    parts = (properties.rules if first else "", seen.text, legal_help(seen))
    return "\n\n".join(part.strip() for part in parts if part.strip())


def correction(error: IllegalMoveError, seen: Observation) -> str:
    """Return the message after an illegal move."""
    return f"That is no legal move. {legal_help(seen) or error.remedy or 'Try another.'}".strip()


class SeatingError(WorkflowError, ValueError):
    """The job's agents do not fill the game's seats."""

    kind = "seating"


@dataclass(frozen=True, slots=True)
class Seating:
    """The assignment of agents to seats in one episode; an agent may hold several seats."""

    agent_of: Mapping[str, str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "agent_of", MappingProxyType(dict(self.agent_of)))

    def seats_of(self, agent: str) -> tuple[str, ...]:
        """Return the seats of one agent, in the game's order."""
        return tuple(seat for seat, held in self.agent_of.items() if held == agent)

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents that hold seats, in the order of their first seats."""
        return tuple(dict.fromkeys(self.agent_of.values()))

    @classmethod
    def of(
        cls,
        seats: Sequence[str],
        agents: Sequence[str] | Mapping[str, str],
        *,
        permutation: int = 0,
    ) -> Seating:
        """Assign agents to seats, by a mapping or in order; a single agent takes all seats.

        `permutation` k selects the k-th of the n! arrangements in lexicographic order, modulo n!,
        so that consecutive numbers (seeds) give every agent every seat equally often. Raises
        `SeatingError`.
        """
        if isinstance(agents, Mapping):
            missing = [seat for seat in seats if seat not in agents]
            held = [agents[seat] for seat in seats if seat in agents]
        else:
            held = list(agents) * (len(seats) if len(agents) == 1 else 1)
            missing = list(seats[len(held) :])
        if missing or len(held) != len(seats):
            raise SeatingError(
                f"{len(seats)} seats ({', '.join(seats)}) and the agents "
                f"{', '.join(dict.fromkeys(held)) or '(none)'} do not match",
                field="seats",
                value=missing or held,
                remedy="Assign the seats: `seats={seat: agent, ...}`; an agent may hold several.",
            )
        return cls(dict(zip(seats, _arranged(held, permutation), strict=True)))


def _arranged(items: list[str], number: int) -> list[str]:
    """Return the `number`-th permutation, by its factorial digits."""
    left, arranged = list(items), []
    number %= factorial(len(left))
    while left:
        digit, number = divmod(number, factorial(len(left) - 1))
        arranged.append(left.pop(digit))
    return arranged


_CHARACTERS_READ_AT_ONCE = 32_768


@dataclass(frozen=True, slots=True)
class PlayRules:
    """How replies become moves, and the rule for illegal ones."""

    illegal: IllegalRule | None = None
    """Rule for illegal moves; None: the environment's."""
    resamples: int = 2
    """`resample`: further attempts of a seat per move."""
    history: History = "all"
    read: ReadMove = read_move
    prompt: Prompt = prompt


def job_rules(rules: PlayRules, given: Mapping[str, object]) -> PlayRules:
    """Return `rules`, overridden by `illegal` and `resamples` of a job (`tasks.args`, `Episodes`)
    if given.

    Raises `EntrypointError` for invalid values.
    """
    illegal, resamples = given.get("illegal"), given.get("resamples")
    if illegal is not None and illegal not in get_args(IllegalRule):
        raise EntrypointError(
            "unknown rule for illegal moves",
            field="tasks.args.illegal",
            value=illegal,
            remedy=f"One of {', '.join(get_args(IllegalRule))}.",
        )
    if resamples is not None and not (isinstance(resamples, int) and resamples >= 0):
        raise EntrypointError(
            "the number of further attempts must be a whole number, at least 0",
            field="tasks.args.resamples",
            value=resamples,
        )
    return replace(
        rules,
        illegal=rules.illegal if illegal is None else cast(IllegalRule, illegal),
        resamples=rules.resamples if resamples is None else resamples,
    )


@dataclass(slots=True)
class PlayedTurn:
    """One reply of one seat."""

    seat: str
    reply: Reply
    step: int
    """Number of steps before the reply."""
    legal: bool = True


@dataclass(slots=True)
class Outcome:
    """A finished episode."""

    seating: Seating
    rewards: dict[str, list[float]]
    """Rewards of all steps, by seat."""
    illegal_reward: float
    """Reward of a reply that was not a legal move."""
    turns: list[PlayedTurn] = field(default_factory=list)
    steps: int = 0
    forfeited: tuple[str, ...] = ()
    """Seats whose illegal move ended the episode."""

    def total(self, seat: str, since: int = 0) -> float:
        """Return the undiscounted return of a seat from step `since` onwards."""
        return sum(self.rewards[seat][since:])

    @property
    def illegal_turns(self) -> list[PlayedTurn]:
        """Replies that were not legal moves."""
        return [turn for turn in self.turns if not turn.legal]


class Episode:
    """One episode of `environment`, played by the agents of one trajectory."""

    def __init__(
        self, environment: AsyncEnvironment, agents: Agents, rules: PlayRules, *, seed: int
    ) -> None:
        self._environment = environment
        self._agents = agents
        self._rules = rules
        self._seed = seed
        self._conversations: dict[str, list[Line]] = {}
        self._outcome: Outcome

    async def play(self, agents: tuple[str, ...] | Mapping[str, str], permutation: int) -> Outcome:
        """Reset the environment, assign seats, and play to the end. Raises `WorkflowError`."""
        reset = await self._environment.reset(self._seed)
        properties = self._environment.properties
        seating = Seating.of(reset.agents, agents, permutation=permutation)
        rewards: dict[str, list[float]] = {seat: [] for seat in reset.agents}
        self._outcome = Outcome(seating, rewards, properties.illegal_reward)
        self._conversations = {seat: [] for seat in reset.agents}
        current, obs = reset.current, reset.obs
        while current:
            step = await self._move(current, {seat: obs[seat] for seat in current})
            if step is None:
                break
            self._reward(step.rewards)
            current, obs = step.current, step.obs
        return self._outcome

    async def _read(self, reply: Reply, seen: Observation, seat: str) -> Action:
        """Return the move in a reply's content, without thoughts. Raises `IllegalMoveError`.

        A long reply is parsed in a thread, to keep the event loop free.
        """
        read = self._rules.read
        if len(reply.content) <= _CHARACTERS_READ_AT_ONCE:
            return read(reply.content, seen, seat)
        return await asyncio.to_thread(read, reply.content, seen, seat)

    async def _move(self, current: tuple[str, ...], seen: Mapping[str, Observation]) -> Step | None:
        """Ask all seats of `current` and play their moves; None when a seat lost by an illegal
        move.

        All seats are asked concurrently. Seats that must be asked again are asked together, so that
        the order of turns does not depend on timing.
        """
        for seat in current:
            lines = self._conversations[seat]
            if self._rules.history == "latest":
                lines.clear()
            properties = self._environment.properties
            text = self._rules.prompt(properties, seat, seen[seat], not lines)
            lines.append({"role": "user", "content": text})
        actions: dict[str, Action] = {}
        asked_again: Counter[str] = Counter()
        newest: dict[str, PlayedTurn] = {}
        left = list(current)
        while left:
            refused: dict[str, IllegalMoveError] = {}
            newest |= await self._answers(left)
            for seat in left:
                try:
                    actions[seat] = await self._read(newest[seat].reply, seen[seat], seat)
                except IllegalMoveError as error:
                    refused[seat] = error
            if not refused:
                try:
                    return await self._environment.step(actions)
                except IllegalMoveError as error:  # not excluded by the list of legal moves
                    seat = error.seat if error.seat in current else current[-1]
                    refused[seat] = error
            left = []
            for seat, why in refused.items():
                newest[seat].legal = False
                COUNTERS.count("illegal_moves", self._environment.name)
                match self._apply_rule(seat, seen[seat], asked_again[seat]):
                    case "again":
                        asked_again[seat] += 1
                        text = correction(why, seen[seat])
                        self._conversations[seat].append({"role": "user", "content": text})
                        left.append(seat)
                    case "lost":
                        actions.pop(seat, None)
                    case _RandomMove(action):
                        actions[seat] = action
            losers = [seat for seat in current if seat not in actions and seat not in left]
            if losers:
                self._forfeit(losers)
                return None
        return await self._environment.step(actions)

    async def _answers(self, seats: list[str]) -> dict[str, PlayedTurn]:
        """Ask each seat for a new turn."""
        turns = {}
        for seat, reply in zip(seats, await self._replies(seats), strict=True):
            self._conversations[seat].append(reply)
            turns[seat] = PlayedTurn(seat, reply, self._outcome.steps)
        self._outcome.turns += turns.values()
        return turns

    async def _replies(self, seats: list[str]) -> list[Reply]:
        """Return one reply per seat, generated concurrently but numbered in the order of
        `seats`."""
        agent_of = self._outcome.seating.agent_of
        asked: list[asyncio.Future[Reply]] = []
        try:
            for seat in seats:
                turn = self._agents[agent_of[seat]].chat(list(self._conversations[seat]))
                asked.append(asyncio.ensure_future(turn))
            return list(await asyncio.gather(*asked))
        finally:
            for task in asked:
                task.cancel()  # still running when another one failed

    def _apply_rule(
        self, seat: str, seen: Observation, asked_again: int
    ) -> Literal["again", "lost"] | _RandomMove:
        """Apply the rule for illegal moves."""
        rule = self._rules.illegal or self._environment.properties.illegal
        if rule == "resample" and asked_again < self._rules.resamples:
            return "again"
        if rule == "random_legal" and seen.legal:
            draw = random.Random(f"{self._seed}/{self._outcome.steps}/{seat}")
            return _RandomMove(seen.legal[draw.choice(sorted(seen.legal))])
        return "lost"

    def _forfeit(self, losers: list[str]) -> None:
        """End the episode: losers get `illegal_reward`, and in a zero-sum game the others share its
        negative."""
        properties = self._environment.properties
        punishment = properties.illegal_reward
        winners = [seat for seat in self._outcome.rewards if seat not in losers]
        rewards = dict.fromkeys(losers, punishment)
        if properties.cooperative:
            rewards |= dict.fromkeys(winners, punishment)
        elif properties.zero_sum:
            gain = -punishment * len(losers) / len(winners) if winners else 0.0
            rewards |= dict.fromkeys(winners, gain)
            if not winners:
                rewards = dict.fromkeys(losers, 0.0)
        self._outcome.forfeited = tuple(losers)
        self._reward(rewards)

    def _reward(self, rewards: Mapping[str, float]) -> None:
        for seat, collected in self._outcome.rewards.items():
            collected.append(float(rewards.get(seat, 0.0)))
        self._outcome.steps += 1


@dataclass(frozen=True, slots=True)
class _RandomMove:
    """A random legal move that replaces an illegal one."""

    action: Action
