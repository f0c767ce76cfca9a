"""scripts.bench chaos: what it draws, what it looks at and what it prints; test_real_runs.py runs it."""

import argparse
import random
from dataclasses import replace

import pytest

from config import ConfigError
from durable import memory
from durable.faults import parse
from lab.benchmarks.chaos import command, damage, evidence
from lab.benchmarks.chaos.evidence import Evidence
from lab.benchmarks.chaos.incidents import (
    FAULTS,
    MEMORY_POINTS,
    RANK_SAVE_POINTS,
    SAVE_POINTS,
    STEP_POINTS,
    Incident,
    Situation,
)
from lab.benchmarks.chaos.layouts import BY_NAME, LAYOUTS, MEMORY_SAVES, SAVES, STEPS
from lab.benchmarks.chaos.rounds import Draw, Report, draw_rounds, fits, start_problems
from lab.benchmarks.chaos.start import Ended
from start import FAULT_POINTS

# ---- the draw ----------------------------------------------------------------------------------------------


def test_a_draw_is_that_of_its_seed_and_meets_every_fault_and_layout():
    one, same, other = (draw_rounds(seed, 60, list(LAYOUTS), list(FAULTS)) for seed in (1, 1, 2))
    assert one == same != other
    assert {draw.fault for draw in one[:len(FAULTS)]} == set(FAULTS)
    assert {draw.layout.words for draw in one} == {layout.words for layout in LAYOUTS}
    assert [draw.number for draw in one] == list(range(60))


def test_every_incident_names_points_that_are_there_and_steps_that_are_to_come():
    seen = set()
    for seed in range(300):
        for layout in LAYOUTS:
            done = (0, 5)[seed % 2]  # what an early kill leaves
            situation = Situation(random.Random(seed), layout, done, clean_s=5.0)
            for build in FAULTS.values():
                for incident in build(situation) or ():
                    for fault in parse(incident.fault):
                        assert fault.point in (*FAULT_POINTS, *memory.FAULT_POINTS)
                        assert done < fault.step <= STEPS
                        assert fault.rank is None or fault.rank < layout.world
                        assert fault.action != "SIGKILL" or not fault.point.startswith("ckpt.") or (
                            fault.step in SAVES
                        )
                        assert not fault.point.startswith("memory.") or fault.step in MEMORY_SAVES
                        seen.add(fault.point)
    assert seen == {*STEP_POINTS, *RANK_SAVE_POINTS, *SAVE_POINTS, *MEMORY_POINTS, "eval.end"}
    assert set(memory.FAULT_POINTS) - seen == {"memory.mid_send"}  # of several nodes
    # reached before the loop; where a bad checkpoint is replaced; at the last of three saves alone
    assert set(FAULT_POINTS) - seen == {"run.built", "ckpt.mid_replace", "ckpt.mid_purge"}


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_other_settings_meet_a_checkpoint(layout):
    """A save in the background may end steps later: there the kill waits for its end."""
    for seed in range(100):
        kill, _ = FAULTS["other settings"](Situation(random.Random(seed), layout, done=0, clean_s=5.0))
        (fault,) = parse(kill.fault)
        if layout.is_async:
            assert (fault.point, fault.rank, fault.step) == ("ckpt.pre_purge", 0, SAVES[0])
        else:
            assert fault.point == "step.begin" and SAVES[0] < fault.step <= STEPS


def test_each_fault_fits_a_layout_and_each_layout_meets_most_faults():
    for fault in FAULTS:
        assert any(fits(fault, layout) for layout in LAYOUTS), fault
    for layout in LAYOUTS:
        assert sum(fits(fault, layout) for fault in FAULTS) > len(FAULTS) * 0.7


@pytest.mark.parametrize("words, told", [
    (("--layouts", "tp3"), "--layouts: 'tp3' is not one of one, "),
    (("--faults", "rain"), "--faults: 'rain' is in none of: "),
    (("--rounds", "2", "--only", "2"), "no round is left"),
])
def test_a_name_that_is_none_is_one_line(words, told):
    parser = argparse.ArgumentParser()
    command.add_chaos_options(parser)
    with pytest.raises(ConfigError) as error:
        command.main(parser.parse_args([*words, "--list"]))
    assert told in str(error.value) and "\n" not in str(error.value)


# ---- what is looked at -------------------------------------------------------------------------------------

ROW = {"loss": 5.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 64, "skipped": 0}
CLEAN = Evidence(
    steps=[(1, ROW), (2, {**ROW, "loss": 4.0})],
    evaluations=[(0, 5.5), (2, 5.0)],
    checksums={"w at [0]": "ab", "v at [0]": "cd"},
)


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("change, told", [
    ({"steps": [CLEAN.steps[0]]}, "the steps are [1], not [1, 2]"),
    ({"steps": [CLEAN.steps[0], *CLEAN.steps]}, "the same step is there twice: [1, 1, 2]"),
    ({"steps": CLEAN.steps[::-1]}, "the steps are [2, 1], not [1, 2]"),
    ({"steps": [CLEAN.steps[0], (2, {**ROW, "loss": 4.000001})]}, "loss of step 2 is 4.000001, not 4.0"),
    ({"steps": [*CLEAN.steps, (3, ROW)]}, "the steps are [1, 2, 3], not [1, 2]"),
    ({"evaluations": [(0, 5.5), (0, 5.5), (2, 5.0)]}, "the same evaluation is there twice"),
    ({"evaluations": [(0, 5.5), (2, 5.1)]}, "val_loss of step 2 is 5.1, not 5.0"),
    ({"checksums": {"w at [0]": "ab", "v at [0]": "ce"}}, "1 of 2 stored pieces differ, as v at [0]"),
    ({"checksums": {"w at [0]": "ab"}}, "1 of 2 stored pieces differ"),
])
def test_what_differs_from_the_clean_run_is_told(change, told):
    assert evidence.differences(CLEAN, CLEAN) == []
    assert any(told in line for line in evidence.differences(replace(CLEAN, **change), CLEAN))


def test_a_line_that_was_damaged_may_be_missing_and_no_other():
    found = replace(CLEAN, steps=CLEAN.steps[1:])
    assert evidence.differences(found, CLEAN, lost_lines=1) == []
    assert evidence.differences(replace(found, evaluations=[(0, 5.5)]), CLEAN, lost_lines=1)


def test_two_layouts_in_fp64_agree_to_nine_digits():
    near = replace(CLEAN, steps=[(1, {**ROW, "loss": 5.0 * (1 + 1e-12)}), CLEAN.steps[1]])
    far = replace(CLEAN, steps=[(1, {**ROW, "loss": 5.0 * (1 + 1e-8)}), CLEAN.steps[1]])
    assert evidence.ledger_problems(near, CLEAN, 0, exact=False) == []
    assert evidence.ledger_problems(far, CLEAN, 0, exact=False) != []
    assert evidence.ledger_problems(near, CLEAN, 0, exact=True) != []


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("change, told", [
    ({"code": 1}, "the exit code is 1, not 75"),
    ({"fired": 0}, "the fault did not happen"),
    ({"orphans": 2}, "2 processes are left"),
    ({"output": ""}, "nothing was said of 'saved'"),
    ({"is_late": True}, "it had not ended after 9 s"),
])
def test_how_a_start_ended_is_judged(tmp_path, change, told):
    incident = Incident("a signal", (75,), fault="step.begin:act=SIGTERM", says=("saved",), requeue=True)
    ended = Ended(code=75, seconds=1.0, output="saved", fired=1, orphans=0, is_late=False)
    reason = tmp_path / "exit_reason.json"
    reason.write_text('{"code": 75, "requeue": true}')
    assert start_problems(incident, ended, tmp_path, 9.0) == []
    assert told in start_problems(incident, replace(ended, **change), tmp_path, 9.0)
    reason.write_text('{"code": 75, "requeue": false}')
    assert "requeue False" in start_problems(incident, ended, tmp_path, 9.0)[0]
    reason.unlink()
    assert "exit_reason.json" in start_problems(incident, ended, tmp_path, 9.0)[0]


def test_what_is_left_in_a_folder_is_told(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert evidence.folder_problems(tmp_path) == []
    for name in ("checkpoints/latest.tmp-0", "checkpoints/.trash-1", "config.yaml.tmp", "STOP"):
        (tmp_path / name).write_text("")
        assert evidence.folder_problems(tmp_path) == [f"{name} is left"]
        (tmp_path / name).unlink()
    (tmp_path / "checkpoints" / "step_00000005").mkdir()
    assert "is committed and does not verify" in evidence.checkpoint_problems(tmp_path)[0]


def test_a_held_lock_is_told(tmp_path):
    from checkpoint.disk.locks import run_lock

    with run_lock(tmp_path):
        assert evidence.lock_problems(tmp_path) == ["the lock of the run is held"]
    assert evidence.lock_problems(tmp_path) == []


def test_a_damaged_line_reads_as_none(tmp_path):
    lines = b'{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n'
    for seed in range(50):
        (tmp_path / "metrics.jsonl").write_bytes(lines)
        damage.prepare("damage metrics", tmp_path, tmp_path / "aside", random.Random(seed))
        assert len(evidence.read_rows(tmp_path)) == 1


def test_the_tables_and_the_verdict():
    draws = [Draw(number, "disk full", BY_NAME[name], False) for number, name in enumerate(("one", "pp2"))]
    good = Report(draws[0], codes=[82, 0], lost_s=4.0)
    bad = Report(draws[1], codes=[82], problems=["x"], lost_s=2.0)
    reports = [good, bad]
    (row,) = command.rows_by(reports, "fault", lambda draw: draw.fault)
    assert list(row.values()) == ["disk full", "2", "1", "0 x1, 82 x2", "3"]
    assert command.verdict(reports, 7) == "FAILED: 1 of 2 rounds, seed 7: 1"
    assert command.verdict(reports[:1], 7) == (
        "ok: 1 rounds, 2 starts (1 disturbed), seed 7: every run survived"
    )
    two = [good, replace(good, commit="ab12"), replace(good, commit="cd34")]
    assert command.verdict(two, 7).endswith(": every run survived; at ab12, cd34")


# ---- a run of hours ----------------------------------------------------------------------------------------


def options(*words):
    parser = argparse.ArgumentParser()
    command.add_chaos_options(parser)
    return parser.parse_args(words)


@pytest.fixture
def rounds_run(monkeypatch):
    """The numbers of rounds that are run; none takes any time."""
    numbers = []

    def run_round(self, draw):
        numbers.append(draw.number)
        return Report(draw, ["killed -> 137"], [137, 0], [], 1.5)

    monkeypatch.setattr(command.Harness, "run_round", run_round)
    monkeypatch.setattr(command, "commit_id", lambda: "ab12")
    return numbers


def test_another_start_continues_after_the_rounds_of_the_file(tmp_path, rounds_run, capsys):
    file = tmp_path / "results.jsonl"
    words = ("--rounds", "5", "--seed", "3", "--resume", str(file))
    assert command.main(options(*words, "--part", "2/2")) == 0
    assert rounds_run == [1, 3]
    with open(file, "a") as out:
        out.write('{"seed": 3, "numb')  # of a writer that was killed
    assert command.main(options(*words, "--minutes", "1")) == 0
    assert rounds_run == [1, 3, 0, 2, 4]
    capsys.readouterr()
    assert command.main(options(*words)) == 0
    assert rounds_run == [1, 3, 0, 2, 4]
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == "ok: 5 rounds, 10 starts (5 disturbed), seed 3: every run survived; at ab12"


def test_a_round_that_failed_stays_so(tmp_path, monkeypatch, rounds_run):
    file = tmp_path / "results.jsonl"
    words = ("--rounds", "2", "--resume", str(file))
    monkeypatch.setattr(command.Harness, "run_round", lambda self, draw: Report(draw, [], [1], ["bad"]))
    assert command.main(options(*words)) == 1
    assert command.main(options(*words)) == 1


@pytest.mark.parametrize("words", [("--seed", "4"), ("--rounds", "3"), ("--layouts", "one")])
def test_a_file_of_another_draw_is_refused(tmp_path, rounds_run, words):
    file = tmp_path / "results.jsonl"
    assert command.main(options("--rounds", "5", "--seed", "3", "--resume", str(file))) == 0
    with pytest.raises(ConfigError, match="--resume: line . of .* is of another draw"):
        command.main(options("--rounds", "5", "--seed", "3", "--resume", str(file), *words))


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("line", ["5", "[1]", "{}", '{"number": [0]}', '{"number": 0, "rain": 1}'])
def test_a_line_that_is_not_a_round_is_refused(tmp_path, rounds_run, line):
    file = tmp_path / "results.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match="--resume: line 1 of .* is of another draw"):
        command.main(options("--rounds", "5", "--resume", str(file)))
