"""The section of a policy that trains an adapter instead of all weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from troupe.job.section import MAX_COEFFICIENT, Section, expand_home


class LoraSpec(Section):
    """Low-rank adaptation (Hu et al. 2021, section 4.1): a frozen linear layer W gets a trained
    update, `W + alpha / rank * B @ A` with B [out, rank] and A [rank, in]. Policies with the same
    base share its weights in a trainer worker, and only adapters are stepped, stored and sent."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the update of each layer; not above the model's hidden size."""
    alpha: float = Field(default=32.0, gt=0, le=MAX_COEFFICIENT)
    """The update is scaled by `alpha / rank`."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the adapters' inputs that is dropped while gradients are computed. What is
    trained then differs a little from what sampled; not with `pipeline.deterministic`."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(max_length=1024)] = (
        "all-linear"
    )
    """Which linear layers are adapted, by the last part of their names (`q_proj`, `down_proj`);
    `all-linear`: every one but the output layer."""

    path: str | None = None
    """Adapter to begin with: a directory as PEFT and `troupe export` write it, made for the same
    base, rank, alpha and layers. Default: a random A and B = 0, which changes nothing."""

    _home = field_validator("path")(expand_home)

    @field_validator("target_modules")
    @classmethod
    def _are_names(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str):
            return value
        if not value:
            raise ValueError("no layer is named; name some, or leave it out for all linear layers")
        for name in value:
            if not name.isidentifier():
                raise ValueError(f"'{name}' is not the name of a layer, such as `q_proj`")
        return sorted(set(value))
