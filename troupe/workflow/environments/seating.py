"""Which agent sits on which seat. Roles are the job's agents, seats the game's players."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import factorial
from types import MappingProxyType

from troupe.workflow.errors import WorkflowError


class SeatingError(WorkflowError, ValueError):
    """The job's agents do not fill the game's seats."""

    kind = "seating"


@dataclass(frozen=True, slots=True)
class Seating:
    """One episode's map from seats to agents; an agent may hold several seats."""

    agent_of: Mapping[str, str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "agent_of", MappingProxyType(dict(self.agent_of)))

    def seats_of(self, agent: str) -> tuple[str, ...]:
        """The seats of one agent, in the game's order."""
        return tuple(seat for seat, held in self.agent_of.items() if held == agent)

    @property
    def agents(self) -> tuple[str, ...]:
        """Who plays, without repetition, in the order of their first seats."""
        return tuple(dict.fromkeys(self.agent_of.values()))

    @classmethod
    def of(
        cls,
        seats: Sequence[str],
        agents: Sequence[str] | Mapping[str, str],
        *,
        permutation: int = 0,
    ) -> Seating:
        """Agents on seats: as a mapping says, or in order; one agent alone takes all seats.

        `permutation` moves them: number k is the k-th of the n! arrangements in lexicographic
        order, modulo n!, so that consecutive numbers (seeds) give every agent every seat equally
        often. Raises `SeatingError`.
        """
        if isinstance(agents, Mapping):
            missing = [seat for seat in seats if seat not in agents]
            held = [agents[seat] for seat in seats if seat in agents]
        else:
            held = list(agents) * (len(seats) if len(agents) == 1 else 1)
            missing = list(seats[len(held) :])
        if missing or len(held) != len(seats):
            raise SeatingError(
                f"{len(seats)} seats ({', '.join(seats)}) and the agents "
                f"{', '.join(dict.fromkeys(held)) or '(none)'} do not fit",
                field="seats",
                value=missing or held,
                remedy="Say who sits where: `seats={seat: agent, ...}`; one may sit on several.",
            )
        return cls(dict(zip(seats, _arranged(held, permutation), strict=True)))


def _arranged(items: list[str], number: int) -> list[str]:
    """The `number`-th permutation, by its factorial digits."""
    left, arranged = list(items), []
    number %= factorial(len(left))
    while left:
        digit, number = divmod(number, factorial(len(left) - 1))
        arranged.append(left.pop(digit))
    return arranged
