"""The assignment of a node's devices to its processes.

Reward models get the number that TROUPE_REWARD_GPUS says, from the end of the list. Engines and
trainers split the rest (`troupe.scheduling.devices.split`: half each, rounded up for engines,
unless the settings give numbers). Each rollout worker gets an equal share of the engines' devices;
each trainer worker gets `devices_per_trainer`. Both share a single device; with `colocate` they
share all. Other processes see no devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from troupe.devices import Device
from troupe.rpc.errors import InvalidArgument
from troupe.scheduling.devices import (
    DeviceHost,
    DeviceRequest,
    DeviceSplit,
    SplitRefusal,
    plan,
    split,
)

if TYPE_CHECKING:
    from troupe.job import JobSpec
    from troupe.job.automatic import Decision, JobDevices


@dataclass(frozen=True)
class NodeShares:
    """The shares that a node's settings ask for; None: by the rules above."""

    engine_devices: int | None = None
    trainer_devices: int | None = None
    devices_per_trainer: int = 1
    reward_devices: int = 0
    rollouts: int | None = None
    """Number of rollout workers. None: one."""
    trainers: int | None = None
    """Number of trainer workers. None: as many as the devices allow, at least one."""
    may_lack: bool = False
    """Whether a kind of worker without devices may be absent, because other nodes have it."""
    colocate: bool = False
    """Engines and trainers share all devices and take turns (a job's `pipeline.colocate`)."""


@dataclass(frozen=True)
class NodeDevices:
    """The devices of each process of a node."""

    rollouts: tuple[tuple[Device, ...], ...]
    trainers: tuple[tuple[Device, ...], ...]
    reward: tuple[Device, ...] = ()
    shared: bool = False
    """Whether engines and trainers have the same device."""
    known: bool = False
    """Whether this host has devices; if so, processes without a share must see none."""

    def of(self, process: str) -> tuple[Device, ...]:
        """Return the devices of "rollout-0", "trainer-1", "reward", ...; none for others."""
        kind, _, number = process.partition("-")
        if kind == "reward":
            return self.reward
        workers = {"rollout": self.rollouts, "trainer": self.trainers}.get(kind, ())
        return workers[int(number)] if workers else ()


def assign(devices: Sequence[Device], shares: NodeShares) -> NodeDevices:
    """Divide a node's devices. Raises `InvalidArgument`, which names the setting, the request and
    the devices."""
    rollouts = shares.rollouts or 1
    if not devices:
        return _without_devices(shares, rollouts)
    left, reward = _for_rewards(devices, shares.reward_devices)
    parts = _divided(left, shares)
    by_index = {one.index: one for one in left}
    engine = [by_index[index] for index in parts.engine]
    trainer = [by_index[index] for index in parts.trainer]
    per = shares.devices_per_trainer
    trainers = shares.trainers or (len(trainer) // per or 1)
    if shares.may_lack:
        rollouts = rollouts if engine or shares.rollouts else 0
        trainers = trainers if trainer or shares.trainers else 0
    if shares.trainers and shares.devices_per_trainer == 1:
        # Few workers divide all devices among them: each leads gangs on its part.
        per = max(1, len(trainer) // trainers)
    if trainer and trainers * per > len(trainer):
        raise InvalidArgument(
            f"{trainers} trainers with {per} devices each need more than the trainers' "
            f"{len(trainer)} devices on this host ({_names(trainer)})",
            field="devices_per_trainer" if per > 1 else "trainers",
            value=per if per > 1 else trainers,
            remedy="Ask for fewer, or give trainers more devices (--trainer-devices).",
        )
    return NodeDevices(
        _groups(engine, rollouts, len(engine) // max(1, rollouts)),
        _groups(trainer, trainers, per if trainer else 0),
        reward,
        parts.shared,
        known=True,
    )


def fill(
    spec: JobSpec, devices: Sequence[Device], shares: NodeShares
) -> tuple[NodeShares, Decision]:
    """Return the shares with which a machine's devices are all used by a job alone, and the numbers
    that the job then has for `replicas: auto` and `gang: auto`. Blocking; raises like `assign`."""
    # The data model of jobs is slow to import, and a cluster starts without it.
    from troupe.job.automatic import decide, devices_per_trainer
    from troupe.job.sizing import shapes_of

    shapes = shapes_of(spec)
    single = replace(shares, devices_per_trainer=1)
    there = _of_job(assign(devices, single))
    decision = decide(spec, there, shapes)
    chosen = replace(shares, devices_per_trainer=devices_per_trainer(spec, decision))
    if 1 < chosen.devices_per_trainer <= sum(there.trainers):
        decision = decide(spec, _of_job(assign(devices, chosen)), shapes)
    return chosen, decision


def _of_job(given: NodeDevices) -> JobDevices:
    """Return what a job alone finds of these devices."""
    from troupe.job.automatic import JobDevices

    rollouts, trainers = (
        [[one for one in some if one.device_class.lower() != "cpu"] for some in workers]
        for workers in (given.rollouts, given.trainers)
    )
    return JobDevices(
        min(map(len, rollouts), default=0),
        tuple(sorted(len(some) for some in trainers if some)),
        min((one.memory for some in trainers for one in some), default=0),
    )


def _without_devices(shares: NodeShares, rollouts: int) -> NodeDevices:
    for name in ("engine_devices", "trainer_devices"):
        if asked := getattr(shares, name):
            raise InvalidArgument(
                "no devices found on this machine: no driver reports any, and CUDA_VISIBLE_DEVICES "
                "and TROUPE_DEVICES name none",
                field=name,
                value=asked,
                remedy="Omit the option to compute on the CPU, or check nvidia-smi.",
            )
    return NodeDevices(((),) * rollouts, ((),) * (shares.trainers or 1))


def _for_rewards(
    devices: Sequence[Device], count: int
) -> tuple[Sequence[Device], tuple[Device, ...]]:
    if count > len(devices):
        raise InvalidArgument(
            f"reward models ask for {count} devices, but this machine has {len(devices)}",
            field="TROUPE_REWARD_GPUS",
            value=count,
            remedy="Ask for fewer, or run the reward service on another machine.",
        )
    first = len(devices) - count
    return devices[:first], tuple(devices[first:])


def _divided(devices: Sequence[Device], shares: NodeShares) -> DeviceSplit:
    given = shares.engine_devices, shares.trainer_devices
    parts = split(devices, *given, colocate=shares.colocate)
    if isinstance(parts, SplitRefusal):
        raise InvalidArgument(
            parts.message,
            field="engine_devices" if shares.engine_devices is not None else "trainer_devices",
            value=shares.engine_devices or shares.trainer_devices,
            remedy=parts.remedy,
        )
    return parts


def _groups(devices: Sequence[Device], count: int, size: int) -> tuple[tuple[Device, ...], ...]:
    """Return `count` groups of `size` devices, keeping linked devices together."""
    if not size:
        return ((),) * count
    placed = plan([DeviceHost("", tuple(devices))], [DeviceRequest("", "engine", count, size)])
    by_index = {one.index: one for one in devices}
    return tuple(
        tuple(by_index[index] for index in member.devices) for member in placed.members[""]
    )


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(f"{one.index}: {one.device_class}" for one in devices)


def by_device(processes: Mapping[str, Sequence[Device]]) -> dict[int, str]:
    """Return the processes that have each device, by the device's index."""
    found: dict[int, str] = {}
    for name, devices in processes.items():
        for one in devices:
            found[one.index] = f"{found[one.index]}, {name}" if one.index in found else name
    return found
