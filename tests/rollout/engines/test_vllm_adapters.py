"""vLLM servers that cannot be given adapters: refused when an engine attaches to them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.servers.host import ServerHost
from services.rollout.engines.vllm.engine import VllmEngine
from tests.rollout.engines.teams import team_specs
from tests.rollout.engines.test_vllm_replies import config
from tests.support.waiting import until

NEEDED = ["/inference/v1/generate", "/collective_rpc", "/pause", "/resume"]
LOADING = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]


@asynccontextmanager
async def serve(paths: list[str], **lora: Any) -> AsyncIterator[str]:
    """Serve the documents of a vLLM with these calls, started for adapters so; yields its URL."""
    app = FastAPI()

    async def anything() -> dict[str, Any]:
        return {}

    for path in paths:
        app.post(path)(anything)
    described = config()
    described["lora_config"] = {
        "max_lora_rank": 16,
        "target_modules": None,
        "max_loras": 16,
        **lora,
    }

    @app.get("/health")
    async def health() -> None: ...

    @app.get("/is_paused")
    async def paused() -> dict[str, bool]:
        return {"is_paused": False}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "m"}]}

    @app.get("/server_info")
    async def info() -> dict[str, Any]:
        return {"vllm_config": described, "vllm_env": {}}

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", lifespan="off"))
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def refusal(url: str) -> EngineStartFailed:
    """The error of an engine of a team that attaches to the server."""
    host = ServerHost("h", team_specs(kind="vllm", urls=[url]), VllmEngine)
    engine = host.engine("e", "solver")
    with pytest.raises(EngineStartFailed) as caught:
        await engine.start()
    await engine.stop()
    return caught.value


async def test_a_vllm_that_allows_no_adapters_at_run_time_is_refused_with_the_variable() -> None:
    async with serve(NEEDED) as url:
        error = await refusal(url)
    assert "it loads none while it runs" in str(error)
    assert error.remedy == "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment."
    assert error.field == "policies.planner.engine.urls"


@pytest.mark.parametrize("missing", NEEDED[:3])
async def test_a_vllm_too_old_for_a_call_is_refused_with_the_call(missing: str) -> None:
    async with serve([path for path in (*NEEDED, *LOADING) if path != missing]) as url:
        error = await refusal(url)
    assert f"it has no {missing}" in str(error)
    assert "install a newer release" in (error.remedy or "")


async def test_a_vllm_with_fewer_slots_than_policies_is_refused_with_the_option() -> None:
    async with serve([*NEEDED, *LOADING], max_loras=1) as url:
        error = await refusal(url)
    assert "it holds 1 adapters, 3 policies share it" in str(error)
    assert "--max-loras 10" in (error.remedy or "")


async def test_a_vllm_for_smaller_adapters_is_refused_with_the_option() -> None:
    async with serve([*NEEDED, *LOADING], max_lora_rank=2) as url:
        error = await refusal(url)
    assert "up to rank 2, the policy's have 4" in str(error)
    assert "--max-lora-rank 8" in (error.remedy or "")
