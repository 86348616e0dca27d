"""Cores for actions: given while one runs, taken back when it ends (ARL-Tangram, section 3)."""

from services.reward.cpu.manager import CoreManager, Lease, choose_backend, usable_cores

__all__ = ["CoreManager", "Lease", "choose_backend", "usable_cores"]
