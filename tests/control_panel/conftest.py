"""The panel as users meet it: served by uvicorn, over a real gRPC orchestrator double."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

from services.control_panel.app import create_app
from tests.support.fake_orchestrator import FakeOrchestrator, serve
from tests.support.waiting import PATIENCE, until

SPEC = """
name: team
workflow: team:solve
tasks: {source: "team:Tasks"}
agents: {solver: {policy: big}, checker: {policy: small}}
policies: {big: {model: {path: big}}, small: {model: {path: small}}}
pipeline: {steps: 10, queries_per_step: 4}
"""
YAML = {"Content-Type": "application/yaml"}


@dataclass
class Panel:
    """A running panel and the services behind it."""

    url: str
    http: httpx.AsyncClient
    orchestrator: FakeOrchestrator

    async def submit(self) -> str:
        """Submit SPEC; returns the job's id."""
        reply = await self.http.post("/api/jobs", content=SPEC, headers=YAML)
        assert reply.status_code == 201, reply.text
        job_id: str = reply.json()["job_id"]
        return job_id


@pytest.fixture
async def panel(request: pytest.FixtureRequest) -> AsyncIterator[Panel]:
    """The panel; parametrize indirectly with a token to require one."""
    token = getattr(request, "param", None)
    orchestrator = FakeOrchestrator()
    async with serve(orchestrator) as address:
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(address, token), log_level="warning", timeout_graceful_shutdown=1
            )
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
            yield Panel(url, http, orchestrator)
        server.should_exit = True
        await asyncio.wait_for(task, PATIENCE)
