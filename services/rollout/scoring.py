"""Log-probs of given continuations: the Score call, and teachers of a distillation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from services.rollout.engines.requests import Scored, ScoreRequest
from services.rollout.prepared_job import PreparedJob
from services.rollout.serving.policy import ServedPolicy
from troupe.contracts import kinds
from troupe.job.sections.algorithm import TEACHER_COLUMN
from troupe.rpc.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Unavailable,
)
from troupe.tensors import from_proto, to_proto
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import WorkflowError
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.messages import parse_messages

# Larger requests would occupy an engine for a long time while others wait.
MAX_TOKENS: Final = 1 << 20
# Larger requests are tokenised in a thread, to keep the event loop free.
_BYTES_READ_AT_ONCE: Final = 65_536
_RETRY_SECONDS: Final = 0.05


async def score(
    job: PreparedJob, policy: ServedPolicy, request: rollout_pb.ScoreRequest
) -> rollout_pb.ScoreResponse:
    """Return the log-probs of continuations under one served version of `policy`, within
    `limits.turn_seconds`.

    A lost engine is replaced by another. Raises `InvalidArgument` naming the prompt at fault,
    `FailedPrecondition` (another version is served, or the engine cannot score) and
    `DeadlineExceeded`.
    """
    roles = job.program.roles.values()
    role = next((role for role in roles if role.policy == policy.name), None)
    temperature = (role.sampling.temperature if role else 1.0) or 1.0  # greedy sampling counts as 1
    if request.HasField("temperature"):
        temperature = request.temperature
    if not 0.0 < temperature < float("inf"):
        raise InvalidArgument(
            "log-probs need a positive temperature", field="temperature", value=temperature
        )
    chat, system = policy.language.chat, role.system_prompt if role else None

    def tokenise() -> list[list[ScoreRequest]]:
        return [_prompt(chat, system, at, one) for at, one in enumerate(request.prompts)]

    large = request.ByteSize() > _BYTES_READ_AT_ONCE
    prompts = await asyncio.to_thread(tokenise) if large else tokenise()
    requests = [one for continuations in prompts for one in continuations]
    tokens = sum(len(one.prompt_ids) + len(one.ids) for one in requests)
    if tokens > MAX_TOKENS:
        raise InvalidArgument(
            f"they have {tokens} tokens, but one call scores at most {MAX_TOKENS}",
            field="prompts",
            value=len(prompts),
            remedy="Use several calls; each answer names its version.",
        )
    wanted = request.version if request.HasField("version") else None
    scored = await _score(policy, requests, temperature, wanted, job.spec.limits.turn_limit)
    rows = iter(scored.logprobs)
    return rollout_pb.ScoreResponse(
        prompts=[
            rollout_pb.ScoredPrompt(
                input_ids=continuations[0].prompt_ids,
                continuations=[
                    rollout_pb.ScoredContinuation(ids=one.ids, logprobs=row, logprob=sum(row))
                    for one, row in zip(continuations, rows, strict=False)
                ],
            )
            for continuations in prompts
        ],
        version=scored.version,
        checksum=scored.checksum,
    )


async def _score(
    policy: ServedPolicy,
    requests: Sequence[ScoreRequest],
    temperature: float,
    version: int | None,
    seconds: float,
) -> Scored:
    deadline = time.monotonic() + seconds
    lost: Unavailable | None = None
    # Waits for an engine that serves the version; each round may use another engine.
    while (left := deadline - time.monotonic()) > 0:
        check_version(policy, version)
        able = [one for one in policy.serving_engines if version in (None, one.version)]
        if able:
            engine = min(able, key=lambda one: one.load().outstanding_tokens)
            try:
                scored = await engine.score(requests, temperature, deadline_seconds=left)
            except Unavailable as error:  # the engine died, updates or leaves
                lost = error
            else:
                if version in (None, scored.version):
                    return scored
        await asyncio.sleep(_RETRY_SECONDS)
    raise DeadlineExceeded(
        f"policy '{policy.name}' scored nothing within {seconds:g} s"
        + (f"; {lost.message}" if lost is not None else "; no engine serves it"),
        kind="score_deadline",
        field="limits.turn_seconds",
        value=f"{seconds:g}",
        remedy="Allow more time per turn, ask for fewer at once, or add engine replicas.",
    )


async def add_teacher_logprobs(
    job: PreparedJob, samples: Sequence[store_pb.Sample], prompts: Sequence[Sequence[int]]
) -> None:
    """Add the column of teachers' log-probs to samples of agents that learn from a teacher through
    its engines (`distillation.divergence: sampled`), at the temperature of the samples. `prompts`:
    their whole prompts.

    Raises `WorkflowError` of kind "teacher" for engines that cannot score, and of kind
    "teacher_deadline" if none did in time, which fails only this trajectory.
    """
    spec = job.spec.algorithm.distillation
    if spec is None or spec.divergence != "sampled":
        return
    asked: dict[tuple[str, float], list[tuple[store_pb.Sample, Sequence[int]]]] = {}
    for sample, prompt in zip(samples, prompts, strict=True):
        if (teacher := spec.teachers.get(sample.agent)) is not None:
            asked.setdefault((teacher, sample.temperature or 1.0), []).append((sample, prompt))
    for (teacher, temperature), some in asked.items():
        requests = [
            ScoreRequest(tuple(prompt), tuple(from_proto(one.response_ids).tolist()))
            for one, prompt in some
        ]
        limit = job.spec.limits.turn_limit
        try:
            scored = await _score(job.policies[teacher], requests, temperature, None, limit)
        except (FailedPrecondition, InvalidArgument, DeadlineExceeded, Internal) as error:
            late = isinstance(error, DeadlineExceeded)
            raise WorkflowError(
                f"teacher '{teacher}' cannot score a student's reply: {error.message}",
                kind="teacher_deadline" if late else kinds.TEACHER,
                field="algorithm.distillation.teachers",
                value=teacher,
                remedy=error.remedy,
            ) from error
        for (sample, _), row in zip(some, scored.logprobs, strict=True):
            sample.columns[TEACHER_COLUMN].tensor.CopyFrom(to_proto(np.array(row, np.float32)))


def check_version(policy: ServedPolicy, version: int | None) -> None:
    """Raise FailedPrecondition ("version_not_served") unless `version` is the target or None."""
    if version is not None and policy.weights.version != version:
        raise FailedPrecondition(
            f"policy '{policy.name}' is at version {policy.weights.version}",
            kind=kinds.VERSION_NOT_SERVED,
            field="version",
            value=version,
            remedy="Ask for the served version, or leave the version out.",
        )


def _prompt(
    chat: ChatTokenizer, system: str | None, at: int, prompt: rollout_pb.ScorePrompt
) -> list[ScoreRequest]:
    """Return the continuations of one prompt as token ids."""
    field = f"prompts.{at}"
    if bool(prompt.messages) == bool(prompt.input_ids):
        raise InvalidArgument(
            "give exactly one of messages and input_ids",
            field=f"{field}.messages",
            remedy="Send chat messages, or token ids of the policy's tokenizer.",
        )
    if not prompt.continuations:
        raise InvalidArgument("it has no continuations", field=f"{field}.continuations")
    ids = tuple(prompt.input_ids) or _chat_ids(chat, system, field, prompt.messages)
    return [
        ScoreRequest(ids, _ids(chat, f"{field}.continuations.{number}", one))
        for number, one in enumerate(prompt.continuations)
    ]


def _chat_ids(
    chat: ChatTokenizer, system: str | None, field: str, messages: Sequence[common_pb.ChatMessage]
) -> tuple[int, ...]:
    plain = [{"role": m.role, "content": m.content} for m in messages]
    try:
        return tuple(chat.first_ids(parse_messages(plain, system)))
    except WorkflowError as error:
        raise InvalidArgument(
            error.message, kind=error.kind, field=f"{field}.messages", remedy=error.remedy
        ) from error


def _ids(chat: ChatTokenizer, field: str, one: rollout_pb.ScoreContinuation) -> tuple[int, ...]:
    if one.text and one.ids:
        raise InvalidArgument("give text or ids, not both", field=field)
    ids = tuple(one.ids) or chat.encode(one.text)
    if one.ends:
        if chat.end_id is None:
            raise InvalidArgument(
                "the policy's tokenizer has no end-of-sequence token",
                field=f"{field}.ends",
                remedy="Give the ids that end a turn.",
            )
        ids = (*ids, chat.end_id)
    if not ids:
        raise InvalidArgument(
            "it has no tokens", field=field, remedy="Give text, ids, or only `ends`."
        )
    return ids
