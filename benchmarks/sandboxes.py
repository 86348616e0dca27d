"""The cost of a call in a sandbox: its own, with and without a spare one, and a trajectory's.

    python -m benchmarks.sandboxes [--quick] [--json]

Calls through a reward service on loopback, one after another, with pauses like between the actions
of a trajectory; the function does almost nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.command import finish, options_of, quantile, run_program
from services.chassis.app import serve
from services.reward.server import RewardService, RewardSettings
from troupe.rpc import connect, new_id
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub


async def measure(calls: int, pause: float, *, stateful: bool, **settings: Any) -> list[float]:
    """Return the seconds of each call, measured by its caller; the first is cold."""
    given = RewardSettings(reward_workers=1, drain_seconds=0.2, log_level="warning", **settings)
    async with serve(RewardService, given) as server, connect(server.address) as channel:
        stub = RewardStub(channel)
        spec = reward_pb.FunctionSpec(
            name="nothing",
            version="1",
            entrypoint="posixpath:basename",
            timeout_seconds=60,
            sandbox="bubblewrap",
            stateful=stateful,
        )
        await stub.RegisterFunction(
            reward_pb.RegisterFunctionRequest(request_id=new_id(), function=spec)
        )
        seconds = []
        for _ in range(calls):
            request = reward_pb.InvokeRequest(
                invocation_id=new_id(),
                name="nothing",
                version="1",
                arguments_json='{"p": "a/b"}',
                trajectory_id="t",
            )
            began = time.perf_counter()
            response = await stub.Invoke(request)
            seconds.append(time.perf_counter() - began)
            assert response.result_json == '"b"', response.error
            await asyncio.sleep(pause)
        return seconds


async def run(calls: int, pause: float) -> dict[str, float]:
    """Return the median milliseconds of each kind of call."""
    without = await measure(calls, pause, stateful=False, reward_spares=False)
    spare = await measure(calls, pause, stateful=False)
    kept = await measure(calls, pause, stateful=True)

    def median(values: Sequence[float]) -> float:
        return round(1000 * quantile(values, 0.5), 2)

    return {
        "one_call_ms": median(without),
        "one_call_with_spare_ms": median(spare[1:]),
        "trajectory_first_call_ms": round(1000 * kept[0], 2),
        "trajectory_call_ms": median(kept[1:]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and the JSON object as the last line."""
    options = options_of(__doc__, arguments)
    found = asyncio.run(run(3 if options.quick else 20, 0.5))
    if not options.json:
        print(f"load {os.getloadavg()[0]:.1f}")
        for name, value in found.items():
            print(f"{name:<28}{value:>10.2f}")
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
