"""The registry of the kinds of sandboxes: which provider launches which."""

from __future__ import annotations

from typing import Final

from services.reward.cgroups import ControlGroups, CoreManager
from services.reward.sandboxes.container import ContainerProvider
from services.reward.sandboxes.local import LocalProvider
from services.reward.sandboxes.profile import BUBBLEWRAP, CONTAINER, PROCESS
from services.reward.sandboxes.provider import SandboxProvider

# By `FunctionSpec.sandbox`. A further kind is a line here, its provider's file, and its name in
# `troupe.functions.validation` and the job's `sandbox`.
PROVIDERS: Final[dict[str, type[SandboxProvider]]] = {
    PROCESS: LocalProvider,
    BUBBLEWRAP: LocalProvider,
    CONTAINER: ContainerProvider,
}


def open_providers(
    groups: ControlGroups | None = None, cores: CoreManager | None = None
) -> dict[str, SandboxProvider]:
    """Return the providers by kind; kinds of one provider share it."""
    made = {provider: provider(groups, cores) for provider in set(PROVIDERS.values())}
    return {kind: made[provider] for kind, provider in PROVIDERS.items()}
