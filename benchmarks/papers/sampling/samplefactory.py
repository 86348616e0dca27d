"""Sample Factory's sampling.

    PYTHON -m benchmarks.papers.sampling.samplefactory WORLD WORKERS ENVS

The reference's Python runs it. Its sampler as in its own example of sampling alone
(`SyncSamplingAPI`): WORKERS rollout processes with ENVS copies each in two halves, one process for
inference; only steps that have reached the driver count.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
from sample_factory.algo.utils.env_info import extract_env_info
from sample_factory.algo.utils.make_env import make_env_func_batched
from sample_factory.algo.utils.rl_utils import samples_per_trajectory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env

from benchmarks.papers.sampling.clock import serve
from benchmarks.papers.sampling.worlds import AGENTS, STEPS, Leduc, spread
from troupe.networks.environments.simple_spread import SimpleSpread


class Alone(Leduc):
    """The environment with the attributes that Sample Factory requires."""

    num_agents, is_multiagent = 1, False


class Spread(gymnasium.Env):  # type: ignore[misc]
    """simple_spread with lists, which resets itself, as Sample Factory requires."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._world = spread()
        self._names = self._world.possible_agents
        self.num_agents, self.is_multiagent = AGENTS, True
        space = self._world.observation_space(self._names[0])
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, space.shape, np.float32)
        self.action_space = gymnasium.spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Return all agents' observations."""
        seen, _ = self._world.reset(seed=seed)
        return [seen[name] for name in self._names], [{} for _ in self._names]

    def step(self, actions: Any) -> Any:
        """Move all agents."""
        moves = {name: int(action) for name, action in zip(self._names, actions, strict=True)}
        seen, rewards, terminated, truncated, _ = self._world.step(moves)
        over = [terminated[name] or truncated[name] for name in self._names]
        found = [rewards[name] for name in self._names]
        no = [False] * AGENTS
        if all(over):
            seen, _ = self._world.reset()
        return [seen[name] for name in self._names], found, no, over, [{} for _ in self._names]


class Arrays(gymnasium.Env):  # type: ignore[misc]
    """simple_spread as computed by Troupe, with all copies as one environment of many agents
    (`batched_sampling`, as for Isaac Gym and EnvPool): the rest is the framework's cost."""

    is_multiagent = True

    def __init__(self, copies: int, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._world = SimpleSpread(copies, agents=AGENTS, steps=STEPS)
        self.num_agents, self._seed = copies * AGENTS, 0
        shape = (self._world.spaces.observation,)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.action_space = gymnasium.spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Reset all copies."""
        self._seed += 1
        return self._seen(self._world.reset(self._seed)), {}

    def step(self, actions: Any) -> Any:
        """Step all copies, which end together."""
        stepped = self._world.step(np.asarray(actions).reshape(-1, AGENTS))
        over = torch.from_numpy(stepped.truncated.repeat(AGENTS))
        seen = stepped.observed
        if over[0]:
            self._seed += 1
            seen = self._world.reset(self._seed)
        rewards = torch.from_numpy(stepped.rewards.reshape(-1).copy())
        return self._seen(seen), rewards, torch.zeros_like(over), over, {}

    def _seen(self, observed: Any) -> Any:
        # The next step writes into the same array.
        seen = observed.observations.reshape(self.num_agents, -1)
        return torch.from_numpy(seen.copy())


def make(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """Return one copy; its processes import this by name."""
    del env_config
    if name == "spread_arrays":
        return Arrays(cfg.copies_in_arrays, render_mode)
    return Spread(render_mode) if name == "spread" else Alone(render_mode=render_mode)


def main() -> None:
    """Measure on request."""
    world, workers, envs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    arrays = world == "spread_arrays"
    register_env(world, make)
    settings = {
        "algo": "APPO",
        "env": world,
        "device": "cpu",
        "num_workers": workers,
        "num_envs_per_worker": 1 if arrays else envs,
        "worker_num_splits": 1 if arrays or envs == 1 else 2,
        "rollout": STEPS,
        # A multiple of one worker's samples, also with arrays.
        "batch_size": STEPS * envs * AGENTS if arrays else 1000,
        "use_rnn": False,
        "normalize_input": False,
        "normalize_returns": False,
        "nonlinearity": "tanh",
        "batched_sampling": arrays,
        "set_workers_cpu_affinity": False,
        "serial_mode": False,
        "async_rl": True,
        "experiment": "sampling",
        "restart_behavior": "overwrite",
    }
    given = [f"--{name}={value}" for name, value in settings.items()]
    parser, _ = parse_sf_args([*given, "--encoder_mlp_layers", "64", "64"])
    cfg = parse_full_cfg(parser, [*given, "--encoder_mlp_layers", "64", "64"])
    cfg.copies_in_arrays = envs
    one = make_env_func_batched(cfg, env_config=None)
    sampler = SyncSamplingAPI(cfg, extract_env_info(one, cfg))
    sampler.start()
    agents = 1 if world == "leduc" else AGENTS

    def collect(_: int) -> int:
        trajectory = sampler.get_trajectories_sync()
        assert trajectory is not None
        return int(samples_per_trajectory(trajectory)) // agents

    serve(collect)
    sampler.stop()


if __name__ == "__main__":
    main()
