"""The devices of a rollout worker, and which of its engines holds which."""

from __future__ import annotations

from collections.abc import Sequence

from troupe.scheduling.devices import DeviceHost, DeviceRequest, MemberDevices, plan

from services.rollout.engines.errors import EngineStartFailed
from troupe.devices import Device

# The plan of a worker knows one host, whatever its name.
_HERE = "here"


class EngineDevices:
    """Gives launched servers devices of this worker: none to two, and linked ones to one server.

    A worker without devices (no GPU, none declared) gives none: then servers see what it sees.
    """

    def __init__(self, devices: Sequence[Device] = ()) -> None:
        self._host = DeviceHost(_HERE, tuple(devices))
        self._held: dict[str, MemberDevices] = {}

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices of the worker."""
        return self._host.devices

    def assign(self, engine_id: str, policy: str, count: int) -> tuple[Device, ...] | None:
        """`count` devices for an engine, those that it has already if it has as many; None on a
        worker without devices.

        Raises `EngineStartFailed` that says what there is and which engines hold it.
        """
        if not self.devices:
            return None
        others = {name: (held,) for name, held in self._held.items() if name != engine_id}
        own = {engine_id: (self._held[engine_id],)} if engine_id in self._held else {}
        request = DeviceRequest(engine_id, "engine", 1, count)
        placed = plan([self._host], [request], others | own)
        if placed.refusals:
            refusal = placed.refusals[0]
            raise EngineStartFailed(
                str(refusal),
                field=f"policies.{policy}.engine.tensor_parallel",
                value=count,
                remedy=refusal.remedy,
            )
        member = self._held[engine_id] = placed.members[engine_id][0]
        return tuple(one for one in self.devices if one.index in member.devices)

    def release(self, engine_id: str) -> None:
        """Take back the devices of an engine that has ended. Repeatable."""
        self._held.pop(engine_id, None)

    def holders(self) -> dict[int, list[str]]:
        """The engines on each device, by its index; devices without one are left out."""
        found: dict[int, list[str]] = {}
        for engine_id, member in self._held.items():
            for index in member.devices:
                found.setdefault(index, []).append(engine_id)
        return found
