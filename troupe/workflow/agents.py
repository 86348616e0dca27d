"""The agents of one trajectory: what a workflow talks to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from troupe.outcomes import safe_text
from troupe.workflow.agent import Agent
from troupe.workflow.backend import Backend
from troupe.workflow.errors import UnknownAgentError
from troupe.workflow.record import Record
from troupe.workflow.turns import Role, Turn

# A trajectory's metric: turns that its workflow asked for and did not await.
UNAWAITED: Final = "unawaited_turns"


class Agents(Mapping[str, Agent]):
    """The agents of one trajectory by name."""

    def __init__(self, roles: Mapping[str, Role], backend: Backend, *, seed: int) -> None:
        # What agents share is apart from who has them all: what refers to itself is there until
        # the collector comes, with all that was said.
        self._record = Record(backend, seed)
        self._agents = {name: Agent(role, self._record) for name, role in roles.items()}

    def __getitem__(self, name: str) -> Agent:
        try:
            return self._agents[name]
        except KeyError:
            known, name = ", ".join(sorted(self._agents)), safe_text(name, 120)
            raise UnknownAgentError(
                f"the job has no agent '{name}'; known: {known}",
                field="agents",
                value=name,
                remedy=f"Declare it under `agents.{name}` in the job.",
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)

    @property
    def backend(self) -> Backend:
        """Where turns are generated."""
        return self._record.backend

    @property
    def turns(self) -> list[Turn]:
        """Turns that have a reply, in the order in which they were asked for."""
        return self._record.turns

    @property
    def begun(self) -> Sequence[Turn]:
        """All turns, in the order in which they were asked for."""
        return self._record.begun

    def enter(self) -> None:
        """The workflow is about to run in the current task: tasks that it creates are its branches.

        Who does not call this has turns of concurrent tasks numbered by time.
        """
        self._record.enter()

    @property
    def unawaited(self) -> Counter[str]:
        """By agent: turns that the workflow had asked for and not awaited when it was closed."""
        return Counter(turn.role.name for turn in self._record.unawaited)

    @property
    def unawaited_metric(self) -> dict[str, float]:
        """Their number as a metric of the trajectory; none where there are none."""
        count = len(self._record.unawaited)
        return {UNAWAITED: float(count)} if count else {}

    def close(self) -> list[Turn]:
        """End the trajectory: no turn begins or is recorded any more.

        Returns `turns`, in an order and with numbers that do not depend on time.
        """
        return self._record.close()
