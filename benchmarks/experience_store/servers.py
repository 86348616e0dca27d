"""A Redis as started by the embedded cluster, and a store's process that uses it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import redis

from benchmarks.command import end
from troupe.cluster.redis import redis_executable, write_config
from troupe.cluster.settings import Fsync
from troupe.experience import ExperienceWriter
from troupe.rpc import ClientSettings, connect
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc

_START_SECONDS = 60.0
if TYPE_CHECKING:
    _Calls = store_grpc.ExperienceStoreAsyncStub
else:
    _Calls = store_grpc.ExperienceStoreStub


class Stub(_Calls):
    """Calls to the store; endings and late columns pass through `writer`, as in rollout.

    `claim` is ClaimMicroBatch with its answer left in bytes.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self.writer = ExperienceWriter(channel)
        self.claim: Any = channel.unary_unary(
            "/troupe.v1.ExperienceStore/ClaimMicroBatch",
            request_serializer=store_pb.ClaimMicroBatchRequest.SerializeToString,
            response_deserializer=None,
        )


@dataclass(frozen=True)
class Servers:
    """Addresses and processes of both servers."""

    redis_url: str
    address: str
    """host:port of the store."""
    echo_address: str
    """host:port of a bare gRPC server (echo.py)."""
    processes: Mapping[str, psutil.Process]
    """`client` (this one), `store`, `redis` and `echo`."""

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each of `processes` since its start."""
        found = {}
        for name, process in self.processes.items():
            times = process.cpu_times()
            found[name] = times.user + times.system
        return found

    def client(self) -> redis.Redis:
        """Return a plain connection to Redis."""
        return redis.Redis.from_url(self.redis_url)

    def compact(self) -> None:
        """Rewrite Redis's append-only file now, so that Redis does not do so during a measurement:
        it rewrites it every gigabyte, which takes a core away."""
        with self.client() as client:
            # It fails if a rewrite is already running.
            _wait("a rewrite", client.bgrewriteaof)
            _wait("the rewrite", lambda: _rewritten(client.info("persistence")))

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator[Stub]:
        """Yield calls to the store, over the clients' own channel."""
        channel = connect(self.address, ClientSettings())
        try:
            yield Stub(channel)
        finally:
            await channel.close(None)


@contextlib.contextmanager
def started(directory: Path, fsync: Fsync = "everysec") -> Iterator[Servers]:
    """Run both servers as long as the context lasts. Logs go to `directory`."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    config, url = write_config(directory, port, fsync=fsync)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((directory / "servers.log").open("ab"))
        redis_pid = _run(stack, [redis_executable(), str(config)], log.fileno(), {})
        _wait("Redis", lambda: redis.Redis.from_url(url).ping())
        ports = directory / "ports"
        env = {"TROUPE_REDIS_URL": url, "TROUPE_PORT": "0", "TROUPE_PORT_FILE": str(ports)}
        store = [sys.executable, "-m", "services.experience_store"]
        store_pid = _run(stack, store, log.fileno(), env)
        _wait("the store", lambda: ports.read_text())
        echo = directory / "echo"
        with echo.open("wb") as out:
            command = [sys.executable, "-m", "benchmarks.experience_store.echo"]
            echo_pid = _run(stack, command, out.fileno(), {})
        _wait("the echo", lambda: int(echo.read_text()))
        yield Servers(
            url,
            f"127.0.0.1:{ports.read_text().split()[0]}",
            f"127.0.0.1:{int(echo.read_text())}",
            {
                "client": psutil.Process(),
                "store": psutil.Process(store_pid),
                "redis": psutil.Process(redis_pid),
                "echo": psutil.Process(echo_pid),
            },
        )


def _rewritten(info: Mapping[str, Any]) -> None:
    if info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]:
        raise ValueError("it is not over")


def _run(stack: contextlib.ExitStack, command: list[str], log: int, env: dict[str, str]) -> int:
    process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | env)
    stack.callback(end, process)
    return process.pid


def _wait(name: str, answers: object) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            answers()  # type: ignore[operator]
            return
        except (redis.RedisError, OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} took too long") from error
            time.sleep(0.05)
