"""The questions of an `Enumeration` as a Score call, and its answer as probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

from troupe.populations.enumerated import Question
from troupe.v1 import common_pb2 as common
from troupe.v1 import rollout_pb2 as pb


def score_request(
    questions: Sequence[Question],
    job_id: str,
    policy: str,
    *,
    ends: bool = False,
    version: int | None = None,
) -> pb.ScoreRequest:
    """Asks how likely every move's name is, by itself or, with `ends`, as the whole answer.

    `ends` where answers may be longer than a move (`sampling.max_new_tokens`).
    """
    prompts = [
        pb.ScorePrompt(
            messages=[common.ChatMessage(**message) for message in question.messages],
            continuations=[pb.ScoreContinuation(text=name, ends=ends) for name in question.moves],
        )
        for question in questions
    ]
    return pb.ScoreRequest(job_id=job_id, policy=policy, prompts=prompts, version=version)


def probabilities(
    questions: Sequence[Question], answer: pb.ScoreResponse
) -> list[dict[int, float]]:
    """Action -> probability of its name, by question: what `Enumeration.behaviours` takes."""
    return [
        {
            action: math.exp(one.logprob)
            for action, one in zip(question.moves.values(), prompt.continuations, strict=True)
        }
        for question, prompt in zip(questions, answer.prompts, strict=True)
    ]
