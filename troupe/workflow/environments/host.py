"""Hosts of environments: a workflow's async interface to an environment, with retries.

`Local` runs the environment in this process, `Hosted` (process.py) in a separate process. Both
check it against its `Contract` and retry a failed reset. A failed step is never repeated: it ends
the trajectory, which may be retried as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from troupe.outcomes import Interruption, described, traceback_text
from troupe.workflow.environments.contract import Contract
from troupe.workflow.environments.interface import (
    Action,
    Environment,
    EnvironmentFactory,
    Properties,
    Reset,
    Step,
)
from troupe.workflow.errors import (
    EntrypointError,
    EnvironmentContractError,
    EnvironmentFault,
    WorkflowError,
)
from troupe.workflow.loading import load_attribute

T = TypeVar("T")


Event = Literal["resets", "steps", "retries", "faults", "kills", "starts", "illegal_moves"]


class Counters:
    """Counts per (event, environment).

    `resets`, `steps`: successful ones. `retries`: further attempts of a reset. `faults`: failures
    of any kind, including those that a retry repaired. `kills`: processes killed at a deadline.
    `starts`: processes started. `illegal_moves`: of players.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[Event, str]] = Counter()

    def count(self, event: Event, environment: str, by: int = 1) -> None:
        """Add `by` to a count."""
        self._counts[event, environment] += by

    def of(self, event: Event, environment: str | None = None) -> int:
        """Return the count of one environment, or of all."""
        return sum(
            count
            for (what, whose), count in self._counts.items()
            if what == event and environment in (None, whose)
        )

    def all(self) -> dict[tuple[Event, str], int]:
        """Return a copy of all counts."""
        return dict(self._counts)


COUNTERS: Final = Counters()
"""Counts of this process."""


def open_environment(
    entrypoint: str, args: Mapping[str, Any], field: str = "environment"
) -> Environment:
    """Return a new environment: `package.module:attribute` called with `args`.

    Raises `EntrypointError`; `EnvironmentFault` when the environment's own code raises.
    """
    make = load_attribute(entrypoint, field)
    if not callable(make):
        raise EntrypointError(
            f"is a {type(make).__name__}, which cannot make environments",
            field=field,
            value=entrypoint,
            remedy="Name a class or a function that returns an `Environment`.",
        )
    made = guarded(entrypoint, lambda: make(**args))
    if not isinstance(made, Environment):
        raise EntrypointError(
            f"made a {type(made).__name__}, not an `Environment`",
            field=field,
            value=entrypoint,
            remedy="Derive it from `troupe.workflow.environments.Environment`, or use an adapter.",
        )
    return made


def guarded(name: str, call: Callable[[], T]) -> T:
    """Call code of an environment, and turn its exceptions, except `WorkflowError`, into an
    `EnvironmentFault` with the end of the traceback."""
    try:
        return call()
    except (WorkflowError, Interruption):
        raise
    except BaseException as error:
        raise raised_fault(name, error) from error


def raised_fault(name: str, error: BaseException) -> EnvironmentFault:
    """Return the fault of an environment whose code raised `error`."""
    return EnvironmentFault(
        f"environment {name} raised {described(error)}",
        reason="raised",
        environment=name,
        remedy="If this always happens, fix the environment; `troupe environment check` tests it.",
        traceback=traceback_text(error),
    )


@dataclass(frozen=True, slots=True)
class FaultLimits:
    """Time limits of an environment, and retries of its reset."""

    start_seconds: float = 60.0
    """Time limit of starting a process, importing and constructing the environment."""
    reset_seconds: float = 60.0
    """Time limit of one `reset`."""
    step_seconds: float = 30.0
    """Time limit of one `step`."""
    wait_seconds: float = 600.0
    """Time limit of waiting for a free process."""
    retries: int = 3
    """Further attempts after a failed reset, each on a new environment."""
    backoff_seconds: float = 0.5
    """Pause before the first further attempt; doubles up to `max_backoff_seconds`."""
    max_backoff_seconds: float = 10.0


class AsyncEnvironment(ABC):
    """An environment as seen by a workflow, with contract checks, retries and counts."""

    def __init__(self, name: str, limits: FaultLimits) -> None:
        self.name = name
        """Name for metrics: the entrypoint, or the name of the factory."""
        self._limits = limits
        self._contract: Contract | None = None

    @property
    def properties(self) -> Properties:
        """Declared properties. Raises `EnvironmentContractError` before the first reset."""
        return self._known().properties

    @property
    def current(self) -> tuple[str, ...]:
        """The seats that move now."""
        return self._contract.current if self._contract else ()

    async def reset(self, seed: int) -> Reset:
        """Begin an episode; a failed reset is retried on a new environment, with backoff. Raises
        `EnvironmentFault` after the last attempt."""
        # Imports gRPC, which the child process of an environment does not need.
        from troupe.rpc.retry import Attempts, RetryPolicy

        limits = self._limits
        policy = RetryPolicy(
            max_attempts=limits.retries + 1,
            initial_backoff=limits.backoff_seconds,
            max_backoff=limits.max_backoff_seconds,
        )
        attempts = Attempts(policy, retryable=lambda error: True)
        while True:
            try:
                reset = await self._attempt_reset(seed)
                break
            except EnvironmentFault as fault:
                try:
                    await attempts.failed(fault)
                except EnvironmentFault as last:
                    if attempts.failures > 1:
                        last.append(f" (tried {attempts.failures} times)")
                    raise
            COUNTERS.count("retries", self.name)
        COUNTERS.count("resets", self.name)
        return reset

    async def _attempt_reset(self, seed: int) -> Reset:
        try:
            properties = await self._open()
            if self._contract is None or self._contract.properties != properties:
                self._contract = Contract(properties)
            reset = await self._reset(seed)
        except EnvironmentFault:
            await self._failed()
            raise
        return self._contract.began(reset)

    async def step(self, actions: Mapping[str, Action]) -> Step:
        """Play the moves of all seats of `current`.

        Raises `MoveError`, which leaves the episode unchanged, and `EnvironmentFault`, after which
        only `reset` and `close` may be called.
        """
        contract = self._known()
        contract.moves(actions)
        try:
            step = await self._step(actions)
        except EnvironmentFault:
            contract.over()
            await self._failed()
            raise
        COUNTERS.count("steps", self.name)
        return contract.went(step)

    async def close(self) -> None:
        """Release the environment. Repeatable."""
        if self._contract is not None:
            self._contract.over()

    def _known(self) -> Contract:
        if self._contract is None:
            raise EnvironmentContractError(
                f"{self.name} was not reset yet", field="environment", remedy="Call `reset(seed)`."
            )
        return self._contract

    async def _failed(self) -> None:
        COUNTERS.count("faults", self.name)
        await self._discard()

    @abstractmethod
    async def _open(self) -> Properties:
        """Make an environment unless there is one, and return its properties."""

    @abstractmethod
    async def _reset(self, seed: int) -> Reset: ...

    @abstractmethod
    async def _step(self, actions: Mapping[str, Action]) -> Step: ...

    @abstractmethod
    async def _discard(self) -> None:
        """Drop a failed environment."""


class Local(AsyncEnvironment):
    """An environment in this process, on the event loop.

    For environments that answer within about a millisecond; slower ones should be `hosted`.
    """

    def __init__(
        self, make: EnvironmentFactory, *, name: str = "", limits: FaultLimits | None = None
    ) -> None:
        super().__init__(name or getattr(make, "__name__", "environment"), limits or FaultLimits())
        self._make = make
        self._environment: Environment | None = None

    async def close(self) -> None:
        """Close the environment. Repeatable."""
        await super().close()
        environment, self._environment = self._environment, None
        if environment is not None:
            guarded(self.name, environment.close)

    async def _open(self) -> Properties:
        if self._environment is None:
            self._environment = guarded(self.name, self._make)
        return self._environment.properties

    async def _reset(self, seed: int) -> Reset:
        return guarded(self.name, lambda: self._opened.reset(seed))

    async def _step(self, actions: Mapping[str, Action]) -> Step:
        return guarded(self.name, lambda: self._opened.step(actions))

    async def _discard(self) -> None:
        self._environment = None

    @property
    def _opened(self) -> Environment:
        if self._environment is None:
            raise EnvironmentFault(
                f"{self.name} failed before or was closed",
                reason="raised",
                environment=self.name,
                remedy="Call `reset(seed)`.",
            )
        return self._environment
