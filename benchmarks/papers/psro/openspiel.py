"""OpenSpiel's own PSRO: `PYTHON -m benchmarks.papers.psro.openspiel GAME ITERATIONS NASH_CONV`.

The reference's Python runs it. Exact best responses by its C++ backend, exact payoffs by its C++
tree walk, its linear program for the meta-strategy. Prints one JSON line per iteration, until its
NashConv is at most NASH_CONV, whose measurement is not counted.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from typing import Any

import numpy as np
import pyspiel
from open_spiel.python.algorithms import exploitability, policy_utils
from open_spiel.python.algorithms.psro_v2 import (
    best_response_oracle,
    psro_v2,
    utils,
)


class Exact(psro_v2.PSROSolver):  # type: ignore[misc]
    """OpenSpiel's solver with computed instead of sampled payoffs."""

    def sample_episodes(self, policies: list[Any], num_episodes: int) -> Any:
        """Return the expected returns of both players."""
        del num_episodes
        found = pyspiel.expected_returns(
            self._game.new_initial_state(), [self._tabular(p) for p in policies], -1, True
        )
        return np.array(found)

    def _tabular(self, policy: Any) -> Any:
        # A policy never changes: its table is made once, by identity.
        known = self.__dict__.setdefault("_tables", {})
        if id(policy) not in known:
            known[id(policy)] = (policy, pyspiel.TabularPolicy(self._table(policy)))
        return known[id(policy)][1]

    def _table(self, policy: Any) -> Any:
        return policy_utils.policy_to_dict(policy, self._game)


def main() -> None:
    """Run and report."""
    name, iterations, target = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    game = pyspiel.load_game(name)
    quiet = io.StringIO()
    began = time.process_time()
    with contextlib.redirect_stdout(quiet):
        oracle = best_response_oracle.BestResponseOracle(game=game, best_response_backend="cpp")
        solver = Exact(
            game,
            oracle,
            sims_per_entry=1,
            meta_strategy_method="nash",
            training_strategy_selector="probabilistic",
            sample_from_marginals=True,
        )
    spent = time.process_time() - began
    for number in range(iterations):
        if number:
            began = time.process_time()
            with contextlib.redirect_stdout(quiet):
                solver.iteration()
            spent += time.process_time() - began
        mixed = utils.aggregate_policies(game, solver.get_policies(), solver.get_meta_strategies())
        gap = exploitability.nash_conv(game, mixed)
        print(json.dumps({"iteration": number, "nash_conv": gap, "seconds": spent}), flush=True)
        if gap <= target:
            return


if __name__ == "__main__":
    main()
