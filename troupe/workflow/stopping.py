"""Ends a response at a string that no single token stands for.

Engines stop at tokens. A response that contains one of `Sampling.stop_strings` is cut behind the
first token that completes it, as an engine would have that stops there: which token that is depends
only on those before it, so what is kept was drawn from the policy, with the log-probs it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from troupe.workflow.backend import Generation, Sampling, Span
from troupe.workflow.conversation import ChatTokenizer


@dataclass(frozen=True, slots=True)
class _Span:
    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CutGeneration:
    """The beginning of a generation."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[Span]
    finish_reason: str
    cached_tokens: int
    queue_seconds: float
    generate_seconds: float


def with_stop_tokens(sampling: Sampling, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Stop tokens, and stop strings that are one token: there the engine itself can end."""
    ids = dict.fromkeys(sampling.stop_token_ids)
    for text in sampling.stop_strings:
        spelled = tokenizer.encode(text)
        if len(spelled) == 1 and tokenizer.transcript(spelled) == text:
            ids[spelled[0]] = None
    return tuple(ids)


def cut_at(
    generation: Generation, strings: Sequence[str], tokenizer: ChatTokenizer
) -> tuple[Generation, str] | None:
    """The response up to the first of `strings`, and its text before that; None: it has none."""

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
    kept = CutGeneration(
        token_ids=ids[:last],
        logprobs=generation.logprobs[:last],
        versions=[
            _Span(s.version, s.start, min(s.end, last))
            for s in generation.versions
            if s.start < last
        ],
        finish_reason="stop",
        cached_tokens=generation.cached_tokens,
        queue_seconds=generation.queue_seconds,
        generate_seconds=generation.generate_seconds,
    )
    return kept, text[: first_of(strings, text)]


def first_of(strings: Sequence[str], text: str) -> int | None:
    """Where the first of `strings` begins in `text`; None where it has none of them."""
    return min((at for at in map(text.find, strings) if at >= 0), default=None)
