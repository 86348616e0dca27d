"""`benchmarks.papers.twin.malib`: sampling by many workers, and best responses trained at once."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from benchmarks.papers.twin import malib


@pytest.mark.parametrize("name", malib.CASES)
def test_more_workers_sample_more_until_one_process_is_full(name: str) -> None:
    case, found = malib.CASES[name], malib.scale_out(name, (1, 4, 16, 64))
    for fewer, more in itertools.pairwise(found.values()):
        assert more > 0.99 * fewer
    for workers, rate in found.items():
        assert rate <= 1.1 * workers * found[1]
        # At most as many as the slowest of the processes that all share lets through.
        assert rate <= 1.02 * case.most * case.units
    expected = min(64 * found[1], case.most * case.units)
    assert found[64] == pytest.approx(expected, rel=0.1)


def test_a_costlier_store_is_full_with_fewer_workers() -> None:
    case = malib.CASES["arrays"]
    slow = dataclasses.replace(case, single=(*case.single, ("store", 2e-3)))
    assert malib.sampled(slow, 64) == pytest.approx(500 * case.units, rel=0.05)
    assert malib.sampled(slow, 4) == pytest.approx(malib.sampled(case, 4), rel=0.05)


def test_parallel_learners_play_the_same_matches_in_less_time() -> None:
    case = malib.PsroCase(members=16)
    runs = [malib.psro(learners, case) for learners in (1, 2, 4, 8, 16)]
    # All cells of 17 members, each against itself too, each 8 times.
    assert {one.played for one in runs} == {8 * (17 * 18 // 2)}
    for fewer, more in itertools.pairwise(runs):
        assert more.training < fewer.training
        assert more.matches + more.loads <= fewer.matches + fewer.loads
        # An iteration waits for the slowest of its learners.
        assert more.training > fewer.training / 2


def test_equal_learners_lose_nothing() -> None:
    case = malib.PsroCase(members=8, sigma=0.0)
    assert malib.psro(1, case).training == pytest.approx(8 * malib.psro(8, case).training)


def test_matches_grow_with_the_square_of_the_population() -> None:
    small, large = (malib.psro(8, malib.PsroCase(members=one)).played for one in (32, 64))
    assert large / small == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("learners", [0, -1, 3, 128])
def test_learners_that_do_not_divide_the_population_are_refused(learners: int) -> None:
    with pytest.raises(ValueError, match="learners = "):
        malib.psro(learners)


def test_impossible_sampling_is_refused_by_field() -> None:
    with pytest.raises(ValueError, match="workers = 0"):
        malib.sampled(malib.CASES["arrays"], 0)
    with pytest.raises(ValueError, match="name = 'atari'"):
        malib.scale_out("atari")
    for field, value in (("core", 0.0), ("units", -1.0), ("places", 0), ("latency", -1.0)):
        with pytest.raises(ValueError, match=f"{field} = "):
            dataclasses.replace(malib.CASES["arrays"], **{field: value})
