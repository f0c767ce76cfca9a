"""plan/elastic.py: which layout a run gets on other numbers of ranks, and which numbers are refused."""

import dataclasses
import json

import pytest

import config
from config import ConfigError
from config.reading import dump, get_phases, resolve
from config.reading.run_name import ELASTIC_KEYS, with_own_folder
from config.reading.schedules import plan_pipeline
from plan import elastic
from plan.cost import cluster
from plan.elastic import RankDevice, layout_for

TINY = ("--parallel.tp 2", "--train.global_batch 8", "--train.micro_batch 4", "--parallel.elastic true")


def tiny(*words, name="llama3-tiny"):
    return resolve(name, None, " ".join([*TINY, *words]).split())


@pytest.mark.parametrize(
    "world, words, changed",
    [
        (2, "", {}),
        (4, "", {}),
        (8, "", {"train.micro_batch": 2}),
        (16, "", {"train.micro_batch": 1}),
        (8, "--parallel.zero 1 --parallel.dp_rep 2", {"train.micro_batch": 2}),
        (4, "--parallel.zero 1 --parallel.dp_rep 4", {"parallel.dp_rep": 2}),
        (2, "--parallel.zero 1 --parallel.dp_rep 2", {"parallel.dp_rep": 1}),
        (2, "--parallel.tp 1 --parallel.pp 2 --train.micro_batch 8", {}),
    ],
)
def test_the_given_axes_stay_on_other_numbers_of_ranks(world, words, changed):
    cfg = tiny(words)
    layout = layout_for(cfg, world, RankDevice())
    assert (layout.changed, layout.by_planner) == (changed, False)
    plan_pipeline(layout.cfg, world)
    assert elastic.with_values(cfg, changed) == layout.cfg
    line = elastic.describe(layout, world)
    assert (line == "") == (not changed)
    assert all(f"--{key} {value}" in line for key, value in changed.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, name, words",
    [(3, "llama3-tiny", ""), (2, "mixtral-tiny", "--parallel.ep 4")],
)
def test_else_the_planner_proposes_one_and_nothing_but_the_layout_changes(world, name, words):
    cfg = tiny("--parallel.pp 2 --parallel.stages 2,2 --model.layers 4", words, name=name)
    layout = layout_for(cfg, world, RankDevice())
    assert layout.by_planner and set(layout.changed) <= set(ELASTIC_KEYS)
    assert layout.changed["parallel.pp"] != 2 and layout.cfg.parallel.stages is None
    plan_pipeline(layout.cfg, world)
    assert (layout.cfg.train.global_batch, layout.cfg.model) == (8, cfg.model)
    assert "the planner's layout" in elastic.describe(layout, world)


@pytest.mark.slow
def test_what_a_gpu_cannot_hold_is_not_proposed():
    """8B parameters, Adam and its gradients: 128 GB and more. Of a card with 79 GiB, two with ZeRO do."""
    cfg = resolve("llama3-8b", None, "--parallel.tp 8 --train.steps 9 --train.seq_len 2048".split())
    card = RankDevice("NVIDIA H100 80GB HBM3", cluster("h100-ib").memory)
    assert elastic.get_target(cfg, 4, card).cluster.name == "h100-ib"
    assert layout_for(cfg, 4, card).by_planner
    with pytest.raises(config.ConfigError, match="start 8, 16 ranks"):
        layout_for(cfg, 1, card)
    assert layout_for(cfg, 1, RankDevice()).by_planner  # on a host with any memory


OF_8B = "--train.seq_len 2048 --train.global_batch 64 --train.micro_batch 2 --parallel.elastic true".split()
H100 = RankDevice("NVIDIA H100 80GB HBM3", cluster("h100-ib").memory)


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["1", "3"])
def test_where_fewer_gpus_hold_more_each_the_given_degrees_stay_and_the_rest_fits(zero):
    """8B parameters with tp 2, on 16 GPUs as given; on ever fewer until nothing fits."""
    cfg = resolve("llama3-8b", None, [*OF_8B, "--parallel.tp", "2", "--parallel.zero", zero])
    changed = []
    for world in (16, 8, 4, 2):
        layout = layout_for(cfg, world, H100)
        assert elastic.memory_of_fullest_rank(layout.cfg, world, H100) <= H100.memory
        plan_pipeline(layout.cfg, world)
        given = elastic.memory_of_fullest_rank(cfg, world, H100)
        assert layout.too_large == (given if given > H100.memory else 0)
        if layout.too_large and not layout.by_planner:
            assert layout.cfg.parallel.tp == 2 and layout.cfg.parallel.pp == 1
            assert "the given settings would take" in elastic.describe(layout, world)
        changed.append(bool(layout.changed))
    assert changed[0] is False and changed[-1] is True


@pytest.mark.slow
def test_what_no_layout_can_hold_is_refused_with_sizes_that_do():
    """70B parameters on 4 GPUs; of those that would do, only such that fit are named."""
    cfg = resolve("llama3-70b", None, [*OF_8B, "--parallel.tp", "4", "--parallel.zero", "3"])
    with pytest.raises(ConfigError) as error:
        layout_for(cfg, 4, H100)
    line = str(error.value)
    assert line.startswith("parallel.elastic: no layout on 4 ranks fits into the 79.1 GiB of a GPU (the ")
    assert "\n" not in line and line.endswith("ranks")
    for size in elastic.legal_sizes(cfg, 4, H100):
        assert elastic.memory_of_fullest_rank(cfg, size, H100) <= H100.memory
    assert layout_for(cfg, 4, RankDevice()).changed == {}  # a host has any memory


@pytest.mark.parametrize("world", [5, 7])
def test_a_refusal_names_the_sizes_that_run(world):
    cfg = tiny()
    with pytest.raises(config.ConfigError) as error:
        layout_for(cfg, world, RankDevice())
    assert f"does not divide the world size {world}; " in str(error.value)
    assert f"no layout for {world} ranks: start 2, 4, 8 ranks" in str(error.value)
    for size in (2, 4, 8):
        assert elastic.same_axes(cfg, size) is not None
    assert elastic.same_axes(cfg, 6) is None


def test_as_many_ranks_as_the_given_axes_can_use():
    cfg = tiny()
    assert [elastic.most_ranks(cfg, 1, most) for most in (8, 7, 4, 3, 2)] == [8, 4, 4, 2, 2]
    assert elastic.most_ranks(cfg, 1, 1) == 1  # the planner's
    assert elastic.most_ranks(cfg, 5, 5) is None
    assert elastic.most_ranks(cfg, 5, 7) == 6  # the planner's: none of the given axes


def test_a_run_that_finished_on_fewer_ranks_is_not_another_run(tmp_path):
    """The same command finds its folder: the layout was chosen, not asked for."""
    cfg = tiny("--train.steps 5", f"--log.dir {tmp_path}")
    folder = tmp_path / "llama3-tiny"
    folder.mkdir()
    (folder / "summary.json").write_text('{"finished": true}')
    (folder / "config.yaml").write_text(dump(layout_for(cfg, 1, RankDevice()).cfg))
    assert with_own_folder(cfg, None, []).log.name == "llama3-tiny"
    fixed = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, elastic=False))
    assert "+parallel.tp=2" in with_own_folder(fixed, None, []).log.name


def test_a_phase_that_sets_what_should_follow_is_named(tmp_path):
    """No number of ranks has a multiple of 8 sequences in a global batch of 12."""
    file = tmp_path / "phases.yaml"
    file.write_text("- after_steps: 5\n  train.micro_batch: 8\n")
    words = f"--parallel.tp 1 --train.global_batch 12 --train.micro_batch 2 --train.phases {file}"
    with pytest.raises(ConfigError, match="a phase sets train.micro_batch"):
        layout_for(tiny(words), 2, RankDevice())


@pytest.mark.parametrize(
    "world, row, changed",
    [
        (3, {"train.global_batch": 6, "train.micro_batch": 2, "parallel.tp": 1}, {}),
        (3, {"train.global_batch": 6, "train.micro_batch": 4, "parallel.tp": 1}, {"train.micro_batch": 2}),
        (3, {"train.global_batch": 6, "parallel.tp": 2, "model.mixer.window": 8}, None),
        (1, {"train.seq_len": 64}, None),
    ],
)
def test_a_phase_that_is_past_has_no_word(world, row, changed):
    """The layout is that of the phase in which the run resumes: the first has none on three ranks."""
    cfg = tiny(f"--train.steps 20 --train.phases {json.dumps([{'after_steps': 9, **row}]).replace(' ', '')}")
    assert elastic.same_axes(cfg, world) is None
    layout = layout_for(cfg, world, RankDevice(), 9)
    assert layout.by_planner is (changed is None) and (changed is None or layout.changed == changed)
    first, second = get_phases(layout.cfg).all
    assert first.cfg == get_phases(cfg).all[0].cfg
    assert second.cfg == layout.phase == elastic.with_values(get_phases(cfg).all[1].cfg, layout.changed)
    plan_pipeline(layout.cfg, world, after=9)
    assert elastic.most_ranks(cfg, world, world, 9) == world
