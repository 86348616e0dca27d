"""The agents of one trajectory: `Agents` holds an `Agent` per role; `Agent.chat` and
`Agent.generate` begin turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index as as_int
from typing import Any, Final, Literal, Protocol, overload, runtime_checkable

from troupe.contracts.payloads import Marks
from troupe.outcomes import safe_text, utf8_text
from troupe.workflow import numbering
from troupe.workflow.backend import (
    Backend,
    Endpoint,
    EndpointOptions,
    GeneratedTurn,
    Sampling,
    cut_at,
    first_of,
)
from troupe.workflow.conversation import (
    ChatTokenizer,
    ConversationMemory,
    Draft,
    TextDraft,
)
from troupe.workflow.errors import (
    ChatTemplateError,
    ContextOverflowError,
    InvalidMessagesError,
    TooManyTokensError,
    UnknownAgentError,
    WorkflowError,
    shown,
)
from troupe.workflow.messages import (
    AnyMessage,
    PayloadReader,
    Rendering,
    Reply,
    ToolCall,
    call_ids,
    parse_messages,
    parse_template_options,
    parse_tools,
    plain,
)
from troupe.workflow.token_ids import PromptIds, TokenIds
from troupe.workflow.turns import Role, TrajectoryRecord, TurnRecord


def with_stop_tokens(sampling: Sampling, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Return the stop tokens, and the stop strings that are one token, at which the engine itself
    can end."""
    ids = dict.fromkeys(sampling.stop_token_ids)
    for text in sampling.stop_strings:
        if len(text) > _LONGEST_TOKEN:
            continue
        spelled = tokenizer.encode(text)
        if len(spelled) == 1 and tokenizer.transcript(spelled) == text:
            ids[spelled[0]] = None
    return tuple(ids)


Messages = str | Sequence[Mapping[str, Any] | Reply]
"""Argument of `chat`: a string (one user message), or a list of messages and replies."""


Offered = Sequence[Mapping[str, Any]] | None
"""Tools as in OpenAI's requests: `{"type": "function", "function": {"name", "parameters"}}`."""


ToolChoice = Literal["auto", "none"]

# Longer responses are parsed in a thread, to keep the event loop free.
_TOKENS_READ_AT_ONCE: Final = 8192
# Characters of the longest token that a vocabulary may have.
_LONGEST_TOKEN: Final = 1024
# Last prompt tokens, which are searched for a thought tag opened by the template.
_LAST_IDS: Final = 16


@runtime_checkable
class EndpointBackend(Protocol):
    """A backend that also serves OpenAI's API for its agents."""

    def endpoint(self, agent: Agent, options: EndpointOptions) -> Endpoint:
        """Open the endpoint of `agent`, or return the open one."""
        ...


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

    @property
    def trajectory(self) -> TrajectoryRecord:
        """The record of its trajectory, shared by all agents of the trajectory."""
        return self._record

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
        """Return the agent's reply to a conversation: a string (one user message) or messages.

        Messages that extend an earlier conversation of this agent reuse its token ids. With `n`,
        return a list of n independent replies, drawn concurrently, each with its own seed. `tools`
        are offered to the model in OpenAI's format; the workflow makes the calls in a reply's
        `tool_calls` and answers them with messages of role `tool`. With `tool_choice="none"` the
        tools are shown, but calls stay text. `chat_template_kwargs` are further arguments of the
        chat template, for example {"enable_thinking": False}. `sampling` overrides fields of
        `Sampling`. Raises `InvalidMessagesError` at the call, and `TurnError` when awaited: either
        all n replies arrive or none. `ChatTemplateError` is raised at the call too, unless a long
        prompt is still being tokenised.
        """
        read = self.read(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.reply_to(read, n, **sampling)

    @overload
    def reply_to(
        self, read: ReadConversation, n: int, **sampling: Any
    ) -> Coroutine[Any, Any, list[Reply]]: ...

    @overload
    def reply_to(
        self, read: ReadConversation, n: int | None, **sampling: Any
    ) -> Coroutine[Any, Any, Reply | list[Reply]]: ...

    def reply_to(
        self, read: ReadConversation, n: int | None, **sampling: Any
    ) -> Coroutine[Any, Any, Reply | list[Reply]]:
        """Do the second half of `chat`: return the reply to a conversation that has been read."""
        draft = self._memory.draft(read.messages, read.rendering, read.marks)
        return self._begin(read, self._tokenised_if_short(draft), n, sampling)

    async def count_tokens(self, read: ReadConversation) -> int:
        """Count the prompt tokens of a reply to a conversation.

        Raises what `chat` raises; `ContextOverflowError` is raised only for a prompt that is far
        too long to be counted.
        """
        self._record.check_open(self.name)
        draft = self._memory.draft(read.messages, read.rendering, read.marks)
        prompt = self._tokenised_if_short(draft)
        if isinstance(prompt, Draft):
            prompt = await self._record.in_turn(self._tokenised(prompt))
        return len(prompt.ids)

    def read(
        self,
        messages: Messages,
        *,
        tools: Offered = None,
        tool_choice: ToolChoice = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ReadConversation:
        """Do the first half of `chat`, which checks its arguments; in any thread. Raises
        `InvalidMessagesError`, and `ContextOverflowError` for more messages or tools than the
        context has tokens, since each takes at least one."""
        context = self.role.context
        for given in (messages, tools):
            if context and isinstance(given, list | tuple) and len(given) > context:
                many = f"at least {len(given)}"
                raise ContextOverflowError.of(self.role.policy, many, context)
        payloads = PayloadReader(self.role.payload_kinds) if self.role.payload_kinds else None
        parsed = parse_messages(messages, self.role.system_prompt, payloads)
        offered = parse_tools(tools)
        options = parse_template_options(chat_template_kwargs, self.role.template_options)
        rendering = Rendering(offered.text, options)
        if tool_choice not in ("auto", "none"):
            raise InvalidMessagesError(
                f"tool_choice cannot be {shown(tool_choice)}",
                field="tool_choice",
                value=tool_choice,
                remedy='Use "auto" or "none".',
            )
        parsed_tools = offered.given if tool_choice == "auto" else ()
        marks = None if payloads is None else payloads.marks
        return ReadConversation(parsed, rendering, parsed_tools, marks)

    def _tokenised_if_short(self, draft: Draft) -> PromptIds | Draft:
        """Return the prompt of a short draft. Raises `ChatTemplateError` and
        `ContextOverflowError`."""
        if draft.is_long:
            return draft
        try:
            return draft.prompt(self.role.context)
        except (ChatTemplateError, TooManyTokensError) as error:
            raise self._refusal(error) from error

    async def _tokenised(self, draft: PromptIds | Draft) -> PromptIds:
        """Return the prompt, also of a long draft. Raises the errors of `_tokenised_if_short`."""
        if isinstance(draft, PromptIds):
            return draft
        try:
            return await draft.tokenised(self.role.context)
        except (ChatTemplateError, TooManyTokensError) as error:
            raise self._refusal(error) from error

    def _refusal(self, error: ChatTemplateError | TooManyTokensError) -> WorkflowError:
        """Return the error of a prompt with the agent and policy, which the tokenizer does not
        know."""
        policy = self.role.policy
        if isinstance(error, TooManyTokensError):
            return ContextOverflowError.of(policy, f"more than {error.most}", error.most)
        return ChatTemplateError(
            f"agent '{self.name}': {error.message}",
            field=f"policies.{policy}.model",
            value=error.value,
            remedy=error.remedy,
        )

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
        """Return the agent's continuation of `token_ids`, which are sent to the engine unchanged.

        `n` and `sampling` are as in `chat`. Raises `InvalidMessagesError` and
        `ContextOverflowError` at the call.
        """
        return self._begin(None, self._given(token_ids), n, sampling)

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        n: int,
        *,
        add_special_tokens: bool = True,
        **sampling: Any,
    ) -> Coroutine[Any, Any, list[Reply]]:
        """Return `n` continuations of each prompt (a plain text or token ids) in the order of the
        prompts: all or none. `add_special_tokens`: texts begin with the tokens that the tokenizer
        adds to a sequence. Raises the errors of `generate`."""
        # All checks come first, so that no call has begun when one fails.
        total = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        given = [
            self._tokenised_if_short(
                TextDraft(self.role.tokenizer, prompt, total, add_special_tokens=add_special_tokens)
            )
            if isinstance(prompt, str)
            else self._given(prompt)
            for prompt in prompts
        ]
        before = len(self._record.begun)
        calls = [self._begin(None, one, n, sampling) for one in given]
        return self._all_of(calls, self._record.begun[before:])

    async def _all_of(
        self, calls: Sequence[Coroutine[Any, Any, list[Reply]]], turns: Sequence[TurnRecord]
    ) -> list[Reply]:
        try:
            with numbering.outside():
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one) for one in calls]
        except BaseException as error:
            self._give_up(turns)
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return [reply for task in tasks for reply in task.result()]

    def _given(self, token_ids: Sequence[int]) -> PromptIds:
        context = self.role.context
        if context and len(token_ids) >= context:
            raise ContextOverflowError.of(self.role.policy, len(token_ids), context)
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
        return PromptIds(TokenIds.of(given), broken=False)

    def endpoint(
        self, *, lenient: bool | None = None, sampling: Literal["job", "client"] | None = None
    ) -> Endpoint:
        """Return an OpenAI-compatible endpoint whose client speaks as this agent until the
        trajectory ends.

        Requirements that only constrained decoding could enforce (`tool_choice: required`, a JSON
        schema) are refused; with `lenient` they are put into the prompt, without a guarantee.
        `sampling`: whether the "job" or each request of the "client" decides temperature, top_p and
        top_k. Default: `agents.X.endpoint` of the job. Raises `WorkflowError` of kind `no_endpoint`
        if no endpoint is served, and `TurnError` if the trajectory has ended.
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
                remedy='Use "job" or "client".',
            )
        self._record.check_open(self.name)
        backend = self._record.backend
        if not isinstance(backend, EndpointBackend):
            raise WorkflowError(
                "there is no endpoint here: the backend is neither an engine nor a script",
                kind="no_endpoint",
                field="agents",
                value=self.name,
                remedy="Run it in a job (`troupe train`), or try it (`troupe workflow try`).",
            )
        return backend.endpoint(self, options)

    def draw_seed(self, purpose: str, prompt_ids: Sequence[int]) -> int:
        """Return a seed for a random choice of the workflow, as reproducible as the seeds of its
        turns."""
        return self._record.draw_seed(f"{self.name}/{purpose}", prompt_ids)

    def mix_seed(self, given: int) -> int:
        """Return a seed derived from a client's seed and the trajectory's own. With the client's
        seed alone, all trajectories of a group would be equal and give no learning signal."""
        return self._record.mix_seed(given)

    def withdraw(self, replies: Sequence[Reply]) -> None:
        """Withdraw undelivered replies, as if their calls had failed. Has no effect after the end
        of the trajectory."""
        for reply in replies:
            if (turn := self._record.withdraw(reply)) is not None:
                self._memory.forget(turn.path)

    @overload
    def _begin(
        self,
        reading: ReadConversation | None,
        prompt: PromptIds | Draft,
        n: int,
        overrides: dict[str, Any],
    ) -> Coroutine[Any, Any, list[Reply]]: ...

    @overload
    def _begin(
        self,
        reading: ReadConversation | None,
        prompt: PromptIds | Draft,
        n: int | None,
        overrides: dict[str, Any],
    ) -> Coroutine[Any, Any, Reply | list[Reply]]: ...

    def _begin(
        self,
        reading: ReadConversation | None,
        prompt: PromptIds | Draft,
        n: int | None,
        overrides: dict[str, Any],
    ) -> Coroutine[Any, Any, Reply | list[Reply]]:
        role, record = self.role, self._record
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise InvalidMessagesError(
                "n must be a positive whole number of replies",
                field="n",
                value=n,
                remedy="Leave it out to get one reply instead of a list.",
            )
        sampling = role.sampling.override(overrides) if overrides else role.sampling
        if sampling.stop_strings:
            stops = with_stop_tokens(sampling, role.tokenizer)
            sampling = replace(sampling, stop_token_ids=stops)
        messages = tuple(plain(message) for message in reading.messages) if reading else ()
        turns = record.begin(role, messages, sampling, n)
        given = None
        if isinstance(prompt, Draft) or record.tokenises:
            given = record.give_later(turns, partial(self._tokenised, prompt))
        else:
            record.give(turns, prompt)
        finishing = [self._finish(turn, reading, given) for turn in turns]
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
            self._give_up(turns)
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        for reply in replies:
            reply.siblings = replies
        return list(replies)

    def _give_up(self, turns: Sequence[TurnRecord]) -> None:
        """End the turns of a call whose caller gets an error instead of the replies."""
        for turn in turns:
            turn.over = True  # a task cancelled before its first step cannot set this itself
        self.withdraw([turn.reply for turn in turns if turn.reply is not None])

    async def _finish(
        self, turn: TurnRecord, reading: ReadConversation | None, given: asyncio.Task[None] | None
    ) -> Reply:
        try:
            if given is not None:
                await given
            return await self._answer(turn, reading)
        finally:
            turn.over = True

    async def _answer(self, turn: TurnRecord, reading: ReadConversation | None) -> Reply:
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
            # JSON escapes written by a model may be half a surrogate pair.
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
        # Both live as long as the trajectory, so they share objects.
        turn.reply = reply
        turn.generation = replace(
            generation, token_ids=reply.response, logprobs=reply.response_logprobs
        )
        turn.answered = self._record.tick()
        return reply


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """The conversation that a reply continues, as needed to parse the reply."""

    messages: tuple[AnyMessage, ...]
    rendering: Rendering
    tools: Sequence[Mapping[str, Any]]
    """Tools whose calls are parsed; other calls stay text."""
    marks: Marks | None = None
    """Payloads of the messages."""


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
    generation: GeneratedTurn, role: Role, turn: TurnRecord, reading: ReadConversation | None
) -> _ParsedTurn:
    """Decode a response; with `reading` also split it into content, tool calls and thoughts."""
    tokenizer, strings = role.tokenizer, turn.sampling.stop_strings
    cut = cut_at(generation, strings, tokenizer.text)
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


# Metric of a trajectory: number of turns that the workflow began but did not await.
UNAWAITED: Final = "unawaited_turns"


class Agents(Mapping[str, Agent]):
    """The agents of one trajectory by name."""

    def __init__(self, roles: Mapping[str, Role], backend: Backend, *, seed: int) -> None:
        # A record separate from this mapping avoids a reference cycle, which would keep the
        # trajectory's texts until the garbage collector runs.
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
        """The backend that generates the turns."""
        return self._record.backend

    @property
    def turns(self) -> list[TurnRecord]:
        """Turns that have a reply, in the order in which they were requested."""
        return self._record.turns

    @property
    def begun(self) -> Sequence[TurnRecord]:
        """All turns, in the order in which they were requested."""
        return self._record.begun

    def enter(self) -> None:
        """Declare that the workflow runs in the current task: tasks that it creates are branches.

        Without this call the turns of concurrent tasks are numbered by time.
        """
        self._record.enter()

    @property
    def unawaited(self) -> Counter[str]:
        """By agent, the number of turns that had begun but not been awaited at `close`."""
        return Counter(turn.role.name for turn in self._record.unawaited)

    @property
    def unawaited_metric(self) -> dict[str, float]:
        """The number of unawaited turns as a metric of the trajectory; empty for 0."""
        count = len(self._record.unawaited)
        return {UNAWAITED: float(count)} if count else {}

    def close(self) -> list[TurnRecord]:
        """End the trajectory: no further turn begins or is recorded.

        Return `turns`, in an order and with numbers that do not depend on timing.
        """
        return self._record.close()
