"""The hosts that are attached to a reward service, from their offer until they leave."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Final

import grpc
import structlog

from services.reward.hosts.link import Link
from services.reward.sources import Sources
from troupe.rpc import InvalidArgument, Unavailable
from troupe.v1 import reward_pb2 as pb

log = structlog.get_logger("troupe.reward")

_OFFER_SECONDS: Final = 10.0
_BEATS_MISSED: Final = 5
_HOST_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_MOST_WORKERS: Final = 4096


class AttachedHosts:
    """By id. `attach` and `detach` are told of those that take calls, and that take none more."""

    def __init__(
        self,
        sources: Sources,
        attach: Callable[[Link], None],
        detach: Callable[[str], None],
        *,
        beat_seconds: float = 1.0,
    ) -> None:
        self._sources = sources
        self._attach, self._detach = attach, detach
        self._beat_seconds = beat_seconds
        self._links: dict[str, Link] = {}

    @property
    def links(self) -> Mapping[str, Link]:
        """Those that are attached now."""
        return self._links

    async def serve(
        self, messages: AsyncIterator[pb.HostMessage]
    ) -> AsyncGenerator[pb.HostCommand]:
        """One host, for as long as it is heard of.

        Raises `InvalidArgument` for an offer that makes no sense and `Unavailable` when it is
        not heard of any more.
        """
        link = Link(await self._offer(messages), self._sources)
        name = link.name
        if (former := self._links.get(name)) is not None:
            former.lose("attached anew")
            self._gone(former)
        self._links[name] = link
        log.info("a host is attached", host=name, workers=link.offer.workers)
        reader = asyncio.create_task(self._read(link, messages), name=f"host {name}")
        self._attach(link)
        try:
            yield pb.HostCommand(welcome=pb.HostWelcome(beat_seconds=self._beat_seconds))
            patience = self._beat_seconds * _BEATS_MISSED
            async for command in link.commands(patience):
                yield command
            if time.monotonic() - link.heard >= patience:
                raise Unavailable(f"host {name} was not heard of for {patience:g} s")
        finally:
            reader.cancel()
            self._gone(link)

    def list(self) -> list[pb.HostStatus]:
        """What is known of each."""
        now = time.monotonic()
        return [
            pb.HostStatus(
                offer=link.offer,
                running=link.running,
                invocations=link.invocations,
                draining=link.draining,
                residents=link.residents,
                seconds_since_heard=now - link.heard,
            )
            for link in self._links.values()
        ]

    async def _read(self, link: Link, messages: AsyncIterator[pb.HostMessage]) -> None:
        left = False
        try:
            async for message in messages:
                link.hear(message)
                if link.draining and not left:
                    left = True
                    self._detach(link.name)
        except grpc.RpcError as error:
            log.debug("a host's stream broke", host=link.name, error=str(error))
        finally:
            self._gone(link)

    def _gone(self, link: Link) -> None:
        link.lose("went away")
        if self._links.get(link.name) is link:
            del self._links[link.name]
            self._detach(link.name)
            log.info("a host is gone", host=link.name)

    async def _offer(self, messages: AsyncIterator[pb.HostMessage]) -> pb.HostOffer:
        try:
            async with asyncio.timeout(_OFFER_SECONDS):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration) as error:
            raise InvalidArgument(
                "a host says first what it offers",
                field="offer",
                remedy=f"Send HostMessage.offer within {_OFFER_SECONDS:g} s.",
            ) from error
        offer = first.offer
        if not _HOST_ID.fullmatch(offer.host_id):
            raise InvalidArgument(
                "is no id", field="offer.host_id", value=offer.host_id, remedy="Letters and digits."
            )
        if not 1 <= offer.workers <= _MOST_WORKERS:
            raise InvalidArgument(
                f"is not within 1 .. {_MOST_WORKERS}",
                field="offer.workers",
                value=offer.workers,
                remedy="Set TROUPE_REWARD_WORKERS of the host.",
            )
        for name in ("cores", "memory_mib", "gpus"):
            if getattr(offer, name) < 0:
                raise InvalidArgument(
                    "is negative", field=f"offer.{name}", value=getattr(offer, name)
                )
        return offer
