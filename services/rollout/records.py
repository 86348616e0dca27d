"""What is kept of a trajectory's turns: rows for the store, a transcript for people."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np

from services.rollout.columns import Shelf
from troupe.tensors import to_proto
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store
from troupe.v1 import rollout_pb2 as rollout
from troupe.workflow import Turn

GroupBy = Literal["agent", "turn"]


def samples_of(
    turns: Sequence[Turn],
    *,
    ticket: rollout.Ticket,
    trained: Collection[str],
    rewards: Mapping[str, float],
    group_by: GroupBy,
    shelf: Shelf,
) -> list[store.Sample]:
    """One row per turn of a trained policy, with the turn's own reward or else its agent's.

    `sample_id` and `Sample.turn` count over the whole trajectory, since agents may share a
    policy; `group_id` counts the agent's own turns, since those are what is comparable between
    trajectories. Columns that are too large for a row are left on `shelf`.
    """
    samples = []
    for turn in turns:
        reply, generation = turn.reply, turn.generation
        if reply is None or generation is None or not reply.token_ids:
            continue
        if turn.role.policy not in trained:
            continue
        agent = turn.role.name
        group_id = f"{ticket.query_id}/{agent}"
        sample_id = f"{ticket.query_id}_{turn.position}_{ticket.trajectory_id}"
        samples.append(
            store.Sample(
                sample_id=sample_id,
                policy=turn.role.policy,
                query_id=ticket.query_id,
                trajectory_id=ticket.trajectory_id,
                agent=agent,
                turn=turn.position,
                group_id=group_id if group_by == "agent" else f"{group_id}/{turn.number}",
                prompt_ids=to_proto(np.array(turn.prompt_ids, np.int32)),
                response_ids=to_proto(np.array(reply.token_ids, np.int32)),
                logprobs=to_proto(np.array(reply.logprobs, np.float32)),
                versions=_spans(turn),
                reward=reply.reward if reply.reward is not None else rewards.get(agent),
                finish_reason=reply.finish_reason,
                temperature=turn.sampling.temperature,
                columns=shelf.columns_of(sample_id, reply.columns),
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


def metrics_of(turns: Sequence[Turn]) -> dict[str, float]:
    """Sums over the turns; what a workflow logs under the same names replaces them."""
    done = [t.generation for t in turns if t.generation is not None]
    return {
        "turns": len(done),
        "prompt_tokens": sum(len(t.prompt_ids) for t in turns),
        "response_tokens": sum(len(g.token_ids) for g in done),
        "cached_tokens": sum(g.cached_tokens for g in done),
        "cut_by_length": sum(g.finish_reason == "length" for g in done),
    }


def _spans(turn: Turn) -> list[pb.VersionSpan]:
    spans = turn.generation.versions if turn.generation else ()
    return [pb.VersionSpan(version=s.version, start=s.start, end=s.end) for s in spans]
