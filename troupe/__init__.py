"""Troupe: train teams of language-model agents with reinforcement learning."""

from troupe.functions import reward, tool

__version__ = "0.1.0"
__all__ = ["__version__", "reward", "tool"]
