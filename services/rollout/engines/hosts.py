"""`EngineHost`: what engines stand on; the policies of a group have one engine each on it.

An engine without a group stands on a host of its own. A kind whose engines share a server or a
model has a subclass, which owns what there is once, and names it as its `host_class`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from troupe.scheduling.capacity import SharedCapacity

if TYPE_CHECKING:
    from troupe.job import PolicySpec

_NO_SPECS: Final[Mapping[str, PolicySpec]] = MappingProxyType({})


class EngineHost:
    """Host of engines: one server, or one model of this process, for one or several policies."""

    def __init__(
        self,
        host_id: str,
        specs: Mapping[str, PolicySpec] = _NO_SPECS,
        engine_class: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        """`host_id`: unique within the rollout worker. `specs`: by policy, in the job's order.
        `engine_class`, `options`: what makes an engine (a `ServingEngine`, which imports this)."""
        self.host_id = host_id
        self.specs = dict(specs)
        self.capacity = SharedCapacity()
        self._engine_class = engine_class
        self._options = options

    @property
    def shared(self) -> bool:
        """Whether engines of several policies stand on it."""
        return len(self.specs) > 1

    def engine(self, engine_id: str, policy: str) -> Any:
        """Return the engine (`ServingEngine`) of a policy on this host, not started."""
        assert self._engine_class is not None, "a host that is made with its only engine"
        engine = self._engine_class(engine_id, policy, self.specs[policy], **self._options)
        engine.host = self
        return engine
