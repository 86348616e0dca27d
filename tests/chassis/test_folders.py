"""A folder as a stream, and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.chassis.folders import read_folder, write_folder
from troupe.rpc import DataLoss
from troupe.v1.trainer_pb2 import ReadCheckpointResponse


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Small, empty, nested, and longer than a chunk."""
    root = tmp_path / "source"
    (root / "below").mkdir(parents=True)
    (root / "config.json").write_text("{}")
    (root / "empty").touch()
    (root / "below" / "large").write_bytes(bytes(range(256)) * 5000)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


async def changed(source: Path, **changes: object) -> AsyncIterator[ReadCheckpointResponse]:
    """The chunks of `source`, the last one changed."""
    chunks = [chunk async for chunk in read_folder(source, ReadCheckpointResponse)]
    for chunk in chunks[:-1]:
        yield chunk
    for name, value in changes.items():
        setattr(chunks[-1], name, value)
    yield chunks[-1]


async def test_a_streamed_folder_arrives_unchanged(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "there" / "v3"
    size = await write_folder(target, read_folder(source, ReadCheckpointResponse))
    assert contents(target) == contents(source)
    assert size == 2 + 256 * 5000
    # Again: existing files stay.
    (target / "config.json").write_text("{1}")
    await write_folder(target, read_folder(source, ReadCheckpointResponse))
    assert (target / "config.json").read_text() == "{1}"
    assert [p.name for p in target.parent.iterdir()] == ["v3"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"checksum": 1}, "'empty' arrived damaged"),
        ({"end_of_file": False}, "incomplete"),
        ({"path": "../escaped"}, "leads out"),
        ({"path": "/escaped"}, "leads out"),
    ],
)
async def test_damage_leaves_nothing(
    source: Path, tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    target = tmp_path / "there" / "v3"
    with pytest.raises(DataLoss, match=why):
        await write_folder(target, changed(source, **changes))
    assert list(target.parent.iterdir()) == []
    assert not (tmp_path / "escaped").exists()
