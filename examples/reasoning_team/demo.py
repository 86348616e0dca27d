"""`make demo`: warm-start two models, then train the team with RL on an embedded cluster.

Nothing here is special to the demo: it is `warm_start` followed by `troupe train`, in one process,
so that Ctrl-C, SIGTERM and the exit status mean what they mean for either.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from examples.reasoning_team.endings import ending_in_a_line

HERE = Path(__file__).parent
JOB = HERE / "job.yaml"


def main() -> None:
    """Warm-start, then become `troupe train`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=Path("runs"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    args = parser.parse_args()
    models = args.data_dir / "models" / f"reasoning_team-{args.seed}"
    environment = dict(os.environ)  # as the user has it, before torch adds to it
    with ending_in_a_line():
        # Here, as it takes seconds: Ctrl-C meanwhile ends in a line, too.
        from examples.reasoning_team.warm_start import Settings, warm_start

        warm_start(models, Settings(seed=args.seed))
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
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
