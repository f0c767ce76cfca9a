"""config/plots.py: a picture is replaced whole, and a "$" in a name is a "$"."""

import pytest

from config.plots import new_figure, plain_text, save_figure, set_title, shades


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_figure_is_written_in_the_format_of_its_suffix(tmp_path, suffix, start):
    path = tmp_path / f"x.{suffix}"
    save_figure(new_figure(2, 2), path)
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_picture_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(b"old")
    figure = new_figure(2, 2)
    set_title(figure.subplots(), r"$\nothing$")
    with pytest.raises(ValueError):
        save_figure(figure, path)
    assert path.read_bytes() == b"old"


def test_a_dollar_in_a_name_is_not_a_formula(tmp_path):
    figure = new_figure(2, 2)
    set_title(figure.subplots(), plain_text(r"run $\nothing$"))
    save_figure(figure, tmp_path / "x.png")


def test_shades_go_from_dark_to_light():
    light = [red + green for red, green, _, _ in shades(5)]
    assert light == sorted(light) and len(set(light)) == 5
    assert shades(1) == shades(5)[:1]
