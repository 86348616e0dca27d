"""Messages about a hub id that cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import errors

from troupe.job import ModelSpec
from troupe.job.hub import hub_problem
from troupe.rpc import FailedPrecondition


def raised(kind: type[Exception]) -> OSError:
    """Return transformers' error: an OSError with advice, from the client's error."""
    try:
        try:
            if issubclass(kind, errors.HfHubHTTPError):
                response = httpx.Response(404, request=httpx.Request("GET", "https://hub/x"))
                raise kind("no", response=response)  # type: ignore[call-arg]
            raise kind("no")
        except Exception as error:
            raise OSError("We had troubles. Check your internet connection!") from error
    except OSError as error:
        return error


@pytest.mark.parametrize(
    ("kind", "environment", "field", "says", "remedy"),
    [
        (errors.GatedRepoError, {}, "path", "no token", "HF_TOKEN"),
        (errors.GatedRepoError, {"HF_TOKEN": "x"}, "path", "cannot read", "Accept"),
        (errors.RepositoryNotFoundError, {}, "path", "no model a/b", "spelling"),
        (errors.RevisionNotFoundError, {}, "revision", "no revision v9", "branch"),
        (
            errors.LocalEntryNotFoundError,
            {"HF_HUB_OFFLINE": "1", "HF_HOME": "/cache"},
            "path",
            "/cache",
            "hf download a/b --revision v9",
        ),
        (errors.OfflineModeIsEnabled, {"TRANSFORMERS_OFFLINE": "yes"}, "path", "TRANSF", "unset"),
        (errors.LocalEntryNotFoundError, {}, "path", "cannot be reached", "share the cache"),
        (httpx.ConnectError, {}, "path", "cannot be reached", "share the cache"),
    ],
)
def test_a_hub_error_names_the_field_at_fault(
    kind: type[Exception], environment: dict[str, str], field: str, says: str, remedy: str
) -> None:
    problem = hub_problem("a/b", "v9", raised(kind), environment)
    assert problem is not None
    assert problem.field == field
    assert says in problem.message
    assert remedy in problem.remedy


def test_other_faults_are_not_blamed_on_the_hub(tmp_path: Path) -> None:
    away = raised(errors.LocalEntryNotFoundError)
    assert hub_problem(str(tmp_path), None, away, {}) is None
    assert hub_problem("/no/such/place", None, away, {}) is None
    assert hub_problem("a/b", None, raised(ValueError), {}) is None


def test_a_model_missing_offline_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers' own error of a model that is in no cache, offline."""
    import huggingface_hub.constants

    from troupe.workflow.languages import _load_config

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model: dict[str, Any] = {"path": "nobody/has-this-model", "revision": "v2"}
    with pytest.raises(FailedPrecondition) as error:
        _load_config(ModelSpec(**model), "policies.solver.model")
    assert error.value.field == "policies.solver.model.path"
    assert "HF_HUB_OFFLINE is set" in error.value.message
    assert "hf download nobody/has-this-model --revision v2" in (error.value.remedy or "")
