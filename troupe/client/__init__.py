"""The client SDK: submit jobs, watch them, use what they trained. Blocking and asyncio."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from troupe.installation import refuse_other_troupe

if TYPE_CHECKING:
    from troupe.client.sdk import *  # noqa: F403

# Also here: the other project's `troupe/__init__.py` replaces ours if it is installed later.
refuse_other_troupe()


def __getattr__(name: str) -> Any:
    # Commands that call no cluster, such as `troupe up`, start in half the time without the client.
    if name == "__all__" or not name.startswith("_"):
        sdk = import_module(f"{__name__}.sdk")
        if name == "__all__" or name in sdk.__all__:
            return getattr(sdk, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
