"""PSRO with learned best responses: a member's play, training in stretches, pipelines."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

pytest.importorskip("pyspiel")
torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from troupe.job.sections.network import NetworkSpec, PPOSpec, QLearningSpec  # noqa: E402
from troupe.networks.actor import Actor, Seat  # noqa: E402
from troupe.networks.environments.openspiel import GameCopies  # noqa: E402
from troupe.networks.jobs import make_learner  # noqa: E402
from troupe.populations.histories import Histories  # noqa: E402
from troupe.populations.payoffs import Precision  # noqa: E402
from troupe.populations.psro import (  # noqa: E402
    LearnedPsro,
    Oracle,
    SampledGame,
    Training,
    enumerated,
    train,
)


def oracle(updates: int, copies: int = 64, gradients: int = 2) -> Oracle:
    learning = QLearningSpec(
        lr=2e-3,
        gamma=1.0,
        batch=128,
        updates=gradients,
        tau=0.05,
        epsilon=(1.0, 0.1),
        epsilon_episodes=copies * updates // 2,
    )
    return Oracle(NetworkSpec(hidden=(32, 32), learning=learning), copies, updates)


@pytest.mark.parametrize("learning", [PPOSpec(), QLearningSpec()])
def test_an_enumerated_network_takes_the_same_actions_as_in_play(learning: PPOSpec) -> None:
    tree, spec = Histories.of("leduc_poker"), NetworkSpec(hidden=(16,), learning=learning)
    env = GameCopies(256, tree, (1,))
    weights = make_learner(spec, env.spaces, env.agents, 3).published()
    table = enumerated(spec, env.spaces, weights, tree, 1)
    assert (table.sum(axis=1) == 1).all()
    assert not (table * ~tree.legal[1]).any()
    actor = Actor(env, {"p": Seat(spec, env.agents)})
    actor.load("p", weights, 0)
    played = actor.sample(0, explore=False).fragments["p"]
    number = {one.tobytes(): i for i, one in enumerate(tree.tensors[1])}
    for step, copy in np.argwhere(played.valid()[:, :, 0]):
        at = number[played["observations"][step, copy, 0].tobytes()]
        assert table[at, played["actions"][step, copy, 0]] == 1.0


def test_a_network_with_a_memory_has_no_table() -> None:
    tree, spec = Histories.of("kuhn_poker"), NetworkSpec(kind="rnn")
    with pytest.raises(ValueError, match="use kind: mlp"):
        enumerated(spec, GameCopies(1, tree).spaces, {}, tree, 0)


def test_training_in_stretches_is_training_at_once() -> None:
    against = {1: (Histories.of("kuhn_poker").uniform(1)[None], np.ones(1))}
    task = Training("kuhn_poker", 0, oracle(4), against, seed=5, first=0, updates=4)
    whole = train(task)
    begun = train(Training("kuhn_poker", 0, oracle(4), against, seed=5, first=0, updates=3))
    rest = train(
        Training("kuhn_poker", 0, oracle(4), against, 5, first=3, updates=1, state=begun.state)
    )
    assert whole.weights.keys() == rest.weights.keys()
    assert all(torch.equal(whole.weights[name], rest.weights[name]) for name in whole.weights)


def test_levels_train_in_parallel_and_become_members_in_turn() -> None:
    tasks: list[Training] = []

    def watched(work, todo):  # type: ignore[no-untyped-def]
        tasks.extend(todo)
        return [work(one) for one in tasks[-4:]]

    psro = LearnedPsro("kuhn_poker", oracle(4), levels=2, stretch=2, workers=watched)
    found = list(psro.run(2))
    assert found[0].sizes == (1, 1)
    assert [len(tables) for tables in psro.tables] == list(found[1].sizes)
    # Two stretches of both levels and both players.
    assert [one.first for one in tasks] == [0, 0, 0, 0, 2, 2, 2, 2]
    met = [len(one.opponents[1 - one.player][1]) for one in tasks]
    assert met[:4] == [1, 1, 1, 1], "nobody has learned anything yet"
    assert met[4:6] == [1, 1], "the lowest meets members only"
    assert max(met[6:]) == 2, "the next one those below it, too"


def test_levels_are_some() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LearnedPsro("kuhn_poker", levels=0)


def test_payoffs_are_played_where_they_are_asked_for() -> None:
    psro = LearnedPsro("kuhn_poker", oracle(2), seed=2, sampled=Precision(least=500))
    found = list(psro.run(2))
    form = psro.histories.form
    assert isinstance(psro.meta_game, SampledGame)
    assert found[1].sizes == psro.meta_game.sizes
    for members in np.ndindex(*found[1].sizes):
        cell = psro.meta_game.table.cell(members)
        assert cell is not None
        assert cell.matches == 500
        plans = [pool[k] for pool, k in zip(psro.meta_game.pools, members, strict=True)]
        assert np.abs(cell.mean - form.values(plans)).max() <= 2.5 * cell.half_width() + 1e-12
    # Measured in the whole game nevertheless.
    assert found[1].nash_conv == pytest.approx(form.nash_conv(found[1].plans))


@pytest.mark.slow
def test_processes_change_nothing_and_kuhn_is_learned() -> None:
    settings = oracle(24, copies=512, gradients=8)
    with ProcessPoolExecutor(
        2, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        runs = list(LearnedPsro("kuhn_poker", settings, seed=1, workers=pool.map).run(8))
    assert min(one.nash_conv for one in runs) < 0.1
    torch.set_num_threads(1)
    alone = list(LearnedPsro("kuhn_poker", settings, seed=1).run(2))
    assert alone[1].nash_conv == runs[1].nash_conv
