"""parallel.auto: a run takes the planner's best layout, says which, and keeps it."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest
from ranks import MODEL, corpus, job

import config
from config.reading import from_tree, resolve
from plan import auto, elastic
from plan.auto import arguments, layout_text
from plan.cost import cluster
from scripts import plan

ROOT = pathlib.Path(__file__).parent.parent
AUTO = ("--parallel.auto", "h100-ib")
LAYOUT = ("tp", "pp", "cp", "zero", "dp_rep", "schedule", "recompute")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A recipe whose micro_batch is the file's neither nor the command line's, so that it is searched."""
    home = tmp_path_factory.mktemp("auto")
    index = MODEL.index("--train.micro_batch")
    of_model = [*MODEL[:index], *MODEL[index + 2:]]
    of_run = ["--train.steps", "4", "--checkpoint.every", "2", "--model.vocab", "512"]
    return ["llama3-tiny", *of_model, *of_run, "--data.path", corpus(home)]


def run(home: pathlib.Path, world: int, words: list[str], *more: str, before=lambda rank: None):
    return job(home, world, [*words, *more, "--log.dir", str(home), "--log.name", "run"], before=before)


def saved(home: pathlib.Path) -> config.Config:
    return from_tree(config.read_yaml(home / "run" / "config.yaml"))


def header(log: str) -> list[str]:
    """Its lines, as if the terminal were wide."""
    return [line for line in log.replace("\n         ", " ").splitlines() if line.startswith("auto ")]


def refuse_search(rank):
    """Makes any search an error."""

    def search(*args, **kwargs):
        raise AssertionError("searched again")

    auto.search = search


def forbid_planner(rank):
    sys.modules["plan.auto"] = None


def test_a_run_takes_the_best_layout_of_scripts_plan_and_keeps_it(words, tmp_path, capsys):
    end = run(tmp_path, 2, words, *AUTO)
    assert end.codes == [0, 0], end.logs
    cfg = saved(tmp_path)
    assert plan.main([*words, "--gpus", "2", "--cluster", "h100-ib", "--top", "10", "--json"]) == 0
    best = json.loads(capsys.readouterr().out.splitlines()[0])
    assert layout_text(cfg, 2) == best["layout"] and cfg.parallel.auto == "h100-ib"
    (line,) = header(end.logs[0])
    assert line == (
        f"auto     {best['layout']}, the planner's best for 2 ranks of h100-ib, forecast "
        f"{best['step_s']:.3g} s a step ({best['arguments']})"
    )
    assert not header(end.logs[1])

    # further steps: the same layout, without a search, whatever the recipe says
    end = run(tmp_path, 2, words, *AUTO, "--train.steps", "6", before=refuse_search)
    assert end.codes == [0, 0], end.logs
    assert ", as this run has begun on 2 ranks of h100-ib, forecast " in header(end.logs[0])[0]
    assert saved(tmp_path).parallel == cfg.parallel and "resumed with a different parallel" not in end.logs[0]

    # keys that are stated now stay, and only they are asked for
    end = run(tmp_path, 2, words, *AUTO, "--train.steps", "8", "--parallel.tp", "2")
    assert end.codes == [0, 0], end.logs
    assert saved(tmp_path).parallel.tp == 2 and header(end.logs[0])[0].startswith("auto     tp2 ")

    # another number of ranks: refused, with a command that continues
    end = run(tmp_path, 1, words, *AUTO, "--train.steps", "10")
    assert end.codes == [2], end.logs
    (error,) = end.errors()
    said = "error: parallel.auto: this run has the best layout for 2 ranks, and there is 1: start 2, or "
    assert error.startswith(said)
    fix_hint = error.rpartition(" with ")[2].split()
    end = run(tmp_path, 1, words, *AUTO, "--train.steps", "10", *fix_hint)
    assert end.codes == [0], end.logs
    assert saved(tmp_path).parallel.auto is None


def test_keys_that_are_stated_are_not_chosen(words, tmp_path):
    stated = ("--parallel.pp", "2", "--train.micro_batch", "1", "--parallel.recompute", "full")
    end = run(tmp_path, 2, words, *AUTO, *stated)
    assert end.codes == [0, 0], end.logs
    cfg = saved(tmp_path)
    assert (cfg.parallel.pp, cfg.train.micro_batch, cfg.parallel.recompute) == (2, 1, "full")
    assert arguments(cfg) in header(end.logs[0])[0]


def test_without_the_key_nothing_of_it_is_loaded(words, tmp_path):
    end = run(tmp_path, 1, words, "--train.micro_batch", "1", before=forbid_planner)
    assert end.codes == [0] and not header(end.logs[0]), end.logs


def test_the_same_command_finds_its_finished_run(words, tmp_path):
    """The chosen layout does not count as another setting, so there is one folder."""
    command = [*words, *AUTO, "--log.dir", str(tmp_path)]
    for said in ("done in", "already finished"):
        end = job(tmp_path, 2, command)
        assert end.codes == [0, 0] and said in end.logs[0], end.logs
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["llama3-tiny"]


def test_a_card_decides_the_memory_and_must_be_of_the_cluster(words):
    cfg = resolve(words[0], None, [*words[1:], *AUTO])
    card = elastic.RankDevice("NVIDIA H100 NVL", 93.1 * 2**30)
    assert auto.get_machine(cfg, card) == dataclasses.replace(cluster("h100-ib"), memory=card.memory)
    with pytest.raises(config.ConfigError, match="h100-ib has GPUs named h100, and this machine a"):
        auto.get_machine(cfg, elastic.RankDevice("NVIDIA A100-SXM4-80GB", 79.1 * 2**30))


@pytest.mark.slow
def test_the_dry_run_takes_it_too(tmp_path):
    words = ["llama3-tiny", "--dry-run", "--world", "2", "--cluster", "cpu", "--model.vocab", "512", *AUTO]
    args = [sys.executable, "train.py", *words, "--json", str(tmp_path / "dry.json")]
    end = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert end.returncode == 0, end.stderr
    assert end.stdout.startswith("auto: ") and "the planner's best for 2 ranks of h100-ib" in end.stdout


TWO_PHASES = json.dumps([{"after_steps": 2, "train.seq_len": 32}])
ONE_SEQUENCE = json.dumps([{"after_steps": 2, "train.global_batch": 1}])
STATES_TP = json.dumps([{"after_steps": 2, "parallel.tp": 2}])


def test_of_several_phases_the_longest_decides(words, tmp_path, capsys):
    phases = ("--train.phases", TWO_PHASES)
    end = run(tmp_path, 2, words, *AUTO, *phases)
    assert end.codes == [0, 0], end.logs
    assert plan.main([*words, *phases, "--gpus", "2", "--cluster", "h100-ib", "--json"]) == 0
    best = json.loads(capsys.readouterr().out.splitlines()[0])
    assert f"forecast {best['step_s']:.3g} s a step ({best['arguments']})" in header(end.logs[0])[0]
    assert layout_text(saved(tmp_path), 2) == best["layout"]


@pytest.mark.parametrize(
    "more, says",
    [
        (["--parallel.auto", "h101-ib"],
         "parallel.auto: no such cluster 'h101-ib'; configs/clusters.yaml has v100-ib"),
        (["--parallel.auto", "v100-ib", "--train.dtype", "bf16"],
         "train.dtype: configs/clusters.yaml has no bf16 for v100-ib; it has "),
        ([*AUTO, "--parallel.elastic", "true"],
         "parallel.auto: takes a layout for one number of ranks, and parallel.elastic one for each"),
        ([*AUTO, "--train.phases", STATES_TP],
         "parallel.auto: takes one layout for the whole run, and phase 2 states parallel.tp"),
        # a later phase has fewer sequences than any of these layouts needs
        ([*AUTO, "--parallel.pp", "1", "--parallel.tp", "1", "--train.phases", ONE_SEQUENCE],
         "parallel.auto: none of the "),
        ([*AUTO, "--parallel.tp", "2", "--parallel.pp", "2"],
         "parallel.auto: no layout of this run on 2 GPUs of 79 GiB fits (0 are too large, "),
    ],
)
def test_a_layout_that_cannot_be_chosen_is_refused_before_the_folder_is_made(words, tmp_path, more, says):
    end = run(tmp_path, 2, words, *more)
    assert end.codes[0] == 2 and not end.logs[1], end.logs
    assert len(end.errors()) == 1 and end.errors()[0].startswith("error: " + says), end.errors()
    assert not (tmp_path / "run").exists()


def test_a_job_that_is_too_large_says_what_would_fit(tmp_path):
    of_run = ["--train.seq_len", "2048", "--train.global_batch", "8", "--parallel.recompute", "full"]
    end = run(tmp_path, 1, ["llama3-8b", *of_run], *AUTO, "--train.micro_batch", "1")
    (error,) = end.errors()
    assert end.codes == [2] and "the smallest needs at least" in error and "2 GPUs" in error
