"""Predefined rewards for the contents of a reply: exact answers, patterns, JSON, formats, lengths,
code.

A job selects one, for example with `ready: exact`; its arguments are checked when the job is
submitted (`READY` in `troupe/job/sections/functions.py`). Each reward scores the last reply of
`agent` for that agent, or by default the last reply of the trajectory for all agents, with a number
from 0 to 1, times `weight`.
"""

from __future__ import annotations

import ast
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatch
from itertools import chain
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any, Final

from troupe.functions.declaration import reward
from troupe.functions.library.code import TEST_FILES, run_pytest
from troupe.outcomes import shown
from troupe.replies.reading import (
    read_blocks,
    read_fenced_json,
    read_json,
    read_reply,
    read_span,
)

_SPACE: Final = re.compile(r"\s+")
_NEWLINE: Final = re.compile(r"\r\n?")
_NOT_JSON: Final = object()
# Info strings of Python blocks: `python title="x"`, `Python3.11`, `{.py}`, `solution.py`.
_PYTHON: Final = re.compile(
    r"(?:[{.\s]*(?:lang(?:uage)?[-=:])?i?py(?:thon)?[\d.]*|\S*\.py)(?![\w+#-])", re.IGNORECASE
)
_LANGUAGE: Final = re.compile(r"\Ai?py(?:thon)?\d?\s+", re.IGNORECASE)
# Maps the typographic minus sign, hyphens, the en dash and full-width characters to ASCII, and
# removes spaces of zero width.
_ASCII: Final[dict[int, int | str]] = {
    **dict.fromkeys((0x200B, 0x2060, 0xFEFF), ""),
    **dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212, 0xFE63), "-"),
    **{0xFEE0 + code: code for code in range(0x21, 0x7F)},
}
THOUSANDS: Final = re.compile(r"(?<![\d.])\d{1,3}(?:[,\s]\d{3})+(?![\d,])")
_TESTS_REMEDY: Final = "Give the query the text of a pytest file, or texts by file name."
_NO_TESTS: Final = ("conftest.py", "__init__.py")

Reference = str | Decimal | bool
"""A reference answer: a text, number or truth value of the data."""


class BadReferenceError(ValueError):
    """A field of the query does not contain a value that a reply can be compared with."""

    def __init__(self, field: str, value: object, why: str, remedy: str) -> None:
        super().__init__(f"{field!r} of the query is {shown(value, 200)}: {why}. {remedy}")


@reward(timeout_seconds=20)
def exact(
    query: dict[str, Any],
    turns: list[dict[str, Any]],
    rewards: dict[str, float],
    *,
    answer: str = "answer",
    answer_pattern: str = "",
    reply_pattern: str = "",
    ignore_case: bool = False,
    agent: str = "",
    weight: float = 1.0,
) -> float | dict[str, float]:
    """Return 1 if the reply is the query's answer, or one of the answers if it is a list; else 0.

    Texts are compared with white space folded and full-width characters as ASCII, numbers of the
    data by their decimal value (1.50 is 1.5), and truth values as `true` and `false` in any case.
    `answer_pattern` and `reply_pattern` extract the compared parts. Raises `BadReferenceError`.
    """
    wanted = references(query, answer, answer_pattern)
    said = cut(spoken(turns, agent), reply_pattern)
    right = said is not None and any(_equals(said, one, ignore_case) for one in wanted)
    return rewarded(float(right), agent, weight)


@reward(timeout_seconds=20)
def regex(
    query: dict[str, Any],
    turns: list[dict[str, Any]],
    rewards: dict[str, float],
    *,
    pattern: str,
    whole: bool = False,
    agent: str = "",
    weight: float = 1.0,
) -> float | dict[str, float]:
    """Return 1 if `pattern` is found in the reply, or, with `whole`, matches all of it; else 0."""
    find = re.fullmatch if whole else re.search
    text = spoken(turns, agent)
    found = text is not None and find(pattern, text) is not None
    return rewarded(float(found), agent, weight)


@reward(timeout_seconds=20)
def json_schema(
    query: dict[str, Any],
    turns: list[dict[str, Any]],
    rewards: dict[str, float],
    *,
    json_schema: dict[str, Any] | None = None,
    field: str = "",
    agent: str = "",
    weight: float = 1.0,
) -> float | dict[str, float]:
    """Return 1 if the reply is JSON that matches a JSON schema, else 0. The schema is
    `json_schema`, or the query's `field`, an object or its JSON text. A fence around the reply is
    ignored. Raises `BadReferenceError`."""
    schema = given = data_of(query, field) if json_schema is None else json_schema
    if isinstance(given, str):
        schema = read_json(given)
    try:
        validator = schema_validator(schema)
    except ValueError as error:
        remedy = "Give the query a JSON schema, as an object or as its JSON text."
        raise BadReferenceError(field, given, f"{error}", remedy) from error
    value = read_fenced_json(spoken(turns, agent) or "", _NOT_JSON)
    try:
        valid = value is not _NOT_JSON and validator.is_valid(value)
    except RecursionError:  # the schema refers to itself endlessly
        valid = False
    return rewarded(float(valid), agent, weight)


def schema_validator(schema: Any) -> Any:
    """Return the validator of a JSON schema, which also checks `format`.

    Raises ValueError if it is not a JSON schema of a known draft, or if a reference leads nowhere
    or out of the schema: nothing is fetched from the network.
    """
    from jsonschema import SchemaError, validators
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    def check_references(part: Any, resolver: Any) -> None:
        if isinstance(part.contents, dict):
            for name in ("$ref", "$dynamicRef"):
                if isinstance(to := part.contents.get(name), str):
                    resolver.lookup(to)
        for one in part.subresources():
            check_references(one, resolver.in_subresource(one))

    if not isinstance(schema, dict):
        raise ValueError("it is not a JSON schema")
    kind = validators.validator_for(schema, default=None)
    if kind is None and "$schema" in schema:
        raise ValueError(f"$schema: {shown(schema['$schema'])} is not a draft of JSON Schema")
    kind = kind or validators.validator_for({})
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        where = "".join(f"{part}." for part in error.path)
        raise ValueError(f"{where.rstrip('.')}: {error.message}".removeprefix(": ")) from error
    specification = specification_with(kind.META_SCHEMA["$schema"])
    root = Resource.from_contents(schema, default_specification=specification)
    try:
        check_references(root, Registry().resolver_with_root(root))
    except Unresolvable as error:
        raise ValueError(f"{shown(error.ref)} does not refer to a part of the schema") from error
    return kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)


@reward(timeout_seconds=20)
def tags(
    query: dict[str, Any],
    turns: list[dict[str, Any]],
    rewards: dict[str, float],
    *,
    tags: list[str],
    opened: bool = False,
    agent: str = "",
    weight: float = 1.0,
) -> float | dict[str, float]:
    """Return 1 if the reply consists of `<tag>...</tag>` for each of `tags`, once and in this
    order; else 0. `opened`: the prompt ends with the first opening tag."""
    text = last_of(turns, agent) or ""
    if opened:
        text = f"<{tags[0]}>{text}"
    parts = r"\s*".join(f"<{re.escape(tag)}>.*?</{re.escape(tag)}>" for tag in tags)
    once = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags)
    good = once and re.fullmatch(rf"\s*{parts}\s*", text, re.DOTALL) is not None
    return rewarded(float(good), agent, weight)


@reward(timeout_seconds=20)
def length(
    query: dict[str, Any],
    turns: list[dict[str, Any]],
    rewards: dict[str, float],
    *,
    most: int,
    least: int = 0,
    margin: int = 0,
    unit: str = "tokens",
    agent: str = "",
    weight: float = 1.0,
) -> float | dict[str, float]:
    """Return 1 if the reply has `least` to `most` tokens (characters, words); outside these bounds
    the reward falls linearly, to 0 at a distance of `margin`. Thoughts count."""
    text = last_of(turns, agent)
    if text is None:
        return rewarded(0.0, agent, weight)
    if unit == "tokens":
        size = next(turn["tokens"] for turn in reversed(turns) if agent in ("", turn["agent"]))
    else:
        size = len(text.split()) if unit == "words" else len(text)
    over = max(size - most, least - size, 0)
    return rewarded(max(0.0, 1.0 - over / (margin or 1)), agent, weight)


@reward(
    sandbox="bubblewrap",
    timeout_seconds=330,
    cores=1,
    max_cores=16,
    memory_mib=2048,
    disk_mib=512,
    processes=128,
)
def passes_tests(
    query: dict[str, Any],
    turns: list[dict[str, Any]],
    rewards: dict[str, float],
    *,
    tests: str = "tests",
    file: str = "solution.py",
    partial: bool = False,
    seconds: float = 30.0,
    agent: str = "",
    weight: float = 1.0,
) -> float | dict[str, float]:
    """Return 1 if the code of the reply (`code_in`) passes the query's tests, else 0. The tests are
    a text, or a dict of files, of which pytest's test files are run. `partial`: return the fraction
    that passes. Raises `BadReferenceError`."""
    files = _files_of(query, tests)
    paths, reply = _test_paths(files, tests, file), spoken(turns, agent)
    if reply is None:
        return rewarded(0.0, agent, weight)
    report = run_pytest(
        paths=paths,
        files={**files, file: code_in(reply)},
        seconds=seconds,
        isolated=True,
    )
    ran = report["passed"] + report["failed"] + report["errors"]
    if partial:
        return rewarded(report["passed"] / ran if ran else 0.0, agent, weight)
    return rewarded(float(report["exit_code"] == 0 and ran > 0), agent, weight)


@reward(timeout_seconds=30, memory_mib=1024)
def solves_puzzle(
    query: dict[str, Any],
    turns: list[dict[str, Any]],
    rewards: dict[str, float],
    *,
    reply_pattern: str = "",
    agent: str = "",
    weight: float = 1.0,
) -> float | dict[str, float]:
    """Return the reply's score from the scorer of the query's puzzle (`troupe.data.reasoning_gym`):
    1 for the right answer, and the scorer's own value for others. A fence around the answer is
    ignored."""
    from troupe.data.reasoning_gym import entry_of

    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            f'{error}: `pip install "troupe-rl[reasoning-gym]"` where the reward service runs'
        ) from error
    answer = cut(spoken(turns, agent), reply_pattern)
    score = reasoning_gym.get_score_answer_fn(data_of(query, "dataset"))
    entry = entry_of(data_of(query, "entry"))
    given = None if answer is None else _NEWLINE.sub("\n", answer).strip()
    blocks = read_blocks(given or "")
    if len(blocks) == 1 and blocks[0].info is not None:
        given = blocks[0].text.strip()
    try:
        value = score(given, entry)
    except Exception:
        # Several scorers raise for a malformed answer. For the right answer they raise only if the
        # entry is at fault.
        score(entry["answer"], entry)
        value = 0.0
    return rewarded(float(value), agent, weight)


def last_of(turns: Sequence[dict[str, Any]], agent: str) -> str | None:
    """Return the last reply of `agent`, or of all agents; None if there is none."""
    said = (str(turn["response"]) for turn in reversed(turns) if agent in ("", turn["agent"]))
    return next(said, None)


def spoken(turns: Sequence[dict[str, Any]], agent: str) -> str | None:
    """Return the result of `last_of` without thoughts."""
    text = last_of(turns, agent)
    return None if text is None else read_reply(text).content


def cut(text: str | None, pattern: str) -> str | None:
    """Return the last match of the first group of `pattern` (without groups: of all of it) in
    `text`; the whole text without a pattern; None if it does not match."""
    if text is None or not pattern:
        return text
    *_, found = [None, *re.finditer(pattern, text)]
    return found and found[1 if found.re.groups else 0]


def code_in(text: str) -> str:
    """Return the Python code of a reply: its last block marked as Python, else its last block
    without a language, else its last block. Without fenced blocks it is the whole reply, or the
    `<answer>...</answer>` at its end, and may be a code span."""
    blocks = [block for block in read_blocks(text) if block.info is not None]
    python = [block for block in blocks if _PYTHON.match(block.info or "")]
    unmarked = [block for block in blocks if not block.info]
    if chosen := python or unmarked or blocks:
        return chosen[-1].text
    whole = text.strip()
    code = whole
    if whole.endswith("</answer>"):
        code = whole.removesuffix("</answer>").rpartition("<answer>")[2].strip()
    span = read_span(code)
    if span != code:
        return _LANGUAGE.sub("", span)
    return text if code == whole else code


def data_of(query: dict[str, Any], name: str) -> Any:
    """Return a field of the query's data. Raises ValueError that names the existing fields."""
    data = query["data"]
    if name not in data:
        known = ", ".join(sorted(map(str, data)))
        raise ValueError(f"the query has no field {name!r}; it has: {known}")
    return data[name]


def references(query: dict[str, Any], answer: str, pattern: str) -> list[Reference]:
    """Return the query's answers. Raises `BadReferenceError` for an answer that is missing or not a
    single value, or in which `pattern` is not found."""
    given = data_of(query, answer)
    found = [_reference(answer, one) for one in (given if isinstance(given, list) else [given])]
    if not found:
        remedy = "Leave such rows out, or list at least one answer."
        raise BadReferenceError(answer, given, "it does not list an answer", remedy)
    if not pattern:
        return found
    parts = []
    for one in found:
        part = cut(written(one), pattern)
        if part is None:
            why = f"answer_pattern {pattern!r} is not found in it"
            raise BadReferenceError(answer, written(one)[-200:], why, "Change the pattern.")
        parts.append(part)
    return list(parts)


def plain_characters(text: str) -> str:
    """Return `text` with typographic minus signs, hyphens and full-width characters as ASCII, and
    without spaces of zero width."""
    return text.translate(_ASCII)


def read_number(text: str) -> Decimal | None:
    """Parse `text` as a decimal number, which may have an exponent, separators of thousands, digits
    of any script or a typographic minus sign; None if it is not one."""
    text = plain_characters(text).strip()
    if "_" in text:  # which Python allows between digits, and mathematics below them
        return None
    if found := THOUSANDS.search(text):
        text = text.replace(found[0], re.sub(r"[,\s]", "", found[0]))
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def written(one: Reference) -> str:
    """Return a reference as text: a number without an exponent."""
    return f"{one:f}" if isinstance(one, Decimal) else str(one)


def rewarded(value: float, agent: str, weight: float) -> float | dict[str, float]:
    """Return the reward of `agent`, or of all."""
    return {agent: value * weight} if agent else value * weight


def _reference(field: str, one: Any) -> Reference:
    if isinstance(one, str | bool):
        return one
    if isinstance(one, int):
        return Decimal(one)
    if isinstance(one, float) and math.isfinite(one):
        # The shortest decimal equal to this double, as written in the data.
        return Decimal(repr(one))
    if one is None or isinstance(one, float):
        why = "it is missing" if one is None or math.isnan(one) else "it is not finite"
        remedy = "Leave such rows out: a field that `tasks.columns` names drops rows without it."
    else:
        why = "it is not a single value"
        remedy = "Name the part with the answer, as in `tasks.columns: {answer: answers.text}`."
    raise BadReferenceError(field, one, why, remedy)


def _equals(said: str, wanted: Reference, ignore_case: bool) -> bool:
    if isinstance(wanted, Decimal):
        return read_number(said) == wanted
    if isinstance(wanted, bool):
        return folded(said, True) == str(wanted).lower()
    return folded(said, ignore_case) == folded(wanted, ignore_case)


def folded(text: str, ignore_case: bool = False) -> str:
    """Return `text` as it is compared with others."""
    # The same letter may be one character or a letter and its accent (Unicode, annex 15).
    text = unicodedata.normalize("NFC", _SPACE.sub(" ", plain_characters(text)).strip())
    return unicodedata.normalize("NFC", text.casefold()) if ignore_case else text


def _files_of(query: dict[str, Any], field: str) -> dict[str, str]:
    """Return the query's test files by name."""
    given = data_of(query, field)
    if isinstance(given, str):
        return {"test_solution.py": given}
    if not isinstance(given, Mapping):
        raise BadReferenceError(field, given, "it is neither text nor files", _TESTS_REMEDY)
    # Tables give every row the names of all rows, with null for missing values.
    files = {name: content for name, content in given.items() if content is not None}
    folders = {f"{one}" for name in files for one in PurePosixPath(normpath(name)).parents}
    for name, content in files.items():
        if normpath(name) in folders:
            raise BadReferenceError(field, given, f"{name!r} names a folder", _TESTS_REMEDY)
        if not isinstance(content, str):
            raise BadReferenceError(field, given, f"{name} is not text", _TESTS_REMEDY)
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            why = f"{name} leads out of the working directory"
            raise BadReferenceError(field, given, why, _TESTS_REMEDY)
    return files


def _test_paths(files: Mapping[str, str], field: str, solution: str) -> list[str]:
    """Select the tests among `files`: by pytest's names, else all Python modules."""
    modules = {
        name: PurePosixPath(name).name
        for name in sorted(files)
        if normpath(name) != normpath(solution) and files[name].strip() and name.endswith(".py")
    }
    named = [n for n, last in modules.items() if any(fnmatch(last, one) for one in TEST_FILES)]
    paths = named or [n for n, last in modules.items() if last not in _NO_TESTS]
    if not paths:
        raise BadReferenceError(field, dict(files), "it has no tests", _TESTS_REMEDY)
    for name in paths:
        try:
            tree = ast.parse(files[name].encode())  # bytes may begin with a byte order mark
        except (SyntaxError, ValueError) as error:
            raise BadReferenceError(field, files[name], f"{error}", _TESTS_REMEDY) from error
        # Further files may contain settings of pytest, or tests that this file imports.
        if len(files) == 1 and not any(map(_is_test, ast.walk(tree))):
            why = "it does not define a function `test_...`"
            raise BadReferenceError(field, files[name], why, _TESTS_REMEDY)
        # `unittest.IsolatedAsyncioTestCase` runs such methods.
        plain = [one.body for one in tree.body if isinstance(one, ast.ClassDef) and not one.bases]
        for node in chain(tree.body, *plain):
            if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test"):
                why = f"pytest does not run `async def {node.name}`"
                remedy = "Write a plain test that calls `asyncio.run`."
                raise BadReferenceError(field, files[name], why, remedy)
    return paths


def _is_test(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name.startswith("test")
    return isinstance(node, ast.ClassDef)
