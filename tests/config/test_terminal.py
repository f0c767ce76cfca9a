"""Text at the width of a terminal: all words stay, and so do the columns that matter."""

import argparse

import pytest

from config.terminal import (
    ParagraphHelp,
    display_width,
    fitting_columns,
    hanging_lines,
    output_width,
    table_lines,
    wrapped,
)

ROWS = [
    {"name": "llama", "size": "8B", "vocab": "128256"},
    {"name": "gpt2", "size": "124M", "vocab": "50257"},
]


@pytest.mark.parametrize("width", [8, 9, 12, 17, 30, 80, None])
def test_columns_leave_in_their_order_and_the_rest_stays(width):
    lines = table_lines(ROWS, to_left=["name"], first_to_go=["vocab", "size"], width=width)
    kept = lines[0].split()
    fitting = 3 if width is None or width >= 17 else 2 if width >= 10 else 1
    assert kept == ["name", "size", "vocab"][:fitting]
    assert [line.split() for line in lines[1:]] == [[row[name] for name in kept] for row in ROWS]
    assert width is None or max(map(len, lines)) <= width
    if "vocab" in kept:
        ends = {line.index(row["vocab"]) + len(row["vocab"]) for line, row in zip(lines[1:], ROWS)}
        assert ends == {len(lines[0])}


def test_columns_without_a_place_in_the_order_always_stay():
    assert fitting_columns({"a": 5, "b": 5}, ["b"], 1) == ["a"]
    assert fitting_columns({"a": 5, "b": 5}, ["b"], 10) == ["a", "b"]
    assert fitting_columns({"a": 5, "b": 5}, ["b"], 10, gap=1) == ["a"]


@pytest.mark.parametrize("width", [1, 10, 22, 40, 200])
def test_no_word_is_lost_and_parts_break_first(width):
    text = "model llama · 4 layers · d 128   100 steps of-one-run/of/a/path"
    lines = wrapped(text, width, indent=1)
    assert " ".join(lines).replace("·", " ").split() == text.replace("·", " ").split()
    assert all(len(line) <= width - 1 or " " not in line for line in lines)
    if width == 22:
        assert lines == ["model llama", "4 layers · d 128", "100 steps", "of-one-run/of/a/path"]


def test_wide_letters_take_two_columns_marks_and_colours_none():
    assert display_width("中文 ok") == 7
    assert display_width("e\N{COMBINING ACUTE ACCENT}") == 1
    assert display_width("\033[32mok\033[0m") == 2
    assert wrapped("中文 · 中文 · 中文", 12) == ["中文 · 中文", "中文"]


def test_a_text_continues_below_its_own_start():
    assert hanging_lines("refused 4: ", "this does nothing at cp 1", 24) == [
        "refused 4: this does",
        "           nothing at cp",
        "           1",
    ]
    assert hanging_lines("a ", "b · c", None) == ["a b · c"]


@pytest.mark.parametrize("width, text, lines", [
    (52, "One sentence of many words that goes on\nover lines.\n\n    a command   --with blanks\n\nAnother.",
     ["One sentence of many words that goes on over", "lines.", "", "    a command   --with blanks", "",
      "Another."]),
    (32, "It does:\n- one thing, with words that\n  go on below\n- another\nAnd then more.",
     ["It does:", "- one thing, with words that", "  go on below", "- another", "And then more."]),
], ids=["indented lines", "items"])
def test_help_fills_the_width_and_keeps_lines_that_stand_apart(monkeypatch, width, text, lines):
    monkeypatch.setenv("COLUMNS", str(width))
    parser = argparse.ArgumentParser(prog="p", description=text, formatter_class=ParagraphHelp)
    assert parser.format_help().split("options:")[0].splitlines()[2:] == [*lines, ""]


def test_the_width_is_asked_of_the_environment_first(monkeypatch):
    monkeypatch.setenv("COLUMNS", "77")
    assert output_width() == 77
