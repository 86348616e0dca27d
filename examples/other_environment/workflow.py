"""Workflows around an agent whose framework needs other versions and cannot be imported here.

The agent gets the address of its endpoint and the question as JSON, and answers with JSON. `child`
starts its interpreter as a child process for each trajectory. `remote` calls a server that runs in
that interpreter (`agent.py --serve`), which saves the starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

# The interpreter of the framework's environment, and the program that it runs.
PYTHON = os.environ.get("EXAMPLE_AGENT_PYTHON", sys.executable)
PROGRAM = os.environ.get("EXAMPLE_AGENT_PROGRAM", str(Path(__file__).with_name("agent.py")))
# The server's address, for `remote`.
URL = os.environ.get("EXAMPLE_AGENT_URL", "http://127.0.0.1:8031/")
# Limits the concurrent child processes of a rollout worker; other trajectories wait.
AT_ONCE = asyncio.Semaphore(int(os.environ.get("EXAMPLE_AGENT_PROCESSES", "8")))
SECONDS = 120.0
# How long a killed process may take to end; its descendants in other groups may hold its pipe.
END_SECONDS = 10.0
MOST_BYTES = 1 << 20
# The child gets only these variables of the worker's environment, and no tokens or passwords.
ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")


class AgentFailed(Exception):
    """The agent's process or server did not answer."""


async def child(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """Run the agent as a child process."""
    async with AT_ONCE:
        answer = await ask_process(_request(query, agents["solver"]))
    return {"solver": score(query, answer)}


async def remote(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """Call the agent over HTTP. If it runs on another host, that host must reach the endpoint
    (TROUPE_ENDPOINT_HOST and TROUPE_ENDPOINT_URL of the rollout service)."""
    async with httpx.AsyncClient(timeout=SECONDS, trust_env=False) as client:
        response = await client.post(URL, json=_request(query, agents["solver"]))
    if response.status_code != 200:
        raise AgentFailed(f"{URL} answered {response.status_code}: {response.text[:300]}")
    return {"solver": score(query, response.json())}


def score(query: Any, answer: dict[str, Any]) -> float:
    """Return 1 for the right number."""
    return float(str(answer.get("answer", "")).strip() == str(query["sum"]))


def _request(query: Any, agent: Any) -> dict[str, Any]:
    # Frameworks may require a call (`tool_choice`) or a schema; `lenient` tells the model.
    endpoint = agent.endpoint(lenient=True)
    return {
        "question": query["question"],
        "base_url": endpoint.base_url,
        "api_key": endpoint.api_key,
        "model": endpoint.model,
    }


async def ask_process(request: dict[str, Any]) -> dict[str, Any]:
    """Return the last line that the program prints, parsed as JSON. Its process group ends with
    this call, however the trajectory ends."""
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        PROGRAM,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SECONDS):
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
            printed = await _read(process.stdout)
            status = await process.wait()
    except TimeoutError:
        raise AgentFailed(f"the agent gave no answer within {SECONDS:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Read the rest: asyncio reports the end of a process only after its pipes have ended, and
        # stops reading a pipe while much of its data is unread.
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.communicate()
    last = printed.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        answer = json.loads(last)
        if status == 0 and isinstance(answer, dict):
            return answer
    except (ValueError, RecursionError):
        pass
    raise AgentFailed(f"the agent ended with status {status}: {last[-300:] or 'nothing was said'}")


async def _read(stream: asyncio.StreamReader) -> bytes:
    read = bytearray()
    while part := await stream.read(1 << 16):
        read += part
        if len(read) > MOST_BYTES:
            raise AgentFailed(f"the agent printed more than {MOST_BYTES:,} bytes")
    return bytes(read)
