"""Troupe: train teams of language-model agents with reinforcement learning."""

from troupe.installation import refuse_other_troupe

refuse_other_troupe()  # before the imports that a mixture of two packages could break

from troupe.functions import reward, tool  # noqa: E402

__version__ = "0.1.0"
__all__ = ["__version__", "reward", "tool"]
