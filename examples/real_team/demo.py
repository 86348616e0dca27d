"""`make demo-real`: fetches the model, then runs `troupe train` on this example's job."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from examples.real_team.model import make
from troupe.client.cli.failures import explain

JOB = Path(__file__).with_name("job.yaml")


def main() -> None:
    """Makes the model, then becomes `troupe train`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=Path("runs"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    args = parser.parse_args()
    try:
        model = make(args.data_dir / "models" / "smollm2-135m-instruct")
    except (Exception, KeyboardInterrupt) as error:
        lines, status = explain(error)
        print("\n".join(lines), file=sys.stderr)
        raise SystemExit(status) from None
    changes = [
        f"seed={args.seed}",
        f"policies.writer.model.path={model}",
        f"policies.critic.model.path={model}",
        *args.set,
    ]
    command = [sys.executable, "-m", "troupe.client.cli", "train", str(JOB)]
    command += ["--data-dir", str(args.data_dir)]
    command += [part for change in changes for part in ("--set", change)]
    sys.stdout.flush()
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
