"""`troupe evaluate`: run a job's evaluations alone, on its models or on checkpoints.

It submits a job with `pipeline.steps: 0`, which only runs the evaluations before the first step.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from troupe.checkpoints.merging import is_adapter_folder, whole_model
from troupe.checkpoints.retention import none_such, versions_of_all
from troupe.checkpoints.verifying import Lineage, verify
from troupe.client.cli import options
from troupe.client.cli.specification import apply_assignments
from troupe.client.cli.train import TrainPlan, refuse_without_servers, run, settings_of_job
from troupe.cluster.state import running_state
from troupe.job import JobSpec, JobSpecError
from troupe.job.engines.sharing import AUTO, NEVER
from troupe.job.loading import SPEC_FILE, job_of, load_text
from troupe.rpc.errors import InvalidArgument

# The name of the unnamed section `evaluation` in this command.
UNNAMED = "evaluation"


@options.with_cluster_options(
    "data_dir", "rollouts", "threads", "start_timeout", "devices", "engine_devices"
)
def evaluate(
    settings: options.MakeSettings,
    target: Annotated[
        str,
        typer.Argument(
            metavar="JOB.yaml|JOB_ID|CHECKPOINT",
            help="A job file, to evaluate its initial models; a job's id, for its newest "
            "checkpoints; or the directory of a checkpoint.",
            show_default=False,
        ),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Run only the evaluation of this name (`{UNNAMED}`: the unnamed one). May be "
            "repeated.",
        ),
    ] = None,
    assignments: options.Assignments = None,
    version: Annotated[
        int | None, typer.Option(help="With a job's id: this version of every policy that has it.")
    ] = None,
    cluster: options.ClusterAddress = None,
) -> None:
    """Evaluate a job's models or checkpoints as its `evaluation` and `evaluations` specify.

    Starts an embedded cluster unless one runs here. Trainers and rollout workers must be able to
    read the checkpoints' paths.
    """
    cluster_settings = settings(panel=False)
    names = only or []
    for one in assignments or []:
        if "=" not in one:
            raise InvalidArgument(
                "is not an assignment KEY.PATH=VALUE",
                field="--set",
                value=one,
                remedy=f"To run only the evaluation of this name: --only {one}.",
            )
    source, checkpoints = found_checkpoints(target, version, cluster_settings.data_dir)
    raw = apply_assignments(load_text(source), assignments or [], str(source))
    scratch = Path(tempfile.mkdtemp(prefix="troupe-evaluate-"))
    try:
        for path in checkpoints.values():
            if is_adapter_folder(path):
                verify(path)
        models = {
            policy: whole_model(path, scratch / policy) for policy, path in checkpoints.items()
        }
        spec = _evaluated(raw, names, models)
        if cluster is None and running_state(cluster_settings.data_dir) is None:
            refuse_without_servers(spec)
        plan = TrainPlan(
            spec=spec,
            job_id=None,
            resume=None,
            address=cluster,
            keep_up=False,
            grace=20.0,
            settings=settings_of_job(spec, cluster_settings).resolved(),
        )
        raise typer.Exit(asyncio.run(run(plan, Console())))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _evaluated(raw: dict[str, Any], names: Collection[str], models: Mapping[str, Path]) -> JobSpec:
    """Return the job of `only_evaluated`. Raises `JobSpecError` for an invalid one, and
    `InvalidArgument` as that does."""
    try:
        return job_of(only_evaluated(raw, names, models))
    except JobSpecError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError):
        job_of(raw)  # names what is no mapping, or missing
        raise


# Sections about steps; an evaluation has no steps.
_OF_STEPS: Final = frozenset({"supervised", "preferences", "stop", "curriculum"})
# Parts of `algorithm` with models that only steps use, or that must fit the trained models.
_OF_LEARNING: Final = frozenset({"critic", "distillation"})


def only_evaluated(
    raw: Mapping[str, Any], names: Collection[str], models: Mapping[str, Path]
) -> dict[str, Any]:
    """Return the unvalidated job with no steps, the evaluations `names` (none: all) and the models
    of checkpoints by policy. Raises `InvalidArgument` if an evaluation is unknown or the job has
    none. A job whose sections are no mappings causes any error."""
    named = dict(raw.get("evaluations") or {})
    section = raw.get("evaluation") or {}
    known = [*([UNNAMED] if section.get("queries") else []), *named]
    for name in names:
        if name not in known:
            raise InvalidArgument(
                "is not an evaluation of the job",
                field="--only",
                value=name,
                remedy=f"The job has: {', '.join(known) or 'none; add the section `evaluations`'}.",
            )
    if not known:
        raise InvalidArgument(
            "the job has no evaluation",
            field="evaluations",
            remedy="Add the section `evaluations`, or `--set evaluation.queries=100`.",
        )
    chosen = names or known
    every = {UNNAMED: section, **named}
    algorithm = raw.get("algorithm") or {}
    unused = _without_use(
        raw,
        left_out=[one for name, one in every.items() if name not in chosen],
        kept=[one for name, one in every.items() if name in chosen],
    )
    policies = {name: dict(one) for name, one in raw["policies"].items() if name not in unused}
    _part(policies, models)
    for name, path in models.items():
        if "model" not in policies[name]:
            raise InvalidArgument(
                "checkpoints of small networks are not evaluated by jobs",
                field=f"policies.{name}.network",
                remedy="Play them with `troupe.networks.Actor` (docs/networks.md).",
            )
        policies[name].pop("init_from", None)
        model = {**policies[name]["model"], "path": str(path)}
        policies[name]["model"] = {
            n: v for n, v in model.items() if n not in ("config", "revision")
        }
        if policies[name].get("lora"):
            # Checkpoints contain the weights that the adapter changed.
            policies[name]["lora"] = {**policies[name]["lora"], "path": None}
    return {
        **{name: section for name, section in raw.items() if name not in _OF_STEPS},
        "policies": policies,
        "algorithm": {name: one for name, one in algorithm.items() if name not in _OF_LEARNING},
        "balancing": _balancing(raw, moved=bool(models)),
        "pipeline": {**raw["pipeline"], "steps": 0},
        "evaluation": section if UNNAMED in chosen else {},
        "evaluations": {name: one for name, one in named.items() if name in chosen},
        "checkpoint": {},
    }


def _without_use(
    raw: Mapping[str, Any], left_out: Iterable[Mapping[str, Any]], kept: Iterable[Mapping[str, Any]]
) -> set[str]:
    """Return the policies that only teach, or replace agents in evaluations that are left out: a
    job with a policy that nothing uses is refused."""
    unused, used = ({_replacing(one) for one in some} for some in (left_out, kept))
    distillation = (raw.get("algorithm") or {}).get("distillation") or {}
    unused |= set(distillation.get("teachers", {}).values())
    used |= {one.get("policy") for one in raw["agents"].values()}
    return {name for name in unused - used if name is not None}


def _replacing(evaluation: Mapping[str, Any]) -> str | None:
    """Return the policy that replaces agents in an evaluation."""
    by: str | None = (evaluation.get("contributions") or {}).get("by")
    return by


def _balancing(raw: Mapping[str, Any], *, moved: bool) -> dict[str, Any]:
    """Return the section `balancing`; `moved`: policies have other models than the job says, so
    that engines may no longer be able to serve each other's."""
    section = dict(raw.get("balancing") or {})
    return {**section, "inter": None} if moved and section.get("inter") else section


def _part(policies: Mapping[str, dict[str, Any]], models: Collection[str]) -> None:
    """Let policies with checkpoints, whose models have adapters merged into them, leave the groups
    of engines with one base that `engine.share` names."""
    groups = {(policies[name].get("engine") or {}).get("share") for name in models}
    for policy in policies.values():
        engine = policy.get("engine") or {}
        if engine.get("share") not in (None, AUTO, NEVER) and engine["share"] in groups:
            policy["engine"] = {**engine, "share": AUTO}


def found_checkpoints(
    target: str, version: int | None, data_dir: Path
) -> tuple[Path, dict[str, Path]]:
    """Return the job's file, and checkpoints by policy. Raises `InvalidArgument` and `NotFound`."""
    path = Path(target).expanduser()
    lineage = Lineage.read(path) if path.is_dir() else None
    # JOB/checkpoints/POLICY/VERSION
    job = path.resolve() / "../../.." / SPEC_FILE
    of_job = lineage is not None and job.is_file()
    if version is not None and (path.is_file() or of_job):
        raise InvalidArgument(
            "applies to a job's id, and this is a checkpoint"
            if of_job
            else "applies to a job's id, and this is a file, whose initial models are evaluated",
            field="--version",
            value=version,
            remedy="Leave --version out, or name the job by its id.",
        )
    if path.is_file():
        return path, {}
    if lineage is not None and of_job:
        return job.resolve(), {lineage.policy: path.resolve()}
    directory = path if (path / SPEC_FILE).is_file() else data_dir / target
    if not (directory / SPEC_FILE).is_file():
        raise InvalidArgument(
            "is neither a job file, nor a job in the data directory, nor a checkpoint in its job's "
            "directory",
            field="JOB.yaml|JOB_ID|CHECKPOINT",
            value=target,
            remedy="Name the data directory with --data-dir; to evaluate an exported checkpoint, "
            "name it as `policies.NAME.model.path` in a job file.",
        )
    kept = versions_of_all(directory)
    found = {
        policy: [one for at, one in versions if version in (None, at)]
        for policy, versions in kept.items()
    }
    chosen = {policy: paths[-1].resolve() for policy, paths in found.items() if paths}
    if not chosen:
        every = [f"{policy}@{at}" for policy, versions in kept.items() for at, _ in versions]
        raise none_such("any policy", version, every)
    return directory / SPEC_FILE, chosen
