"""Figures for a paper: their size and text, what is drawn, and that nothing is cut off."""
import dataclasses
import json
import re

import numpy as np
import pytest
from test_compare import make_run
from test_compare_seeds import make_grid

from config.plots import text_style
from runtime.failure import fail_cleanly
from scripts.compare import __main__ as command
from scripts.compare.figure import FigureStyle, draw_figure, tick_text
from scripts.compare.runs import read_run, repeats

COLUMN = FigureStyle(width=3.25, font=None, size=8.0, x="tokens", log_x=False, log_y=False)


def many(folder, number, name="r{}"):
    losses = [float(loss) for loss in 1.2 + 4.8 * np.arange(1, 41) ** -0.5]
    return [make_run(folder / name.format(n), [loss + 0.1 * n for loss in losses], optim__lr=1e-3 * (n + 1))
            for n in range(number)]


def size_in_inches(path):
    """Of a PDF or an SVG, by what the file says: 72 points an inch."""
    text = path.read_bytes().decode("latin-1")
    found = (re.search(r"MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", text)
             or re.search(r'<svg [^>]*?width="([\d.]+)pt" height="([\d.]+)pt"', text, re.DOTALL)
             or re.search(r'<svg [^>]*?height="([\d.]+)pt"[^>]*?width="([\d.]+)pt"', text, re.DOTALL))
    return float(found[1]) / 72, float(found[2]) / 72


@pytest.mark.parametrize("suffix", ["pdf", "svg"])
def test_a_figure_is_as_wide_as_its_column(tmp_path, capsys, suffix):
    """And as high as its legend needs. The same runs give the same bytes."""
    runs = [str(folder) for folder in many(tmp_path, 3)]
    files = [tmp_path / f"{name}.{suffix}" for name in ("one", "two")]
    for file in files:
        words = ("--figure", str(file), "--width", "3.5", "--font-size", "7", "--font", "serif")
        assert command.main([*runs, *words]) == 0
    width, height = size_in_inches(files[0])
    assert width == pytest.approx(3.5, abs=1e-3) and 2.1 < height < 3.5
    assert files[0].read_bytes() == files[1].read_bytes()
    if suffix == "pdf":
        assert b"/FontType 3" not in files[0].read_bytes() and b"DejaVuSerif" in files[0].read_bytes()


@pytest.mark.parametrize("number, name", [
    (12, "r{}"), (3, "optim.lr=0.00{}+model.mixer.kv_heads=2+train.global_batch=64+data.split=90,5,5")])
@pytest.mark.parametrize("log", [False, True])
def test_nothing_is_cut_off_and_all_text_has_its_size(tmp_path, number, name, log):
    from matplotlib.text import Text

    runs = [read_run(folder) for folder in many(tmp_path, number, name)]
    style = dataclasses.replace(COLUMN, log_x=log, log_y=log)
    with text_style(style.font, style.size):
        figure = draw_figure(runs, None, style)
        figure.canvas.draw()
    page, (axes,), (legend,) = figure.bbox, figure.axes, figure.legends
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    assert len(shown) >= number + 8
    for text in shown:
        box = text.get_window_extent()
        assert text.get_fontsize() == 8
        is_inside = (page.x0 - 1 <= box.x0 and box.x1 <= page.x1 + 1
                     and page.y0 - 1 <= box.y0 and box.y1 <= page.y1 + 1)
        assert is_inside or not is_tick_inside(axes, text), text
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert axes.get_window_extent().height > 0.4 * 3.25 * figure.dpi
    assert (axes.get_xscale(), axes.get_yscale()) == (("log", "log") if log else ("linear", "linear"))
    named = [line for line in axes.get_lines() if line.get_label()[0] != "_"]
    looks = {(line.get_color(), line.get_linestyle()) for line in named}
    assert len(looks) == number


def is_tick_inside(axes, text):
    """Ticks beyond the limits have a text that is not drawn."""
    x, y = axes.get_xlim(), axes.get_ylim()
    for axis, (low, high) in ((axes.xaxis, x), (axes.yaxis, y)):
        for tick in axis.get_major_ticks():
            if text in (tick.label1, tick.label2):
                return low <= tick.get_loc() <= high
    return True


def test_a_short_logarithmic_axis_has_numbers(tmp_path):
    """Between 2 and 6 a loss passes no power of ten."""
    runs = [read_run(folder) for folder in many(tmp_path, 1)]
    figure = draw_figure(runs, None, dataclasses.replace(COLUMN, x="steps", log_x=True, log_y=True))
    figure.canvas.draw()
    (axes,) = figure.axes
    for axis, (low, high) in ((axes.yaxis, axes.get_ylim()), (axes.xaxis, axes.get_xlim())):
        shown = [tick.label1.get_text() for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        assert len(shown) >= 3 and all(shown)
    assert axes.get_lines()[0].get_xdata()[0] == 1
    assert [tick_text(value) for value in (0.25, 10_000, 1_500_000, 2e18)] == ["0.25", "10K", "1.5M", "2e+18"]


def test_seeds_are_a_band_and_no_lines_of_their_own(tmp_path):
    grid = {1e-3: {1: 3.0, 2: 4.0, 3: 5.0}, 2e-3: {1: 4.0}}
    runs = [read_run(folder) for folder in make_grid(tmp_path, grid)]
    figure = draw_figure(runs, repeats(runs), COLUMN)
    (axes,) = figure.axes
    lines = [line.get_label() for line in axes.get_lines() if line.get_label()[0] != "_"]
    assert lines == ["optim.lr=0.001: mean of 3 seeds", runs[-1].name]
    assert len(axes.collections) == 1  # the band
    dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in dots] == [[4.5], [4.5]]


@pytest.mark.parametrize("words, says", [
    ("--figure a.eps", "--figure: a.eps ends in none of .pdf, .svg, .png"),
    ("--figure a.pdf --width 0", "--width: 0 inches; from 1 to 40, such as 3.25 for a column"),
    ("--figure a.pdf --font-size 99", "--font-size: 99 points; from 3 to 40"),
    ("--figure a.pdf --font DejaVuSans", "--font: matplotlib finds no DejaVuSans; did you mean DejaVu Sans"),
    ("--figure a.pdf --x hours", "--x: invalid choice: 'hours'"),
    ("--log-x", "--log-x: belongs to --figure FILE; add that, or leave it out"),
    ("--font-size 9 --out a.png", "--font-size: belongs to --figure FILE; add that, or leave it out"),
])
def test_a_mistake_is_one_line_before_any_work(tmp_path, capsys, words, says):
    assert fail_cleanly(command.main, [str(tmp_path / "absent"), *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}")


@pytest.mark.parametrize("option, name", [("--figure", "f.png"), ("--out", "f.html"), ("--csv", "f.csv")])
def test_a_file_that_cannot_be_written_is_one_line(tmp_path, capsys, option, name):
    folders = many(tmp_path, 2)
    (tmp_path / "taken").write_text("")
    file = tmp_path / "taken" / name
    assert fail_cleanly(command.main, [*map(str, folders), option, str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {option}: {file} cannot be written (") and "give another file" in line


@pytest.mark.parametrize("file, text", [
    ("metrics.jsonl", "[1]\n"), ("metrics.jsonl", "\x00\x00"), ("provenance.jsonl", "[]\n"),
    ("starts.jsonl", "3\n"), ("summary.json", '{"tokens": 1, "flops": "many", "step": 40}'),
    ("config.yaml", "train: 3"),
])
def test_a_run_with_a_damaged_file_does_not_end_the_others(tmp_path, capsys, file, text):
    """It is named, or read without what is damaged; the figure has the others."""
    folders = many(tmp_path, 3)
    (folders[1] / file).write_text(text)
    figure = tmp_path / "f.pdf"
    assert fail_cleanly(command.main, [*map(str, folders), "--json", "--figure", str(figure)]) == 0
    out, err = capsys.readouterr()
    names = [row["run"] for row in json.loads(out)["numbers"]]
    assert {"r0", "r2"} <= set(names) and figure.exists()
    assert ("r1" in names) == (f"left out: {folders[1]}: " not in err) and len(err.splitlines()) <= 1
