"""A first meeting with a GPU, rehearsed on a CPU from a folder that holds only what travels."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from config import ConfigError
from kernels import triton_
from lab.benchmarks import card, first, first_jobs, first_plan, travel
from lab.benchmarks.first_table import make_table
from lab.benchmarks.jobs import ForkedJob, JobPlace, run_jobs
from plan.record.launches import CHIPS

ROOT = Path(__file__).parents[3]
PEERS_MIB = 54.36  # on 2026-11-30: wheels, a gzipped extension, cuDNN's frontend 1.32: lab/docs/benchmarks.md
FIRST = ("first", "--device", "cpu", "--tiny")
ONLY = "kernels/test_embedding.py,dense ours,packed ours+libraries"

needs_interpreter = pytest.mark.skipif(
    not triton_.TRITON_AVAILABLE or torch.cuda.is_available(),
    reason="no Triton for this platform, or a GPU, where the run itself is the test",
)


@pytest.fixture(scope="module")
def travelled(tmp_path_factory):
    """A folder with what travels to a GPU: tracked files, and the ignored folder of peers."""
    folder = tmp_path_factory.mktemp("travelled")
    for source in travel.tracked_files():
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    (folder / "peers" / "wheels").mkdir(parents=True)
    (folder / "peers" / "wheels" / "a.whl").write_bytes(b"x" * 2**20)
    return folder


def start(folder, *argv):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "scripts.bench", *map(str, argv)]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def bench(folder, *argv):
    """(exit code, what it printed, its errors)."""
    with start(folder, *argv) as run:
        out, errors = run.communicate(timeout=100)
        return run.returncode, out, errors


def messages_in(out):
    return [json.loads(line) for line in (out / "first.jsonl").read_text().splitlines()]


def states_in(out):
    return {(row["section"], row["row"]): row["state"] for row in messages_in(out) if "row" in row}


def folder_with_tests(folder, text):
    """A folder with a file of tests marked gpu."""
    folder.mkdir()
    (folder / "test_x.py").write_text(f"import os, time, pytest\npytestmark = pytest.mark.gpu\n{text}")
    return folder


# ---- the rehearsal -----------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_interpreter
def test_a_rehearsal_and_what_comes_after_it(travelled, tmp_path):
    """A kernel that is wrong is a row; once it is mended, that row alone is run again."""
    kernel = travelled / "kernels" / "embedding.py"
    right = kernel.read_text()
    wrong = (
        "\n\ndef wrong_rows(into, ids, dy, launch=launch_add_rows):\n"
        "    return launch(into, ids, dy * 1.01)\n\n\nlaunch_add_rows = wrong_rows\n"
    )
    kernel.write_text(right + wrong)
    try:
        code, printed, errors = bench(travelled, *FIRST, "--only", ONLY, "--out", tmp_path / "one")
    finally:
        kernel.write_text(right)
    states = states_in(tmp_path / "one")
    assert code == 1 and "no time" not in states.values(), errors
    assert states["dense ours", "dense ours"] == "ok"
    assert states["packed ours+libraries", "packed ours+libraries"] == "absent"
    assert [state for (section, _), state in states.items() if section == "kernels"] == ["wrong"]
    assert "1.0 MiB of peers/; fits 64 MiB" in printed and "not there: torchtitan" in printed
    assert (tmp_path / "one" / "first.md").read_text() in printed
    with tarfile.open(tmp_path / "one" / "first.tar.gz") as tar:
        assert set(tar.getnames()) == {"first.jsonl", "first.md", "logs/test_embedding.py.log"}

    after = ("--after", tmp_path / "one" / "first.tar.gz")
    code, printed, errors = bench(travelled, *FIRST, "--only", ONLY, "--out", tmp_path / "two", *after)
    assert code == 0, errors
    states = states_in(tmp_path / "two")
    assert set(states.values()) == {"ok", "absent"}
    assert [state for (section, _), state in states.items() if section == "kernels"] == ["ok"]
    progress = printed.partition("\n# First meeting")[0]
    assert "\ndense ours" not in progress and "\nkernels " in progress
    [one, two] = [
        next(row for row in messages_in(tmp_path / name) if row.get("row") == "dense ours")
        for name in ("one", "two")
    ]
    assert one == two and one["tokens/s"] > 0 and one["kernels"]


@pytest.mark.slow
@needs_interpreter
def test_sigterm_leaves_the_table_and_the_tar(tmp_path):
    tests = folder_with_tests(tmp_path / "tests", "def test_a(): pass\ndef test_b(): time.sleep(600)\n")
    out = tmp_path / "out"
    with start(ROOT, *FIRST, "--only", "kernels,dense ours", "--tests", tests, "--out", out) as run:
        for _ in range(600):
            if (out / "first.jsonl").exists() and ("kernels", "test_x.py::test_a") in states_in(out):
                break
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=30)
        assert run.returncode == 143
    assert states_in(out)["kernels", "kernels"] == "no time"
    with tarfile.open(out / "first.tar.gz") as tar:
        assert {"first.jsonl", "first.md", "logs/test_x.py.log"} == set(tar.getnames())


# ---- rows of pytest ----------------------------------------------------------------------------------------


def rows_of_tests(folder, text, done=frozenset()):
    """The rows of a file of tests; in a process that has not inherited the pytest that runs here."""
    file = folder_with_tests(folder / "tests", text) / "test_x.py"
    machine = card.GpuMachine("a card", "", "", 1)
    run = first_jobs.FirstRun("cpu", True, "", folder, machine, 1, CHIPS["h200"])
    job = ForkedJob("x", partial(first_jobs.report_tests, file=str(file), run=run), limit_s=60.0)
    place = JobPlace(multiprocessing.get_context("spawn"), folder)
    messages = run_jobs([job], place, most=1, seconds_left=lambda: 60.0, done={"x": done})
    return [message for message in messages if "row" in message]


def test_each_test_is_a_row_with_its_state(tmp_path):
    text = (
        "def test_a(record_property): record_property('error', 0.25)\n"
        "def test_b(): assert 1 == 2, 'too far'\n"
        "def test_c(): pytest.skip('needs a chip from sm_90 on')\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('full')\n"
        "def test_d(broken): pass\n"
        "def test_e(): pass\n"
    )
    rows = rows_of_tests(tmp_path, text, frozenset({"test_x.py::test_e"}))
    states = [(row["row"].removeprefix("test_x.py::"), row["state"]) for row in rows]
    assert states == [("test_a", "ok"), ("test_b", "wrong"), ("test_c", "absent"), ("test_d", "wrong")]
    assert rows[0]["error"] == 0.25 and "too far" in rows[1]["problem"]
    assert rows[2]["problem"] == "needs a chip from sm_90 on" and rows[3]["problem"] == "OSError: full"


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_wrong(tmp_path):
    rows = rows_of_tests(tmp_path, "import nothing_of_this_name\n")
    assert {row["state"] for row in rows} == {"wrong"} and "nothing_of_this_name" in rows[0]["problem"]


# ---- the plan ----------------------------------------------------------------------------------------------


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("gib", [24, 48, 80, 141, 192])
def test_every_shape_fits_the_card(gib):
    """As many layers as fit, and none more; 24 GB do not hold the fewest of 8B, and of the mixture in fp8."""
    room = first_plan.USABLE_MEMORY * gib * card.GIB
    absent = set()
    for section in first_plan.SECTIONS:
        if not section.model:
            continue
        shape = card.fitted_shape(section.model, section.contestant, gib * card.GIB, False)
        if shape is None:
            absent.add(section.model)
            continue
        assert card.planned_bytes(shape, card.get_dtype(section.contestant)) <= room
    assert absent == ({"8b", "moe"} if gib == 24 else set())
    text = first_plan.plan_text(gib * card.GIB, 4.0)
    assert text.count(card.TOO_LARGE) == (4 if gib == 24 else 0)
    assert "| moe ours | 64 experts, top 8 |" in text and text.count("| yes |") < len(first_plan.SECTIONS)


def test_four_minutes_are_for_what_decides():
    """Rates, the dense step, kernels, small models and the mixture; nine for everything of ours."""
    rows = [line.split("|") for line in first_plan.plan_text(80 * card.GIB, 4.0).splitlines()[4:]]
    in_time = [row[1].strip() for row in rows if row[-2].strip() == "yes"]
    assert in_time == ["rates", "dense ours", "kernels", "modelled", "corpus", "models", "moe ours"]
    rows = [line.split("|") for line in first_plan.plan_text(80 * card.GIB, 9.0).splitlines()[4:]]
    late = [row[1].strip() for row in rows if row[-2].strip() != "yes"]
    assert late and all("ours" not in name for name in late)


def test_memory_and_cores_bound_the_jobs():
    beside = first_plan.jobs_beside
    assert [beside(gib * card.GIB, 64) for gib in (6, 24, 80)] == [1, 3, 8] and beside(80 * card.GIB, 4) == 2


def test_a_step_has_an_alternative_with_fewer_layers():
    machine = card.GpuMachine("NVIDIA H100 80GB HBM3", "580", "2.11", 80 * card.GIB)
    run = first_jobs.FirstRun("cuda", False, "", Path(), machine, 8, CHIPS["h100"])
    jobs = [job.name for section in first_plan.SECTIONS for job in first_jobs.get_jobs(section, run)]
    assert len(set(jobs)) == len(jobs)  # a log each
    for section in first_plan.SECTIONS:
        if section.kind == "step":
            [job] = first_jobs.get_jobs(section, run)
            planned, smaller = (one.run.keywords["shape"] for one in (job, job.alternative))
            assert smaller.layers == planned.layers - card.FEWER_LAYERS
            assert job.alternative.alternative is None


# ---- files and lines ---------------------------------------------------------------------------------------


def test_what_is_missing_has_no_time():
    names = ("rates", "kernels", "moe ours")
    sections = [section for section in first_plan.SECTIONS if section.name in names]
    results = first.Results(complete={("kernels", "test_a.py"), ("rates", "rates")})
    results.planned = {"rates": ["rates"], "kernels": ["test_a.py", "test_b.py"]}
    rows = list(first.rows_without_time(sections, results))
    assert [(row["row"], row["problem"]) for row in rows] == [
        ("kernels", "not complete: test_b.py"),
        ("moe ours", "never begun"),
    ]
    text = make_table(rows, {"card": "a card"}, 1.0)
    assert "0 wrong, 2 no time" in text and "## Wrong\n\nnothing" in text
    assert "| moe ours | never begun |" in text


def test_what_needs_no_gpu_shares_a_pool():
    pools = [[section.name for section in pool] for pool in first.make_pools(list(first_plan.SECTIONS))]
    assert ["kernels", "modelled"] in pools and ["dense ours"] in pools and sum(map(len, pools)) == len(
        first_plan.SECTIONS
    )
    alone = [section for section in first_plan.SECTIONS if section.name in ("dense ours", "modelled")]
    assert [len(pool) for pool in first.make_pools(alone)] == [1, 1]


def test_only_rows_that_are_ok_are_taken_over(tmp_path):
    lines = [
        {"run": {"card": "H200"}},
        {"section": "kernels", "job": "a", "row": "1", "state": "ok"},
        {"section": "kernels", "job": "a", "complete": True},
        {"section": "kernels", "job": "b", "row": "2", "state": "wrong"},
        {"section": "kernels", "job": "b", "row": "3", "state": "ok"},
        {"section": "kernels", "job": "b", "complete": True},
        {"section": "models", "job": "models", "row": "models", "state": "no time"},
    ]
    path = tmp_path / "first.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"section": "torn')
    results = first.results_before(str(path), "H200")
    assert [row["row"] for row in results.rows] == ["1", "3"] and results.complete == {("kernels", "a")}
    assert results.done("kernels") == {"a": frozenset("1"), "b": frozenset("3")}
    with pytest.raises(ConfigError, match="is of H200; this is H100"):
        first.results_before(str(path), "H100")
    with pytest.raises(ConfigError, match="not a first.jsonl"):
        first.results_before(str(tmp_path / "none.tar.gz"), "H200")


def test_unknown_sections_and_folders_without_tests_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--only kernel: no such section; there are rates, "):
        first.chosen_sections("dense ours,kernel")
    with pytest.raises(ConfigError, match="no file of it has a test marked gpu"):
        first_jobs.files_of_tests(str(tmp_path))
    assert len(first_jobs.files_of_tests("tests/kernels")) > 15
    sections = first.chosen_sections("kernels/test_norm.py,rates")
    assert [section.name for section in sections] == ["rates", "kernels"]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_no_gpu_is_one_line(tmp_path):
    code, _, errors = bench(ROOT, "first", "--out", tmp_path / "out")
    assert code == 2 and errors.count("\n") == 1
    assert "error: --device cuda: nvidia-smi finds no GPU here; a rehearsal is --device cpu" in errors


# ---- what travels ------------------------------------------------------------------------------------------


def test_what_travels_is_small_enough():
    tracked, _ = travel.travel_bytes()
    assert tracked + PEERS_MIB * 2**20 < travel.MAX_TRAVEL_BYTES
    assert ROOT / "train.py" in travel.tracked_files()


def test_the_size_of_what_travels_is_said(tmp_path):
    (tmp_path / "peers").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "large.pt").write_bytes(b"1" * 2**20)
    (tmp_path / "x.py").write_bytes(b"1" * 2**20)
    assert travel.travel_line(tmp_path) == "travels: 1.0 MiB of files and 0.0 MiB of peers/; fits 64 MiB"
    with (tmp_path / "peers" / "large.whl").open("wb") as file:
        file.truncate(64 * 2**20)
    assert "DOES NOT FIT" in travel.travel_line(tmp_path)


def test_the_peers_that_are_there_are_named(tmp_path):
    info = tmp_path / "torchtitan-0.2.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n")
    line = travel.describe_peers(str(tmp_path))
    assert line.startswith("peers: torchtitan 0.2.2; not there: ") and "lab/docs/benchmarks.md" in line
