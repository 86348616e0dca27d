"""`python -m troupe.cluster SETTINGS_JSON`: a supervisor on its own, as `troupe up` starts it.

`-` for settings that hold passwords: they are read from standard input then.
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
    given = sys.stdin.read() if sys.argv[1] == "-" else sys.argv[1]
    settings = ClusterSettings.model_validate_json(given)
    cluster = EmbeddedCluster(settings, tell=lambda event: print(event, flush=True))
    try:
        asyncio.run(run_until_signal(cluster))
    except TroupeError as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
