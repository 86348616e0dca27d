"""The tree of readers and their sources."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from troupe.transfer.remote.serving import ReaderTree


def sources(tree: ReaderTree, readers: int) -> list[str | None]:
    return [tree.join(f"r{k}") for k in range(readers)]


def test_readers_make_a_chain() -> None:
    assert sources(ReaderTree(1000), 4) == [None, "r0", "r1", "r2"]


def test_a_chain_ends_where_its_last_reader_would_be_late() -> None:
    # Eight chunks: each link costs an eighth of the time.
    assert sources(ReaderTree(8), 5) == [None, "r0", None, "r2", None]
    # Nothing can be passed on before the whole state is there.
    assert sources(ReaderTree(1), 3) == [None, None, None]


def test_a_failed_reader_is_routed_around() -> None:
    tree = ReaderTree(1000)
    sources(tree, 4)
    # r1 is dead: r2 must not be sent to r3, which reads from it.
    assert tree.join("r2", failed=["r1"]) == "r0"
    assert tree.join("r4") == "r3"
    tree.leave("r4")
    assert tree.join("r5") == "r3"


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=60),
)
def test_every_chain_of_readers_ends_at_the_owner(
    chunks: int, joins: list[tuple[int, bool]]
) -> None:
    tree = ReaderTree(chunks)
    reads_from: dict[str, str | None] = {}
    for number, fails in joins:
        reader = f"r{number}"
        failed = [source] if fails and (source := reads_from.get(reader)) else []
        source = tree.join(reader, failed)
        assert source not in (reader, *failed)
        reads_from[reader] = source
        for gone in failed:
            reads_from.pop(gone, None)
        # No circles: from each reader the way leads to the owner, or to one that failed, whose
        # readers will ask again.
        for start in reads_from:
            seen, at = {start}, reads_from[start]
            while at is not None and at in reads_from:
                assert at not in seen
                seen.add(at)
                at = reads_from[at]
