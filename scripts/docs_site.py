"""What mkdocs.yml leaves to Python: which pages there are and in which order, and links as the repository has them.

The pages are read where they are: docs/, and from the root the README (the home page) and a few others. Links in them
are those of the repository, so that they work there too; one to a file that the site has not becomes its words. Every
page is in exactly one group: one that no group names ends the build.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
CSS = """\
.md-grid { max-width: 72rem; }
.md-typeset h1, .md-typeset h2, .md-typeset h3 { font-weight: 600; color: inherit; letter-spacing: 0; }
.md-typeset { overflow-wrap: break-word; }
/* Tables scroll on their own where a window is too narrow for them. */
.md-typeset table:not([class]) th { min-width: 3.5rem; padding: .6em .8em; }
.md-typeset table:not([class]) td { padding: .6em .8em; }
.md-typeset table:not([class]) td code { word-break: normal; }
"""
# Pages of the root, by their address on the site. Those that are not there (yet) are left out.
OF_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# Files of the repository that pages link to and the site gives as they are.
AS_THEY_ARE = ("examples",)
GROUPS = {
    "Guide": (
        "guide/text.md",
        "guide/conversations.md",
        "guide/bert.md",
        "guide/one-machine.md",
        "guide/several-machines.md",
        "guide/eks.md",
        "guide/coming-from.md",
        "guide/trouble.md",
        "guide/more.md",
    ),
    "Reference": (
        "config.md",
        "plan.md",
        "what-fits.md",
        "plan-table.md",
        "families.md",
        "settings-of-other-tools.md",
        "k8s-check.md",
        "k8s-reference.md",
        "benchmarks.md",
        "chaos.md",
    ),
    "Project": (
        "changelog.md",
        "architecture.md",
        "decisions/README.md",
        "decisions/*.md",
        "log.md",
        "tried.md",
        "contributing.md",
        "security.md",
    ),
}
# Searching, people want what to do before why it is so: by the beginning of a page's name.
SEARCH_BOOST = {"guide": 10.0, "decisions/": 0.05, "log.md": 0.05, "tried.md": 0.05, "changelog.md": 0.05}
_FENCE = re.compile(r"(^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\2`*\s*$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!\w+:|#)([^()\s]+)\)")
_ITEM = re.compile(r"^(?:[-*+]|\d+\.) ")


def slug(heading: str, separator: str) -> str:
    """The name of a heading as code hosts make it, which is how links on the pages name it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"]["slugify"] = slug
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.copyright = f"coremill {project['version']}, {project['license']}"
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    config.nav = navigation(pages | {name for source, name in OF_ROOT.items() if (ROOT / source).is_file()})
    return config


def navigation(pages: set[str]) -> list[dict[str, Any]]:
    """The groups with the pages that are there, each in the first place that names it."""
    left, found = pages - {"index.md"}, []
    for group, names in GROUPS.items():
        entries: list[Any] = []
        for name in names:
            if name.endswith("*.md"):
                folder = name.removesuffix("*.md")
                entries += sorted(page for page in left if page.startswith(folder))
            elif name in left:
                entries.append(name)
            left -= set(entries)
        decisions = [entry for entry in entries if entry.startswith("decisions/")]
        if decisions:  # a folder of its own, where it begins
            place = entries.index(decisions[0])
            entries = [entry for entry in entries if entry not in decisions]
            entries.insert(place, {"Decisions": decisions})
        if entries:
            found.append({group: entries})
    if left:
        raise PluginError(f"no group of {Path(__file__).name} names {', '.join(sorted(left))}: say where it belongs")
    return [{"Home": "index.md"}, *found]


def on_files(files: Files, config: Any) -> Files:
    """What is on the site and not in docs/."""
    files.append(File.generated(config, "site.css", content=CSS))
    for source, name in OF_ROOT.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for folder in AS_THEY_ARE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file():
                name = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them, and lists that begin without an empty line, outside of fenced blocks."""
    name = page.file.src_uri
    if name == "index.md":
        page.meta["hide"] = ["navigation"]  # it would be a list of one
    boosts = [boost for start, boost in SEARCH_BOOST.items() if name.startswith(start)]
    page.meta.setdefault("search", {"boost": boosts[0] if boosts else 1.0})
    source = next((source for source, given in OF_ROOT.items() if given == name), f"docs/{name}")
    parts = _FENCE.split(markdown)
    # Of each match split gives what lies before it, the block, and its fence.
    text = [
        lists(links(parts[i], source, name, files)) + (parts[i + 1] if i + 1 < len(parts) else "")
        for i in range(0, len(parts), 3)
    ]
    return "".join(text)


def links(text: str, source: str, name: str, files: Files) -> str:
    """A page's links, from where it lies in the repository to where its target is on the site."""

    def on_site(link: re.Match[str]) -> str:
        is_picture, words, target = link.groups()
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = OF_ROOT.get(file, file.removeprefix("docs/"))
        if files.get_file_from_path(there) is None:
            if not (ROOT / file).exists():
                return link[0]  # mkdocs will say so
            return words if not is_picture else ""
        there = posixpath.relpath(there, posixpath.dirname(name) or ".")
        return f"{is_picture}[{words}]({there}{'#' + anchor if anchor else ''})"

    return _LINK.sub(on_site, text)


def lists(text: str) -> str:
    """An item right under a paragraph begins a list to code hosts; mkdocs wants an empty line before it."""
    lines: list[str] = []
    for line in text.split("\n"):
        above = lines[-1] if lines else ""
        begins = _ITEM.match(line) and above.strip() and not above.startswith((" ", "#"))
        if begins and not _in_list(lines):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _in_list(lines: list[str]) -> bool:
    """Whether the paragraph that ends here belongs to an item."""
    for line in reversed(lines):
        if _ITEM.match(line):
            return True
        if not line.strip():
            return False
    return False
