"""Published adapters in an engine: the base that they belong to, whether they fit, and merging.

Trainers publish an adapter per version and its base once per job. An engine holds on to the base
that it has seen: tensors over this host's shared memory, no copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.rollout.engines.errors import WeightsRefused
from services.rollout.engines.weights import check_fit
from troupe.adapters import (
    AdapterContent,
    MergeMismatch,
    NotAnAdapter,
    base_key,
    is_adapter,
    linear_layers,
    merged,
)
from troupe.adapters.content import CONFIG, PREFIX
from troupe.job import LoraSpec
from troupe.transfer import Transfer, checksum_of
from troupe.v1 import common_pb2 as pb

_REMEDY = "Give trainer and engine the same job: its model and its `lora` section."


@dataclass(frozen=True)
class Base:
    """Weights under adapters, as they are published."""

    ref: pb.WeightsRef
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Adapted:
    """One version of a policy: an adapter over its base."""

    adapter: AdapterContent
    base: Base

    def merged(self, ref: pb.WeightsRef) -> tuple[dict[str, torch.Tensor], pb.WeightsRef]:
        """Plain weights that compute the same, and `ref` with their checksum.

        Raises `WeightsRefused` when the adapter does not fit its base.
        """
        try:
            tensors = merged(self.base.tensors, self.adapter)
        except MergeMismatch as error:
            raise _refused(str(error), ref.key) from error
        own = pb.WeightsRef()
        own.CopyFrom(ref)
        own.checksum = checksum_of(tensors)
        return tensors, own


def with_base(
    tensors: Mapping[str, torch.Tensor], ref: pb.WeightsRef, transfer: Transfer, known: Base | None
) -> Adapted | None:
    """What `ref` is, if it is an adapter; its base is got unless it is `known`. Blocking.

    Raises `WeightsRefused`, and what `transfer.get` raises when the base is not there.
    """
    if not is_adapter(tensors):
        return None
    try:
        adapter = AdapterContent.of(tensors)
    except NotAnAdapter as error:
        raise _refused(str(error), ref.key) from error
    if known is not None and known.ref.checksum == adapter.base:
        return Adapted(adapter, known)
    key = base_key(ref.job_id, adapter.base)
    hint = getattr(transfer, "hint", None)  # of services that reach other hosts
    if hint is not None:
        hint(key, ref.holders)
    base, manifest = transfer.get(key, expected_checksum=adapter.base)
    own = pb.WeightsRef(
        job_id=ref.job_id,
        policy=ref.policy,
        version=0,
        key=key,
        checksum=adapter.base,
        num_bytes=manifest.num_bytes,
    )
    return Adapted(adapter, Base(own, base))


def check_published(
    published: Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    lora: LoraSpec | None,
    key: str,
) -> None:
    """Raise `WeightsRefused` unless `published` (or its layout) is what the engine serves: all of
    `model`, or an adapter of the shape that `lora` says."""
    if lora is None and not is_adapter(published):
        check_fit(published, model, key)
        return
    if lora is None:
        raise _refused("an adapter is published, the policy has no `lora`", key)
    if not is_adapter(published):
        raise _refused("whole weights are published, the policy has `lora`", key)
    layers, _ = linear_layers(model, lora.target_modules)
    expected = {}
    for name, (inputs, outputs) in layers.items():
        expected[f"{PREFIX}{name}.lora_A.weight"] = [lora.rank, inputs]
        expected[f"{PREFIX}{name}.lora_B.weight"] = [outputs, lora.rank]
    found = {name: list(t.shape) for name, t in published.items() if name != CONFIG}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise _refused(
                f"'{name}' is published as {found.get(name, 'nothing')}, the engine's adapter has "
                f"{expected.get(name, 'nothing')}",
                key,
            )


def check_base(adapted: Adapted, model: torch.nn.Module) -> None:
    """Raise `WeightsRefused` unless the base fills `model`."""
    check_fit(adapted.base.tensors, model, adapted.base.ref.key)


def _refused(message: str, key: str) -> WeightsRefused:
    return WeightsRefused(message, field="weights", value=key, remedy=_REMEDY)
