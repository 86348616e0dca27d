"""How fast the panel is with 50 jobs and 10,000 steps, in Chromium: first paint, and each update.

    python -m benchmarks.panel [--quick] [--json]

A real orchestrator over Redis with jobs whose steps are written straight to its store, the panel in
a separate process, a headless Chromium. A first run has a short history: the cost of an update must
not depend on the number of steps. Goals: a first paint within 1 s, updates within 100 ms.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.command import end, finish, options_of, quantile, run_program, scratch
from services.chassis.app import serve
from services.chassis.model_files import ModelServer
from services.chassis.telemetry import Telemetry
from services.orchestrator.orchestrator import Orchestrator
from services.orchestrator.server import OrchestratorService
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.state.job_store import JobStore
from services.orchestrator.state.records import JobRecord
from troupe.cluster.redis import redis_executable, write_config
from troupe.contracts import metric_names
from troupe.job import parse_job
from troupe.v1 import common_pb2 as common_pb

JOBS, UPDATES = 50, 20
# Number of jobs in the comparison.
COMPARED = 5
# Seconds between two steps: the page draws at most five times a second.
BETWEEN = 0.5
PATIENCE_MS = 120_000
CHROMIUM = os.environ.get("TROUPE_CHROMIUM") or shutil.which("chromium") or "chromium"
SPEC = """
name: team
workflow: examples.nowhere:workflow
tasks: {source: "examples.nowhere:Tasks"}
agents: {solver: {policy: big}, checker: {policy: small}}
policies:
  big: {model: {config: {model_type: qwen3}, tokenizer: somewhere}}
  small: {model: {config: {model_type: qwen3}, tokenizer: somewhere}}
pipeline: {steps: 20000, queries_per_step: 4}
"""
# The slowest part of each kind of update, in milliseconds, and tasks that block the page.
MEASURED = """() => Object.fromEntries(
  ['troupe-charts', 'troupe-cluster', 'troupe-compare', 'troupe-history']
    .map(name => [name, performance.getEntriesByName(name).map(one => one.duration)]))"""
FIRST_PAINT = """new Promise(done => new PerformanceObserver(list =>
  done(list.getEntriesByName('first-contentful-paint')[0].startTime))
  .observe({type: 'paint', buffered: true}))"""
LONG_TASKS = """window.longTasks = [];
new PerformanceObserver(list =>
  window.longTasks.push(...list.getEntries().map(one => one.duration)))
  .observe({type: 'longtask', buffered: true})"""


def values_of(step: int, rng: random.Random) -> dict[str, float]:
    """Return the metrics of a step, like a job of two policies."""
    done = 1 - math.exp(-step / 3000)
    values = {f"reward/{agent}/mean": done + rng.gauss(0, 0.05) for agent in ("solver", "checker")}
    values |= {metric_names.TEAM_MEAN: done, metric_names.TOKENS_PER_SECOND: rng.gauss(900, 80)}
    for policy in ("big", "small"):
        values |= {
            f"{policy}/{name}": rng.random()
            for name in (metric_names.POLICY_LOSS, metric_names.GRAD_NORM)
        }
        values |= {f"{policy}/samples": 32.0, f"{policy}/skipped": 0.0}
        values |= {f"{policy}/other/{number}": rng.random() for number in range(20)}
    return values | {metric_names.STEP_SECONDS: 12.5}


@dataclass
class Jobs:
    """Jobs in the orchestrator's store, in the form that runners write."""

    store: JobStore
    rng: random.Random

    async def make(self, job_id: str, steps: int, *, whole: bool = True) -> None:
        """Make a running job after `steps` steps, with an evaluation after every hundredth. Unless
        it is `whole`, its steps have only the team's reward, which takes less time to write."""
        directory = self.store._data_dir or Path("/nowhere")
        record = JobRecord(
            job_id=job_id,
            request_id=job_id,
            spec_json=parse_job(SPEC).model_dump_json(),
            directory=directory / job_id,
            created_at=time.time(),
            state=common_pb.JOB_STATE_RUNNING,
        )
        await self.store.create(record)
        epoch = await self.store.adopt(job_id)
        evaluated = -1
        for step in range(steps):
            await self.step(job_id, epoch, step, whole=whole)
            if whole and step % 100 == 0:
                scores = {"evaluation/team/mean": self.rng.random(), "evaluation/version/big": step}
                await self.store.log_evaluation(job_id, epoch, evaluated, step, scores, {})
                evaluated = step

    async def step(self, job_id: str, epoch: int, step: int, *, whole: bool = True) -> None:
        """Write one step (from 0)."""
        values = values_of(step, self.rng)
        kept = values if whole else {metric_names.TEAM_MEAN: values[metric_names.TEAM_MEAN]}
        await self.store.finish_step(job_id, epoch, step, kept)


def started(
    stack: AsyncExitStack, command: list[str], log: Any, env: Mapping[str, str] | None = None
) -> int:
    """Start a process that ends with `stack`; return its id."""
    process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | dict(env or {}))
    stack.callback(end, process)
    return process.pid


async def until(good: Callable[[], bool]) -> None:
    """Wait for up to a minute; an error of Redis counts as not yet good."""
    for _ in range(1200):
        with suppress(redis.RedisError):
            if good():
                return
        await asyncio.sleep(0.05)
    raise TimeoutError("the servers did not start within a minute")


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[tuple[Jobs, str, psutil.Process]]:
    """Yield the jobs, the panel's address and its process. Logs go to `directory`."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config, url = write_config(directory, int(sock.getsockname()[1]))
    async with AsyncExitStack() as stack:
        log = stack.enter_context((directory / "servers.log").open("ab"))
        started(stack, [redis_executable(), str(config)], log)
        await until(lambda: bool(redis.Redis.from_url(url).ping()))
        made: list[Orchestrator] = []

        def service(settings: OrchestratorSettings, telemetry: Telemetry) -> OrchestratorService:
            made.append(Orchestrator(settings, telemetry))
            return OrchestratorService(made[0], ModelServer(settings))

        settings = OrchestratorSettings(redis_url=url, data_dir=directory, log_level="warning")
        server = await stack.enter_async_context(serve(service, settings))
        ports = directory / "panel-port"
        env = {
            "TROUPE_ORCHESTRATOR_ADDRESS": server.address,
            "TROUPE_PORT": "0",
            "TROUPE_PORT_FILE": str(ports),
        }
        panel = started(stack, [sys.executable, "-m", "services.control_panel"], log, env)
        await until(ports.exists)
        jobs = Jobs(made[0].shared.store, random.Random(7))
        yield jobs, f"http://127.0.0.1:{ports.read_text().split()[0]}", psutil.Process(panel)


async def opened(browser: Any, url: str) -> tuple[Any, dict[str, float]]:
    """Return a page at `url`, and the growing counts of bytes that it receives: `stream` and
    `answers`."""
    page = await browser.new_page(viewport={"width": 1400, "height": 1000})
    session = await page.context.new_cdp_session(page)
    await session.send("Network.enable")
    streams: set[str] = set()
    got = {"stream": 0.0, "answers": 0.0}

    def answered(event: Mapping[str, Any]) -> None:
        if (
            event["response"]["mimeType"] == "text/event-stream"
            and "/jobs/" in event["response"]["url"]
        ):
            streams.add(event["requestId"])

    def received(event: Mapping[str, Any]) -> None:
        got["stream" if event["requestId"] in streams else "answers"] += event["dataLength"]

    session.on("Network.responseReceived", answered)
    session.on("Network.dataReceived", received)
    await page.add_init_script(LONG_TASKS)
    await page.goto(url)
    return page, got


async def measure(browser: Any, jobs: Jobs, url: str, steps: int) -> dict[str, float]:
    """Measure the page of a job with `steps` steps: until it shows all, and while more arrive."""
    job_id = f"job-{steps}"
    page, got = await opened(browser, f"{url}/?job={job_id}")
    painted = await page.evaluate(FIRST_PAINT)
    shown = '#chart-reward[data-points="{}"]'
    await page.wait_for_selector(shown.format(steps), timeout=PATIENCE_MS)
    complete = await page.evaluate("performance.now()")
    await asyncio.sleep(1)  # drawing the last page of the history is not an update
    load = dict(got)
    await page.evaluate("performance.clearMeasures(); window.longTasks.length = 0")
    stream = got["stream"]
    epoch = (await jobs.store.get(job_id)).epoch
    for step in range(steps, steps + UPDATES):
        await jobs.step(job_id, epoch, step)
        await page.wait_for_selector(shown.format(step + 1), timeout=PATIENCE_MS)
        await asyncio.sleep(BETWEEN)
    measured = await page.evaluate(MEASURED)
    longest = await page.evaluate("Math.max(0, ...window.longTasks)")
    await page.close()
    return {
        "first_paint_ms": painted,
        "all_curves_ms": complete,
        "load_kb": sum(load.values()) / 1000,
        "charts_ms": quantile(measured["troupe-charts"], 0.5),
        "charts_most_ms": max(measured["troupe-charts"]),
        "cluster_ms": quantile(measured["troupe-cluster"], 0.5),
        "cluster_most_ms": max(measured["troupe-cluster"]),
        "longest_task_ms": longest,
        "update_kb": (got["stream"] - stream) / 1000 / UPDATES,
    }


async def compare(browser: Any, url: str, ids: Sequence[str], steps: int) -> dict[str, float]:
    """Measure the comparison of jobs with `steps` steps each."""
    page, _ = await opened(
        browser, f"{url}/?job={ids[0]}&with={','.join(ids)}&metric=team/mean#compare"
    )
    rows = page.locator("#compare-values tbody tr")
    await rows.nth(len(ids) - 1).wait_for(timeout=PATIENCE_MS)
    complete = await page.evaluate("performance.now()")
    await page.evaluate("performance.clearMeasures(); window.longTasks.length = 0")
    await asyncio.sleep(10)
    measured = await page.evaluate(MEASURED)
    longest = await page.evaluate("Math.max(0, ...window.longTasks)")
    await page.close()
    return {
        "compared_ms": complete,
        "compare_most_ms": max(measured["troupe-compare"]),
        "compare_longest_task_ms": longest,
    }


async def run(steps: int) -> dict[str, dict[str, float]]:
    """Return the figures by number of steps."""
    from playwright.async_api import async_playwright

    found: dict[str, dict[str, float]] = {}
    with scratch() as directory:
        async with cluster(directory) as (jobs, url, panel), async_playwright() as playwright:
            browser = await playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
            )
            compared = [f"job-{steps}", *(f"also-{number}" for number in range(1, COMPARED))]
            others = [f"other-{number}" for number in range(JOBS - COMPARED - 1)]
            await asyncio.gather(
                *(jobs.make(job_id, 3) for job_id in others),
                *(jobs.make(job_id, steps, whole=False) for job_id in compared[1:]),
                *(jobs.make(f"job-{count}", count) for count in (steps // 10, steps)),
            )
            # The first run pays for imports and for Chromium's start.
            page, _ = await opened(browser, url)
            await page.close()
            for count in (steps // 10, steps):
                used = panel.cpu_times().user
                figures = await measure(browser, jobs, url, count)
                figures["panel_cpu_s"] = panel.cpu_times().user - used
                found[str(count)] = figures
                print(count, figures, file=sys.stderr, flush=True)
            found[str(steps)] |= await compare(browser, url, compared, steps)
            await browser.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and the JSON object as the last line."""
    options = options_of(__doc__, arguments)
    found = asyncio.run(run(200 if options.quick else 10_000))
    if not options.json:
        print(f"{JOBS} jobs; load {os.getloadavg()[0]:.1f}")
        for count, figures in found.items():
            print(f"\n{int(count):,} steps")
            for name, value in figures.items():
                print(f"  {name:<26}{value:>10,.1f}")
    rounded = {
        count: {name: round(value, 2) for name, value in figures.items()}
        for count, figures in found.items()
    }
    finish({"jobs": JOBS, "steps": rounded}, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
