"""The conversations of one agent in one trajectory, with the ids that went through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.messages import AnyMessage, ToolMessage
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
    ids: tuple[int, ...]
    """Prompt and response."""
    stop_id: int | None
    then: _Point = field(repr=False)

    def is_(self, message: AnyMessage, *, by_id: bool) -> bool:
        """Whether `message` is this reply come back: by the ids of its calls, or their meaning."""
        content = message[1].strip()
        calls = message.calls if isinstance(message, ToolMessage) else ()
        if not calls:
            return not by_id and content in self.texts
        if by_id and [c.id for c in calls] != [c.id for c in self.calls]:
            return False
        # Some clients drop the text beside calls. Whoever alters a call has another conversation.
        return [c.meaning for c in calls] == [c.meaning for c in self.calls] and (
            not content or content in self.contents
        )


@dataclass(slots=True)
class _Point:
    """A point of a conversation: what was said there by others, and by the agent."""

    others: dict[tuple[str, str], _Point] = field(default_factory=dict)
    replies: list[_Reply] = field(default_factory=list)

    def reply(self, message: AnyMessage) -> _Reply | None:
        """The reply that came back as `message`. Of equal ones the earliest turn's."""
        for by_id in (True, False):
            found = [r for r in self.replies if r.is_(message, by_id=by_id)]
            if found:
                return min(found, key=lambda reply: reply.order)
        return None


class ConversationMemory:
    """A tree of what was said; conversations that begin alike share their beginning."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._roots: dict[str, _Point] = {}  # by tools, which are part of the first prompt
        self._said: set[str] = set()

    def prompt(self, messages: Sequence[AnyMessage], tools: str = "") -> Prompt:
        """Ids to generate from; those of the longest known beginning are taken as they were."""
        point: _Point | None = self._roots.get(tools)
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
            return Prompt(self._tokenizer.first_ids(whole, tools), broken)
        index, reply = known
        suffix = self._tokenizer.suffix_ids(whole, index, reply.stop_id, tools)
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
        tools: str = "",
        content: str | None = None,
        calls: tuple[ToolCall, ...] = (),
    ) -> None:
        """Note what was said to `messages`: `reply` as it is, or its `content` and `calls`.

        `order`: of two equal replies that of the earlier turn counts, whichever ended first.
        `stopped`: the last id is a stop token.
        """
        if not response_ids:
            return
        point = self._roots.setdefault(tools, _Point())
        for message in messages:
            found = point.reply(message) if message[0] == "assistant" else None
            point = found.then if found else point.others.setdefault(_key(message), _Point())
        texts = _forms(reply)
        contents = texts if content is None else _forms(content)
        stop_id = response_ids[-1] if stopped else None
        said = _Reply(order, texts, contents, calls, prompt_ids + response_ids, stop_id, _Point())
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
