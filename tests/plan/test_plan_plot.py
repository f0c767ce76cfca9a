"""The timeline as text: aligned, never wider than asked. The picture: a real one, where it was asked for,
alone.
"""

import pytest

from parallel.pipeline.schedule import SCHEDULES, Op, make_schedule
from plan.plot import draw, make_figure, text
from plan.simulate import Span, Timeline, share, simulate


def timeline(kind, p, m, overlap=None, **cost):
    s = make_schedule(kind, p, m)
    return simulate(s.order, s.n_stages, cost or share(s, 1, 1, 1), overlap=overlap)


def test_the_text_of_small_schedules_by_hand():
    assert text(timeline("1f1b", 2, 3), 80) == [
        "rank 0 |F0 F1 ......B0--- F2 B1--- ...B2--- |",
        "rank 1 |...F0 B0--- F1 B1--- F2 B2--- ......|",
    ]
    assert text(timeline("zb-v", 2, 3), 80) == [
        "rank 0 |F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 ...|",
        "rank 1 |...F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2 |",
    ]
    assert text(timeline("1f1b", 2, 3), 21) == [
        "rank 0 |FF..B0FB1.B2|",
        "rank 1 |.FB0FB1FB2..|",
    ]  # numbers that fit
    assert text(timeline("1f1b", 2, 3), 18) == ["rank 0 |FF..B0FB1>", "rank 1 |.FB0FB1FB>"]


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("width", [10, 40, 79, 300])
def test_lines_of_text_are_aligned_and_fit_the_width(kind, width):
    for p, m in ((1, 1), (2, 2), (4, 12), (11, 22)):
        lines = text(timeline(kind, p, m), width)
        assert len(lines) == p and len({(len(line), line.index("|")) for line in lines}) == 1
        assert len(lines[0]) <= max(width, len("rank 10 |12345678>"))


def test_text_shows_each_op_once():
    for kind, overlap in [(k, None) for k in SCHEDULES] + [("dualpipe-v", 0.8)]:
        s, lines = make_schedule(kind, 3, 9), text(timeline(kind, 3, 9, overlap), 2000)
        for ops, line in zip(s.order, lines):
            low = {stage for stage in {op.stage for op in ops} if stage > min(op.stage for op in ops)}
            want = sorted(
                (op.kind.lower() if op.stage in low else op.kind) + str(op.microbatch) for op in ops
            )
            assert sorted(line.split("|")[1].replace("-", " ").replace(".", " ").split()) == want


def test_measured_times_are_rounded_to_columns():
    spans = [Span(Op("F", 0, 0), 100.01, 100.11), Span(Op("B", 0, 0), 100.13, 100.34)]
    assert text(Timeline([spans]), 40) == ["rank 0 |F0 .B0--- |"]
    spans.append(Span(Op("F", 0, 1), 100.34, 100.34001))
    assert text(Timeline([spans]), 40)[0].startswith("rank 0 |F0---")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.png", "x.svg", "x.pdf"])
def test_a_picture_is_written_in_the_format_of_its_name(tmp_path, name):
    pytest.importorskip("matplotlib")
    two = [("simulated", timeline("dualpipe-v", 2, 4, 0.8)), ("measured", timeline("1f1b", 2, 4))]
    out = draw(two, tmp_path / name, "ms")
    assert [f.name for f in tmp_path.iterdir()] == [name]
    assert out.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[name[-3:]])


@pytest.mark.slow
@pytest.mark.parametrize("kind, p, m", [("1f1b", 2, 4), ("zb-v", 4, 8)])
@pytest.mark.parametrize("length", [20, 125, 220])
def test_title_and_legend_stand_apart_inside_the_picture(kind, p, m, length):
    """As drawn: their boxes do not meet, whatever the title's length and the number of ops; and the axis of
    time says its unit.
    """
    pytest.importorskip("matplotlib")
    title = " ".join(["simulated with the median time of each op"] * 9)[:length].strip()
    figure = make_figure([(title, timeline(kind, p, m)), (title, timeline(kind, p, m))], "ms")
    figure.canvas.draw()
    for rows in figure.axes[::2]:
        texts = [label for label in (rows.title, rows._left_title, rows._right_title) if label.get_text()]
        assert [text.get_text().replace("\n", " ") for text in texts] == [title]
        box, legend = texts[0].get_window_extent(), rows.get_legend().get_window_extent()
        assert not box.overlaps(legend) and not legend.overlaps(rows.get_window_extent().padded(-1))
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert box.y0 > legend.y0
    assert figure.axes[-1].get_xlabel() == "time in ms"
