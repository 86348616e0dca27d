"""The embedded engine alone, in a separate process: tokens per second."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from benchmarks.rollout.workload import POLICY, RESPONSE, TURNS, WORDS, embedded, publish
from benchmarks.workloads.plain_turns import question, response_tokens
from services.rollout.engines.factory import make_engine
from services.rollout.garbage import settle
from troupe.transfer import Transfer
from troupe.workflow.backend import Sampling
from troupe.workflow.languages import load_language
from troupe.workflow.messages import parse_messages


async def drive(directory: Path, concurrency: list[int], trajectories: int) -> dict[int, float]:
    """Return tokens per second for each number of concurrent turns."""
    job = embedded(directory, 1)
    ref = publish(directory, job)
    policy = job.policies[POLICY]
    chat = load_language(policy.language_model, "model").chat
    engine = make_engine("direct", POLICY, policy)
    await engine.start()
    await engine.update_weights(ref, Transfer(directory / "transfer"))
    settle()

    async def trajectory(run: str, index: int) -> int:
        tokens = 0
        for turn in range(TURNS):
            message = {"role": "user", "content": question(index, turn, WORDS)}
            prompt = chat.first_ids(parse_messages([message], None))
            length = response_tokens(index, turn, RESPONSE)
            sampling = Sampling(max_new_tokens=length, seed=1)
            generation = await engine.generate(
                f"{run}/{index}/{turn}", list(prompt), sampling, deadline_seconds=600
            )
            tokens += len(generation.token_ids)
        return tokens

    async def through(run: str, at_once: int, first: int, count: int) -> float:
        gate = asyncio.Semaphore(at_once)

        async def one(index: int) -> int:
            async with gate:
                return await trajectory(run, index)

        began = time.perf_counter()
        tokens = await asyncio.gather(*(one(first + n) for n in range(count)))
        return sum(tokens) / (time.perf_counter() - began)

    await through("warm", concurrency[0], 900_000, concurrency[0])
    found = {}
    for at_once in concurrency:
        found[at_once] = await through(f"c{at_once}", at_once, at_once * 1000, trajectories)
    await engine.stop()
    return found


def main() -> None:
    """Run `direct.py DIRECTORY TRAJECTORIES CONCURRENCY...`, which prints one JSON object."""
    import uvloop

    directory, trajectories, *concurrency = sys.argv[1:]
    rates = uvloop.run(drive(Path(directory), list(map(int, concurrency)), int(trajectories)))
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
