"""A turn that is drawn in several pieces, because it lost its engine in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.rollout.engines.base import FinishReason, Generation, SamplingParams, VersionSpan


class Continuation:
    """What is still to be drawn of a turn, and what has been.

    Where `resume` is set, tokens that an engine hands over are kept: the next engine reads prompt
    and tokens and goes on, each token with the seed and the position that it would have had, so
    what is said depends on the loss only through newer weights and rounding. Else the turn starts
    over: a deterministic job promises the same bits, and how a prompt was read changes them.
    """

    def __init__(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, resume: bool
    ) -> None:
        self._prompt = list(prompt_ids)
        self._sampling = sampling
        self._resume = resume
        self._pieces: list[Generation] = []
        self.tokens = 0
        """Response tokens that are kept."""

    @property
    def prompt_ids(self) -> list[int]:
        """What the next engine reads."""
        if not self.tokens:
            return self._prompt
        return self._prompt + [t for piece in self._pieces for t in piece.token_ids]

    @property
    def sampling(self) -> SamplingParams:
        """How it goes on."""
        if not self.tokens:
            return self._sampling
        left = self._sampling.max_new_tokens - self.tokens
        return replace(self._sampling, max_new_tokens=left, drawn=self.tokens)

    @property
    def complete(self) -> bool:
        """Whether no token may be added."""
        return self.tokens >= self._sampling.max_new_tokens

    def ended_by(self, piece: Generation) -> bool:
        """Whether an engine was lost just after it had drawn the turn's last token."""
        return self._resume and piece.finish_reason != "abort"

    def keep(self, piece: Generation | None) -> int:
        """An engine was lost after it had drawn `piece`; how many tokens of it are kept."""
        if piece is None or not self._resume or not piece.token_ids:
            return 0
        self._pieces.append(piece)
        self.tokens += len(piece.token_ids)
        return len(piece.token_ids)

    def whole(self, last: Generation, waited: float) -> Generation:
        """The turn, `last` being its last piece; `waited`: seconds in the router's queue."""
        if not self._pieces:
            return replace(last, queue_seconds=last.queue_seconds + waited)
        return self._join([*self._pieces, last], last.finish_reason, waited)

    def cut(self, waited: float) -> Generation:
        """The turn as far as it got: there is no room for more. There must be a piece."""
        return self._join(self._pieces, "length", waited)

    def _join(
        self, pieces: Sequence[Generation], reason: FinishReason, waited: float
    ) -> Generation:
        spans: list[VersionSpan] = []
        offset = 0
        for piece in pieces:
            for span in piece.versions:
                start, end = span.start + offset, span.end + offset
                if spans and spans[-1].version == span.version:
                    start = spans.pop().start
                spans.append(VersionSpan(span.version, start, end))
            offset += len(piece.token_ids)
        return Generation(
            token_ids=[t for piece in pieces for t in piece.token_ids],
            logprobs=[p for piece in pieces for p in piece.logprobs],
            versions=spans,
            finish_reason=reason,
            cached_tokens=pieces[0].cached_tokens,
            queue_seconds=waited + sum(piece.queue_seconds for piece in pieces),
            generate_seconds=sum(piece.generate_seconds for piece in pieces),
        )
