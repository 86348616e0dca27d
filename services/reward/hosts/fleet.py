"""All hosts of a service as the dispatcher sees them, and what no host of them can run."""

from __future__ import annotations

import time
from typing import Final

from services.reward.dispatch import Dispatcher
from services.reward.gpu import Board
from services.reward.gpu.board import PREFIX as MODEL
from services.reward.host import Host
from services.reward.hosts.link import Link, RemoteCores, RemotePlace
from services.reward.queues import CORES, WORKERS
from services.reward.quota import PREFIX as QUOTA
from services.reward.quota import QuotaManager
from services.reward.sandbox import CONTAINER, PROCESS
from services.reward.stock import MEMORY, PLENTY, SANDBOX, Stock, needs_of
from troupe.rpc import InvalidArgument, Unavailable
from troupe.scheduling.elastic import Action, Amounts
from troupe.scheduling.elastic.cells import Model
from troupe.scheduling.elastic.hosts import nowhere
from troupe.v1 import reward_pb2 as pb

# Hosts that lost their service ask for it this often at least, thrice.
_COMING_SECONDS: Final = 15.0
_FIELDS: Final = {
    CORES: ("cores", "TROUPE_REWARD_CORES"),
    WORKERS: ("max_concurrency", "TROUPE_REWARD_WORKERS"),
    MEMORY: ("memory_mib", "TROUPE_REWARD_MEMORY_MIB"),
}


class Fleet:
    """The service's own host, and those that are attached."""

    def __init__(
        self,
        own: Host,
        dispatcher: Dispatcher,
        quotas: QuotaManager | None = None,
        *,
        expected_seconds: float = 120.0,
    ) -> None:
        """What only a host can run that left less than `expected_seconds` ago is not refused."""
        self._expected_seconds = expected_seconds
        self._started = time.monotonic()
        self._own, self._dispatcher, self._quotas = own, dispatcher, quotas
        self._stocks: dict[str, tuple[int, int, Stock]] = {}
        self._left: dict[str, float] = {}

    def attach(self, link: Link) -> None:
        """Calls may run there from now on."""
        offer = link.offer
        stock = stock_of(offer, link)
        places = [RemotePlace(link, index) for index in range(offer.workers)]
        cores = RemoteCores(offer.cores) if offer.cores else None
        self._stocks[link.name] = (offer.workers, offer.cores, stock)
        self._left.pop(link.name, None)
        self._dispatcher.attach(Host(link.name, places, cores, stock=stock))

    def detach(self, name: str) -> None:
        """Nothing more begins there."""
        self._left[name] = time.monotonic()
        self._dispatcher.detach(name)

    def check(self, spec: pb.FunctionSpec) -> None:
        """Raise `InvalidArgument` where no host that is there, or was a moment ago, could ever run
        a call; `Unavailable` where the one that could may not have attached yet.

        Without any host nothing is known: whatever comes may be able to.
        """
        if spec.quota:
            self._check_quota(spec)
        if spec.gpus and not spec.model_service:
            raise InvalidArgument(
                "devices are given to models, and calls find those",
                field="function.gpus",
                value=spec.gpus,
                remedy="Name the model that it calls as `model_service`, declared in "
                "TROUPE_REWARD_MODELS of a host.",
            )
        level = spec.sandbox or PROCESS
        if spec.model_service and level != PROCESS:
            raise InvalidArgument(
                "a sandbox has no network and cannot reach a model",
                field="function.model_service",
                value=spec.model_service,
                remedy="Call the model from a function of `sandbox: process`.",
            )
        least = spec.cores if spec.HasField("cores") else 1
        needs = {WORKERS: 1, CORES: least, **needs_of(spec, level)}
        needs = {r: amount for r, amount in needs.items() if not r.startswith(QUOTA)}
        hosts = self._capacities(needs)
        if spec.stateful or level == CONTAINER:
            self._check_own(spec)
            hosts = {name: host for name, host in hosts.items() if name == self._own.name}
        missing = nowhere(Action("", 0.0, needs), hosts) if hosts else None
        if missing is None:
            return
        age = time.monotonic() - self._started
        if not self._own.workers and age < min(_COMING_SECONDS, self._expected_seconds):
            raise Unavailable(
                f"no host that is attached has {needs[missing]} of {missing}; this service started "
                f"{age:.0f} s ago, and others may come",
                kind="hosts_expected",
                retry_after_ms=1000,
            )
        most = max((host[missing] for host in hosts.values()), default=0)
        field, setting = _FIELDS.get(missing, ("", ""))
        if missing.startswith(MODEL):
            field, setting = "model_service", "TROUPE_REWARD_MODELS"
        elif missing.startswith(SANDBOX):
            field, setting = "sandbox", f"a host where {level} works"
        raise InvalidArgument(
            f"takes {needs[missing]} of {missing}, and of {len(hosts)} hosts none has more than "
            f"{most} beside what else it takes: no call could ever run",
            kind="no_host",
            field=f"function.{field}",
            value=getattr(spec, field, None),
            remedy=f"Declare less, or start a reward host with more ({setting}).",
        )

    def _check_own(self, spec: pb.FunctionSpec) -> None:
        """Sandboxes that outlive a call are on the service's own host."""
        if self._own.workers:
            return
        raise InvalidArgument(
            "such sandboxes are on the service's own host, and it runs no calls",
            kind="no_host",
            field="function.stateful" if spec.stateful else "function.sandbox",
            value=spec.stateful or spec.sandbox,
            remedy="Start the reward service with TROUPE_REWARD_WORKERS of one or more.",
        )

    def _capacities(self, needs: Amounts) -> dict[str, Amounts]:
        """What each host has of `needs`, free or not."""
        now = time.monotonic()
        for name, left in list(self._left.items()):
            if now - left >= self._expected_seconds:
                del self._left[name], self._stocks[name]
        own = self._own
        cores = own.total_cores
        every = {own.name: (own.workers, cores, own.stock)} if own.workers else {}
        found: dict[str, Amounts] = {}
        for name, (workers, handed, stock) in (every | self._stocks).items():
            counted = {WORKERS: workers, CORES: handed or PLENTY}
            found[name] = {r: counted.get(r) or stock.capacity(r) for r in needs}
        return found

    def _check_quota(self, spec: pb.FunctionSpec) -> None:
        if self._quotas is None:
            raise InvalidArgument(
                "no quotas are declared here",
                field="function.quota",
                value=spec.quota,
                remedy="Declare it in TROUPE_REWARD_QUOTAS of the reward service.",
            )
        self._quotas.check(spec.quota, spec.quota_units or 1)


def stock_of(offer: pb.HostOffer, link: Link | None = None) -> Stock:
    """What a host offers beside places and cores."""
    amounts = {SANDBOX + level: PLENTY for level in offer.sandboxes}
    if offer.memory_mib:
        amounts[MEMORY] = offer.memory_mib
    board = None
    if offer.models:
        models = [Model(m.name, m.gpus, concurrency=m.concurrency) for m in offer.models]
        board = Board(offer.gpus, models)
        if link is not None:
            link.board = board
    return Stock(amounts, board, plenty=() if offer.memory_mib else (MEMORY,))
