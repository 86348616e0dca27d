"""Policies without a model, for trying and testing a workflow.

A policy is any function, sync or async, from a `Prompt` to a text or to `Spoken` token ids. The
policies here are stateless: one object serves any number of trajectories at once.
"""

from __future__ import annotations

import inspect
import math
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from troupe.workflow.agent import Agent, Agents
from troupe.workflow.backend import Endpoint, EndpointOptions, GeneratedTurn, Sampling
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.errors import ContextOverflowError, TurnError, WorkflowError, shown
from troupe.workflow.messages import Message
from troupe.workflow.turns import TurnRecord

if TYPE_CHECKING:
    from troupe.endpoint.server import EndpointServer, TrajectoryEndpoints


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of a policy: one turn of one agent."""

    agent: str
    number: int
    """Number of earlier turns of this agent."""
    position: int
    """Number of earlier turns of all agents."""
    messages: tuple[Message, ...]
    """(role, content) of the conversation; empty where the workflow passed token ids."""
    ids: tuple[int, ...]
    sampling: Sampling
    tokenizer: ChatTokenizer
    random: random.Random
    """Seeded for this turn; by the prompt alone for greedy turns (temperature 0)."""

    @property
    def text(self) -> str:
        """The last message; without messages the text of the ids."""
        return self.messages[-1][1] if self.messages else self.tokenizer.text(self.ids)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A response as token ids, with the log-probability of each; default: 0."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    stopped: bool = True
    """Whether the policy ended the response itself; False: it is truncated."""


Policy = Callable[
    [Prompt], "str | Spoken | GeneratedTurn | Awaitable[str | Spoken | GeneratedTurn]"
]
"""A function that draws the response of a turn. An engine's `GeneratedTurn` is taken as it is."""


class RandomPolicy:
    """A policy that answers with random tokens of the vocabulary, or with one of `texts`."""

    def __init__(self, texts: Sequence[str] = (), *, longest: int = 16) -> None:
        """Create the policy. `longest`: length limit of a random response in tokens, in addition to
        `max_new_tokens`."""
        self._texts = tuple(texts)
        self._longest = longest

    def __call__(self, prompt: Prompt) -> str | Spoken:
        """Return one of the texts, each equally likely, or 1 to `longest` tokens, each equally
        likely."""
        if self._texts:
            return prompt.random.choice(self._texts)
        known = prompt.tokenizer.ordinary_ids
        length = prompt.random.randint(1, self._longest)
        ids = prompt.random.choices(known, k=length)
        return Spoken(ids, [-math.log(len(known))] * length)


class EchoPolicy:
    """A policy that repeats the last message of its prompt."""

    def __call__(self, prompt: Prompt) -> str:
        """Return the last message."""
        return prompt.text


class ScriptedPolicy:
    """A policy that answers with given texts, in the order in which turns begin."""

    def __init__(self, replies: Mapping[str, str | Sequence[str]] | str | Sequence[str]) -> None:
        """Take `replies`: texts by agent, or one list for all agents together. A single text
        instead of a list is repeated. Raises `WorkflowError` for anything else."""
        self._replies: dict[str | None, str | tuple[str, ...]] = {}
        given = replies if isinstance(replies, Mapping) else {None: replies}
        for agent, texts in given.items():
            if isinstance(texts, str):
                self._replies[agent] = texts
                continue
            if not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in texts):
                raise WorkflowError(
                    f"replies must be a text or a list of texts, not {shown(texts)}",
                    kind="bad_script",
                    field="replies" if agent is None else f"replies.{agent}",
                    value=texts,
                    remedy="Quote what YAML would read as a number.",
                )
            self._replies[agent] = tuple(texts)

    def __call__(self, prompt: Prompt) -> str:
        """Return the next text. Raises `TurnError` of kind `script_ended` after the last one."""
        shared = None in self._replies
        replies = self._replies.get(None if shared else prompt.agent, ())
        number = prompt.position if shared else prompt.number
        if isinstance(replies, str):
            return replies
        if number < len(replies):
            return replies[number]
        raise TurnError(
            f"the script has {len(replies)} replies"
            f"{'' if shared else f' of {prompt.agent}'}, and a further one was asked for",
            kind="script_ended",
            field="replies" if shared else f"replies.{prompt.agent}",
            remedy="Add replies, or give one text instead of a list to repeat it.",
        )


class PolicyBackend:
    """`troupe.workflow.Backend` of one trajectory over policies."""

    def __init__(
        self, policy: Policy | Mapping[str, Policy], contexts: Mapping[str, int] | None = None
    ) -> None:
        """Create the backend. `policy`: one for all agents, or by agent. `contexts`: context length
        in tokens by policy; unlimited for others."""
        self._policy = policy
        self._contexts = contexts or {}
        self.agents: Agents | None = None
        """The trajectory's agents; must be set before its first turn."""
        self._endpoints: tuple[EndpointServer, TrajectoryEndpoints] | None = None

    def endpoint(self, agent: Agent, options: EndpointOptions) -> Endpoint:
        """Return an OpenAI-compatible endpoint of `agent` on loopback, until `close`.

        Raises `WorkflowError` of kind `no_endpoint` if the libraries are missing.
        """
        if self._endpoints is None:
            missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
            if missing:
                raise WorkflowError(
                    f"an endpoint needs {' and '.join(missing)}",
                    kind="no_endpoint",
                    field="agents",
                    value=agent.name,
                    remedy="`pip install 'troupe-rl[rollout]'`, or install the two packages.",
                )
            # A heavy import, for the few workflows that use an endpoint.
            from troupe.endpoint.server import EndpointServer, TrajectoryEndpoints

            server = EndpointServer()
            self._endpoints = server, TrajectoryEndpoints(server)
        return self._endpoints[1].open(agent, options)

    async def close(self) -> None:
        """Stop serving endpoints. Repeatable."""
        if self._endpoints is not None:
            server, doors = self._endpoints
            self._endpoints = None
            doors.close()
            await server.stop()

    async def generate(
        self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> GeneratedTurn:
        """Return the response of the agent's policy, cut to `max_new_tokens` and to the rest of the
        context. Raises `TurnError`; `ContextOverflowError` when the prompt fills the context."""
        assert self.agents is not None
        # Every turn has its own `Sampling` object.
        turn = next(turn for turn in reversed(self.agents.begun) if turn.sampling is sampling)
        role = turn.role
        room = min(sampling.max_new_tokens, self._room(role.policy, len(prompt_ids)))
        answer = self._of(agent)(_prompt(turn))
        given = await answer if inspect.isawaitable(answer) else answer
        if isinstance(given, GeneratedTurn):
            return given
        spoken = Spoken(role.tokenizer.encode(given)) if isinstance(given, str) else given
        if not isinstance(spoken, Spoken):
            raise TurnError(
                f"the policy of '{agent}' returned {shown(given)}",
                kind="bad_policy",
                value=given,
                remedy="Return a str, or `Spoken` token ids.",
            )
        ids = list(spoken.ids)
        logprobs = [0.0] * len(ids) if spoken.logprobs is None else list(spoken.logprobs)
        stops = role.sampling.stop_token_ids
        stopped = spoken.stopped and bool(stops) and len(ids) < room
        if stopped:
            ids.append(stops[0])
            logprobs.append(0.0)
        return GeneratedTurn(ids[:room], logprobs[:room], (), "stop" if stopped else "length")

    def _room(self, policy: str, prompt_tokens: int) -> int:
        context = self._contexts.get(policy)
        if context is None:
            return sys.maxsize
        if prompt_tokens >= context:
            raise ContextOverflowError.of(policy, prompt_tokens, context)
        return context - prompt_tokens

    def _of(self, agent: str) -> Policy:
        if not isinstance(self._policy, Mapping):
            return self._policy
        try:
            return self._policy[agent]
        except KeyError:
            raise TurnError(
                f"no policy was given for '{agent}'",
                kind="no_policy",
                field="policy",
                value=agent,
                remedy="Give one for every agent, or a single one for all.",
            ) from None


def _prompt(turn: TurnRecord) -> Prompt:
    greedy = turn.sampling.temperature == 0
    seed = turn.prompt_ids.digest if greedy else turn.sampling.seed
    return Prompt(
        turn.role.name,
        turn.number,
        turn.position,
        turn.messages,
        tuple(turn.prompt_ids),
        turn.sampling,
        turn.role.tokenizer,
        random.Random(seed),
    )
