"""`Supervisor`: starts children in the order of their dependencies, restarts them, stops them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from troupe.cluster.child import GROUP_EXIT_SECONDS, Child
from troupe.cluster.layout import WORKERS, ChildSpec
from troupe.cluster.logs import CHECK_SECONDS, SUPERVISOR_LOG, open_log, rotate_all
from troupe.processes.forked import ForkServer, can_fork
from troupe.rpc.errors import TroupeError

_log = logging.getLogger(__name__)
_FORK_LOG = "fork-server.log"
# Seconds for which the workers' fork server keeps its imports. Workers start together; one that
# starts later replaces a crashed one and loads its models again. Until then the imports would take
# 90 MiB, because workers have written to most of the pages.
_REST_SECONDS = 2.0


class Supervisor:
    """The supervisor of child processes, in one event loop; calls must not overlap."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        log_dir: Path,
        changed: Callable[[Child, str], None] = lambda child, event: None,
    ) -> None:
        """Call `changed(child, event)` whenever a child changes; `event` is a text for people."""
        _check_order(specs)
        self._forks = _fork_server(specs)
        self.children = {
            spec.name: Child(spec, log_dir / f"{spec.name}.log", changed, self._forks)
            for spec in specs
        }
        self._fork_log = log_dir / _FORK_LOG
        self._logs = [child.log for child in self.children.values()]
        self._logs += [self._fork_log, log_dir / SUPERVISOR_LOG]
        self._rotating: asyncio.Task[None] | None = None
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[TroupeError] | None = None

    async def start(self) -> None:
        """Start every child as soon as its dependencies are ready; return when all are ready.

        If a child fails, stop the started ones and raise its error.
        """
        self._failure = asyncio.get_running_loop().create_future()
        if self._rotating is None:
            self._rotating = asyncio.create_task(self._rotate_logs(), name="logs")
        ready = {name: asyncio.Event() for name in self.children}

        async def bring_up(child: Child) -> None:
            for name in child.spec.after:
                await ready[name].wait()
            await child.start()
            self._watch(child)
            ready[child.spec.name].set()

        try:
            await self._start_forks()
            async with asyncio.TaskGroup() as group:
                for child in self.children.values():
                    group.create_task(bring_up(child))
        except BaseExceptionGroup as errors:
            await self.stop()
            raise _first(errors) from None
        except BaseException:  # cancelled from outside
            await self.stop()
            raise

    async def failure(self) -> TroupeError:
        """Wait until a child is given up, and return its error. The others keep running."""
        assert self._failure is not None, "start() first"
        return await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """Stop all children, dependencies last. Safe to call at any time."""
        await self._stop_keepers()
        await self._stop_rotating()
        for level in reversed(levels([c.spec for c in self.children.values()])):
            await asyncio.gather(*(self.children[name].stop() for name in level))
        if self._forks is not None:
            await self._forks.stop()

    async def kill(self) -> None:
        """Kill all children at once, as a power cut does."""
        # Do not await in between, so that no child restarts before all are dead.
        for child in self.children.values():
            child.strike()
        await self._stop_keepers()
        await self._stop_rotating()
        # Repeat for a child that was just restarting.
        await asyncio.gather(*(child.kill() for child in self.children.values()))
        if self._forks is not None:
            await self._forks.stop()

    async def park(self, name: str) -> None:
        """Stop a child until `unpark`."""
        keeper = self._keepers.pop(name)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await self.children[name].park()

    async def unpark(self, name: str) -> None:
        """Start a parked child and wait until it is ready; give it up if it fails."""
        child = self.children[name]
        try:
            await child.start()
        except TroupeError as error:
            self._give_up(error)
        else:
            self._watch(child)

    async def _start_forks(self) -> None:
        if self._forks is None:
            return
        try:
            with open_log(self._fork_log, "fork server start") as log:
                await self._forks.start(log)
        except OSError as error:
            _log.warning("services start without a fork server: %s", error)

    def _watch(self, child: Child) -> None:
        name = child.spec.name
        self._keepers[name] = asyncio.create_task(self._keep(child), name=name)

    async def _rotate_logs(self) -> None:
        """Rotate the logs of all children, so that they stay bounded."""
        told = ""
        while True:
            try:
                await asyncio.to_thread(rotate_all, self._logs)
            except OSError as error:
                if told != (told := str(error)):
                    _log.warning("logs are not rotated: %s", error)
            await asyncio.sleep(CHECK_SECONDS)

    async def _stop_rotating(self) -> None:
        rotating, self._rotating = self._rotating, None
        if rotating is not None:
            rotating.cancel()
            await asyncio.gather(rotating, return_exceptions=True)

    async def _stop_keepers(self) -> None:
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        self._keepers.clear()

    async def _keep(self, child: Child) -> None:
        try:
            await child.keep()
        except TroupeError as error:
            self._give_up(error)

    def _give_up(self, error: TroupeError) -> None:
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_result(error)


def _fork_server(specs: Sequence[ChildSpec]) -> ForkServer | None:
    """Return a fork server for the children that have modules to preload; None without such, or
    where it cannot work."""
    forked = [spec for spec in specs if spec.preload]
    if not forked or not can_fork():
        return None
    common = [one for one in forked[0].preload if all(one in spec.preload for spec in forked)]
    groups: dict[str, list[str]] = {}
    for spec in forked:
        group = groups.setdefault(spec.fork_server, [])
        group += [one for one in spec.preload if one not in common and one not in group]
    # Numerical libraries read their number of threads when they are imported: take the workers'.
    threaded = max(forked, key=lambda spec: int(spec.environment.get("OMP_NUM_THREADS", "0")))
    return ForkServer(groups, threaded.full_environment(), common, {WORKERS: _REST_SECONDS})


def longest_stop(specs: Sequence[ChildSpec]) -> float:
    """Return the longest time that `Supervisor.stop` takes, in seconds."""
    limits = {spec.name: spec.stop_seconds for spec in specs}
    return sum(max(limits[n] for n in level) + GROUP_EXIT_SECONDS for level in levels(specs))


def levels(specs: Sequence[ChildSpec]) -> list[list[str]]:
    """Return the names in groups; each group depends only on earlier groups."""
    depth: dict[str, int] = {}
    for spec in specs:  # ordered: _check_order
        depth[spec.name] = 1 + max((depth[name] for name in spec.after), default=-1)
    grouped: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for name, level in depth.items():
        grouped[level].append(name)
    return grouped


def _check_order(specs: Sequence[ChildSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        missing = set(spec.after) - seen
        if missing:
            raise ValueError(f"{spec.name} must come after {', '.join(sorted(missing))}")
        if spec.name in seen:
            raise ValueError(f"two children are named {spec.name}")
        seen.add(spec.name)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
