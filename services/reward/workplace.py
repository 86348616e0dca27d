"""The service's own host: what of this machine calls may have."""

from __future__ import annotations

import structlog

from services.chassis.telemetry import Telemetry
from services.reward.confinement import layers
from services.reward.cpu import CoreManager, choose_backend, usable_cores
from services.reward.fence import Fence
from services.reward.gpu import ModelManager
from services.reward.groups import Groups, open_groups
from services.reward.host import Host
from services.reward.sandbox import LEVELS, Cage
from services.reward.sandboxes.keeper import Limits, Sandboxes
from services.reward.settings import RewardSettings
from services.reward.slot import Slot
from services.reward.stock import MEMORY, SANDBOX, Stock
from troupe.rpc import InvalidArgument

log = structlog.get_logger("troupe.reward")


class Workplace:
    """Worker processes of this host, its cores, and the limits of its sandboxes."""

    def __init__(self, settings: RewardSettings, telemetry: Telemetry) -> None:
        """Raises `InvalidArgument` for cores that there are not, and models that fit nowhere."""
        self._groups = groups = open_groups()
        self._cores = _core_manager(settings, groups)
        self._fence = Fence(groups) if groups is not None else None
        slots = [
            Slot(
                settings.reward_import_seconds,
                f"worker-{i}",
                self._cores,
                self._fence,
                spares=settings.reward_spares,
            )
            for i in range(settings.reward_workers)
        ]
        models = None
        if settings.reward_models:
            models = ModelManager(settings.reward_models, settings.reward_gpus, telemetry)
        memory = {MEMORY: settings.reward_memory_mib} if settings.reward_memory_mib else {}
        stock = Stock(memory, None if models is None else models.board, plenty=(MEMORY, SANDBOX))
        self.host = Host(
            "",
            slots,
            self._cores,
            min_workers=settings.reward_min_workers,
            idle_seconds=settings.reward_idle_seconds,
            stock=stock,
            models=models,
        )
        self.sandboxes = Sandboxes(
            Limits(
                settings.reward_sandboxes,
                settings.reward_sandbox_memory_mib,
                settings.reward_sandbox_idle_seconds,
            ),
            settings.reward_import_seconds,
            groups=groups,
            cores=self._cores,
        )

        log.info(
            "sandboxes", **{level: ", ".join(self.confinement(Cage(level))) for level in LEVELS}
        )

    def confinement(self, cage: Cage) -> list[str]:
        """What confines calls here that are to be confined so."""
        return layers(cage, self._groups)

    def close(self) -> None:
        """All its processes have ended."""
        if self._cores is not None:
            self._cores.close()
        if self._fence is not None:
            self._fence.close()


def _core_manager(settings: RewardSettings, groups: Groups | None) -> CoreManager | None:
    if not settings.reward_cores:
        return None
    try:
        nodes = usable_cores(settings.reward_cores)
        manager = CoreManager(nodes, choose_backend(groups, settings.reward_core_backend))
    except (ValueError, OSError) as error:
        raise InvalidArgument(
            str(error),
            field="TROUPE_REWARD_CORES",
            value=settings.reward_cores,
            remedy="Name as many cores as this process may use, and a backend that works here "
            "(TROUPE_REWARD_CORE_BACKEND=auto).",
        ) from error
    log.info("cores are handed out", cores=settings.reward_cores, backend=manager.kind)
    return manager
