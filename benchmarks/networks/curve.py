"""One seed of one task: play, learn, and measure without exploration as it goes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.networks.tasks import Task
from troupe.networks.actor import Actor, Seat
from troupe.networks.jobs import make_learner
from troupe.networks.vector import make_environment

# Far from the seeds that training plays with.
_HELD_OUT = 10**9
_POLICY = "team"


@dataclass
class Curve:
    """What a seed came to."""

    seed: int
    steps: list[int] = field(default_factory=list)
    """Of the environment, in all copies together."""
    returns: list[float] = field(default_factory=list)
    """Mean return of an agent, without exploration."""
    seconds: float = 0.0
    """CPU, playing, learning and measuring."""
    load: float = 0.0
    """Of the machine in the last minute, when it ended."""

    @property
    def plateau(self) -> float:
        """Of the last fifth of the curve."""
        last = self.returns[-max(1, len(self.returns) // 5) :]
        return sum(last) / len(last)


def learn(task: Task, seed: int, updates: int, say: Any) -> Curve:
    """A curve of so many updates; `say` is called with a line at each of its points."""
    began = time.process_time()
    environment = make_environment(task.environment, task.copies, **task.settings)
    spec, agents = task.spec, environment.agents
    learner = make_learner(spec, environment.spaces, agents, seed)
    actor = Actor(environment, {_POLICY: Seat(spec, agents)})
    curve, played = Curve(seed), 0
    for version in range(updates + 1):
        actor.load(_POLICY, learner.published(), version)
        if version % task.every == 0 or version == updates:
            trials = range(_HELD_OUT, _HELD_OUT + task.trials)
            curve.returns.append(round(float(actor.evaluate(trials).mean()), 3))
            curve.steps.append(played)
            spent = time.process_time() - began
            say(f"{task.name} seed {seed}: {played} steps, {curve.returns[-1]:.2f}, {spent:.0f} s")
        if version < updates:
            fragment = actor.sample(seed * 10**6 + version).fragments[_POLICY]
            played += fragment.steps
            learner.update([fragment])
    environment.close()
    curve.seconds = round(time.process_time() - began, 1)
    curve.load = round(os.getloadavg()[0], 1)
    return curve
