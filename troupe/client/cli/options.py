"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from troupe.client.address import data_directory
from troupe.cluster.settings import ClusterSettings

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Directory of jobs, logs and the cluster's state; default: $TROUPE_DATA_DIR or runs.",
        show_default=False,
    ),
]
ClusterAddress = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="HOST:PORT",
        help="Orchestrator to use; default: the cluster that runs in the data directory.",
        show_default=False,
    ),
]
Rollouts = Annotated[int | None, typer.Option(help="Rollout workers to start.")]
Trainers = Annotated[int | None, typer.Option(help="Trainer workers to start.")]
Threads = Annotated[
    int | None, typer.Option(help="Threads per rollout and trainer worker; default: fair shares.")
]
PanelPort = Annotated[
    int | None, typer.Option(help="Port of the control panel; default: 8080 or a free one.")
]
Panel = Annotated[bool, typer.Option("--panel/--no-panel", help="Start the control panel.")]
RedisUrl = Annotated[
    str | None, typer.Option(help="A Redis that runs already, instead of an embedded one.")
]
RedisPort = Annotated[int | None, typer.Option(help="Port of the embedded Redis.")]
StartTimeout = Annotated[
    float, typer.Option(help="Seconds that a service may take until it is ready.")
]
TrainerIdleSeconds = Annotated[
    float | None,
    typer.Option(
        help="End trainers that no policy has wanted for so long, until one does; default: never."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Change a field of the job, e.g. --set pipeline.steps=20. May be repeated.",
    ),
]


def cluster_settings(
    *,
    data_dir: Path | None,
    rollouts: int | None,
    trainers: int | None,
    threads: int | None,
    panel: bool,
    panel_port: int | None,
    redis_url: str | None,
    redis_port: int | None,
    start_timeout: float,
    trainer_idle_seconds: float | None = None,
) -> ClusterSettings:
    """Settings from options. Raises `InvalidArgument` naming the option that is out of range."""
    from pydantic import ValidationError

    from troupe.rpc.errors import InvalidArgument

    try:
        return ClusterSettings(
            data_dir=data_directory(data_dir),
            rollouts=1 if rollouts is None else rollouts,
            trainers=1 if trainers is None else trainers,
            threads=threads,
            panel=panel,
            panel_port=panel_port,
            redis_url=redis_url,
            redis_port=redis_port,
            start_seconds=start_timeout,
            trainer_idle_seconds=trainer_idle_seconds,
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        option = {"start_seconds": "start-timeout"}.get(name, name.replace("_", "-"))
        raise InvalidArgument(
            f"{first['msg']}.", field=f"--{option}", value=first["input"]
        ) from error
