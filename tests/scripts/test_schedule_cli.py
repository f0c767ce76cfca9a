"""scripts.schedule: what it prints is what was simulated; bad input is one line on stderr and exit code 2."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from parallel.pipeline.schedule import SCHEDULES, dependencies, make_schedule
from runtime.failure import fail_cleanly
from scripts import schedule as schedule_script
from scripts.schedule import arguments, main, measure, run_config

ROOT = pathlib.Path(__file__).parents[2]


def run(capsys, line):
    code = fail_cleanly(main, line.split())
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.slow
def test_the_documented_command(tmp_path):
    words = ["--kind", "zb-v", "--pp", "4", "--micro", "8", "--out", str(tmp_path / "x.png")]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.schedule", *words], cwd=ROOT, capture_output=True, text=True,
        timeout=120, env={**os.environ, "COLUMNS": "100"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "bubble 0.0%" in done.stdout and "no deadlock" in done.stdout and "rank 3 |" in done.stdout
    assert max(map(len, done.stdout.replace(str(tmp_path), "").splitlines())) <= 100
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_json_has_the_numbers_of_a_schedule(capsys):
    code, out, _ = run(capsys, "--kind 1f1b --pp 4 --micro 8 --json")
    x = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert (x["makespan"], x["bubble_time"], x["formula_time"], x["formula"]) == (33, 9, 9, "(p-1)(F+B)")
    assert x["bubble"] == pytest.approx(9 / 33) and x["rank_peak"] == [4, 3, 2, 1] and x["transfers"] == 48
    assert x["order"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    _, out, _ = run(capsys, "--kind zb-v --pp 4 --micro 8 --json")
    x = json.loads(out)
    assert (x["bubble"], x["bubble_time"], x["formula_time"], x["makespan"], x["vpp"]) == (0, 0, 0, 25.5, 2)
    assert x["idle"] == pytest.approx(1.5 / 25.5) and x["rank_peak"] == [4] * 4


def test_costs_hops_and_overlap_change_the_bubble(capsys):
    x = json.loads(run(capsys, "--kind zb-h1 --pp 4 --micro 8 --f 1 --i 1.1 --w 0.7 --json")[1])
    assert x["bubble_time"] == x["formula_time"] == 4.2  # exact: 3 (1 + 1.1 - 0.7)
    slow = json.loads(run(capsys, "--kind zb-h1 --pp 4 --micro 8 --hop 0.5 --json")[1])
    assert slow["formula"] is None and slow["bubble_time"] > 3
    x = json.loads(run(capsys, "--kind dualpipe-v --pp 4 --micro 10 --overlap 0.8 --json")[1])
    assert x["formula"] == "(p-1)(F&B+B-3W)/2"
    assert max(x["rank_idle"]) * x["makespan"] == pytest.approx(x["formula_time"])
    said = run(capsys, "--kind dualpipe-v --pp 4 --micro 10 --overlap 0.85")[1]
    assert "last rank idle 2.325, by formula (p-1)(F&B+B-3W)/2 = 2.325" in said
    assert json.loads(run(capsys, "--kind interleaved --pp 2 --micro 4 --vpp 3 --json")[1])["vpp"] == 3


def test_the_list_has_every_schedule(capsys):
    code, out, _ = run(capsys, "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        "kind", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "overlapped",
    ]
    assert max(map(len, out.splitlines())) <= 80
    assert len(json.loads(run(capsys, "--list --json")[1])) == 6


@pytest.mark.slow(core=["--kind 1f1b --pp 1 --micro 2"])
@pytest.mark.parametrize(
    "line",
    [
        "--kind zb-v --pp 2 --micro 3", "--kind interleaved --pp 2 --micro 2 --vpp 2",
        "--kind 1f1b --pp 1 --micro 2",
    ],
)
def test_a_measured_step_runs_the_same_ops_in_the_order_of_their_needs(line):
    a = arguments().parse_args(f"{line} --run llama3-tiny".split())
    s = make_schedule(a.kind, a.pp, a.micro, a.vpp)
    t = measure(run_config(a, s), s)
    assert [[span.op for span in rank] for rank in t.ranks] == s.order and t.start == 0
    ends = {span.op: span.end for rank in t.ranks for span in rank}
    ends |= {op._replace(kind="B"): end for op, end in ends.items() if op.kind == "I"}
    for rank in t.ranks:
        assert all(0 <= span.start < span.end <= then.start for span, then in zip(rank, rank[1:]))
        assert all(
            span.start >= ends[need] - 0.05 for span in rank for need in dependencies(span.op, s.n_stages)
        )  # ms


def test_the_measured_step_is_drawn_beside_the_simulated_one(capsys, tmp_path):
    code, out, err = run(
        capsys, f"--kind zb-h1 --pp 2 --micro 3 --run llama3-tiny --out {tmp_path}/x.png --width 200"
    )
    assert (code, err) == (0, "") and out.count("rank 0 |") == 2 and "measured, llama3-tiny: step" in out
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "line,says",
    [
        ("--kind 1f1b --pp 2 --micro 2 --run llama3-tinny",
         "llama3-tinny: no such recipe; did you mean llama3-tiny"),
        ("--kind 1f1b --pp 40 --micro 2 --run llama3-tiny",
         "--run: starts a process for each of --pp 40 ranks, at most 16"),
        ("--kind 1f1b --pp 2 --micro 2 --run llama3.1-8b", "parameters; use a recipe of at most"),
        ("", "--kind: missing"),
        ("--kind zbv --pp 4 --micro 4", "did you mean zb-v?"),
        ("--kind 1f1b --pp 4", "--micro: missing"),
        ("--kind interleaved --pp 4 --micro 6", "use 4 or 8"),
        ("--kind 1f1b --pp 0 --micro 4", "--pp: expected at least 1"),
        ("--kind 1f1b --pp 4 --micro -1", "--micro: expected at least 1"),
        ("--kind 1f1b --pp x --micro 4", "--pp: expected a whole number, got 'x'"),
        ("--kind 1f1b --pp 4 --micro 4 --vpp 2", "1f1b has 1 chunk"),
        ("--kind 1f1b --pp 4 --micro 4 --w 0", "--w: expected a number"),
        ("--kind 1f1b --pp 4 --micro 4 --hop nan", "--hop: expected"),
        ("--kind 1f1b --pp 4 --micro 4 --f 1e999999999", "--f: expected"),
        ("--kind 1f1b --pp 4 --micro 4 --out x.gif", "--out: x.gif must end in .png"),
        ("--kind 1f1b --pp 4 --micro 4 --x", "--x"),
        ("--kind 1f1b --pp 4 --micro 4 --out /dev/null/x.png", "--out: /dev/null/x.png: "),
        ("--kind 1f1b --pp 4000 --micro 4000", "at most"),
        ("--kind 1f1b --pp 4 --micro 4 --overlap 1", "only dualpipe-v"),
    ],
)
def test_bad_input_is_one_line(capsys, line, says):
    code, out, err = run(capsys, line)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_the_table_of_lanes_has_the_steps_of_single_schedules(monkeypatch, capsys):
    """Each loss follows from the two steps that the command prints for that schedule alone."""
    monkeypatch.setattr(schedule_script, "LANE_RANKS", (2, 4))
    monkeypatch.setattr(schedule_script, "LANE_MICROBATCHES", (6, 8))
    code, out, _ = run(capsys, "--lanes --hop 0.2 --json")
    rows = json.loads(out)
    assert code == 0 and {row["kind"] for row in rows} == set(SCHEDULES)
    for row in rows:
        for micro, loss in zip((6, 8), row["loss"]):
            if loss is None:
                assert row["kind"] == "interleaved" and micro % row["pp"]
                continue
            line = f"--kind {row['kind']} --pp {row['pp']} --micro {micro} --hop 0.2 --json"
            if row["kind"] == "interleaved":
                line += f" --vpp {row['chunks']}"
            alone = json.loads(run(capsys, line)[1])
            assert loss == pytest.approx(100 * (alone["lanes"] / alone["makespan"] - 1), abs=1e-6)
    four = next(row for row in rows if (row["kind"], row["chunks"], row["pp"]) == ("interleaved", 4, 4))
    assert four["loss"][0] is None and four["loss"][1] > 10, "transfers nearly as long as a chunk do cost"

    table = run(capsys, "--lanes --hop 0.2")[1].splitlines()
    assert table[0].split() == ["kind", "chunks", "ranks", "m", "=", "6", "m", "=", "8"]
    assert len(table) == 1 + len(rows)


def test_lanes_need_transfers_that_take_time(capsys):
    code, out, err = run(capsys, "--lanes")
    assert (code, out, err.count("\n")) == (2, "", 1) and "--hop 0.1" in err
