"""Every `pip install` that documentation, messages and recipes tell is a command that installs what
is meant: this project, its extras, or a package of others that is known here.

In prose and messages a command stands in backquotes; elsewhere it ends with its line.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN: str = PROJECT["name"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DEPENDENCIES = {
    canonicalize_name(Requirement(line).name)
    for lines in (PROJECT["dependencies"], *EXTRAS.values())
    for line in lines
}
# Third-party packages that users install in addition to Troupe; none is a dependency.
OTHERS = {
    "autogen-agentchat",
    "autogen-ext",
    "marble-v1",
    "setuptools",
    "sglang",
    "verifiers",
    "vllm",
}
OPTIONS_WITH_VALUE = {
    *("-r", "--requirement", "-c", "--constraint"),
    *("--python", "--index-url", "--find-links", "--target"),
}
# Placeholders that the reader or the shell fills in.
PLACEHOLDER = re.compile(r"\$|\{|\.\.\.|^[A-Z]+$")


@dataclass(frozen=True)
class InstallLine:
    """The packages of one command, and its place."""

    where: str
    arguments: tuple[str, ...]

    @property
    def requirements(self) -> list[Requirement]:
        """The packages by name. A wheel of `dist` and an editable checkout are this project."""
        found = []
        words = list(self.arguments)
        while words:
            word = words.pop(0)
            if word in OPTIONS_WITH_VALUE:
                words.pop(0)
            elif word.startswith("-") or PLACEHOLDER.search(word):
                continue
            elif match := re.fullmatch(r"(?:\.|dist/(.+\.whl))(\[[\w,-]+\])?", word):
                if match[1]:
                    name, version, *_ = parse_wheel_filename(match[1])
                    assert (name, str(version)) == (OWN, PROJECT["version"]), self.where
                found.append(Requirement(OWN + (match[2] or "")))
            else:
                found.append(Requirement(word))
        return found


def commands(text: str) -> list[str]:
    """The arguments of every `pip install` of a text."""
    found = []
    for match in re.finditer(r"\bpip install\b(.*)", text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        rest = match[1].replace('\\"', '"')
        if before.count("`") % 2:
            rest = rest.split("`")[0]
        found.append(re.split(r"\s#|&&|;|\||-->|\\$", rest)[0])
    return found


def install_lines() -> list[InstallLine]:
    """Return the lines of all files except tests and the changelog, whose lines are history."""
    kinds = ("*.md", "*.py", "*.yaml", "*.yml", "*Dockerfile", ":!tests", ":!CHANGELOG.md")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *kinds]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in names.splitlines():
        text = (ROOT / name).read_text(encoding="utf-8")
        for command in commands(text):
            try:
                arguments = shlex.split(command)
            except ValueError:
                pytest.fail(f"{name}: put this command in backquotes: pip install{command}")
            found.append(InstallLine(name, tuple(arguments)))
        # The packages of `pip install '{package}'`.
        packages = re.findall(r'missing_library\("\w+", "(\w+)"', text)
        found += [InstallLine(name, (package,)) for package in packages]
    return found


def fault(line: InstallLine) -> str | None:
    """Why a line installs something that is not meant; None if it does not."""
    try:
        requirements = line.requirements
    except InvalidRequirement as error:
        return f"not a command, put it in backquotes: {error}"
    for one in requirements:
        name = canonicalize_name(one.name)
        if name == "troupe":
            return f"{name} is another project, this one is {OWN}"
        if name == OWN and not one.extras <= EXTRAS.keys():
            return f"there is no extra {', '.join(one.extras - EXTRAS.keys())}"
        if name not in {OWN, *DEPENDENCIES, *OTHERS}:
            return f"{name} is neither a dependency nor among OTHERS"
    return None


def test_install_lines_name_this_project_its_extras_and_known_packages() -> None:
    lines = install_lines()
    assert {"README.md", "docs/tutorials/first-team.md"} <= {line.where for line in lines}
    assert [(line.where, wrong) for line in lines if (wrong := fault(line))] == []
    named = {canonicalize_name(one.name) for line in lines for one in line.requirements}
    assert named >= OTHERS


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('pip install "troupe[cpu]"', "another project"),
        ("uv pip install -q troupe", "another project"),
        ("Run `pip install 'troupe_rl[cpus]'`.", "no extra cpus"),
        ("pip install troupe-rI", "neither"),
        ("pip install numpy where the trainer runs", "neither"),
    ],
)
def test_install_line_that_installs_something_else_is_found(text: str, wrong: str) -> None:
    [command] = commands(text)
    assert wrong in str(fault(InstallLine("here", tuple(shlex.split(command)))))


def resolve(requirement: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Ask the registry for a version of one requirement, without installing anything."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-deps", "--quiet", *options, "-"]
    return subprocess.run(command, input=requirement, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_install_lines_resolve(wheel: Path) -> None:
    every = {str(one) for line in install_lines() for one in line.requirements}
    if resolve("setuptools").returncode:
        pytest.skip("the registry cannot be reached")
    unresolved = {}
    for requirement in sorted(every):
        ours = canonicalize_name(Requirement(requirement).name) == OWN
        options = ("--no-index", f"--find-links={wheel.parent}") if ours else ()
        if (done := resolve(requirement, *options)).returncode:
            unresolved[requirement] = done.stderr
    assert unresolved == {}


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_every_extra_resolves_beside_torch_for_cuda(extra: str, tmp_path: Path) -> None:
    """On Linux the registry's torch is the CUDA build, which needs packages for its CUDA."""
    if resolve("setuptools").returncode:
        pytest.skip("the registry cannot be reached")
    cuda = tmp_path / "cuda.txt"
    cuda.write_text(next(one for one in EXTRAS["trainer"] if one.startswith("torch==")))
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--extra", extra]
    command += ["--python-platform", "x86_64-manylinux_2_28", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, str(cuda)], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "nvidia-" in done.stdout


def sglang_releases() -> dict[str, set[str]]:
    """The releases of SGLang that recipes, documentation and messages install, by file."""
    kinds = ("docs/*.md", "README.md", "deploy", "docker-compose*.yml", "troupe/job/engines")
    listed = subprocess.run(
        ["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {}
    for name in listed.stdout.splitlines():
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        names = r"sglang==|sglang:v|SGLANG(?:_VERSION)?(?:[:=] ?|:-)\"?"
        said = re.findall(rf"(?:{names})(\d[\w.]*)", text)
        if re.search(r"install .*\bsglang\b(?!==)(?!-)", text):
            said.append("any")
        if said:
            found[name] = set(said)
    return found


def test_one_release_of_sglang_is_installed_everywhere() -> None:
    found = sglang_releases()
    places = {"docs/gpus.md", "docs/tutorials/gpu.md", "docker-compose.gpu.yml"}
    assert places | {"troupe/job/engines/sglang.py"} < set(found)
    assert len(set.union(*found.values())) == 1, found


@pytest.mark.slow
def test_sglang_brings_the_torch_and_the_nccl_of_the_trainer() -> None:
    """NCCL forms no group of two of its releases; each torch is built with one."""
    if resolve("setuptools").returncode:
        pytest.skip("the registry cannot be reached")
    [release] = set.union(*sglang_releases().values())
    torch = next(one for one in EXTRAS["trainer"] if one.startswith("torch=="))

    def beside(requirement: str) -> dict[str, str]:
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "-"]
        options = ["--python-platform", "x86_64-manylinux_2_35", "--prerelease", "allow"]
        done = subprocess.run(
            [*command, *options],
            input=requirement,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        pins = dict(re.findall(r"^([\w-]+)==(\S+)", done.stdout, re.MULTILINE))
        return {name: pins[name] for name in ("torch", "nvidia-nccl-cu13")}

    assert beside(f"sglang=={release}") == beside(torch)


@pytest.mark.slow
def test_the_name_on_the_registry_is_free_or_ours(tmp_path: Path) -> None:
    if resolve("setuptools").returncode:
        pytest.skip("the registry cannot be reached")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(tmp_path)]
    done = subprocess.run([*command, OWN], capture_output=True, text=True, timeout=300)
    if done.returncode:
        assert f"No matching distribution found for {OWN}" in done.stderr
        return
    [found] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(found) as held:
        [name] = [name for name in held.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(held.read(name).decode())
    assert metadata["Summary"] == PROJECT["description"]
