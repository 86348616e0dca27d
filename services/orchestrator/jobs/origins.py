"""The checkpoints and training states that policies of a new job begin with (`init_from`).

They are found when the job is submitted, and the files of another job are linked into the new job's
directory: that job may delete them at any time, and every worker that binds the policy reads them.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from services.orchestrator.context import JobContext, Shared
from services.orchestrator.jobs.checkpoints import link_folder
from services.orchestrator.state.records import JobRecord
from troupe.checkpoints.retention import versions_of_all
from troupe.checkpoints.verifying import verify
from troupe.job import JobSpec
from troupe.job.loading import explained
from troupe.job.origins import Origin, check_optimizers, examine, with_origins
from troupe.job.sections.policy import InitFromSpec
from troupe.rpc import InvalidArgument, NotFound, ResourceExhausted
from troupe.storage import UrlPlace, fetch_folder, is_url
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

# The folder of a job's directory with its policies' origins.
FOLDER: Final = "init"
_CONFIGURATIONS: Final = ("config.json", "adapter_config.json")


async def resolve_origins(shared: Shared, directory: Path, spec: JobSpec) -> dict[str, Origin]:
    """Find and check what policies of a job begin with, and keep it for a job in `directory`.

    Raises `InvalidArgument` naming the field: for a job, policy or version that does not exist, a
    checkpoint of another architecture, an optimizer state that is not kept or does not fit, or a
    checkpoint with which the job is not valid.
    """
    # An earlier submission with this id may have been refused after it had linked files here.
    await asyncio.to_thread(shutil.rmtree, directory / FOLDER, ignore_errors=True)
    found = {}
    for name, policy in spec.policies.items():
        if policy.init_from is None or name in spec.slots:
            continue
        if policy.init_from.job is not None:
            found[name] = await _of_job(shared, directory, spec, name, policy.init_from)
        else:
            found[name] = await asyncio.to_thread(_of_path, spec, name, policy.init_from)
    try:
        with_origins(spec, found, directory)
    except ValidationError as error:
        # A whole checkpoint is another base than the policies which share its engines have.
        first = explained(error, JobSpec)[0]
        raise InvalidArgument(
            first.message, kind="init_from_mismatch", field=first.field, remedy=first.remedy
        ) from error
    return found


async def _of_job(
    shared: Shared, directory: Path, spec: JobSpec, name: str, given: InitFromSpec
) -> Origin:
    field = f"policies.{name}.init_from"
    assert given.job is not None, "the caller has looked"
    try:
        record = await shared.store.get(given.job)
        source = record.spec()
    except NotFound as error:
        raise InvalidArgument(
            "there is no such job",
            kind="job_not_found",
            field=f"{field}.job",
            value=given.job,
            remedy="`troupe jobs list` shows the jobs; a job that was forgotten is named by the "
            "path of its checkpoint.",
        ) from error
    try:
        theirs = record.policy_of(given.policy or name)
    except NotFound as error:
        raise InvalidArgument(
            f"job {given.job} has no policy of this name",
            kind="policy_not_found",
            field=f"{field}.policy",
            value=given.policy or name,
            remedy=error.remedy,
        ) from error
    if source.policies[theirs].model is None:
        raise InvalidArgument(
            f"is a network in job {given.job}, and this policy has a model",
            kind="init_from_mismatch",
            field=f"{field}.policy",
            value=theirs,
            remedy="Name a policy that is a language model.",
        )
    there = dict((await asyncio.to_thread(versions_of_all, record.directory)).get(theirs, []))
    version = max(there, default=None) if given.version is None else given.version
    if version is None or version not in there:
        raise InvalidArgument(
            f"job {given.job} has no checkpoint of {theirs}"
            + ("" if version is None else f" at version {version}"),
            kind="checkpoint_not_found",
            field=f"{field}.version",
            value="newest" if version is None else version,
            remedy=f"There are: {', '.join(map(str, sorted(there))) or 'none'}. Checkpoints are "
            "written every `checkpoint.every` steps and after the last.",
        )
    value = f"{given.job}@{version}"
    adapter = await asyncio.to_thread(examine, field, spec.policies[name], there[version], value)
    if adapter:
        _check_base(field, spec, name, record, theirs, value)
    place = Path(FOLDER) / name / f"v{version}"
    origin = Origin(str(place), given.job, theirs, version, "", adapter, given.optimizer)
    if given.optimizer:
        field = f"{field}.optimizer"
        check_optimizers(field, name, spec, source, theirs)
        await _hold_state(shared, directory, name, record, origin, field)
    await _hold(there[version], directory / place, field)
    return origin


async def _hold(source: Path, target: Path, field: str) -> None:
    """Link a directory of another job into a new one's."""
    try:
        await asyncio.to_thread(link_folder, source, target)
    except FileNotFoundError as error:
        raise InvalidArgument(
            f"{source} was deleted meanwhile",
            kind="checkpoint_not_found",
            field=field,
            value=source.name,
            remedy="Submit the job again, or name a newer version.",
        ) from error
    except OSError as error:
        raise ResourceExhausted(
            f"{target} cannot be written: {error.strerror}",
            kind="storage_full",
            field="data_dir",
            value=target,
            remedy="Free space on the orchestrator's host, or set TROUPE_DATA_DIR elsewhere.",
        ) from error


async def _hold_state(
    shared: Shared, directory: Path, name: str, record: JobRecord, origin: Origin, field: str
) -> None:
    """Keep the training state of an origin. One that only other hosts have is fetched by the
    trainer that binds the policy."""
    folder = record.directory / "state" / origin.policy
    states = await asyncio.to_thread(lambda: sorted(folder.glob("v*-*")))
    versions = {int(one.name[1:].partition("-")[0]): one for one in states}
    if (state := versions.get(origin.version)) is not None:
        return await _hold(state, directory / FOLDER / "state" / name / state.name, field)
    trainers = shared.workers.usable(orchestrator_pb.WORKER_KIND_TRAINER)
    if len({worker.beat.host_id for worker in trainers}) > 1:
        return None
    raise InvalidArgument(
        f"no optimizer state of {origin.policy} at version {origin.version} of job {origin.job} is "
        "kept",
        kind="state_not_found",
        field=field,
        value="true",
        remedy=f"States are kept of versions {', '.join(map(str, sorted(versions))) or 'none'}; or "
        "begin with the weights only (`optimizer: false`).",
    )


def _check_base(
    field: str, spec: JobSpec, name: str, record: JobRecord, theirs: str, value: str
) -> None:
    """Raise `InvalidArgument` unless an adapter's base is the policy's model: in the job `record`,
    the model, or the checkpoint that replaced it (`init_from`)."""
    source = with_origins(record.spec(), record.origins, record.directory)
    ours, its = (one.language_model for one in (spec.policies[name], source.policies[theirs]))
    if (ours.path, ours.config, ours.revision) != (its.path, its.config, its.revision):
        replaced = its.path != record.spec().policies[theirs].language_model.path
        remedy = f"Give policies.{name}.model the `model` of that job's policy."
        if replaced:
            remedy = (
                f"Set policies.{name}.model.path to that directory, or export the adapter merged "
                "(`troupe export --merged`) and begin with the exported directory."
            )
        raise InvalidArgument(
            f"is an adapter of another base, {its.path or 'of random weights'}",
            kind="init_from_mismatch",
            field=field,
            value=value,
            remedy=remedy,
        )
    if its.path is None and spec.seed != source.seed:
        raise InvalidArgument(
            f"is an adapter of random weights, which follow from the seed {source.seed} of job "
            f"{record.job_id}",
            kind="init_from_mismatch",
            field=field,
            value=value,
            remedy=f"Set `seed` to {source.seed}, as in that job.",
        )


def _of_path(spec: JobSpec, name: str, given: InitFromSpec) -> Origin:
    """Return the origin of a checkpoint at a path or URL. Blocking."""
    field, policy = f"policies.{name}.init_from.path", spec.policies[name]
    assert given.path is not None, "the caller has looked"
    if not is_url(given.path):
        folder = Path(given.path).absolute()
        return Origin(str(folder), adapter=examine(field, policy, folder, given.path))
    shown = UrlPlace(given.path, field).name
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "configuration"
        fetch_folder(given.path, folder, field, _CONFIGURATIONS)
        adapter = examine(field, policy, folder, shown)
    return Origin(str(Path(FOLDER) / name / "fetched"), url=shown, adapter=adapter)


async def fetch_origins(job: JobContext, origins: Mapping[str, Origin]) -> None:
    """Fetch the checkpoints that a job's policies begin with from their URLs, once.

    Raises as `fetch_folder`, and `DataLoss` for a checkpoint whose files are not what was written.
    """
    for name, origin in origins.items():
        target = job.directory / origin.path
        if not origin.url or await asyncio.to_thread(target.is_dir):
            continue
        given = job.spec.policies[name].init_from
        assert given is not None, "it has an origin"
        assert given.path is not None, "it has a URL"
        field = f"policies.{name}.init_from.path"
        job.show(f"fetching what {name} begins with from {origin.url}")
        await asyncio.to_thread(fetch_folder, given.path, target, field)
        await asyncio.to_thread(verify, target, called=origin.url)
        await job.info(f"{name} begins with {origin.url}")
