"""All checks of a host in one go, and the quick ones that every start of workers makes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from troupe.devices import find_devices
from troupe.doctor import host, interpreters
from troupe.doctor.findings import Finding, Verdict
from troupe.doctor.interpreters import NoEnvironment
from troupe.doctor.sandboxes import sandboxes
from troupe.rpc import InvalidArgument

if TYPE_CHECKING:
    from troupe.job import JobSpec
    from troupe.job.engines.kind import EngineKind
    from troupe.job.loading import FieldProblem


def quick_checks(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return what is quickly checked and is not good: for the start of workers. It takes
    milliseconds; where there are devices, a second for the environments of inference servers that
    variables name. Blocking."""
    found = [
        *host.devices(environment),
        *host.memory(),
        *host.limits(),
        *host.network(environment),
    ]
    devices = _count(environment)
    if devices and (named := _named(environment)):
        own = interpreters.running_environment()
        found += asyncio.run(interpreters.servers(named, own, devices))
    return [one for one in found if one.verdict is Verdict.PROBLEM]


def _named(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the interpreters of inference servers that variables name, by kind."""
    # Not for a start without devices: the data model of jobs is slow to import.
    from troupe.job.engines import KINDS

    variables = {kind.name: kind.python_variable for kind in KINDS.values() if kind.is_server}
    return {kind: environment[name] for kind, name in variables.items() if environment.get(name)}


def _count(environment: Mapping[str, str]) -> int:
    try:
        return len(find_devices(environment))
    except InvalidArgument:
        return 0  # the check of devices says why


async def examine(
    redis_url: str = "",
    named: Mapping[str, str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """Check the whole host; takes seconds, since torch is imported where there are devices.

    `redis_url`: "" for the embedded Redis. `named`: interpreters of inference servers by kind, in
    place of those that the environment names.
    """
    devices = _count(environment)
    if named is None:
        named = _named(environment)
    own = await interpreters.own_environment(with_devices=devices > 0)
    servers, redis, kinds = await asyncio.gather(
        interpreters.servers(named, own, devices), host.redis(redis_url), sandboxes()
    )
    return [
        *host.devices(environment),
        interpreters.torch_of(own, devices, host.driver_cuda()),
        *servers,
        *host.memory(),
        *host.limits(),
        *host.network(environment),
        *redis,
        *kinds,
    ]


def examine_servers(spec: JobSpec, devices: int) -> tuple[list[FieldProblem], list[Finding]]:
    """Check the environments of the servers that a job launches, if it runs on this host: faults of
    policies whose environment has no server, and findings that make its jobs slow or fail."""
    from troupe.job.automatic import launched_policies
    from troupe.job.engines import KINDS
    from troupe.job.loading import FieldProblem

    launched = {
        name: (KINDS[one.engine.kind], one.engine.python)
        for name, one in launched_policies(spec).items()
    }
    places = dict.fromkeys(map(_place, launched.values()))
    environments = asyncio.run(_environments({python for _, python in places}))
    found = {place: environments[place[1]] for place in places}
    problems, findings = [], {}
    for place in places:
        name, *others = (name for name, one in launched.items() if _place(one) == place)
        kind, there = launched[name][0], found[place]
        if isinstance(there, NoEnvironment) or kind.name not in there.packages:
            fault = str(there) if isinstance(there, NoEnvironment) else f"has no {kind.name}"
            if others:
                fault += f" (the same for {', '.join(others)})"
            remedy = (
                f"Install it: {kind.install}; and name its Python, here or in "
                f"{kind.python_variable} (docs/gpus.md)."
            )
            problems.append(FieldProblem(f"policies.{name}.engine.python", place[1], fault, remedy))
        else:
            findings[place] = interpreters.server_of(
                kind.name, there, interpreters.running_environment(), devices
            )
    bad = [one for some in findings.values() for one in some if one.verdict is not Verdict.GOOD]
    return problems, list(dict.fromkeys(bad))


def _place(launched: tuple[EngineKind, str | None]) -> tuple[str, str]:
    """Return the kind of a launched server, and its interpreter."""
    kind, python = launched
    return kind.name, kind.interpreter(python)


async def _environments(
    places: Iterable[str],
) -> dict[str, interpreters.Environment | NoEnvironment]:
    async def read(place: str) -> interpreters.Environment | NoEnvironment:
        try:
            return await interpreters.read_environment(place)
        except NoEnvironment as error:
            return error

    named = list(places)
    return dict(zip(named, await asyncio.gather(*map(read, named)), strict=True))
