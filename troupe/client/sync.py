"""The blocking client: the asyncio one, driven by a thread of its own.

Nothing is implemented here. tests/client checks that both have the same methods with the same
parameters.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from troupe.client.aio import AsyncClient
from troupe.client.events import Event
from troupe.client.functions import _SECONDS, AsyncFunctions
from troupe.client.handle import AsyncJobHandle, Messages
from troupe.client.population_records import Match, Population
from troupe.client.records import (
    Audit,
    Checkpoint,
    Cluster,
    Function,
    Generation,
    Invocation,
    InvocationProgress,
    Job,
    JobState,
    LogLine,
    MetricsRow,
    Result,
    Sample,
    Tables,
    Trajectory,
    Version,
)
from troupe.client.specs import Spec
from troupe.rpc import FailedPrecondition
from troupe.rpc.settings import ClientSettings

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for blocking callers; any thread may call."""

    def __init__(self, name: str) -> None:
        """Starts the thread; `close` ends it. It never keeps a program from exiting."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or its exception. Ctrl-C cancels it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking call from the client's own event loop would never end")
        if self._loop.is_closed():
            work.close()
            raise FailedPrecondition(
                "the client is closed",
                kind="client_closed",
                remedy="Call before it is closed, or open another.",
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items one by one; a caller that stops early closes `items`."""
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
        """Cancel what still runs and end the thread."""
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


class Functions:
    """Rewards and tools of a cluster; see `AsyncFunctions` for what each method does and raises."""

    def __init__(self, functions: AsyncFunctions, loop: LoopThread) -> None:
        """Made by `Client.functions`."""
        self._functions = functions
        self._loop = loop

    def deploy(
        self,
        source: str | Path,
        *,
        entrypoint: str | None = None,
        name: str | None = None,
        version: str | None = None,
        **costs: Any,
    ) -> list[Function]:
        """Deploy what a file, a folder or a module declares."""
        return self._loop.run(
            self._functions.deploy(
                source, entrypoint=entrypoint, name=name, version=version, **costs
            )
        )

    def get(self, name: str, version: str | None = None) -> Function:
        """One function; without `version` the one registered last."""
        return self._loop.run(self._functions.get(name, version))

    def invoke(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        version: str | None = None,
        trajectory_id: str = "",
        invocation_id: str | None = None,
        expected_seconds: float = 0.0,
        timeout: float = _SECONDS,
    ) -> Any:
        """The value that a call returns. Raises `InvocationFailed`."""
        return self._loop.run(
            self._functions.invoke(
                name,
                arguments,
                version=version,
                trajectory_id=trajectory_id,
                invocation_id=invocation_id,
                expected_seconds=expected_seconds,
                timeout=timeout,
            )
        )

    def invoke_batch(
        self,
        name: str,
        calls: Sequence[Mapping[str, Any]],
        *,
        version: str | None = None,
        timeout: float = _SECONDS,
    ) -> list[Invocation]:
        """One call for each of the arguments, and how each ended."""
        return self._loop.run(
            self._functions.invoke_batch(name, calls, version=version, timeout=timeout)
        )

    def invoke_stream(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        version: str | None = None,
        trajectory_id: str = "",
        invocation_id: str | None = None,
    ) -> Iterator[InvocationProgress | Invocation]:
        """What happens to a call, what it prints, and last how it ended."""
        return self._loop.iterate(
            self._functions.invoke_stream(
                name,
                arguments,
                version=version,
                trajectory_id=trajectory_id,
                invocation_id=invocation_id,
            )
        )

    def cancel(self, invocation_id: str) -> bool:
        """End a call that waits or runs."""
        return self._loop.run(self._functions.cancel(invocation_id))

    def logs(
        self,
        name: str,
        *,
        version: str | None = None,
        job_id: str = "",
        invocation_id: str = "",
        lines: int = 0,
        follow: bool = False,
    ) -> Iterator[LogLine]:
        """What calls printed last, and with `follow` what they print from now on."""
        return self._loop.iterate(
            self._functions.logs(
                name,
                version=version,
                job_id=job_id,
                invocation_id=invocation_id,
                lines=lines,
                follow=follow,
            )
        )

    def delete(self, name: str, version: str) -> bool:
        """Forget a deployed function."""
        return self._loop.run(self._functions.delete(name, version))

    # Last, for the name means the type above.
    def list(self) -> list[Function]:
        """All functions that the reward service knows."""
        return self._loop.run(self._functions.list())


class JobHandle:
    """One job of a cluster; see `AsyncJobHandle` for what each method does and raises."""

    def __init__(self, handle: AsyncJobHandle, loop: LoopThread) -> None:
        """Made by `Client.job` and `Client.submit`."""
        self.id = handle.id
        self._handle = handle
        self._loop = loop

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def info(self) -> Job:
        """The job as it is now."""
        return self._loop.run(self._handle.info())

    def watch(self, after: str = "") -> Iterator[Event]:
        """Every event from the beginning (or after event id `after`) until the job has ended."""
        return self._loop.iterate(self._handle.watch(after))

    def wait(self, timeout: float | None = None) -> Job:
        """Wait until the job has ended, well or not."""
        return self._loop.run(self._handle.wait(timeout))

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end and return what came of it."""
        return self._loop.run(self._handle.result(timeout))

    def pause(self) -> Job:
        """Admit no new query; what is in flight finishes."""
        return self._loop.run(self._handle.pause())

    def resume(self, spec: Spec | None = None) -> Job:
        """Continue a paused, failed or cancelled job from its last committed step."""
        return self._loop.run(self._handle.resume(spec))

    def cancel(self, reason: str = "") -> Job:
        """End the job without waiting for what is in flight."""
        return self._loop.run(self._handle.cancel(reason))

    def forget(self) -> Job:
        """Delete what the cluster's memory holds of the job, which has ended; its directory
        stays."""
        return self._loop.run(self._handle.forget())

    def versions(self, policy: str) -> list[Version]:
        """Published versions of a policy."""
        return self._loop.run(self._handle.versions(policy))

    def checkpoints(self) -> list[Checkpoint]:
        """Checkpoints on the trainer's disk."""
        return self._loop.run(self._handle.checkpoints())

    def export(self, policy: str, to: str | Path, version: int | None = None) -> Path:
        """Copy a checkpoint of `policy` into the new directory `to`."""
        return self._loop.run(self._handle.export(policy, to, version))

    def metrics(self, names: Sequence[str] = (), after_step: int = -1) -> list[MetricsRow]:
        """Metrics per step; `names` empty: all of them."""
        return self._loop.run(self._handle.metrics(names, after_step))

    def trajectories(self, limit: int = 100) -> list[Trajectory]:
        """The newest `limit` trajectories, without their conversations."""
        return self._loop.run(self._handle.trajectories(limit))

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """One trajectory with the conversation between the agents."""
        return self._loop.run(self._handle.trajectory(trajectory_id))

    def population(self) -> Population:
        """Pools, payoffs, meta-strategies and ratings of a job with a `population` section."""
        return self._loop.run(self._handle.population())

    def matches(self, member: str = "", limit: int = 100) -> list[Match]:
        """The newest `limit` matches between members, or those in which `member` played."""
        return self._loop.run(self._handle.matches(member, limit))

    def export_member(self, member: str, to: str | Path) -> Path:
        """Copy the weights of one member of a pool into the new directory `to`."""
        return self._loop.run(self._handle.export_member(member, to))

    def tables(self) -> Tables:
        """What the experience store holds of the job, by policy and state."""
        return self._loop.run(self._handle.tables())

    def samples(
        self, policy: str, *, step: int | None = None, state: str | None = None
    ) -> Iterator[Sample]:
        """The rows of a policy; of one step or of all, in one state or in any."""
        return self._loop.iterate(self._handle.samples(policy, step=step, state=state))

    def audit(self, timeout: float = 300.0) -> Audit:
        """Check that every sample was trained once or dropped with a reason."""
        return self._loop.run(self._handle.audit(timeout))

    def generate(
        self,
        policy: str,
        messages: Messages | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        timeout: float = 300.0,
    ) -> Generation:
        """Generate with a policy at its newest version."""
        return self._loop.run(
            self._handle.generate(
                policy,
                messages,
                input_ids=input_ids,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_new_tokens=max_new_tokens,
                stop_token_ids=stop_token_ids,
                seed=seed,
                timeout=timeout,
            )
        )


class Client:
    """Talks to one orchestrator, blocking; see `AsyncClient`. A context manager.

    with Client("127.0.0.1:50051") as troupe:
        job = troupe.submit("job.yaml")
        for event in job.watch():
            print(event)
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """As `AsyncClient`. May be used from several threads."""
        self._loop = LoopThread("troupe-client")

        async def open_client() -> AsyncClient:
            # gRPC binds a channel to the loop in which it is made.
            return AsyncClient(address, token, settings)

        try:
            self._client = self._loop.run(open_client())
        except BaseException:
            self._loop.close()
            raise
        self.address = self._client.address
        self.functions = Functions(self._client.functions, self._loop)
        """Rewards and tools of the cluster."""

    def submit(self, spec: Spec, job_id: str | None = None) -> JobHandle:
        """Submit a job: a path, YAML or JSON text, or a `JobSpec`."""
        return JobHandle(self._loop.run(self._client.submit(spec, job_id)), self._loop)

    def jobs(self, state: JobState | None = None, limit: int | None = None) -> list[Job]:
        """All jobs, or those in `state`, oldest first; with `limit` the newest so many."""
        return self._loop.run(self._client.jobs(state, limit))

    def job(self, job_id: str) -> JobHandle:
        """A handle of a job that exists. Asks nobody."""
        return JobHandle(self._client.job(job_id), self._loop)

    def cluster(self) -> Cluster:
        """What every worker, engine and service does now."""
        return self._loop.run(self._client.cluster())

    def close(self) -> None:
        """Close the connection and end the thread. Safe to call twice."""
        if not self._loop.closed:
            self._loop.run(self._client.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
