"""Goodput and ETTR: the arithmetic by hand, a record that nothing breaks, and real runs that are killed."""
import dataclasses
import random
import time

import pytest
import run_folder
from ranks import MODEL, corpus, job

from runtime import goodput
from runtime.goodput import LINE_BYTES, GoodputClock, StartRecord, compute_goodput, parse_start, read_starts

# ---- real runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("goodput"))


@pytest.fixture
def train(tmp_path, prefix):
    """train(fault, *more, world) -> (exit codes, what rank 0 printed) of 12 steps that save every 4."""
    every = ("--train.steps", "12", "--checkpoint.every", "4", "--eval.every", "4", "--data.path", prefix)
    where = ("--log.dir", str(tmp_path), "--log.name", "r")

    def run(fault="", *more, world=1):
        end = job(tmp_path, world, ["llama3-tiny", *MODEL, *every, *where, *more], fault=fault)
        return end.codes, end.logs[0]

    return run


def summary_of(folder):
    return run_folder.summary(folder / "r")["goodput"]


@pytest.mark.slow
def test_every_second_of_three_starts_is_useful_or_lost(tmp_path, train):
    slow = "step.load:act=sleep=0.5"
    began = time.time()
    assert train(f"{slow}; step.begin:step=8:act=SIGKILL", world=2)[0] == [-9, -9]
    first, = read_starts(tmp_path / "r")
    assert (first.exit_code, first.first_step, first.world) == (None, 1, 2)
    assert first.last_step in (5, 6, 7)  # a line a second
    assert [step for step, _ in first.marks] == [4]

    codes, log = train(f"{slow}; step.begin:step=6:act=raise")
    assert codes == [1] and "goodput " in log and " in 2 starts, ETTR" in log
    assert summary_of(tmp_path)["starts"] == 2
    waited = time.time()
    time.sleep(2)
    waited = time.time() - waited

    codes, log = train(slow)
    assert codes == [0], log
    took = time.time() - began
    starts = read_starts(tmp_path / "r")
    assert [start.exit_code for start in starts] == [None, 1, 0]
    assert [start.world for start in starts] == [2, 1, 1]
    assert [(start.first_step, start.last_step) for start in starts[1:]] == [(5, 5), (5, 12)]
    line, = (line for line in log.splitlines() if line.startswith("goodput "))
    assert " in 3 starts, ETTR" in line and "repeated steps" in line

    # every second is somewhere; 12 steps of 0.5 s are useful
    report = summary_of(tmp_path)
    lost = report["lost_minutes"]
    assert report["starts"] == 3 and report["clock_set_back"] == 0
    assert abs(report["useful_minutes"] + sum(lost.values()) - report["minutes"]) < 1e-9
    assert took / 2 < 60 * report["minutes"] < took + 0.1
    assert 6 < 60 * report["useful_minutes"] < 60 * report["minutes"] - waited - 1
    repeated = first.in_steps - first.marks[0][1] + starts[1].in_steps
    assert 0.5 * (first.last_step - 4 + 1) < repeated
    assert abs(60 * lost["repeated_steps"] - repeated) < 1e-6
    assert 60 * lost["waiting"] > waited and lost["start_up"] > 0 and lost["saving"] > 0
    assert lost["validation"] > 0 and lost["skipped_steps"] == 0
    assert abs(report["goodput"] - report["useful_minutes"] / report["minutes"]) < 1e-12
    unproductive = lost["repeated_steps"] + lost["start_up"] + lost["waiting"]
    assert abs(report["ettr"] - (1 - unproductive / report["minutes"])) < 1e-12

    # a run that has nothing to do, or is refused, does not count as a start
    record = (tmp_path / "r" / "starts.jsonl").read_bytes()
    assert train()[0] == [0]
    assert train("", "--train.steps", "13", "--train.seed", "5")[0] == [2]
    assert (tmp_path / "r" / "starts.jsonl").read_bytes() == record


@pytest.mark.slow
def test_a_skipped_step_is_lost_and_a_refused_run_leaves_no_record(tmp_path, train):
    assert train("", "--checkpoint.init_from", str(tmp_path / "none"))[0] == [2]
    assert not (tmp_path / "r" / "starts.jsonl").exists()
    codes, log = train("step.backward:step=3:act=nan; step.load:step=3:act=sleep=1")
    assert codes == [0], log
    lost = 60 * summary_of(tmp_path)["lost_minutes"]["skipped_steps"]
    steps = run_folder.rows(tmp_path / "r")
    seconds, = (row["step_ms"] / 1000 for row in steps if row.get("skipped"))
    assert lost > 1 and abs(lost - seconds) < 1e-9


# ---- the arithmetic ----------------------------------------------------------------------------------------

# 10 steps of 1 s after 5 s, a save of 1 s after step 6; it ends after 18 s, and 2 s were nothing of these
FIRST = StartRecord(
    time=1000.0, world=2, seconds=18.0, first_step=1, last_step=10, in_steps=10.0, start_up=5.0, saving=1.0,
    marks=((6, 6.0),),
)
# it continues after step 6, trains up to step 12, and validates
SECOND = StartRecord(
    time=1028.0, world=2, seconds=10.0, first_step=7, last_step=12, in_steps=6.0, start_up=3.0,
    validation=1.0, exit_code=0,
)


def test_the_goodput_of_two_starts_is_that_computed_by_hand():
    report = compute_goodput([FIRST, SECOND])
    assert report.lost == {
        "repeated_steps": pytest.approx(4 / 60),
        "skipped_steps": 0.0,
        "start_up": pytest.approx(8 / 60),
        "saving": pytest.approx(1 / 60),
        "validation": pytest.approx(1 / 60),
        "waiting": pytest.approx(10 / 60),
        "other": pytest.approx(2 / 60),
    }
    assert report.minutes == pytest.approx(38 / 60) and report.useful == pytest.approx(12 / 60)
    assert report.goodput == pytest.approx(12 / 38) and report.ettr == pytest.approx(16 / 38)
    assert report.line() == (
        "goodput 31.6 % of 38s in 2 starts, ETTR 42.1 %; lost: waiting between starts 10s, start-up 8s, "
        "repeated steps 4s, other 2s, saving 1s, validation 1s"
    )
    assert compute_goodput([FIRST, SECOND], skipped_seconds=3.0).useful == pytest.approx(9 / 60)


def test_a_start_that_goes_back_further_repeats_what_two_have_done():
    third = dataclasses.replace(SECOND, time=1100.0, first_step=4)
    report = compute_goodput([FIRST, SECOND, third])
    # steps 1 to 3 of the first, between marks; nothing of the second
    assert report.useful == pytest.approx((3 + 6) / 60)
    assert report.lost["repeated_steps"] == pytest.approx((7 + 6) / 60)
    assert report.lost["waiting"] == pytest.approx(10 / 60)  # none after a start that finished


def test_a_clock_that_was_set_back_counts_as_nothing():
    back = dataclasses.replace(SECOND, time=FIRST.time - 3600)
    report = compute_goodput([FIRST, back])
    assert report.clock_set_back == 1 and report.lost["waiting"] == 0
    assert report.minutes == pytest.approx(28 / 60)
    assert "the clock was set back between starts (1x)" in report.line()


def test_a_start_that_was_killed_before_its_first_step():
    early = StartRecord(time=1000.0, world=2, seconds=7.0)
    report = compute_goodput([early, dataclasses.replace(SECOND, time=1007.0, first_step=1)])
    assert report.lost["start_up"] == pytest.approx(10 / 60) and report.starts == 2
    assert report.lost["repeated_steps"] == 0
    assert compute_goodput([StartRecord(time=0.0, world=1)]).goodput == 0.0


def test_a_step_back_within_a_start():
    clock = GoodputClock(None, 1)
    clock.record = dataclasses.replace(FIRST)
    clock.rewound(6)
    assert (clock.record.in_steps, clock.record.repeated, clock.record.last_step) == (6.0, 4.0, 6)
    clock.rewound(3)
    assert (clock.record.in_steps, clock.record.repeated, clock.record.marks) == (3.0, 7.0, ())
    assert compute_goodput([clock.record]).lost["repeated_steps"] == pytest.approx(7 / 60)


def test_a_step_back_behind_the_start_repeats_what_an_earlier_one_has_done():
    """Steps 1 to 100 in one start; the next goes back from 101 to 80, and trains 81 to 120. A second each."""
    earlier = StartRecord(time=0.0, world=1, seconds=100.0, first_step=1, last_step=100, in_steps=100.0,
                          marks=((80, 80.0), (100, 100.0)), exit_code=75)
    clock = GoodputClock(None, 1)
    clock.record = StartRecord(time=100.0, world=1, seconds=41.0, first_step=101, last_step=101, in_steps=1.0)
    clock.rewound(80)
    clock.record = dataclasses.replace(clock.record, last_step=120, in_steps=40.0)
    report = compute_goodput([earlier, clock.record])
    assert report.useful == pytest.approx(120 / 60)
    assert report.lost["repeated_steps"] == pytest.approx(21 / 60)


# ---- the record --------------------------------------------------------------------------------------------


def test_a_line_reads_back_and_stays_of_one_length():
    assert parse_start(FIRST.to_line()) == FIRST and len(FIRST.to_line()) == LINE_BYTES
    marks = tuple((10**14 + step, 1e9 + step) for step in range(200))
    long = dataclasses.replace(FIRST, marks=marks, last_step=10**15, in_steps=2e9)
    read = parse_start(long.to_line())
    assert len(long.to_line()) == LINE_BYTES and read.marks == marks[-len(read.marks):] and read.marks


def test_damaged_lines_are_left_out(tmp_path):
    lines = [FIRST.to_line(), SECOND.to_line()]
    draws = random.Random(5)
    for _ in range(300):
        data = bytearray(b"".join(lines))
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        (tmp_path / "starts.jsonl").write_bytes(data)
        found = read_starts(tmp_path)
        assert len(found) <= 2 and (FIRST in found or SECOND in found)
        assert compute_goodput(found).minutes >= 0
    whole = lines[0].decode()
    replaced = [whole.replace("18.0", "1e999"), whole.replace("18.0", "-1"), whole.replace(": 2,", ': "2",')]
    for text in ("", "{", "[]", "null", '{"time": NaN}', "[" * 3000, *replaced):
        (tmp_path / "starts.jsonl").write_bytes(text.encode() + b"\n" + lines[1])
        assert read_starts(tmp_path) == [SECOND], text


def test_a_torn_line_costs_itself_alone(tmp_path):
    (tmp_path / "starts.jsonl").write_bytes(FIRST.to_line() + SECOND.to_line()[:100])
    clock = GoodputClock(tmp_path, 4)
    assert clock.earlier == [FIRST] and clock.trouble is None
    clock.end(75)
    assert [start.world for start in read_starts(tmp_path)] == [2, 4]


def test_a_record_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "starts.jsonl").mkdir()
    clock = GoodputClock(tmp_path, 1)
    assert "starts.jsonl" in clock.trouble
    clock.before_step(None, 1)
    clock.after_step(None, 1)
    clock.saved(1)
    assert clock.report().starts == 1
    clock.end(0)


def test_the_wall_clock_does_not_reach_into_a_start(tmp_path, monkeypatch):
    clock = GoodputClock(tmp_path, 1, seconds_before=2.0)
    for hours in (-5, 5):
        monkeypatch.setattr(goodput.time, "time", lambda hours=hours: 1e9 + 3600 * hours)
        clock.before_step(None, 1)
        clock.after_step(None, 1)
        assert 2 < 60 * clock.report().minutes < 10
    clock.forget()
    assert not (tmp_path / "starts.jsonl").exists()
