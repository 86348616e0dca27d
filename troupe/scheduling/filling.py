"""The rule by which the policies of a job share all devices: of `replicas: auto` and `gang: auto`,
and of the first splits that `troupe plan` tries.

Every policy gets what it needs at least. What is left goes, piece by piece, to the policy that
would work longest with what it has; so engines and gangs end up in proportion to the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


def fill_engines(
    widths: Mapping[str, int],
    work: Mapping[str, float],
    devices: int,
    least: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return the engines of each policy on `devices` devices of a host.

    `widths`: devices of one engine; `work`: in any unit; `least`: engines that a policy has in any
    case (default: 1). Empty: there is no room for these.
    """
    engines = {name: max(1, (least or {}).get(name, 1)) for name in widths}
    left = devices - sum(engines[name] * width for name, width in widths.items())
    if left < 0:
        return {}
    while fitting := [name for name in widths if widths[name] <= left and work[name] > 0]:
        most = max(fitting, key=lambda name: work[name] / engines[name])
        engines[most] += 1
        left -= widths[most]
    return engines


def fill_gangs(
    sizes: Mapping[str, Sequence[int]], seconds: Callable[[str, int], float], devices: int
) -> dict[str, int]:
    """Return the size of each policy's gang on `devices` devices.

    `sizes`: what a gang may have, ascending; `seconds`: of a policy's work with a gang of a size.
    If the smallest gangs together are more than the devices, they stay so small: they take turns.
    """
    steps = dict.fromkeys(sizes, 0)
    left = devices - sum(some[0] for some in sizes.values())

    def price(name: str) -> int:
        """Devices of the next larger gang that this one does not have."""
        return sizes[name][steps[name] + 1] - sizes[name][steps[name]]

    while fitting := [
        name for name, some in sizes.items() if steps[name] + 1 < len(some) and price(name) <= left
    ]:
        most = max(fitting, key=lambda name: seconds(name, sizes[name][steps[name]]))
        left -= price(most)
        steps[most] += 1
    return {name: some[steps[name]] for name, some in sizes.items()}
