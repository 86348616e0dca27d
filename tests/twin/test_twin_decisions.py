"""The twin takes the services' decisions: the same functions, and the same choices."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.orchestrator.pipeline import dispatch, steps
from services.orchestrator.placement import engine_balancer, trainer_lease, trainer_scheduler
from services.rollout.serving import policy as served_policy
from services.rollout.serving import router as live_router
from services.rollout.serving.router import StickyRoute
from testbed.twin import cluster as published
from tests.rollout.hand_engines import ask, make
from troupe.scheduling import admission, balancing, binding, capacity, routing
from troupe.twin import cluster, engines, planner, trainers
from troupe.twin.engines import RoutedTurn, TwinRouter
from troupe.twin.job import RoutingRules
from troupe.twin.workload import TwinTurn


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("Fleet", engines),
        ("TurnQueue", engines),
        ("Profiles", engines),
        ("Work", engines),
        ("Rates", published),
        ("classes_for", published),
    ],
)
def test_turns_are_routed_by_the_same_functions(name: str, twin: Any) -> None:
    shared = getattr(routing, name)
    assert getattr(live_router, name) is shared
    assert getattr(twin, name) is shared


def test_turns_are_limited_by_the_same_function() -> None:
    assert live_router.SharedCapacity is capacity.SharedCapacity
    assert capacity.AdaptiveLimit is engines.AdaptiveLimit is routing.AdaptiveLimit


def test_steps_trainers_and_moves_are_decided_by_the_same_functions() -> None:
    assert dispatch.admission is steps.admission is cluster.admission is admission
    assert engine_balancer.balancing is engines.balancing is balancing
    assert trainer_scheduler.binding is trainer_lease.binding is trainers.binding is binding
    assert trainers.ready_micro_batches is binding.ready_micro_batches
    assert trainers.ReadyOrder is binding.ReadyOrder
    assert served_policy.next_wave is engines.next_wave is routing.next_wave
    # The services place with the function that the planner asks whether a split can be placed.
    assert planner.place.__module__ == "troupe.scheduling.devices"


@pytest.mark.parametrize(
    ("module", "used"),
    [
        (dispatch, {"due_wave", "spread_queries"}),
        (steps, {"holding_back", "next_move"}),
        (trainer_scheduler, {"decide", "ready_micro_batches"}),
        (engine_balancer, {"decide", "Demand", "EngineAssignment", "succeeded"}),
    ],
)
def test_both_sides_call_them(module: Any, used: set[str]) -> None:
    twin = (cluster, engines, trainers)
    for name in used:
        assert name in _names(module)
        assert any(name in _names(one) for one in twin), name


def _names(module: Any) -> set[str]:
    """All names that functions of a module refer to."""
    found: set[str] = set()
    todo = [compile(Path(module.__file__).read_text(), module.__file__, "exec")]
    while todo:
        code = todo.pop()
        found.update(code.co_names)
        todo += [one for one in code.co_consts if hasattr(one, "co_names")]
    return found


class _Held:
    """An engine of the twin that holds turns until the test ends them."""

    def __init__(self, engine_id: str, limit: int) -> None:
        self.engine_id = engine_id
        self.limit = limit
        self.prefix_cache = True
        self.serving = True
        self.running: dict[RoutedTurn, None] = {}
        self.router: TwinRouter | None = None

    def admit(self, turn: RoutedTurn) -> None:
        turn.engine = self  # type: ignore[assignment]
        self.running[turn] = None

    def end(self, name: str) -> None:
        turn = next(one for one in self.running if one.key == name)
        del self.running[turn]
        assert self.router is not None
        self.router.ended(turn)

    @property
    def held(self) -> list[str]:
        return [one.key for one in self.running]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["least_work", "round_robin"])
async def test_the_router_and_its_twin_choose_the_same_engines(policy: Any, seed: int) -> None:
    """Conversations of several turns come and go in one order at both."""
    rng = random.Random(seed)
    live, hands = make(count=3, limit=2, policy=policy, adaptive_limit=False)
    held = [_Held(f"e{n}", 2) for n in range(3)]
    rules = RoutingRules(policy=policy, adaptive_limit=False)
    twin = TwinRouter("p", held, rules, max_new_tokens=10)  # type: ignore[arg-type]
    routes: dict[int, StickyRoute] = {}
    before: dict[int, str | None] = {}
    tasks: list[asyncio.Task[Any]] = []
    asked = 0
    for _ in range(80):
        running = [(n, name) for n, one in enumerate(held) for name in one.held]
        if asked < 40 and (not running or rng.random() < 0.6):
            talk, left = rng.randrange(6), rng.randrange(1, 5)
            # A conversation requests one turn at a time.
            if any(name.startswith(f"c{talk}/") for _, name in running) or talk in _waiting(tasks):
                continue
            name = f"c{talk}/{asked}"
            asked += 1
            route = routes.setdefault(talk, StickyRoute())
            task = ask(live, name, route, group=f"q{talk % 2}", left=left)
            task.set_name(str(talk))
            tasks.append(task)

            def ended(turn: RoutedTurn, talk: int = talk) -> None:
                assert turn.engine is not None
                before[talk] = turn.engine.engine_id

            turn = TwinTurn("p", 10, 1)
            wanted = RoutedTurn(
                turn,
                ended,
                group=f"q{talk % 2}",
                key=name,
                left=left,
                previous=before.get(talk),
            )
            await asyncio.sleep(0)
            twin.ask(wanted)
        elif running:
            number, name = rng.choice(running)
            hands[number].answer(name, tokens=1)
            held[number].end(name)
        for _ in range(12):
            await asyncio.sleep(0)
        assert [list(one.held) for one in hands] == [one.held for one in held]
        assert live.waiting == twin.backlog - sum(len(one.held) for one in held)
    assert asked > 20
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _waiting(tasks: list[asyncio.Task[Any]]) -> set[int]:
    return {int(task.get_name()) for task in tasks if not task.done()}


def test_a_replayed_log_of_trainer_decisions_gives_the_same_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The functions repeat the twin's decisions from the same records."""
    log: list[tuple[Any, Any]] = []
    decide = binding.decide

    def recorded(*args: Any) -> Any:
        plan = decide(*args)
        log.append((args, plan))
        return plan

    monkeypatch.setattr(
        trainers, "binding", SimpleNamespace(**vars(binding) | {"decide": recorded})
    )
    from tests.twin.jobs import two_policies

    cluster.Twin(two_policies(mode="micro_batch", trainers=1)).run(3)
    assert len(log) > 20
    for args, plan in log:
        assert decide(*args) == plan
