"""Checks of the numbers in a model's configuration, which transformers does not check.

With `rope_theta: NaN` a model loads and computes NaN; an end-of-sequence id beyond the vocabulary
never ends a sequence. Each fault is reported by the name of its field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from troupe.rpc.errors import InvalidArgument

# Sizes of tensors and counts of layers, by the names that architectures use; at least 1.
_SIZES: Final = frozenset(
    {
        *("vocab_size", "hidden_size", "head_dim", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings"),
        *("n_embd", "n_head", "n_layer", "n_positions"),
    }
)
# Other counts; 0 means none.
_COUNTS: Final = frozenset(
    {
        *("intermediate_size", "moe_intermediate_size", "n_inner"),
        *("num_experts", "num_local_experts", "num_experts_per_tok", "sliding_window"),
        *("shared_expert_intermediate_size", "decoder_sparse_step", "max_window_layers"),
    }
)
# Numbers above 0: bases and scales of rotary embeddings, the share of a head that they rotate.
_POSITIVE: Final = frozenset(
    {
        *("rope_theta", "rope_local_base_freq", "factor", "partial_rotary_factor"),
        *("attention_multiplier", "original_max_position_embeddings"),
    }
)
# Numbers of 0 or more.
_NOT_NEGATIVE: Final = frozenset(
    {
        *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
        *("initializer_range", "router_aux_loss_coef"),
    }
)
# Parts of a whole.
_FRACTIONS: Final = frozenset(
    {"attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"}
)
# Fields that every text model needs.
_NEEDED: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
# Infinite in the configurations of Mamba 2 and its relatives.
_LIMITS: Final = "time_step_limit"
# Counts that transformers expands into lists while it reads a configuration.
_LISTED: Final = frozenset(
    {"num_labels", "num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"}
)
_MAX_LISTED: Final = 100_000
_MAX_COUNT: Final = 2**31 - 1
_MAX_NUMBER: Final = 1e18
_REMEDY: Final = (
    "Correct the field in the model's config.json or generation_config.json, or in `model.config`."
)


class BadConfiguration(ValueError):
    """A field of a model's configuration has an invalid value: field, value and problem."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        shown = repr(value)
        super().__init__(f"{field} = {shown if len(shown) < 80 else shown[:77] + '...'} {problem}")

    def of_job(self, model: str, path: str | None) -> InvalidArgument:
        """Return the error for the job, in whose section `model` the model is given by `path` or
        `config`."""
        return InvalidArgument(
            str(self),
            kind="model_config_invalid",
            field=f"{model}.{'config' if path is None else 'path'}",
            value=path,
            remedy=_REMEDY,
        )


def check_configuration(config: Any) -> None:
    """Check the numbers of a transformers configuration. Raises `BadConfiguration` for the first
    fault: NaN, infinity, a size that is not a count, a scale that is not positive."""
    text = config.get_text_config().to_dict()
    for name in _NEEDED:
        if name in text and text[name] is None:
            raise BadConfiguration(name, None, "is missing")
    for path, name, value in _fields(config.to_dict()):
        if isinstance(value, float) and not math.isfinite(value) and name != _LIMITS:
            raise BadConfiguration(path, value, "is not a finite number")
        if value is None and not path.endswith("rope_parameters.rope_theta"):
            continue  # the architecture's own
        if name in _SIZES and not _is_count(value, 1):
            raise BadConfiguration(path, value, f"is not a whole number from 1 to {_MAX_COUNT:,}")
        if name in _COUNTS and not _is_count(value, 0):
            raise BadConfiguration(path, value, f"is not a whole number from 0 to {_MAX_COUNT:,}")
        if name in _POSITIVE and not (_is_number(value) and value > 0):
            raise BadConfiguration(path, value, f"is not a positive number up to {_MAX_NUMBER:g}")
        if name in _NOT_NEGATIVE and not (_is_number(value) and value >= 0):
            raise BadConfiguration(path, value, f"is not a number from 0 to {_MAX_NUMBER:g}")
        if name.endswith("token_id") and not _is_count(value, -1):
            raise BadConfiguration(path, value, "is not a token id")
        if name in _FRACTIONS and not (_is_number(value) and 0 <= value <= 1):
            raise BadConfiguration(path, value, "is not within 0 .. 1")


def check_listed_counts(
    config: Mapping[str, Any] | None, path: str | None, revision: str | None
) -> None:
    """Check, before transformers reads a configuration, the counts that it turns into lists: with
    `num_labels: 10**12` it would fill the memory. Given by `config` or, if None, by `path`.

    Raises `BadConfiguration`. A file that cannot be read is left to transformers' own errors.
    """
    if config is None:
        from transformers import PretrainedConfig

        try:
            config, _ = PretrainedConfig.get_config_dict(path, revision=revision)
        except Exception:  # OSError, ValueError, TypeError, RecursionError, errors of the hub
            return
    for where, name, value in _fields(config):
        if name in _LISTED and isinstance(value, int | float) and not value <= _MAX_LISTED:
            raise BadConfiguration(where, value, f"is more than {_MAX_LISTED:,}")


def token_ids(field: str, value: Any, vocabulary: int | None) -> tuple[int, ...]:
    """Return the token ids of an `eos_token_id`: None, an id or a list of them.

    Raises `BadConfiguration` for an id outside the `vocabulary` (None: unknown size).
    """
    given = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for one in given:
        if not _is_count(one, 0) or (vocabulary is not None and one >= vocabulary):
            size = "" if vocabulary is None else f" of 0 .. {vocabulary - 1}"
            raise BadConfiguration(field, value, f"is not a token id{size}")
    return tuple(given)


def _fields(value: Any, path: str = "", name: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (path, name, value) of each field; an item of a list has the name of its list."""
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _fields(one, f"{path}.{key}" if path else str(key), str(key))
    elif isinstance(value, list | tuple) and (value or name.endswith("token_id")):
        for one in value:
            yield from _fields(one, path, name)
    else:
        yield path, name, value


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= _MAX_NUMBER


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MAX_COUNT
