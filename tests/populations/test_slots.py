"""Which members are loaded together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.populations.payoffs import PayoffTable
from troupe.populations.slots import match_waves, share_slots, training_seat, visible_cells


def test_a_mixture_that_fits_the_slots_is_played_unchanged() -> None:
    loaded, shares = share_slots([{"a": 0.25, "b": 0.75, "c": 0.0}], 2, (0, 1))
    assert (loaded, shares) == (["a", "b"], [{"a": 0.25, "b": 0.75}])


def test_draws_keep_each_share_on_average() -> None:
    mixture = {"a": 0.5, "b": 0.2, "c": 0.2, "d": 0.1}
    total: Counter[str] = Counter()
    for step in range(2000):
        loaded, (shares,) = share_slots([mixture], 2, (7, step))
        assert len(loaded) <= 2
        assert sum(shares.values()) == pytest.approx(1.0)
        for name, share in shares.items():
            total[name] += share / 2000
    assert dict(total) == pytest.approx(mixture, abs=0.03)
    assert share_slots([mixture], 2, (7, 1)) == share_slots([mixture], 2, (7, 1))


def test_learners_share_what_is_loaded() -> None:
    loaded, (one, other) = share_slots([{"a": 0.5, "b": 0.5}, {"c": 1.0}], 2, (3, 0))
    assert set(one) | set(other) <= set(loaded)
    assert sum(one.values()) == pytest.approx(1.0) == sum(other.values())
    with pytest.raises(ValueError, match="empty mixture"):
        share_slots([{}], 2, (0,))


@given(st.integers(1, 7), st.integers(2, 5))
def test_every_cell_is_played_once(members: int, slots: int) -> None:
    cells = visible_cells([range(members)] * 2, symmetric=True)
    waves = match_waves(cells, ("all", "all"), {"all": slots})
    played = [cell for _, some in waves for cell in some]
    assert sorted(played) == cells
    for loaded, some in waves:
        assert len(loaded["all"]) <= slots
        assert all(set(cell) <= set(loaded["all"]) for cell in some)


def _greedy(
    cells: list[tuple[int, ...]], pool_of: Sequence[str], slots: dict[str, int]
) -> list[tuple[dict[str, list[int]], list[tuple[int, ...]]]]:
    """Waves by looking at every remaining cell before every load."""
    left, waves = cells, []

    def missing(cell: tuple[int, ...]) -> list[tuple[str, int]]:
        pairs = dict.fromkeys(zip(pool_of, cell, strict=True))
        return [one for one in pairs if one[1] not in loaded[one[0]]]

    while left:
        loaded: dict[str, list[int]] = {pool: [] for pool in slots}
        for pool, member in dict.fromkeys(zip(pool_of, left[0], strict=True)):
            loaded[pool].append(member)
        if any(len(members) > slots[pool] for pool, members in loaded.items()):
            raise ValueError("do not fit")
        while True:
            scores: Counter[tuple[str, int]] = Counter()
            for lacks in map(missing, left):
                for one in lacks:
                    if len(loaded[one[0]]) < slots[one[0]]:
                        scores[one] += 1000 if len(lacks) == 1 else 1
            if not scores:
                break
            pool, member = max(scores, key=lambda one: scores[one])
            loaded[pool].append(member)
        played = [cell for cell in left if not missing(cell)]
        left = [cell for cell in left if cell not in set(played)]
        waves.append(({pool: sorted(some) for pool, some in loaded.items()}, played))
    return waves


@given(
    st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=3).flatmap(
        lambda pools: st.tuples(
            st.just(pools),
            st.lists(st.tuples(*[st.integers(0, 8)] * len(pools)), max_size=30),
            st.fixed_dictionaries({"a": st.integers(1, 5), "b": st.integers(1, 5)}),
        )
    )
)
def test_waves_are_those_of_looking_at_every_cell(
    case: tuple[list[str], list[tuple[int, ...]], dict[str, int]],
) -> None:
    pools, cells, slots = case
    if any(
        len({member for pool, member in zip(pools, cell, strict=True) if pool == name}) > count
        for cell in cells
        for name, count in slots.items()
    ):
        with pytest.raises(ValueError, match="do not fit"):
            match_waves(cells, pools, slots)
        return
    assert match_waves(cells, pools, slots) == _greedy(cells, pools, slots)


def test_pools_of_their_own_are_loaded_apart() -> None:
    cells = visible_cells([(0, 2), (0, 1, 3)], symmetric=False)
    waves = match_waves(cells, ("alice", "bob"), {"alice": 1, "bob": 3})
    assert [loaded for loaded, _ in waves] == [
        {"alice": [0], "bob": [0, 1, 3]},
        {"alice": [2], "bob": [0, 1, 3]},
    ]
    with pytest.raises(ValueError, match="do not fit"):
        match_waves([(0, 1)], ("all", "all"), {"all": 1})


def test_seats_alternate_out_of_step_with_the_workflow() -> None:
    """A workflow of two changes seats with every query: a learner has both agents on both seats."""
    seen = Counter((turn % 2, training_seat(turn, 2)) for turn in range(16))
    assert set(seen.values()) == {4}
    assert Counter(training_seat(turn, 3) for turn in range(9)) == {0: 3, 1: 3, 2: 3}


def test_payoffs_of_some_members() -> None:
    table = PayoffTable([3, 3], symmetric=True)
    for cell in table.all():
        table.record(cell, [cell[0] - cell[1], cell[1] - cell[0]])
    assert table.tensor([[0, 2], [0, 2]])[0].tolist() == [[0.0, -2.0], [2.0, 0.0]]
