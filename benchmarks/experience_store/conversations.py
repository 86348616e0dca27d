"""Bytes of conversations of cumulative turns on their way from rollout to a trainer.

Each turn begins with all earlier messages, and adds as many tokens of prompt as of reply. `unique`
is a conversation's size as one sequence: ids, log-probs of replies and, for a mixture of experts,
routes. Measurements are relative to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import redis

from benchmarks.experience_store.scale import used_bytes
from benchmarks.experience_store.served import CALL_SECONDS, MICRO_BATCH, create, drop
from benchmarks.experience_store.servers import Stub
from benchmarks.experience_store.workload import (
    GROUP_SIZE,
    Shape,
    claim_request,
    commit_request,
    make_row,
    open_request,
)
from services.trainer.claims import RecentClaims
from troupe import prefixes, tensors
from troupe.job.sections.algorithm import ROUTES_COLUMN
from troupe.rpc import new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

TURNS = 10
LINKS = ("rollout to store", "Redis", "append-only file", "store to trainer")
Claim = store_pb.ClaimMicroBatchResponse


@dataclass(frozen=True)
class Talk:
    """Conversations of one size."""

    tokens: int
    """Tokens of a whole conversation of `TURNS` turns."""
    queries: int
    routes: int = 0
    """Bytes per token of its routes to experts."""


@dataclass(frozen=True)
class Carried:
    """Bytes of each of `LINKS` over the unique bytes."""

    talk: Talk
    once: dict[str, float]
    whole: dict[str, float]
    """The same if every turn carries all its tokens."""


def _append(
    job: str, talk: Talk, query: str, trajectory: str, *, once: bool
) -> store_pb.AppendTrajectoryRequest:
    each = talk.tokens // TURNS // 2
    rng = np.random.default_rng(abs(hash(trajectory)) % 2**32)
    ids = rng.integers(0, 150_000, talk.tokens, dtype=np.int32)
    routes = rng.integers(0, 128, (talk.tokens - 1, talk.routes), dtype=np.uint8)
    index, samples = prefixes.PrefixIndex(), []
    for turn in range(TURNS):
        end = 2 * each * (turn + 1)
        prompt, response = ids[: end - each], ids[end - each : end]
        columns: dict[str, Any] = {ROUTES_COLUMN: routes[: end - 1]} if talk.routes else {}
        own = prefixes.OwnPart(None, prompt, columns)
        if once:
            own = index.add("solver", turn, prompt, response, columns)
        sample = make_row(Shape(2, 1, TURNS), query, trajectory, turn)
        sample.reward = 1.0
        sample.prompt_ids.CopyFrom(tensors.ids_to_proto(own.prompt))
        sample.response_ids.CopyFrom(tensors.ids_to_proto(response))
        sample.logprobs.CopyFrom(tensors.to_proto(rng.random(each, dtype=np.float32)))
        for name, value in own.columns.items():
            sample.columns[name].tensor.CopyFrom(tensors.to_proto(value))
        if own.stem is not None:
            sample.stem.CopyFrom(own.stem)
        samples.append(sample)
    return store_pb.AppendTrajectoryRequest(
        request_id=new_id("append"),
        job_id=job,
        step=0,
        query_id=query,
        trajectory_id=trajectory,
        state=common_pb.TRAJECTORY_STATE_COMPLETED,
        samples=samples,
    )


def _unique(talk: Talk) -> int:
    return talk.tokens * 4 + talk.tokens // 2 * 4 + (talk.tokens - 1) * talk.routes


async def carried(stub: Stub, client: redis.Redis, talk: Talk) -> Carried:
    """Measure the conversations of a step, with each token once and with repeated tokens."""
    return Carried(
        talk,
        await _measured(stub, client, talk, once=True),
        await _measured(stub, client, talk, once=False),
    )


async def _measured(stub: Stub, client: redis.Redis, talk: Talk, *, once: bool) -> dict[str, float]:
    job = await create(stub)
    shape = Shape(talk.tokens, talk.queries, TURNS)
    await stub.OpenStep(open_request(job, 0, shape))
    memory, file = await used_bytes(client), _file_bytes(client)
    sent = 0
    for query, trajectory in shape.trajectories(0):
        append = _append(job, talk, query, trajectory, once=once)
        sent += append.ByteSize()
        await stub.writer.append(append, CALL_SECONDS)
    found = [sent, await used_bytes(client) - memory, _file_bytes(client) - file]
    claims, received, recent = list[str](), 0, RecentClaims()
    while True:
        request = claim_request(job, 0, MICRO_BATCH)
        request.known_claims.extend(recent.claim_ids)
        answer = await stub.claim(request)
        claim = Claim.FromString(answer)
        if claim.outcome == Claim.OUTCOME_EXHAUSTED:
            break
        received += len(answer)
        claims.append(claim.claim_id)
        recent.complete(claim)
        for item in prefixes.restore(claim.samples, claim.stems):
            each = talk.tokens // TURNS // 2
            if len(tensors.from_proto(item.sample.prompt_ids)) != each * (2 * item.sample.turn + 1):
                raise RuntimeError(f"{item.sample.sample_id} lacks some of its tokens")
    await stub.CommitStep(commit_request(job, 0, claims))
    await drop(stub, job)
    unique = _unique(talk) * talk.queries * GROUP_SIZE
    return {link: number / unique for link, number in zip(LINKS, [*found, received], strict=True)}


def _file_bytes(client: redis.Redis) -> int:
    """Return the append-only file's length, including what Redis has not written to it yet: on a
    busy disk, that may be all of the last seconds."""
    info = client.info("persistence")
    return int(info["aof_current_size"]) + int(info["aof_buffer_length"])
