"""The command `troupe export`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from troupe.checkpoints.hub import HubRepository, is_export, rewards_in, rewards_of, write_card
from troupe.checkpoints.merging import ByteBar, is_adapter_folder, merge_in_place
from troupe.checkpoints.retention import choose, copy_files, only_policy, played_in
from troupe.checkpoints.verifying import LINEAGE, Lineage
from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.options import byte_bar, call
from troupe.client.discovery import ADDRESS_VARIABLE, data_directory
from troupe.cluster.state import running_state
from troupe.job.spec import policy_of
from troupe.rpc.errors import FailedPrecondition, InvalidArgument, NotFound
from troupe.storage import LocalPlace, Place, place_at


def export(
    job_id: options.JobId,
    directory: options.ExportTarget,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policy, or an agent that it plays; default: the only policy.",
            autocompletion=options.complete_policies,
        ),
    ] = None,
    version: Annotated[
        int | None, typer.Option(help="Checkpointed version; default: the newest.")
    ] = None,
    merged: Annotated[
        bool | None,
        typer.Option(
            "--merged/--adapter",
            help="If the policy trained an adapter: export a whole model, or the adapter alone.",
            show_default="adapter",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="Path of the base for --merged; default: the job's path."),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Also upload it to this repository (HF_TOKEN, HF_ENDPOINT), private if new.",
        ),
    ] = None,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Copy a checkpoint into DIR. transformers, PEFT and SGLang load it from there;
    `troupe.networks.exported` loads a small network.

    The checkpoint comes from the running cluster, or from the data directory of a stopped one.
    Repeat the command after a failed upload: it continues, without copying again to DIR.
    """
    place = place_at(directory, "DIR")
    if base is not None and not merged:
        raise InvalidArgument(
            "needs --merged",
            field="--base",
            value=base,
            remedy="Add --merged, or leave --base out.",
        )
    repository, lineage = None, None
    if push_to_hub is not None:
        if not isinstance(place, LocalPlace):
            raise InvalidArgument(
                "must be a directory on this host, so that a failed upload can be repeated from it",
                field="DIR",
                value=directory,
                remedy="Name a directory, or leave --push-to-hub out.",
            )
        repository = HubRepository(push_to_hub)
        lineage = _earlier(place.path, job_id, policy, version, merged, cluster, data_dir)
    if lineage is None:
        lineage = _export(job_id, place, policy, version, merged, base, cluster, data_dir)
    name = lineage.policy if lineage is not None else policy or job_id
    say = Console().print
    say(f"exported {name} to {place.name}", highlight=False, soft_wrap=True)
    if repository is not None:
        label = name if lineage is None else f"{lineage.job}: {name} @ {lineage.version}"
        address = repository.upload(Path(place.name), label)
        say(f"uploaded to {address}", highlight=False, soft_wrap=True)


def _earlier(
    folder: Path,
    job_id: str,
    policy: str | None,
    version: int | None,
    merged: bool | None,
    cluster: str | None,
    data_dir: Path | None,
) -> Lineage | None:
    """Return the lineage of the export that an earlier command with these options left in `folder`;
    None: there is none, or another one."""
    found = Lineage.read(folder)
    if found is None or (merged is not None and merged == is_adapter_folder(folder)):
        return None
    if policy not in (None, found.policy) and found.job_id == job_id:
        # An agent's name.
        root = data_directory(data_dir)
        if _is_up(root, cluster):
            spec = call(cluster, data_dir, lambda client: client.job(job_id).info()).spec
            policy = policy_of(spec, policy)
        else:
            policy = played_in(root / job_id, policy)
    if not is_export(folder, job_id, policy, version):
        return None
    if version is None and _superseded(found, cluster, data_dir):
        return None
    return found


def _superseded(found: Lineage, cluster: str | None, data_dir: Path | None) -> bool:
    """Return whether the job has another checkpoint by now that exports without a version take."""
    root = data_directory(data_dir)
    if not _is_up(root, cluster):
        try:
            newest = Lineage.read(choose(root, found.job_id, found.policy, None))
        except NotFound:  # only the export is left
            return False
        return newest is not None and newest.version != found.version

    async def newer(client: AsyncClient) -> bool:
        job = client.job(found.job_id)
        stop = (await job.info()).spec.get("stop") or {}
        if stop.get("best") == "exported":
            return False  # the cluster knows which one is the best
        versions = [o.version for o in await job.checkpoints() if o.policy == found.policy]
        return max(versions, default=found.version) > found.version

    try:
        return call(cluster, data_dir, newer)
    except NotFound:  # the cluster has forgotten the job
        return False


def _is_up(root: Path, cluster: str | None) -> bool:
    """Return whether a cluster is named, or runs in the data directory `root`."""
    return _is_named(cluster) or running_state(root) is not None


def _is_named(cluster: str | None) -> bool:
    """Return whether the user names a cluster, which may have another data directory."""
    return bool(cluster or os.environ.get(ADDRESS_VARIABLE))


def _export(
    job_id: str,
    place: Place,
    policy: str | None,
    version: int | None,
    merged: bool | None,
    base: Path | None,
    cluster: str | None,
    data_dir: Path | None,
) -> Lineage | None:
    """Write the export to `place`, or leave nothing there; return its lineage."""
    root = data_directory(data_dir)
    # An incomplete export is useless, and its directory would block the next attempt.
    with place.new_folder(last=LINEAGE) as draft, byte_bar() as progress:
        rewards: dict[str, float] | None = None
        if _is_up(root, cluster):
            try:
                rewards = _from_cluster(job_id, draft, policy, version, cluster, data_dir, progress)
            except NotFound as error:
                # A job that this cluster has forgotten: its checkpoints stay in its directory.
                forgotten = error.field == "job_id" and not _is_named(cluster)
                if not (forgotten and (root / job_id / "checkpoints").is_dir()):
                    raise
        if rewards is None:
            checkpoint = choose(root, job_id, policy, version)
            add = progress("copying", sum(one.stat().st_size for one in checkpoint.rglob("*")))
            copy_files(checkpoint, draft, add)
            rewards = {}
        _finish(draft, rewards, root, job_id, merged, base, progress)
        return Lineage.read(draft)


def _finish(
    target: Path,
    rewards: Mapping[str, float],
    root: Path,
    job_id: str,
    merged: bool | None,
    base: Path | None,
    progress: ByteBar,
) -> None:
    """Merge the copied adapter if the user wants that, and write the model card."""
    lineage = Lineage.read(target)
    if lineage is not None:
        rewards = rewards or rewards_in(root / job_id / "metrics.jsonl", lineage.step + 1)
        kept = root / job_id / "checkpoints" / ".base" / lineage.base_checksum
        if base is None and lineage.base_checksum and kept.is_dir():
            base = kept
    if merged and is_adapter_folder(target):
        merge_in_place(target, base, progress)
    elif merged is False and not is_adapter_folder(target):
        raise FailedPrecondition(
            "the policy trained all weights; it has no adapter",
            kind="no_adapter",
            field="--adapter",
            remedy="Leave --adapter out: the export is the whole model.",
        )
    write_card(target, rewards)


def _from_cluster(
    job_id: str,
    directory: Path,
    policy: str | None,
    version: int | None,
    cluster: str | None,
    data_dir: Path | None,
    progress: ByteBar,
) -> dict[str, float]:
    """Export from a running cluster into `directory`; return the rewards of the version's step."""

    async def export(client: AsyncClient) -> dict[str, float]:
        job = client.job(job_id)
        listed = await job.checkpoints()
        wanted = policy
        if wanted is None:
            wanted = only_policy(dict.fromkeys(one.policy for one in listed), None)
        else:
            wanted = policy_of((await job.info()).spec, wanted)
        of_it = [o for o in listed if o.policy == wanted and version in (None, o.version)]
        add = progress("copying", of_it[-1].num_bytes if of_it else 0)
        target = await job.export(wanted, directory, version, progress=add)
        lineage = await asyncio.to_thread(Lineage.read, target)
        if lineage is None or lineage.step < 0:
            return {}
        rows = await job.metrics(after_step=lineage.step)
        return next((rewards_of(row.values) for row in rows if row.step == lineage.step + 1), {})

    return call(cluster, data_dir, export)
