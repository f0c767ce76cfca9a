"""Shared by all pictures: figure, style and output.

matplotlib is imported when a picture is drawn. pyplot is not: it has global state and looks for a display.
"""
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#333333", "#e6e6e6"  # colours
Colour = tuple[float, float, float, float]  # red, green, blue, opacity, from 0 to 1


def new_figure(
    width: float, height: float, *, dpi: int = 130, layout: str | None = "constrained"
) -> "Figure":
    """Return an empty white figure. width, height: inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


@contextlib.contextmanager
def text_style(font: str | None, size: float) -> Iterator[None]:
    """Set the font (None for matplotlib's) and its size in points of figures that are drawn and saved inside.

    A PDF embeds fonts as Type 42, which publishers ask for; an SVG has outlines and the same ids each time.
    """
    import matplotlib

    family = {} if font is None else {"font.family": font}
    fixed = {"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "bevatron"}
    with matplotlib.rc_context({**family, **fixed, "font.size": size}):
        yield


def font_names() -> list[str]:
    """Return the names of the generic families and of all fonts that matplotlib finds."""
    from matplotlib import font_manager

    return ["serif", "sans-serif", "monospace", *font_manager.get_font_names()]


def save_figure(figure: "Figure", path: Path) -> None:
    """Replace `path` atomically, in the format of its suffix, without a date. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    figure.savefig(temporary, format=path.suffix[1:], metadata=undated.get(path.suffix))
    os.replace(temporary, path)


def set_title(axes: "Axes", text: str, pad: float | None = None) -> None:
    """Set the title at the left. pad: points between it and the axes."""
    axes.set_title(text, loc="left", fontsize=11, color=INK, pad=pad)


def set_open_frame(axes: "Axes") -> None:
    """Draw no frame above and at the right, and a grid behind the curves."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, lw=0.6)
    axes.set_axisbelow(True)


def shades(count: int, first: float = 0.05, last: float = 0.85) -> list[Colour]:
    """Colours from dark to light, for what has an order. first, last: places on the colour map, 0 to 1."""
    from matplotlib import colormaps

    step = (last - first) / max(1, count - 1)
    return [colormaps["viridis"](first + number * step) for number in range(count)]


def plain_text(text: str) -> str:
    """Escape "$", between two of which matplotlib reads a formula."""
    return text.replace("$", r"\$")
