"""MkDocs hooks: links of the documentation that lead out of docs/ lead somewhere on the site, too.

A Markdown page of the repository that a page links to (an example's README) is a page
of the site; another file is a page that shows it. Both are below `repository/`, by their own path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent
HOME: Final = "repository"
_LINK: Final = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_LANGUAGES: Final = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def _target(page: str, link: str) -> Path | None:
    """Return the file of the repository behind a link of a page (both relative to the root), if it
    is not below docs/. A folder is its README, or its first job or module."""
    path = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if path.is_dir():
        inside = [path / "README.md", *sorted(path.glob("*.yaml")), *sorted(path.glob("*.py"))]
        path = next((one for one in inside if one.is_file()), path)
    if not path.is_file() or path.is_relative_to(ROOT / "docs"):
        return None
    return path.relative_to(ROOT)


def _source(uri: str) -> str:
    """Path in the repository of a page of the site."""
    if uri.startswith(f"{HOME}/"):
        return uri.removeprefix(f"{HOME}/")
    return f"docs/{uri}"


def _uri(target: Path) -> str:
    """Path on the site, as a source file of MkDocs, of a file of the repository."""
    return f"{HOME}/{target}" if target.suffix == ".md" else f"{HOME}/{target}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to, and what that links to."""
    todo = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while todo:
        uri, text = todo.pop()
        for _, link, _ in _LINK.findall(text):
            target = _target(_source(uri), link)
            if target is None or files.get_file_from_path(_uri(target)) is not None:
                continue
            content = (ROOT / target).read_text(encoding="utf-8")
            if target.suffix != ".md":
                language = _LANGUAGES.get(target.suffix, "text")
                content = f"# {target}\n\n````{language}\n{content}\n````\n"
            else:
                todo.append((_uri(target), content))
            made = File.generated(config, _uri(target), content=content)
            # In the search and behind links, not in the navigation.
            made.inclusion = made.inclusion.NOT_IN_NAV
            files.append(made)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links that lead out of docs/ to the pages that `on_files` has added."""
    here = page.file.src_uri

    def turned(match: re.Match[str]) -> str:
        target = _target(_source(here), match[2])
        if target is not None:
            link = posixpath.relpath(_uri(target), posixpath.dirname(here) or ".")
        elif here.startswith(f"{HOME}/"):  # from the repository into docs/
            path = posixpath.normpath(posixpath.join(posixpath.dirname(_source(here)), match[2]))
            if not path.startswith("docs/"):
                return match[0]
            link = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(here))
        else:
            return match[0]
        return f"{match[1]}{link}{match[3]}"

    return _LINK.sub(turned, markdown)
