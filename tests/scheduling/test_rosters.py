"""Queries that join and leave a step that is held open."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.admission import QueryProgress, RosterMove, next_move


def query(
    name: int, *, complete: bool = True, settled: bool = True, kept: int = 1
) -> QueryProgress:
    return QueryProgress(f"q{name}", complete, complete and settled, kept)


class Play:
    """A step whose queries turn out as `outcomes` says, in an order of the test's choosing."""

    def __init__(self, outcomes: list[bool], wanted: int, spare: int, refills: int) -> None:
        self._outcomes = outcomes
        self._wanted, self._spare, self._refills = wanted, spare, refills
        self.roster = list(range(wanted + spare))
        self.over: set[int] = set()

    def move(self) -> RosterMove:
        queries = [
            QueryProgress(f"q{n}", n in self.over, n in self.over, int(self._outcomes[n]))
            for n in self.roster
        ]
        return next_move(
            queries,
            wanted=self._wanted,
            spare=self._spare,
            max_refills=self._refills,
            first_k=self._spare > 0,
        )

    def play(self, choose: st.DataObject) -> list[int]:
        """The roster when it is closed."""
        while True:
            move = self.move()
            if move.close:
                return [n for n in self.roster if f"q{n}" not in move.leave]
            if move.add:
                start = len(self.roster)
                self.roster += range(start, start + move.add)
                continue
            running = [n for n in self.roster if n not in self.over]
            some = choose.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
            self.over.update(some)


@given(st.lists(st.booleans(), min_size=40, max_size=40), st.integers(1, 8), st.data())
def test_replacements_of_groups_without_signal_do_not_depend_on_time(
    outcomes: list[bool], wanted: int, data: st.DataObject
) -> None:
    refills = data.draw(st.integers(1, 8))
    ends = [Play(outcomes, wanted, 0, refills).play(data) for _ in range(2)]
    assert ends[0] == ends[1] == list(range(len(ends[0])))
    poor = sum(not outcomes[n] for n in ends[0])
    assert len(ends[0]) == wanted + min(poor, refills)


@given(st.lists(st.booleans(), min_size=40, max_size=40), st.integers(1, 8), st.data())
def test_the_first_to_finish_are_taken(
    outcomes: list[bool], wanted: int, data: st.DataObject
) -> None:
    spare, refills = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 8))
    play = Play(outcomes, wanted, spare, refills)
    end = play.play(data)
    assert set(end) == play.over, "what is complete stays, and nothing else"
    good = [n for n in end if outcomes[n] or not refills]
    assert len(good) >= wanted or len(play.roster) == wanted + spare + refills


def test_a_late_reward_is_waited_for() -> None:
    late = query(1, settled=False)
    assert next_move([query(0), late], wanted=2, spare=0, max_refills=2) == RosterMove()
    poor = query(1, kept=0)
    assert next_move([query(0), poor], wanted=2, spare=0, max_refills=2) == RosterMove(add=1)
    # Without refills the rows' values are not requested.
    first_k = next_move([query(0), late], wanted=1, spare=1, max_refills=0, first_k=True)
    assert first_k == RosterMove(close=True)


def test_a_step_is_not_closed_before_the_one_before_it() -> None:
    done = [query(n) for n in range(3)]
    assert (
        next_move(done, wanted=2, spare=0, max_refills=0, may_close=False, first_k=True)
        == RosterMove()
    )
    left = [*done, query(3, complete=False)]
    assert next_move(left, wanted=2, spare=2, max_refills=0, first_k=True) == RosterMove(
        leave=("q3",), close=True
    )


def test_a_roster_that_is_short_is_filled_up() -> None:
    running = [query(n, complete=False) for n in range(3)]
    assert next_move(running, wanted=3, spare=2, max_refills=0, first_k=True) == RosterMove(add=2)
