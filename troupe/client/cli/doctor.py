"""`troupe doctor`: what this host has and lacks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from troupe.client.cli import options
from troupe.client.cli.failures import FAILED
from troupe.doctor.examination import examine
from troupe.doctor.findings import Finding, Verdict
from troupe.job.engines import KINDS, server_kinds
from troupe.rpc import InvalidArgument

_STYLES: Final = {Verdict.GOOD: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


def doctor(
    servers: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="KIND=PYTHON",
            help="The Python of an inference server's environment, such as "
            "sglang=~/sglang/bin/python. May be repeated. Default: TROUPE_SGLANG_PYTHON and "
            "TROUPE_VLLM_PYTHON.",
        ),
    ] = None,
    redis_url: Annotated[
        str,
        typer.Option(
            envvar="TROUPE_REDIS_URL", help="A Redis of yours. Default: the embedded one."
        ),
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """Check this host: driver, devices, torch, inference servers, memory, limits, network, Redis,
    sandboxes. Exit status 1 if jobs would fail."""
    findings = asyncio.run(examine(redis_url, _named(servers) if servers else None))
    if as_json:
        print(json.dumps([asdict(one) for one in findings], indent=2))
    else:
        _print(Console(), findings)
    raise typer.Exit(FAILED if any(one.verdict is Verdict.PROBLEM for one in findings) else 0)


def _named(servers: list[str]) -> dict[str, str]:
    named = {}
    for text in servers:
        kind, _, python = text.partition("=")
        if not (kind in KINDS and KINDS[kind].is_server and python):
            raise InvalidArgument(
                "is not KIND=PYTHON",
                field="--server",
                value=text,
                remedy=f"KIND is {server_kinds()}: --server sglang=~/sglang/bin/python.",
            )
        named[kind] = python
    return named


def _print(console: Console, findings: list[Finding]) -> None:
    for one in findings:
        style = _STYLES[one.verdict]
        console.print(
            f"[{style}]{one.verdict:<8}[/] {one.subject:<14} {escape(one.text)}",
            highlight=False,
            soft_wrap=True,
        )
        if one.remedy:
            console.print(f"{'':<24}{escape(one.remedy)}", highlight=False, soft_wrap=True)
