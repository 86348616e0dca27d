"""Upload of an exported checkpoint to a Hugging Face hub, through `huggingface_hub`.

The library takes its token and endpoint from the environment (HF_TOKEN, HF_ENDPOINT) or from `hf
auth login`. A repeated upload continues where it was interrupted: files that the hub has are not
sent again. The library waits forever for a silent hub; here every wait has a deadline. `write_card`
writes the export's model card, which describes it and its origin.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from troupe.checkpoints.verifying import Lineage, verify
from troupe.contracts import metric_names
from troupe.rpc.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    TroupeError,
    Unauthenticated,
    Unavailable,
)

T = TypeVar("T")
# Time limit of the hub's answer to a query.
_ANSWER_SECONDS: Final = 60.0
# Longest silence during a request, which is then repeated (five times).
_SILENT_SECONDS: Final = 120.0
# Time limit of an upload: for checks and commits, and for each byte. Slower links time out.
_UPLOAD_SECONDS: Final = 600.0
_UPLOAD_BYTES_PER_SECOND: Final = 1e6
_FIELD: Final = "--push-to-hub"


class HubRepository:
    """A model repository of a hub that this process may write to."""

    def __init__(self, name: str) -> None:
        """Create the repository `name` ("owner/name"), private, unless it is there. Blocking.

        Raises FailedPrecondition (kinds "hub_client_missing", "hub_not_writable"), InvalidArgument
        (kind "hub_name_invalid"), Unauthenticated (kinds "hub_token_missing", "hub_token_refused"),
        Unavailable (kind "hub_unreachable"), DeadlineExceeded.
        """
        try:
            import huggingface_hub
        except ImportError as error:
            raise FailedPrecondition(
                f"uploads need {error.name}",
                kind="hub_client_missing",
                field=_FIELD,
                remedy="`pip install 'troupe-rl[hub]'`.",
            ) from error
        if huggingface_hub.get_token() is None:
            raise Unauthenticated(
                "the hub token is missing",
                kind="hub_token_missing",
                field=_FIELD,
                value=name,
                remedy="Set HF_TOKEN to a token with write access, or log in with `hf auth login`.",
            )
        self.name = name
        # The library reads the endpoint when it is imported.
        self._api: Any = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        huggingface_hub.get_session().timeout = _SILENT_SECONDS
        self._wait(
            "to say whether it has the repository",
            _ANSWER_SECONDS,
            lambda: self._api.create_repo(name, exist_ok=True, private=True),
        )

    def upload(self, folder: Path, message: str) -> str:
        """Upload the files in `folder`, and return the address of the commit. Blocking; repeatable.

        Shows its progress on standard error. Raises the errors of the constructor.
        """
        size = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
        commit = self._wait(
            f"to take {size:,} bytes",
            _UPLOAD_SECONDS + size / _UPLOAD_BYTES_PER_SECOND,
            lambda: self._api.upload_folder(
                repo_id=self.name, folder_path=folder, commit_message=message
            ),
        )
        return str(commit.commit_url)

    def _wait(self, what: str, seconds: float, work: Callable[[], T]) -> T:
        """Return the result of `work` in another thread, which is abandoned after `seconds`."""
        found: list[T] = []
        problems: list[BaseException] = []

        def run() -> None:
            try:
                found.append(work())
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=run, name="hub", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise DeadlineExceeded(
                f"the hub {self._api.endpoint} took more than {seconds:.0f} s {what}",
                kind="hub_silent",
                field=_FIELD,
                value=self.name,
                remedy="Repeat the command later, or from a host with a faster link: files that "
                "the hub "
                "has are not sent again.",
            )
        if problems:
            self._explain(problems[0])
        return found[0]

    def _explain(self, error: BaseException) -> NoReturn:
        """Raise the error as a `TroupeError`, or unchanged if neither hub nor link caused it.

        Errors are distinguished by class names: the library's HTTP client is not a dependency.
        """
        # An error with a large file is the cause of a RuntimeError that names the file.
        kinds = {*type(error).__mro__, *type(error.__cause__).__mro__}
        names = {kind.__name__ for kind in kinds}
        status = getattr(getattr(error, "response", None), "status_code", None)
        found: TroupeError | None = None
        if "HFValidationError" in names:
            found = InvalidArgument(
                f"'{self.name}' is not a repository name",
                kind="hub_name_invalid",
                field=_FIELD,
                value=self.name,
                remedy='Give "owner/name".',
            )
        elif status == 401:
            found = Unauthenticated(
                f"the hub {self._api.endpoint} rejected the token",
                kind="hub_token_refused",
                field=_FIELD,
                value=self.name,
                remedy="Set HF_TOKEN to a valid token with write access.",
            )
        elif status in (403, 404):
            found = FailedPrecondition(
                f"the token has no write access to {self.name} ({_line(error)})",
                kind="hub_not_writable",
                field=_FIELD,
                value=self.name,
                remedy="Name a repository of your own or of your organization, and set HF_TOKEN to "
                "a "
                "token with write access.",
            )
        elif status is not None or names & {"HTTPError", "ConnectionError", "TimeoutError"}:
            found = Unavailable(
                f"the hub {self._api.endpoint} cannot be used: {_line(error)}",
                kind="hub_unreachable",
                field=_FIELD,
                value=self.name,
                remedy="Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, then repeat the "
                "command: files that the hub has are not sent again.",
            )
        if found is None:
            raise error
        raise found from error


def is_export(folder: Path, job_id: str, policy: str | None, version: int | None) -> bool:
    """Return whether `folder` is a whole export of this job, policy (or any) and version (or any).

    Raises DataLoss of kind "checkpoint_corrupt" if its files were damaged.
    """
    lineage = Lineage.read(folder)
    # The model card is written last.
    if lineage is None or lineage.job_id != job_id or not (folder / "README.md").is_file():
        return False
    if policy not in (None, lineage.policy) or version not in (None, lineage.version):
        return False
    verify(folder)
    return True


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_NETWORK_USAGE = """```python
from troupe.networks.exported import ExportedNetwork

network = ExportedNetwork.read(".")
actor = network.actor(network.play(copies=16))
print(actor.sample(seed=0, explore=False).returns)
```

"""


def write_card(folder: Path, rewards: Mapping[str, float]) -> None:
    """Write a checkpoint's README.md (the model card) next to its weights.

    `rewards`: by metric name, of the step that made the version. Writes nothing for a
    checkpoint without a lineage file (`troupe.json`). Raises OSError.
    """
    lineage = Lineage.read(folder)
    if lineage is None:
        return
    adapter = (folder / "adapter_config.json").is_file()
    network = not adapter and _is_network(folder)
    head: dict[str, Any] = {
        "library_name": "troupe" if network else "peft" if adapter else "transformers",
        "pipeline_tag": "reinforcement-learning" if network else "text-generation",
        "tags": ["troupe", "reinforcement-learning", *(["lora"] if adapter else [])],
    }
    if lineage.base_model:
        head["base_model"] = lineage.base_model
    made = "the first weights" if lineage.step < 0 else f"step {lineage.step + 1}"
    rows = {
        "Job": f"{lineage.job} (`{lineage.job_id}`)",
        "Policy": lineage.policy,
        "Version": f"{lineage.version}, made by {made}",
        "Algorithm": lineage.algorithm,
        "Base model": lineage.base_model or "random weights",
        "Checksum as published": f"`{lineage.checksum}`",
        "Checksum of the base": f"`{lineage.base_checksum}`" if lineage.base_checksum else "",
    }
    rows |= {f"`{name}`": f"{value:.4g}" for name, value in sorted(rewards.items())}
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value)
    # JSON is valid YAML, so the front matter needs neither a YAML library nor escaping by hand.
    front = "".join(f"{name}: {json.dumps(value)}\n" for name, value in head.items())
    what = "A LoRA adapter" if adapter else "A causal language model"
    what = "A small network" if network else what
    usage = _NETWORK_USAGE if network else ""
    (folder / "README.md").write_text(
        f"---\n{front}---\n\n# {lineage.job}: {lineage.policy} @ {lineage.version}\n\n"
        f"{what} trained with Troupe.\n\n{usage}| | |\n|---|---|\n{table}",
        encoding="utf-8",
    )


def _is_network(folder: Path) -> bool:
    """Return whether the checkpoint is of a small network, which `troupe.networks.exported`
    loads."""
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return bool(described["model_type"] == "troupe_network")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def rewards_of(rows: Mapping[str, float]) -> dict[str, float]:
    """Select the rewards among a step's metrics."""
    return {n: v for n, v in rows.items() if n.startswith("reward") or n == metric_names.TEAM_SCORE}


def rewards_in(metrics: Path, step: int) -> dict[str, float]:
    """Return the rewards of a step in a job's `metrics.jsonl`; empty if the file has none for
    it."""
    try:
        with metrics.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if row.pop("step", None) == step:
                    return rewards_of(row)
    except (OSError, ValueError, AttributeError):
        pass
    return {}
