"""`make demo`: warm-start two models, then train the team with RL on an embedded cluster.

Nothing here is special to the demo: it is `warm_start` followed by `troupe train`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
JOB = HERE / "job.yaml"


def main() -> None:
    """Warm-start, then become `troupe train` (so that Ctrl-C and exit status are its own)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=Path("runs"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    args = parser.parse_args()
    models = args.data_dir / "models" / f"reasoning_team-{args.seed}"
    warm_start = [sys.executable, "-m", "examples.reasoning_team.warm_start"]
    status = os.spawnv(
        os.P_WAIT,
        sys.executable,
        [*warm_start, "--out", str(models), "--seed", str(args.seed)],
    )
    if status != 0:
        raise SystemExit(status)
    changes = [
        f"seed={args.seed}",
        f"policies.solver.model.path={models / 'solver'}",
        f"policies.checker.model.path={models / 'checker'}",
        *args.set,
    ]
    command = [sys.executable, "-m", "troupe.client.cli", "train", str(JOB)]
    command += ["--data-dir", str(args.data_dir)]
    command += [part for change in changes for part in ("--set", change)]
    sys.stdout.flush()
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
