"""Ready rewards for what a reply says: exact answers, patterns, JSON, formats, lengths, code.

A job names one as `ready: exact`; its arguments are checked when the job is submitted (`READY` in
`troupe/job/functions.py`). Each scores the last reply of `agent` for that agent, by default the
last one of the trajectory for all agents, with a number from 0 to 1, times `weight`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from troupe.functions.declaration import reward
from troupe.functions.library.code import run_pytest
from troupe.model_output import read_json, read_reply

_FENCED: Final = re.compile(r"```[\w+-]*\n(.*?)```", re.DOTALL)
_SPACE: Final = re.compile(r"\s+")
_NOT_JSON: Final = object()


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
    """1 where the reply is the query's answer, or one of them where that is a list.

    White space counts as one blank, around the text not at all. `answer_pattern` and
    `reply_pattern` cut the compared parts out.
    """
    said = _folded(cut(spoken(turns, agent), reply_pattern) or "", ignore_case)
    wanted = [_folded(one, ignore_case) for one in references(query, answer, answer_pattern)]
    return rewarded(float(said in wanted), agent, weight)


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
    """1 where `pattern` is found in the reply, or is the `whole` of it."""
    find = re.fullmatch if whole else re.search
    return rewarded(float(find(pattern, spoken(turns, agent)) is not None), agent, weight)


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
    """1 where the reply is JSON that follows a JSON schema: `json_schema`, or the query's
    `field`. A fence around it is ignored."""
    from jsonschema import validators
    from referencing import Registry

    schema = json_schema if json_schema is not None else data_of(query, field)
    text = spoken(turns, agent).strip()
    fenced = _FENCED.fullmatch(text)
    value = read_json(fenced[1] if fenced else text, _NOT_JSON)
    # An empty registry: references lead nowhere but into the schema, never to the network.
    validator = validators.validator_for(schema)(schema, registry=Registry())
    valid = value is not _NOT_JSON and validator.is_valid(value)
    return rewarded(float(valid), agent, weight)


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
    """1 where the reply consists of `<tag>...</tag>` for each of `tags`, once and in this order.
    `opened`: the prompt ends with the first opening tag."""
    text = last_of(turns, agent)
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
    """1 where the reply has `least` to `most` tokens (characters, words); beyond these bounds it
    falls linearly, to 0 at `margin` from them. Thoughts count."""
    text = last_of(turns, agent)
    if unit == "tokens":
        size = next((turn["tokens"] for turn in reversed(turns) if agent in ("", turn["agent"])), 0)
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
    """1 where the code of the reply, its last fenced block, passes the query's tests: a text, or
    a dict of files. `partial`: the fraction that passes."""
    text = spoken(turns, agent)
    fenced = _FENCED.findall(text)
    given = data_of(query, tests)
    files = dict(given) if isinstance(given, dict) else {"test_solution.py": str(given)}
    report = run_pytest(
        paths=sorted(files),
        files={**files, file: fenced[-1] if fenced else text},
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
    """What the scorer of the query's puzzle gives the reply (`troupe.data.reasoning_gym`): 1 for
    the right answer, and as much as it sees fit for others."""
    import reasoning_gym

    answer = cut(spoken(turns, agent), reply_pattern)
    score = reasoning_gym.get_score_answer_fn(data_of(query, "dataset"))
    given = None if answer is None else answer.strip()
    return rewarded(float(score(given, data_of(query, "entry"))), agent, weight)


def last_of(turns: Sequence[dict[str, Any]], agent: str) -> str:
    """The last reply of `agent`, or of all agents; empty if there is none."""
    said = (turn["response"] for turn in reversed(turns) if agent in ("", turn["agent"]))
    return str(next(said, ""))


def spoken(turns: Sequence[dict[str, Any]], agent: str) -> str:
    """`last_of` without thoughts."""
    return read_reply(last_of(turns, agent)).content


def cut(text: str, pattern: str) -> str | None:
    """What the first group of `pattern` (without groups: all of it) matches last in `text`; all of
    the text without a pattern; None where it does not match."""
    if not pattern:
        return text
    *_, found = [None, *re.finditer(pattern, text)]
    return found and found[1 if found.re.groups else 0]


def data_of(query: dict[str, Any], name: str) -> Any:
    """A field of the query's data. Raises ValueError naming those that there are."""
    data = query["data"]
    if name not in data:
        known = ", ".join(sorted(map(str, data)))
        raise ValueError(f"the query has no field {name!r}; it has: {known}")
    return data[name]


def references(query: dict[str, Any], answer: str, pattern: str) -> list[str]:
    """The query's answers as texts. Raises ValueError for one in which `pattern` is not found."""
    given = data_of(query, answer)
    found = []
    for one in given if isinstance(given, list) else [given]:
        part = cut(str(one), pattern)
        if part is None:
            raise ValueError(f"answer_pattern {pattern!r} is not found in {str(one)[-200:]!r}")
        found.append(part)
    return found


def rewarded(value: float, agent: str, weight: float) -> float | dict[str, float]:
    """The reward of `agent`, or of all."""
    return {agent: value * weight} if agent else value * weight


def _folded(text: str, ignore_case: bool) -> str:
    text = _SPACE.sub(" ", text).strip()
    return text.casefold() if ignore_case else text
