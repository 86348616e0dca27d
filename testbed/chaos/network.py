"""All wires of an embedded cluster, each through a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from testbed.chaos.proxy import Link
from troupe.cluster.layout import ANYBODY, Routes

# (caller, callee), as `troupe.cluster.layout.links` names them.
Pair = tuple[str, str]


class Network:
    """A proxy per pair of services that call each other. Survives the cluster's power cuts."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        """`pairs` are (caller, callee)."""
        self._links = {pair: Link("", wire(pair)) for pair in pairs}
        self._opened = False

    async def route(self, addresses: Mapping[str, str]) -> Routes:
        """The `router` of an `EmbeddedCluster`: the proxies' addresses, which lead to `addresses`.

        A cluster that starts again has new addresses; the proxies keep theirs.
        """
        if not self._opened:
            await asyncio.gather(*(link.open() for link in self._links.values()))
            self._opened = True
        for (_, callee), link in self._links.items():
            link.target = addresses[callee]
            link.heal()
        return {pair: link.address for pair, link in self._links.items()}

    def link(self, pair: Pair) -> Link:
        """The wire between two services."""
        return self._links[pair]

    def heal(self) -> None:
        """Every wire is whole again."""
        for link in self._links.values():
            link.heal()

    async def close(self) -> None:
        """Close all proxies; the services must be gone by then, or lose each other."""
        await asyncio.gather(*(link.close() for link in self._links.values()))


def wire(pair: Pair) -> str:
    """A pair for people."""
    caller, callee = pair
    return f"{'others' if caller == ANYBODY else caller} > {callee}"
