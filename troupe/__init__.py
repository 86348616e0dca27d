"""Troupe: train teams of language-model agents with reinforcement learning."""

from troupe.installation import refuse_other_troupe

refuse_other_troupe()  # before the imports that a mixture of two packages could break

from typing import TYPE_CHECKING, Any  # noqa: E402

from troupe.functions import reward, tool  # noqa: E402

if TYPE_CHECKING:
    from troupe.client.training import train

__version__ = "0.1.0"
__all__ = ["__version__", "reward", "tool", "train"]


def __getattr__(name: str) -> Any:
    # Services import this package, too, and need no client.
    if name == "train":
        from troupe.client.training import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
