"""Whom to ask for a state that is not on the reader's host.

Nothing is recorded: an answer is made of the heartbeats of the moment, so it survives whoever
published a state (a host that pulled a version serves it on) and a restart of the orchestrator (a
second later every worker has reported). It may name a host too many, never decides anything, and
costs a reader one small question per host that it names wrongly: owners say themselves what they
hold, by key and checksum.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from services.orchestrator.workers import Worker
from troupe.v1 import common_pb2 as pb
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import rollout_pb2 as ro
from troupe.v1 import trainer_pb2 as tr

_KEY: Final = re.compile(
    r"(?P<job>[^/]+)/(?P<policy>[^/]+)/[^@]*(@(?P<version>[0-9]{1,19})(?![0-9]))?"
)


def locate(key: str, workers: Iterable[Worker]) -> orch.LocateStateResponse:
    """The owners of living workers' hosts, and the trainers among the workers, likely holders of
    `key` first."""
    ranked = sorted(
        (worker for worker in workers if worker.alive),
        key=lambda worker: (-_likelihood(key, worker.beat), worker.worker_id),
    )
    owners = dict.fromkeys(w.beat.transfer_address for w in ranked if w.beat.transfer_address)
    trainers = [w.address for w in ranked if w.kind == orch.WORKER_KIND_TRAINER]
    return orch.LocateStateResponse(owners=owners, trainers=trainers)


def _likelihood(key: str, beat: orch.HeartbeatRequest) -> int:
    """3: at this version of the policy; 2: the policy; 1: the job; 0: nothing to do with it."""
    match = _KEY.match(key)
    if match is None:
        return 0
    job, policy = match["job"], match["policy"]
    version = None if match["version"] is None else int(match["version"])
    best = 0
    bindings = (one for one in beat.bindings if one.state != pb.BINDING_STATE_RELEASED)
    known: Iterable[ro.EngineStatus | tr.BindingStatus] = (*beat.engines, *bindings)
    for one in known:
        if one.job_id != job:
            continue
        if one.policy != policy:
            best = max(best, 1)
        else:
            best = max(best, 3 if one.version == version else 2)
    return best
