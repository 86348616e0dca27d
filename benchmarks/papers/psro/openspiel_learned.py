"""OpenSpiel's PSRO with its DQN.

    PYTHON -m benchmarks.papers.psro.openspiel_learned GAME TARGET SECONDS EPISODES SEED

The reference's Python runs it. `RLOracle` over its PyTorch DQN, which takes a tenth of the time of
its JAX version, with the settings of its example (`psro_v2_example.py`) except for two hidden
layers of 64; EPISODES per best response; exact payoffs and a Nash equilibrium as the meta-strategy,
as on Troupe's side. Prints one JSON line per iteration, until its NashConv is at most TARGET or
SECONDS of CPU have passed. The time of NashConv itself is not counted.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import types
from typing import Any

import numpy as np
import pyspiel
import torch
from open_spiel.python import rl_environment
from open_spiel.python.algorithms import exploitability, get_all_states, policy_utils
from open_spiel.python.algorithms.psro_v2 import rl_oracle, utils
from open_spiel.python.pytorch import dqn

from benchmarks.papers.psro.openspiel import Exact

# `rl_policy` makes policies of its two JAX agents on import, which are not used here: without them,
# five fewer packages are needed.
for name, agent in (("dqn", "DQN"), ("policy_gradient", "PolicyGradient")):
    absent = types.ModuleType(f"open_spiel.python.jax.{name}")
    setattr(absent, agent, object)
    sys.modules[absent.__name__] = absent
from open_spiel.python.algorithms.psro_v2 import rl_policy  # noqa: E402


class Learned(Exact):
    """A solver whose DQNs answer only at their own player's states."""

    def _table(self, policy: Any) -> Any:
        if "_states" not in self.__dict__:
            self._states = get_all_states.get_all_states(self._game, -1, False, False)
        own = {
            name: state
            for name, state in self._states.items()
            if state.current_player() == policy.player_ids
        }
        names = {name: state.information_state_string() for name, state in own.items()}
        return policy_utils.policy_to_dict(policy, self._game, own, names)


def main() -> None:
    """Run and report."""
    name, target, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    episodes, seed = int(sys.argv[4]), int(sys.argv[5])
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy = rl_policy.rl_policy_factory(dqn.DQN)
    game = pyspiel.load_game(name)
    environment = rl_environment.Environment(game)
    settings = {
        "state_representation_size": environment.observation_spec()["info_state"][0],
        "num_actions": environment.action_spec()["num_actions"],
        "hidden_layers_sizes": [64, 64],
        "batch_size": 32,
        "learning_rate": 1e-2,
        "update_target_network_every": 1000,
        "learn_every": 10,
        "optimizer_str": "adam",
    }
    quiet = io.StringIO()
    spent, wall, number = 0.0, 0.0, 0
    solver = None
    while True:
        began, clock = time.process_time(), time.perf_counter()
        with contextlib.redirect_stdout(quiet):
            if solver is None:
                agents = [policy(environment, i, **settings) for i in range(2)]
                for agent in agents:
                    agent.freeze()
                oracle = rl_oracle.RLOracle(
                    environment,
                    policy,
                    settings,
                    number_training_episodes=episodes,
                    self_play_proportion=0.0,
                    sigma=0.0,
                )
                solver = Learned(
                    game,
                    oracle,
                    initial_policies=agents,
                    sims_per_entry=1,
                    meta_strategy_method="nash",
                    training_strategy_selector="probabilistic",
                    sample_from_marginals=True,
                )
            else:
                solver.iteration()
                number += 1
        spent += time.process_time() - began
        wall += time.perf_counter() - clock
        mixed = utils.aggregate_policies(game, solver.get_policies(), solver.get_meta_strategies())
        gap = exploitability.nash_conv(game, mixed)
        point = {"iteration": number, "nash_conv": gap, "seconds": spent, "wall": wall}
        print(json.dumps(point), flush=True)
        if gap <= target or spent > seconds:
            return


if __name__ == "__main__":
    main()
