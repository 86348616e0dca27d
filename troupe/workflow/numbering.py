"""Where in a workflow a turn was asked for, whatever ran beside it.

Branches that run concurrently take their turns in an order that depends on time, and nothing that
is trained on may depend on that. So turns are counted per *branch*: a task that a workflow creates
(`asyncio.gather`, a task group, `create_task`) counts its own turns, and has a place among the
tasks of the one that created it. Both are decided by the program, not by who is faster. Read depth
first, the places give the order in which the turns would be taken if every branch ran by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar, copy_context
from typing import Any

from troupe.outcomes import described
from troupe.workflow.errors import BranchExitedError

Path = tuple[int, ...]
"""Steps from the root: in each branch, how many turns and branches were begun before."""


class Branch:
    """One line of control of a workflow: a task, or the workflow itself."""

    __slots__ = ("_root", "path", "steps")

    def __init__(self, path: Path = (), root: Branch | None = None) -> None:
        self.path = path
        self._root = root  # None: itself, but without a cycle for each trajectory
        self.steps = 0

    @property
    def root(self) -> Branch:
        """Where it grows from; a root from itself."""
        return self._root or self

    def step(self) -> Path:
        """The path of what begins next in this branch."""
        self.steps += 1
        return (*self.path, self.steps - 1)

    def fork(self) -> Branch:
        """The branch of a task that is created now."""
        return Branch(self.step(), self.root)


_CURRENT: ContextVar[Branch | None] = ContextVar("troupe_branch", default=None)


def current(root: Branch) -> Branch:
    """The branch that runs now, of those that grow from `root`; else `root` itself."""
    branch = _CURRENT.get()
    return branch if branch is not None and branch.root is root else root


def enter(root: Branch) -> None:
    """From here on tasks of the current context are branches of `root`."""
    _number_tasks(asyncio.get_running_loop())
    _CURRENT.set(root)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Tasks created here are no branches: how many an engine's client needs depends on time."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        # A coroutine that refuses to be cancelled is closed from another context.
        with contextlib.suppress(ValueError):
            _CURRENT.reset(token)


def places(paths: Iterable[Path]) -> Mapping[Path, Path]:
    """For the path of every branch that took turns, its ordinals: 2.0 is the first branch of the
    third one. Tasks that took none do not count."""
    children: dict[Path, set[int]] = {}
    found = set(paths)
    for path in found:
        for depth in range(len(path)):
            children.setdefault(path[:depth], set()).add(path[depth])
    rank = {
        (*parent, step): number
        for parent, steps in children.items()
        for number, step in enumerate(sorted(steps))
    }
    return {path: tuple(rank[path[: depth + 1]] for depth in range(len(path))) for path in found}


def _number_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Give every task that is created inside a branch a branch of its own, once per loop."""
    former = loop.get_task_factory()
    if isinstance(former, _Factory):
        return
    loop.set_task_factory(_Factory(former))


class _Factory:
    """A task factory in front of another one."""

    def __init__(self, former: Callable[..., Any] | None) -> None:
        self._former = former or _plain_task

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        branch = _CURRENT.get()
        # Who passes a context shares its variables with the task, the branch among them.
        if branch is not None and options.get("context") is None:
            context = copy_context()
            context.run(_CURRENT.set, branch.fork())
            options["context"] = context
        if branch is not None and asyncio.iscoroutine(coro):
            coro = _Contained(coro)
        return self._former(loop, coro, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A branch's coroutine. A task that raises SystemExit or KeyboardInterrupt would end the event
    loop, and with it all trajectories of the process."""

    __slots__ = ("_coro",)

    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self._coro = coro

    def __getattr__(self, name: str) -> Any:  # its name and frame, for whoever shows tasks
        return getattr(self._coro, name)

    def __repr__(self) -> str:
        return repr(self._coro)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def send(self, value: Any) -> Any:
        try:
            return self._coro.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _exited(error) from error

    def throw(self, *raised: Any) -> Any:
        try:
            return self._coro.throw(*raised)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _exited(error) from error

    def close(self) -> None:
        self._coro.close()


def _exited(error: BaseException) -> BranchExitedError:
    return BranchExitedError(
        f"a branch raised {described(error)}", field="workflow", remedy="Raise an error instead."
    )


def _plain_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
    return asyncio.Task(coro, loop=loop, **options)
