"""Models on this host's devices: resident while they are used, else in host memory."""

from services.reward.gpu.manager import PREFIX, Board, ModelManager, ModelSettings, ModelUnavailable

__all__ = ["PREFIX", "Board", "ModelManager", "ModelSettings", "ModelUnavailable"]
