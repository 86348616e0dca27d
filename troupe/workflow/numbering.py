"""Positions of turns in a workflow, independent of the timing of concurrent branches.

Concurrent branches take their turns in an order that depends on timing, but training data must not
depend on it. So turns are counted per *branch*: a task that a workflow creates (`asyncio.gather`, a
task group, `create_task`) counts its own turns, and has a place among the tasks of its parent. The
program decides both, not the speed of the branches. Read depth first, the places give the order of
the turns if each branch ran alone.
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
"""Position in the tree of branches: at each level, the number of earlier turns and branches."""


class Branch:
    """A line of control of a workflow: the workflow itself, or a task that it created."""

    __slots__ = ("_root", "path", "steps")

    def __init__(self, path: Path = (), root: Branch | None = None) -> None:
        self.path = path
        self._root = root  # None: this branch; avoids a reference cycle
        self.steps = 0

    @property
    def root(self) -> Branch:
        """The branch of the workflow itself."""
        return self._root or self

    def step(self) -> Path:
        """Count a turn or branch that begins in this branch, and return its path."""
        self.steps += 1
        return (*self.path, self.steps - 1)

    def fork(self) -> Branch:
        """Return a new branch, for a task that this branch creates."""
        return Branch(self.step(), self.root)


_CURRENT: ContextVar[Branch | None] = ContextVar("troupe_branch", default=None)


def current(root: Branch) -> Branch:
    """Return the running branch if it belongs to `root`, else `root`."""
    branch = _CURRENT.get()
    return branch if branch is not None and branch.root is root else root


def enter(root: Branch) -> None:
    """Make `root` the branch of the current context; tasks created in it become its branches."""
    _number_tasks(asyncio.get_running_loop())
    _CURRENT.set(root)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Prevent tasks created in this block from being branches: Troupe's own tasks must not be
    counted."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        # In another context if a coroutine that refused cancellation is closed from outside.
        with contextlib.suppress(ValueError):
            _CURRENT.reset(token)


def places(paths: Iterable[Path]) -> Mapping[Path, Path]:
    """Map the path of every branch that took turns to ordinals: 2.0 is the first branch of the
    third branch. Branches without turns do not count."""
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
    """Install the task factory that gives each task created in a branch its own branch; once per
    loop."""
    former = loop.get_task_factory()
    if isinstance(former, _Factory):
        return
    loop.set_task_factory(_Factory(former))


class _Factory:
    """A task factory that assigns branches and delegates to the former factory."""

    def __init__(self, former: Callable[..., Any] | None) -> None:
        self._former = former or (
            lambda loop, coro, **given: asyncio.Task(coro, loop=loop, **given)
        )

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        branch = _CURRENT.get()
        # A task with an explicit context shares its variables, including the branch.
        if branch is not None and options.get("context") is None:
            context = copy_context()
            context.run(_CURRENT.set, branch.fork())
            options["context"] = context
        if branch is not None and asyncio.iscoroutine(coro):
            coro = _Contained(coro)
        return self._former(loop, coro, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A branch's coroutine that raises `BranchExitedError` for SystemExit and KeyboardInterrupt,
    which would end the event loop and with it all trajectories of the process."""

    __slots__ = ("_coro",)

    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self._coro = coro

    def __getattr__(self, name: str) -> Any:  # name and frame, for debuggers
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
