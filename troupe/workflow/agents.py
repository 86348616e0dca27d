"""The agents of one trajectory: what a workflow talks to, and the record of what they said.

A turn gets its number when `chat` or `generate` is *called*, before anything is awaited: branches
that run concurrently under `asyncio.gather` are numbered in the order in which they were written.
"""

from __future__ import annotations

import struct
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index as as_int
from typing import Any

import xxhash

from troupe.workflow.backend import Backend, Generation, Sampling
from troupe.workflow.conversation import ChatTokenizer, ConversationMemory, Message, parse_messages
from troupe.workflow.errors import (
    ChatTemplateError,
    InvalidMessagesError,
    TurnError,
    UnknownAgentError,
)
from troupe.workflow.reply import Reply


@dataclass(frozen=True, slots=True)
class Role:
    """What all trajectories of a job share about one agent."""

    name: str
    policy: str
    tokenizer: ChatTokenizer
    sampling: Sampling
    system_prompt: str | None = None


@dataclass(slots=True)
class Turn:
    """The record of one turn; `reply` is None until it has been generated.

    `number` counts the turns of its agent, `position` those of the whole trajectory.
    """

    role: Role
    number: int
    position: int
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    reply: Reply | None = None
    generation: Generation | None = None


class Agent:
    """One agent in one trajectory."""

    def __init__(self, role: Role, agents: Agents) -> None:
        self._role = role
        self._agents = agents
        self._memory = ConversationMemory(role.tokenizer)
        self._begun = 0

    @property
    def name(self) -> str:
        """The agent's name in the job."""
        return self._role.name

    def chat(
        self, messages: str | Sequence[Mapping[str, str] | Reply], **sampling: Any
    ) -> Coroutine[Any, Any, Reply]:
        """The agent's reply to a conversation: a string (one user message) or messages.

        Messages that extend an earlier conversation of this agent reuse its token ids. `sampling`
        overrides fields of `Sampling`. Raises `InvalidMessagesError` and `ChatTemplateError` at
        the call, `TurnError` when awaited.
        """
        parsed = parse_messages(messages, self._role.system_prompt)
        try:
            prompt_ids = self._memory.prompt_ids(parsed)
        except ChatTemplateError as error:
            # The tokenizer does not know whose it is.
            raise ChatTemplateError(
                f"agent '{self.name}': {error.message}",
                field=f"policies.{self._role.policy}.model",
                value=error.value,
                remedy=error.remedy,
            ) from error
        return self._begin(parsed, prompt_ids, sampling)

    def generate(self, token_ids: Sequence[int], **sampling: Any) -> Coroutine[Any, Any, Reply]:
        """The agent's continuation of `token_ids`, which are passed on as they are."""
        try:
            ids = tuple(as_int(i) for i in token_ids)
        except TypeError as error:
            raise InvalidMessagesError(
                f"token_ids must be integers: {error}",
                field="token_ids",
                value=token_ids,
                remedy="Pass a list of ints; `chat` takes text.",
            ) from error
        if not ids:
            raise InvalidMessagesError(
                "generate() got no token ids", field="token_ids", remedy="Pass at least one id."
            )
        return self._begin((), ids, sampling)

    def _begin(
        self, messages: tuple[Message, ...], prompt_ids: tuple[int, ...], overrides: dict[str, Any]
    ) -> Coroutine[Any, Any, Reply]:
        role = self._role
        sampling = role.sampling.override(overrides) if overrides else role.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._agents.draw_seed(role.name, prompt_ids))
        turn = self._agents.begin(role, self._begun, messages, prompt_ids, sampling)
        self._begun += 1
        return self._finish(turn)

    async def _finish(self, turn: Turn) -> Reply:
        role = self._role
        generation = await self._agents.backend.generate(role.name, turn.prompt_ids, turn.sampling)
        ids = tuple(generation.token_ids)
        stopped = generation.finish_reason == "stop"
        reply = Reply(
            role.name,
            turn.number,
            role.tokenizer.text(ids, stopped=stopped),
            turn.prompt_ids,
            ids,
            tuple(generation.logprobs),
            generation.finish_reason,
        )
        if turn.messages:
            self._memory.remember(
                turn.messages, reply.text, turn.number, turn.prompt_ids, ids, stopped=stopped
            )
        turn.reply, turn.generation = reply, generation
        return reply


class Agents(Mapping[str, Agent]):
    """The agents of one trajectory by name.

    All sampling derives from `seed` and the prompts, so that neither timing nor the order in
    which concurrent branches end changes what is drawn.
    """

    def __init__(self, roles: Mapping[str, Role], backend: Backend, *, seed: int) -> None:
        self.backend = backend
        self._agents = {name: Agent(role, self) for name, role in roles.items()}
        self._seed = seed
        self._asked: dict[tuple[str, int], int] = {}
        self._turns: list[Turn] = []
        self._closed = False

    def __getitem__(self, name: str) -> Agent:
        try:
            return self._agents[name]
        except KeyError:
            known = ", ".join(sorted(self._agents))
            raise UnknownAgentError(
                f"the job has no agent '{name}'; known: {known}",
                field="agents",
                value=name,
                remedy=f"Declare it under `agents.{name}` in the job.",
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)

    @property
    def turns(self) -> list[Turn]:
        """Turns that have a reply, in the order in which they were asked for."""
        return [turn for turn in self._turns if turn.reply is not None]

    def close(self) -> list[Turn]:
        """End the trajectory: no turn begins or is recorded any more. Returns `turns`."""
        self._closed = True
        self._turns = self.turns
        return self._turns

    def begin(
        self,
        role: Role,
        number: int,
        messages: tuple[Message, ...],
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
    ) -> Turn:
        """Record a turn that is about to be generated (called by `Agent`)."""
        if self._closed:
            raise TurnError(
                f"'{role.name}' was asked for a turn after its trajectory had ended",
                kind="trajectory_ended",
                remedy="Await every branch before the workflow returns.",
            )
        turn = Turn(role, number, len(self._turns), messages, prompt_ids, sampling)
        self._turns.append(turn)
        return turn

    def draw_seed(self, agent: str, prompt_ids: tuple[int, ...]) -> int:
        """Seed of the next turn of `agent` with this prompt: equal prompts get different ones."""
        digest = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(prompt_ids)}q", *prompt_ids))
        occurrence = self._asked.get((agent, digest), 0)
        self._asked[agent, digest] = occurrence + 1
        drawn = xxhash.xxh3_64_intdigest(f"{self._seed}/{agent}/{digest}/{occurrence}".encode())
        return drawn & 0x7FFF_FFFF  # what every engine accepts
