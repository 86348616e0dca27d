"""README's job on this machine: `python -m benchmarks.gpu.readme_job --devices split|colocated`.

    python -m benchmarks.gpu.readme_job --devices split [--kill] [--device cuda|cpu] [--quick]

The team and the job as README.md has them, on an embedded cluster with all services and a real
Redis; but with random weights (Qwen3-0.6B's architecture for both policies, and a made-up
dictionary), short answers and three steps. `split`: engines and trainers have half of the devices
each, mode `micro_batch`; `colocated`: they take turns on all of them (`pipeline.colocate`). Engines
are SGLang servers if there is SGLang and a device for each, else embedded ones.

It succeeds if every step of every policy was applied, all versions are served, no sample was lost
or trained twice, and log-probs of trainers and engines agree. `--kill`: after the first step a
server (or the worker that embeds the engines) is killed; seconds until all engines serve again, and
the job must succeed all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import psutil
import yaml

from benchmarks.command import finish, progress, run_program, scratch
from benchmarks.gpu.update import DEFAULT, TINY
from benchmarks.weights import find_sglang
from benchmarks.workloads.tokenizer import save_word_tokenizer
from troupe.client import AsyncClient, AsyncJobHandle, Audit, Cluster, Job, MetricsLogged
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.contracts import metric_names
from troupe.devices import find_devices
from troupe.job import JobSpec
from troupe.processes.ending import kill_tree
from troupe.rpc import TroupeError
from troupe.twin.costs import model_config

README: Final = Path(__file__).resolve().parents[2] / "README.md"
_TASKS: Final = "benchmarks.gpu.readme_tasks"
_STEPS: Final = 3
_JOB: Final = "readme"
_SERVICE: Final = "rollout-0"
# Kernels are compiled when a server starts for the first time.
_START_SECONDS: Final = 600
_TURN_SECONDS: Final = 600
_POLL_SECONDS: Final = 0.05
# The most by which log-probs of trainers and engines may differ, as k3 per token.
_MOST_MISMATCH: Final = 0.05
Sharing = Literal["split", "colocated"]


def block(heading: str, text: str | None = None) -> str:
    """Return the code block of README.md whose first line is the comment `heading`."""
    found = re.search(
        rf"^```\w+\n# {re.escape(heading)}\n(.*?)^```",
        README.read_text(encoding="utf-8") if text is None else text,
        re.DOTALL | re.MULTILINE,
    )
    if found is None:
        raise ValueError(f"README.md has no code block that begins with '# {heading}'")
    return found[1]


def job_of(
    sharing: Sharing, tokenizer: Path, words: int, *, gpus: int, quick: bool, python: str
) -> JobSpec:
    """Return README's job for a machine with so many GPUs (0: a CPU); `python`: what has SGLang, ""
    for embedded engines. `tokenizer` knows so many `words`."""
    fields: dict[str, Any] = yaml.safe_load(block("job.yaml"))
    fields["tasks"] = {"source": f"{_TASKS}:Tasks", "args": {"words": words}}
    for tool in fields["tools"].values():
        tool["entrypoint"] = f"{_TASKS}:score"
    for agent in fields["agents"].values():
        agent["sampling"] = {"max_new_tokens": 8 if quick else 128}
    for policy in fields["policies"].values():
        policy["model"] = {
            "config": TINY if quick else model_config(DEFAULT),
            "tokenizer": str(tokenizer),
            "dtype": "bfloat16" if gpus else "float32",
        }
        policy["engine"] = engine_of(policy["engine"], python, gpus, quick=quick)
    fields["pipeline"] = {
        "steps": _STEPS,
        "queries_per_step": 2 if quick else 16,
        "group_size": 4 if quick else 8,
        **({"mode": "sync", "colocate": True} if sharing == "colocated" else {}),
    }
    fields["evaluation"] = {"queries": 0}
    fields["logging"] = {"tensorboard": False}  # a bare machine has none
    # A server that is killed may take minutes until it serves again, by default longer than a turn
    # may take on a CPU.
    fields["limits"] = {"turn_seconds": _TURN_SECONDS, "trajectory_seconds": 2 * _TURN_SECONDS}
    return JobSpec.model_validate(fields)


def engine_of(engine: Mapping[str, Any], python: str, gpus: int, *, quick: bool) -> dict[str, Any]:
    """Return the section `engine` of a policy: README's, or an embedded engine's."""
    sizes = {"max_context": 128 if quick else 2048, "max_running": 8 if quick else 128}
    if not python:
        return {"kind": "embedded", **sizes}
    on_cpu = {} if gpus else {"launch": ["--mem-fraction-static", "0.5"]}
    own = {"python": python, "start_timeout_seconds": _START_SECONDS}
    return {**engine, **own, **sizes, **on_cpu}


def engines_for(python: str, sharing: Sharing, gpus: int, policies: int) -> str:
    """Return `python` if every policy's SGLang server gets a device of its own, or none needs one;
    else ""."""
    engine_devices = gpus if sharing == "colocated" else (gpus + 1) // 2
    # Both share a single device: a server leaves the trainer nothing.
    return python if not gpus or engine_devices >= policies else ""


class Run:
    """A job on a cluster of its own, and what is seen of it."""

    def __init__(self, cluster: EmbeddedCluster, client: AsyncClient, spec: JobSpec) -> None:
        self._cluster, self._client, self._spec = cluster, client, spec
        self.figures: dict[str, Any] = {"step_seconds": [], "tokens_per_second": []}
        self._mismatch_names = [f"{one}/{metric_names.MISMATCH_KL}" for one in spec.policies]
        self._mismatches: list[float] = []

    async def run(self, *, kill: bool) -> dict[str, str]:
        """Train to the end; return what went wrong, by name."""
        began = time.monotonic()
        handle = await self._client.submit(self._spec, _JOB)
        recovery: asyncio.Task[float] | None = None
        try:
            async for event in handle.watch():
                if not isinstance(event, MetricsLogged):
                    continue
                self._mismatches += [
                    event.values[name] for name in self._mismatch_names if name in event.values
                ]
                if metric_names.STEP_SECONDS in event.values:
                    if not self.figures["step_seconds"]:
                        self.figures["first_step_seconds"] = round(time.monotonic() - began, 2)
                    await self._note(event)
                    if kill and recovery is None:
                        recovery = asyncio.create_task(self._kill())
            problems = await self._problems(handle)
            if recovery is not None:
                if recovery.done():
                    self.figures["recovery_seconds"] = round(recovery.result(), 2)
                else:
                    problems["recovery"] = "the engines did not serve again before the job's end"
        finally:
            if recovery is not None:
                recovery.cancel()
        return problems

    async def _note(self, event: MetricsLogged) -> None:
        values = event.values
        self.figures["step_seconds"].append(round(values[metric_names.STEP_SECONDS], 2))
        rate = values.get(metric_names.TOKENS_PER_SECOND, 0.0)
        self.figures["tokens_per_second"].append(round(rate, 1))
        for name in ("sleep", "offload", "wake"):
            if (seconds := values.get(f"colocate/{name}_seconds")) is not None:
                self.figures.setdefault(f"{name}_seconds", []).append(round(seconds, 3))
        now = await self._client.cluster()
        self.figures["devices_used"] = sum(
            bool(device.holders) for node in now.nodes for device in node.devices
        )
        self.figures["updates"] = {
            one.id: f"{one.update_way}, {one.update_seconds:.2f} s, "
            f"paused {one.update_exposed_seconds:.3f} s"
            for one in now.engines
        }
        # Counts if the part is ended at its deadline.
        print(json.dumps(self.figures), flush=True)
        progress(
            f"step {event.step}: {self.figures['step_seconds'][-1]:.2f} s, {rate:.0f} tokens/s"
        )

    async def _kill(self) -> float:
        """Kill a server, or the worker whose engines are its own; return the seconds until all
        engines serve again."""
        pid = next(one.pid for one in self._cluster.state.services if one.name == _SERVICE)
        assert pid is not None  # it has served a step
        servers = psutil.Process(pid).children()
        victim = servers[0].pid if self.figures["engines"] == "sglang" else pid
        progress(f"kills process {victim}")
        before = _engines(await self._client.cluster())
        began = time.monotonic()
        kill_tree(victim)
        while True:
            now = await self._client.cluster()
            serving = [one for one in now.engines if one.state == "healthy"]
            if _engines(now) != before and len(serving) == len(before):
                return time.monotonic() - began
            await asyncio.sleep(_POLL_SECONDS)

    async def _problems(self, handle: AsyncJobHandle) -> dict[str, str]:
        record = await handle.wait(timeout=60)
        audit = await handle.audit()
        self.figures["mismatch"] = max(self._mismatches, default=0.0)
        found = {}
        if not audit.passed:
            found["audit"] = f"{audit.violations}, lost {audit.lost}, twice {audit.duplicated}"
        if record.state == "succeeded":
            found |= await self._gaps(handle, record, audit)
        else:
            found["job"] = f"{record.state}: {record.problem}"
        self.figures["samples"] = sum(one.trained for one in audit.policies)
        self.figures["trajectories"] = audit.trajectories_by_state
        return found

    async def _gaps(self, handle: AsyncJobHandle, record: Job, audit: Audit) -> dict[str, str]:
        """Return what a job that succeeded did not do."""
        found = {}
        wanted = dict.fromkeys(self._spec.policies, _STEPS)
        if record.versions != wanted:
            found["versions"] = f"{record.versions}, not {wanted}"
        applied = {one.policy: one.steps_applied for one in audit.policies}
        if applied != wanted:
            found["steps"] = f"applied: {applied}, not {wanted}"
        for policy in wanted:
            if len({one.checksum for one in await handle.versions(policy)}) != _STEPS + 1:
                found[policy] = "versions with the same weights"
        if len(self._mismatches) != _STEPS * len(wanted):
            found["metrics"] = f"{len(self._mismatches)} values of {metric_names.MISMATCH_KL}"
        elif not max(self._mismatches) <= _MOST_MISMATCH:
            found["mismatch"] = f"k3 between trainers and engines: {self._mismatches}"
        return found


def _engines(cluster: Cluster) -> dict[str, tuple[int, str]]:
    """Return what changes with every engine that is started anew, by its id."""
    return {one.id: (one.restarts, one.worker_id) for one in cluster.engines}


async def train(
    spec: JobSpec, sharing: Sharing, place: Path, figures: Mapping[str, Any], *, kill: bool
) -> dict[str, Any]:
    """Train `spec` on a cluster in `place`; return the figures."""
    (place / "team.py").write_text(block("team.py"))
    imports = [str(place), str(README.parent), os.environ.get("PYTHONPATH", "")]
    settings = ClusterSettings(
        data_dir=place / "runs",
        transfer_dir=place / "transfer",
        panel=False,
        colocate=sharing == "colocated",
        environment={"PYTHONPATH": os.pathsep.join(filter(None, imports))},
        start_seconds=300,
    )
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):
        run = Run(cluster, client, spec)
        run.figures |= figures
        problems = await run.run(kill=kill)
    return {**run.figures, "problems": problems}


def main() -> None:
    """Train, and print lines of JSON; the last one has all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", choices=["split", "colocated"], required=True)
    parser.add_argument("--kill", action="store_true", help="kill a server after the first step")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--python", default="", help="what has SGLang")
    options = parser.parse_args()
    quick = options.quick or options.device == "cpu"
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus = len(find_devices())
    with scratch() as place:
        python = options.python or find_sglang(place)
        python = engines_for(python, options.devices, gpus, policies=2)
        vocabulary = int((TINY if quick else model_config(DEFAULT))["vocab_size"])
        words = save_word_tokenizer(place / "tokenizer", vocabulary)
        spec = job_of(
            options.devices,
            place / "tokenizer",
            words,
            gpus=gpus,
            quick=quick,
            python=python,
        )
        figures = {"engines": "sglang" if python else "embedded", "devices": gpus}
        work = train(spec, options.devices, place, figures, kill=options.kill)
        try:
            found = asyncio.run(work)
        except TroupeError as error:
            found = {**figures, "problems": {"job": str(error)}}
    finish(found, quiet=True)


if __name__ == "__main__":
    run_program(main)
