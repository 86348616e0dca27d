"""Loading of the workflow that `troupe workflow try` plays: from a job, a file or a module."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from troupe.data.tasks import TaskSplit, open_tasks
from troupe.functions import declaration_of
from troupe.functions.costs import DEFAULTS
from troupe.functions.library import mcp
from troupe.job import EngineSpec, FunctionSpec, JobSpec, ModelSpec, load_job
from troupe.job.sections.functions import ToolSpec
from troupe.replies.formats import parser_of
from troupe.rpc.errors import FailedPrecondition, InvalidArgument
from troupe.scheduling.defaults import EMBEDDED_CONTEXT, LONGEST_CONTEXT, context_of
from troupe.workflow.backend import EndpointOptions, Sampling
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.errors import EntrypointError
from troupe.workflow.languages import Language, load_language, role_of, token_counter
from troupe.workflow.loading import (
    Workflow,
    add_working_directory,
    load_attribute,
    load_module,
    load_workflow,
)
from troupe.workflow.samples import GroupBy
from troupe.workflow.trying.tokenizer import END_ID, ByteTokenizer
from troupe.workflow.turns import Role

JOB_SUFFIXES = (".yaml", ".yml", ".json")
ANY: Final = "model"
"""The policy of all agents of a workflow that is played without a job, by a model."""
_REMEDY = "Give a job file, `FILE.py`, `FILE.py:attribute` or `package.module:attribute`."


@dataclass(frozen=True)
class Setting:
    """A workflow, and the roles, tasks and functions of its job if there is one."""

    source: str
    """The workflow as `module:attribute`."""
    workflow: Workflow
    spec: JobSpec | None = None
    roles: Mapping[str, Role] | Callable[[str], Role] | None = None
    """Roles by name, or what makes the role of any name; None: every agent that the workflow uses,
    with bytes as tokens."""
    tasks: TaskSplit | None = None
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    contexts: Mapping[str, int] = field(default_factory=dict)
    """Context length in tokens by policy; policies whose tokens are bytes are left out."""
    models: Mapping[str, Path] | None = None
    """Directories of the models that play, by policy; None: none does."""
    notes: tuple[str, ...] = ()
    """Differences from a job, as messages."""

    @property
    def group_by(self) -> GroupBy:
        """Which samples share a baseline."""
        return self.spec.algorithm.grouping if self.spec else "agent"

    @property
    def own_groups(self) -> bool:
        """Whether the workflow's own groups (`Reply.group`) count."""
        return self.spec.algorithm.grouped_by_workflow if self.spec else True

    @property
    def trained(self) -> list[str] | None:
        """Policies that are trained; None: all."""
        return self.spec.trained_policies if self.spec else None

    @property
    def function_seconds(self) -> Mapping[str, float] | float:
        """Time limit of tools and reward functions, by `tools/name` and `rewards/name` or for
        all."""
        if self.spec is None:
            return 60.0
        sections: dict[str, Mapping[str, FunctionSpec]] = {
            "tools": self.spec.tools,
            "rewards": self.spec.rewards,
        }
        return {
            f"{section}/{name}": functions[getattr(function, "declared_as", name)].timeout_seconds
            or _declared(function).get("timeout_seconds", DEFAULTS["timeout_seconds"])
            for section, functions in sections.items()
            for name, function in getattr(self, section).items()
        }


def open_setting(
    source: str,
    job: Path | None = None,
    *,
    split: str = "train",
    models: Callable[[JobSpec | None], Mapping[str, Path]] | None = None,
) -> Setting:
    """Load what `source` names: a job file, `FILE.py[:attribute]` or `package.module:attribute`.

    With `job`, agents, tasks and functions come from that job, whose own workflow is ignored.
    Modules of the working directory are also found. `models`: the directory of the model that plays
    each policy, whose tokenizer must be there; None: stand-ins play, and bytes may be the tokens.
    Raises `JobSpecError`, `InvalidArgument`, `FailedPrecondition` and `EntrypointError`.
    """
    add_working_directory()
    if Path(source).suffix in JOB_SUFFIXES:
        if job is not None:
            raise InvalidArgument(
                "a job file was given twice", field="--job", value=str(job), remedy=_REMEDY
            )
        spec = load_job(source)
        if spec.workflow is None:
            raise InvalidArgument(
                "this job's policies are networks, so it has no workflow",
                field="environment",
                value=source,
                remedy="`troupe train` plays it; `Actor` in `troupe.networks` plays one policy "
                "alone.",
            )
        return _of_job(spec, spec.workflow, load_workflow(spec.workflow), split, models)
    entrypoint = _entrypoint(source)
    workflow = load_workflow(entrypoint)
    if job is not None:
        return _of_job(load_job(job), entrypoint, workflow, split, models)
    if models is None:
        return Setting(entrypoint, workflow)
    found = models(None)
    language = load_language(ModelSpec(path=str(found[ANY])), "--policy")
    return Setting(entrypoint, workflow, roles=partial(_open_role, language), models=found)


def _open_role(language: Language, name: str) -> Role:
    sampling = Sampling(stop_token_ids=language.eos_ids)
    return Role(name, ANY, language.chat, sampling)


def _of_job(
    spec: JobSpec,
    entrypoint: str,
    workflow: Workflow,
    split: str,
    models: Callable[[JobSpec], Mapping[str, Path]] | None,
) -> Setting:
    notes: list[str] = []
    found = None if models is None else models(spec)
    if found is not None:
        spec = _played_by(spec, found)
    languages = {
        name: _language(name, spec, notes)
        if found is None
        else load_language(spec.policies[name].language_model, f"policies.{name}.model")
        for name in dict.fromkeys(agent.policy for agent in spec.agents.values())
    }
    bytes_only = all(isinstance(language, _Bytes) for language in languages.values())
    return Setting(
        source=entrypoint,
        workflow=workflow,
        spec=spec,
        roles={name: _role(spec, name, languages) for name in spec.agents},
        tasks=open_tasks(spec.tasks, split, spec.seed, count_tokens=token_counter(spec, languages))
        if spec.tasks
        else None,
        tools=_functions(spec.tools, "tools"),
        rewards=_functions(spec.rewards, "rewards"),
        contexts={
            name: _context(spec.policies[name].engine, language)
            for name, language in languages.items()
            if not isinstance(language, _Bytes)
        },
        notes=tuple(notes[:1] if bytes_only and len(notes) > 1 else notes),
        models=found,
    )


def _played_by(spec: JobSpec, models: Mapping[str, Path]) -> JobSpec:
    """Return the job with the models in these directories. A tokenizer that the job names stays,
    unless the directory has one."""
    policies = dict(spec.policies)
    for name, path in models.items():
        own = any((path / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
        model = policies[name].language_model
        given = {"path": str(path), "config": None, "revision": None, "dtype": "float32"}
        given["tokenizer"] = None if own else model.tokenizer_source
        changed = {"model": model.model_copy(update=given), "lora": None}
        policies[name] = policies[name].model_copy(update=changed)
    return spec.model_copy(update={"policies": policies})


def _context(engine: EngineSpec, language: Language) -> int:
    """Return the context length in tokens; if an embedded engine chooses it, the shortest that it
    may have."""
    room = LONGEST_CONTEXT if engine.is_server else EMBEDDED_CONTEXT
    return context_of(engine.max_context, language.positions, room)


class _Bytes(Language):
    """Stand-in for a tokenizer that is not available here: tokens are bytes."""


def _role(spec: JobSpec, name: str, languages: Mapping[str, Language]) -> Role:
    agent = spec.agents[name]
    language = languages[agent.policy]
    if not isinstance(language, _Bytes):
        return role_of(spec, name, languages)
    given, model = agent.sampling, spec.policies[agent.policy].language_model
    sampling = Sampling(
        temperature=given.temperature,
        max_new_tokens=given.max_new_tokens,
        stop_token_ids=language.eos_ids,
        # One token of the real vocabulary can be several bytes.
        stop_strings=tuple(given.stop),
    )
    return Role(
        name,
        agent.policy,
        language.chat,
        sampling,
        agent.system_prompt,
        parser_of(model.tool_parser, model.reasoning_parser),
        model.chat_template_kwargs,
        EndpointOptions(agent.endpoint.lenient, agent.endpoint.sampling),
    )


def _language(policy: str, spec: JobSpec, notes: list[str]) -> Language:
    model = spec.policies[policy].language_model
    here = Path(model.tokenizer_source).expanduser().is_dir()
    try:
        if here:
            return load_language(model, f"policies.{policy}.model")
        why = f"there is no directory {model.tokenizer_source}"
    except FailedPrecondition as error:
        why = error.message
    notes.append(f"policies.{policy}.model: {why}; playing with bytes as tokens")
    return _Bytes(ChatTokenizer(ByteTokenizer()), (END_ID,))


def _functions(specs: Mapping[str, FunctionSpec], section: str) -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {}
    for name, spec in specs.items():
        if isinstance(spec, ToolSpec) and spec.mcp is not None:
            for served in mcp.tools_of(spec.mcp.model_dump(exclude={"offered", "prefix"}), name):
                if spec.mcp.offered is None or served.listed["name"] in spec.mcp.offered:
                    functions[spec.mcp.prefix + served.listed["name"]] = served
            continue
        where = f"{section}.{name}.entrypoint"
        if spec.code is None:
            raise InvalidArgument(
                "a deployed function runs in a cluster, but there is none here",
                field=f"{section}.{name}.function",
                value=spec.function,
                remedy="Name its `entrypoint` to try the workflow.",
            )
        function = load_attribute(spec.code, where)
        if not callable(function):
            raise EntrypointError(
                f"is a {type(function).__name__}, not a function",
                field=where,
                value=spec.code,
                remedy="Name a function.",
            )
        functions[name] = partial(function, **spec.arguments) if spec.arguments else function
    return functions


def _declared(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the costs that the function declares."""
    target = mcp.call if isinstance(function, mcp.McpTool) else getattr(function, "func", function)
    found = declaration_of(target)
    return {} if found is None else found.costs


def _entrypoint(source: str) -> str:
    """Return `module:attribute` of `source`, and make the module of a file importable."""
    file, colon, attribute = source.rpartition(":") if ":" in source else (source, "", "")
    if not file.endswith(".py"):
        if not colon or not attribute or not file:
            raise InvalidArgument(
                "this does not name a workflow", field="FILE", value=source, remedy=_REMEDY
            )
        return source
    path = Path(file).expanduser()
    if not path.is_file():
        raise InvalidArgument(
            "there is no such file", field="FILE", value=file, remedy="Check the path."
        )
    module = _importable(path.resolve())
    return f"{module}:{attribute or _only_workflow(module, file)}"


def _importable(path: Path) -> str:
    """Return the module name of a file, and put the directory above its package on `sys.path`."""
    names = [path.stem]
    above = path.parent
    while (above / "__init__.py").is_file():
        names.insert(0, above.name)
        above = above.parent
    name = ".".join(names)
    if str(above) not in sys.path:
        sys.path.insert(0, str(above))
    try:
        found = importlib.util.find_spec(name)
    except Exception:  # imports the packages above, which are user code
        found = None
    origin = found.origin if found is not None else None
    if origin is None or Path(origin).resolve() != path:
        raise InvalidArgument(
            f"`import {name}` finds {origin or 'nothing'} instead",
            field="FILE",
            value=str(path),
            remedy="Give the file another name, or name it as `package.module:attribute`.",
        )
    return name


def _may_be_workflow(value: Any, module: str) -> bool:
    if inspect.iscoroutinefunction(value):
        return value.__module__ == module and len(inspect.signature(value).parameters) == 3
    if inspect.isclass(value) or not inspect.iscoroutinefunction(
        getattr(type(value), "__call__", None)  # noqa: B004 - it must be an async one
    ):
        return False
    return len(inspect.signature(value).parameters) == 3


def _only_workflow(module: str, file: str) -> str:
    """Return the only function or object of the file that can be a workflow."""
    names: list[str] = [
        name
        for name, value in vars(load_module(module, "FILE", file)).items()
        if not name.startswith("_") and _may_be_workflow(value, module)
    ]
    if len(names) != 1:
        found = f"several workflows: {', '.join(names)}" if names else "no workflow"
        raise InvalidArgument(
            f"the file has {found}",
            field="FILE",
            value=file,
            remedy=f"Name one: `{file}:{names[0]}`."
            if names
            else "Write `async def workflow(query, agents, tools): ...`.",
        )
    return names[0]
