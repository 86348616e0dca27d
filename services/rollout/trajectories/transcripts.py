"""Transcripts of trajectories for people: the choice of those to keep, and their messages.

The orchestrator receives every trajectory's numbers, but texts of only a bounded number per step,
so that the data that it receives and stores does not grow with the length of conversations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from services.rollout.trajectories.records import spans_of
from troupe.job import JobSpec
from troupe.outcomes import safe_text, utf8_text
from troupe.scheduling.admission import keeps_text, keeps_tokens
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import TurnRecord

# Tokens of one trajectory that are kept for people to look at.
MOST_TOKENS: Final = 65_536
# Steps whose failures are counted: the maximum that is open at once.
_COUNTED_STEPS: Final = 64


class TranscriptChoice:
    """The choice of a job's trajectories whose texts are sent to the orchestrator."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        # Failed trajectories whose texts were sent from this worker, by step or evaluation.
        self._failed: Counter[tuple[str, int]] = Counter()

    def add_turns(
        self,
        event: rollout_pb.TrajectoryEvent,
        turns: Sequence[TurnRecord],
        *,
        evaluation: str | None,
        step: int,
    ) -> None:
        """Add the turns of an ended trajectory to the event that reports its end.

        `evaluation`: the name of its evaluation, None in training and matches.
        """
        pipeline = self._spec.pipeline
        text = keeps_text(
            event.trajectory_id,
            wanted=self._spec.logging.trajectories,
            of=pipeline.queries_per_step * pipeline.group_size,
            samples=1 if evaluation is None else self._spec.evaluation_of(evaluation).samples,
        )
        if not text and event.state == common_pb.TRAJECTORY_STATE_FAILED:
            text = self._keeps_failed(evaluation or "", step)
        tokens = keeps_tokens(event.trajectory_id, pipeline.queries_per_step)
        event.without_text = not (text or tokens)
        event.turns.extend(transcript_of(turns, text=text or tokens, tokens=tokens))

    def _keeps_failed(self, evaluation: str, step: int) -> bool:
        key = (evaluation, step)
        if self._failed[key] >= self._spec.logging.trajectories:
            return False
        self._failed[key] += 1
        if len(self._failed) > _COUNTED_STEPS:
            del self._failed[min(self._failed, key=lambda one: one[1])]
        return True


def transcript_of(
    turns: Sequence[TurnRecord], *, text: bool = True, tokens: bool = False
) -> list[rollout_pb.Turn]:
    """Return the answered turns in the form of trajectory events.

    `text`: with messages and replies; messages that a turn repeats from the same agent's previous
    turn are left out (`Turn.shared_messages`). `tokens`: with their tokens, up to a limit.
    """
    shown = []
    left = MOST_TOKENS if tokens else 0
    # By agent: its last turn, and that turn's messages.
    last: dict[str, tuple[int, Sequence[tuple[str, str]]]] = {}
    for turn in turns:
        reply, generation = turn.reply, turn.generation
        if reply is None or generation is None:
            continue
        one = rollout_pb.Turn(
            agent=turn.role.name,
            policy=turn.role.policy,
            turn=turn.position,
            prompt_tokens=len(turn.prompt_ids),
            response_tokens=len(reply.response),
            cached_tokens=generation.cached_tokens,
            versions=spans_of(turn),
            finish_reason=generation.finish_reason,
            queue_seconds=generation.queue_seconds,
            generate_seconds=generation.generate_seconds,
            concurrency=generation.concurrency,
            reward=reply.reward,
        )
        if text:
            said = turn.messages or (("prompt", turn.role.tokenizer.transcript(turn.prompt_ids)),)
            before, known = last.get(one.agent, (0, ()))
            if shared := _common(known, said):
                one.shared_turn, one.shared_messages = before, shared
            one.messages.extend(common_pb.ChatMessage(role=r, content=c) for r, c in said[shared:])
            # A workflow may have assigned anything to it.
            one.response = (
                utf8_text(reply.text) if isinstance(reply.text, str) else safe_text(reply.text)
            )
            last[one.agent] = (one.turn, said)
        left -= len(generation.token_ids)
        if left >= 0:
            one.tokens.CopyFrom(
                rollout_pb.TurnTokens(
                    ids=generation.token_ids,
                    texts=turn.role.tokenizer.texts(generation.token_ids),
                    logprobs=generation.logprobs,
                )
            )
        shown.append(one)
    return shown


def _common(one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]) -> int:
    """Return the number of messages with which both conversations begin."""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return index
    return min(len(one), len(other))
