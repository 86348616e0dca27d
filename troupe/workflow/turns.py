"""The record of a trajectory's turns: their numbers, prompts and seeds.

A `TrajectoryRecord` numbers the turns (`TurnRecord`) in the order of the calls and derives their
seeds, so that neither depends on which prompt is tokenised first or which reply is drawn first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from troupe.contracts import kinds
from troupe.contracts.payloads import PayloadKinds
from troupe.replies.formats import PARSERS, ReplyParser
from troupe.workflow import numbering
from troupe.workflow.backend import (
    ENDPOINT_OPTIONS,
    Backend,
    EndpointOptions,
    GeneratedTurn,
    Sampling,
)
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.errors import TurnError
from troupe.workflow.messages import Message, Reply
from troupe.workflow.numbering import Path, places
from troupe.workflow.token_ids import EMPTY, PromptIds, TokenIds


@dataclass(frozen=True, slots=True)
class Role:
    """One agent of a job: its policy, tokenizer and sampling, shared by all trajectories."""

    name: str
    policy: str
    tokenizer: ChatTokenizer
    sampling: Sampling
    system_prompt: str | None = None
    parser: ReplyParser = PARSERS["hermes"]
    """Parser for the model's syntax of tool calls and thoughts."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Default arguments of the chat template."""
    endpoint: EndpointOptions = ENDPOINT_OPTIONS
    """Defaults of `Agent.endpoint`."""
    context: int = 0
    """Maximum tokens of prompt and response in the policy's engines; 0: unknown."""
    payload_kinds: PayloadKinds = field(default_factory=dict)
    """Kinds of payloads that its messages may have."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call of `chat` or `generate`: its position in the workflow and its number of replies."""

    branch: Path
    """Path of the branch that made the call; see `numbering`."""
    path: Path
    """Path of the call itself; it orders the turns of a trajectory."""
    n: int | None
    """The `n` of the call; None: not given, so one reply was drawn."""


@dataclass(slots=True)
class TurnRecord:
    """The record of one turn; `reply` is None until it has been generated.

    `number` counts the turns of its agent, `position` all turns of the trajectory: in the order of
    the calls while the workflow runs, and after `settle` in an order independent of timing.
    """

    role: Role
    number: int
    position: int
    messages: tuple[Message, ...]
    sampling: Sampling
    """Sampling of the turn, with its own seed as soon as the prompt is known."""
    call: AgentCall
    prompt_ids: TokenIds = EMPTY
    """Empty until the prompt is tokenised."""
    sibling: int = 0
    """Index of the reply among the `n` of its call."""
    over: bool = False
    """Whether its call has ended, with a reply or an error. A turn that is not over when the
    workflow returns has not been awaited."""
    place: str = ""
    """Place of its call among the calls of its agent: `1` is the second call of the workflow
    itself, `2.0:1` the second call in the first branch of the third branch. It is equal in all
    trajectories of a query that branch in the same way."""
    reply: Reply | None = None
    generation: GeneratedTurn | None = None
    asked: int = 0
    """Logical time of the call, counted over all turns of the trajectory."""
    answered: int = 0
    """Logical time of the reply."""
    prefix_broken: bool = False
    """Whether the prompt's history differs from this agent's earlier prompts and replies; see
    `PromptIds`."""

    @property
    def siblings(self) -> int | None:
        """Number of replies that its call drew with `n=`; None: without `n`."""
        return self.call.n

    @property
    def path(self) -> Path:
        """Path of the turn; it orders the turns of a trajectory."""
        return (*self.call.path, self.sibling)

    @property
    def prompt_digest(self) -> int:
        """64-bit hash of the prompt."""
        return self.prompt_ids.digest


def settle(turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """Sort the turns of a trajectory by path, and set their `position`, `number` and `place`."""
    ordered = sorted(turns, key=lambda turn: turn.path)
    ordinals = places(turn.call.branch for turn in ordered)
    counted: dict[str, int] = {}
    # By agent and branch: ordinals of its calls. Siblings share an ordinal.
    calls: dict[tuple[str, Path], dict[Path, int]] = {}
    for position, turn in enumerate(ordered):
        name, call = turn.role.name, turn.call
        turn.position = position
        turn.number = counted.get(name, 0)
        counted[name] = turn.number + 1
        known = calls.setdefault((name, call.branch), {})
        at = str(known.setdefault(call.path, len(known)))
        branch = ".".join(map(str, ordinals[call.branch]))
        turn.place = f"{branch}:{at}" if branch else at
        if turn.reply is not None:
            turn.reply.turn = turn.number
    return ordered


class TrajectoryRecord:
    """The turns of one trajectory, in order, and the seeds for drawing them.

    All seeds derive from `seed`, the prompts and the branches, so that the drawn tokens depend
    neither on timing nor on the order in which concurrent branches end.
    """

    def __init__(self, backend: Backend, seed: int) -> None:
        self.backend = backend
        self._seed = seed
        self._root = numbering.Branch()
        self._ticks = 0
        self._asked: dict[tuple[numbering.Path, str, int], int] = {}
        self._counts: dict[str, int] = {}
        self.begun: list[TurnRecord] = []
        """All turns, in the order in which they were requested."""
        self._closed = False
        # Held while a call's prompt is tokenised: one after another, in the order of the calls.
        self._in_turn = asyncio.Lock()
        self._unread = 0
        # Turns whose call had not been awaited to its end when the record was closed.
        self.unawaited: list[TurnRecord] = []

    @property
    def turns(self) -> list[TurnRecord]:
        """Turns that have a reply, in the order in which they were requested."""
        return [turn for turn in self.begun if turn.reply is not None]

    def enter(self) -> None:
        """See `Agents.enter`."""
        numbering.enter(self._root)

    def close(self) -> list[TurnRecord]:
        """See `Agents.close`."""
        if not self._closed:
            self._closed = True
            self.unawaited = [turn for turn in self.begun if not turn.over]
            self.begun = [turn for turn in settle(self.begun) if turn.reply is not None]
        return self.begun

    def check_open(self, agent: str) -> None:
        """Raise `TurnError` if the trajectory has ended."""
        if self._closed:
            raise TurnError(
                f"'{agent}' was asked for a turn after the end of its trajectory",
                kind=kinds.TRAJECTORY_ENDED,
                remedy="Await every branch before the workflow returns.",
            )

    def begin(
        self,
        role: Role,
        messages: tuple[Message, ...],
        sampling: Sampling,
        n: int | None = None,
    ) -> list[TurnRecord]:
        """Record the turns of one call, before they are generated (called by `Agent`)."""
        self.check_open(role.name)
        branch = numbering.current(self._root)
        call = AgentCall(branch.path, branch.step(), n)
        turns = []
        for sibling in range(n or 1):
            number = self._counts.get(role.name, 0)
            self._counts[role.name] = number + 1
            position = len(self.begun) + sibling
            turns.append(
                TurnRecord(
                    role,
                    number,
                    position,
                    messages,
                    sampling,
                    call,
                    sibling=sibling,
                    asked=self.tick(),
                )
            )
        self.begun += turns
        return turns

    @property
    def tokenises(self) -> bool:
        """Whether the prompts of earlier calls are being tokenised."""
        return self._unread > 0

    def give_later(
        self, turns: Sequence[TurnRecord], tokenised: Callable[[], Awaitable[PromptIds]]
    ) -> asyncio.Task[None]:
        """Give `turns` their prompt and seeds as soon as the turns of all earlier calls have
        theirs."""

        async def give() -> None:
            async with self._in_turn:
                prompt = await tokenised()
                self.check_open(turns[0].role.name)
                self.give(turns, prompt)

        def ended(task: asyncio.Task[None]) -> None:
            self._unread -= 1
            if not task.cancelled():
                task.exception()  # raised to any caller that awaits the turns

        self._unread += 1
        with numbering.outside():
            task = asyncio.get_running_loop().create_task(give())
        task.add_done_callback(ended)
        return task

    async def in_turn(self, tokenised: Awaitable[PromptIds]) -> PromptIds:
        """Return a prompt that is not for a turn, tokenised after the prompts of earlier calls."""
        async with self._in_turn:
            return await tokenised

    def give(self, turns: Sequence[TurnRecord], prompt: PromptIds) -> None:
        """Give the turns of one call their prompt, and the seeds that follow from it."""
        for turn in turns:
            turn.prompt_ids, turn.prefix_broken = prompt
            seed = turn.sampling.seed
            if seed is None:
                seed = self._draw_seed(turn.call.branch, turn.role.name, prompt.ids)
            elif turn.sibling:
                seed = _draw(f"{seed}/{turn.sibling}")
            turn.sampling = replace(turn.sampling, seed=seed)

    def withdraw(self, reply: Reply) -> TurnRecord | None:
        """Remove a reply from its turn, and return the turn; None if there is none, or if the
        trajectory has ended."""
        turn = next((turn for turn in self.begun if turn.reply is reply), None)
        if turn is None or self._closed:
            return None
        turn.reply = turn.generation = None
        return turn

    def tick(self) -> int:
        """Return the next logical time, which orders the begins and ends of turns."""
        self._ticks += 1
        return self._ticks

    def draw_seed(self, agent: str, prompt_ids: Sequence[int]) -> int:
        """Draw the seed of the next turn of `agent` with this prompt; repeated prompts get
        different seeds."""
        path = numbering.current(self._root).path
        return self._draw_seed(path, agent, TokenIds.of(prompt_ids))

    def _draw_seed(self, path: Path, agent: str, prompt_ids: TokenIds) -> int:
        digest = prompt_ids.digest
        occurrence = self._asked.get((path, agent, digest), 0)
        self._asked[path, agent, digest] = occurrence + 1
        branch = "".join(f"/{step}" for step in path)
        return _draw(f"{self._seed}/{agent}/{digest}/{occurrence}{branch}")

    def mix_seed(self, given: int) -> int:
        """Return a seed derived from `given` and the trajectory's own: the same `given` yields the
        same seed within a trajectory, and different seeds in the trajectories of a group."""
        return _draw(f"{self._seed}/given/{given}")


def _draw(text: str) -> int:
    return (
        xxhash.xxh3_64_intdigest(text.encode()) & 0x7FFF_FFFF
    )  # the range that every engine accepts
