"""How a page becomes one file: templates, with style and script inside and a content policy that forbids the rest.

The page loads nothing. Its script and its style sheet are named in the policy by their hashes, so that nothing a run
wrote could ever run; a live page may besides read its own stream. Escaping is on.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from coremill.report import terminal
from coremill.report.metrics import format_metric, in_words

if TYPE_CHECKING:
    from jinja2 import Environment, Template

FOLDER = Path(__file__).parent


def render_document(template: str, values: Mapping[str, Any], *, live: str | None = None) -> str:
    """A whole page; `live`: the version it shows, of a page that follows its run."""
    style, script = _text("page.css"), _text("page.js")
    return _template(template).render(
        values,
        style=Markup(style),
        script=Markup(script),
        policy=Markup(content_policy(style, script, live=live is not None)),
        live=live,
    )


def render_blocks(template: str, names: Iterable[str], values: Mapping[str, Any]) -> dict[str, str]:
    """Parts of that page by themselves, as the page has them."""
    loaded = _template(template)
    context = loaded.new_context(dict(values))
    return {name: "".join(loaded.blocks[name](context)) for name in names}


def content_policy(style: str, script: str, *, live: bool) -> str:
    """What the page may do. Places are given in style attributes, which no hash can name."""
    connect = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src 'unsafe-inline'; style-src-elem"
        f" '{_digest(style)}'; img-src data:{connect}; base-uri 'none'; form-action 'none'"
    )


def show_value(value: Any) -> str:
    """A chosen value in words."""
    return "yes" if value is True else "no" if value is False else str(value)


def show_cpus(cpus: Any) -> str:
    """Hardware threads as ranges: 0-3, 8."""
    if not isinstance(cpus, list) or not all(isinstance(cpu, int) for cpu in cpus):
        return terminal.NONE if cpus is None else str(cpus)
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges) or terminal.NONE


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # 60 ms that a progress bar need not pay

    environment: Environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": terminal.format_bytes,
        "seconds": terminal.format_seconds,
        "percent": terminal.format_percent,
        "rate": terminal.format_rate,
        "count": terminal.format_count,
        "loss": terminal.format_loss,
        "metric": format_metric,
        "in_words": in_words,
        "value": show_value,
        "cpus": show_cpus,
    }
    return environment


@cache
def _template(name: str) -> Template:
    return _environment().get_template(name)
