"""What is kept of a trajectory's turns: rows for the store, a transcript for people."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.rollout.columns import Shelf
from troupe.job.critic import TEAM_COLUMN
from troupe.tensors import to_proto
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store
from troupe.v1 import rollout_pb2 as rollout
from troupe.workflow import Turn
from troupe.workflow.samples import SampleRow


def samples_of(
    rows: Sequence[SampleRow], *, ticket: rollout.Ticket, shelf: Shelf
) -> list[store.Sample]:
    """The rows of a trajectory as messages. Columns too large for a row are left on `shelf`."""
    samples = []
    for row in rows:
        turn, reply = row.turn, row.turn.reply
        assert reply is not None  # it would be no row
        columns = dict(reply.columns)
        if row.context is not None:
            columns[TEAM_COLUMN] = np.array(row.context, np.int32)
        samples.append(
            store.Sample(
                sample_id=row.sample_id,
                policy=turn.role.policy,
                query_id=ticket.query_id,
                trajectory_id=ticket.trajectory_id,
                agent=turn.role.name,
                turn=turn.position,
                group_id=row.group_id,
                prompt_ids=to_proto(np.array(turn.prompt_ids, np.int32)),
                response_ids=to_proto(np.array(reply.token_ids, np.int32)),
                logprobs=to_proto(np.array(reply.logprobs, np.float32)),
                versions=_spans(turn),
                reward=row.reward,
                finish_reason=reply.finish_reason,
                temperature=turn.sampling.temperature,
                columns=shelf.columns_of(row.sample_id, columns),
                chain=row.chain,
                own_reward=row.own_reward,
                earned=row.earned,
                final_reward=row.final,
            )
        )
    return samples


def transcript_of(turns: Sequence[Turn]) -> list[rollout.Turn]:
    """The turns as events carry them."""
    shown = []
    for turn in turns:
        reply, generation = turn.reply, turn.generation
        if reply is None or generation is None:
            continue
        messages = turn.messages or (("prompt", turn.role.tokenizer.transcript(turn.prompt_ids)),)
        shown.append(
            rollout.Turn(
                agent=turn.role.name,
                policy=turn.role.policy,
                turn=turn.position,
                messages=[pb.ChatMessage(role=r, content=c) for r, c in messages],
                response=reply.text,
                prompt_tokens=len(turn.prompt_ids),
                response_tokens=len(reply.token_ids),
                cached_tokens=generation.cached_tokens,
                versions=_spans(turn),
                finish_reason=reply.finish_reason,
                queue_seconds=generation.queue_seconds,
                generate_seconds=generation.generate_seconds,
                reward=reply.reward,
            )
        )
    return shown


def _spans(turn: Turn) -> list[pb.VersionSpan]:
    spans = turn.generation.versions if turn.generation else ()
    return [pb.VersionSpan(version=s.version, start=s.start, end=s.end) for s in spans]
