"""`troupe export`: a checkpoint as a folder that other programs load."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from troupe.checkpoints.card import rewards_in, rewards_of, write_card
from troupe.checkpoints.lineage import Lineage
from troupe.checkpoints.merging import is_adapter_folder, merge_in_place
from troupe.checkpoints.stopped import choose, copy_checkpoint, only_policy
from troupe.client.address import ADDRESS_VARIABLE, data_directory
from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.connection import call
from troupe.cluster.state import running_state
from troupe.rpc.errors import FailedPrecondition, InvalidArgument


def export(
    job_id: Annotated[
        str, typer.Argument(metavar="JOB", show_default=False, help="Id of the job.")
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", show_default=False, help="New directory.")
    ],
    policy: Annotated[str | None, typer.Option(help="Which policy; default: the only one.")] = None,
    version: Annotated[
        int | None, typer.Option(help="Checkpointed version; default: the newest.")
    ] = None,
    merged: Annotated[
        bool | None,
        typer.Option(
            "--merged/--adapter",
            help="Of a policy that trained an adapter: a whole model, or the adapter alone.",
            show_default="adapter",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="--merged: where the base is; default: where it was for the job."),
    ] = None,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Copy a checkpoint into DIR, where transformers, PEFT and SGLang load it; a small network's,
    `troupe.networks.exported`.

    From the cluster that runs, or else from the data directory of one that has stopped.
    """
    if base is not None and not merged:
        raise InvalidArgument(
            "is of use with --merged only.",
            field="--base",
            value=base,
            remedy="Add --merged, or leave --base out.",
        )
    root = data_directory(data_dir)
    if cluster or os.environ.get(ADDRESS_VARIABLE) or running_state(root) is not None:
        target, rewards = _from_cluster(job_id, directory, policy, version, cluster, data_dir)
    else:
        checkpoint = choose(root, job_id, policy, version)
        target = copy_checkpoint(checkpoint, directory)
        rewards = {}
    lineage = Lineage.read(target)
    if lineage is not None:
        rewards = rewards or rewards_in(root / job_id / "metrics.jsonl", lineage.step + 1)
        beside = root / job_id / "checkpoints" / ".base" / lineage.base_checksum
        if base is None and lineage.base_checksum and beside.is_dir():
            base = beside
    try:
        if merged and is_adapter_folder(target):
            merge_in_place(target, base)
        elif merged is False and not is_adapter_folder(target):
            raise FailedPrecondition(
                "the policy trained all weights, it has no adapter",
                kind="no_adapter",
                field="--adapter",
                remedy="Leave --adapter out: the export is the whole model.",
            )
        write_card(target, rewards)
    except BaseException:
        # Half of what was asked for is nothing, and would be in the way of the next try.
        shutil.rmtree(target, ignore_errors=True)
        raise
    name = lineage.policy if lineage is not None else policy or job_id
    Console().print(f"exported {name} to {target}", highlight=False, soft_wrap=True)


def _from_cluster(
    job_id: str,
    directory: Path,
    policy: str | None,
    version: int | None,
    cluster: str | None,
    data_dir: Path | None,
) -> tuple[Path, dict[str, float]]:
    async def ask(client: AsyncClient) -> tuple[Path, dict[str, float]]:
        job = client.job(job_id)
        wanted = policy
        if wanted is None:
            kept: dict[str, list[int]] = {}
            for one in await job.checkpoints():
                kept.setdefault(one.policy, []).append(one.version)
            wanted = only_policy(kept, None)
        target = await job.export(wanted, directory, version)
        lineage = await asyncio.to_thread(Lineage.read, target)
        if lineage is None or lineage.step < 0:
            return target, {}
        rows = await job.metrics(after_step=lineage.step)
        return target, next(
            (rewards_of(row.values) for row in rows if row.step == lineage.step + 1), {}
        )

    return call(ask, address=cluster, data_dir=data_dir)
