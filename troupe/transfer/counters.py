"""Counters of transfers by transport and reason, for logs and Prometheus."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class Choice:
    """How a state was transferred: `action` is "set" or "get".

    Transports, and why they are chosen: in_process (written_here), shared_memory (same_host),
    file (shared_memory_full, root_on_disk), ucx (other_host), grpc (ucx_not_here, ucx_not_there,
    ucx_failed).
    """

    action: str
    transport: str
    reason: str


class TransferCounters(Collector):
    """Counters of transferred states and their bytes, by choice, and of repeated chunks, by cause.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moves: collections.Counter[Choice] = collections.Counter()
        self._bytes: collections.Counter[Choice] = collections.Counter()
        self._retries: collections.Counter[str] = collections.Counter()

    def moved(self, choice: Choice, num_bytes: int) -> None:
        """Count a state of `num_bytes` bytes that was set or got by `choice`."""
        with self._lock:
            self._moves[choice] += 1
            self._bytes[choice] += num_bytes

    def retried(self, cause: str) -> None:
        """Count a retry after a "broken_connection", "corrupt_chunk" or with the "owner_away"."""
        with self._lock:
            self._retries[cause] += 1

    def moves(self) -> dict[Choice, int]:
        """Return the number of states transferred so far, by choice."""
        with self._lock:
            return dict(self._moves)

    def retries(self) -> dict[str, int]:
        """Return the number of retries so far, by cause."""
        with self._lock:
            return dict(self._retries)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counters, for a registry."""
        labels = ["action", "transport", "reason"]
        moves = CounterMetricFamily("troupe_transfer_moves", "States set or got.", labels=labels)
        sizes = CounterMetricFamily("troupe_transfer_bytes", "Bytes set or got.", labels=labels)
        retries = CounterMetricFamily(
            "troupe_transfer_retries", "Chunks that were requested again.", labels=["cause"]
        )
        with self._lock:
            for choice, count in self._moves.items():
                values = [choice.action, choice.transport, choice.reason]
                moves.add_metric(values, count)
                sizes.add_metric(values, self._bytes[choice])
            for cause, count in self._retries.items():
                retries.add_metric([cause], count)
        yield moves
        yield sizes
        yield retries
