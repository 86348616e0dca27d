"""`troupe job ...`: validate job files, check which policies fit on which devices, print the schema
and the job reference. These commands need no cluster.

The module also applies `--set key.path=value` to a job's YAML before its validation.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    cast,
)

import typer
from rich.console import Console
from rich.table import Table

from troupe.client.cli import options
from troupe.client.cli.failures import HintingGroup
from troupe.cluster.inventory import NodeShares, fill
from troupe.data.demonstrations import TRIED_ROWS, renderer_of
from troupe.data.tasks import TaskSplit, compare_splits, open_tasks
from troupe.devices import Device, find_devices, parse_devices
from troupe.doctor.examination import examine_servers
from troupe.functions.sources import collect
from troupe.job import JobSpec, JobSpecError, load_job
from troupe.job.automatic import with_values
from troupe.job.compatibility import advice
from troupe.job.loading import FieldProblem, job_of, load_text, read_mapping, set_field
from troupe.job.reference import reference
from troupe.job.sections.data import TasksSpec
from troupe.job.sizing import (
    QUANTIZED_REMEDY,
    SOLD,
    quantization_of,
    read_config,
    read_shape,
    setup_of,
)
from troupe.job.spec import VERIFIERS_WORKFLOW
from troupe.outcomes import shown
from troupe.rpc.errors import InvalidArgument, TroupeError
from troupe.scheduling.defaults import division_problem
from troupe.scheduling.memory import ModelShape, RankMemory, TrainingSetup, rank_memory
from troupe.workflow import ChatTokenizer, Role, Sampling
from troupe.workflow.asking import ask, question_of
from troupe.workflow.errors import EntrypointError, WorkflowError
from troupe.workflow.loading import add_working_directory, load_attribute, load_workflow
from troupe.workflow.messages import parse_messages
from troupe.workflow.trying.preflight import (
    Findings,
    missing_directories,
    trial_faults,
    unknown_layers,
)
from troupe.yaml_input import MAX_DEPTH, UnreadableText, read_text

if TYPE_CHECKING:
    from troupe.algorithms.registry import Field

app = typer.Typer(
    help="The job specification: schema, validation, reference. Jobs: `troupe jobs`.",
    no_args_is_help=True,
    cls=HintingGroup,
)
# Rewards that read the row before the reply, and the number of rows of a split that each is tried
# on: mathematics takes some milliseconds per row.
_COMPARING: Final = ("exact", "math", "json_schema", "tests")
_TRIED_ROWS: Final = 100
# The name that errors give to the value of an assignment.
_VALUE: Final = "its value"


@app.command()
def schema() -> None:
    """Print the JSON schema of a job, for editors."""
    print(json.dumps(JobSpec.model_json_schema(), indent=2))


@app.command()
def validate(
    path: Annotated[Path, typer.Argument(metavar="JOB.yaml", show_default=False)],
    assignments: options.Assignments = None,
    imports: Annotated[
        bool,
        typer.Option(
            "--imports",
            help="Also read its data sets, import its workflow, tasks, environment, tools, "
            "rewards and functions of the algorithm, look for its models, and play the workflow "
            "on two rows with random replies; tools and rewards are not called.",
        ),
    ] = False,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTxCLASS-MEMORY",
            help="Show how much memory each policy needs on these devices (8xH100-80GB, 2x24GB, "
            "...), and whether it fits. Exit status 1 if a policy fits on none.",
        ),
    ] = None,
) -> None:
    """Check a job file. Each fault is one line, and the exit status is then 2. Settings without
    effect give a note, not a fault."""
    given = parse_devices(devices, "--devices") if devices is not None else ()
    spec = load_with(path, assignments or [])
    # What is installed on this machine says nothing about declared devices.
    here = () if given else find_devices()
    machine = given or here
    found = Findings()
    warnings = [] if given else found.of(lambda: check_servers(spec, here)) or []
    for check in (_refuse_quantized, _refuse_undivided, _refuse_templates):
        found.of(partial(check, spec))
    code = "--imports checks that its code can be imported"
    data: list[str] = []
    if imports:
        tried, data = _try_out(spec, found)
        code = f"{tried} can be imported" if tried else "names no code to import"
    if found.problems:
        raise JobSpecError(found.problems)
    Console().print(
        f"{path} is a valid job: {spec.summary}; {code}",
        highlight=False,
        soft_wrap=True,
    )
    for line in (*data, *advice(spec), *warnings):
        Console().print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
    if machine:
        spec = show_shares(spec, machine, Console())
    if given and not show_sizing(spec, given, Console()):
        raise typer.Exit(1)


def _try_out(job: JobSpec, found: Findings) -> tuple[str, list[str]]:
    """Import the code of a job, read its data, and look for problems that would fail it in a
    cluster; return the fields whose code was imported, and notes on its rows."""
    tried = found.of(lambda: try_imports(job))
    data = found.of(lambda: read_data(job))
    notes, tasks = data or ([], None)
    found.add(partial(missing_directories, job))
    found.add(partial(unknown_layers, job))
    # Episodes of environments are played where these are installed.
    played = job.workflow not in (None, VERIFIERS_WORKFLOW) and job.environment is None
    if tried is not None and data is not None and played and job.tasks is not None:
        found.add(partial(trial_faults, job, tasks))
    return ", ".join(tried or ()), notes


def _refuse_quantized(spec: JobSpec) -> None:
    """Raise JobSpecError for policies whose checkpoint is on this machine and quantized."""
    problems = []
    for name, policy in spec.policies.items():
        model = policy.model
        if model is None or policy.simulated is not None:
            continue
        if method := quantization_of(read_config(model) or {}):
            leaf, value = ("path", model.path) if model.path else ("config", method)
            field, message = (
                f"policies.{name}.model.{leaf}",
                f"its weights are quantized ({method})",
            )
            problems.append(FieldProblem(field, value, message, QUANTIZED_REMEDY))
    if problems:
        raise JobSpecError(problems)


def _refuse_undivided(spec: JobSpec) -> None:
    """Raise JobSpecError for policies whose model is on this machine, and has experts that the
    ranks of `trainer.expert_parallel` cannot divide."""
    problems = []
    for name, policy in spec.policies.items():
        ranks = policy.trainer.expert_parallel
        if ranks == "auto" or ranks == 1 or policy.model is None or policy.simulated is not None:
            continue
        shape = read_shape(policy.model)
        if shape is None:
            continue
        gang = policy.trainer.gang
        size = gang if isinstance(gang, int) else None
        message, remedy = division_problem(ranks, size, shape.experts)
        if message:
            field = f"policies.{name}.trainer.expert_parallel"
            problems.append(FieldProblem(field, str(ranks), message, remedy))
    if problems:
        raise JobSpecError(problems)


def _refuse_templates(spec: JobSpec) -> None:
    """Raise JobSpecError for policies whose tokenizer is on this machine and has a chat template
    that exceeds the bounds of rendering."""
    from troupe.chat_templates.chat import TEMPLATE_REMEDY, directory_fault

    problems = []
    for name, policy in spec.policies.items():
        model = policy.model
        if model is None or policy.simulated is not None:
            continue
        if fault := directory_fault(Path(model.tokenizer_source).expanduser()):
            file, why = fault
            leaf = "tokenizer" if model.tokenizer else "path"
            problems.append(
                FieldProblem(
                    f"policies.{name}.model.{leaf}",
                    file,
                    f"the chat template exceeds a bound: {why}",
                    TEMPLATE_REMEDY,
                )
            )
    if problems:
        raise JobSpecError(problems)


def check_servers(spec: JobSpec, devices: Sequence[Device]) -> list[str]:
    """Return warnings about the environments of the servers that the job launches. Raises
    JobSpecError for policies that find no server on this machine, if it has devices; a machine
    without any may be one from which jobs are only submitted."""
    problems, findings = examine_servers(spec, len(devices))
    if problems and devices:
        raise JobSpecError(problems)
    return [*(f"on this machine, {one}" for one in problems), *map(str, findings)]


def show_shares(spec: JobSpec, devices: Sequence[Device], console: Console) -> JobSpec:
    """Print how the job's engines and gangs share a machine's devices, what stays idle, and which
    numbers `auto` stands for. Return the job with these."""
    try:
        _, found = fill(spec, devices, NodeShares(colocate=bool(spec.colocated)))
    except InvalidArgument as error:
        console.print(f"note: {error}", markup=False, highlight=False, soft_wrap=True)
        return spec
    lines = [f"{field} = {found.values[field]} ({found.sources[field]})" for field in found.values]
    lines += [f"note: {sentence}" for sentence in found.notes]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return with_values(spec, found.values)


_GB: Final = 1 << 30
Kind = tuple[str, int]  # class and memory in bytes


def show_sizing(spec: JobSpec, devices: Sequence[Device], console: Console) -> bool:
    """Print the memory that each language-model policy needs; return whether each fits somewhere.

    Policies that share devices take turns, so each is judged separately.
    """
    kinds = Counter((one.device_class, one.memory) for one in devices)
    fitting = True
    for name, policy in spec.policies.items():
        if policy.model is None or policy.simulated is not None:
            continue
        shape = read_shape(policy.model)
        if shape is None:
            console.print(
                f"{name}: its size is unknown, because this machine cannot read the model's "
                "configuration or has no rule for its architecture; the trainer will measure it",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            continue
        fitting &= _show_policy(spec, name, shape, kinds, console)
    return fitting


def _show_policy(
    spec: JobSpec, name: str, shape: ModelShape, kinds: Counter[Kind], console: Console
) -> bool:
    rows = [_judged(spec, name, shape, kind, count) for kind, count in sorted(kinds.items())]
    setup, parts = rows[0].setup, sorted({part for row in rows for part in row.needed.parts})
    order = [part for part in RankMemory.__dataclass_fields__ if part in parts]
    about = "frozen" if not setup.trainable else "LoRA" if setup.adapter else "all weights"
    table = Table(
        title=f"{name}: {shape.parameters / 1e9:.2f} B parameters, {about}; GB on each device",
        title_justify="left",
    )
    for column in ("devices", "gang", *(part.replace("_", " ") for part in order), "total", ""):
        table.add_column(column, justify="left" if column in ("devices", "") else "right")
    for row in rows:
        found = row.needed.parts
        table.add_row(
            row.devices,
            str(row.setup.ranks),
            *(f"{found.get(part, 0) / _GB:.1f}" for part in order),
            f"{row.needed.total / _GB:.1f}",
            row.verdict,
        )
    console.print(table)
    return any(row.fits for row in rows)


class _Judged:
    """The memory that a policy needs on one kind of device, with the gang that the job asks for."""

    def __init__(
        self,
        devices: str,
        setup: TrainingSetup,
        needed: RankMemory,
        smallest: int | None,
        kind: Kind,
        count: int,
    ) -> None:
        self.devices, self.setup, self.needed = devices, setup, needed
        self.fits = setup.ranks <= count and needed.total <= SOLD * kind[1]
        if self.fits:
            smaller = smallest is not None and smallest < setup.ranks
            self.verdict = f"fits; smallest gang: {smallest}" if smaller else "fits"
        elif smallest is not None:
            self.verdict = f"does not fit; smallest gang that fits: {smallest}"
        elif setup.ranks > count:
            self.verdict = f"a gang of {setup.ranks} needs more devices"
        elif setup.adapter or not setup.trainable:
            self.verdict = "does not fit on its one device"
        else:
            self.verdict = f"does not fit, even on all {count}"


def _judged(spec: JobSpec, name: str, shape: ModelShape, kind: Kind, count: int) -> _Judged:
    device_class, memory = kind
    where = "cpu" if device_class.lower() == "cpu" else "cuda"

    def at(ranks: int | None) -> tuple[TrainingSetup, RankMemory]:
        setup = setup_of(spec, name, shape, device=where, memory=memory, ranks=ranks)
        return setup, rank_memory(shape, setup)

    setup, needed = at(None)
    sharded = not setup.adapter and setup.trainable
    sizes = range(1, count + 1) if sharded else (1,)
    smallest = next((size for size in sizes if at(size)[1].total <= SOLD * memory), None)
    label = f"{count} x {device_class} {memory / _GB:g} GB"
    return _Judged(label, setup, needed, smallest, kind, count)


@app.command(name="reference")
def write_reference(
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
) -> None:
    """Print the job reference in Markdown, generated from the fields' docstrings."""
    text = reference()
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


def load_with(path: Path, assignments: list[str]) -> JobSpec:
    """Load the job from a file and apply `--set` assignments. Raises `JobSpecError`."""
    if not assignments:
        return load_job(path)
    return job_of(apply_assignments(load_text(path), assignments, str(path)))


def apply_assignments(text: str, assignments: list[str], source: str = "the job") -> dict[str, Any]:
    """Return the mapping in YAML `text` with each `--set key.path=value` applied; `value` is YAML.

    Missing sections on the path are made. Validation comes later, so a misspelt field is refused
    just as in the file. Raises `JobSpecError`.
    """
    raw = read_mapping(text, source)
    for assignment in assignments:
        path, value = _parse_assignment(assignment)
        try:
            set_field(raw, path, value)
        except ValueError as error:
            raise _bad_assignment(assignment, str(error)) from error
    return raw


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--set key.path=value`, by path. Raises `JobSpecError`."""
    return {".".join(path): value for path, value in map(_parse_assignment, assignments)}


def _parse_assignment(assignment: str) -> tuple[list[str], Any]:
    key, equals, text = assignment.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise _bad_assignment(assignment, "is not of the form key.path=value")
    if len(path) > MAX_DEPTH:
        raise _bad_assignment(assignment, f"its path is longer than {MAX_DEPTH} names")
    try:
        return path, read_text(text, _VALUE)
    except UnreadableText as error:
        problem = f"{_VALUE} {error.problem}"
        if error.where != _VALUE:  # a place inside the value
            problem = f"its value is not YAML ({error.where}: {error.problem})"
        raise _bad_assignment(assignment, problem) from error


def _bad_assignment(assignment: str, message: str) -> JobSpecError:
    remedy = "Write for example `--set pipeline.steps=20`."
    shown = repr(assignment if len(assignment) <= 120 else assignment[:117] + "...")
    return JobSpecError([FieldProblem("--set", shown, message, remedy)])


def try_imports(job: JobSpec) -> list[str]:
    """Import the code that `job` names and try out functions of its algorithm; return the fields.

    Modules of the working directory are found, too. Raises `JobSpecError` with every entrypoint
    that cannot be imported, whatever its import raises, and `InvalidArgument` for files that cannot
    be sent with the job.
    """
    add_working_directory()
    if (code := job.code) is not None:
        root = Path(code.root).expanduser().resolve()
        collect(root, code.include, code.exclude)
        sys.path.insert(0, str(root))
    tried: list[str] = []
    problems: list[FieldProblem] = []
    for field, entrypoint in _entrypoints(job):
        tried.append(field)
        try:
            load = load_workflow if field == "workflow" else load_attribute
            if field.startswith("algorithm."):
                load = _load_own
            if not callable(load(entrypoint, field)):
                problems.append(
                    FieldProblem(field, entrypoint, "cannot be called", "Name a function or class.")
                )
        except EntrypointError as error:
            problems.append(FieldProblem(field, entrypoint, error.message, error.remedy or ""))
    if problems:
        raise JobSpecError(problems)
    return tried


def read_data(job: JobSpec) -> tuple[list[str], TaskSplit | None]:
    """Read the data sets of a job's tasks; return notes on the use of their rows, and the rows to
    train on, if they come from data sets.

    Raises `JobSpecError` for a data set that cannot be read as the job says.
    """
    sets = {f"evaluations.{name}.tasks": one.tasks for name, one in job.evaluations.items()}
    learned = {
        f"{name}.tasks": one.tasks
        for name, one in (("supervised", job.supervised), ("preferences", job.preferences))
        if one is not None
    }
    wanted = [
        (field, tasks)
        for field, tasks in {"tasks": job.tasks, **learned, **sets}.items()
        if tasks is not None and (tasks.dataset or tasks.mixed)
    ]
    count_tokens = None
    try:
        each = [one for _, tasks in wanted for one in (tasks, *tasks.mixed.values())]
        if any(one.max_tokens for one in each):
            from troupe.workflow.languages import load_language, token_counter

            count_tokens = token_counter(
                job,
                {
                    name: load_language(policy.language_model, f"policies.{name}.model")
                    for name, policy in job.policies.items()
                },
            )
        notes: list[str] = []
        problems: list[FieldProblem] = []
        rows: TaskSplit | None = None
        for field, tasks in wanted:
            evaluated = field in sets
            splits = ["held_out"] if evaluated else ["train"]
            if field == "tasks" and job.tasks is not None and job.tasks.holds_out:
                splits.append("held_out")
            training = None
            for split in splits:
                opened = open_tasks(
                    tasks,
                    split,
                    job.seed,
                    field=field,
                    count_tokens=count_tokens,
                    whole=evaluated,
                )
                if training is not None:
                    compare_splits(training, opened, field)
                training = None if evaluated else opened
                notes += opened.notes
                rows = opened if (field, split) == ("tasks", "train") else rows
                # Rewards score trajectories, not demonstrations.
                if any(one.source for one in tasks.every.values()):
                    continue
                if field in learned:
                    problems += _bad_rows(job, opened, field)
                else:
                    problems += _bad_references(job, opened)
                    problems += _bad_questions(job, opened, field)
    except (WorkflowError, TroupeError) as error:
        problem = FieldProblem(
            error.field or "tasks", error.value or "", error.message, error.remedy or ""
        )
        raise JobSpecError([problem]) from error
    if problems:
        raise JobSpecError(problems)
    return notes, rows


def _bad_rows(job: JobSpec, tasks: TaskSplit, field: str) -> Iterator[FieldProblem]:
    """Report the first row that a policy cannot learn from. The models' tokenizers need not be on
    this machine, so tokens are bytes, in a template without thoughts."""
    from troupe.workflow.trying.tokenizer import ByteTokenizer

    assert job.offline is not None, "its rows are tried"
    chat = ChatTokenizer(ByteTokenizer())
    learners = {
        name: Role(name, agent.policy, chat, Sampling(), agent.system_prompt)
        for name, agent in job.agents.items()
        if agent.policy in job.trained_policies
    }
    render = renderer_of(job.offline, learners)
    for number in range(min(len(tasks), TRIED_ROWS)):
        row = tasks[number]
        try:
            render(row)
        except WorkflowError as error:
            message = f"{error.message} (row {shown(row, 200)} of {tasks.source})"
            yield FieldProblem(field, "", message, error.remedy or "")
            break


def _bad_references(job: JobSpec, tasks: TaskSplit) -> Iterator[FieldProblem]:
    """Report, for each ready reward that compares replies with a reference, the first row without a
    usable reference."""
    rows = [tasks[number] for number in range(min(len(tasks), _TRIED_ROWS))]
    for name, reward in job.rewards.items():
        if reward.ready not in _COMPARING or reward.code is None:
            continue
        compare = load_attribute(reward.code, f"rewards.{name}.ready")
        for argument, field in reward.query_fields.items():
            for row in rows:
                try:
                    compare({"data": row}, [], {}, **reward.arguments)  # without any reply
                except ValueError as error:
                    message = f"{error} (row {shown(row, 200)} of {tasks.source})"
                    yield FieldProblem(f"rewards.{name}.arguments.{argument}", field, message, "")
                    break


def _bad_questions(job: JobSpec, tasks: TaskSplit, field: str) -> Iterator[FieldProblem]:
    """Report the first row that the ready workflow cannot ask."""
    if job.workflow != f"{ask.__module__}:{ask.__name__}":
        return
    for number in range(min(len(tasks), _TRIED_ROWS)):
        row = tasks[number]
        try:
            parse_messages(question_of(row), None)
        except WorkflowError as error:
            message = f"{error.message} (row {shown(row, 200)} of {tasks.source})"
            yield FieldProblem(f"{field}.columns", error.value or "", message, error.remedy or "")
            break


def _load_own(entrypoint: str, field: str) -> Any:
    """Try out a user's loss, correction or advantage on an example."""
    from troupe.algorithms.registry import OwnFunction  # torch takes seconds to import

    return OwnFunction(cast("Field", field.removeprefix("algorithm.")), entrypoint)


def _entrypoints(job: JobSpec) -> Iterator[tuple[str, str]]:
    """Return (field, entrypoint) of the code that a job names, without built-in and deployed
    code."""
    if job.workflow is not None:
        yield "workflow", job.workflow
    sources: dict[str, TasksSpec | None] = {"tasks": job.tasks}
    for name, rows in (("supervised", job.supervised), ("preferences", job.preferences)):
        sources[f"{name}.tasks"] = None if rows is None else rows.tasks
    for section, given in sources.items():
        if given is None:
            continue
        every = {section: given, **{f"{section}.mix.{n}": t for n, t in given.mixed.items()}}
        for field, tasks in every.items():
            if tasks.source:
                yield f"{field}.source", tasks.source
    if job.environment is not None and ":" in job.environment.source:
        yield "environment.source", job.environment.source
    for name in ("loss", "correction", "advantage"):
        if ":" in (path := getattr(job.algorithm, name) or ""):
            yield f"algorithm.{name}", path
    for section, functions in (("tools", job.tools), ("rewards", job.rewards)):
        for name, function in functions.items():
            if function.code is not None:
                kind = "entrypoint" if function.ready is None else "ready"
                yield f"{section}.{name}.{kind}", function.code
