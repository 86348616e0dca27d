"""Memory model of one trainer rank on its device, by part.

`rank_memory` is the one memory model of trainers: `troupe job validate`, the binder of the
orchestrator and the trainer's own check use it. Numbers follow what
`services/trainer/learning` and `services/trainer/gang` hold: weights, gradients and AdamW's moments
in float32, sharded over a gang (FSDP, Zhao et al. 2023, arXiv 2304.11277); a gang's layers,
gathered one at a time with the next one on its way; activations as in Korthikanti et al. 2022
(arXiv 2205.05198), counted for the unfused operators of transformers. The sum is the highest of
several moments of a micro-batch. tests/trainer/test_memory.py compares it with what torch holds in
real steps on a CPU, tests/trainer/memory/test_fake_step.py in steps of real sizes on fake GPUs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

_FULL: Final = 4  # bytes of a float32
_HALF: Final = 2
# By device type: bytes of the logits of one block of tokens (troupe/algorithms/linear_loss.py), and
# of the float32 scratch next to them.
_BLOCK_BYTES: Final = {"cpu": 64 << 20, "cuda": 512 << 20}
_SCRATCH_BYTES: Final = {"cpu": 1 << 20, "cuda": 256 << 20}
# On a GPU: CUDA's context, kernels and workspaces of cuBLAS; the buffers of NCCL; and the part of a
# pass that the allocator cannot use again since blocks differ in size.
_CONTEXT_BYTES: Final = 1 << 30
_COLLECTIVE_BYTES: Final = 512 << 20
_FRAGMENTS: Final = 0.1
SLEEPING_SERVER_BYTES: Final = 2 << 30
"""Bytes of a GPU that a sleeping inference server keeps, not counting its weights, caches and
graphs, which it releases: CUDA's context and kernels, workspaces of attention, buffers of NCCL."""
# Elements of the moments that are on the device at a time, of those that are in host memory
# (services/trainer/learning/optimizer.py); a second part is on its way.
OFFLOADED_PART: Final = 1 << 25
SHORT_ROW: Final = 128
"""Longest row whose attention keeps its weights, on a CPU
(services/trainer/learning/sequences/attention.py)."""
# Rows that a rank computes for its experts, of those that it would have with an even load (an
# assumption: beyond it passes become smaller, as with any pass that runs out of memory).
_UNEVEN: Final = 1.5
# Bytes per token of ids, indices, the loss's columns and statistics.
_COLUMNS_BYTES: Final = 192
TOO_LARGE_REMEDY: Final = (
    "Use a smaller model, an adapter (`lora`), a larger gang (`trainer.gang`), "
    "`trainer.activation_checkpointing`, fewer `trainer.forward_tokens`, or another "
    "`trainer.shard` than `host`; or add a trainer with more memory (TROUPE_TRAINER_MEMORY_BYTES "
    "says how much it may use). `troupe job validate --devices` shows what fits where."
)
"""The remedy for a policy that no trainer has the memory to train."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Counts of a causal language model; parameters are numbers, not bytes."""

    parameters: int
    """All distinct parameters."""
    embedding: int
    """Parameters of the input embedding."""
    output: int
    """Parameters of the output layer; 0 if it is tied to the embedding."""
    layers: int
    layer: int
    """Parameters of the largest layer."""
    hidden: int
    intermediate: int
    """Width of the MLP of a dense layer; of a mixture, of one expert."""
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    """Routed experts of a layer; 0: no mixture."""
    active_experts: int = 0
    """Experts that one token is routed to."""
    head_norms: bool = False
    """Whether queries and keys are normalized per head (Qwen3)."""
    positions: int = 0
    """Longest sequence in tokens; 0: unknown."""
    linears: tuple[tuple[str, int], ...] = ()
    """Linear layers that an adapter may sit on, by the last part of their names, with the sum of
    their inputs and outputs over all layers."""

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weights."""
        return not self.output

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: of a mixture the experts that it is routed
        to; the output layer, but not the embedding."""
        idle = max(0, self.experts - self.active_experts) * 3 * self.hidden * self.intermediate
        return self.layers * (self.layer - idle) + self.vocabulary * self.hidden

    def adapter(self, rank: int, targets: Collection[str] | None = None) -> int:
        """Return the parameters of a LoRA adapter; `targets`: names of its layers, None: all."""
        return rank * sum(n for name, n in self.linears if targets is None or name in targets)


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """How one policy is trained, as far as memory depends on it."""

    device: str = "cuda"
    """Device type, "cpu" or "cuda"."""
    ranks: int = 1
    """Devices that weights, gradients and moments are sharded over."""
    replicas: int = 1
    """Hosts of which each has so many devices with all weights (`trainer.shard`)."""
    half: bool = True
    """Whether matrix products are computed in bfloat16."""
    tokens: int = 16_384
    """Tokens of one forward pass, of which this rank computes so many."""
    slices: int = 1
    """Ranks that divide the tokens of a pass (`trainer.context_parallel`)."""
    expert_ranks: int = 1
    """Ranks that divide the experts of a layer (`trainer.expert_parallel`)."""
    history: int = 0
    """Tokens of earlier passes over the same sequence, whose keys and values are kept."""
    checkpointing: bool = True
    """Whether only the inputs of layers are kept for the backward pass."""
    kept_layers: int = 0
    """Layers at the end of the model whose activations are kept all the same."""
    trainable: bool = True
    adapter: int = 0
    """Parameters of the LoRA adapter that is trained on frozen weights; 0: all are trained."""
    reference: bool = False
    """Whether the loss needs a frozen copy of the first version."""
    teachers: int = 0
    """Bytes of the frozen policies that it learns from, over all devices."""
    critic: bool = False
    exact: bool = False
    """Whether gradients are summed exactly (`pipeline.deterministic`)."""
    offloaded: bool = False
    """Whether AdamW's moments are in host memory (`trainer.offload`)."""
    fused_norms: bool = False
    """Whether norms keep their inputs only (services/trainer/learning/kernels/cpu.py)."""
    half_weights: Literal["", "cast", "kept"] = ""
    """How linear layers get weights in bfloat16 (services/trainer/learning/kernels/half.py): by
    copies that are made for each use or `kept` across passes; empty: by autocast or FSDP."""
    short_rows: bool = True
    """Whether no row is longer than 128 tokens: on a CPU these have an attention of their own."""
    other_bytes: int = 0
    """Bytes of the device that other processes keep (`SLEEPING_SERVER_BYTES`)."""

    @property
    def gang(self) -> bool:
        """Whether FSDP gathers the weights of layers, even from one device."""
        return self.ranks * self.replicas > 1


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one device. The first seven parts stay while the policy is bound; the others are
    needed while it computes, and policies that share a device take turns with them."""

    base: int = 0
    """Frozen weights under an adapter, which the policies of a worker share."""
    weights: int = 0
    gradients: int = 0
    moments: int = 0
    reference: int = 0
    critic: int = 0
    exact_sums: int = 0
    gathered: int = 0
    """Whole layers of a gang's model, the next one and their gradients; on one device copies of
    weights in bfloat16."""
    activations: int = 0
    logits: int = 0
    """One block of logits, and the gradient of the output layer."""
    overhead: int = 0
    """CUDA's context, the buffers of collectives, fragmentation; what a sleeping server keeps."""

    @property
    def state(self) -> int:
        """Bytes that stay while the policy is bound."""
        return (
            self.base
            + self.weights
            + self.gradients
            + self.moments
            + self.reference
            + self.critic
            + self.exact_sums
        )

    @property
    def working(self) -> int:
        """Additional bytes that it needs while it computes."""
        return self.gathered + self.activations + self.logits + self.overhead

    @property
    def total(self) -> int:
        """All bytes."""
        return self.state + self.working

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, without empty ones."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: size for name, size in found.items() if size}


def rank_memory(shape: ModelShape, setup: TrainingSetup) -> RankMemory:
    """Return an upper bound of the bytes that one rank needs, by part."""
    ranks, adapter = setup.ranks, setup.adapter
    whole = shape.parameters
    # The base under an adapter is kept in the published type, other weights in float32.
    base = -(-whole * (_HALF if setup.half else _FULL) // ranks) if adapter else 0
    if not setup.trainable:
        held = (adapter or whole) * _FULL
        return RankMemory(base=base, weights=held, overhead=_overhead(setup, 0))
    trained = adapter or whole
    each = -(-trained * _FULL // ranks)
    # The critic has no output layer of the vocabulary's size.
    valued = adapter or whole - shape.output
    critic = -(-valued * _FULL // ranks) + (shape.hidden + 1) * _FULL
    exact = -(-(trained + (valued if setup.critic else 0)) * 8 // ranks)
    gathered, activations, logits = max(
        _end_of_forward(shape, setup),
        _first_of_backward(shape, setup),
        _end_of_backward(shape, setup),
        _update(shape, setup),
        key=sum,
    )
    return RankMemory(
        base=base,
        weights=each,
        gradients=each,
        moments=0 if setup.offloaded else 2 * each,
        reference=(0 if adapter or not setup.reference else each) + -(-setup.teachers // ranks),
        critic=(2 if setup.offloaded else 4) * critic if setup.critic else 0,
        exact_sums=exact if setup.exact else 0,
        gathered=gathered,
        activations=activations,
        logits=logits,
        overhead=_overhead(setup, gathered + activations + logits),
    )


def _overhead(setup: TrainingSetup, working: int) -> int:
    if setup.device != "cuda":
        return 0
    # NCCL has buffers of its own for the ranks of a host and for those between hosts.
    groups = (setup.ranks > 1) + (setup.replicas > 1)
    collective = groups * _COLLECTIVE_BYTES
    return _CONTEXT_BYTES + collective + int(_FRAGMENTS * working) + setup.other_bytes


# Bytes of (gathered weights, activations, logits) at the moments when memory is fullest.
_Parts = tuple[int, int, int]


def _end_of_forward(shape: ModelShape, setup: TrainingSetup) -> _Parts:
    """Return the last block of logits: what all layers keep is there."""
    logits = _logits_bytes(shape, setup) + _summed_head(shape, setup)
    # Layers that are computed again free the copies of their weights.
    layers = _busy_layers(shape, setup) if setup.half_weights == "cast" else shape.layers
    casts = _cast_bytes(shape, setup, layers * shape.layer)
    # The hidden states behind the last layer, their norm, and what the loss makes of them.
    scored = 5 * _stream_bytes(shape, setup) + _HALF * shape.hidden
    kept = _kept_bytes(shape, setup) + setup.tokens * scored
    return _gathered(shape, setup) + casts, kept, logits


def _summed_head(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the gradient of the output layer as it is summed over blocks, in float32."""
    return 0 if setup.adapter else _FULL * shape.vocabulary * shape.hidden


def _first_of_backward(shape: ModelShape, setup: TrainingSetup) -> _Parts:
    """Return the last layer of the model in the backward pass: what it recomputes, its
    gradients."""
    busy = _gradient_bytes(shape, setup)
    # Layers that keep activations come first, and free them before others are computed again.
    if setup.checkpointing and not setup.kept_layers:  # the input of the layer is kept anyway
        busy += _layer_bytes(shape, setup) - _stream_bytes(shape, setup)
    # With checkpointing the casts of the forward pass are gone.
    layers = _busy_layers(shape, setup)
    casts = _cast_bytes(shape, setup, layers * shape.layer, head=False)
    gathered = _gathered(shape, setup) + (_copies(shape, setup) or casts)
    if setup.gang:  # this layer's gradient, and float32 of it and of the one before
        gathered += (_wide(setup) + 2 * _FULL) * (shape.layer - _experts(shape, setup))
        gathered += (_wide(setup) + 3 * _FULL) * _own_experts(shape, setup)
    # The gradient of a separate output layer has been added to the earlier passes' gradient. A tied
    # layer's is added with the embedding's, at the end; a gang scatters it then, too.
    waits = shape.tied or setup.gang
    head = _head_gradient(shape, setup) if waits else 0
    return gathered, _kept_bytes(shape, setup) + setup.tokens * busy, head


def _kept_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the bytes that layers keep for the backward pass."""
    whole = min(setup.kept_layers, shape.layers) if setup.checkpointing else shape.layers
    layers = whole * _layer_bytes(shape, setup)
    layers += (shape.layers - whole) * _stream_bytes(shape, setup)
    rotary = 2 * _FULL * shape.head_dim
    pairs = 2 * shape.kv_heads * shape.head_dim
    product = _HALF if setup.half else _FULL
    # Keys and values of earlier pieces, with their gradients; and of the other ranks' slices, which
    # each layer gathers.
    states = setup.history * shape.layers * pairs * (product + _FULL)
    if setup.slices > 1:
        busy = _busy_layers(shape, setup)
        states += setup.tokens * setup.slices * pairs * (busy * product + _FULL)
    return setup.tokens * (layers + rotary + _COLUMNS_BYTES) + states


def _busy_layers(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the layers whose activations are there at a time: those that are kept, and one that is
    computed again."""
    return min(setup.kept_layers + 1, shape.layers) if setup.checkpointing else shape.layers


def _stream_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the bytes per token of the residual stream: it has the type of the embedding, also
    where products are in bfloat16."""
    return (_HALF if setup.half and setup.adapter else _FULL) * shape.hidden


def _gathered(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the weights outside of layers, a layer, the next one, and the buffer that it arrives
    in. Divided experts are there for one layer, unless several ranks shard the same ones."""
    if not setup.gang:
        return 0
    layers = 3 * (shape.layer - _experts(shape, setup))
    own = _own_experts(shape, setup) * (1 if setup.expert_ranks == setup.ranks else 3)
    return _wide(setup) * (_root(shape) + layers + own)


def _experts(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the parameters of a layer's experts, if ranks divide them; else 0."""
    divided = setup.expert_ranks > 1
    return shape.experts * 3 * shape.hidden * shape.intermediate if divided else 0


def _own_experts(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the parameters of the experts on one rank."""
    return -(-_experts(shape, setup) // setup.expert_ranks)


def _cast_bytes(shape: ModelShape, setup: TrainingSetup, layers: int, *, head: bool = True) -> int:
    """Return the bytes of the copies in bfloat16 that autocast keeps of float32 weights: of
    `layers` parameters, and, until the loss is computed, of the output layer (`head`)."""
    if not setup.half or setup.adapter or _wide(setup) == _HALF:
        return 0
    # Experts are computed in the type of their weights.
    layers -= layers // shape.layer * shape.experts * 3 * shape.hidden * shape.intermediate
    return _HALF * (layers + (shape.vocabulary * shape.hidden if head else 0))


def _copies(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the bytes of copies of weights that are kept across passes."""
    kept = setup.half_weights == "kept"
    return _cast_bytes(shape, setup, shape.layers * shape.layer) if kept else 0


def _head_gradient(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the gradient of the output layer, which is made with the loss."""
    return 0 if setup.adapter else _wide(setup) * shape.vocabulary * shape.hidden


def _end_of_backward(shape: ModelShape, setup: TrainingSetup) -> _Parts:
    """Return the gradients of embedding and output layer: no activations are left."""
    if setup.adapter:
        return 0, 0, 0
    wide, root = _wide(setup), _root(shape)
    stream = setup.tokens * 2 * _FULL * shape.hidden
    if not setup.gang:
        # A tied weight gets the sum of two gradients.
        head = _FULL * (2 * shape.embedding if shape.tied else shape.embedding)
        return _copies(shape, setup), stream, head
    # Whole weights and gradients, and the gradients in float32 while they are scattered.
    return (2 * wide + 2 * _FULL) * root, stream, 0


def _update(shape: ModelShape, setup: TrainingSetup) -> _Parts:
    """Return the optimizer step works in place; exact sums are divided in float64, a tensor at a
    time. Moments in host memory come in parts, of which two are on the device."""
    trained = -(-(setup.adapter or shape.parameters) // setup.ranks)
    moments = 2 * 2 * _FULL * min(OFFLOADED_PART, trained) if setup.offloaded else 0
    sums = 2 * 8 * -(-shape.embedding // setup.ranks)
    return 0, 0, max(moments, sums if setup.exact and not setup.adapter else 0)


def _wide(setup: TrainingSetup) -> int:
    """Return the bytes per parameter of gathered layers: FSDP's mixed precision is for GPUs."""
    return _HALF if setup.half and setup.gang and setup.device == "cuda" else _FULL


def _root(shape: ModelShape) -> int:
    """Return the parameters that are in no layer."""
    return shape.embedding + shape.output + shape.hidden


def _layer_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the bytes per token that one layer keeps for its backward pass."""
    d, full = shape.hidden, _FULL
    product = _HALF if setup.half else _FULL
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # An adapter's base: its residual stream is in bfloat16, and nothing is kept for its weights.
    frozen = setup.half and setup.adapter > 0
    # Two RMSNorms: their inputs, with the copies in float32 of a stream in bfloat16; unless they
    # are fused or their weights frozen, also the normalized states before the multiplication.
    norm = full + _HALF if frozen else full
    size = 2 * d * (norm if frozen or setup.fused_norms else 2 * full)
    # Inputs of the projections: with autocast a copy for each, else one for those side by side;
    # routed states are counted below.
    copied = setup.half and not setup.fused_norms and not setup.half_weights
    size += ((4 if shape.experts else 5) if copied else 2) * product * d
    if setup.device == "cpu" and setup.short_rows:
        # Rows of up to 128 tokens: float32 copies, all weights of the attention, and its output.
        size += full * (queries + 2 * keys + SHORT_ROW * shape.heads) + product * queries
    else:
        # Queries, keys and values as attention reads them, its output (twice where rows are in
        # blocks, also in the order of the rows, and where an adapter reads it), and the sums of its
        # softmax.
        outputs = 1 if setup.device == "cuda" and setup.half and not frozen else 2
        size += product * ((1 + outputs) * queries + 2 * keys) + full * shape.heads
    if shape.head_norms:
        size += (full if frozen else full + product) * (queries + keys)
    elif setup.half:
        size += product * (queries + keys)
    if not shape.experts:
        # Gate, activated gate, up, and their product.
        return size + 4 * product * shape.intermediate
    # Of a routed token: its states before and after the experts; gate and up, the activated gate,
    # and their product. What only the gradients of weights need is not kept of frozen ones.
    states, widths = (1, 3) if frozen else (2, 4)
    routed = _expert_type(setup) * (states * d + widths * shape.intermediate)
    if setup.expert_ranks > 1:  # the rows that others sent here, and those that came back
        rows = int(_UNEVEN * (states * d + widths * shape.intermediate))
        routed = _expert_type(setup) * (rows + d)
    return size + shape.active_experts * routed + 4 * full * shape.experts


def _gradient_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the bytes per token that the backward pass of a layer adds to what the layer keeps."""
    product = _HALF if setup.half else _FULL
    stream = 2 * _FULL * shape.hidden
    attention = 2 * _FULL * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if shape.experts:  # of the routed states, in two orders, and of their sum
        routed = _expert_type(setup) * shape.active_experts
        if setup.expert_ranks > 1:  # and as they were sent and received
            stream += int((1 + _UNEVEN) * routed * shape.hidden)
        return stream + max(3 * routed * shape.hidden, attention - 4 * routed * shape.intermediate)
    # Of the MLP gradients of its three states, in place of their product; of the attention its own,
    # in place of what the MLP has kept.
    wide = product * shape.intermediate
    copies = 3 if setup.adapter and setup.half else 2  # an adapter reads float32
    return stream + max(copies * wide, attention - 4 * wide)


def _expert_type(setup: TrainingSetup) -> int:
    """Return the bytes per element of what experts compute: autocast does not change it."""
    product = _HALF if setup.half else _FULL
    return product if setup.adapter else _wide(setup)


def _logits_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the bytes of one block of logits, of its products and scratch."""
    block = _BLOCK_BYTES.get(setup.device, _BLOCK_BYTES["cpu"])
    block = min(block, _FULL * max(16, setup.tokens) * shape.vocabulary)
    head = shape.vocabulary * shape.hidden
    # On a CPU the gradient is added from a product in bfloat16. On a GPU the product is added at
    # once, and the sum is rounded at the end where the layer is in bfloat16.
    rounds = setup.device != "cuda" or _wide(setup) == _HALF
    copies = _HALF * head if setup.half and not setup.adapter and rounds else 0
    if setup.device == "cuda" and not setup.teachers:  # one kernel, in place
        return block + copies
    scratch = _SCRATCH_BYTES.get(setup.device, 0)
    return block + (block // 2 if setup.half else 0) + scratch + copies
