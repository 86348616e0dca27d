"""The blocking client: the asyncio client, run by an event loop on a thread of its own.

`_call` and `_stream` turn asyncio methods into blocking ones and keep their types; nothing else is
implemented here.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from troupe.client.aio import AsyncClient
from troupe.client.comparison import Comparison
from troupe.client.functions import AsyncFunctions
from troupe.client.handle import AsyncJobHandle, Spec
from troupe.rpc import FailedPrecondition
from troupe.rpc.settings import ClientSettings

T = TypeVar("T")
A = TypeVar("A")
P = ParamSpec("P")


class LoopThread:
    """An event loop on a daemon thread that runs coroutines for blocking callers on any thread."""

    def __init__(self, name: str) -> None:
        """Start the thread; `close` ends it."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result or raise its exception. A KeyboardInterrupt in the
        caller cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `function` on the loop's thread, soon."""
        self._loop.call_soon_threadsafe(functools.partial(function, *args, **kwargs))

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` and return its future."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking call from the client's own event loop would never end")
        if self._loop.is_closed():
            work.close()
            raise FailedPrecondition(
                "the client is closed",
                kind="client_closed",
                remedy="Open another client.",
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Yield the items one by one; a caller that stops early closes `items`."""
        done = object()

        async def following() -> T | object:
            return await anext(items, done)

        try:
            while (item := self.run(following())) is not done:
                yield item  # type: ignore[misc]
        finally:
            if (close := getattr(items, "aclose", None)) is not None and not (
                self._loop.is_closed()
            ):
                with suppress(CancelledError):
                    self.run(close())

    def close(self) -> None:
        """Cancel running work and end the thread."""
        if self._loop.is_closed():
            return
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Blocking(Generic[A]):
    """An asyncio object and the loop thread that runs its methods."""

    def __init__(self, native: A, loop: LoopThread) -> None:
        """Called by `Client`."""
        self._native = native
        self._loop = loop


def _call(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking form of a coroutine method."""

    def blocking(self: Blocking[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(method(self._native, *args, **kwargs))

    return _named_as(method, blocking)


def _stream(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """Return the blocking form of an async generator method."""

    def blocking(self: Blocking[Any], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._loop.iterate(method(self._native, *args, **kwargs))

    return _named_as(method, blocking)


def _named_as(method: Callable[..., Any], blocking: Callable[P, T]) -> Callable[P, T]:
    """Give `blocking` the name, docstring and parameters of `method`, for `help` and editors."""
    functools.update_wrapper(blocking, method)
    signature = inspect.signature(method)
    returned = str(signature.return_annotation).replace("Async", "")
    vars(blocking).pop("__wrapped__")
    vars(blocking)["__signature__"] = signature.replace(return_annotation=returned)
    blocking.__qualname__ = method.__qualname__.replace("Async", "", 1)
    return blocking


class Functions(Blocking[AsyncFunctions]):
    """The rewards and tools of a cluster; see `AsyncFunctions` for the methods and their errors."""

    deploy = _call(AsyncFunctions.deploy)
    get = _call(AsyncFunctions.get)
    list = _call(AsyncFunctions.list)
    invoke = _call(AsyncFunctions.invoke)
    invoke_batch = _call(AsyncFunctions.invoke_batch)
    invoke_stream = _stream(AsyncFunctions.invoke_stream)
    cancel = _call(AsyncFunctions.cancel)
    logs = _stream(AsyncFunctions.logs)
    delete = _call(AsyncFunctions.delete)


class JobHandle(Blocking[AsyncJobHandle]):
    """One job of a cluster; see `AsyncJobHandle` for the methods and their errors."""

    def __init__(self, native: AsyncJobHandle, loop: LoopThread) -> None:
        """Called by `Client.job` and `Client.submit`."""
        super().__init__(native, loop)
        self.id = native.id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def compare(self, *others: JobHandle | str) -> Comparison:
        """Return how this job and others differ: fields, held-out scores, metrics."""
        ids = [one if isinstance(one, str) else one.id for one in others]
        return self._loop.run(self._native.compare(*ids))

    info = _call(AsyncJobHandle.info)
    watch = _stream(AsyncJobHandle.watch)
    wait = _call(AsyncJobHandle.wait)
    result = _call(AsyncJobHandle.result)
    pause = _call(AsyncJobHandle.pause)
    resume = _call(AsyncJobHandle.resume)
    cancel = _call(AsyncJobHandle.cancel)
    annotate = _call(AsyncJobHandle.annotate)
    given_spec = _call(AsyncJobHandle.given_spec)
    forget = _call(AsyncJobHandle.forget)
    versions = _call(AsyncJobHandle.versions)
    checkpoints = _call(AsyncJobHandle.checkpoints)
    export = _call(AsyncJobHandle.export)
    metrics = _call(AsyncJobHandle.metrics)
    metrics_frame = _call(AsyncJobHandle.metrics_frame)
    conversations = _stream(AsyncJobHandle.conversations)
    trajectories = _call(AsyncJobHandle.trajectories)
    trajectory = _call(AsyncJobHandle.trajectory)
    before_and_after = _call(AsyncJobHandle.before_and_after)
    profile = _call(AsyncJobHandle.profile)
    population = _call(AsyncJobHandle.population)
    matches = _call(AsyncJobHandle.matches)
    export_member = _call(AsyncJobHandle.export_member)
    tables = _call(AsyncJobHandle.tables)
    samples = _stream(AsyncJobHandle.samples)
    audit = _call(AsyncJobHandle.audit)
    generate = _call(AsyncJobHandle.generate)


class Client(Blocking[AsyncClient]):
    """A context manager that connects to a cluster through its orchestrator, with blocking methods.

        with Client("127.0.0.1:50051") as troupe:
            job = troupe.submit("job.yaml")
            for event in job.watch():
                print(event)
            print(job.result().after)

    Every call has a deadline and is repeated when the service is briefly unavailable; a repeated
    call has no second effect. All errors are `troupe.rpc.TroupeError`.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """Connect as `AsyncClient` does. A client may be used from several threads."""
        loop = LoopThread("troupe-client")

        async def open_client() -> AsyncClient:
            # gRPC binds a channel to the loop that makes it.
            return AsyncClient(address, token, settings)

        try:
            client = loop.run(open_client())
        except BaseException:
            loop.close()
            raise
        super().__init__(client, loop)
        self.address = client.address
        self.functions = Functions(client.functions, loop)
        """The cluster's rewards and tools."""

    jobs = _call(AsyncClient.jobs)
    compare = _call(AsyncClient.compare)
    cluster = _call(AsyncClient.cluster)

    def submit(
        self,
        spec: Spec,
        job_id: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        tags: Sequence[str] = (),
        notes: str = "",
        given: str | None = None,
    ) -> JobHandle:
        """Submit a job, as `AsyncClient.submit` does."""
        handle = self._loop.run(
            self._native.submit(spec, job_id, overrides, tags=tags, notes=notes, given=given)
        )
        return JobHandle(handle, self._loop)

    def job(self, job_id: str) -> JobHandle:
        """Return a handle of an existing job. Makes no call."""
        return JobHandle(self._native.job(job_id), self._loop)

    def close(self) -> None:
        """Close the connection and end the thread. Safe to call twice."""
        if not self._loop.closed:
            self._loop.run(self._native.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
