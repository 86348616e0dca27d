"""Model services as an operator declares them."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, model_validator

from troupe.rpc import InvalidArgument
from troupe.scheduling.elastic.cells import SIZES, Wish, fits


class ModelSettings(BaseModel):
    """One model service: exactly one of `entrypoint`, `command` and `url`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entrypoint: str = ""
    """ "package.module:attribute" that makes an object with torch modules; its methods are called
    by name. It runs in a process of its own."""
    command: tuple[str, ...] = ()
    """Program that serves HTTP with SGLang's memory release and resume, such as
    `python -m sglang.launch_server --enable-memory-saver ...`. `{port}` and `{gpus}` are filled
    in; it finds its devices in CUDA_VISIBLE_DEVICES."""
    url: str = ""
    """The same, started by somebody else on `devices`."""
    devices: tuple[int, ...] = ()
    """With `url`: where it is; neighbours, as a cell of `gpus` devices."""
    gpus: int = Field(default=1, ge=1)
    """Devices that it takes while it is resident: 1, 2, 4 or 8."""
    concurrency: int = Field(default=1, ge=1)
    """Calls at once."""
    start_seconds: float = Field(default=600, gt=0)
    """How long it may take to start."""
    restore_seconds: float = Field(default=120, gt=0)
    """How long it may take to come back from host memory."""

    @model_validator(mode="after")
    def _one_kind(self) -> ModelSettings:
        if sum(map(bool, (self.entrypoint, self.command, self.url))) != 1:
            raise ValueError("name exactly one of entrypoint, command and url")
        if self.gpus not in SIZES:
            raise ValueError(f"gpus = {self.gpus}: models take {SIZES} devices")
        expected = range(self.devices[0], self.devices[0] + self.gpus) if self.devices else ()
        if self.url and (not self.devices or self.devices[0] % self.gpus):
            raise ValueError("with url, name its devices: a cell of `gpus` neighbours")
        if tuple(expected) != self.devices:
            raise ValueError(f"devices = {self.devices} is no cell of {self.gpus} neighbours")
        return self


def check_models(models: Mapping[str, ModelSettings], gpus: int) -> None:
    """Raise `InvalidArgument` for a model that fits on no cell of a host with so many devices."""
    for name, model in models.items():
        if not fits(gpus, Wish(model.gpus)) or any(device >= gpus for device in model.devices):
            raise InvalidArgument(
                f"takes {model.gpus} devices, and no cell of the {gpus} of this host is that large",
                field=f"TROUPE_REWARD_MODELS.{name}.gpus",
                value=model.gpus,
                remedy="Set TROUPE_REWARD_GPUS to the devices that there are, or start the model "
                "with fewer.",
            )
