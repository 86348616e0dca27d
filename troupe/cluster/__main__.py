"""`python -m troupe.cluster`: a supervisor on its own, as `troupe up` starts it.

Its settings are JSON on standard input: every user may read a process's arguments.
"""

from __future__ import annotations

import asyncio
import sys

from troupe.cluster.daemon import run_until_signal
from troupe.cluster.embedded import EmbeddedCluster
from troupe.cluster.settings import ClusterSettings
from troupe.rpc.errors import TroupeError


def main() -> int:
    """Run until a signal; the exit status is 1 when the cluster failed."""
    settings = ClusterSettings.model_validate_json(sys.stdin.read())
    cluster = EmbeddedCluster(settings, tell=lambda event: print(event, flush=True))
    try:
        asyncio.run(run_until_signal(cluster))
    except TroupeError as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
