"""Reading what a model wrote: JSON that every reader takes alike, thoughts, and calls of tools.

A model may write anything, of any length. Everything here takes time in proportion to the text's
length, whatever it says, and raises nothing because of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

DEEPEST: Final = 100
"""Containers within containers that `read_json` takes: templates and clients recurse over them."""

# Integers of more digits are outside of double precision, whatever they are.
_SURE_DIGITS: Final = 308
_SEPARATORS: Final = re.compile(r"[; \n\t\r]*")

ThinkTags = tuple[tuple[str, str], ...]
"""Pairs of tags between which a model thinks aloud."""
THINK_TAGS: Final[ThinkTags] = (("<think>", "</think>"),)
"""Those of most families."""


def read_json(text: str, otherwise: Any = None) -> Any:
    """The JSON value that `text` is, or `otherwise` where it is none.

    Stricter than `json.loads`: NaN, Infinity, numbers beyond double precision (1e400), names that
    an object has twice and nesting deeper than `DEEPEST` are no JSON, for readers differ on them.
    """
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return otherwise
    return value if _depth_is_bounded(value) else otherwise


def read_json_values(text: str) -> Iterator[Any]:
    """JSON values as `read_json` takes them, one after another or with `;` between them; a last
    None where the text goes on with something else."""
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
    raise ValueError(f"{constant} is no JSON")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number beyond double precision")
    return number


def _int(text: str) -> int:
    # Longer ones first: Python reads them in quadratic time, where it does.
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
    """A reply's text apart from its thoughts and calls."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as JSON text)."""
    thoughts: str = ""


Call = tuple[str, str]


class CallSyntax(NamedTuple):
    """How a family of models writes calls of tools: where they may begin and end in a text."""

    opening: str
    """The tag before a call; empty: calls are all that there is beside thoughts."""
    closing: str
    """The tag behind a call; empty: calls reach to the end of the text."""
    read: Callable[[str], Sequence[Call] | None]
    """The calls in what stands between the tags; None: there are none."""


def read_reply(
    text: str,
    syntax: CallSyntax | None = None,
    *,
    tags: ThinkTags = THINK_TAGS,
    thinking: bool = False,
) -> Parsed:
    """`text` apart from its thoughts and, where `syntax` says how they are written, its calls.

    Thoughts are what stands between their tags; behind an opening tag without a closing one all
    that follows; before a closing tag without an opening one all that precedes, as templates see
    it. What looks like a call inside a thought is none, and tags inside a call's arguments are part
    of those. `thinking`: the text begins inside a thought, which its prompt opened. What is no
    well-formed call stays content.
    """
    telling = [tag for pair in tags for tag in pair] + ([syntax.opening] if syntax else [])
    if not thinking and not any(tag in text for tag in telling):
        return Parsed(text)
    return _Reader(text, syntax, tags, thinking=thinking).read()


class _TextPart(NamedTuple):
    kind: Literal["said", "calls", "thought"]
    text: str
    calls: Sequence[Call] = ()


class _Reader:
    """One pass over the tags of a reply."""

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
        self._tags = list(re.finditer("|".join(map(re.escape, words)), text))
        self._attempts = self._plan_attempts()
        # Calls have no tag before them: they may begin wherever content begins.
        self._untagged = syntax is not None and not syntax.opening
        self._parts: list[_TextPart] = []
        self._settled = 0  # parts that a closing tag turned into thoughts
        self._at = 0  # where the part that is being read begins
        # The tags that end the thought that is being read: any that the prompt may have opened.
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
                self._end_part("said", tag)
                self._ends = frozenset({self._closing_of[word]})
            elif word in self._closings:
                self._end_part("said", tag)
                later = "".join(part.text for part in self._parts[self._settled :])
                self._parts[self._settled :] = [_TextPart("thought", later)]
                self._settled = len(self._parts)
                skip = begin_content(index + 1)
            elif self._syntax is not None and word == self._syntax.opening:
                skip = self._try_calls(index)
        self._end_part("thought" if self._ends else "said")
        return self._result()

    def _result(self) -> Parsed:
        if all(part.kind == "said" for part in self._parts) and not self._settled:
            whole = "".join(part.text for part in self._parts)
            if len(whole) == len(self._text):
                return Parsed(self._text)
        said = "".join(part.text for part in self._parts if part.kind == "said")
        thoughts = (part.text.strip() for part in self._parts if part.kind == "thought")
        calls = tuple(call for part in self._parts if part.kind == "calls" for call in part.calls)
        return Parsed(said.strip(), calls, "\n".join(filter(None, thoughts)))

    def _end_part(self, kind: Literal["said", "thought"], tag: re.Match[str] | None = None) -> None:
        end = tag.start() if tag is not None else len(self._text)
        if end > self._at:
            self._parts.append(_TextPart(kind, self._text[self._at : end]))
        self._at = tag.end() if tag is not None else end

    def _plan_attempts(self) -> dict[int, int]:
        """By the index of the tag that a call may begin at (without such tags: of the one behind
        which content begins, plus 1), the index of the tag that would end it.

        Any stretch of the text is in a few of them only, however many tags there are.
        """
        tags, syntax = self._tags, self._syntax
        if syntax is None:
            return {}
        if not syntax.closing:
            # Calls reach to the end: they begin at the first places where they can, or the last.
            ends = [i for i, tag in enumerate(tags) if tag[0] in self._closings]
            if syntax.opening:
                begins = [i for i, tag in enumerate(tags) if tag[0] == syntax.opening]
            else:
                begins = [0, *(i + 1 for i in ends)]
            later = [i for i in begins if not ends or i > ends[-1]]
            return dict.fromkeys((*begins[:2], *later[:1], *begins[-1:]), len(tags))
        # A closing tag ends what began at the first opening tag since the one before it; where that
        # is no call, what began at the last.
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
        """Take the calls that begin here, if there are any. Returns where to read on."""
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
            self._parts.append(_TextPart("said", self._text[self._at : begin]))
        self._parts.append(_TextPart("calls", self._text[begin:end], calls))
        self._at = end
        return end
