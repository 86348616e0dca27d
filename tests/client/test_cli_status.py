"""`troupe status` of a cluster whose orchestrator is a double: engines that policies share."""

from __future__ import annotations

from pathlib import Path

from tests.client.conftest import Run, Stage
from tests.support.fake_orchestrator import shared_engines
from troupe.client import Client


def test_status_shows_which_policies_share_an_engine_and_their_versions(
    run: Run, cluster: Stage, running: Path
) -> None:
    assert "shared engine" not in run("status", "--data-dir", str(running))[1]
    cluster.fake.engines = shared_engines("mine")
    _, out, _ = run("status", "--data-dir", str(running))
    assert (
        "shared engine mine.solver.0@r0: solver v5 (and v4) healthy, 2 running; "
        "critic v7 healthy, 1 running\n"
    ) in out


def test_the_sdk_says_what_an_engine_shares_and_which_versions_it_holds(cluster: Stage) -> None:
    cluster.fake.engines = shared_engines("mine")
    with Client() as client:
        alone, solver, critic = client.cluster().engines
    assert (alone.host, alone.live_versions) == ("", ())
    assert solver.host == critic.host == solver.id
    assert solver.live_versions == (4, 5)
    assert (solver.versions, critic.versions) == ("v5 (and v4)", "v7")
