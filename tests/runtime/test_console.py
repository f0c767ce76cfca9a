import fcntl
import io
import math
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from config.terminal import display_width, visible
from runtime.console import Console

ROOT = pathlib.Path(__file__).parents[2]


def test_text_from_the_model_cannot_steer_the_terminal():
    assert visible("def f():\n\treturn 'é'\x1b[2J", 99) == "def f():\\n\\treturn 'é'\\x1b[2J"
    assert visible("abcdef", 4) == "abc…"


def test_wide_letters_count_twice():
    assert visible("中文中文", 8) == "中文中文"
    assert visible("中文中文", 7) == "中文中…"
    assert visible("中文", 2) == "…"


def in_terminal(columns: int, *argv: str) -> list[str]:
    """The lines that a Python command writes to a terminal of this width, without colours."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    child = subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    told = b""
    while True:
        try:
            block = os.read(master, 1 << 16)
        except OSError:  # the other side is closed
            break
        told += block
        if not block:
            break
    os.close(master)
    assert child.wait(60) == 0, told.decode()
    return re.sub(r"\033\[\d+m", "", told.decode()).replace("\r\n", "\n").splitlines()


@pytest.mark.slow
def test_a_run_fits_into_a_terminal_of_80_columns(tmp_path):
    """The header, step lines, validations and end of train.py. The same command in a file says all."""
    words = [
        *("train.py", "mixtral-tiny", "--data.tokenizer", "bytes", "--data.cache", str(tmp_path / "cache")),
        *("--train.steps", "2", "--train.global_batch", "8", "--eval.batches", "1", "--log.every", "1"),
        *("--log.dir", str(tmp_path / "runs")),
    ]
    lines = in_terminal(80, *words)
    too_long = [line for line in lines if display_width(line) > 80 and str(tmp_path) not in line]
    assert not too_long  # a path is not broken
    head = next(line for line in lines if line.startswith(" step"))
    assert head.split() == ["step", "loss", "gnorm", "lr", "tok/s", "mfu", "mem", "data", "eta"]
    steps = [line for line in lines if re.match(r" *\d/2 ", line)]
    assert [len(line) for line in steps] == [len(head)] * 2
    words = set(" ".join(lines).split())
    assert {"params", "experts,", "vocab", "tok/step", "tokenizer", "val", "done"} <= words
    commands = [line[9:] for line in lines if "python " in line and not line.startswith("data")]
    assert len(commands) == 3 and commands[2] == "python train.py --list"


@pytest.mark.slow
def test_the_table_of_recipes_fits_into_80_columns_and_keeps_all():
    """INTERFACE of --list: parameters (total, active), layers, width, heads/kv, experts, vocab, context."""
    lines = in_terminal(80, "train.py", "--list")
    assert max(map(len, lines)) <= 80
    columns = ["recipe", "params", "active", "layers", "width", "heads/kv", "experts", "vocab", "context"]
    assert lines[0].split() == columns
    row = next(line for line in lines if line.startswith("qwen3-30b-a3b "))
    assert row.split() == "qwen3-30b-a3b 30.53B 3.35B 48 2048 32/4 128:8 151936 40960".split()


@pytest.mark.parametrize("width", [12, 24, 40, 60, 73, 80, 91, 120, None])
def test_the_least_important_columns_go_first(width):
    """Step and loss always stay; what follows from other columns goes before what does not."""
    out = io.StringIO()
    console = Console(out, width=lambda: width)
    console.columns(600)
    line(console)
    head, row = out.getvalue().splitlines()[1:]
    order = ["TFLOP/s", "tokens", "data", "mem", "mfu", "lr", "gnorm", "tok/s", "eta"]
    gone = [label for label in order if label not in head.split()]
    assert gone == order[: len(gone)] and head.split()[:2] == ["step", "loss"]
    assert len(head) == len(row) <= max(width or 91, 18)
    assert ("eta" in head) == (width is None or width >= 27)
    if width is None or width >= 91:
        assert not gone


def test_a_terminal_that_changes_gets_new_labels_and_skips_stay_visible():
    out = io.StringIO()
    width = 200
    console = Console(out, width=lambda: width)
    console.columns(600)
    line(console)
    width = 50
    line(console)
    line(console, skipped=3)
    lines = out.getvalue().splitlines()
    assert len(lines) == 8 and lines[4].split()[0] == "step" and max(map(len, lines[3:])) <= 50
    assert lines[7] == "  3 skipped"


def test_a_sample_takes_what_is_left():
    out = io.StringIO()
    for width in (None, 110, 80, 60, 50):
        Console(out, width=lambda: width).show_evaluation(100, 4.902, 134.6, 2.76, "word " * 30)
    lines = out.getvalue().splitlines()
    assert [len(line) for line in lines] == [96, 96, 80, 60, 41]
    out = io.StringIO()
    Console(out, width=lambda: 40).show_sources(3, {"a-web": 4.9, "b-code": 3.2, "c-books": 3.4})
    assert max(map(len, out.getvalue().splitlines())) <= 40 and "c-books 3.400" in out.getvalue()


def line(console, step=100, steps=600, skipped=0, **over):
    row = {"loss": 4.8113, "grad_norm": 0.842, "lr": 4e-3, "mem_gib": 0.2, "tokens": 204_800} | over
    rates = {"tokens_per_s": 13_200, "tflops": 0.07, "mfu": None, "data": 0.004, "skipped": skipped}
    rates["without_targets"] = 0
    console.show_step(step, steps, row, rates, 78)


def test_step_lines_stand_under_their_labels():
    out = io.StringIO()
    console = Console(out)
    console.columns(600)
    line(console)
    line(console, step=1, loss=math.nan, grad_norm=1e30, tokens=1.5e12, mem_gib=139.8)
    head, *rows = out.getvalue().splitlines()[1:]
    assert rows[0].split() == [
        "100/600", "4.8113", "0.842", "4.0e-03", "13.2K", "0.07", "n/a", "0.2G", "0%", "204.8K", "1m18s",
    ]
    assert len(head) == len(rows[0]) == len(rows[1])
    for label in ("loss", "gnorm", "tok/s", "mem", "eta"):
        end = head.index(label) + len(label)
        assert all(r[end - 1] != " " and r[end : end + 1] in (" ", "") for r in rows), label
    line(console, skipped=3)
    assert out.getvalue().endswith("  3 skipped\n")


def test_colours_only_where_allowed():
    plain, rich = io.StringIO(), io.StringIO()
    for out, color in ((plain, False), (rich, True)):
        console = Console(out, color)
        console.columns(600)
        line(console)
        console.show_evaluation(100, 4.902, 134.6, 2.76, "def")
    assert "\033" not in plain.getvalue() and rich.getvalue().count("\033[") > 20
    assert re.sub(r"\033\[\d+m", "", rich.getvalue()) == plain.getvalue()


def test_a_closed_pipe_ends_the_talk_not_the_run():
    """| head: the process finishes its work with exit code 0, not with a trace or Python's 120."""
    code = (
        "import sys; from runtime.console import Console; c = Console(sys.stdout)\n"
        "for i in range(20000): c.write('x' * 50)\n"
        "print('others write too'); print('worked', file=sys.stderr)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(30) == 0 and child.stderr.read() == "worked\n"
    child.stderr.close()


def test_a_full_disk_is_counted(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    console = Console(open("/dev/full", "w"))
    for _ in range(3):
        console.write("x")
    assert console.lost == 3


def test_ascii_terminals_and_closed_files():
    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, encoding="ascii")
    Console(terminal).write("loss ▇▁ · é")
    assert raw.getvalue() == b"loss ?? ? ?\n"
    closed = io.StringIO()
    closed.close()
    Console(closed).write("x")
    Console(None).write("x")
