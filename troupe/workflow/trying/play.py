"""Playing a workflow without services: policies replace engines, and functions run in this
process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from troupe.contracts import kinds
from troupe.functions.declaration import definition_of
from troupe.outcomes import json_text, safe_text
from troupe.user_code import await_contained
from troupe.workflow import scoring
from troupe.workflow.agent import Agent, Agents
from troupe.workflow.backend import Sampling
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.errors import WorkflowError
from troupe.workflow.loading import Query, Workflow
from troupe.workflow.samples import GroupBy, SampleRow, metrics_of, rows_of
from troupe.workflow.tools import Tools
from troupe.workflow.trying.functions import Function, LocalFunctions
from troupe.workflow.trying.limits import time_limit
from troupe.workflow.trying.policies import Policy, PolicyBackend, RandomPolicy
from troupe.workflow.trying.tokenizer import END_ID, ByteTokenizer
from troupe.workflow.turns import Role, TurnRecord

# Longer than any agent's name in a job.
_NAME_CHARS: Final = 200
_LANGUAGE: Final = ChatTokenizer(ByteTokenizer())


@dataclass(frozen=True)
class Played:
    """A trajectory that ended without an error."""

    query: Query
    turns: list[TurnRecord]
    rewards: dict[str, float]
    """Per agent (and `team`), as a job would report them."""
    samples: list[SampleRow]
    """Samples that a job would store."""
    metrics: dict[str, float]
    """Metrics that a job would log, including the workflow's own."""


def make_role(name: str, system_prompt: str | None = None, **sampling: Any) -> Role:
    """Return a role whose policy has the agent's name and whose tokens are bytes
    (`ByteTokenizer`)."""
    own = Sampling(stop_token_ids=(END_ID,)).override(sampling)
    return Role(name, name, _LANGUAGE, own, system_prompt)


class Trial:
    """One run of a workflow on one query; `agents` keeps its turns, also after an error."""

    def __init__(
        self,
        workflow: Workflow,
        query: Query | Mapping[str, Any],
        *,
        policy: Policy | Mapping[str, Policy] | None = None,
        agents: Iterable[str] | Mapping[str, Role] | Callable[[str], Role] | None = None,
        tools: Mapping[str, Function] | None = None,
        rewards: Mapping[str, Function] | None = None,
        functions: LocalFunctions | None = None,
        trained: Collection[str] | None = None,
        group_by: GroupBy = "agent",
        own_groups: bool = True,
        seed: int = 0,
        seconds: float = 60.0,
        trajectory_id: str = "",
        contexts: Mapping[str, int] | None = None,
    ) -> None:
        """Take the arguments of `play`; `agents` may also make the role of any name. `functions`
        replaces the functions made from `tools` and
        `rewards`; `contexts` is as in `PolicyBackend`."""
        self.query = query if isinstance(query, Query) else Query("q0", "train", 0, query)
        self.trajectory_id = trajectory_id or f"{self.query.id}-t0"
        self._workflow = workflow
        self._backend = PolicyBackend(RandomPolicy() if policy is None else policy, contexts)
        self.agents = _agents(agents, self._backend, seed)
        self._backend.agents = self.agents
        self._rewards = tuple(rewards or ())
        self._functions = functions or LocalFunctions(tools or {}, rewards or {}, seconds=seconds)
        offered = [definition_of(name, function) for name, function in (tools or {}).items()]
        self._tools = Tools(tools or (), self._functions, offered)
        self._trained = trained
        self._group_by, self._own_groups = group_by, own_groups
        self._seconds = seconds

    async def run(self) -> Played:
        """Play and score. Raises the workflow's errors, a `WorkflowError` for rewards that a job
        would refuse, and one of kind `deadline` if it takes too long."""
        check_json(self.query)
        # A separate task, as in a job: the tasks that it creates are its branches.
        try:
            async with time_limit(self._seconds) as limit:
                given = await asyncio.create_task(self._play())
                turns = self.agents.close()
                names = self.agents.keys()
                total = await scoring.rewards_of(
                    given, self._rewards, self._functions, self.query, turns, names
                )
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._late() from error
        finally:
            turns = self.agents.close()
            await self._backend.close()
        policies = {turn.role.policy for turn in turns}
        trained = policies if self._trained is None else self._trained
        scoring.check_complete(total, turns, trained)
        return Played(
            query=self.query,
            turns=turns,
            rewards=scoring.with_turn_rewards(total, turns),
            samples=rows_of(
                turns,
                query_id=self.query.id,
                trajectory_id=self.trajectory_id,
                trained=trained,
                rewards=total,
                group_by=self._group_by,
                own_groups=self._own_groups,
            ),
            metrics=metrics_of(turns) | self.query.logged() | self.agents.unawaited_metric,
        )

    async def _play(self) -> Any:
        self.agents.enter()
        return await await_contained(self._workflow(self.query, self.agents, self._tools))

    def _late(self) -> WorkflowError:
        waiting = [turn.role.name for turn in self.agents.begun if turn.reply is None]
        message = f"not done within {self._seconds:g} s, after {len(self.agents.turns)} turns"
        if waiting:
            message += f"; it was waiting for {', '.join(waiting)}"
        return WorkflowError(
            message, kind=kinds.DEADLINE, remedy="Await something that ends, or allow more seconds."
        )


async def play(
    workflow: Workflow,
    query: Query | Mapping[str, Any],
    *,
    policy: Policy | Mapping[str, Policy] | None = None,
    agents: Iterable[str] | Mapping[str, Role] | None = None,
    tools: Mapping[str, Function] | None = None,
    rewards: Mapping[str, Function] | None = None,
    trained: Collection[str] | None = None,
    group_by: GroupBy = "agent",
    seed: int = 0,
    seconds: float = 60.0,
) -> Played:
    """Run a workflow on one query without any model or service.

    `query`: an item of the job's tasks. `policy`: draws the turns of all agents, or policies by
    agent; default: `RandomPolicy()`. `agents`: their names, or `make_role(...)` by name; default:
    every name that the workflow uses. `tools`, `rewards`: functions by name, called in this process
    with JSON arguments. `trained`: policies whose turns become samples, all by default. `seconds`:
    the longest that it, and each function, may take. The same `seed` plays the same trajectory.

    Raises the workflow's errors, a `WorkflowError` for rewards that a job would refuse, and one of
    kind `deadline` if it takes too long.
    """
    trial = Trial(
        workflow,
        query,
        policy=policy,
        agents=agents,
        tools=tools,
        rewards=rewards,
        trained=trained,
        group_by=group_by,
        seed=seed,
        seconds=seconds,
    )
    return await trial.run()


def check_json(query: Query) -> None:
    """Raise `WorkflowError` of kind `bad_task` unless the query's data is JSON."""
    try:
        json_text(dict(query.data), allow_nan=True)
    except BaseException as error:  # a mapping of a user-defined class
        raise WorkflowError(
            f"query {query.id} does not consist of JSON values: {safe_text(error)}",
            kind="bad_task",
            field="query",
            remedy="Use strings, numbers, booleans, None, lists and dicts of them.",
        ) from error


class _OpenAgents(Agents):
    """Agents of any name, made on first use."""

    def __init__(self, make: Callable[[str], Role], backend: PolicyBackend, seed: int) -> None:
        super().__init__({}, backend, seed=seed)
        self._make = make

    def __getitem__(self, name: str) -> Agent:
        if name not in self._agents:
            self._agents[name] = Agent(self._make(name), self._record)
        return self._agents[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.isprintable() and len(name) <= _NAME_CHARS


def _agents(
    given: Iterable[str] | Mapping[str, Role] | Callable[[str], Role] | None,
    backend: PolicyBackend,
    seed: int,
) -> Agents:
    if given is None or callable(given):
        return _OpenAgents(given or make_role, backend, seed)
    roles = given if isinstance(given, Mapping) else {name: make_role(name) for name in given}
    return Agents(roles, backend, seed=seed)
