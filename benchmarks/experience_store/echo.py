"""The same bytes through gRPC alone: a server that accepts requests and answers with as many bytes.

No store, no Redis, no protobuf: only the cost of gRPC in both directions. Run as a module (`python
-m benchmarks.experience_store.echo`) it is that server, on the store's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from typing import Any, Final

import grpc
import uvloop

from troupe.rpc.channel import channel_options

SERVICE: Final = "troupe.benchmarks.Echo"
_MESSAGE_MIB: Final = 64


async def round_trip(
    address: str, requests: list[bytes], answers: list[int], writers: int
) -> float:
    """Return the seconds to send `requests` with `writers` concurrent writers, and to receive
    answers of the given sizes one after another meanwhile."""
    async with grpc.aio.insecure_channel(address, channel_options(_MESSAGE_MIB)) as channel:
        put: Any = channel.unary_unary(f"/{SERVICE}/Put", None, None)
        get: Any = channel.unary_unary(f"/{SERVICE}/Get", None, None)
        await get(b"0")
        waiting = iter(requests)

        async def write() -> None:
            for request in waiting:
                await put(request)

        async def read() -> None:
            for size in answers:
                if len(await get(str(size).encode())) != size:
                    raise RuntimeError("the echo answered with another number of bytes")

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            for _ in range(writers):
                group.create_task(write())
        return time.perf_counter() - started


def batches(sizes: list[int], number: int) -> list[int]:
    """Return the sizes of answers with `number` rows each."""
    rows = iter(sizes)
    return [sum(batch) for batch in iter(lambda: list(itertools.islice(rows, number)), [])]


async def _serve() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    zeros = memoryview(bytes(_MESSAGE_MIB * 2**20))

    async def put(request: bytes, context: object) -> bytes:
        return b""

    async def get(request: bytes, context: object) -> bytes:
        return bytes(zeros[: int(request)])

    server = grpc.aio.server(options=channel_options(_MESSAGE_MIB))
    handlers: dict[str, Any] = {
        "Put": grpc.unary_unary_rpc_method_handler(put),  # type: ignore[arg-type]
        "Get": grpc.unary_unary_rpc_method_handler(get),  # type: ignore[arg-type]
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(_serve())
