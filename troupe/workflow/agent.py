"""The agents of one trajectory, and the record of the turns that the workflow asks them for.

`Agents` holds an `Agent` per role; `Agent.chat` and `Agent.generate` begin turns. A
`TrajectoryRecord` numbers the turns (`TurnRecord`) and derives their seeds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index as as_int
from typing import Any, Final, Literal, overload

import xxhash

from troupe.outcomes import safe_text, utf8_text
from troupe.workflow import numbering
from troupe.workflow.backend import (
    ENDPOINT_OPTIONS,
    Backend,
    Endpoint,
    EndpointBackend,
    EndpointOptions,
    GeneratedTurn,
    Sampling,
    TokenIds,
    VersionSpan,
)
from troupe.workflow.conversation import ChatTokenizer, ConversationMemory, PromptIds
from troupe.workflow.errors import (
    ChatTemplateError,
    InvalidMessagesError,
    TurnError,
    UnknownAgentError,
    WorkflowError,
    shown,
)
from troupe.workflow.messages import (
    PARSERS,
    AnyMessage,
    Message,
    Rendering,
    Reply,
    ReplyParser,
    ToolCall,
    call_ids,
    parse_messages,
    parse_template_options,
    parse_tools,
    plain,
)
from troupe.workflow.numbering import Path, places


@dataclass(frozen=True, slots=True)
class Role:
    """One agent of a job: its policy, tokenizer and sampling, the same for all trajectories."""

    name: str
    policy: str
    tokenizer: ChatTokenizer
    sampling: Sampling
    system_prompt: str | None = None
    parser: ReplyParser = PARSERS["hermes"]
    """Syntax in which the model writes tool calls and thoughts."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template that a call does not set otherwise."""
    endpoint: EndpointOptions = ENDPOINT_OPTIONS
    """Defaults of `Agent.endpoint`."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call of `chat` or `generate`: its position in the workflow and its number of replies."""

    branch: Path
    """Path of the branch that made the call; see `numbering`."""
    path: Path
    """Path of the call itself; it orders the turns of a trajectory."""
    n: int | None
    """The `n` of the call; None: left out, so that one reply was drawn."""


@dataclass(slots=True)
class TurnRecord:
    """The record of one turn; `reply` is None until it has been generated.

    `number` counts the turns of its agent, `position` those of the whole trajectory: in the order
    of the calls while the workflow runs, and after `settle` in an order that does not depend on
    time.
    """

    role: Role
    number: int
    position: int
    messages: tuple[Message, ...]
    prompt_ids: TokenIds
    sampling: Sampling
    call: AgentCall
    sibling: int = 0
    """Index of the reply among the `n` of its call."""
    over: bool = False
    """Whether its call has ended, with a reply or an error. A turn that is not over when the
    workflow returns was never awaited."""
    place: str = ""
    """Its call among those of its agent: `1` is the second one of the workflow itself, `2.0:1` the
    second one in the first branch of the third branch. Equal in all trajectories of a query that
    branch in the same way."""
    reply: Reply | None = None
    generation: GeneratedTurn | None = None
    asked: int = 0
    """Logical time of the call, counted over all turns of the trajectory."""
    answered: int = 0
    """Logical time of the reply."""
    prefix_broken: bool = False
    """The prompt's history differs from what this agent was given and said; see `PromptIds`."""

    @property
    def siblings(self) -> int | None:
        """Number of replies that its call drew by `n=`; None: without `n`."""
        return self.call.n

    @property
    def path(self) -> Path:
        """Orders the turns of a trajectory."""
        return (*self.call.path, self.sibling)

    @property
    def prompt_digest(self) -> int:
        """64-bit hash of the prompt."""
        return self.prompt_ids.digest


def settle(turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """Sort the turns of a trajectory by path; sets their `position`, `number` and `place`."""
    ordered = sorted(turns, key=lambda turn: turn.path)
    ordinals = places(turn.call.branch for turn in ordered)
    counted: dict[str, int] = {}
    # By agent and branch: ordinals of its calls. Siblings share one.
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
    """The turns of one trajectory, in order, with the seeds that they are drawn with.

    All seeds derive from `seed`, the prompts and the branches, so that neither timing nor the
    order in which concurrent branches end changes what is drawn.
    """

    def __init__(self, backend: Backend, seed: int) -> None:
        self.backend = backend
        self._seed = seed
        self._root = numbering.Branch()
        self._ticks = 0
        self._asked: dict[tuple[numbering.Path, str, int], int] = {}
        self._counts: dict[str, int] = {}
        self.begun: list[TurnRecord] = []
        """All turns, in the order in which they were asked for."""
        self._closed = False
        # Turns whose call had not been awaited to its end when the record was closed.
        self.unawaited: list[TurnRecord] = []

    @property
    def turns(self) -> list[TurnRecord]:
        """Turns that have a reply, in the order in which they were asked for."""
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
                f"'{agent}' was asked for a turn after its trajectory had ended",
                kind="trajectory_ended",
                remedy="Await every branch before the workflow returns.",
            )

    def begin(
        self,
        role: Role,
        messages: tuple[Message, ...],
        prompt: PromptIds,
        sampling: Sampling,
        n: int | None = None,
    ) -> list[TurnRecord]:
        """Record the turns of one call, before they are generated (called by `Agent`)."""
        self.check_open(role.name)
        branch = numbering.current(self._root)
        call = AgentCall(branch.path, branch.step(), n)
        turns = []
        for sibling in range(n or 1):
            seed = sampling.seed
            if seed is None:
                seed = self.draw_seed(role.name, prompt.ids)
            elif sibling:
                seed = _draw(f"{seed}/{sibling}")
            number = self._counts.get(role.name, 0)
            self._counts[role.name] = number + 1
            turns.append(
                TurnRecord(
                    role,
                    number,
                    len(self.begun) + sibling,
                    messages,
                    prompt.ids,
                    replace(sampling, seed=seed),
                    call,
                    sibling,
                    asked=self.tick(),
                    prefix_broken=prompt.broken,
                )
            )
        self.begun += turns
        return turns

    def tick(self) -> int:
        """The next logical time: orders the begins and ends of turns."""
        self._ticks += 1
        return self._ticks

    def draw_seed(self, agent: str, prompt_ids: Sequence[int]) -> int:
        """Seed of the next turn of `agent` with this prompt; repeated prompts get different
        seeds."""
        digest = TokenIds.of(prompt_ids).digest
        path = numbering.current(self._root).path
        occurrence = self._asked.get((path, agent, digest), 0)
        self._asked[path, agent, digest] = occurrence + 1
        branch = "".join(f"/{step}" for step in path)
        return _draw(f"{self._seed}/{agent}/{digest}/{occurrence}{branch}")

    def mix_seed(self, given: int) -> int:
        """A seed from `given` and the trajectory's own: the same `given` makes the same seed
        within a trajectory and different seeds in the trajectories of a group."""
        return _draw(f"{self._seed}/given/{given}")


def _draw(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) & 0x7FFF_FFFF  # what every engine accepts


def with_stop_tokens(sampling: Sampling, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Stop tokens, and stop strings that are one token, at which the engine itself can end."""
    ids = dict.fromkeys(sampling.stop_token_ids)
    for text in sampling.stop_strings:
        spelled = tokenizer.encode(text)
        if len(spelled) == 1 and tokenizer.transcript(spelled) == text:
            ids[spelled[0]] = None
    return tuple(ids)


def cut_at(
    generation: GeneratedTurn, strings: Sequence[str], tokenizer: ChatTokenizer
) -> tuple[GeneratedTurn, str] | None:
    """The response cut at the first of `strings`, and its text before that; None: no stop
    string."""

    def has(tokens: int) -> bool:
        text = tokenizer.text(ids[:tokens])
        return any(string in text for string in strings)

    ids = generation.token_ids
    last = len(ids) - (generation.finish_reason == "stop")
    if not strings or not has(last):
        return None
    first = 1
    while first < last:
        middle = (first + last) // 2
        if has(middle):
            last = middle
        else:
            first = middle + 1
    text = tokenizer.text(ids[:last])
    kept = replace(
        generation,
        token_ids=ids[:last],
        logprobs=generation.logprobs[:last],
        versions=[
            VersionSpan(span.version, span.start, min(span.end, last))
            for span in generation.versions
            if span.start < last
        ],
        finish_reason="stop",
    )
    return kept, text[: first_of(strings, text)]


def first_of(strings: Sequence[str], text: str) -> int | None:
    """Offset of the first of `strings` in `text`; None: none of them occurs."""
    return min((at for at in map(text.find, strings) if at >= 0), default=None)


Messages = str | Sequence[Mapping[str, Any] | Reply]
"""Argument of `chat`: a string (one user message), or a list of messages and replies."""


Offered = Sequence[Mapping[str, Any]] | None
"""Tools as in OpenAI's requests: `{"type": "function", "function": {"name", "parameters"}}`."""


ToolChoice = Literal["auto", "none"]

# Longer responses are parsed in a thread, so that the event loop is not blocked.
_TOKENS_READ_AT_ONCE: Final = 8192
# Prompt tokens that are searched for a thought tag which the template has opened.
_LAST_IDS: Final = 16


class Agent:
    """One agent in one trajectory."""

    def __init__(self, role: Role, record: TrajectoryRecord) -> None:
        self.role = role
        """The agent's policy, tokenizer and sampling."""
        self._record = record
        self._memory = ConversationMemory(role.tokenizer)

    @property
    def name(self) -> str:
        """The agent's name in the job."""
        return self.role.name

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        n: None = None,
        tools: Offered = None,
        tool_choice: ToolChoice = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Coroutine[Any, Any, Reply]: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        n: int,
        tools: Offered = None,
        tool_choice: ToolChoice = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Coroutine[Any, Any, list[Reply]]: ...

    def chat(
        self,
        messages: Messages,
        *,
        n: int | None = None,
        tools: Offered = None,
        tool_choice: ToolChoice = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Coroutine[Any, Any, Reply | list[Reply]]:
        """The agent's reply to a conversation: a string (one user message) or messages.

        Messages that extend an earlier conversation of this agent reuse its token ids. With `n` it
        is a list of n independent replies, drawn concurrently, each with a seed of its own. `tools`
        are offered to the model as OpenAI describes them; a reply's `tool_calls` are for the
        workflow to make, and to answer with messages of role `tool`; with `tool_choice="none"` they
        are shown and calls stay text. `chat_template_kwargs` are further arguments of the chat
        template, for example {"enable_thinking": False}. `sampling` overrides fields of `Sampling`.
        Raises `InvalidMessagesError` and `ChatTemplateError` at the call, `TurnError` when awaited:
        of n replies all or none come.
        """
        reading, prompt = self._read(messages, tools, tool_choice, chat_template_kwargs)
        return self._begin(reading, prompt, n, sampling)

    def count_tokens(
        self,
        messages: Messages,
        *,
        tools: Offered = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """How many tokens the prompt of `chat` with these arguments has. Raises what it raises."""
        self._record.check_open(self.name)
        return len(self._read(messages, tools, "auto", chat_template_kwargs)[1].ids)

    def _read(
        self,
        messages: Messages,
        tools: Offered,
        tool_choice: ToolChoice,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[_Reading, PromptIds]:
        parsed = parse_messages(messages, self.role.system_prompt)
        offered = parse_tools(tools)
        options = parse_template_options(chat_template_kwargs, self.role.template_options)
        rendering = Rendering(offered.text, options)
        if tool_choice not in ("auto", "none"):
            raise InvalidMessagesError(
                f"tool_choice cannot be {shown(tool_choice)}",
                field="tool_choice",
                value=tool_choice,
                remedy='Needs "auto" or "none".',
            )
        reading = _Reading(parsed, rendering, offered.given if tool_choice == "auto" else ())
        try:
            prompt = self._memory.prompt(parsed, rendering)
        except ChatTemplateError as error:
            # The tokenizer does not know its agent and policy.
            raise ChatTemplateError(
                f"agent '{self.name}': {error.message}",
                field=f"policies.{self.role.policy}.model",
                value=error.value,
                remedy=error.remedy,
            ) from error
        return reading, prompt

    @overload
    def generate(
        self, token_ids: Sequence[int], *, n: None = None, **sampling: Any
    ) -> Coroutine[Any, Any, Reply]: ...

    @overload
    def generate(
        self, token_ids: Sequence[int], *, n: int, **sampling: Any
    ) -> Coroutine[Any, Any, list[Reply]]: ...

    def generate(
        self, token_ids: Sequence[int], *, n: int | None = None, **sampling: Any
    ) -> Coroutine[Any, Any, Reply | list[Reply]]:
        """The agent's continuation of `token_ids`, which are sent to the engine unchanged.

        `n` and `sampling` are as in `chat`.
        """
        try:
            given = token_ids if isinstance(token_ids, TokenIds) else [as_int(i) for i in token_ids]
        except TypeError as error:
            raise InvalidMessagesError(
                f"token_ids must be integers: {error}",
                field="token_ids",
                value=token_ids,
                remedy="Pass a list of ints; `chat` takes text.",
            ) from error
        if (outside := next((i for i in given if not 0 <= i < 2**31), None)) is not None:
            raise InvalidMessagesError(
                "token_ids must be ids of tokens",
                field="token_ids",
                value=outside,
                remedy="Use the policy's own tokenizer.",
            )
        if not given:
            raise InvalidMessagesError(
                "generate() got no token ids", field="token_ids", remedy="Pass at least one id."
            )
        return self._begin(None, PromptIds(TokenIds.of(given), broken=False), n, sampling)

    def endpoint(
        self, *, lenient: bool | None = None, sampling: Literal["job", "client"] | None = None
    ) -> Endpoint:
        """An OpenAI-compatible endpoint whose client speaks as this agent until the trajectory
        ends.

        What only constrained decoding could enforce (`tool_choice: required`, a JSON schema) is
        refused; with `lenient` it is put into the prompt, without a guarantee. `sampling`: whether
        the "job" or each request of the "client" decides temperature, top_p and top_k. Default:
        `agents.X.endpoint` of the job. Raises `WorkflowError` of kind `no_endpoint` where none is
        served, and `TurnError` when the trajectory has ended.
        """
        own = self.role.endpoint
        options = EndpointOptions(
            own.lenient if lenient is None else bool(lenient), sampling or own.sampling
        )
        if options.sampling not in ("job", "client"):
            raise InvalidMessagesError(
                f"sampling cannot be {shown(sampling)}",
                field="sampling",
                value=sampling,
                remedy='Needs "job" or "client".',
            )
        self._record.check_open(self.name)
        backend = self._record.backend
        if not isinstance(backend, EndpointBackend):
            raise WorkflowError(
                "there is no endpoint here: what answers is neither an engine nor a script",
                kind="no_endpoint",
                field="agents",
                value=self.name,
                remedy="Run it in a job (`troupe train`), or try it (`troupe workflow try`).",
            )
        return backend.endpoint(self, options)

    def draw_seed(self, purpose: str, prompt_ids: Sequence[int]) -> int:
        """A seed for a random choice of the workflow, as reproducible as those of its turns."""
        return self._record.draw_seed(f"{self.name}/{purpose}", prompt_ids)

    def mix_seed(self, given: int) -> int:
        """A seed from a client's seed and the trajectory's own. With the client's alone all
        trajectories of a group would be equal, and so without a learning signal."""
        return self._record.mix_seed(given)

    def _begin(
        self, reading: _Reading | None, prompt: PromptIds, n: int | None, overrides: dict[str, Any]
    ) -> Coroutine[Any, Any, Reply | list[Reply]]:
        role = self.role
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise InvalidMessagesError(
                "n must be a whole number of replies, at least 1",
                field="n",
                value=n,
                remedy="Leave it out for one reply that is not in a list.",
            )
        sampling = role.sampling.override(overrides) if overrides else role.sampling
        if sampling.stop_strings:
            stops = with_stop_tokens(sampling, role.tokenizer)
            sampling = replace(sampling, stop_token_ids=stops)
        messages = tuple(plain(message) for message in reading.messages) if reading else ()
        turns = self._record.begin(role, messages, prompt, sampling, n)
        finishing = [self._finish(turn, reading) for turn in turns]
        return finishing[0] if n is None else self._finish_all(turns, finishing)

    async def _finish_all(
        self, turns: Sequence[TurnRecord], finishing: Sequence[Coroutine[Any, Any, Reply]]
    ) -> list[Reply]:
        try:
            with numbering.outside():
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one) for one in finishing]
            replies = tuple(task.result() for task in tasks)
        except BaseException as error:
            for turn in turns:  # the caller gets an error instead of these replies
                turn.reply = turn.generation = None
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        for reply in replies:
            reply.siblings = replies
        return list(replies)

    async def _finish(self, turn: TurnRecord, reading: _Reading | None) -> Reply:
        try:
            return await self._answer(turn, reading)
        finally:
            turn.over = True

    async def _answer(self, turn: TurnRecord, reading: _Reading | None) -> Reply:
        role = self.role
        with numbering.outside():
            generation = await self._record.backend.generate(
                role.name, turn.prompt_ids, turn.sampling
            )
            if len(generation.token_ids) > _TOKENS_READ_AT_ONCE:
                parsed = await asyncio.to_thread(_parse, generation, role, turn, reading)
            else:
                parsed = _parse(generation, role, turn, reading)
        generation = parsed.generation
        names = call_ids(len(parsed.calls), (*turn.path, turn.prompt_digest))
        reply = Reply(
            role.name,
            turn.number,
            parsed.text,
            turn.prompt_ids,
            generation.token_ids,
            generation.logprobs,
            generation.finish_reason,
            parsed.content,
            # JSON escapes of a model may be half of a surrogate pair.
            tuple(
                ToolCall(name, *map(utf8_text, call))
                for name, call in zip(names, parsed.calls, strict=True)
            ),
            parsed.thoughts,
        )
        if reading is not None:
            self._memory.remember(
                reading.messages,
                reply.text,
                turn.path,
                turn.prompt_ids,
                reply.response,
                stopped=parsed.stopped,
                rendering=reading.rendering,
                content=reply.content,
                calls=reply.tool_calls,
            )
        # Both last as long as the trajectory: with the same objects.
        turn.reply = reply
        turn.generation = replace(
            generation, token_ids=reply.response, logprobs=reply.response_logprobs
        )
        turn.answered = self._record.tick()
        return reply


@dataclass(frozen=True, slots=True)
class _Reading:
    """The conversation that a reply continues, as needed to parse the reply."""

    messages: tuple[AnyMessage, ...]
    rendering: Rendering
    tools: Sequence[Mapping[str, Any]]
    """Tools whose calls are parsed; calls of others stay text."""


@dataclass(frozen=True, slots=True)
class _ParsedTurn:
    """A response as text, tool calls and thoughts."""

    generation: GeneratedTurn
    """Cut at the first stop string."""
    stopped: bool
    """Whether the last token is a stop token, which is not part of the text."""
    text: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    thoughts: str = ""


def _parse(
    generation: GeneratedTurn, role: Role, turn: TurnRecord, reading: _Reading | None
) -> _ParsedTurn:
    """Decode a response; with `reading` also split it into content, tool calls and thoughts."""
    tokenizer, strings = role.tokenizer, turn.sampling.stop_strings
    cut = cut_at(generation, strings, tokenizer)
    stopped = cut is None and generation.finish_reason == "stop"
    if cut is not None:
        generation = cut[0]
    ids = generation.token_ids[: len(generation.token_ids) - stopped]
    text, transcript = tokenizer.text_and_transcript(ids)
    same = text is transcript
    text = utf8_text(text if cut is None else cut[1])
    if reading is None:
        return _ParsedTurn(generation, stopped, text, text)
    parse = role.parser
    thinking = parse.opens_thought(tokenizer.transcript(turn.prompt_ids[-_LAST_IDS:]))
    # Tags may be special tokens, which `text` lacks; without such tags `text` is parsed.
    if cut is not None:
        transcript = transcript[: first_of(strings, transcript)]
    transcript = text if same else utf8_text(transcript)
    reply = parse(transcript, reading.tools, thinking=thinking)
    if reply == (transcript, (), ""):
        return _ParsedTurn(generation, stopped, text, text)
    tags = (tag for pair in parse.think_tags for tag in pair)
    if not reply.calls and all(text.count(tag) == transcript.count(tag) for tag in tags):
        reply = parse(text, thinking=thinking)
    return _ParsedTurn(generation, stopped, text, reply.content, reply.calls, reply.thoughts)


# Metric of a trajectory: number of turns that the workflow began and did not await.
UNAWAITED: Final = "unawaited_turns"


class Agents(Mapping[str, Agent]):
    """The agents of one trajectory by name."""

    def __init__(self, roles: Mapping[str, Role], backend: Backend, *, seed: int) -> None:
        # A record apart from this mapping avoids a reference cycle, which would keep the texts of
        # the trajectory until the garbage collector runs.
        self._record = TrajectoryRecord(backend, seed)
        self._agents = {name: Agent(role, self._record) for name, role in roles.items()}

    def __getitem__(self, name: str) -> Agent:
        try:
            return self._agents[name]
        except KeyError:
            known, name = ", ".join(sorted(self._agents)), safe_text(name, 120)
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
    def backend(self) -> Backend:
        """Where turns are generated."""
        return self._record.backend

    @property
    def turns(self) -> list[TurnRecord]:
        """Turns that have a reply, in the order in which they were asked for."""
        return self._record.turns

    @property
    def begun(self) -> Sequence[TurnRecord]:
        """All turns, in the order in which they were asked for."""
        return self._record.begun

    def enter(self) -> None:
        """Declare that the workflow runs in the current task: tasks that it creates are branches.

        Without this call the turns of concurrent tasks are numbered by time.
        """
        self._record.enter()

    @property
    def unawaited(self) -> Counter[str]:
        """By agent: number of turns that had been begun and not awaited at `close`."""
        return Counter(turn.role.name for turn in self._record.unawaited)

    @property
    def unawaited_metric(self) -> dict[str, float]:
        """The number of unawaited turns as a metric of the trajectory; empty for 0."""
        count = len(self._record.unawaited)
        return {UNAWAITED: float(count)} if count else {}

    def close(self) -> list[TurnRecord]:
        """End the trajectory: no further turn begins or is recorded.

        Returns `turns`, in an order and with numbers that do not depend on time.
        """
        return self._record.close()
