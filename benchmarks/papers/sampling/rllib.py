"""RLlib's sampling: `PYTHON -m benchmarks.papers.sampling.rllib WORLD WORKERS ENVS`.

The reference's Python runs it. PPO's env runners of the new API stack, WORKERS processes with ENVS
copies each; only steps that have reached the driver count (`synchronous_parallel_sample`).
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.tune.registry import register_env

from benchmarks.papers.sampling.clock import serve
from benchmarks.papers.sampling.worlds import STEPS, Leduc, spread


def main() -> None:
    """Measure on request."""
    world, workers, envs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False)
    register_env("spread", lambda config: ParallelPettingZooEnv(spread()))
    register_env("leduc", lambda config: Leduc())
    config = (
        PPOConfig()
        .environment(world)
        .env_runners(
            num_env_runners=workers,
            num_envs_per_env_runner=envs,
            rollout_fragment_length=STEPS * 2,
            batch_mode="truncate_episodes",
        )
        .training(train_batch_size_per_learner=workers * envs * STEPS * 2)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh"))
        .debugging(log_level="ERROR")
    )
    if world == "spread":
        config = config.multi_agent(
            policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared"
        )
    group = config.build_algo().env_runner_group

    def collect(_: int) -> int:
        episodes: list[Any] = synchronous_parallel_sample(
            worker_set=group, _uses_new_env_runners=True, concat=True
        )
        return sum(episode.env_steps() for episode in episodes)

    serve(collect)
    ray.shutdown()


if __name__ == "__main__":
    main()
