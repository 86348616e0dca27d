"""The conversations of one agent in one trajectory, with the ids that went through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from troupe.workflow.conversation import PLAIN, ChatTokenizer
from troupe.workflow.messages import AnyMessage, Rendering, ToolMessage
from troupe.workflow.numbering import Path
from troupe.workflow.toolcalls import ToolCall

_THOUGHT = "</think>"


class Prompt(NamedTuple):
    """Ids to generate from.

    `broken`: the messages hold a reply of this agent, or something in its place, that is not what
    the agent said there; from there on the history was tokenised anew.
    """

    ids: tuple[int, ...]
    broken: bool


@dataclass(slots=True)
class _Reply:
    """What was generated at one point of a conversation."""

    order: Path
    texts: frozenset[str]
    """All that was said, as a client may hold it that knows of no calls."""
    contents: frozenset[str]
    """What a client may hold as its content beside the calls."""
    calls: tuple[ToolCall, ...]
    meanings: list[tuple[str, str]]
    """Of the calls."""
    ids: tuple[int, ...]
    """Prompt and response."""
    stop_id: int | None
    then: _Point = field(repr=False)

    def is_(self, content: str, meanings: list[tuple[str, str]]) -> bool:
        """Whether a message of this content and these calls is this reply come back."""
        if not meanings:
            return content in self.texts
        # Some clients drop the text beside calls. Whoever alters a call has another conversation.
        return meanings == self.meanings and (not content or content in self.contents)


@dataclass(slots=True)
class _Point:
    """A point of a conversation: what was said there by others, and by the agent."""

    others: dict[tuple[str, str], _Point] = field(default_factory=dict)
    replies: list[_Reply] = field(default_factory=list)

    def reply(self, message: AnyMessage) -> _Reply | None:
        """The reply that came back as `message`: of equal ones that whose calls have the message's
        ids, else the earliest turn's."""
        if not self.replies:
            return None
        calls = message.calls if isinstance(message, ToolMessage) else ()
        ids, meanings = [call.id for call in calls], [call.meaning for call in calls]
        content = message[1].strip()
        found = [reply for reply in self.replies if reply.is_(content, meanings)]
        same = [reply for reply in found if calls and [call.id for call in reply.calls] == ids]
        return min(same or found, key=lambda reply: reply.order, default=None)


class ConversationMemory:
    """A tree of what was said; conversations that begin alike share their beginning."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._roots: dict[Rendering, _Point] = {}  # tools are part of the first prompt
        self._said: set[str] = set()

    def prompt(self, messages: Sequence[AnyMessage], rendering: Rendering = PLAIN) -> Prompt:
        """Ids to generate from; those of the longest known beginning are taken as they were."""
        point: _Point | None = self._roots.get(rendering)
        known: tuple[int, _Reply] | None = None
        broken = False
        for index, message in enumerate(messages):
            reply = None
            if message[0] == "assistant":
                if point is not None:
                    reply = point.reply(message)
                if reply is not None:
                    known = index, reply
                elif (point is not None and point.replies) or message[1].strip() in self._said:
                    broken = True
            if point is not None:
                point = reply.then if reply is not None else point.others.get(_key(message))
        whole = tuple(messages)
        if known is None:
            return Prompt(self._tokenizer.first_ids(whole, rendering), broken)
        index, reply = known
        suffix = self._tokenizer.suffix_ids(whole, index, reply.stop_id, rendering)
        return Prompt(reply.ids + suffix, broken)

    def remember(
        self,
        messages: Sequence[AnyMessage],
        reply: str,
        order: Path,
        prompt_ids: tuple[int, ...],
        response_ids: tuple[int, ...],
        *,
        stopped: bool,
        rendering: Rendering = PLAIN,
        content: str | None = None,
        calls: tuple[ToolCall, ...] = (),
    ) -> None:
        """Note what was said to `messages`: `reply` as it is, or its `content` and `calls`, both
        without its thoughts.

        `order`: of two equal replies that of the earlier turn counts, whichever ended first.
        `stopped`: the last id is a stop token.
        """
        if not response_ids:
            return
        point = self._roots.setdefault(rendering, _Point())
        for message in messages:
            found = point.reply(message) if message[0] == "assistant" else None
            point = found.then if found else point.others.setdefault(_key(message), _Point())
        contents = _forms(reply if content is None else content)
        # Without calls a client may hold the whole, or the content.
        texts = _forms(reply) if calls else _forms(reply) | contents
        stop_id = response_ids[-1] if stopped else None
        said = _Reply(
            order,
            texts,
            contents,
            calls,
            [call.meaning for call in calls],
            prompt_ids + response_ids,
            stop_id,
            _Point(),
        )
        for other in point.replies:
            if other.texts == texts and not calls and not other.calls:
                said.then = other.then  # to a client they are one
        point.replies.append(said)
        self._said |= (texts | contents) - {""}


def _forms(text: str) -> frozenset[str]:
    """`text` as it comes back: often without outer white space, sometimes without its thoughts."""
    return frozenset((text.strip(), text.rpartition(_THOUGHT)[2].strip()))


def _key(message: AnyMessage) -> tuple[str, str]:
    return message[0], message[1].strip() if message[0] == "assistant" else message[1]
