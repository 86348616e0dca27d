"""Parsers of model output: strict JSON, thoughts, tool calls and fenced code blocks.

All parsers take linear time in the length of the text and raise no errors for any text.
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

DEEPEST: Final = 100
"""Maximum nesting that `read_json` accepts; chat templates and clients recurse over it."""

# Integers with more digits exceed double precision.
_SURE_DIGITS: Final = 308
_SEPARATORS: Final = re.compile(r"[; \n\t\r]*")

ThinkTags = tuple[tuple[str, str], ...]
"""Pairs of opening and closing tags of thoughts."""
THINK_TAGS: Final[ThinkTags] = (("<think>", "</think>"),)
"""Think tags of most model families."""


def read_json(text: str, otherwise: Any = None) -> Any:
    """Parse `text` as JSON; `otherwise` if it is not JSON.

    Stricter than `json.loads`: refuses NaN, Infinity, numbers beyond double precision (1e400),
    duplicate names and nesting deeper than `DEEPEST`, on which parsers differ.
    """
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return otherwise
    return value if _depth_is_bounded(value) else otherwise


def read_json_values(text: str) -> Iterator[Any]:
    """A sequence of JSON values as of `read_json`, separated by white space or `;`; ends with None
    at text that is not JSON."""
    at = 0
    while at < len(text):
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield None
            return
        if not _depth_is_bounded(value):
            yield None
            return
        yield value
        at = cast("re.Match[str]", _SEPARATORS.match(text, at)).end()


def _depth_is_bounded(value: Any) -> bool:
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            return False
        level = [
            inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number beyond double precision")
    return number


def _int(text: str) -> int:
    # Refused before `int`, which takes quadratic time.
    if len(text) > _SURE_DIGITS + 2:
        raise ValueError("a number beyond double precision")
    number = int(text)
    if len(text) > _SURE_DIGITS and math.isinf(float(text)):
        raise ValueError("a number beyond double precision")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name appears twice")
    return found


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_int=_int, parse_constant=_refuse
)


class Parsed(NamedTuple):
    """A reply, split into content, tool calls and thoughts."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as JSON text)."""
    thoughts: str = ""


Call = tuple[str, str]


class CallSyntax(NamedTuple):
    """Tool-call syntax of a model family."""

    opening: str
    """The tag before a call; empty: a reply with calls has nothing else but thoughts."""
    closing: str
    """The tag after a call; empty: calls extend to the end of the text."""
    read: Callable[[str], Sequence[Call] | None]
    """Parses the text between the tags; None: no calls."""


def read_reply(
    text: str,
    syntax: CallSyntax | None = None,
    *,
    tags: ThinkTags = THINK_TAGS,
    thinking: bool = False,
) -> Parsed:
    """Split `text` into content, thoughts and, with `syntax`, tool calls.

    A thought is the text between think tags; after an unclosed opening tag all following text;
    before an unopened closing tag all preceding text, as chat templates treat it. Calls inside of
    thoughts do not count, and tags inside of a call's arguments are part of these. `thinking`: the
    text begins inside of a thought that the prompt opened. Malformed calls stay content.
    """
    all_tags = [tag for pair in tags for tag in pair] + ([syntax.opening] if syntax else [])
    if not thinking and not any(tag in text for tag in all_tags):
        return Parsed(text)
    return _Reader(text, syntax, tags, thinking=thinking).read()


class _TextPart(NamedTuple):
    kind: Literal["content", "calls", "thought"]
    text: str
    calls: Sequence[Call] = ()


class _Reader:
    """A parser of one reply, in one pass over its tags."""

    def __init__(
        self, text: str, syntax: CallSyntax | None, tags: ThinkTags, *, thinking: bool
    ) -> None:
        self._text = text
        self._syntax = syntax
        self._closing_of = dict(tags)
        self._closings = frozenset(self._closing_of.values())
        words = [tag for pair in tags for tag in pair]
        if syntax is not None:
            words += [tag for tag in (syntax.opening, syntax.closing) if tag]
        self._tags = list(re.finditer("|".join(map(re.escape, words)), text)) if words else []
        self._attempts = self._plan_attempts()
        # Without an opening tag calls may begin wherever content begins.
        self._untagged = syntax is not None and not syntax.opening
        self._parts: list[_TextPart] = []
        self._fixed = 0  # number of parts before the last unopened closing tag
        self._at = 0  # offset of the current part
        # Tags that end the current thought; after `thinking` any closing tag.
        self._ends: frozenset[str] = self._closings if thinking else frozenset()

    def read(self) -> Parsed:
        begin_content = self._try_calls if self._untagged else lambda index: 0
        skip = 0 if self._ends else begin_content(0)
        for index, tag in enumerate(self._tags):
            word = tag[0]
            if tag.start() < skip:
                continue
            if self._ends:
                if word not in self._ends:
                    continue
                self._end_part("thought", tag)
                self._ends = frozenset()
                skip = begin_content(index + 1)
            elif word in self._closing_of:
                self._end_part("content", tag)
                self._ends = frozenset({self._closing_of[word]})
            elif word in self._closings:
                self._end_part("content", tag)
                later = "".join(part.text for part in self._parts[self._fixed :])
                self._parts[self._fixed :] = [_TextPart("thought", later)]
                self._fixed = len(self._parts)
                skip = begin_content(index + 1)
            elif self._syntax is not None and word == self._syntax.opening:
                skip = self._try_calls(index)
        self._end_part("thought" if self._ends else "content")
        return self._result()

    def _result(self) -> Parsed:
        if all(part.kind == "content" for part in self._parts) and not self._fixed:
            whole = "".join(part.text for part in self._parts)
            if len(whole) == len(self._text):
                return Parsed(self._text)
        content = "".join(part.text for part in self._parts if part.kind == "content")
        thoughts = (part.text.strip() for part in self._parts if part.kind == "thought")
        calls = tuple(call for part in self._parts if part.kind == "calls" for call in part.calls)
        return Parsed(content.strip(), calls, "\n".join(filter(None, thoughts)))

    def _end_part(
        self, kind: Literal["content", "thought"], tag: re.Match[str] | None = None
    ) -> None:
        end = tag.start() if tag is not None else len(self._text)
        if end > self._at:
            self._parts.append(_TextPart(kind, self._text[self._at : end]))
        self._at = tag.end() if tag is not None else end

    def _plan_attempts(self) -> dict[int, int]:
        """Candidates of calls: index of the first tag -> index of the last tag.

        Without an opening tag the key is 1 + the index of the tag before the content. Every part of
        the text is in a bounded number of candidates, so that parsing takes linear time.
        """
        tags, syntax = self._tags, self._syntax
        if syntax is None:
            return {}
        if not syntax.closing:
            # Calls extend to the end: candidates are the first two beginnings and the last ones.
            ends = [i for i, tag in enumerate(tags) if tag[0] in self._closings]
            if syntax.opening:
                begins = [i for i, tag in enumerate(tags) if tag[0] == syntax.opening]
            else:
                begins = [0, *(i + 1 for i in ends)]
            later = [i for i in begins if not ends or i > ends[-1]]
            return dict.fromkeys((*begins[:2], *later[:1], *begins[-1:]), len(tags))
        # A closing tag ends a candidate from the first opening tag since the previous closing tag,
        # and one from the last opening tag.
        attempts: dict[int, int] = {}
        first = last = -1
        for i, tag in enumerate(tags):
            if tag[0] == syntax.opening:
                first, last = (i if first < 0 else first), i
            elif tag[0] == syntax.closing:
                if first >= 0:
                    attempts[first] = attempts[last] = i
                first = last = -1
        return attempts

    def _try_calls(self, index: int) -> int:
        """Parse calls that begin at tag `index`; return the offset after them, 0 if there are
        none."""
        closing = self._attempts.get(index)
        if closing is None or self._syntax is None:
            return 0
        begin = inside = self._at
        if self._syntax.opening:
            begin, inside = self._tags[index].span()
        stop = end = len(self._text)
        if self._syntax.closing:
            stop, end = self._tags[closing].span()
        calls = self._syntax.read(self._text[inside:stop])
        if not calls:
            return 0
        if begin > self._at:
            self._parts.append(_TextPart("content", self._text[self._at : begin]))
        self._parts.append(_TextPart("calls", self._text[begin:end], calls))
        self._at = end
        return end


class TextBlock(NamedTuple):
    """A fenced code block of a reply, or the text between two of them."""

    text: str
    """Lines that end with a newline; a fenced block's lines lack their common indentation."""
    info: str | None = None
    """The info string after the opening fence (`python title="x"`); None: the text is not
    fenced."""


class _Fence(NamedTuple):
    """The fence that opens a block."""

    before: str
    run: str
    info: str
    column: int
    quoted: bool


_NEWLINE: Final = re.compile(r"\r\n?|\n")
# Markers of quotes and lists that may stand before a fence.
_CONTAINERS: Final = re.compile(r"(?:[ \t]|>|(?:[-+*]|\d{1,9}[.)])(?=[ \t]))*")
_QUOTE: Final = re.compile(r"(?:[ \t]{0,3}> ?)+")
_FENCE: Final = re.compile(r"(`{3,}(?=[^`]*$)|~{3,})(.*)")
_LATE_FENCE: Final = re.compile(r"([^`]*(?:`{1,2}[^`]+)*?)(?<!`)(`{3,})([^`]*)")
_CLOSING: Final = re.compile(r"[\s>]*(`{3,}|~{3,})[ \t]*(?:<.*)?")
_MARKDOWN: Final = re.compile(r"(?:markdown|md)(?!\S)", re.IGNORECASE)
_NOTHING: Final = object()


def read_blocks(text: str) -> list[TextBlock]:
    """Split `text` into fenced code blocks and the text between them, without blank ones.

    Fences follow CommonMark 0.31, section 4.5: at least three backticks or tildes with any
    info string, closed by a fence that is at least as long and is not indented further than three
    columns, else by the end of the text. Models also write fences that no Markdown parser accepts;
    these count, too: behind other text (`Code: ```python`), before a tag
    (` ```</answer>`) or a sentence, behind the last line of code, and at any indentation. A block
    of Markdown is replaced by the blocks inside it.
    """
    blocks: list[TextBlock] = []
    for block in _split(text):
        inner = _split(block.text) if _MARKDOWN.match(block.info or "") else []
        blocks += inner if any(one.info is not None for one in inner) else [block]
    return blocks


def read_fenced_json(text: str, otherwise: Any = None) -> Any:
    """`read_json` of a text that may be one fenced block or one code span."""
    text = text.strip()
    blocks = _split(text)
    fenced = blocks[0].text if len(blocks) == 1 and blocks[0].info is not None else text
    # The JSON may begin or end in the line of a fence, or be in a code span.
    bare = read_span(text)
    bare = bare[4:] if bare[:4].lower() == "json" else bare
    value = read_json(fenced, _NOTHING)
    return read_json(bare, otherwise) if value is _NOTHING else value


def read_span(text: str) -> str:
    """Return the content of a text that is one code span; any other text unchanged."""
    ticks = len(text) - len(text.lstrip("`"))
    return text[ticks:-ticks] if ticks and text.endswith("`" * ticks) else text


def _split(text: str) -> list[TextBlock]:
    lines = _NEWLINE.split(text)
    closings = [
        (at, found[1]) for at, line in enumerate(lines) if (found := _CLOSING.fullmatch(line))
    ]
    blocks: list[TextBlock] = []
    at = begin = 0
    while at < len(lines):
        fence = _opening(lines[at])
        if fence is None:
            at += 1
            continue
        blocks.append(_block([*lines[begin:at], fence.before]))
        inside, at = _until_closed(lines, at + 1, fence, closings)
        blocks.append(_block(inside, fence))
        begin = at
    blocks.append(_block(lines[begin:]))
    return [one for one in blocks if one.text.strip()]


def _opening(line: str) -> _Fence | None:
    before = cast("re.Match[str]", _CONTAINERS.match(line))[0]
    if found := _FENCE.fullmatch(line, len(before)):
        run, info = found.groups()
        return _Fence("", run, info.strip(), len(before.expandtabs(4)), ">" in before)
    if found := _LATE_FENCE.fullmatch(line):
        before, run, info = found.groups()
        # A sentence about fences does not open a block.
        if before.rstrip().endswith((":", ">")) or len(f"{run}{info}".split()) == 1:
            return _Fence(before, run, info.strip(), _column(line), quoted=False)
    return None


def _column(line: str) -> int:
    """Return the column of the first character that is neither white space nor a quote marker."""
    line = line.expandtabs(4)
    return len(line) - len(line.lstrip(" >"))


def _until_closed(
    lines: Sequence[str], begin: int, fence: _Fence, closings: Sequence[tuple[int, str]]
) -> tuple[Sequence[str], int]:
    """Return the lines of a block from line `begin` on, and the number of the line after the
    block."""
    for number in range(bisect_left(closings, (begin, "")), len(closings)):
        at, run = closings[number]
        # A fence inside a string of indented code is further in.
        if run.startswith(fence.run) and _column(lines[at]) <= max(3, fence.column):
            return lines[begin:at], at + 1
    run = f"{fence.run}{fence.run[0]}*"
    late = re.compile(rf"(.*[^\s{fence.run[0]}]){run}\s*")
    # Punctuation or a sentence follows, not an info string.
    early = re.compile(rf"[\s>]*{run}(?:[.,;:!?)]| +\S+ +\S+ +\S)[^`]*")
    for at in range(begin, len(lines)):
        if found := late.fullmatch(lines[at]):
            return [*lines[begin:at], found[1]], at + 1
        if early.fullmatch(lines[at]):
            return lines[begin:at], at + 1
    return lines[begin:], len(lines)


def _block(lines: Sequence[str], fence: _Fence | None = None) -> TextBlock:
    if fence is None:
        return TextBlock("\n".join(lines))
    if fence.quoted:
        lines = [line[found.end() if (found := _QUOTE.match(line)) else 0 :] for line in lines]
    margins = [line[: len(line) - len(line.lstrip())] for line in lines if line.strip()]
    margin = len(os.path.commonprefix(margins))  # noqa: RUF071 (texts, not paths)
    return TextBlock("".join(f"{line[margin:]}\n" for line in lines), fence.info)
