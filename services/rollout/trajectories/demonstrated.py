"""`DemonstratedTrajectory`: a row of demonstrations, or a pair, handled like a trajectory.

Nothing is played or generated: the row's replies become samples in the store, so that steps that
learn from rows are opened, claimed, trained and committed like all others (exactly once, in gangs,
with checkpoints).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import numpy as np

from services.rollout.trajectories.clock import TrajectoryClock
from services.rollout.trajectories.trajectory import RunningTrajectory
from troupe.data.demonstrations import Demonstration, renderer_of
from troupe.tensors import ids_to_proto, to_proto
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

FINISHED: Final = "demonstration"


class DemonstratedTrajectory(RunningTrajectory):
    """A trajectory that reads its row, and ends with a sample for each reply to learn."""

    async def _attempt(self, clock: TrajectoryClock, number: int) -> list[Any]:
        job = self._job
        spec = job.spec.offline
        assert spec is not None, "its tickets are of steps that learn from rows"
        rows = job.program.demonstrations
        assert rows is not None, "loaded with the job"
        row = await rows.get("train", self._ticket.index)
        learners = {n: role for n, role in job.program.roles.items() if role.policy in job.trained}
        positions = [job.policies[role.policy].language.positions for role in learners.values()]
        # In a thread: rows may be long, and other trajectories share the event loop.
        found = await asyncio.to_thread(renderer_of(spec, learners, positions), row)
        self._move(common_pb.TRAJECTORY_STATE_SCORING)
        self._emit(self._event())
        self._metrics = {
            "demonstrations": float(len(found)),
            "demonstrations_truncated": float(sum(one.truncated for one in found)),
        }
        policies = len({learners[one.agent].policy for one in found})
        return [self._sample(one, policies) for one in found]

    def _sample(self, one: Demonstration, policies: int) -> store_pb.Sample:
        """Return the sample of a reply; `policies`: how many have replies in its row."""
        ticket, alone = self._ticket, one.chosen is None
        return store_pb.Sample(
            sample_id=f"{ticket.query_id}_{one.turn}_{ticket.trajectory_id}",
            policy=self._job.program.roles[one.agent].policy,
            query_id=ticket.query_id,
            trajectory_id=ticket.trajectory_id,
            agent=one.agent,
            turn=one.turn,
            group_id=self._group_of(one),
            prompt_ids=ids_to_proto(np.array(one.prompt_ids, np.int32)),
            response_ids=ids_to_proto(np.array(one.response_ids, np.int32)),
            logprobs=to_proto(np.zeros(len(one.response_ids), np.float32)),
            reward=float(one.chosen or False),
            finish_reason=FINISHED,
            temperature=1.0,
            demonstration=True,
            preference=not alone,
            joint_policies=0 if alone else policies,
        )

    def _group_of(self, one: Demonstration) -> str:
        """Return the id of a reply's group: alone, since nothing is compared; of a pair both sides;
        of a joint pair both sides of all agents."""
        pairs, query = self._job.spec.preferences, self._ticket.query_id
        if pairs is not None and pairs.joint:
            return f"{query}/*/pair"
        return f"{query}/{one.agent}/" + (f"{one.turn}" if one.chosen is None else "pair")
