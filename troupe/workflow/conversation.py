"""Converts chat messages to token ids, without tokenising a reply a second time.

A prompt that extends an earlier conversation consists of that conversation's ids (prompt and
response as the engine saw them) followed by the ids of the new text. Rendering and tokenising the
whole text again would be simpler but wrong: the ids could differ from the sampled ones.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Final

import xxhash

from troupe.chat_templates import TemplateLimitError
from troupe.chat_templates.chat import TEMPLATE_REMEDY, ChatTemplates
from troupe.contracts.payloads import Marks
from troupe.workflow.errors import ChatTemplateError, TooManyTokensError, shown
from troupe.workflow.messages import (
    AnyMessage,
    Rendering,
    ToolCall,
    ToolMessage,
    as_template_takes,
    with_content,
)
from troupe.workflow.numbering import Path
from troupe.workflow.token_ids import PromptIds, TokenIds

PLAIN: Final = Rendering()
"""Without tools and template options."""

# Placeholder of the last reply while a template is rendered; the new text comes after it.
_REPLY = "\x02troupe-reply\x03"
_REPLY_BEGINS = _REPLY[0]

# Text placed between all special tokens to test a tokenizer.
_TRIED_TEXT = "Troupe: 3 agents,\n\tcaf\u00e9 \u2192 \u4e2d\u6587  isn't it? "

# The text of an incomplete character after decoding, and the tokens of the longest character.
_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 4

# How vocabularies with byte fallback (SentencePiece) write a byte of an incomplete character.
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Token ids cached per policy; a long-lived process must not grow with the number of queries.
_CACHED_TOKENS = 500_000
# Segments of at least so many characters have their ids cached; shorter ones are read again.
_LONG_SEGMENT: Final = 512

# Characters that are tokenised in the event loop, which takes about 20 ms; rendering a message, or
# a tool call in one, takes as long as so many.
_CHARACTERS_AT_ONCE: Final = 16_384
_CHARACTERS_PER_MESSAGE: Final = 64
# A text with more characters per usable token is first measured in slices of this size.
_CHARACTERS_PER_TOKEN: Final = 8
_SLICE: Final = 65_536
# Limit on threads that tokenise at the same time. Tokenizers in Rust release the GIL, and
# tokenizers in Python hand it over every few milliseconds. Trajectories that begin with the same
# long prompt find the ids cached by the first of them.
_TOKENISING = threading.BoundedSemaphore(4)


class ChatTokenizer:
    """A Hugging Face tokenizer with chat template and cache, shared by a policy's trajectories.

    Texts may be tokenised and decoded in several threads at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._templates = ChatTemplates(tokenizer)
        # Roles whose messages the template is known to show.
        self._shown_roles = {"user", "assistant"}
        self._lock = threading.Lock()  # of the cache
        self._cache: OrderedDict[bytes, TokenIds] = OrderedDict()
        self._cached_tokens = 0
        # Texts of single tokens, by id: at most the vocabulary.
        self._token_texts: dict[int, str] = {}
        self._token_bytes: dict[int, bytes] = {}
        # Texts of single tokens that end replies, decoded alone.
        self._stop_texts: dict[int, str] = {}

    def first_ids(
        self,
        messages: tuple[AnyMessage, ...],
        rendering: Rendering = PLAIN,
        most: int = 0,
        marks: Marks | None = None,
    ) -> TokenIds:
        """Return the ids of a conversation from its beginning, ready for the next reply.

        `rendering`: offered tools, and template options. `most`: number of usable tokens; 0:
        unlimited. `marks`: payloads. Raises `ChatTemplateError` when the tokenizer cannot render
        it, and `TooManyTokensError`.
        """

        def compute() -> TokenIds:
            rendered = self.render(messages, rendering)
            if rendering.tools and rendered == self.render(messages, rendering._replace(tools="")):
                raise ChatTemplateError(
                    "the chat template does not show tools",
                    field="tokenizer.chat_template",
                    remedy="Use a template with `tools`, or describe them in the system prompt.",
                )
            self._check_length(rendered, most)
            return TokenIds.of_text(rendered, marks, self._encode)

        # Payloads are large, and are not kept here.
        return compute() if marks else self._cached(_key_of(rendering, messages), compute)

    def suffix_ids(
        self,
        messages: tuple[AnyMessage, ...],
        reply: int,
        stop_id: int | None,
        rendering: Rendering = PLAIN,
        most: int = 0,
        marks: Marks | None = None,
    ) -> TokenIds:
        """Return the ids that follow the reply `messages[reply]`, up to the next reply.

        `stop_id` is the token at which the reply stopped; the template's end of turn is not added
        again if it is this token. `most`, `marks` and errors are as in `first_ids`.
        """

        def compute() -> TokenIds:
            held = (*messages[:reply], ("assistant", _REPLY), *messages[reply + 1 :])
            suffix = _after_reply(self.render(held, rendering))
            if suffix is None:
                raise ChatTemplateError(
                    "the chat template does not show an earlier reply unchanged",
                    field="tokenizer.chat_template",
                    remedy="Use a template that renders the content of assistant messages.",
                )
            if stop_id is not None:
                suffix = suffix.removeprefix(self._stop_text(stop_id))
            self._check_length(suffix, most)
            return TokenIds.of_text(suffix, marks, self._encode)

        if marks:
            return compute()
        # The reply's own text is not part of the key: the placeholder replaces it.
        key = _key_of((stop_id, rendering), messages[:reply], messages[reply + 1 :])
        return self._cached(key, compute)

    @cached_property
    def ordinary_ids(self) -> tuple[int, ...]:
        """Ids of all ordinary (not special) tokens, ascending."""
        special = set(self._tokenizer.all_special_ids)
        return tuple(sorted(set(self._tokenizer.get_vocab().values()) - special))

    @property
    def end_id(self) -> int | None:
        """The tokenizer's end-of-sequence token, if it has one."""
        found: int | None = self._tokenizer.eos_token_id
        return found

    def encode(self, text: str, most: int = 0) -> tuple[int, ...]:
        """Return the ids of `text` without added special tokens. `most` is as in `first_ids`.
        Raises `TooManyTokensError`."""
        self._check_length(text, most)
        return tuple(self._encode(text))

    def encode_first(self, text: str, most: int = 0) -> tuple[int, ...]:
        """Return the ids of `text` as the beginning of a sequence, with a beginning-of-sequence
        token for models trained with one. (Chat templates write this token themselves.) `most` is
        as in `first_ids`. Raises `TooManyTokensError`."""
        ids = self.encode(text, most)
        return ids if ids[: len(self._first_ids)] == self._first_ids else self._first_ids + ids

    @cached_property
    def _first_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer puts before a sequence; usually none, or one."""
        alone = tuple(self._tokenizer.encode("a", add_special_tokens=False))
        whole = tuple(self._tokenizer.encode("a", add_special_tokens=True))
        places = (i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
        at = next(places, 0)
        return whole[:at]

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the numbers of tokens of `texts`, without added special tokens."""
        return [
            len(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        ]

    def text(self, ids: Sequence[int], *, stopped: bool = False) -> str:
        """Return the text of a response without special tokens, and without the last id if the
        response `stopped`."""
        if stopped:
            ids = ids[:-1]
        return self._decode(ids, skip_special_tokens=True)

    def transcript(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with special tokens shown."""
        return self._decode(ids)

    def text_and_transcript(self, ids: Sequence[int]) -> tuple[str, str]:
        """Return the text of `ids` without and with special tokens; without any, one string."""
        transcript = self._decode(ids)
        if self._backend is not None and self._specials.isdisjoint(ids):
            return transcript, transcript
        return self._decode(ids, skip_special_tokens=True), transcript

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token of a reply, special ones shown. A character of several
        tokens belongs to the last. Joined, they are the reply (except for the tokenizer's additions
        before it)."""
        found = [self._token_text(one) for one in ids]
        start = None
        for i, text in enumerate(found):
            if _INCOMPLETE not in text:
                start = None
                continue
            start = i if start is None else start
            whole = self._decode(ids[start : i + 1])
            found[i] = "" if _INCOMPLETE in whole and i + 1 - start < _LONGEST_CHARACTER else whole
            if found[i]:
                start = None
        return found

    def _token_text(self, token: int) -> str:
        """Return the text of a token inside a text, where some tokenizers add a space."""
        text = self._token_texts.get(token)
        if text is None:
            before = self._anchor
            text = self._decode([before, token]).removeprefix(self._decode([before]))
            self._token_texts[token] = text
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token. They may be an incomplete character, for which decoding
        shows the replacement character."""
        found = self._token_bytes.get(token)
        if found is None:
            found = self._token_bytes[token] = self._bytes_of(token)
        return found

    def _bytes_of(self, token: int) -> bytes:
        text = self._token_text(token)
        if _INCOMPLETE not in text:
            return text.encode()
        written = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(written, bytes):  # vocabularies of tiktoken
            return written
        if fallback := _BYTE_TOKEN.fullmatch(written):
            return bytes([int(fallback[1], 16)])
        alphabet = _byte_alphabet()
        if all(character in alphabet for character in written):
            return bytes(alphabet[character] for character in written)
        return text.encode()

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which `text` leaves out."""
        if self._backend is not None:
            return self._specials
        return frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def _anchor(self) -> int:
        return self.encode("a")[-1]

    def _stop_text(self, token: int) -> str:
        text = self._stop_texts.get(token)
        if text is None:
            text = self._stop_texts[token] = self._decode([token])
        return text

    @cached_property
    def _backend(self) -> Any:
        """The Rust tokenizer behind transformers' own, whose checks take ten times as long as a
        short text; None if there is none, or if it gives different ids."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        specials = [
            self._tokenizer.convert_ids_to_tokens(i) for i in self._tokenizer.all_special_ids
        ]
        text = _TRIED_TEXT.join(["", *specials, ""])
        # transformers goes first, since it turns off truncation and padding.
        wanted = self._tokenizer.encode(text, add_special_tokens=False)
        found = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        told = backend.decode(wanted, skip_special_tokens=False)
        same = found == wanted and told == self._slow_decode(wanted, skip_special_tokens=False)
        return backend if same else None

    @cached_property
    def _specials(self) -> frozenset[int]:
        """Ids that the Rust tokenizer leaves out of a text without special tokens."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def _boundary(self) -> re.Pattern[str] | None:
        """Pattern of the tokens before which a text may be cut: a tokenizer splits it there first,
        and reads each part separately. None if neighbouring text matters."""
        # Normalized tokens are searched for later, inside the parts.
        added = [t for t in self._backend.get_added_tokens_decoder().values() if not t.normalized]
        if not added or any(t.lstrip or t.rstrip or t.single_word for t in added):
            return None
        # Of two tokens that begin at one place, the tokenizer takes the longer.
        longest = sorted((re.escape(t.content) for t in added), key=len, reverse=True)
        return re.compile("|".join(longest))

    def _check_length(self, text: str, most: int) -> None:
        """Raise `TooManyTokensError` if `text` is far too long for `most` tokens, without
        tokenising all of it.

        Cutting a text changes only the tokens next to the cut. So if the slices have more than
        twice the usable number of tokens, the whole text has too many as well.
        """
        if not most or len(text) <= _CHARACTERS_PER_TOKEN * most:
            return
        found = 0
        for start in range(0, len(text), _SLICE):
            found += len(self._encode_whole(text[start : start + _SLICE]))
            if found > 2 * most:
                raise TooManyTokensError(most)

    def _encode(self, text: str) -> Sequence[int]:
        if self._backend is None or len(text) < _LONG_SEGMENT or self._boundary is None:
            return self._encode_whole(text)
        # Long segments are cached: text that queries share, such as a system prompt, is read once.
        cuts = [0, *(found.start() for found in self._boundary.finditer(text)), len(text)]
        parts: list[Sequence[int]] = []
        done = 0
        for start, end in pairwise(cuts):
            if end - start >= _LONG_SEGMENT:
                parts += self._encode_whole(text[done:start]), self._segment_ids(text[start:end])
                done = end
        return TokenIds.joined((*parts, self._encode_whole(text[done:])))

    def _segment_ids(self, text: str) -> TokenIds:
        key = _key_of("segment", (("", text),))
        return self._cached(key, lambda: TokenIds.of(self._encode_whole(text)))

    def _encode_whole(self, text: str) -> Sequence[int]:
        found: Sequence[int]
        if self._backend is not None:
            [one] = self._backend.encode_batch_fast([text], add_special_tokens=False)
            found = one.ids
        else:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if self._backend is not None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        return self._slow_decode(ids, skip_special_tokens=skip_special_tokens)

    def _slow_decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        decoded: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return decoded

    def render(
        self, messages: Sequence[AnyMessage], rendering: Rendering = PLAIN, *, prompt: bool = True
    ) -> str:
        """Return the chat template's text of a conversation, with `prompt` up to the beginning of
        the next reply. Raises `ChatTemplateError`, also if the template omits the messages of a
        role."""
        text = self._rendered(messages, rendering, prompt=prompt)
        for role in {message[0] for message in messages} - self._shown_roles:
            # Such as `developer`, which many templates skip without an error.
            other = [with_content(m, f"{m[1]}?") if m[0] == role else m for m in messages]
            try:
                skipped = self._rendered(other, rendering, prompt=prompt) == text
            except ChatTemplateError:  # the template parses this content
                skipped = False
            if skipped:
                raise ChatTemplateError(
                    f"the chat template does not show messages of the role {shown(role)}",
                    field="tokenizer.chat_template",
                    value=[message[0] for message in messages],
                    remedy="Use the roles that it shows, such as system, user, assistant and tool.",
                )
            self._shown_roles.add(role)
        return text

    def _rendered(
        self, messages: Sequence[AnyMessage], rendering: Rendering, *, prompt: bool
    ) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "the tokenizer has no chat template",
                field="tokenizer.chat_template",
                remedy="Save the tokenizer with one, or call `agent.generate(token_ids)`.",
            )
        failure: Exception | None = None
        called = any(isinstance(one, ToolMessage) and one.calls for one in messages)
        # Most templates take the arguments of calls as objects, some (DeepSeek's) as text.
        for as_text in (False, True) if called else (False,):
            try:
                return self._templates.render(
                    [as_template_takes(one, arguments_as_text=as_text) for one in messages],
                    json.loads(rendering.tools) if rendering.tools else None,
                    add_generation_prompt=prompt,
                    **(json.loads(rendering.options) if rendering.options else {}),
                )
            except TemplateLimitError as error:
                raise self._beyond_bounds(error) from error
            except Exception as error:  # templates raise errors of their own
                failure = failure or error
        raise ChatTemplateError(
            f"the chat template refused the conversation: {failure}",
            field="tokenizer.chat_template",
            value=[message[0] for message in messages],
            remedy="Use the roles in an order that the template allows, and JSON objects as "
            "arguments of tool calls.",
        ) from failure

    def check_template(self) -> None:
        """Render short conversations. Raises `ChatTemplateError` for a chat template that exceeds a
        bound. A template that refuses these conversations may accept others."""
        if getattr(self._tokenizer, "chat_template", None):
            try:
                self._templates.probe()
            except TemplateLimitError as error:
                raise self._beyond_bounds(error) from error

    def _beyond_bounds(self, error: TemplateLimitError) -> ChatTemplateError:
        return ChatTemplateError(
            f"the chat template exceeds a bound: {error}",
            field="tokenizer.chat_template",
            value=self._templates.source,
            remedy=TEMPLATE_REMEDY,
        )

    def _cached(self, key: bytes, compute: Callable[[], TokenIds]) -> TokenIds:
        with self._lock:
            ids = self._cache.get(key)
            if ids is not None:
                self._cache.move_to_end(key)
                return ids
        ids = compute()
        with self._lock:
            if key in self._cache:  # another thread was faster
                return self._cache[key]
            self._cache[key] = ids
            self._cached_tokens += len(ids)
            while self._cached_tokens > _CACHED_TOKENS and len(self._cache) > 1:
                self._cached_tokens -= len(self._cache.popitem(last=False)[1])
        return ids


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the bytes by the characters that byte-level vocabularies write for them (GPT-2)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _key_of(about: object, *parts: Sequence[AnyMessage]) -> bytes:
    """Return a hash of messages and of further values `about` them, as a cache key: the
    conversations would need more memory than their ids.

    Contents enter by Python's keyed 64-bit hash, which a string computes only once, so that a
    growing conversation is not read from its beginning at every turn.
    """
    whole = [about, *([(m[0], len(m[1]), hash(m[1]), m[2:]) for m in part] for part in parts)]
    return xxhash.xxh3_128_digest(repr(whole).encode("utf-8", "surrogatepass"))


def _after_reply(rendered: str) -> str | None:
    """Return the text of a rendered conversation after the reply's placeholder; None unless the
    placeholder occurs exactly once. The search is for its first character, which conversations
    hardly contain: this is many times as fast."""
    found, at = None, -1
    while (at := rendered.find(_REPLY_BEGINS, at + 1)) >= 0:
        if rendered.startswith(_REPLY, at):
            if found is not None:
                return None
            found = at + len(_REPLY)
    return None if found is None else rendered[found:]


_THOUGHT = "</think>"


@dataclass(slots=True)
class _KnownReply:
    """A reply that was generated at one point of a conversation."""

    order: Path
    texts: frozenset[str]
    """Forms of the whole text, which clients that ignore tool calls send back."""
    contents: frozenset[str]
    """Forms of the content without calls, which clients send back together with the calls."""
    calls: tuple[ToolCall, ...]
    meanings: list[tuple[str, str]]
    """Name and canonical arguments of each call."""
    ids: tuple[TokenIds, TokenIds]
    """Prompt and response."""
    stop_id: int | None
    then: _Point = field(repr=False)
    """The conversation after this reply."""

    def matches(self, content: str, meanings: list[tuple[str, str]]) -> bool:
        """Return whether a message with this content and these calls repeats this reply."""
        if not meanings:
            return content in self.texts
        # Some clients drop the text next to calls; an altered call makes a different conversation.
        return meanings == self.meanings and (not content or content in self.contents)


@dataclass(slots=True)
class _Point:
    """A node of the tree of conversations: the messages and replies that follow it."""

    others: dict[tuple[str, str], _Point] = field(default_factory=dict)
    replies: list[_KnownReply] = field(default_factory=list)

    def reply(self, message: AnyMessage) -> _KnownReply | None:
        """Return the reply that `message` repeats. Of equal replies, choose the one whose calls
        have the message's ids, else the one of the earliest turn."""
        if not self.replies:
            return None
        calls = message.calls if isinstance(message, ToolMessage) else ()
        ids, meanings = [call.id for call in calls], [call.meaning for call in calls]
        content = message[1].strip()
        found = [reply for reply in self.replies if reply.matches(content, meanings)]
        same = [reply for reply in found if calls and [call.id for call in reply.calls] == ids]
        return min(same or found, key=lambda reply: reply.order, default=None)


class Draft(ABC):
    """A prompt that is not tokenised yet."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    async def tokenised(self, context: int = 0) -> PromptIds:
        """Return the prompt, tokenised in a thread if it is long. `context`: context length of the
        model; 0: unknown. Raises `ChatTemplateError` and `TooManyTokensError`."""
        if not self.is_long:
            return self.prompt(context)

        def compute() -> TokenIds:
            with _TOKENISING:
                return self._new_ids(context)

        return self._joined(await asyncio.to_thread(compute))

    def prompt(self, context: int = 0) -> PromptIds:
        """Return the prompt, tokenised in this thread."""
        return self._joined(self._new_ids(context))

    @property
    @abstractmethod
    def is_long(self) -> bool:
        """Whether tokenising it would block the event loop for too long."""

    @abstractmethod
    def _new_ids(self, context: int) -> TokenIds:
        """Compute the ids that are not known yet. Called in any thread."""

    @abstractmethod
    def _joined(self, new: TokenIds) -> PromptIds:
        """Assemble the whole prompt. Called in the thread of the event loop."""


class TextDraft(Draft):
    """A prompt that is a plain text."""

    def __init__(
        self, tokenizer: ChatTokenizer, text: str, total: int, *, add_special_tokens: bool
    ) -> None:
        """`total`: characters of all texts of a call; `add_special_tokens`: see `encode_first`."""
        super().__init__(tokenizer)
        self._text = text
        self._total = total
        self._encode = tokenizer.encode_first if add_special_tokens else tokenizer.encode

    @property
    def is_long(self) -> bool:
        """See `Draft`."""
        return self._total > _CHARACTERS_AT_ONCE

    def _new_ids(self, context: int) -> TokenIds:
        return TokenIds.of(self._encode(self._text, context))

    def _joined(self, new: TokenIds) -> PromptIds:
        return PromptIds(new, broken=False)


class PromptDraft(Draft):
    """The prompt of a conversation, which may begin with a known prompt and reply."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        messages: tuple[AnyMessage, ...],
        rendering: Rendering = PLAIN,
        known: tuple[int, _KnownReply] | None = None,
        broken: bool = False,
        marks: Marks | None = None,
    ) -> None:
        """Create the draft. `known`: the last known reply, and its index in the messages. `marks`:
        payloads of the messages."""
        super().__init__(tokenizer)
        self._marks = marks
        self._messages = messages
        self._rendering = rendering
        self._known = known
        self._broken = broken

    @property
    def is_long(self) -> bool:
        """See `Draft`."""
        first = 0 if self._known is None else self._known[0] + 1
        # The template renders all messages, but only the text after the known ones is tokenised.
        size = len(self._messages) * _CHARACTERS_PER_MESSAGE + sum(map(len, self._rendering))
        for message in self._messages[first:]:
            size += len(message[1])
            if isinstance(message, ToolMessage):
                size += len(message.thoughts) + len(message.calls) * _CHARACTERS_PER_MESSAGE
                size += sum(len(call.name) + len(call.arguments) for call in message.calls)
        return size > _CHARACTERS_AT_ONCE

    def _new_ids(self, context: int) -> TokenIds:
        if self._known is None:
            return self._tokenizer.first_ids(self._messages, self._rendering, context, self._marks)
        index, reply = self._known
        return self._tokenizer.suffix_ids(
            self._messages, index, reply.stop_id, self._rendering, context, self._marks
        )

    def _joined(self, new: TokenIds) -> PromptIds:
        if self._known is None:
            return PromptIds(new, self._broken)
        _, reply = self._known
        ids = TokenIds.joined((*reply.ids, new))
        ids.share_with(reply.ids[0])
        return PromptIds(ids, self._broken)


class ConversationMemory:
    """Conversations of one agent as a tree; common beginnings are shared."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._roots: dict[Rendering, _Point] = {}  # tools are part of the first prompt
        # By turn: the reply, and its point in the tree.
        self._replies: dict[Path, tuple[_Point, _KnownReply]] = {}
        # Texts of all replies.
        self._reply_texts: set[str] = set()

    def draft(
        self,
        messages: Sequence[AnyMessage],
        rendering: Rendering = PLAIN,
        marks: Marks | None = None,
    ) -> PromptDraft:
        """Return the draft of a conversation's prompt, whose longest known beginning is looked up
        now. `marks`: payloads of the messages."""
        point: _Point | None = self._roots.get(rendering)
        known: tuple[int, _KnownReply] | None = None
        broken = False
        for index, message in enumerate(messages):
            reply = None
            if message[0] == "assistant":
                if point is not None:
                    reply = point.reply(message)
                if reply is not None:
                    known = index, reply
                elif (point is not None and point.replies) or message[
                    1
                ].strip() in self._reply_texts:
                    broken = True
            if point is not None:
                point = reply.then if reply is not None else point.others.get(_key(message))
        return PromptDraft(self._tokenizer, tuple(messages), rendering, known, broken, marks)

    def remember(
        self,
        messages: Sequence[AnyMessage],
        reply: str,
        order: Path,
        prompt_ids: Sequence[int],
        response_ids: TokenIds,
        *,
        stopped: bool,
        rendering: Rendering = PLAIN,
        content: str | None = None,
        calls: tuple[ToolCall, ...] = (),
    ) -> None:
        """Add a reply to `messages`: its whole text, and its `content` and `calls` without
        thoughts.

        `order`: path of the turn; of equal replies, the one of the earlier turn is reused.
        `stopped`: the last id is a stop token.
        """
        if not response_ids:
            return
        point = self._roots.setdefault(rendering, _Point())
        for message in messages:
            found = point.reply(message) if message[0] == "assistant" else None
            point = found.then if found else point.others.setdefault(_key(message), _Point())
        contents = _forms(reply if content is None else content)
        # Without calls, a client may send back the whole text or the content.
        texts = _forms(reply) if calls else _forms(reply) | contents
        stop_id = response_ids[-1] if stopped else None
        known = _KnownReply(
            order,
            texts,
            contents,
            calls,
            [call.meaning for call in calls],
            (TokenIds.of(prompt_ids), response_ids),
            stop_id,
            _Point(),
        )
        for other in point.replies:
            if other.texts == texts and not calls and not other.calls:
                known.then = other.then  # a client cannot tell them apart
        point.replies.append(known)
        self._replies[order] = point, known
        self._reply_texts |= (texts | contents) - {""}

    def forget(self, order: Path) -> None:
        """Remove the reply of the turn `order`, which its client never saw."""
        if (found := self._replies.pop(order, None)) is not None:
            point, known = found
            point.replies = [reply for reply in point.replies if reply is not known]


def _forms(text: str) -> frozenset[str]:
    """Return the forms of `text` that clients send back: stripped, with and without thoughts."""
    return frozenset((text.strip(), text.rpartition(_THOUGHT)[2].strip()))


def _key(message: AnyMessage) -> tuple[str, str]:
    return message[0], message[1].strip() if message[0] == "assistant" else message[1]
