"""Workflows around an agent that cannot be imported here: its framework needs other versions.

The agent gets the address of its endpoint and the question as JSON, and answers with JSON. `child`
starts it as a process of its own interpreter for each trajectory; `remote` asks a server that was
started with that interpreter (`agent.py --serve`), which costs no start.
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

# The interpreter of the environment that holds the framework, and the program to run with it.
PYTHON = os.environ.get("EXAMPLE_AGENT_PYTHON", sys.executable)
PROGRAM = os.environ.get("EXAMPLE_AGENT_PROGRAM", str(Path(__file__).with_name("agent.py")))
# Where the server listens, for `remote`.
URL = os.environ.get("EXAMPLE_AGENT_URL", "http://127.0.0.1:8031/")
# Child processes that run at once on one rollout worker; more trajectories wait.
AT_ONCE = asyncio.Semaphore(int(os.environ.get("EXAMPLE_AGENT_PROCESSES", "8")))
SECONDS = 120.0
# How long a killed process may take to end; what it started outside of its group may hold its pipe.
END_SECONDS = 10.0
MOST_BYTES = 1 << 20
# The child gets no more of the worker's environment: tokens and passwords are none of its business.
ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")


class AgentFailed(Exception):
    """The agent's process or server gave no answer."""


async def child(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """The agent as a child process."""
    async with AT_ONCE:
        answer = await ask_process(_request(query, agents["solver"]))
    return {"solver": score(query, answer)}


async def remote(query: Any, agents: Any, tools: Any) -> dict[str, float]:
    """The agent behind HTTP. On another host the endpoint must be reachable from there
    (TROUPE_ENDPOINT_HOST and TROUPE_ENDPOINT_URL of the rollout service)."""
    async with httpx.AsyncClient(timeout=SECONDS, trust_env=False) as client:
        response = await client.post(URL, json=_request(query, agents["solver"]))
    if response.status_code != 200:
        raise AgentFailed(f"{URL} answered {response.status_code}: {response.text[:300]}")
    return {"solver": score(query, response.json())}


def score(query: Any, answer: dict[str, Any]) -> float:
    """1 for the right number."""
    return float(str(answer.get("answer", "")).strip() == str(query["sum"]))


def _request(query: Any, agent: Any) -> dict[str, Any]:
    # Frameworks ask for a call (`tool_choice`) or a schema here and there: the model is told.
    endpoint = agent.endpoint(lenient=True)
    return {
        "question": query["question"],
        "base_url": endpoint.base_url,
        "api_key": endpoint.api_key,
        "model": endpoint.model,
    }


async def ask_process(request: dict[str, Any]) -> dict[str, Any]:
    """The last line that the program prints, as JSON. Its process group ends with this call,
    whatever becomes of the trajectory."""
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
        # Reads the rest: asyncio reports the end of a process once its pipes have ended, and reads
        # nothing of a pipe while much of it waits to be taken.
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
