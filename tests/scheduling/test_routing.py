"""Properties of the choice of an engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from troupe.scheduling.routing import STAY_SLACK_TOKENS, Fleet, Policy, Rates, Work, overloaded

TURN = Work(100, 50)


def everyone(engine_id: str) -> bool:
    return True


@dataclass
class Model:
    """The fleet's expected knowledge, computed in the slow way."""

    limit: int
    rates: Rates | None
    costs: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    serves: bool = True


class FleetMachine(RuleBasedStateMachine):
    """Engines come, go, fall ill and fill up; every choice is checked against a linear search."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.model: dict[str, Model] = {}
        self.born = 0

    @rule(
        limit=st.integers(1, 3),
        rates=st.none() | st.builds(Rates, st.floats(10, 1e4), st.floats(10, 1e4)),
        kind=st.sampled_from(["", "compute", "bandwidth"]),
    )
    def add(self, limit: int, rates: Rates | None, kind: str) -> None:
        name = f"{kind}{self.born}"
        self.born += 1
        self.fleet.add(name, limit=limit, device_class=kind, rates=rates)
        self.model[name] = Model(limit, rates)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.fleet.remove(name)
        del self.model[name]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), limit=st.integers(1, 4))
    def resize(self, data: st.DataObject, limit: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.fleet.set_limit(name, limit)
        self.model[name].limit = limit

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fall_ill_or_recover(self, data: st.DataObject) -> None:
        engine = self.model[data.draw(st.sampled_from(sorted(self.model)))]
        engine.serves = not engine.serves
        if engine.serves:
            self.fleet.look_again()

    @precondition(lambda self: any(m.costs for m in self.model.values()))
    @rule(data=st.data())
    def end_turn(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, m in self.model.items() if m.costs)))
        costs = self.model[name].costs
        self.fleet.take_back(name, costs.pop(data.draw(st.integers(0, len(costs) - 1))))

    @precondition(lambda self: any(m.waiting for m in self.model.values()))
    @rule(data=st.data())
    def stop_waiting(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, m in self.model.items() if m.waiting)))
        waiting = self.model[name].waiting
        self.fleet.leave(name, waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))

    @rule(
        data=st.data(),
        work=st.builds(Work, st.integers(1, 5000), st.integers(1, 5000)),
        classes=st.lists(st.sampled_from(["compute", "bandwidth", "missing"]), max_size=2),
    )
    def choose(self, data: st.DataObject, work: Work, classes: list[str]) -> None:
        home = data.draw(st.none() | st.sampled_from([*sorted(self.model), "gone"]))
        chosen = self.fleet.choose(
            work, lambda name: self.model[name].serves, previous=home, classes=classes
        )
        open_ = {n for n, m in self.model.items() if m.serves and len(m.costs) < m.limit}
        assert (chosen is None) == (not open_)
        if chosen is None:
            return
        assert chosen in open_ or chosen == home
        assert self.model[chosen].serves
        if all(m.rates is None for m in self.model.values()):
            load = {name: sum(m.costs) + sum(m.waiting) for name, m in self.model.items()}
            least = min(load[name] for name in open_)
            stays = home in self.model and self.model[home].serves
            stays = stays and (home in open_ or work.prompt_tokens >= STAY_SLACK_TOKENS)
            if stays and not overloaded(load[home], least):
                assert chosen == home
            elif not classes:
                assert load[chosen] == pytest.approx(least)
            else:
                assert not overloaded(load[chosen], least)
        if chosen in open_:
            self.model[chosen].costs.append(self.fleet.give(chosen, work))
        else:
            self.model[chosen].waiting.append(self.fleet.wait(chosen, work))

    @invariant()
    def sums_are_right(self) -> None:
        assert self.fleet.places == sum(engine.limit for engine in self.model.values())
        for name, engine in self.model.items():
            assert self.fleet._members[name].outstanding == pytest.approx(
                sum(engine.costs), abs=1e-6
            )
            assert self.fleet._members[name].waiting == pytest.approx(sum(engine.waiting), abs=1e-6)
            assert self.fleet.has_room(name) == (len(engine.costs) < engine.limit)


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 6), st.integers(1, 4))
def test_equal_engines_take_turns(engines: int, rounds: int) -> None:
    fleet = Fleet()
    for number in range(engines):
        fleet.add(f"e{number}", limit=100)
    chosen: Counter[str] = Counter()
    for _ in range(rounds * engines):
        name = fleet.choose(TURN, everyone)
        assert name is not None
        chosen[name] += 1
        fleet.take_back(name, fleet.give(name, TURN))  # all look alike again
    assert set(chosen.values()) == {rounds}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3000)), max_size=120))
def test_property_of_a_whole_run_no_engine_gets_far_ahead(turns: list[tuple[int, int]]) -> None:
    """Turns arrive and stay: the spread never exceeds what stickiness allows plus one turn."""
    fleet = Fleet()
    names = [f"e{i}" for i in range(4)]
    for name in names:
        fleet.add(name, limit=1000)
    home: dict[int, str] = {}
    for conversation, tokens in turns:
        chosen = fleet.choose(Work(tokens, 0), everyone, previous=home.get(conversation))
        assert chosen is not None
        home[conversation] = chosen
        fleet.give(chosen, Work(tokens, 0))
        load = [fleet._members[name].outstanding for name in names]
        assert max(load) <= 1.5 * min(load) + STAY_SLACK_TOKENS + 3000


def test_a_faster_engine_gets_more() -> None:
    fleet = Fleet()
    fleet.add("slow", limit=1000, rates=Rates(1000, 100))
    fleet.add("fast", limit=1000, rates=Rates(3000, 300))
    given_ = Counter[str]()
    for _ in range(400):
        name = fleet.choose(TURN, everyone)
        assert name is not None
        given_[name] += 1
        fleet.give(name, TURN)
    assert given_["fast"] == pytest.approx(300, abs=2)


def test_turns_go_to_their_class_until_it_has_far_more_to_do() -> None:
    fleet = Fleet()
    fleet.add("c0", limit=1000, device_class="compute", rates=Rates(20_000, 1000))
    fleet.add("b0", limit=1000, device_class="bandwidth", rates=Rates(5_000, 3000))
    chosen = []
    for _ in range(200):
        name = fleet.choose(Work(2000, 20), everyone, classes=["compute"])
        assert name is not None
        chosen.append(name)
        fleet.give(name, Work(2000, 20))
    assert set(chosen[:8]) == {"c0"}
    assert "b0" in chosen  # work is not left lying for the sake of a class
    assert chosen.count("c0") > 2 * chosen.count("b0")
    assert fleet.choose(Work(2000, 20), lambda n: n == "b0", classes=["compute"]) == "b0"
    assert fleet.choose(Work(2000, 20), everyone, classes=["unheard-of"]) is not None


@pytest.mark.parametrize("policy", ["round_robin", "random_hash"])
def test_static_policies_ignore_load(policy: Policy) -> None:
    fleet = Fleet(policy)
    for number in range(3):
        fleet.add(f"e{number}", limit=1)
    first = {f"t{n}": fleet.choose(TURN, everyone, key=f"t{n}") for n in range(30)}
    for name in first.values():
        assert name is not None
        fleet.give(name, TURN)
    assert set(first.values()) == {"e0", "e1", "e2"}
    assert not any(fleet.has_room(f"e{n}") for n in range(3))
    # Full or not, a conversation goes back to its engine; when that is gone, to another.
    for key, home in first.items():
        assert fleet.choose(TURN, everyone, key=key, previous=home) == home
        others = set(first.values()) - {home}
        assert fleet.choose(TURN, others.__contains__, key=key, previous=home) in others
    if policy == "round_robin":
        assert set(Counter(first.values()).values()) == {10}


def test_many_choices_leave_no_rubbish() -> None:
    fleet = Fleet()
    for number in range(50):
        fleet.add(f"e{number}", limit=4)
    for _ in range(5000):
        name = fleet.choose(TURN, everyone)
        assert name is not None
        fleet.take_back(name, fleet.give(name, TURN))
    heaps: dict[str, list[Any]] = fleet._heaps
    assert sum(map(len, heaps.values())) <= 4 * 50 + 64


def test_a_conversation_waits_for_its_full_engine_until_that_has_far_more_to_do() -> None:
    """Elsewhere it would be read from its beginning."""
    fleet, long = Fleet(), Work(20_000, 200)
    fleet.add("home", limit=2)
    fleet.add("other", limit=2)
    costs = [fleet.give("home", long) for _ in range(2)]
    fleet.give("other", long)
    assert fleet.choose(long, everyone, previous="home") == "other"  # half of its load
    fleet.give("other", Work(10_000, 200))
    fleet.set_limit("other", 3)
    assert fleet.choose(long, everyone, previous="home") == "home"
    assert fleet.choose(TURN, everyone, previous="home") == "other"  # read in no time
    # Those that wait are load, too.
    waits = [fleet.wait("home", long) for _ in range(2)]
    assert fleet.choose(long, everyone, previous="home") == "other"
    for cost in waits:
        fleet.leave("home", cost)
    assert fleet.choose(long, everyone, previous="home") == "home"
    assert fleet.choose(long, lambda name: name != "home", previous="home") == "other"
    fleet.take_back("home", costs[0])
    assert fleet.choose(long, everyone) == "home"  # a new conversation goes where least is to do
    fleet.remove("home")
    fleet.leave("home", costs[1])  # it waits no more
