"""The engines as one trajectory sees them: `troupe.workflow.Backend` over the routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from services.rollout.engines.base import EngineResponse, SamplingParams
from services.rollout.serving.policy import ServedPolicy
from services.rollout.serving.router import StickyRoute
from services.rollout.trajectories.clock import TrajectoryClock
from services.rollout.trajectories.early_start import Ahead
from services.rollout.trajectories.watchdog import blocked_note
from troupe.endpoint.server import Doors, EndpointServer
from troupe.workflow import Agent, Endpoint, Sampling, TurnError
from troupe.workflow.backend import EndpointOptions


class TurnBackend:
    """Routes the turns of one trajectory and ends those that are left when it ends."""

    def __init__(
        self,
        trajectory_id: str,
        policies: Mapping[str, ServedPolicy],
        *,
        turn_seconds: float,
        clock: TrajectoryClock,
        began: Callable[[str, int], None],
        endpoints: EndpointServer,
        query_id: str = "",
        left: Callable[[str], int] = lambda query_id: 0,
        ahead: Ahead,
    ) -> None:
        """`policies`: by agent. `began(policy, version)` is told of each version that a policy
        began a turn with. `left(query_id)`: trajectories of the query that have not ended.
        `ahead`: what a turn waits for."""
        self._trajectory_id = trajectory_id
        self._policies = policies
        self._turn_seconds = turn_seconds
        self._clock = clock
        self._began = began
        self._query_id = query_id
        self._left = left
        self._ahead = ahead
        self.domain = ""
        """Task domain of the query, once that is known."""
        self._doors = Doors(endpoints)
        self.opened_endpoint = False
        """Whether the workflow asked for an address at which to speak as an agent."""
        self._homes: dict[str, StickyRoute] = {}
        self._asked = 0
        self._pending: dict[asyncio.Task[object], str] = {}

    @property
    def pending(self) -> list[str]:
        """Agents whose turns are being waited for."""
        return sorted(self._pending.values())

    async def generate(
        self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> EngineResponse:
        """One turn, within the turn's and the trajectory's time. Raises `TurnError`."""
        policy = self._policies[agent]
        await self._ahead.wait(policy.name, self._clock)
        seconds = self._clock.bound(self._turn_seconds)
        if seconds <= 0:
            raise TurnError(
                f"'{agent}' was asked for a turn after the trajectory's deadline"
                + blocked_note(self._clock.began),
                kind="deadline",
            )
        home = self._homes.get(policy.name)
        if home is None:
            home = self._homes[policy.name] = StickyRoute()
        request_id = f"{self._trajectory_id}/{self._asked}"
        self._asked += 1
        task = asyncio.current_task()
        assert task is not None
        self._pending[task] = agent
        try:
            with self._clock.elsewhere():
                generation = await policy.router.generate(
                    request_id,
                    list(prompt_ids),
                    SamplingParams.of(sampling),
                    home=home,
                    deadline_seconds=seconds,
                    domain=self.domain,
                    agent=agent,
                    group=self._query_id,
                    left=self._left(self._query_id),
                )
        finally:
            self._pending.pop(task, None)
            # An error's traceback keeps this frame, and the task its error: no cycle of the two.
            del task
        if generation.versions:
            self._began(policy.name, generation.versions[0].version)
        return generation

    def endpoint(self, agent: Agent, options: EndpointOptions) -> Endpoint:
        """Where OpenAI's clients speak as `agent` until `close`. Raises `TroupeError`."""
        self.opened_endpoint = True
        return self._doors.open(agent, options)

    def close(self) -> None:
        """Cancel branches that still wait for a turn: nobody will read it. End the endpoints."""
        self._doors.close()
        for task in list(self._pending):
            task.cancel()
