"""`troupe generate`: use what a job trained."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.connection import call
from troupe.client.records import Generation

JobId = Annotated[str, typer.Argument(metavar="JOB", show_default=False, help="Id of the job.")]
Policy = Annotated[
    str, typer.Argument(metavar="POLICY", show_default=False, help="Name of the policy.")
]


def generate(
    job_id: JobId,
    policy: Policy,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", show_default=False, help="What to say; -: from stdin.")
    ],
    system: Annotated[str | None, typer.Option(help="System message before it.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Most likely tokens.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="For the same answer again.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 300.0,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Let a policy answer, at its newest version."""
    said = sys.stdin.read() if text == "-" else text
    messages = [{"role": "user", "content": said}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})

    async def ask(client: AsyncClient) -> Generation:
        return await client.job(job_id).generate(
            policy,
            messages,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            seed=seed,
            timeout=timeout,
        )

    answer = call(ask, address=cluster, data_dir=data_dir)
    print(json.dumps(dataclasses.asdict(answer)) if as_json else answer.text)
