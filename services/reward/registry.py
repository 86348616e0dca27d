"""The functions that can be invoked, by name and version."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.reward.checks import check
from services.reward.function import Function
from services.reward.sources import Sources
from troupe.rpc import AlreadyExists, NotFound
from troupe.v1 import reward_pb2 as pb


class Registry:
    """All functions of this process; rollout workers register them anew after a restart."""

    def __init__(self, sources: Sources, place: Callable[[pb.FunctionSpec], None]) -> None:
        """`place` raises `InvalidArgument` for what no host could ever run."""
        self._sources = sources
        self._place = place
        self._functions: dict[tuple[str, str], Function] = {}

    def __iter__(self) -> Iterator[Function]:
        return iter(self._functions.values())

    def register(self, spec: pb.FunctionSpec) -> Function:
        """Make `spec` known; repeating it changes nothing.

        Raises `InvalidArgument` for a field that cannot work, `NotFound` for a source that was not
        uploaded, and `AlreadyExists` when the name and version stand for something else.
        """
        check(spec)
        self._place(spec)
        source = self._sources.find(spec.source_sha256) if spec.source_sha256 else None
        known = self._functions.get((spec.name, spec.version))
        if known is None:
            kept = pb.FunctionSpec()
            kept.CopyFrom(spec)
            known = self._functions[spec.name, spec.version] = Function(kept, source)
        elif known.spec != spec:
            raise AlreadyExists(
                f"version {spec.version!r} of this function is {known.spec.entrypoint} with "
                "other settings",
                kind="function_differs",
                field="function.name",
                value=spec.name,
                remedy="Register changed functions under a new version.",
            )
        known.registrations += 1
        return known

    def find(self, name: str, version: str) -> Function:
        """The function; raises `NotFound` (kind "function_not_found") to be registered again."""
        function = self._functions.get((name, version))
        if function is None:
            raise NotFound(
                f"no function of version {version!r} is registered here",
                kind="function_not_found",
                field="name",
                value=name,
                remedy="Register it (again: this service forgets its functions in a restart).",
            )
        return function

    def delete(self, name: str, version: str) -> Function | None:
        """Forget it; the function, if there was one."""
        return self._functions.pop((name, version), None)

    def versions(self, name: str, version: str = "") -> list[Function]:
        """All functions of that name, or the one of that version. Raises `NotFound`."""
        if version:
            return [self.find(name, version)]
        found = [f for f in self if f.spec.name == name]
        if not found:
            raise NotFound(
                "no function of that name is registered here",
                kind="function_not_found",
                field="name",
                value=name,
                remedy="ListFunctions tells which there are.",
            )
        return found
