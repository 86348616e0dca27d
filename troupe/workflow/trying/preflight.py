"""Checks of a job before it runs, without a cluster.

They find models that are not there, layers that an architecture does not have, and faults that a
trial of the workflow meets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from troupe.contracts import kinds
from troupe.data.tasks import TaskSplit, open_tasks
from troupe.job import JobSpec, JobSpecError, ModelSpec
from troupe.job.loading import FieldProblem
from troupe.job.section import no_directory
from troupe.job.sizing import read_config, read_shape
from troupe.outcomes import described, shown
from troupe.rpc.errors import TroupeError
from troupe.user_code import call_contained
from troupe.workflow.errors import UnknownAgentError, WorkflowError
from troupe.workflow.loading import Query, load_workflow
from troupe.workflow.trying.play import make_role
from troupe.workflow.trying.policies import RandomPolicy
from troupe.workflow.trying.rehearsal import Failure, Rehearsal
from troupe.workflow.trying.setting import Setting

T = TypeVar("T")
# Rows that the workflow is tried on, trajectories of each, and seconds of one.
_ROWS: Final = 2
_TRAJECTORIES: Final = 2
_SECONDS: Final = 5.0
# Kinds of failures after which further trajectories would only take as long.
_LATE: Final = (kinds.DEADLINE, "workflow_blocked")


class Findings:
    """The problems that several checks of a job find, which are all shown."""

    def __init__(self) -> None:
        self.problems: list[FieldProblem] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Return what a check returns; None if it raised, which is among the problems."""
        try:
            return check()
        except JobSpecError as error:
            self.problems += error.problems
        except (WorkflowError, TroupeError) as error:
            value = "" if error.value is None else str(error.value)
            field, remedy = error.field or "workflow", error.remedy or ""
            self.problems.append(FieldProblem(field, value, error.message, remedy))
        return None

    def add(self, check: Callable[[], Iterable[FieldProblem]]) -> None:
        """Add what a check reports."""
        self.problems += self.of(lambda: list(check())) or ()


def missing_directories(job: JobSpec) -> Iterator[FieldProblem]:
    """Report paths of models, tokenizers and adapters that are not directories of this machine.
    Ids on the hub are not looked up."""
    for name, policy in job.policies.items():
        model = policy.model
        if model is None:
            continue
        weights = None if policy.simulated is not None and model.tokenizer else model.path
        adapter = None if policy.lora is None else policy.lora.path
        named = {"model.path": weights, "model.tokenizer": model.tokenizer, "lora.path": adapter}
        for field, path in named.items():
            if path is not None and no_directory(path):
                yield FieldProblem(
                    f"policies.{name}.{field}",
                    path,
                    "there is no such directory on this machine",
                    "Correct the path. If only the hosts of the cluster have it, validate there; "
                    "an id on the hub has the form OWNER/NAME.",
                )


def unknown_layers(job: JobSpec) -> Iterator[FieldProblem]:
    """Report LoRA targets that a policy's architecture does not have, where this machine knows its
    configuration. The model is built without weights; nothing is downloaded."""
    for name, policy in job.policies.items():
        wanted = None if policy.lora is None else policy.lora.target_modules
        if policy.model is None or policy.simulated is not None or not isinstance(wanted, list):
            continue
        shape = read_shape(policy.model)
        if shape is not None and {one for one, _ in shape.linears}.issuperset(wanted):
            continue
        if (found := _layers_fault(policy.model, wanted)) is not None:
            unknown, reason, remedy = found
            field = f"policies.{name}.lora.target_modules"
            yield FieldProblem(field, ", ".join(unknown), reason, remedy)


def _layers_fault(model: ModelSpec, wanted: list[str]) -> tuple[list[str], str, str] | None:
    """Return the targets without a layer, the reason and the remedy; None: all have one, or the
    model cannot be built here, which is for its trainer to say."""
    config = read_config(model)
    if config is None:
        return None
    # Heavy imports, for jobs that name layers.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from troupe.checkpoints.adapters import linear_layers, unknown_targets

    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    except Exception:
        return None
    _, unknown = linear_layers(built, wanted)
    return (unknown, *unknown_targets(built, unknown)) if unknown else None


def trial_faults(job: JobSpec, tasks: TaskSplit | None) -> Iterator[FieldProblem]:
    """Play the job's workflow on its first rows with random replies, and report what would fail in
    a job, too: agents and tools that the job lacks, columns that its rows lack.

    `tasks`: its rows to train on; None: they are opened here. Tools return 0 and no reward function
    is called, so any other failure may be due to that, and says nothing.
    """
    assert job.workflow is not None, "language models play"
    assert job.tasks is not None, "a workflow plays on them"
    tasks = tasks or open_tasks(job.tasks, "train", job.seed)
    tools = dict.fromkeys(job.tools, _nothing)
    setting = Setting(
        job.workflow,
        load_workflow(job.workflow),
        roles={name: make_role(name, one.system_prompt) for name, one in job.agents.items()},
        tools=tools,
    )
    rows: list[_Row] = []
    for number in range(min(_ROWS, len(tasks))):
        try:
            rows.append(_Row(call_contained(tasks.__getitem__, tasks.position(number))))
        except Exception as error:  # the user's code
            message = f"item {number} raised an error or is not a mapping: {described(error)}"
            remedy = "`tasks[index]` must return a dict of JSON values."
            yield FieldProblem("tasks", tasks.source, message, remedy)
            return
    queries = [Query(f"q{number}", "train", number, row) for number, row in enumerate(rows)]
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would log tasks of a failed one
    rehearsal = Rehearsal(setting, queries, RandomPolicy(), _TRAJECTORIES, seconds=_SECONDS)
    found: dict[tuple[str, str], FieldProblem] = {}
    for ended in rehearsal.run():
        row = rows[ended.query.index]
        if ended.failure is not None:
            problem = _fault(job, tasks, row, ended.failure)
            if problem is not None:
                found.setdefault((problem.field, problem.value), problem)
            if ended.failure.kind in _LATE:
                break
    yield from found.values()


async def _nothing(**_: Any) -> float:
    return 0.0


def _fault(job: JobSpec, tasks: TaskSplit, row: _Row, failure: Failure) -> FieldProblem | None:
    """Return the problem behind the failure of a trial; None: it may be due to the trial itself."""
    if failure.kind == UnknownAgentError.kind:
        return FieldProblem("agents", failure.value, failure.message, failure.remedy)
    # An MCP server's tools are known where it runs.
    served = any(getattr(tool, "mcp", None) is not None for tool in job.tools.values())
    if failure.kind == kinds.UNKNOWN_TOOL and not served:
        return FieldProblem("tools", failure.value, failure.message, failure.remedy)
    told = failure.message if failure.message.startswith(KeyError.__name__) else ""
    name = next((one for one in sorted(row.missing) if repr(one) in told), None)
    if name is None:
        return None
    assert job.tasks is not None
    own = bool(job.tasks.source)
    columns = ", ".join(sorted(map(str, row)))
    return FieldProblem(
        "tasks.source" if own else "tasks.columns",
        name,
        f"the workflow reads this column, which the rows of {tasks.source} lack; they have "
        f"{columns or 'none'} (row {shown(dict(row), 200)})",
        "Correct the name in the workflow, or return it from the tasks."
        if own
        else f"Correct the name in the workflow, or map a column: `columns: {{{name}: COLUMN}}`.",
    )


class _Row(dict[str, Any]):
    """A row of the tasks that notes which of its missing columns are read."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.missing: set[str] = set()

    def __missing__(self, name: str) -> Any:
        self.missing.add(name)
        raise KeyError(name)
