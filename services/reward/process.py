"""One worker process and the frames that are exchanged with it: JSON, never pickle.

What runs in a worker is a user's, and may be hostile: an answer is parsed, measured, and nothing
more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from services.reward import worker
from services.reward.descendants import family, kill_with_children

HEADER: Final = struct.Struct(">I")
# An answer is a result of at most 16 MiB, or a short account.
_MAX_FRAME_BYTES: Final = 20 * 2**20
# Of what functions print, so much is kept: the last of it.
_OUTPUT_BYTES: Final = 16 * 2**10
# Output is read in such parts, at most so many before others of the event loop get their turn:
# together more than a pipe holds, so that after an answer all that was printed before it is here.
_PART_BYTES: Final = 32 * 2**10
_PARTS: Final = 4
_END_SECONDS: Final = 5.0


class WorkerDied(Exception):
    """There will be no answer; the text says how the process ended."""


async def start_process(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """`asyncio.create_subprocess_exec` in a session of its own; who is cancelled meanwhile leaves
    nothing behind. (asyncio would kill the process, not its group: bubblewrap's second half, which
    waits for its first, would wait for ever.) Raises OSError."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, start_new_session=True, **options)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        kill_with_children((await starting).pid)
        raise


class WorkerProcess:
    """A process that runs `services/reward/worker.py`, alone in its process group."""

    def __init__(self, process: asyncio.subprocess.Process, printing: int) -> None:
        """`printing`: the end of a pipe from which its output is read without waiting."""
        self._process = process
        self._printing: int | None = printing
        self._printed: deque[bytes] = deque()
        self._printed_bytes = 0
        # Told of everything that is printed, as it comes.
        self.printed: Callable[[bytes], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(printing, self._pull)

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> WorkerProcess:
        """Start `command`. Raises OSError."""
        printing, output = os.pipe()
        try:
            os.set_blocking(printing, False)
            process = await start_process(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=dict(environment),
            )
        except BaseException:
            os.close(printing)
            raise
        finally:
            os.close(output)
        return cls(process, printing)

    def send(self, *requests: Mapping[str, Any]) -> None:
        """Ask; the answers come in the order of the questions."""
        assert self._process.stdin is not None
        frames: list[bytes] = []
        for request in requests:
            body = json.dumps(request).encode()
            frames += (HEADER.pack(len(body)), body)
        # A worker that is gone, or does not read, is found out when its answer is waited for.
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"".join(frames))

    async def answer(self) -> worker.Answer:
        """The next answer; what was printed before it has been read. Raises `WorkerDied`."""
        assert self._process.stdout is not None
        try:
            (size,) = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
            if size > _MAX_FRAME_BYTES:
                raise ValueError(f"it announced {size:,} bytes")
            fields = json.loads(await self._process.stdout.readexactly(size))
            if len(fields) != 3 or not all(isinstance(field, str) for field in fields):
                raise ValueError("that is not an answer")
        except (OSError, EOFError) as error:
            raise WorkerDied(await self._how_it_died()) from error
        except (ValueError, TypeError, RecursionError) as error:
            self.kill()
            raise WorkerDied(f"the worker's answer makes no sense: {error}") from error
        self._pull()
        return worker.Answer(*fields)

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as anybody knows."""
        return self._process.returncode is None

    def pids(self) -> list[int]:
        """The process and all that descend from it, as this host counts them."""
        return family(self._process.pid)

    def output(self) -> str:
        """The last that was printed since it was asked for last."""
        self._pull()
        text = b"".join(self._printed).decode(errors="replace")
        self._printed.clear()
        self._printed_bytes = 0
        return text[-_OUTPUT_BYTES:]

    def kill(self) -> None:
        """End it and all of its process group, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Kill it and wait until it is gone."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        self._close_output()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _pull(self) -> None:
        """Take what has been printed."""
        for _ in range(_PARTS):
            if self._printing is None:
                return
            try:
                part = os.read(self._printing, _PART_BYTES)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:
                self._close_output()
                return
            self._printed.append(part)
            self._printed_bytes += len(part)
            while self._printed_bytes - len(self._printed[0]) >= _OUTPUT_BYTES:
                self._printed_bytes -= len(self._printed.popleft())
            if self.printed is not None:
                self.printed(part)

    def _close_output(self) -> None:
        if self._printing is not None:
            self._loop.remove_reader(self._printing)
            os.close(self._printing)
            self._printing = None

    async def _how_it_died(self) -> str:
        try:
            async with asyncio.timeout(_END_SECONDS):
                status = await self._process.wait()
        except TimeoutError:
            self.kill()
            return "the worker closed its connection"
        if status < 0 or status > 128:  # a sandbox reports its child's signal like a shell
            with contextlib.suppress(ValueError):
                name = signal.Signals(-status if status < 0 else status - 128).name
                return f"the worker process was killed by {name}"
        return f"the worker process exited with status {status}"
