"""`Histories` and the copies of a game that are played from them, compared with OpenSpiel's own
play."""

from __future__ import annotations

import numpy as np
import pytest

from troupe.networks.environments.openspiel import GameCopies
from troupe.populations.histories import Histories
from troupe.rpc.errors import InvalidArgument

pyspiel = pytest.importorskip("pyspiel")


@pytest.fixture(scope="module", params=["kuhn_poker", "kuhn_poker(players=3)"])
def histories(request: pytest.FixtureRequest) -> Histories:
    return Histories.of(request.param)


def test_every_history_is_openspiels(histories: Histories) -> None:
    tree, seen = histories, 0
    game = pyspiel.load_game("kuhn_poker", {"players": tree.form.players})
    open_ = [(0, game.new_initial_state())]
    while open_:
        at, state = open_.pop()
        seen += 1
        if state.is_terminal():
            assert tree.actor[at] == tree.over
            assert tree.returns[at].tolist() == state.returns()
            assert set(tree.children[at]) == {at}, "where a game has ended it stays"
            continue
        assert not tree.returns[at].any()
        outcomes = state.legal_actions()
        if state.is_chance_node():
            assert tree.actor[at] == tree.chance
            shares = [share for _, share in state.chance_outcomes()]
            assert tree.chances[tree.sets[at]][: len(shares)].tolist() == shares
            columns = list(range(len(shares)))
        else:
            player = state.current_player()
            assert tree.actor[at] == player
            one = tree.sets[at]
            tensor = np.array(state.information_state_tensor(player), np.float32)
            assert tree.tensors[player][one].tolist() == tensor.tolist()
            assert tree.form.decisions[player].names[one] == state.information_state_string(player)
            assert np.flatnonzero(tree.legal[player][one]).tolist() == outcomes
            columns = outcomes
        for column, outcome in zip(columns, outcomes, strict=True):
            open_.append((int(tree.children[at, column]), state.child(outcome)))
    assert seen == len(tree.actor)


def test_tables_and_plans(histories: Histories) -> None:
    rng = np.random.default_rng(0)
    for player, legal in enumerate(histories.legal):
        table = rng.random(legal.shape) * legal
        table /= table.sum(axis=1, keepdims=True)
        plan = histories.plan(player, table)
        assert histories.table(player, plan) == pytest.approx(table)
        assert histories.plan(player, histories.uniform(player)) == pytest.approx(
            histories.form.uniform(player)
        )
        with pytest.raises(ValueError, match="at set 0 is not a distribution"):
            histories.plan(player, np.zeros(legal.shape))


def returns(env: GameCopies, seeds: range) -> np.ndarray:
    """[games, A] of an agent that takes every legal action equally often."""
    rng, found = np.random.default_rng(7), []
    for seed in seeds:
        observed, total = env.reset(seed), np.zeros((env.copies, len(env.agents)))
        for _ in range(env.spaces.steps):
            assert observed.legal is not None
            stepped = env.step((rng.random(observed.legal.shape) * observed.legal).argmax(-1))
            observed, total = stepped.observed, total + stepped.rewards
        assert stepped.terminated.all()
        found.append(total)
    return np.concatenate(found)


def test_the_mean_return_of_played_games_equals_their_exact_value(histories: Histories) -> None:
    """Against a pool, in alternating seats, and with all players as agents."""
    form, rng = histories.form, np.random.default_rng(1)
    pools, plans = [], []
    for player, legal in enumerate(histories.legal):
        tables = rng.random((2, *legal.shape)) ** 8 * legal
        tables /= tables.sum(axis=-1, keepdims=True)
        pools.append(tables)
        members = [histories.plan(player, table) for table in tables]
        plans.append(0.3 * members[0] + 0.7 * members[1])
    for seat in range(form.players):
        env = GameCopies(4096, histories, (seat,))
        for player, tables in enumerate(pools):
            env.against(player, tables, [0.3, 0.7])
        played = returns(env, range(8))[:, 0]
        against = [form.uniform(p) if p == seat else plans[p] for p in range(form.players)]
        error = played.std() / np.sqrt(len(played))
        assert abs(played.mean() - form.values(against)[seat]) < 4 * error
    values = form.values([form.uniform(p) for p in range(form.players)])
    everybody = returns(GameCopies(4096, histories, None), range(8))
    assert everybody.mean(axis=0) == pytest.approx(values, abs=0.03)
    assert not everybody.sum(axis=1).any(), "what one wins others lose"
    turns = returns(GameCopies(4096, histories, range(form.players)), range(8))
    assert turns.mean() == pytest.approx(values.mean(), abs=0.03)


def test_an_opponent_is_one_member_for_a_whole_episode() -> None:
    """Two members, one of which never raises and the other always: the result of each alone differs
    from drawing one of them for every move."""
    tree = Histories.of("leduc_poker")
    sets = np.arange(len(tree.legal[1]))
    raises = tree.legal[1].shape[1] - 1 - tree.legal[1][:, ::-1].argmax(axis=1)
    tables = np.zeros((2, len(sets), tree.actions))
    tables[0, :, 1], tables[1, sets, raises] = 1.0, 1.0
    env = GameCopies(4096, tree, (0,))
    env.against(1, tables, [0.5, 0.5])
    calls, got = np.full((env.copies, 1), 1), []
    for seed in range(8):
        env.reset(seed)
        got.append(sum(np.abs(env.step(calls).rewards[:, 0]) for _ in range(env.spaces.steps)))
    # The loss or win of a player that calls to the end: 1 without a raise, 1 + 2 + 4 with all.
    stakes = np.unique(np.concatenate(got))
    assert stakes.tolist() == [0.0, 1.0, 7.0]


def test_a_seed_is_an_episode() -> None:
    tree = Histories.of("kuhn_poker")
    one, same, other = (returns(GameCopies(64, tree), range(s, s + 1)) for s in (3, 3, 4))
    assert (one == same).all()
    assert (one != other).any()


def test_bad_input() -> None:
    tree = Histories.of("leduc_poker")
    with pytest.raises(InvalidArgument, match="a game of 2 players"):
        GameCopies(1, tree, (2,))
    env = GameCopies(4, tree)
    with pytest.raises(InvalidArgument, match="not a distribution over 1 members"):
        env.against(1, [tree.uniform(1)], [0.5])
    env.reset(0)
    with pytest.raises(InvalidArgument, match="illegal move in copy 0"):
        env.step(np.zeros((4, 1), dtype=np.int64))  # no player folds at no cost
