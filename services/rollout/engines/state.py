"""`EngineState`: the only place where an engine's state, version and checksum change."""

from __future__ import annotations

from troupe.states import ENGINE, IllegalTransition, check, is_terminal
from troupe.v1 import common_pb2 as common_pb


class EngineState:
    """State of one engine, moved along `troupe.states.ENGINE` only.

    Invariant: `version` and `checksum` are set if and only if the engine holds weights that it
    verified. They survive UPDATING (in-flight turns go on with the old weights until the new
    ones are in), SUSPECT and DRAINING; STALE, DEAD and STOPPED clear them.
    """

    def __init__(self) -> None:
        self._now: common_pb.EngineState.ValueType = common_pb.ENGINE_STATE_STARTING
        self.version: int | None = None
        self.checksum = ""
        self.message = "starting"
        self.restarts = 0

    @property
    def now(self) -> common_pb.EngineState.ValueType:
        """The current state."""
        return self._now

    @property
    def name(self) -> str:
        """The current state for people: "HEALTHY"."""
        return common_pb.EngineState.Name(self._now).removeprefix("ENGINE_STATE_")

    @property
    def alive(self) -> bool:
        """Whether the engine has started and not ended."""
        return self._now not in (
            common_pb.ENGINE_STATE_STARTING,
            common_pb.ENGINE_STATE_DEAD,
            common_pb.ENGINE_STATE_STOPPED,
        )

    @property
    def serves(self) -> bool:
        """Whether new turns are taken."""
        return self._now in (common_pb.ENGINE_STATE_HEALTHY, common_pb.ENGINE_STATE_SUSPECT)

    def started(self) -> None:
        """-> STALE: up, without verified weights."""
        self._only_from(common_pb.ENGINE_STATE_STARTING, common_pb.ENGINE_STATE_DEAD)
        restarted = self._now == common_pb.ENGINE_STATE_DEAD
        self._move(common_pb.ENGINE_STATE_STALE, "waiting for weights")
        self.restarts += restarted

    def updating(self, version: int) -> None:
        """-> UPDATING: weights are about to change. A SUSPECT engine passes through STALE."""
        if self._now == common_pb.ENGINE_STATE_SUSPECT:
            self._move(common_pb.ENGINE_STATE_STALE, self.message)
        self._move(common_pb.ENGINE_STATE_UPDATING, f"updating to version {version}")

    def waits(self, version: int, reason: str) -> None:
        """Say what an update waits for, while former versions go on."""
        self._only_from(common_pb.ENGINE_STATE_UPDATING)
        self.message = f"version {version} waits: {reason}"

    def awaits_commit(self, version: int) -> None:
        """Stay UPDATING: weights are loaded that are not committed yet."""
        self._only_from(common_pb.ENGINE_STATE_UPDATING)
        self.message = f"version {version} is loaded and waits for its commit"

    def verified(self, version: int, checksum: str) -> None:
        """-> HEALTHY: the new weights are loaded and verified."""
        self._only_from(common_pb.ENGINE_STATE_UPDATING)
        self._move(common_pb.ENGINE_STATE_HEALTHY, "")
        self.version, self.checksum = version, checksum

    def lost_weights(self, reason: str) -> None:
        """-> STALE: the engine's weights are unknown; it serves nothing until updated."""
        self._move(common_pb.ENGINE_STATE_STALE, reason)

    def distrusted(self, reason: str) -> None:
        """-> STALE, of an engine that serves: what it holds is in doubt until the next update."""
        if self._now == common_pb.ENGINE_STATE_HEALTHY:
            self._move(common_pb.ENGINE_STATE_SUSPECT, reason)
        self.lost_weights(reason)

    def suspect(self, reason: str) -> None:
        """-> SUSPECT: a probe was missed."""
        self._move(common_pb.ENGINE_STATE_SUSPECT, reason)

    def recovered(self) -> None:
        """-> HEALTHY: the same process, with the same weights, answered a probe again."""
        self._only_from(common_pb.ENGINE_STATE_SUSPECT)
        self._move(common_pb.ENGINE_STATE_HEALTHY, "")

    def draining(self, reason: str) -> None:
        """-> DRAINING: no new turns; running ones end."""
        self._move(common_pb.ENGINE_STATE_DRAINING, reason)

    def handed_over(self, reason: str) -> None:
        """-> STALE: a drained engine moves to another policy; its weights are the former one's."""
        self._only_from(common_pb.ENGINE_STATE_DRAINING)
        self._move(common_pb.ENGINE_STATE_STALE, reason)

    def died(self, reason: str) -> None:
        """-> DEAD. Repeatable: the first reason stays."""
        if self._now not in (common_pb.ENGINE_STATE_DEAD, common_pb.ENGINE_STATE_STOPPED):
            self._move(common_pb.ENGINE_STATE_DEAD, reason)

    def stopped(self) -> None:
        """-> STOPPED, for good. Repeatable."""
        if not is_terminal(ENGINE, self._now):
            self._move(common_pb.ENGINE_STATE_STOPPED, "")

    def _only_from(self, *sources: common_pb.EngineState.ValueType) -> None:
        """Checks beyond the table: some of its edges have two meanings."""
        if self._now not in sources:
            wanted = " or ".join(common_pb.EngineState.Name(source) for source in sources)
            raise IllegalTransition(f"the engine is {self.name}; this follows {wanted} only")

    def _move(self, target: common_pb.EngineState.ValueType, message: str) -> None:
        check(ENGINE, self._now, target)
        self._now, self.message = target, message
        if target in (
            common_pb.ENGINE_STATE_STALE,
            common_pb.ENGINE_STATE_DEAD,
            common_pb.ENGINE_STATE_STOPPED,
        ):
            self.version, self.checksum = None, ""
