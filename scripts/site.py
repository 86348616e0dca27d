"""MkDocs hooks: README.md is the site's first page, and links of the documentation that lead out of
docs/ lead somewhere on the site, too.

A Markdown page of the repository that a page links to (an example's README) is a page
of the site, and so is a picture that it shows; another file is a page that shows its text. All are
below `repository/`, by their own path.
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
FIRST_PAGE: Final = "index.md"
REPOSITORY: Final = "repository"
_LINK: Final = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_TABLE: Final = re.compile(r"<table>\s*<thead>\s*<tr>(.*?)</tr>", re.S)
_CODE: Final = re.compile(r"`[^`\n]+`")
_PICTURES: Final = (".svg", ".png")
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
    if uri == FIRST_PAGE:
        return "README.md"
    if uri.startswith(f"{REPOSITORY}/"):
        return uri.removeprefix(f"{REPOSITORY}/")
    return f"docs/{uri}"


def _uri(target: Path) -> str:
    """Path on the site, as a source file of MkDocs, of a file of the repository."""
    if target == Path("README.md"):
        return FIRST_PAGE
    itself = target.suffix in (".md", *_PICTURES)
    return f"{REPOSITORY}/{target}" if itself else f"{REPOSITORY}/{target}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make README.md the first page; add what pages link to, and what that links to."""
    first = files.get_file_from_path(FIRST_PAGE)
    assert first is not None
    title = "---\ntitle: Troupe\nhide: [navigation]\n---\n\n"
    text = title + (ROOT / "README.md").read_text(encoding="utf-8")
    files.remove(first)
    files.append(File.generated(config, FIRST_PAGE, content=text))
    todo = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while todo:
        uri, text = todo.pop()
        for _, link, _ in _LINK.findall(text):
            target = _target(_source(uri), link)
            if target is None or files.get_file_from_path(_uri(target)) is not None:
                continue
            if target.suffix in _PICTURES:
                files.append(File.generated(config, _uri(target), abs_src_path=str(ROOT / target)))
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
    """Turn links that lead out of docs/ to the pages that `on_files` has added, and unescape pipes
    in the code of tables: GitHub needs the backslash, Python-Markdown would show it."""
    here = page.file.src_uri

    def turned(match: re.Match[str]) -> str:
        target = _target(_source(here), match[2])
        if target is not None:
            link = posixpath.relpath(_uri(target), posixpath.dirname(here) or ".")
        elif not _source(here).startswith("docs/"):  # from the repository into docs/
            path = posixpath.normpath(posixpath.join(posixpath.dirname(_source(here)), match[2]))
            if not path.startswith("docs/"):
                return match[0]
            link = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(here) or ".")
        else:
            return match[0]
        return f"{match[1]}{link}{match[3]}"

    lines = _LINK.sub(turned, markdown).split("\n")
    return "\n".join(_unescaped(line) if line.startswith("|") else line for line in lines)


def _unescaped(row: str) -> str:
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), row)


def on_page_content(html: str, **_: Any) -> str:
    """Mark the tables that are lists, so that a narrow screen shows them as such (site.css): the
    tables of a job's fields, and tables of two columns."""

    def marked(match: re.Match[str]) -> str:
        headers = re.findall(r"<th[^>]*>(.*?)</th>", match[1], re.S)
        if headers[0] == "field":
            return match[0].replace("<table>", '<table data-list="fields">', 1)
        if len(headers) == 2:
            return match[0].replace("<table>", '<table data-list="pairs">', 1)
        return match[0]

    return _TABLE.sub(marked, html)
