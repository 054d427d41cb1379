"""What `inspect` shows, as pictures and one HTML page that needs nothing else."""

import base64
import io
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.image import imsave

from attnres_lit.inference.inspect import Insight, effective_sources, most_read
from attnres_lit.inference.pictures import draw_rms, draw_tokens, draw_weights, name_of, source_names

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto; white-space: pre-wrap; }
.bar { display: inline-block; height: .7em; background: #31688e; }
"""
NO_WEIGHTS = "This strategy has no depth attention: every site reads what the residual gives it."


def pictures(insight: Insight) -> dict[str, bytes]:
    """PNG files by name."""
    drawn = {"output_rms": draw_rms(insight.rms)}
    if insight.weights:
        drawn["depth_weights"] = draw_weights(insight.means)
        drawn["depth_weights_per_token"] = draw_tokens(
            insight.weights, [repr(text)[1:-1].replace(" ", "·") for text in insight.tokens]
        )
    return {f"{name}.png": _png(image) for name, image in drawn.items()}


def _png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    imsave(file, image, format="png")
    return file.getvalue()


def page(insight: Insight, title: str, facts: Mapping[str, object], images: Mapping[str, bytes]) -> str:
    """The HTML.

    Args:
        insight: what to show.
        title: of the page.
        facts: about the model, by name.
        images: what `pictures` drew.
    """
    total = sum(insight.parameters.values())
    shares = (
        (part, f"{count:,}", f"{100 * count / total:.2f} %", _bar(count / total))
        for part, count in insight.parameters.items()
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(("", ""), ((name, escape(str(value))) for name, value in facts.items())),
        "<h2>Parameters</h2>",
        _table(("part", "parameters", "share", ""), (*shares, ("total", f"{total:,}", "100 %", ""))),
        "<h2>The text</h2>",
        f"<p>{len(insight.tokens)} tokens. What follows is what the model does with them.</p>",
        f"<pre>{escape(''.join(insight.tokens))}</pre>",
        "<h2>What each site reads from depth</h2>",
    ]
    if insight.weights:
        parts += [
            "<p>Rows are sites, columns are sources: the embedding, then what the sites wrote, oldest first.</p>",
            _img(images, "depth_weights.png", "heat map of mean depth-attention weights"),
            "<p>The sources with the largest mean weights. A site that reads n sources alike reads n effectively.</p>",
            _table(("site", "reads most", "then", "then", "effective sources", "of"), _reads(insight)),
            "<h2>Token by token</h2>",
            "<p>One panel for each site: sources down, tokens to the right; a dot is a space.</p>",
            _img(images, "depth_weights_per_token.png", "depth-attention weights of every token"),
        ]
    else:
        parts.append(f"<p>{NO_WEIGHTS}</p>")
    parts += [
        "<h2>How large the output is</h2>",
        _img(images, "output_rms.png", "root mean square after each layer"),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def write(folder: str | Path, insight: Insight, title: str, facts: Mapping[str, object]) -> list[Path]:
    """Write `index.html` and the pictures into a folder, which is made if it is not there; return their paths.

    Raises:
        ValueError: the folder cannot be written.
    """
    folder, images = Path(folder), pictures(insight)
    files = {"index.html": page(insight, title, facts, images).encode(), **images}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}") from None
    return [folder / name for name in files]


def _reads(insight: Insight) -> Iterable[tuple[str, ...]]:
    """A row of the table for each site."""
    rows = insight.means
    names = source_names(1 + max(at for row in rows.values() for at in row))
    for site, row in rows.items():
        best = [f"{names[at]} {weight:.2f}" for at, weight in most_read(row)]
        name = "exit" if site == max(rows) else name_of(site)
        yield name, *best, *[""] * (3 - len(best)), f"{effective_sources(row):.1f}", str(len(row))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells may hold HTML."""
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    top = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<table><tr>{top}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _bar(share: float) -> str:
    return f'<span class="bar" style="width: {12 * share:.2f}em"></span>'


def _img(images: Mapping[str, bytes], name: str, alt: str) -> str:
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(images[name]).decode()}">'
