"""The memory that ended jobs leave occupied in a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.standing import Standing, stand_up
from troupe.cluster.settings import ClusterSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with stand_up(tmp_path_factory.mktemp("ended")) as found:
        yield found


def states_of(standing: Standing) -> set[str]:
    """Return the jobs whose weights or other states are in the host's memory."""
    directory = ClusterSettings(data_dir=standing.data_dir).resolved().transfer_dir
    assert directory is not None
    held = (one for root in (directory, standing.data_dir / "transfer") for one in jobs_in(root))
    return set(held)


async def functions_of(standing: Standing) -> set[str]:
    """Return the jobs whose functions the reward service knows."""
    async with standing.client() as client:
        names = [one.name for one in await client.functions.list()]
        return {name.partition("/")[0] for name in names if name.startswith("ended-")}


def jobs_in(root: Path) -> list[str]:
    """Return the names of directories with files, without the transfer layer's own."""
    if not root.is_dir():
        return []
    found = [one for one in root.iterdir() if one.is_dir() and any(one.rglob("*"))]
    return [one.name for one in found if one.name.startswith("ended-")]


async def test_weights_go_with_the_next_job_and_generate_brings_them_back(
    standing: Standing,
) -> None:
    for number in range(4):
        name = f"ended-{number}"
        ended = await standing.run(standing.yaml(name=name), name)
        assert ended.job.state == "succeeded"
        assert states_of(standing) == {name}
        assert await functions_of(standing) == {name}
    bad = standing.yaml("tests.support.bad_team:raises", name="ended-bad")
    ended = await standing.run(bad, "ended-bad")
    assert ended.job.state == "failed"
    assert states_of(standing) == set()
    assert await functions_of(standing) == set()
    async with standing.client() as client:
        reply = await client.job("ended-1").generate("solver", "a?", max_new_tokens=4)
        assert reply.version == 2
        assert states_of(standing) == {"ended-1"}
        await client.job("ended-1").forget()
        assert states_of(standing) == set()
        listed = [job.id for job in await client.jobs()]
        assert listed == ["ended-0", "ended-2", "ended-3", "ended-bad"]
