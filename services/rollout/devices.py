"""What hardware the engines of a policy run on, and what it does per second."""

from __future__ import annotations

from services.rollout.engines.base import Device
from troupe.job import PacedSpec, PolicySpec


def devices_of(policy: PolicySpec, own: Device) -> list[Device]:
    """One per engine of the policy on this worker, in order of their replica numbers.

    Those of `engine.pools` where there are pools; else every engine is on `own`, this worker's.
    """
    engine = policy.engine
    if not engine.pools:
        count = len(engine.urls) or engine.replicas
        devices = [own] * count
    else:
        devices = [
            Device(
                pool.device_class,
                pool.prefill_tokens_per_second or 0.0,
                pool.decode_tokens_per_second or 0.0,
            )
            for pool in engine.pools
            for _ in range(pool.replicas)
        ]
    if policy.paced is None:
        return devices
    paced = policy.paced
    return [
        device if device.is_measured else _modelled(device, paced, engine.max_running)
        for device in devices
    ]


def _modelled(device: Device, paced: PacedSpec, running: int) -> Device:
    """A paced engine does what its cost model says: its rates need no measuring."""
    pace = paced.of_class(device.device_class)
    step = pace.decode_seconds + pace.decode_seconds_per_turn * running
    if not device.device_class or not step:
        return device
    return Device(device.device_class, pace.prefill_tokens_per_second, running / step)
