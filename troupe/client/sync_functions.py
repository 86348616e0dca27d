"""Functions of a cluster, blocking: the asyncio ones, driven by the client's thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from troupe.client.function_records import Function, Invocation, InvocationProgress, LogLine
from troupe.client.functions import _SECONDS, AsyncFunctions
from troupe.client.loop import LoopThread


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
