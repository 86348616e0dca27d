"""Generates the turns of one trajectory: `troupe.workflow.Backend` over the policies' routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from services.rollout.serving.policy import ServedPolicy
from services.rollout.serving.router import StickyRoute
from services.rollout.trajectories.clock import TrajectoryClock
from services.rollout.trajectories.concurrency import EarlyStartGate, Turnstile
from services.rollout.trajectories.watchdog import blocked_note
from troupe.contracts import kinds
from troupe.endpoint.server import EndpointServer, TrajectoryEndpoints
from troupe.workflow import Agent, Endpoint, Sampling, TurnError
from troupe.workflow.backend import EndpointOptions, GeneratedTurn


class TurnBackend:
    """A backend that routes the turns of one trajectory, and cancels its open turns when it
    ends."""

    def __init__(
        self,
        trajectory_id: str,
        policies: Mapping[str, ServedPolicy],
        *,
        turn_seconds: float,
        clock: TrajectoryClock,
        turn_began: Callable[[str, int], None],
        endpoints: EndpointServer,
        query_id: str = "",
        left: Callable[[str], int] = lambda query_id: 0,
        early_start: EarlyStartGate,
        turnstile: Turnstile,
        left_out: Collection[str] = (),
    ) -> None:
        """`policies`: by agent. `turn_began(policy, version)` is called with each turn's first
        version. `left(query_id)`: number of the query's trajectories that have not ended.
        `early_start`: the gate before each turn; `turnstile`: the gate after it. `left_out`: agents
        whose every turn is empty instead of drawn."""
        self._trajectory_id = trajectory_id
        self._policies = policies
        self._turn_seconds = turn_seconds
        self._clock = clock
        self._turn_began = turn_began
        self._query_id = query_id
        self._left = left
        self._early_start = early_start
        self._turnstile = turnstile
        self._left_out = left_out
        self.domain = ""
        """Task domain of the query; empty until it is loaded."""
        self._trajectory_endpoints = TrajectoryEndpoints(endpoints)
        self.opened_endpoint = False
        """Whether the workflow opened an endpoint for one of its agents."""
        self._routes: dict[str, StickyRoute] = {}
        self._requests = 0
        self._pending: dict[asyncio.Task[object], str] = {}

    @property
    def pending(self) -> list[str]:
        """Agents whose turns are being generated."""
        return sorted(self._pending.values())

    async def generate(
        self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> GeneratedTurn:
        """Return one turn, within the turn's and the trajectory's time. Raises `TurnError`."""
        if agent in self._left_out:
            return GeneratedTurn((), (), (), "stop")
        policy = self._policies[agent]
        await self._early_start.wait(policy.name, self._clock)
        seconds = self._clock.bound(self._turn_seconds)
        if seconds <= 0:
            raise TurnError(
                f"a turn of '{agent}' was requested after the trajectory's deadline"
                + blocked_note(self._clock.began),
                kind=kinds.DEADLINE,
            )
        route = self._routes.get(policy.name)
        if route is None:
            route = self._routes[policy.name] = StickyRoute()
        request_id = f"{self._trajectory_id}/{self._requests}"
        self._requests += 1
        task = asyncio.current_task()
        assert task is not None
        self._pending[task] = agent
        try:
            with self._clock.outside():
                generation = await policy.router.generate(
                    request_id,
                    prompt_ids,
                    sampling,
                    route=route,
                    deadline_seconds=seconds,
                    domain=self.domain,
                    agent=agent,
                    group=self._query_id,
                    left=self._left(self._query_id),
                )
                await self._turnstile.wait()
        finally:
            self._pending.pop(task, None)
            # An error's traceback keeps this frame, and the task keeps its error: avoid a cycle.
            del task
        if generation.versions:
            self._turn_began(policy.name, generation.versions[0].version)
        return generation

    def endpoint(self, agent: Agent, options: EndpointOptions) -> Endpoint:
        """Return the endpoint at which OpenAI clients act as `agent` until `close`. Raises
        `TroupeError`."""
        self.opened_endpoint = True
        return self._trajectory_endpoints.open(agent, options)

    def close(self) -> None:
        """Cancel turns that are still generated, and close the endpoints."""
        self._trajectory_endpoints.close()
        for task in list(self._pending):
            task.cancel()
