"""Models on this host's devices: resident while they are used, else in host memory."""

from services.reward.gpu.board import PREFIX, Board
from services.reward.gpu.manager import ModelManager, ModelUnavailable
from services.reward.gpu.settings import ModelSettings

__all__ = ["PREFIX", "Board", "ModelManager", "ModelSettings", "ModelUnavailable"]
