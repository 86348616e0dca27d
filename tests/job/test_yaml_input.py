"""YAML and JSON of users: bounded before values are built, and read as meant."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.client.cli.app import main
from troupe.yaml_input import (
    MAX_DEPTH,
    MAX_NODES,
    UnreadableText,
    Word,
    read_json_object,
    read_text,
    read_value,
)

LONG = 900_000
MERGES = "a: &a {k: 1}\n" + "\n".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)
BOMBS = {
    "merge keys": MERGES,
    "aliases": "a: &a [1]\n" + "\n".join(f"b{n}: &b{n} [*a]" for n in range(3)) + "\n" + MERGES,
    "aliases of a long text": f"a: &a {'x' * 500_000}\nb: [{', '.join(['*a'] * 1000)}]",
    "itself": "a: &a [*a]",
    "itself, merged": "a: &a\n  <<: *a",
    "decimal": "a: " + "9" * LONG,
    "negative": "a: -" + "9" * LONG,
    "hexadecimal": "a: 0x" + "f" * LONG,
    "octal": "a: 0" + "7" * LONG,
    "binary": "a: 0b" + "1" * LONG,
    "underscores": "a: 1" + "_" * LONG,
    "float": "a: 0." + "1" * LONG,
    "exponent": "a: 1e" + "9" * LONG,
    "sexagesimal, tagged": "a: !!int " + ":".join(["59"] * 300_000),
    "sexagesimal float, tagged": "a: !!float " + ":".join(["59"] * 300_000),
    "hexadecimal, tagged": "a: !!int 0x" + "f" * LONG,
    "key": "? 0x" + "f" * LONG + "\n: 1\n? [a]\n: 2",
    "flow sequences": "[" * LONG,
    "flow mappings": "{a: " * 200_000,
    "block sequences": "- " * 400_000,
    "keys of keys": "? " * 400_000,
    "block mappings": "\n".join(" " * n + "a:" for n in range(1300)),
    "json objects": '{"a": ' * 150_000,
    "json lists": '{"a": ' + "[" * LONG,
    "json integer": '{"a": ' + "9" * LONG + "}",
    "json integer below Python's own limit": '{"a": ' + "9" * 4000 + "}",
    "too long": "a: " + "x" * (1 << 20),
    "tag of another kind": "a: !!timestamp x",
    "tag of another kind of word": "a: !!bool maybe",
    "empty integer": 'a: !!int ""',
    "half a surrogate pair": '{"a": "\\ud800"}',
    "half a surrogate pair in a key": '{"\\udfff": 1}',
    "half a surrogate pair, as it is": "a: '\udc80'",
    "python": "a: !!python/object/apply:os.getcwd []",
}


@pytest.mark.parametrize("name", BOMBS)
def test_oversized_yaml_is_refused_before_it_is_built(name: str) -> None:
    began = time.process_time()
    with pytest.raises(UnreadableText) as caught:
        read_text(BOMBS[name], "the text")
    assert len(str(caught.value)) < 300
    assert caught.value.remedy
    # The report's 415 bytes took 26 s.
    assert time.process_time() - began < 5


# Texts of `n` keys and values, without those around them.
MANY: dict[str, Callable[[int], str]] = {
    "mappings": lambda n: f"[{','.join(['{}'] * n)}]",
    "sequences": lambda n: f"[{','.join(['[]'] * n)}]",
    "numbers": lambda n: f"[{','.join(['1.5'] * n)}]",
    "dates": lambda n: f"[{','.join(['2026-01-01'] * n)}]",
    "keys": lambda n: "\n".join(f"k{i}: 1" for i in range(n // 2)),
    "anchors": lambda n: f"[{','.join(f'&a{i} 0' for i in range(n))}]",
    "aliases": lambda n: f"[&a 1{',*a' * (n - 1)}]",
    "merged": lambda n: f"- &a {{x: 1}}\n- {{<<: [{','.join(['*a'] * (n // 3))}]}}",
    "omap": lambda n: f"!!omap [{','.join(f'{{k{i}: 1}}' for i in range(n // 3))}]",
    "pairs": lambda n: f"!!pairs [{','.join(['{k: 1}'] * (n // 3))}]",
    "set": lambda n: f"!!set {{{','.join(f'k{i}' for i in range(n // 2))}}}",
    "json with an error": lambda n: f'{{"a": [{",".join(["1"] * n)}]',
    "json with a name twice": lambda n: f'{{"a": [{",".join(["1"] * n)}], "a": 1}}',
}


@pytest.mark.parametrize("kind", MANY)
def test_yaml_of_more_nodes_than_python_composes_quickly_is_refused(kind: str) -> None:
    with pytest.raises(UnreadableText, match="has more than 30,000 keys and values") as caught:
        read_text(MANY[kind](2 * MAX_NODES), "the text")
    assert "tasks.source" in caught.value.remedy


@pytest.mark.parametrize("kind", ["mappings", "keys", "omap", "aliases"])
def test_yaml_of_as_many_nodes_as_are_allowed_is_read(kind: str) -> None:
    assert read_text(MANY[kind](MAX_NODES - 10), "the text")


def test_sexagesimal_numbers_are_read_as_text() -> None:
    assert read_text("a: 12:30", "it") == {"a": "12:30"}
    assert read_text("a: " + ":".join(["59"] * 300_000), "it")["a"].startswith("59:59")


def test_yaml_is_read_alike_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins
    import importlib

    import troupe.yaml_input as module

    real = builtins.__import__

    def no_libyaml(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "yaml" and args[2:] and args[2] and "CSafeLoader" in args[2]:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_libyaml)
    spec = importlib.util.find_spec("troupe.yaml_input")
    assert spec is not None
    assert spec.loader is not None
    slow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slow)
    assert slow._Scanner is yaml.SafeLoader
    assert module._Scanner is not yaml.SafeLoader
    text = "a: &x {<<: {b: 1}, c: on, 1: 0x10}\nd: [*x, 1e-5, ~]"
    assert slow.read_text(text, "it") == read_text(text, "it")
    for name in ("merge keys", "itself", "hexadecimal", "flow sequences", "half a surrogate pair"):
        with pytest.raises(slow.UnreadableText):
            slow.read_text(BOMBS[name], "the text")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@given(JSON)
@settings(max_examples=40, deadline=None)
def test_json_is_read_alike_by_every_reader(value: Any) -> None:
    try:
        text = json.dumps({"x": value})
        text.encode()
    except UnicodeEncodeError:
        return
    assert read_json_object(text, "it") == json.loads(text)
    assert read_text(text, "it") == json.loads(text)


@given(st.text(st.sampled_from("{}[]:,-?&*!|>'\"%@`#\n\t <0159xbeE._ynof~="), max_size=80))
@settings(max_examples=500, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (read_text, read_value, read_json_object):
        try:
            read(text, "it")
        except UnreadableText as error:
            assert error.problem  # noqa: PT017


def test_a_usual_depth_is_accepted() -> None:
    deep = MAX_DEPTH - 2
    assert read_text("{a: " * deep + "1" + "}" * deep, "it")
    assert read_text('{"a": ' * deep + "1" + "}" * deep, "it")


def test_yaml_words_keep_their_spelling() -> None:
    found = read_text("[on, Off, yes, NO, 'on', y, true]", "it")
    assert found == ["on", "Off", "yes", "NO", "on", "y", True]
    assert [type(one) for one in found] == [Word, Word, Word, Word, str, str, bool]
    assert read_value("[on, Off, yes, NO, 'on', y, {no: no}]", "it") == [
        True, False, True, False, "on", "y", {"no": False},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        lambda bomb: ["job", "validate", "job.yaml", "--set", f"seed={bomb}"],
        lambda bomb: ["job", "validate", "job.yaml", "--set", f"tasks.args.x={bomb}"],
        lambda bomb: ["environment", "check", "json:loads", "--arg", f"x={bomb}"],
        lambda bomb: ["functions", "deploy", "json:loads", "--set", f"cores={bomb}"],
        lambda bomb: ["functions", "invoke", "f", "--arguments", bomb],
        lambda bomb: ["workflow", "try", "job.yaml", "--query", bomb],
        lambda bomb: ["workflow", "try", "job.yaml", "--script", "script.yaml"],
    ],
)
@pytest.mark.parametrize("bomb", ["hexadecimal", "flow sequences", "json objects", "merge keys"])
def test_every_command_that_reads_yaml_or_json_is_bounded(
    command: Callable[[str], list[str]],
    bomb: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: team\n")
    text = BOMBS[bomb].removeprefix("a: ")
    (tmp_path / "script.yaml").write_text(text)
    status = main(command(text[:100_000]))
    told = capsys.readouterr().err
    assert status in (1, 2)
    assert "Traceback" not in told
    assert len(told) < 2000
    assert "error: " in told
