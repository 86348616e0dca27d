"""The first process of the control plane to saturate: one orchestrator, one store and one Redis.

The services' CPU seconds per turn come from benchmarks.scale, and the cost of a token in the store,
Redis and a writer from benchmarks.experience_store; turns, tokens and bytes per second come from
the twin's jobs. A Python process runs on one core, and so does Redis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.papers.twin import mechanisms
from benchmarks.papers.twin.speed import GPUS, large_job
from benchmarks.scale import CLUSTERS, QUESTION, REPLY, TOKENS_PER_GPU
from testbed.twin.cluster import PublishedJob, PublishedTwin

# docs/benchmarks/scale.md, 2026-11-26, without the paced engines: CPU seconds per 1,000 turns of
# 2,000 conversations on two workers, and the maximum of each column over runs on a busy machine.
QUIET: Final = {
    "rollout": 1.70,
    "store": 0.17,
    "redis": 0.10,
    "trainer": 0.25,
    "reward": 0.01,
    "orchestrator": 0.06,
}
BUSY: Final = {
    "rollout": 1.77,
    "store": 0.29,
    "redis": 0.13,
    "trainer": 0.31,
    "reward": 0.05,
    "orchestrator": 0.18,
}
# New tokens per turn there.
MEASURED_TOKENS: Final = QUESTION + REPLY
# docs/benchmarks/experience-store.md: CPU seconds per additional token of a row, from rows of 512
# and 32,768 tokens with 64 writers; a writer is a rollout worker.
PER_TOKEN: Final = {
    "rollout": (312 - 27) * 1e-6 / (32_768 - 512),
    "store": (583 - 73) * 1e-6 / (32_768 - 512),
    "redis": (292 - 63) * 1e-6 / (32_768 - 512),
}
# Services with several processes in a cluster; the others have one, and of the trainers one claims
# rows for each policy.
MANY: Final = ("rollout", "reward")
# Rollout to store over unique bytes, and conversations per rollout worker, as scale.md measured.
OVER_UNIQUE: Final = 1.11
_CONVERSATIONS: Final = 2_000
# Load of an event loop up to which its stalls stay short (assumed: a server's usual load).
FULL: Final = 0.7


@dataclass(frozen=True)
class ControlLoad:
    """The load of a job on the services, per second."""

    devices: int
    """Devices that generate or train."""
    turns: float
    """Turns ended by engines."""
    tokens: float
    """Unique tokens of conversations: new tokens of prompts, and replies."""
    response_tokens: float
    conversations: int
    """Maximum number of concurrent trajectories."""

    def __post_init__(self) -> None:
        """Raises ValueError for a rate that is not a positive number."""
        for name in ("devices", "turns", "tokens", "response_tokens", "conversations"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} = {value}: must be a positive number")

    @property
    def bytes(self) -> float:
        """Bytes per second from rollout to the store: 4 per token, 4 per log-prob of a reply."""
        return OVER_UNIQUE * 4 * (self.tokens + self.response_tokens)

    def cores(self, per_1000: Mapping[str, float] = QUIET) -> dict[str, float]:
        """Return the busy cores of each service, summed over its processes."""
        more = max(0.0, self.tokens - MEASURED_TOKENS * self.turns)
        return {
            name: self.turns * seconds / 1000 + more * PER_TOKEN.get(name, 0.0)
            for name, seconds in per_1000.items()
        }

    def rollout_workers(self, per_1000: Mapping[str, float] = QUIET) -> int:
        """Return the number of rollout workers, each of which uses at most `FULL` of a core and has
        at most the measured number of conversations."""
        by_load = math.ceil(self.cores(per_1000)["rollout"] / FULL)
        return max(by_load, math.ceil(self.conversations / _CONVERSATIONS))

    def full_at(self, per_1000: Mapping[str, float] = QUIET, load: float = 1.0) -> dict[str, float]:
        """Return the devices at which each service's only process has this load, with work
        proportional to devices; the smallest first. Raises ValueError for a load outside (0, 1]."""
        if not 0 < load <= 1:
            raise ValueError(f"load = {load}: must be above 0 and at most 1")
        cores = self.cores(per_1000)
        found = {n: self.devices * load / one for n, one in cores.items() if n not in MANY}
        return dict(sorted(found.items(), key=lambda item: item[1]))


def load_of(job: PublishedJob, devices: int, steps: int = 2) -> ControlLoad:
    """Return the load of a job in the twin: the turns and tokens of a step over its seconds, as
    means of `steps` steps after the first, without the last ones, which nothing overlaps."""
    after = 1 + job.alpha
    run = PublishedTwin(job).run(1 + steps + after)
    end, seconds = run.steps[-1], run.means(1, after).seconds
    each = seconds * len(run.steps)
    return ControlLoad(
        devices,
        run.events / each,
        # Tokens of a conversation count once, as with `share_prefixes`; trajectories that
        # redundancy ends make no rows and do not count.
        end.trained_tokens / each,
        end.response_tokens / each,
        job.in_flight,
    )


def loads(*, quick: bool = False) -> dict[str, ControlLoad]:
    """Return the examined loads: the job of RollArt's tasks with all mechanisms by its devices, the
    large job of speed.py, and the densest turns, which benchmarks.scale assumes. `quick`: only the
    smallest job, with half of the queries, and the last."""
    every = frozenset(mechanisms.MECHANISMS)
    found = {}
    for devices in (64,) if quick else mechanisms.SIZES:
        job = mechanisms.job(devices, every, queries_per_device=0.25 if quick else 0.5)
        found[f"{devices} devices, tasks of RollArt"] = load_of(job, devices)
    if not quick:
        found[f"{GPUS} devices, turns of 300 tokens"] = load_of(large_job(), GPUS)
    # Half of the devices generate, turns of 200 new tokens each way.
    replied = CLUSTERS[0] / 2 * TOKENS_PER_GPU
    turns = replied / REPLY
    densest = ControlLoad(
        CLUSTERS[0], turns, turns * (QUESTION + REPLY), replied, 2 * _CONVERSATIONS
    )
    return found | {f"{CLUSTERS[0]} devices, {TOKENS_PER_GPU:,} tokens/s each": densest}
