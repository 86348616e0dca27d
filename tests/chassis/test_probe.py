"""The health check of containers, against a real server and against none."""

from __future__ import annotations

import asyncio
import sys

from echo_service import Echo

from services.chassis.app import serve
from services.chassis.settings import ServiceSettings
from tests.support.waiting import PATIENCE


async def _probe(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.chassis.probe", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_a_serving_server_is_healthy() -> None:
    async with serve(Echo(), ServiceSettings()) as server:
        assert await _probe(server.address) == (0, "")
        assert await _probe(server.address, Echo.name) == (0, "")
        status, said = await _probe(server.address, "no.such.Service")
        assert status == 1
        assert "NOT_FOUND" in said
    status, said = await _probe(server.address, "--timeout", "0.5")
    assert status == 1
    assert server.address in said


async def test_a_page_is_healthy_when_it_answers() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = (await reader.readline()).decode()
        status = "200 OK" if asked.startswith("GET /healthz ") else "503 Away"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await _probe(f"{url}/healthz") == (0, "")
        assert await _probe(f"{url}/other") == (1, f"{url}/other: HTTP status 503\n")
    status, said = await _probe(f"{url}/healthz")
    assert status == 1
    assert url in said
