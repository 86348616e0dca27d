"""`troupe.train`: train functions of the running program, on a cluster that it starts or on
another."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, overload

from rich.console import Console

from troupe.client.discovery import (
    ADDRESS_VARIABLE,
    data_directory,
    resolve_address,
    settings_for,
)
from troupe.client.handle import refuse_one_text
from troupe.client.program import ProgramJob, is_rows, job_of_program, name_of
from troupe.client.records.jobs import Result
from troupe.client.sync import Client, JobHandle, LoopThread
from troupe.cluster.daemon import start_detached
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.state import running_state
from troupe.job import JobSpec
from troupe.rpc.errors import InvalidArgument

if TYPE_CHECKING:
    from troupe.client.cli.train import TrainPlan

# The most held-out queries that an evaluation asks by default.
_EVALUATED = 200


@overload
def train(
    *,
    workflow: Any,
    tasks: Any,
    agents: Mapping[str, Any],
    policies: Mapping[str, Any],
    steps: int,
    held_out: float | Sequence[Mapping[str, Any]] | None = None,
    queries_per_step: int = 32,
    group_size: int = 8,
    name: str | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    wait: Literal[True] = True,
    show: bool = True,
    address: str | None = None,
    cluster: ClusterSettings | None = None,
    keep_up: bool = False,
    **fields: Any,
) -> Result: ...
@overload
def train(
    *,
    workflow: Any,
    tasks: Any,
    agents: Mapping[str, Any],
    policies: Mapping[str, Any],
    steps: int,
    held_out: float | Sequence[Mapping[str, Any]] | None = None,
    queries_per_step: int = 32,
    group_size: int = 8,
    name: str | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    wait: Literal[False],
    show: bool = True,
    address: str | None = None,
    cluster: ClusterSettings | None = None,
    keep_up: bool = False,
    **fields: Any,
) -> JobHandle: ...
def train(
    *,
    workflow: Any,
    tasks: Any,
    agents: Mapping[str, Any],
    policies: Mapping[str, Any],
    steps: int,
    held_out: float | Sequence[Mapping[str, Any]] | None = None,
    queries_per_step: int = 32,
    group_size: int = 8,
    name: str | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    wait: bool = True,
    show: bool = True,
    address: str | None = None,
    cluster: ClusterSettings | None = None,
    keep_up: bool = False,
    **fields: Any,
) -> Result | JobHandle:
    """Train a team that the running program, or a notebook, describes.

    `workflow` is an async function of (query, agents, tools). `tasks` is a list of dicts, a class
    as in `tasks.source`, a data set's path or id, or the section of a job file. `held_out` is a
    fraction of the rows, or further rows, for evaluations before and after, of 200 of them at most
    unless `evaluation` says otherwise. `agents` has each agent's policy, or its
    section; `policies` has each policy's model path, or its section. `fields` are further fields of
    a job, such as `tools={"score": score}`; where a job file names a function, they may have the
    function itself. Functions, their modules and rows are sent with the job as source text;
    `code={"include": [...]}` names the files in place of the modules found by their imports.
    `tags` (short words) and `notes` are for people, as in `Client.submit`.

    With `wait`, show progress (unless `show` is False), block until the job has ended, and return
    its result. Ctrl-C, or a notebook's interrupt, pauses the job and raises KeyboardInterrupt.
    Without `wait`, return a handle of the job when it is durable.

    The job runs at `address` ("host:port"; default: `TROUPE_ORCHESTRATOR_ADDRESS`), else on the
    cluster that runs in the data directory of `cluster` (default: `TROUPE_DATA_DIR`, else `runs`),
    else on one that is started for it, and stopped at its end unless `keep_up` is set or `wait` is
    False: then `troupe down` stops it.

    Raises `InvalidArgument` for a function or row that cannot be sent, `troupe.job.JobSpecError`
    for an invalid job, `JobFailed` and `JobCancelled`.
    """
    refuse_one_text(tags, "tags")
    if held_out is not None:
        rows = tasks.get("rows") if isinstance(tasks, Mapping) else tasks
        if not is_rows(rows):
            raise InvalidArgument(
                "applies to rows, and `tasks` has none",
                field="held_out",
                value=held_out if isinstance(held_out, float) else "rows",
                remedy="Give `tasks` as a list of dicts; a class returns its own held-out split, "
                "and a data set names it in `tasks`.",
            )
        if not isinstance(held_out, float) and not is_rows(held_out):
            raise InvalidArgument(
                "is neither a fraction nor rows",
                field="held_out",
                value=held_out,
                remedy="Give a number between 0 and 1, such as 0.25, or a list of dicts.",
            )
        own = tasks if isinstance(tasks, Mapping) else {}
        tasks = {**own, "rows": rows, "held_out": held_out}
        if not {"evaluation", "evaluations"} & fields.keys():
            count = round(held_out * len(rows)) if isinstance(held_out, float) else len(held_out)
            fields["evaluation"] = {"queries": min(max(count, 1), _EVALUATED)}
    pipeline = {"steps": steps, "queries_per_step": queries_per_step, "group_size": group_size}
    job = job_of_program(
        {
            "name": name or name_of(workflow),
            "workflow": workflow,
            "tasks": tasks,
            "agents": agents,
            "policies": policies,
            **fields,
            "pipeline": pipeline | dict(fields.get("pipeline", {})),
        }
    )
    return _run(
        job,
        tags,
        notes,
        wait=wait,
        show=show,
        address=address,
        cluster=cluster,
        keep_up=keep_up,
    )


def _run(
    job: JobSpec | ProgramJob,
    tags: Sequence[str],
    notes: str,
    *,
    wait: bool,
    show: bool,
    address: str | None,
    cluster: ClusterSettings | None,
    keep_up: bool,
) -> Result | JobHandle:
    """Submit a job as `train` describes it."""
    # The command line's modules, which `troupe train` shares; they take a while to import.
    from troupe.client.cli.train import TrainPlan, refuse_without_servers, settings_of_job

    spec = job.spec if isinstance(job, ProgramJob) else job
    settings = cluster or ClusterSettings(data_dir=data_directory())
    settings = settings_of_job(spec, settings).resolved()
    address = address or os.environ.get(ADDRESS_VARIABLE)
    if address is None and running_state(settings.data_dir) is None:
        # It runs an event loop of its own, and this thread may have one.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(refuse_without_servers, spec).result()
    if not wait:
        if address is None and running_state(settings.data_dir) is None:
            start_detached(settings)
        target = resolve_address(address, settings.data_dir)
        client = Client(target, settings=settings_for(target, settings.data_dir))
        return client.submit(job, tags=tags, notes=notes)
    plan = TrainPlan(
        spec=job,
        job_id=None,
        resume=None,
        address=address,
        keep_up=keep_up,
        grace=20.0,
        settings=settings,
        tags=tags,
        notes=notes,
    )
    if show:
        return _train(plan, Console())
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        return _train(plan, Console(file=nothing))


def _train(plan: TrainPlan, console: Console) -> Result:
    """Run `plan` on an event loop of its own: notebooks already run one in this thread."""
    from troupe.client.cli.failures import Interrupts
    from troupe.client.cli.train import train_job

    loop = LoopThread("troupe-train")
    try:
        interrupts = Interrupts()
        running = loop.start(train_job(plan, console, interrupts))
        while True:
            try:
                ended = running.result()
                break
            except KeyboardInterrupt:
                loop.call(interrupts.receive, signal.SIGINT)
    finally:
        loop.close()
    if ended is None:
        raise KeyboardInterrupt
    ended.job.require_success()
    return ended
