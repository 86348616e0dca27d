"""The record of one turn, and what all trajectories of a job share about one agent."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from troupe.workflow.backend import ENDPOINT_OPTIONS, EndpointOptions, Generation, Sampling
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.messages import Message
from troupe.workflow.numbering import Path, places
from troupe.workflow.reply import Reply


@dataclass(frozen=True, slots=True)
class Role:
    """What all trajectories of a job share about one agent."""

    name: str
    policy: str
    tokenizer: ChatTokenizer
    sampling: Sampling
    system_prompt: str | None = None
    tool_parser: str = "hermes"
    """How its model writes calls of tools (`toolcalls.PARSERS`)."""
    endpoint: EndpointOptions = ENDPOINT_OPTIONS
    """What its endpoint allows where the workflow does not say."""


@dataclass(frozen=True, slots=True)
class Call:
    """One `chat` or `generate`: where in the workflow it stands, and how many replies it drew."""

    branch: Path
    """Path of the branch that it was called in; see `numbering`."""
    path: Path
    n: int | None
    """None: it drew one reply and was not asked for branches."""


@dataclass(slots=True)
class Turn:
    """The record of one turn; `reply` is None until it has been generated.

    `number` counts the turns of its agent, `position` those of the whole trajectory. While the
    workflow runs they are in the order of the calls; when it has ended `settle` has put them into
    an order that does not depend on time.
    """

    role: Role
    number: int
    position: int
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    call: Call
    sibling: int = 0
    """Which reply of its call."""
    over: bool = False
    """Whether its call has ended, whichever way. What is not over when the workflow returns, nobody
    awaited."""
    place: str = ""
    """Its call among those of its agent: `1` is the second one of the workflow itself, `2.0:1` the
    second one in the first branch of the third branch. The same in every trajectory of a query
    that branches alike."""
    reply: Reply | None = None
    generation: Generation | None = None
    asked: int = 0
    """When it was asked for, and answered: counted over all turns of the trajectory."""
    answered: int = 0
    prefix_broken: bool = False
    """The prompt's history is not what this agent was given and said; see `memory.Prompt`."""

    @property
    def siblings(self) -> int | None:
        """How many replies were drawn with it by `n=`; None when it was drawn by itself."""
        return self.call.n

    @property
    def path(self) -> Path:
        """Orders the turns of a trajectory."""
        return (*self.call.path, self.sibling)

    @property
    def prompt_digest(self) -> int:
        """64 bits of the prompt."""
        return digest_of(self.prompt_ids)


def settle(turns: Sequence[Turn]) -> list[Turn]:
    """The turns of a trajectory in the order of their paths, numbered and placed by it."""
    ordered = sorted(turns, key=lambda turn: turn.path)
    ordinals = places(turn.call.branch for turn in ordered)
    counted: dict[str, int] = {}
    # Calls of an agent in a branch: siblings share theirs.
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


def digest_of(prompt_ids: tuple[int, ...]) -> int:
    """64 bits that stand for a prompt."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(prompt_ids)}q", *prompt_ids))
