"""What is learned, with which settings, and what was published about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from troupe.job.network import NetworkSpec

_PAPOUDAKIS: Final = (
    "Papoudakis et al. 2021 (Benchmarking multi-agent deep reinforcement learning algorithms in "
    "cooperative tasks), table 3, MPE Spread, with parameter sharing"
)


@dataclass(frozen=True)
class Task:
    """A paradigm on an environment. Returns are per agent."""

    name: str
    environment: str
    network: dict[str, Any]
    """A `NetworkSpec`."""
    copies: int
    """Episodes per update."""
    updates: int
    every: int
    """Updates from one point of the curve to the next."""
    published: float
    """The plateau that is to be reached."""
    margin: float
    """What it is stated with, plus or minus."""
    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    trials: int = 4
    """Episodes per copy in which a point is measured."""
    ceiling: bool = False
    """Whether it cannot be passed either."""

    @property
    def spec(self) -> NetworkSpec:
        """What is trained."""
        return NetworkSpec.model_validate(self.network)

    def reached(self, mean: float) -> bool:
        """Whether this mean of all seeds has reached the plateau."""
        beyond = mean - self.published
        return beyond >= -self.margin and (not self.ceiling or beyond <= self.margin)


TASKS: Final = {
    task.name: task
    for task in (
        Task(
            "mappo",
            "simple_spread",
            {
                "learning": {
                    "paradigm": "mappo",
                    "lr": 2e-3,
                    "gamma": 0.9,
                    "epochs": 5,
                    "minibatches": 2,
                    "entropy_coefficient": 0.003,
                }
            },
            copies=64,
            updates=1300,
            every=50,
            published=-133.54,
            margin=3.08,
            source=_PAPOUDAKIS,
            settings={"variant": "mpe"},
        ),
        Task(
            "maddpg",
            "simple_spread",
            {
                "learning": {
                    "paradigm": "maddpg",
                    "actor_lr": 2e-3,
                    "critic_lr": 4e-3,
                    "gamma": 0.9,
                    "batch": 256,
                    "updates": 8,
                    "warmup": 4000,
                    "standardize_rewards": True,
                }
            },
            copies=16,
            updates=1000,
            every=50,
            published=-141.70,
            margin=1.74,
            source=_PAPOUDAKIS,
            settings={"variant": "mpe"},
            trials=16,
        ),
        *(
            Task(
                paradigm,
                "two_step",
                {
                    "hidden": [64],
                    "parameters": "per_agent",
                    "learning": {
                        "paradigm": paradigm,
                        "lr": 3e-3,
                        "buffer": 500,
                        "updates": 4,
                        "epsilon": [1.0, 1.0],
                    },
                },
                copies=32,
                updates=100,
                every=10,
                published=optimum,
                margin=0.0,
                source="Rashid et al. 2018 (QMIX), section 5.1: the optimum is 8, VDN finds 7",
                trials=1,
                ceiling=True,
            )
            for paradigm, optimum in (("qmix", 8.0), ("vdn", 7.0))
        ),
    )
}
