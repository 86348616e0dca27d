"""Tokenizers and stop tokens of a job's policies, and the roles of its agents.

`troupe.workflow` does not import this module, which needs the job specification and transformers.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from troupe.checkpoints.configuration import (
    BadConfiguration,
    check_configuration,
    check_listed_counts,
    token_ids,
)
from troupe.contracts.payloads import PayloadKinds
from troupe.job import JobSpec, ModelSpec, no_directory
from troupe.job.hub import first_line, hub_problem
from troupe.outcomes import utf8_text
from troupe.replies.formats import parser_of
from troupe.rpc.errors import FailedPrecondition, InvalidArgument
from troupe.scheduling.defaults import context_of
from troupe.workflow.backend import EndpointOptions, Sampling
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.errors import ChatTemplateError
from troupe.workflow.turns import Role

# transformers replaces its own module during its import, so a simultaneous import from another
# thread gets an empty module. Two jobs may be prepared at once.
IMPORTING = threading.Lock()
_HUB_REMEDY = (
    "Check the path; for a hub id, the model must be downloaded already or the hub reachable."
)


@dataclass(frozen=True)
class Language:
    """The tokenizer of a policy and the ids that end its sequences."""

    chat: ChatTokenizer
    eos_ids: tuple[int, ...]
    positions: int = 0
    """Number of positions of the model; 0: unknown."""
    payload_kinds: PayloadKinds = field(default_factory=dict)
    """Kinds of payloads that the policy's engines take."""


def load_language(model: ModelSpec, field: str) -> Language:
    """Load the tokenizer and end-of-sequence ids of `model`, checked against its configuration.
    Blocking.

    Raises `FailedPrecondition` for a tokenizer or model that cannot be loaded, and
    `InvalidArgument` if the two do not match, or if the chat template exceeds a bound; `field`
    names the model in the job.
    """
    with IMPORTING:
        importlib.import_module("transformers")
    path = None if model.path is None else _local(model.path, f"{field}.path")
    try:
        check_listed_counts(model.config, path, model.revision)
    except BadConfiguration as error:
        raise error.of_job(field, model.path) from error
    tokenizer = _load_tokenizer(model, field)
    config = _load_config(model, field)
    try:
        check_configuration(config)
        eos_ids = set(end_ids(config, model.path, model.revision))
    except BadConfiguration as error:
        raise error.of_job(field, model.path) from error
    _check_vocabulary(tokenizer, config, model, field)
    if tokenizer.eos_token_id is not None:
        eos_ids.add(tokenizer.eos_token_id)
    chat = ChatTokenizer(tokenizer)
    try:
        chat.check_template()
    except ChatTemplateError as error:
        raise InvalidArgument(
            error.message,
            kind=error.kind,
            field=f"{field}.tokenizer" if model.tokenizer else f"{field}.path",
            value=error.value,
            remedy=error.remedy,
        ) from error
    return Language(chat, tuple(sorted(eos_ids)), positions_of(config.get_text_config()))


def stop_ids(stops: Sequence[str], language: Language, field: str) -> tuple[int, ...]:
    """Return the ids that end a response: end-of-sequence and the strings `stops`, each one token.

    Raises `InvalidArgument` for a string that is not one token.
    """
    found = list(language.eos_ids)
    for stop in stops:
        ids = language.chat.encode(stop)
        known = language.chat.transcript(ids) == stop
        if len(ids) != 1 or not known:
            raise InvalidArgument(
                f"this is {len(ids)} tokens of the vocabulary, but must be one"
                if known
                else "the vocabulary cannot encode this",
                field=field,
                value=stop,
                remedy="Stop at a single token, or cut the text in the workflow.",
            )
        found.append(ids[0])
    return tuple(dict.fromkeys(found))


def token_counter(
    spec: JobSpec, languages: Mapping[str, Language]
) -> Callable[[Sequence[str]], list[int]]:
    """Return a counter of tokens; for each text it takes the largest count of the job's
    tokenizers."""
    different = {
        spec.policies[name].language_model.tokenizer_source: language.chat
        for name, language in languages.items()
    }

    def count(texts: Sequence[str]) -> list[int]:
        texts = [utf8_text(text) for text in texts]
        return [
            max(one)
            for one in zip(*(chat.lengths(texts) for chat in different.values()), strict=True)
        ]

    return count


def role_of(
    spec: JobSpec, name: str, languages: Mapping[str, Language], policy: str | None = None
) -> Role:
    """Return the agent `name` of a job; `languages` by policy. `policy`: the policy that plays it
    instead of its own.

    Raises the `InvalidArgument` of `stop_ids`.
    """
    agent = spec.agents[name]
    policy = policy or agent.policy
    language = languages[policy]
    sampling, served = agent.sampling, spec.policies[policy]
    model = served.language_model
    return Role(
        name=name,
        policy=policy,
        tokenizer=language.chat,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=sampling.logprobs,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=stop_ids(sampling.stop, language, f"agents.{name}.sampling.stop"),
        ),
        system_prompt=agent.system_prompt,
        parser=parser_of(model.tool_parser, model.reasoning_parser),
        template_options=model.chat_template_kwargs,
        endpoint=EndpointOptions(agent.endpoint.lenient, agent.endpoint.sampling),
        context=context_of(served.engine.max_context, language.positions),
        payload_kinds=language.payload_kinds,
    )


def _load_tokenizer(model: ModelSpec, field: str) -> Any:
    from transformers import AutoTokenizer

    own = model.tokenizer is not None
    leaf = "tokenizer" if own else "path"
    source = _local(model.tokenizer_source, f"{field}.{leaf}")

    def missing(message: str) -> FailedPrecondition:
        return FailedPrecondition(
            message,
            kind="tokenizer_missing",
            field=f"{field}.{leaf}",
            value=source,
            remedy=_HUB_REMEDY,
        )

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=None if own else model.revision)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ...
        _raise_hub_problem(source, None if own else model.revision, field, leaf, error)
        raise missing(f"no tokenizer can be loaded: {first_line(error)}") from error
    # Without files, transformers makes a tokenizer that has only special tokens.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise missing("there is no tokenizer")
    return tokenizer


def _load_config(model: ModelSpec, field: str) -> Any:
    from transformers import AutoConfig

    if model.config is not None:
        try:
            return AutoConfig.for_model(**model.config)
        except Exception as error:
            raise InvalidArgument(
                f"transformers refuses it: {first_line(error)}",
                kind="model_config",
                field=f"{field}.config",
                remedy="Give `model_type` and the fields of its transformers configuration.",
            ) from error
    assert model.path is not None  # ModelSpec
    source = _local(model.path, f"{field}.path")
    try:
        return AutoConfig.from_pretrained(source, revision=model.revision)
    except Exception as error:
        _raise_hub_problem(source, model.revision, field, "path", error)
        raise FailedPrecondition(
            f"no model can be loaded: {first_line(error)}",
            kind="model_missing",
            field=f"{field}.path",
            value=source,
            remedy=_HUB_REMEDY,
        ) from error


def _raise_hub_problem(
    source: str, revision: str | None, field: str, leaf: str, error: Exception
) -> None:
    """Raise `FailedPrecondition` if the hub caused `error`. `leaf`: the field of the id."""
    problem = hub_problem(source, revision, error)
    if problem is None:
        return
    raise FailedPrecondition(
        problem.message,
        kind="model_missing" if leaf == "path" else "tokenizer_missing",
        field=f"{field}.{leaf if problem.field == 'path' else problem.field}",
        value=source if problem.field == "path" else revision,
        remedy=problem.remedy,
    ) from error


def _local(source: str, field: str) -> str:
    """Return `source` with `~` expanded. Raises `FailedPrecondition` for a directory that does not
    exist."""
    if no_directory(source):
        raise FailedPrecondition(
            "there is no such directory on the rollout worker or on a trainer's host",
            kind="model_missing",
            field=field,
            value=source,
            remedy="Check the path, which must exist on a host with a trainer; relative paths "
            "start "
            "where the services run.",
        )
    path = Path(source).expanduser()
    return str(path) if path.is_dir() else source


def _check_vocabulary(tokenizer: Any, config: Any, model: ModelSpec, field: str) -> None:
    highest = max(tokenizer.get_vocab().values(), default=-1)
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and highest >= size:
        raise InvalidArgument(
            f"the tokenizer has ids up to {highest}, but the model's vocabulary has {size} entries",
            kind="tokenizer_mismatch",
            field=f"{field}.tokenizer" if model.tokenizer else f"{field}.path",
            value=model.tokenizer_source,
            remedy="Use the model's own tokenizer.",
        )


def end_ids(config: Any, path: str | None, revision: str | None) -> frozenset[int]:
    """Return the end-of-sequence ids of a model, from its configuration and its generation
    settings.

    Raises `BadConfiguration` for an id outside the model's vocabulary, and for generation settings
    that are no object.
    """
    from transformers import GenerationConfig

    text = config.get_text_config()
    size = getattr(text, "vocab_size", None)
    ids: set[int] = set()
    for one in (config, text):
        # The architecture's default may belong to another vocabulary.
        own = size if "eos_token_id" in one.to_diff_dict() else None
        ids.update(token_ids("eos_token_id", getattr(one, "eos_token_id", None), own))
    if path is not None:
        try:
            generation = GenerationConfig.from_pretrained(_local(path, ""), revision=revision)
        except (OSError, ValueError):
            return frozenset(ids)  # many models have none
        except TypeError as error:  # transformers expects an object
            raise BadConfiguration(
                "generation_config", first_line(error), "is no JSON object"
            ) from error
        name = "generation_config.eos_token_id"
        ids.update(token_ids(name, generation.eos_token_id, size))
    return frozenset(ids)


def positions_of(config: Any) -> int:
    """Return the number of positions of a model, from its text configuration; 0: unknown."""
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else 0
