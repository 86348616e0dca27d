"""One agent of one trajectory: what a workflow asks for replies."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index as as_int
from typing import Any, Final, Literal, overload

from troupe.outcomes import utf8_text
from troupe.workflow import numbering
from troupe.workflow.backend import Endpoint, EndpointBackend, EndpointOptions, Generation
from troupe.workflow.errors import (
    ChatTemplateError,
    InvalidMessagesError,
    WorkflowError,
    shown,
)
from troupe.workflow.memory import ConversationMemory, Prompt
from troupe.workflow.messages import (
    AnyMessage,
    Rendering,
    parse_messages,
    parse_template_options,
    parse_tools,
    plain,
)
from troupe.workflow.record import Record
from troupe.workflow.reply import Reply
from troupe.workflow.stopping import cut_at, first_of, with_stop_tokens
from troupe.workflow.toolcalls import PARSERS, ToolCall, call_ids
from troupe.workflow.turns import Role, Turn

Messages = str | Sequence[Mapping[str, Any] | Reply]
"""What `chat` takes: a string (one user message) or messages; a reply may stand among them."""


Offered = Sequence[Mapping[str, Any]] | None
"""Tools as in OpenAI's requests: `{"type": "function", "function": {"name", "parameters"}}`."""


ToolChoice = Literal["auto", "none"]

# Longer responses are read in a thread: the event loop has others to serve meanwhile.
_TOKENS_READ_AT_ONCE: Final = 8192
# More than enough for the tag that a template may open a thought with.
_LAST_IDS: Final = 16


class Agent:
    """One agent in one trajectory."""

    def __init__(self, role: Role, record: Record) -> None:
        self._role = role
        self._record = record
        self._memory = ConversationMemory(role.tokenizer)

    @property
    def name(self) -> str:
        """The agent's name in the job."""
        return self._role.name

    @property
    def role(self) -> Role:
        """What all trajectories of the job share about it."""
        return self._role

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
        parsed = parse_messages(messages, self._role.system_prompt)
        offered = parse_tools(tools)
        rendering = Rendering(offered.text, parse_template_options(chat_template_kwargs))
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
            # The tokenizer does not know whose it is.
            raise ChatTemplateError(
                f"agent '{self.name}': {error.message}",
                field=f"policies.{self._role.policy}.model",
                value=error.value,
                remedy=error.remedy,
            ) from error
        return self._begin(reading, prompt, n, sampling)

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
        """The agent's continuation of `token_ids`, which are passed on as they are.

        `n` and `sampling` are as in `chat`.
        """
        try:
            ids = tuple(as_int(i) for i in token_ids)
        except TypeError as error:
            raise InvalidMessagesError(
                f"token_ids must be integers: {error}",
                field="token_ids",
                value=token_ids,
                remedy="Pass a list of ints; `chat` takes text.",
            ) from error
        if (outside := next((i for i in ids if not 0 <= i < 2**31), None)) is not None:
            raise InvalidMessagesError(
                "token_ids must be ids of tokens",
                field="token_ids",
                value=outside,
                remedy="Use the policy's own tokenizer.",
            )
        if not ids:
            raise InvalidMessagesError(
                "generate() got no token ids", field="token_ids", remedy="Pass at least one id."
            )
        return self._begin(None, Prompt(ids, broken=False), n, sampling)

    def endpoint(
        self,
        *,
        lenient: bool | None = None,
        sampling: Literal["job", "client"] | None = None,
    ) -> Endpoint:
        """Where a client of OpenAI's API speaks as this agent until the trajectory ends.

        What nothing here can enforce (`tool_choice: required`, a JSON schema) is refused, or with
        `lenient` told to the model and left to it. `sampling`: who decides temperature, top_p and
        top_k, the "job" or each request of the "client". Default: as `agents.X.endpoint` of the job
        says. Raises `WorkflowError` of kind `no_endpoint` where none is served, and `TurnError`
        when the trajectory has ended.
        """
        own = self._role.endpoint
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

    def draw_seed(self, purpose: str, prompt_ids: tuple[int, ...]) -> int:
        """A seed for a choice of the workflow's own, as repeatable as those of its turns."""
        return self._record.draw_seed(f"{self.name}/{purpose}", prompt_ids)

    def mix_seed(self, given: int) -> int:
        """A client's seed made this trajectory's: a group whose members all drew with the same
        seed would be equal, and so without a signal."""
        return self._record.mix_seed(given)

    def _begin(
        self,
        reading: _Reading | None,
        prompt: Prompt,
        n: int | None,
        overrides: dict[str, Any],
    ) -> Coroutine[Any, Any, Reply | list[Reply]]:
        role = self._role
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
        self, turns: Sequence[Turn], finishing: Sequence[Coroutine[Any, Any, Reply]]
    ) -> list[Reply]:
        try:
            with numbering.outside():
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one) for one in finishing]
            replies = tuple(task.result() for task in tasks)
        except BaseException as error:
            for turn in turns:  # what was said meanwhile reaches nobody
                turn.reply = turn.generation = None
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        for reply in replies:
            reply.siblings = replies
        return list(replies)

    async def _finish(self, turn: Turn, reading: _Reading | None) -> Reply:
        try:
            return await self._answer(turn, reading)
        finally:
            turn.over = True

    async def _answer(self, turn: Turn, reading: _Reading | None) -> Reply:
        role = self._role
        with numbering.outside():
            generation = await self._record.backend.generate(
                role.name, turn.prompt_ids, turn.sampling
            )
            if len(generation.token_ids) > _TOKENS_READ_AT_ONCE:
                said = await asyncio.to_thread(_read, generation, role, turn, reading)
            else:
                said = _read(generation, role, turn, reading)
        generation, ids = said.generation, tuple(said.generation.token_ids)
        names = call_ids(len(said.calls), (*turn.path, turn.prompt_digest))
        reply = Reply(
            role.name,
            turn.number,
            said.text,
            turn.prompt_ids,
            ids,
            tuple(generation.logprobs),
            generation.finish_reason,
            said.content,
            # What a model escapes in JSON may be half of a surrogate pair.
            tuple(
                ToolCall(name, *map(utf8_text, call))
                for name, call in zip(names, said.calls, strict=True)
            ),
            said.thoughts,
        )
        if reading is not None:
            self._memory.remember(
                reading.messages,
                reply.text,
                turn.path,
                turn.prompt_ids,
                ids,
                stopped=said.stopped,
                rendering=reading.rendering,
                content=reply.content,
                calls=reply.tool_calls,
            )
        turn.reply, turn.generation = reply, generation
        turn.answered = self._record.tick()
        return reply


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a reply is read with: the conversation that it continues."""

    messages: tuple[AnyMessage, ...]
    rendering: Rendering
    tools: Sequence[Mapping[str, Any]]
    """Those whose calls are told apart from the text."""


@dataclass(frozen=True, slots=True)
class _Said:
    """A generation as text."""

    generation: Generation
    """Cut at a stop string, where one was asked for and came."""
    stopped: bool
    """Its last token is a stop token, which is no part of what was said."""
    text: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    thoughts: str = ""


def _read(generation: Generation, role: Role, turn: Turn, reading: _Reading | None) -> _Said:
    """What was said: text, and of a conversation's reply the content, calls and thoughts."""
    tokenizer, strings = role.tokenizer, turn.sampling.stop_strings
    cut = cut_at(generation, strings, tokenizer)
    stopped = cut is None and generation.finish_reason == "stop"
    if cut is not None:
        generation, text = cut
    else:
        text = tokenizer.text(generation.token_ids, stopped=stopped)
    text = utf8_text(text)
    if reading is None:
        return _Said(generation, stopped, text, text)
    parse = PARSERS[role.tool_parser]
    thinking = parse.opens_thought(tokenizer.transcript(turn.prompt_ids[-_LAST_IDS:]))
    ids = generation.token_ids[: len(generation.token_ids) - stopped]
    # Tags may be special tokens, which the text lacks; else it is the text that is wanted.
    transcript = utf8_text(tokenizer.transcript(ids))
    if cut is not None:
        transcript = transcript[: first_of(strings, transcript)]
    said = parse(transcript, reading.tools, thinking=thinking)
    if said == (transcript, (), ""):
        return _Said(generation, stopped, text, text)
    tags = (tag for pair in parse.think_tags for tag in pair)
    if not said.calls and all(text.count(tag) == transcript.count(tag) for tag in tags):
        said = parse(text, thinking=thinking)
    return _Said(generation, stopped, text, said.content, said.calls, said.thoughts)
