"""`troupe workflow try`: plays queries of a `Setting` sequentially and reports each result."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import sysconfig
import threading
import traceback
from bdb import BdbQuit
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from troupe.outcomes import Interruption, described
from troupe.scheduling.admission import seed_of
from troupe.user_code import UserCodeExit, await_contained, interruptible
from troupe.workflow.errors import ToolError, WorkflowError, is_own
from troupe.workflow.loading import Query
from troupe.workflow.trying.functions import LocalFunctions
from troupe.workflow.trying.limits import debuggable
from troupe.workflow.trying.play import Played, Trial
from troupe.workflow.trying.policies import Policy
from troupe.workflow.trying.setting import Setting
from troupe.workflow.turns import TurnRecord

# A workflow that blocks the event loop is interrupted this long after its time limit, then every
# second.
_GRACE_SECONDS: Final = 2.0
_OURS: Final = str(Path(__file__).resolve().parents[1])
_STDLIB: Final = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class Failure:
    """Why a trajectory failed, for the workflow's author."""

    kind: str
    message: str
    remedy: str = ""
    traceback: str = ""
    """Frames of the user's code; empty if there are none."""
    value: str = ""
    """The value at fault, of an error that Troupe raised."""


@dataclass(frozen=True)
class Rehearsed:
    """The result of one trajectory: `played`, or the `failure` that ended it after `turns`."""

    query: Query
    trajectory_id: str
    turns: Sequence[TurnRecord]
    played: Played | None
    failure: Failure | None


@dataclass(frozen=True)
class Rehearsal:
    """A trial run: `group_size` trajectories of every query."""

    setting: Setting
    queries: Sequence[Query]
    policy: Policy | Mapping[str, Policy]
    group_size: int = 1
    seed: int = 0
    seconds: float = 60.0
    """Time limit of one trajectory."""

    def run(self) -> Iterator[Rehearsed]:
        """Yield trajectories as they end. Blocking; in the main thread, interrupt a workflow that
        blocks the event loop. Breakpoints work; `q` in their debugger raises KeyboardInterrupt."""
        loop = _Loop()
        try:
            for query in self.queries:
                for number in range(self.group_size):
                    fresh = Query(query.id, query.split, query.index, query.data)
                    with interruptible(), debuggable():
                        one = self._one(loop, fresh, number)
                    yield one
        finally:
            with interruptible(), contextlib.suppress(_Blocked), _interrupting(_GRACE_SECONDS):
                loop.close()

    def _one(self, loop: _Loop, query: Query, number: int) -> Rehearsed:
        setting = self.setting
        trial = Trial(
            setting.workflow,
            query,
            policy=self.policy,
            agents=setting.roles,
            tools=setting.tools,
            rewards=setting.rewards,
            functions=LocalFunctions(
                setting.tools, setting.rewards, seconds=setting.function_seconds
            ),
            trained=setting.trained,
            group_by=setting.group_by,
            own_groups=setting.own_groups,
            # The same seed as in a job.
            seed=seed_of(self.seed, query.split, query.index, number),
            seconds=self.seconds,
            trajectory_id=f"{query.id}-t{number}",
            contexts=setting.contexts,
        )
        played, failure = None, None
        try:
            with _interrupting(self.seconds + _GRACE_SECONDS):
                played = loop.run(self._played(trial))
        except Interruption as error:
            if not isinstance(error, _Blocked):
                raise
            failure = explain(error)
        except BdbQuit:  # `q` in the debugger
            raise KeyboardInterrupt from None
        except BaseException as error:  # Ctrl-C is an Interruption
            failure = explain(error)
        return Rehearsed(query, trial.trajectory_id, trial.agents.close(), played, failure)

    async def _played(self, trial: Trial) -> Played:
        try:
            return await trial.run()
        finally:
            # The processes of environments belong to one trajectory.
            close = getattr(self.setting.workflow, "close", None)
            if inspect.iscoroutinefunction(close):
                await await_contained(close())


def groups_of(rehearsed: Sequence[Rehearsed]) -> Counter[str]:
    """Count the samples per group over all trajectories that ended without an error."""
    return Counter(
        row.group_id for one in rehearsed if one.played is not None for row in one.played.samples
    )


def explain(error: BaseException) -> Failure:
    """Describe the failure of a trajectory whose workflow raised `error`."""
    if issubclass(type(error), _Blocked):
        return Failure(
            "workflow_blocked",
            str(error),
            "Await instead of blocking; put heavy work into a tool or asyncio.to_thread.",
            _own_traceback(error),
        )
    if not is_own(error):
        cause = error.raised if type(error) is UserCodeExit else error
        return Failure("workflow_raised", described(cause), "", _own_traceback(cause))
    assert isinstance(error, WorkflowError)
    own = error.traceback if isinstance(error, ToolError) else ""
    return Failure(
        error.kind,
        error.message,
        error.remedy or "",
        own or _own_traceback(error),
        str(error.value or ""),
    )


def _own_traceback(error: BaseException) -> str:
    """Return the traceback without frames of `troupe.workflow` and the standard library."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, _STDLIB, "<frozen"))
    ]
    return "".join(traceback.format_list(frames)).rstrip()


class _Loop:
    """The event loop of all trajectories, as in a job: a workflow may keep a client in a variable
    of its module. A trajectory that was interrupted leaves the next ones a new loop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, Played]) -> Played:
        """Return the result of `work`; raise what it raises, and `Interruption`."""
        try:
            return self._runner.run(work)
        except Exception:
            raise
        except BaseException:
            try:
                self.close()
            finally:
                self._runner = asyncio.Runner()
            raise

    def close(self) -> None:
        """Cancel what is left, and close the loop."""
        self._runner.close()


class _Blocked(Interruption):
    """Raised inside a workflow that blocks the event loop."""


@contextlib.contextmanager
def _interrupting(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(*_: Any) -> None:
        raise _Blocked(f"it blocked the event loop, or refused to end, after {seconds:g} s")

    former = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
