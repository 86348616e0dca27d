"""Units in hand while what waits is looked through, in its order."""

from __future__ import annotations

from collections.abc import Mapping

from services.reward.quota.manager import PREFIX


class Budget:
    """Lets pass what there are units for; nothing of a quota passes after something that lacks.

    `lacking` are the wishes of those that did not pass, in units of a call, at most `most` each.
    """

    def __init__(self, units: Mapping[str, int], most: int) -> None:
        self._left = dict(units)
        self._most = most
        self.lacking: dict[str, list[int]] = {}

    def admits(self, needs: Mapping[str, int], alike: int = 1) -> bool:
        """Whether a call with `needs` can begin now; of those behind it `alike - 1` are like it."""
        short = False
        for resource, units in needs.items():
            if not resource.startswith(PREFIX):
                continue
            wishes = self.lacking.get(resource)
            if wishes is None and self._left.get(resource, 0) >= units:
                continue
            wishes = self.lacking.setdefault(resource, [])
            wishes += [units] * min(alike, self._most - len(wishes))
            short = True
        if short:
            return False
        for resource, units in needs.items():
            if resource.startswith(PREFIX):
                self._left[resource] -= units
        return True
