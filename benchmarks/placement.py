"""How long it takes to plan the devices of a cluster, and whether the plan keeps its rules.

    python -m benchmarks.placement [--quick] [--json]

375 hosts of eight linked devices (4 with --quick) and 300 jobs' worth of requests: gangs of 8 to 32
ranks, engines of one, two and four devices per replica, some of them sharing a gang's devices.
Three plans: of an empty cluster, of the same cluster while all of it runs, and after 16 hosts are
lost. Then the job of README.md on one host of eight H100s, as `troupe train` divides it. The last
line is one JSON object: `devices`, `requests`, `plan_seconds` (the slowest plan, the better of
three tries each), `violations`: devices used twice without being shared, groups that are not linked
although the cluster was empty, gangs on more hosts than they need, members that ran and were moved;
`readme_job_devices_used`: devices that have an engine or a rank of README's job.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, options_of, run_program
from services.rollout.engines.server_process import EngineDevices
from troupe.cluster.inventory import NodeShares, assign, fill
from troupe.devices import GIB, Device, parse_devices
from troupe.job import JobSpec, parse_job
from troupe.job.automatic import with_values
from troupe.job.engines.sharing import followers
from troupe.job.sections.balancing import engine_count
from troupe.scheduling.binding import Bind, BindingRules, Policy, RankWorker, decide
from troupe.scheduling.devices import (
    DeviceHost,
    DevicePlan,
    DeviceRequest,
    MemberDevices,
    plan,
)

PER_HOST: Final = 8
LOST: Final = 16
TRIES: Final = 3
README: Final = Path(__file__).resolve().parent.parent / "README.md"
README_HOST: Final = "8xH100-80GB"


def cluster(hosts: int) -> list[DeviceHost]:
    """Hosts of eight devices that are all linked, on two NUMA nodes."""
    return [
        DeviceHost(
            f"host-{number:04}",
            tuple(
                Device(
                    index,
                    "H100",
                    80 * GIB,
                    tuple(n for n in range(PER_HOST) if n != index),
                    2 * index // PER_HOST,
                    f"GPU-{number}-{index}",
                )
                for index in range(PER_HOST)
            ),
        )
        for number in range(hosts)
    ]


def requests(devices: int) -> list[DeviceRequest]:
    """Gangs and engines that fill about 19 of 20 of the devices."""
    found: list[DeviceRequest] = []
    left = devices * 19 // 20
    number = 0
    while left > 0 and number < 100:
        ranks = min(8 * (1 + number % 4), left)
        found.append(DeviceRequest(f"trainer/{number:03}", "trainer", ranks, memory=40 * GIB))
        size = (1, 2, 4)[number % 3]
        replicas = max(0, min(1 + number % 6, (left - ranks) // size))
        if replicas:
            engine = f"engine/{number:03}"
            found.append(DeviceRequest(engine, "engine", replicas, size, 30 * GIB, "H100"))
        colocated = DeviceRequest(
            f"colocated/{number:03}", "engine", max(1, ranks // 4), min(2, ranks), 30 * GIB,
            shares_with=f"trainer/{number:03}",
        )  # fmt: skip
        found.append(colocated)
        left -= ranks + replicas * size
        number += 1
    return found


def violations(
    asked: Sequence[DeviceRequest],
    found: DevicePlan,
    before: Mapping[str, Sequence[MemberDevices]],
    up: set[str],
) -> int:
    """How many of the rules' violations a plan has. `before`: what ran; `up`: hosts that are up."""
    named = {one.name: one for one in asked}
    users: defaultdict[tuple[str, int], list[DeviceRequest]] = defaultdict(list)
    wrong = 0
    for name, members in found.members.items():
        for member in members:
            linked = len(set(member.devices)) == named[name].devices
            wrong += not linked or member.host not in up
            for index in member.devices:
                users[member.host, index].append(named[name])
        ran = {one for one in before.get(name, ()) if one.host in up}
        wrong += len(ran - set(members))
        if not before and named[name].kind == "trainer":
            hosts = Counter(member.host for member in members)
            wrong += len(hosts) > -(-len(members) // PER_HOST)
    for both in users.values():
        owners = {one.shares_with or one.name for one in both}
        wrong += len(owners) > 1 or sum(one.kind == "trainer" for one in both) > 1
    return wrong


@dataclass(frozen=True)
class Row:
    """One plan: its time, what it placed and refused, and its violations."""

    name: str
    seconds: float
    members: int
    refused: int
    violations: int


def measure(hosts: Sequence[DeviceHost]) -> tuple[list[Row], int]:
    """The three plans, and the number of requests."""
    asked = requests(PER_HOST * len(hosts))
    rows: list[Row] = []
    running: Mapping[str, Sequence[MemberDevices]] = {}
    lost = max(1, LOST * len(hosts) // 375)
    for name, up in (
        ("empty", hosts),
        ("running", hosts),
        (f"{lost} hosts lost", hosts[lost:]),
    ):
        seconds = []
        for _ in range(TRIES):
            begin = time.perf_counter()
            found = plan(up, asked, running)
            seconds.append(time.perf_counter() - begin)
        wrong = violations(asked, found, running, {one.name for one in up})
        members = sum(len(one) for one in found.members.values())
        rows.append(Row(name, min(seconds), members, len(found.refusals), wrong))
        running = found.members
    return rows, len(asked)


def readme_job() -> JobSpec:
    """Return the job that README.md shows."""
    text = README.read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"(?ms)^```yaml\n(.*?)^```$", text) if "policies:" in one]
    return parse_job(block, README.name)


def devices_used(spec: JobSpec, devices: Sequence[Device]) -> set[int]:
    """Return the devices of one host that have an engine or a rank once the job runs there: shares
    of `troupe train`, numbers that `auto` stands for, engines' devices as rollout workers assign
    them, gangs as the scheduler binds them."""
    shares, decision = fill(spec, devices, NodeShares(colocate=bool(spec.colocated)))
    spec = with_values(spec, decision.values)
    given = assign(devices, shares)
    used: set[int] = set()
    for worker, some in enumerate(given.rollouts):
        engines = EngineDevices(some)
        for name, policy in spec.policies.items():
            if name in followers(spec):  # another policy's engines serve it
                continue
            for number in range(engine_count(policy)):
                engine = f"readme.{name}.{number}@rollout-{worker}"
                found = engines.assign(engine, name, policy.engine.tensor_parallel)
                used.update(one.index for one in found or ())
    workers = {
        f"trainer-{number}": RankWorker(f"trainer-{number}", devices=len(some), host="here")
        for number, some in enumerate(given.trainers)
    }
    policies = [
        Policy(name, work=1, ranks=spec.policies[name].trainer.ranks)
        for name in spec.trained_policies
    ]
    ranks = {one.policy: one.ranks for one in policies}
    for move in decide(BindingRules(), policies, list(workers.values()), 0.0).moves:
        assert isinstance(move, Bind), "nothing was bound before"
        for worker_id in move.workers:
            mine = given.of(worker_id)[: ranks[move.policy] // len(move.workers)]
            used.update(one.index for one in mine)
    return used


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as the command line says."""
    options = options_of(__doc__, arguments)
    hosts = cluster(4 if options.quick else 375)
    rows, asked = measure(hosts)
    devices = PER_HOST * len(hosts)
    console = Console(quiet=options.json)
    table = Table(title=f"{devices} devices on {len(hosts)} hosts, {asked} requests")
    for column in ("cluster", "seconds", "members placed", "refused", "violations"):
        table.add_column(column, justify="left" if column == "cluster" else "right")
    for row in rows:
        cells = row.members, row.refused, row.violations
        table.add_row(row.name, f"{row.seconds:.3f}", *map(str, cells))
    console.print(table)
    found = {
        "devices": devices,
        "requests": asked,
        "plan_seconds": round(max(row.seconds for row in rows), 4),
        "violations": sum(row.violations for row in rows),
        "readme_job_devices_used": len(devices_used(readme_job(), parse_devices(README_HOST))),
    }
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
