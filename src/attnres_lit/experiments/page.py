"""A report as one HTML page that needs nothing else, and as Markdown with its pictures beside it."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --line: #ddd; --soft: #f5f5f5; --text: #222; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --line: #444; --soft: #2a2a2a; --text: #ddd; --page: #1c1c1c; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: var(--text);
  background: var(--page); }
h2 { margin-top: 2em; border-top: 1px solid var(--line); padding-top: .6em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .8em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
code { background: var(--soft); padding: .1em .3em; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Table:
    """Plain text in cells; the first column is set left, the others right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A figure, the name of its files, and what it shows in words."""

    name: str
    figure: Figure
    alt: str


@dataclass(frozen=True)
class Section:
    """A title, and below it paragraphs, tables and pictures."""

    title: str
    parts: Sequence[str | Table | Picture]


def file_name(what: str, label: str) -> str:
    """Of a picture of something that has a label, without what a name of a file should not have."""
    return re.sub(r"[^\w.=-]+", "_", f"{what}_{label}").strip("_")


def markdown(title: str, intro: Sequence[str], sections: Sequence[Section], command: str) -> str:
    """The report; every section names the command that made it, so that it can be taken elsewhere."""
    lines = [f"# {title}", *intro]
    for section in sections:
        lines += [f"## {section.title}", f"Made by `{command}`.", *map(_markdown, section.parts)]
    return "\n\n".join(lines) + "\n"


def markdown_table(table: Table) -> str:
    """With numbers set right."""
    rows = [table.head, ["---", *["---:"] * (len(table.head) - 1)], *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _markdown(part: str | Table | Picture) -> str:
    if isinstance(part, Picture):
        return f"![{part.alt}]({part.name}.png)"
    return markdown_table(part) if isinstance(part, Table) else part


def html(
    title: str, intro: Sequence[str], sections: Sequence[Section], command: str, images: Mapping[str, bytes]
) -> str:
    """The page.

    Args:
        title: of it.
        intro: paragraphs before the first section.
        sections: in their order.
        command: that made it.
        images: PNG files by name of the picture.
    """
    body = [f"<h1>{escape(title)}</h1>", *map(_paragraph, intro), f"<p>Made by <code>{escape(command)}</code>.</p>"]
    for section in sections:
        body.append(f"<h2>{escape(section.title)}</h2>")
        body += [_html(part, images) for part in section.parts]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    page = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>\n{page}\n</body></html>\n'


def _html(part: str | Table | Picture, images: Mapping[str, bytes]) -> str:
    if isinstance(part, Picture):
        data = base64.b64encode(images[part.name]).decode()
        width = round(part.figure.get_figwidth() * 110)  # pixels
        return f'<img alt="{escape(part.alt)}" width="{width}" src="data:image/png;base64,{data}">'
    if isinstance(part, Table):
        rows = [("th", part.head), *(("td", row) for row in part.rows)]
        lines = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in rows)
        return '<div class="wide"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"
    return _paragraph(part)


def _paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{escape(text)}</p>"
