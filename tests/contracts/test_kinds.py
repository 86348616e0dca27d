"""Every kind that steers other code is written once, in `troupe/contracts/kinds.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from troupe.contracts import kinds
from troupe.v1 import reward_pb2 as reward_pb

ROOT = Path(__file__).parents[2]
NAMES = {name: text for name, text in vars(kinds).items() if name.isupper()}
KINDS = {name: text for name, text in NAMES.items() if not name.endswith("_PREFIX")}
# Files in which a word is not the kind of that name, or that cannot import it.
OTHERS = {
    # The script runs under an interpreter that has no Troupe.
    "troupe/workflow/environments/adapters/verifiers_host.py": set(KINDS.values()),
    # The kinds of answers of a worker process, which the service turns into `InvocationError.Kind`.
    "services/reward/worker.py": {"bad_arguments", "bad_result", "not_importable", "out_of_memory"},
    # A trainer's own memory.
    "services/trainer/learning/pass_budget.py": {"out_of_memory"},
    # The scores of a reward model.
    "troupe/functions/library/reward_model.py": {"not_finite"},
}


def _files() -> Iterator[tuple[str, ast.Module]]:
    for top in ("troupe", "services"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("troupe/v1/") and name != "troupe/contracts/kinds.py":
                yield name, ast.parse(path.read_text(), name)


def _texts(node: ast.AST | None) -> Iterator[ast.Constant]:
    """The literals that an expression may evaluate to, or has as elements."""
    match node:
        case ast.Constant(value=str()):
            yield node
        case ast.IfExp():
            yield from _texts(node.body)
            yield from _texts(node.orelse)
        case ast.BoolOp():
            for value in node.values:
                yield from _texts(value)
        case ast.BinOp():
            yield from _texts(node.left)
            yield from _texts(node.right)
        case ast.Set() | ast.Tuple() | ast.List():
            for element in node.elts:
                yield from _texts(element)
        case ast.Dict():
            for key in node.keys:
                yield from _texts(key)


def _is_kind(node: ast.AST) -> bool:
    name = getattr(node, "attr", None) or getattr(node, "id", None) or ""
    return name.lower().strip("_") in {"kind", "kinds", "default_kind"}


def _kinds_in(node: ast.AST) -> Iterator[ast.Constant]:
    """Literals that `node` itself uses as kinds."""
    match node:
        case ast.keyword(arg="kind"):
            yield from _texts(node.value)
        case ast.Assign() if any(_is_kind(target) for target in node.targets):
            yield from _texts(node.value)
        case ast.AnnAssign() if _is_kind(node.target):
            yield from _texts(node.value)
        case ast.arguments():
            named = [*node.posonlyargs, *node.args][-len(node.defaults) or None :]
            defaults = [*node.defaults, *node.kw_defaults]
            for argument, default in zip([*named, *node.kwonlyargs], defaults, strict=False):
                if argument.arg == "kind":
                    yield from _texts(default)
        case ast.Compare() if any(_is_kind(side) for side in (node.left, *node.comparators)):
            for side in (node.left, *node.comparators):
                yield from _texts(side)


def _literals(tree: ast.Module) -> Iterator[ast.Constant]:
    """Literals that equal a known kind, where they are kinds: of one word in the positions of
    kinds, of several words everywhere but as a name of something else (an argument, a key)."""
    own = set(KINDS.values())
    for node in ast.walk(tree):
        yield from (one for one in _kinds_in(node) if one.value in own)
        several = []
        match node:
            case ast.Assign() | ast.AnnAssign():
                several = [*_texts(node.value)]
            case ast.Call():
                several = [text for argument in node.args for text in _texts(argument)]
        yield from (one for one in several if one.value in own and "_" in one.value)


def test_a_kind_that_steers_other_code_is_a_literal_only_where_it_is_defined() -> None:
    found = {
        f"{name}:{literal.lineno}: {literal.value}"
        for name, tree in _files()
        for literal in _literals(tree)
        if literal.value not in OTHERS.get(name, ())
    }
    assert not found, "use troupe.contracts.kinds:\n" + "\n".join(sorted(found))


def test_no_error_is_compared_with_a_literal_kind() -> None:
    """A kind that code steers by belongs to `troupe/contracts/kinds.py`, known or not."""
    found = set()
    for name, tree in _files():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Compare):
                continue
            match node.left:
                case ast.Attribute(value=ast.Name(id="error" | "e" | "problem"), attr="kind"):
                    found |= {
                        f"{name}:{text.lineno}: {text.value}"
                        for side in node.comparators
                        for text in _texts(side)
                    }
    # Raised in the same module.
    assert found == {
        text for text in found if text.startswith("troupe/functions/library/judge.py")
    }, found


def test_every_kind_has_a_text_of_its_own_and_says_who_raises_it() -> None:
    assert len(set(KINDS.values())) == len(KINDS)
    tree = ast.parse(Path(kinds.__file__).read_text())
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            word = NAMES[node.target.id].rstrip("_")
            assert node.target.id.removesuffix("_PREFIX").lower() == word
            assert isinstance(following, ast.Expr), f"{node.target.id} lacks a docstring"


@pytest.mark.parametrize(
    "name",
    ["BAD_ARGUMENTS", "BAD_RESULT", "NOT_IMPORTABLE", "OUT_OF_MEMORY", "RAISED", "TIMEOUT"],
)
def test_kinds_of_failed_calls_are_names_of_the_contract(name: str) -> None:
    assert f"KIND_{name}" in reward_pb.InvocationError.Kind.keys()  # noqa: SIM118
    assert KINDS[name] == name.lower()


@pytest.mark.parametrize(
    ("page", "named"),
    [
        ("kubernetes.md", {kinds.GANG_INCOMPLETE}),
        ("operating.md", {kinds.JOB_NOT_PREPARED, kinds.WORKERS_KEEP_DYING}),
        ("rest-api.md", {kinds.MESSAGE_TOO_LARGE}),
        (
            "rewards.md",
            {
                *(kinds.BAD_ARGUMENTS, kinds.BAD_RESULT, kinds.MCP_UNAVAILABLE),
                *(kinds.TIMEOUT, kinds.TOOL_FAILED, kinds.UNKNOWN_TOOL),
            },
        ),
        ("training.md", {kinds.GANG_INCOMPLETE, kinds.GANG_LOST, kinds.GANG_TOO_LARGE}),
        (
            "writing-a-workflow.md",
            {
                *(kinds.BAD_ARGUMENTS, kinds.BAD_RESULT, kinds.OUT_OF_MEMORY, kinds.RAISED),
                *(kinds.REWARD_BAD_TYPE, kinds.REWARD_MISSING, kinds.TIMEOUT),
                kinds.TURN_NOT_AWAITED,
            },
        ),
    ],
)
def test_documentation_names_kinds_as_they_are(page: str, named: set[str]) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert {kind for kind in named if f"`{kind}`" not in text} == set()
