"""`troupe slurm`: run a job as one Slurm allocation, head and nodes included.

The batch script runs on the first host. It starts the head there, a node on each host, and
`troupe train`. A directory that all hosts share keeps the state that outlasts the allocation
(Redis, jobs, checkpoints). When the same script is requeued or submitted again, it continues the
job from its last committed step.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from troupe.client.cli import options
from troupe.client.cli.specification import load_with
from troupe.cluster.inventory import NodeShares, fill
from troupe.devices import Device
from troupe.disks import own_directory
from troupe.job import JobSpec
from troupe.job.automatic import is_open
from troupe.rpc.errors import FailedPrecondition, InvalidArgument
from troupe.rpc.ids import check_name
from troupe.rpc.tokens import read_token

_TIME: Final = re.compile(r"([0-9]+-)?[0-9]+(:[0-9]{1,2}){0,2}")
# Time for the step in flight to end before the allocation does: pausing waits for it.
_LEAST_NOTICE: Final = 30

_SCRIPT: Final = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{resources}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={directory}/slurm-%j.out
#SBATCH --signal=B:TERM@{notice}
{further}
# Made by `troupe slurm`. When requeued, preempted or submitted again, it continues the job.
set -u
umask 077
cd {project}
shared={directory}
job={job_id}
troupe=({python} -m troupe.client.cli)
# Not on a command line, where every user could read it.
TROUPE_TOKEN=$(cat "$shared/token") || exit 1
export TROUPE_TOKEN
export OMP_NUM_THREADS=1 TROUPE_DATA_DIR="$shared/client"

address_of() {{ scontrol show node "$1" -o | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'; }}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Allocations that share a host need ports of their own.
head=$(address_of "$first"):$((20000 + SLURM_JOB_ID % 10000))

# This script runs on the first host. The head computes nothing.
CUDA_VISIBLE_DEVICES="" "${{troupe[@]}}" head --data-dir "$shared/head" \\
  --jobs-dir "$shared/jobs" --host 0.0.0.0 --advertise "${{head%:*}}" \\
  --port "${{head##*:}}" --panel-port $((30000 + SLURM_JOB_ID % 10000)) &
head_process=$!
# A directory of its own per node: supervisors lock theirs.
srun --overlap --nodes="$SLURM_NNODES" --ntasks-per-node=1 {step_resources}--job-name=nodes \\
  bash -c 'address=$(scontrol show node "$SLURMD_NODENAME" -o |
    sed -n "s/.*NodeAddr=\\([^ ]*\\).*/\\1/p"); exec "$@" --name "$SLURMD_NODENAME" \\
    --advertise "$address" --data-dir "$0/nodes/$SLURMD_NODENAME"' \\
  "$shared" "${{troupe[@]}}" node --head "$head" --jobs-dir "$shared/jobs" {node_options}&
node_step=$!

# The allocation ends soon, or somebody cancels it: pause the job after its step.
leave() {{
  trap '' TERM
  echo "troupe: pausing $job before the allocation ends"
  "${{troupe[@]}}" jobs pause "$job" --cluster "$head"
  status=0
}}
for _ in $(seq {start_seconds}); do
  {python} -m services.chassis.probe "$head" >/dev/null 2>&1 && break
  kill -0 $head_process 2>/dev/null || exit 1
  sleep 1
done
if "${{troupe[@]}}" jobs show "$job" --cluster "$head" >/dev/null 2>&1; then
  what=(--resume "$job")
else
  what=("$shared/job.yaml" --job-id "$job")
fi
"${{troupe[@]}}" train "${{what[@]}}" --cluster "$head" &
training=$!
trap leave TERM
wait $training
status=${{status:-$?}}
# After a signal `wait` returns at once, while the command is still running.
wait $training 2>/dev/null
kill -TERM $node_step 2>/dev/null
wait $node_step
kill -TERM $head_process 2>/dev/null
wait $head_process
exit $status
"""


def slurm(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", show_default=False)],
    nodes: Annotated[int, typer.Option(min=1, max=4096, help="Hosts.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=0, max=64, help="GPUs of each host; 0: compute on CPUs.")
    ] = 8,
    directory: Annotated[
        Path,
        typer.Option(
            "--shared-dir",
            help="Directory that all hosts share, for Redis, jobs and checkpoints.",
        ),
    ] = Path("runs"),
    job_id: Annotated[str | None, typer.Option(help="Id of the job; default: its name.")] = None,
    time: Annotated[str | None, typer.Option(metavar="[DAYS-]HH:MM:SS", help="Time limit.")] = None,
    notice: Annotated[
        int,
        typer.Option(min=_LEAST_NOTICE, help="Pause the job this many seconds before the limit."),
    ] = 600,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="Further option, such as --qos=high."),
    ] = None,
    engine_devices: Annotated[int | None, options.cluster_option("engine_devices")] = None,
    trainer_devices: Annotated[int | None, options.cluster_option("trainer_devices")] = None,
    devices_per_trainer: Annotated[
        int | None, options.cluster_option("devices_per_trainer")
    ] = None,
    assignments: options.Assignments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script; write and submit nothing.")
    ] = False,
) -> None:
    """Submit a job to Slurm as one allocation: a head, a node on each host, and the training.

    The job pauses some minutes before the time limit. When it is submitted again, or requeued by
    Slurm, it continues from the last committed step.
    """
    spec = load_with(job, assignments or [])
    name = job_id or re.sub(r"[^a-z0-9_-]+", "-", spec.name.lower()).strip("-") or "job"
    check_name("--job-id", name)
    if time is not None and not _TIME.fullmatch(time):
        raise InvalidArgument(
            "is not a time limit",
            field="--time",
            value=time,
            remedy="Write hours, minutes and seconds, such as 24:00:00 or 2-00:00:00.",
        )
    for one in option or ():
        if not one.startswith("--") or "\n" in one:
            raise InvalidArgument(
                "is not an option of sbatch",
                field="--sbatch",
                value=one,
                remedy="Write it as in a batch script, such as --sbatch=--qos=high.",
            )
    shares = NodeShares(engine_devices, trainer_devices, colocate=bool(spec.colocated))
    given = {
        "engine-devices": engine_devices,
        "trainer-devices": trainer_devices,
        "devices-per-trainer": devices_per_trainer or _per_trainer(spec, gpus_per_node, shares),
    }
    shared = directory.expanduser().absolute()
    gpus = f"--gpus-per-node={gpus_per_node}" if gpus_per_node else ""
    further = {"time": time, "partition": partition, "account": account}
    lines = [f"--{key}={value}" for key, value in further.items() if value] + (option or [])
    script = _SCRIPT.format(
        name=f"troupe-{name}",
        nodes=nodes,
        resources=f"#SBATCH {gpus}" if gpus else "#",
        directory=shlex.quote(str(shared)),
        notice=notice,
        further="\n".join(f"#SBATCH {line}" for line in lines),
        project=shlex.quote(os.getcwd()),
        job_id=shlex.quote(name),
        python=shlex.quote(sys.executable),
        step_resources=f"{gpus} " if gpus else "",
        node_options="".join(
            f"--{key} {value} " for key, value in given.items() if value is not None and gpus
        )
        + ("--colocate " if spec.colocated else ""),
        start_seconds=300,
    )
    if dry_run:
        print(script)
        return
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise FailedPrecondition(
            "sbatch is not installed on this machine",
            kind="slurm_missing",
            field="PATH",
            value=os.environ.get("PATH"),
            remedy="Run it on a login node of a Slurm cluster, or print the script: --dry-run.",
        )
    write_files(shared, script, spec.model_dump_json(exclude_unset=True))
    done = subprocess.run(
        [sbatch, str(shared / "troupe.sbatch")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FailedPrecondition(
            f"sbatch refused the job: {done.stderr.strip() or done.stdout.strip()}",
            kind="slurm_refused",
            field="sbatch",
            value=str(shared / "troupe.sbatch"),
            remedy="Correct the options: --nodes, --gpus-per-node, --time, --partition, --sbatch.",
        )
    console = Console()
    console.print(done.stdout.strip(), highlight=False)
    number = done.stdout.split()[-1] if done.stdout.split() else "%j"
    console.print(f"output in {shared}/slurm-{number}.out", highlight=False, soft_wrap=True)


def _per_trainer(spec: JobSpec, devices: int, shares: NodeShares) -> int | None:
    """Return the devices of one trainer worker of a host that has so many; None: it has none."""
    if not devices:
        return None
    if not is_open(spec):
        return min(max(p.trainer.ranks for p in spec.policies.values() if p.trainable), devices)
    chosen, _ = fill(spec, [Device(number, "gpu", 0) for number in range(devices)], shares)
    return chosen.devices_per_trainer


def write_files(shared: Path, script: str, spec: str) -> None:
    """Write the batch script, the job (JSON is YAML) and, once, the cluster's token.

    Raises `InvalidArgument` if another user may have made the directory or may know the token.
    """
    try:
        own_directory(shared)
    except OSError as error:
        raise InvalidArgument(
            f"cannot be used: {error.strerror or error}",
            field="shared_dir",
            value=str(shared),
            remedy="Name another directory with --shared-dir.",
        ) from error
    (shared / "troupe.sbatch").write_text(script)
    (shared / "job.yaml").write_text(spec)
    try:
        descriptor = os.open(shared / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        if read_token(shared / "token") is None:
            raise InvalidArgument(
                "is not a file that only you can read, so others may know the token",
                field="shared_dir",
                value=str(shared / "token"),
                remedy="Remove it; the command makes a new one.",
            ) from error
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
