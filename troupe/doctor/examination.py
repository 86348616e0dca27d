"""All checks of a host in one go, and the quick ones that every start of workers makes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Final

from troupe.devices import find_devices
from troupe.doctor import host, interpreters
from troupe.doctor.findings import Finding, Verdict
from troupe.job.engines import KINDS
from troupe.rpc import InvalidArgument

# Environment variables that name the interpreter of an inference server, by kind of server.
SERVERS: Final = {kind.name: kind.python_variable for kind in KINDS.values() if kind.is_server}


def quick_checks(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return what takes milliseconds to check and is not good: for the start of workers."""
    found = [
        *host.devices(environment),
        *host.memory(),
        *host.limits(),
        *host.network(environment),
    ]
    return [one for one in found if one.verdict is Verdict.PROBLEM]


async def examine(
    redis_url: str = "",
    named: Mapping[str, str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """Check the whole host; takes seconds, since torch is imported where there are devices.

    `redis_url`: "" for the embedded Redis. `named`: interpreters of inference servers by kind, in
    place of those that the environment names.
    """
    try:
        devices = len(find_devices(environment))
    except InvalidArgument:
        devices = 0  # the check of devices says why
    if named is None:
        named = {
            kind: environment[variable]
            for kind, variable in SERVERS.items()
            if environment.get(variable)
        }
    own = await interpreters.own_environment(with_devices=devices > 0)
    servers, redis = await asyncio.gather(
        interpreters.servers(named, own, devices), host.redis(redis_url)
    )
    return [
        *host.devices(environment),
        interpreters.torch_of(own, devices, host.driver_cuda()),
        *servers,
        *host.memory(),
        *host.limits(),
        *host.network(environment),
        *redis,
    ]
