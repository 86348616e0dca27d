"""Brings a policy's engines to new weights, one after another, so that the policy keeps serving."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from services.rollout.supervision import EngineKeeper
from troupe.rpc.errors import FailedPrecondition, TroupeError
from troupe.v1 import common_pb2 as pb

log = structlog.get_logger(__name__)


def check_successor(current: pb.WeightsRef, new: pb.WeightsRef) -> bool:
    """Whether `new` is to be loaded: False for the version that is served already.

    Raises `FailedPrecondition` for an older version, or for the same one with other content: a
    version names one checksum.
    """
    if new.version == current.version:
        if new.checksum != current.checksum:
            raise FailedPrecondition(
                f"version {new.version} of policy '{new.policy}' is known with checksum "
                f"{current.checksum}",
                kind="version_conflict",
                field="weights.checksum",
                value=new.checksum,
                remedy="Publish changed weights under a new version.",
            )
        return False
    if new.version < current.version:
        raise FailedPrecondition(
            f"policy '{new.policy}' is at version {current.version} already",
            kind="version_stale",
            field="weights.version",
            value=new.version,
            remedy="Ask for the newest version, or prepare the job again.",
        )
    return True


async def roll_out(keepers: Sequence[EngineKeeper]) -> float:
    """Bring each engine to its target, the living ones first; returns exposed seconds, summed.

    Weights that do not fit one of them are refused before the first is touched. An engine that
    fails is left to its keeper when another one serves the target; when none does, the error of the
    last is raised. Engines that sleep are brought to the target once they are woken.
    """
    keepers = [keeper for keeper in keepers if not keeper.engine.asleep]
    for keeper in keepers:
        await keeper.accepts_target()
    exposed, failure = 0.0, None
    for keeper in sorted(keepers, key=lambda k: k.is_down):
        if keeper.is_down and any(k.serves_target for k in keepers):
            keeper.nudge()
            continue
        try:
            exposed += await keeper.reach_target()
        except TroupeError as error:
            log.error("a weight update failed", engine=keeper.engine.engine_id, error=str(error))
            failure = error
            keeper.nudge()
    if failure is not None and not any(k.serves_target for k in keepers):
        raise failure
    return exposed
