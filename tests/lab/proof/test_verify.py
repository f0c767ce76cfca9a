"""scripts.verify: parts of a proof are the whole proof, a part that does not exist is refused, a layout that
dies is one that failed, and overrides reach every process of a proof or are refused in one line.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import Config, ConfigError
from config.reading import get_phases
from config.reading.kinds import every_path
from config.tree import has_path, value_at, with_values
from lab.proof import lattice, mup
from lab.proof.precision.cells import Cell
from lab.proof.verify import command
from lab.proof.verify.cells import chosen, every_word, words
from lab.proof.verify.command import main
from lab.proof.verify.overrides import (
    CELL_WORDS,
    NEEDED,
    Overrides,
    check_free,
    read_overrides,
    split_overrides,
)
from lab.proof.verify.tiny_config import placed, tiny_config, write_corpora
from lab.proof.verify.trial import (
    check_trained,
    name_of_reference,
    reference_values,
    run_references,
    single_process,
)
from parallel.wire.world import World
from runtime.failure import fail_cleanly


@pytest.mark.slow
@pytest.mark.parametrize("word", ["uneven", "mixed"])
def test_layouts_that_cannot_have_a_word_are_not_searched_for_it(word):
    """A pipeline of one rank has neither: a search would go through millions of choices."""
    found = lattice.find_layouts(tiny_config("llama3-tiny", 4), 4)
    cells = chosen(found, "60", {word}, seed=0)
    with_pipeline = [layout for layout in found.layouts if layout["pp"] > 1]
    assert len(cells) == 60 and all(word in words(cell, 4) for cell in cells)
    assert len({tuple(cell[key] for key in layout_keys()) for cell in cells}) == min(60, len(with_pipeline))


def test_layouts_that_have_a_forbidden_word_and_words_that_exclude_each_other_are_not_searched():
    """The search went through all choices of the switches, for days."""
    found = lattice.find_layouts(tiny_config("llama3-tiny", 2), 2)
    cells = chosen(found, "2", {"tp2", "no-sp", "zero0", "no-mb1"}, seed=0)
    assert [(cell["tp"], cell["sp"], cell["micro_batch"]) for cell in cells] == [(2, False, 2)] * 2
    for excluding in ({"spikes", "phases"}, {"muon", "offload"}, {"rowwise", "no-fp8"}):
        with pytest.raises(ConfigError, match="^--only: no legal layout of 2 ranks has the words "):
            chosen(found, "2", excluding, seed=0)


def layout_keys() -> tuple[str, ...]:
    return (*lattice.DEGREES, *lattice.LAYOUT)


@pytest.mark.slow
def test_a_part_runs_its_own_cells_and_says_which(capsys):
    def said(*part: str) -> list[str]:
        assert main(["llama3-tiny", "--world", "1", "--layouts", "5", "--only", "mb1", *part]) == 0
        return capsys.readouterr().out.splitlines()

    def cells(lines: list[str]) -> list[str]:
        return [line for line in lines if line.startswith("ok ")]

    whole = cells(said())
    one, two = said("--part", "1/2"), said("--part", "2/2")
    assert len(whole) == 5 and cells(one) == whole[0::2] and cells(two) == whole[1::2]
    assert two[0].startswith("llama3-tiny: part 2/2: 2 cells of")
    assert two[-1].startswith("part 2/2: 2 of 2 layouts train like one process")


@pytest.mark.slow
def test_a_layout_that_dies_does_not_hide_the_others(monkeypatch, capfd):
    calls, prove = [], command.prove

    def first_dies(pool, *args, **checks):
        calls.append(pool)
        return prove(pool, *args, **checks) if len(calls) > 1 else pool.run(os.fspath)  # which takes no World

    monkeypatch.setattr(command, "prove", first_dies)
    assert main(["llama3-tiny", "--world", "2", "--layouts", "2", "--only", "mb1", "zero1"]) == 1
    told = capfd.readouterr()
    lines = [line for line in told.out.splitlines() if line.startswith(("ok ", "WRONG "))]
    assert lines[0].startswith("WRONG") and "died: TypeError" in lines[0] and lines[1].startswith("ok")
    assert "Traceback" in told.err
    assert calls[0] is not calls[1] and told.out.splitlines()[-1].startswith("1 of 2 layouts")


def test_a_reference_that_dies_fails_its_own_layout_alone(monkeypatch, capfd):
    """The references of several layouts are made together."""
    make, sizes = command.make_references, []

    def those_unlike_the_first_die(pool, cfgs, home):
        sizes.extend(cfg.train.micro_batch for cfg in cfgs)
        if any(cfg.train.micro_batch != sizes[0] for cfg in cfgs):
            raise RuntimeError("rank 0: no reference")
        return make(pool, cfgs, home)

    monkeypatch.setattr(command, "make_references", those_unlike_the_first_die)
    monkeypatch.setattr("lab.proof.verify.trial.make_references", those_unlike_the_first_die)
    assert main("llama3-tiny --world 1 --layouts 6 --seed 13 --only zero0 no-wide no-ramp".split()) == 1
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("ok ", "WRONG "))]
    dead = [line for line in lines if line.startswith("WRONG")]
    first = f" mb{sizes[0]} "
    assert lines[0].startswith("ok") and first in lines[0]  # whose turn it is when the group fails
    assert 0 < len(dead) < len(lines)
    assert all("no reference" in line and first not in line for line in dead)


def test_an_error_without_words_is_named_by_its_class(monkeypatch, capfd):
    """It fails its own layout, and does not end the proof."""

    def dies(*args, **checks):
        raise AssertionError

    monkeypatch.setattr(command, "prove", dies)
    monkeypatch.setattr(command, "make_references", lambda *args: None)
    assert main(["llama3-tiny", "--world", "1", "--layouts", "1", "--only", "mb1", "zero1"]) == 1
    assert "died: AssertionError" in capfd.readouterr().out


# ---- overrides ----

EVERY_KEY = every_path(Config)


def first_loss(tmp_path, *words: str, name: str = "llama3-tiny") -> float:
    cfg = single_process(tiny_config(name, 1, read_overrides(list(words), name)))
    folder = tmp_path / "x".join(word.strip("-") for word in (name, *words))
    folder.mkdir()
    write_corpora(folder)
    return float(reference_values(placed(cfg, folder, "run"), folder)["step 1 loss"])


@pytest.mark.slow
def test_an_override_of_the_model_changes_what_is_trained(tmp_path):
    losses = [
        first_loss(tmp_path),
        first_loss(tmp_path, "--model.mlp.activation", "gelu"),
        first_loss(tmp_path, "--model.mixer.qk_norm=head"),
        first_loss(tmp_path, "--model.positions", "learned", "--model.mixer.rope", "none"),
        first_loss(tmp_path, "--model.mixer.window", "5"),
        first_loss(tmp_path, "--model.hidden=64"),
    ]
    for one, other in itertools.combinations(losses, 2):
        assert abs(one - other) > 1e-6, losses


@pytest.mark.slow
def test_a_proof_with_overrides_trains_them_on_every_rank_and_says_them(monkeypatch, capsys):
    jobs, prove = [], command.prove

    def recorded(pool, cfg, home, **options):
        of_ranks = pool.run(run_and_report, cfg)
        jobs.append(of_ranks)
        return prove(pool, cfg, home, **options)

    monkeypatch.setattr(command, "prove", recorded)
    own = "--model.mlp.activation=gelu llama3-tiny --world 2 --layouts".split()
    assert main([*own, *"2 --model.mixer.qk_norm head --only no-wide no-ramp".split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama3-tiny model.mlp.activation=gelu model.mixer.qk_norm=head: 2 cells of")
    assert lines[-1].startswith("2 of 2 layouts train like one process")
    assert jobs == [[("gelu", "head")] * 2] * 2

    assert main([*own, *"1 --only mb1 --json".split()]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 1 and rows[0]["ok"] and rows[0]["layout"].endswith(" model.mlp.activation=gelu")


def run_and_report(world, cfg: Config) -> tuple[str, str]:
    return cfg.model.mlp.activation, cfg.model.mixer.qk_norm


@pytest.mark.slow
def test_one_process_and_layouts_have_their_own_values(monkeypatch, capsys):
    """A reference without the override: the proof must see it."""
    make = command.make_references

    def plain(pool, cfgs, home):
        return make(pool, [with_values(cfg, {"model.mlp.activation": "swiglu"}) for cfg in cfgs], home)

    monkeypatch.setattr("lab.proof.verify.trial.make_references", plain)
    assert main("llama3-tiny --world 1 --layouts 1 --only mb1 --model.mlp.activation gelu".split()) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--model.mlp.activation", "x"], "model.mlp.activation: 'x' is not one of swiglu, geglu"),
        (["--model.activatio", "gelu"], "model.activatio: no such key; did you mean model.mlp.activation?"),
        (["--model.activatio=gelu"], "model.activatio: no such key; did you mean model.mlp.activation?"),
        (["--modle.qk_norm", "true"], "modle: no such key; did you mean model?"),
        (["--model.tied", "perhaps"], "model.tied: expected true or false, got 'perhaps'"),
        (["--model.mlp.activation"], "model.mlp.activation: needs a value"),
        (["--model.mlp.activation", "--seed", "1"], "model.mlp.activation: needs a value"),
        (["--heads", "4"], "heads: no such key; it is model.mixer.heads now"),
        (["--sede", "4"], "--sede: no such option; did you mean --seed?"),
        (["gelu"], "gelu: unexpected; a setting is written --section.field VALUE"),
        (["--model.mixer.heads", "5"], "model.mixer.heads: 5 does not divide model.hidden=32"),
        (["--model.mixer.v_dim", "7"], "model.mixer.v_dim: no such key of attention; it belongs to model"),
        (["--parallel.tp", "2"], "parallel.tp: the cells vary it; choose among them with --only tp2"),
        (["--optim.name", "lion"], "optim.name: the cells vary it; choose among them with --only muon"),
        (["--train.dtype", "bf16"], "train.dtype: layouts are proved in fp64; --precision"),
        (["--train.steps", "9"], "train.steps: the proof runs"),
        (
            ["--train.phases", "configs/phases/llama3-tiny.yaml"],
            "train.phases: the proof makes 4 steps, and phase 2 begins after 200; give it phases that begin",
        ),
        (["--data.path", "x"], "data.path: the proof writes its own data"),
        (["--log.dir", "x"], "log.dir: the proof writes and reads its own run folder"),
        (["--coord", "--model.hidden", "64"], "model.hidden: --coord sets it to 128"),
        (["--coord", "--optim.lr", "1"], "optim.lr: --coord sets every key but those of the model"),
        (["--precision", "--model.dropout", "0.2"], "model.dropout: the bounds of --precision hold without"),
        (["--precision", "--model.mixer.heads", "5"], "model.mixer.heads: 5 does not divide model.hidden=64"),
        (
            ["--precision", "--train.seed", "1"],
            "train.seed: --precision sets every key but those of the model",
        ),
        (["--precision", "--only", "adopt"],
         "--only: is of layouts in fp64, and --precision has its own cells"),
        (["--precision", "--strict"], "--strict: is of layouts in fp64"),
    ],
)
def test_overrides_are_refused_in_one_line(words, wanted, capsys):
    assert fail_cleanly(main, ["llama3-tiny", "--world", "2", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {wanted}")


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    "--data.split 60,40 --data.span 64 --data.prefetch 0",
    "--eval.batches 3 --eval.sample 0",
    "--eval.tasks configs/tasks --eval.tasks_limit 2",
    "--checkpoint.keep_at 2 --checkpoint.check_replicas 1",
])
def test_what_a_run_reads_validates_and_saves_may_be_another(words, capsys):
    """One layout of two ranks, beside one process with the same settings."""
    cell = ["tp2", "sp", "zero1", "mb1", "no-own-valid", "no-best-fit"]
    options = ["--world", "2", "--layouts", "1", "--only", *cell]
    assert main(["llama3-tiny", *options, *words.split()]) == 0, capsys.readouterr().out
    assert "1 of 1 layouts train like one process" in capsys.readouterr().out


@pytest.mark.parametrize("skipped", [[2], [2, 4], [1, 2, 3, 4]], ids=str)
def test_a_proof_of_steps_that_nobody_trains_is_refused(tmp_path, skipped):
    """As a key may make it: layouts that skip every step agree with one process that does."""
    values = {f"step {step} is good": torch.tensor(step not in skipped) for step in range(1, 5)}
    values["steps that were begun, in order"] = torch.arange(1, 5)
    save_file(values, tmp_path / "reference.safetensors")
    if skipped == [2]:
        check_trained(tmp_path / "reference.safetensors")
        return
    with pytest.raises(ConfigError, match=f"one process skips {', '.join(map(str, skipped))}: "):
        check_trained(tmp_path / "reference.safetensors")


DEFAULT_CELL = (
    {key: values[0] for key, values in lattice.LAYOUT.items()}
    | dict.fromkeys(lattice.DEGREES, 1)
    | lattice.default_switches()
)
AXES = dict.fromkeys(lattice.DEGREES, (2, 4, 8)) | lattice.LAYOUT | lattice.SWITCHES


def test_what_the_rules_refuse_is_shorter_than_the_answers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    refused = {"parallel.sp: does nothing at tp 1": 3, "parallel.sp: and more": 4, "parallel.tp = 3: no": 1}
    cfg = tiny_config("llama3-tiny", 2, Overrides())
    command.print_header("x: ", [], lattice.Lattice(cfg, 2, layouts=[], refused=refused, kept=frozenset()))
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines == ["  refused by the rules: 7 by parallel.sp, 1 by parallel.tp"]


def changed_by_cells(kept: frozenset[str]) -> set[str]:
    cfg = tiny_config("mixtral-tiny", 8)
    cfg = with_values(cfg, {"model.mixer.window": 11})
    found = lattice.Lattice(cfg, 8, layouts=[], refused={}, kept=kept)
    cells = [DEFAULT_CELL | {key: value} for key, values in AXES.items() for value in values]
    cells.append(DEFAULT_CELL | {"pp": 2, "stages": "uneven", "recompute": "mixed"})
    cfgs = [found.config(values) for values in cells]
    keys = [path for path in EVERY_KEY if has_path(cfg, path)]
    return {path for path in keys for one in cfgs if value_at(one, path) != value_at(cfg, path)}


def test_every_key_that_a_cell_sets_is_refused_or_stays_as_it_is_set():
    """Else one that no table names would be overridden in silence."""
    changed = changed_by_cells(kept=frozenset())
    some = {"parallel.tp", "model.mlp.capacity", "optim.states", "train.seq_len", "model.mixer.window"}
    assert some <= changed
    free = set()
    for path in changed:
        try:
            check_free(Overrides(((path, "1"),)))
        except ConfigError as error:
            assert str(error).startswith(f"{path}: ")
        else:
            free.add(path)
    bundled = {path for keys in lattice.BUNDLES.values() for path in keys}
    assert {"model.mixer.window", "optim.beta1", "eval.tasks"} <= free
    assert free <= {*bundled, "model.mixer.window", "train.phases"}
    assert not free & changed_by_cells(kept=frozenset(free))
    for path in set(CELL_WORDS) | {name for name in NEEDED if "." in name}:
        assert path in EVERY_KEY


def of_one_process(folder, **switches) -> dict[str, torch.Tensor]:
    found = lattice.Lattice(tiny_config("llama3-tiny"), 1, layouts=[], refused={})
    cfg = single_process(found.config(DEFAULT_CELL | switches))
    run_references(World(), [(cfg, name_of_reference(cfg), folder / "values")], folder)
    return load_file(folder / "values")


@pytest.mark.slow
def test_a_run_goes_back_or_begins_with_another(tmp_path):
    """In one process; else every layout would agree with one that did neither."""
    write_corpora(tmp_path)
    usual = of_one_process(tmp_path)
    back = of_one_process(tmp_path, guard="spikes")
    init, resumed, branch = (of_one_process(tmp_path, start=how) for how in ("init", "resumed", "branch"))

    steps = [values["steps that were begun, in order"].tolist() for values in (back, init, resumed, branch)]
    assert steps == [[1, 2, 3, 4, 4], [1, 2, 3, 4], [2, 3, 4], [2, 3, 4]]
    samples = [back[f"{step} ids of its samples"].tolist() for step in ("step 4", "step 4, again")]
    assert samples[0] == usual["step 4 ids of its samples"].tolist() != samples[1]
    assert abs(init["step 1 loss"] - usual["step 1 loss"]) > 1e-6
    last = "lr of step 4 in metrics.jsonl"
    assert resumed[last] == usual[last] > branch[last]
    assert abs(resumed["step 2 loss"] - usual["step 2 loss"]) < 1e-12


def test_the_words_that_a_refusal_names_are_words_of_cells():
    for named in CELL_WORDS.values():
        for word in named.replace(" or ", ", ").split(", "):
            assert word.removeprefix("no-") in every_word(16), word


@pytest.mark.slow
def test_every_cell_is_named_by_the_known_words():
    found = lattice.find_layouts(tiny_config("mixtral-tiny"), 4)
    for cell in lattice.draw_cells(found, 200, seed=0):
        assert set(words(cell, 4)) <= every_word(4)


@pytest.mark.parametrize(
    "word, says",
    [
        ("ring", "did you mean cp-ring, reduce-ring?"),
        ("no-ulyses", "did you mean cp-ulysses?"),
        ("tp8", "no cell of 2 ranks has the word tp8; did you mean tp2, "),
        ("xyzzy", "the word xyzzy"),
    ],
)
def test_a_word_that_no_cell_has_is_refused(capsys, word, says):
    argv = ["llama3-tiny", "--world", "2", "--layouts", "1", "--only", "cp2", word]
    assert fail_cleanly(main, argv) == 2
    assert says in capsys.readouterr().err


def test_words_of_the_command_and_of_overrides_are_told_apart():
    words = "llama3-tiny --only mb1 sp --model.mixer.window 7 --out=a.png --model.mlp.bias=true"
    own, settings = split_overrides(f"{words} --table docs/x.md".split())
    assert own == "llama3-tiny --only mb1 sp --out=a.png --table docs/x.md".split()
    assert str(read_overrides(settings, "llama3-tiny")) == "model.mixer.window=7 model.mlp.bias=true"


@pytest.mark.parametrize("name, key, value", [
    ("mixtral-tiny", "model.mlp.experts", "16"),
    ("deepseek-v3-tiny", "model.mixer.kv_rank", "16"),
    ("mamba-tiny", "model.blocks.linear.mixer.groups", "1"),
])
def test_an_override_may_be_of_any_part_that_the_recipe_has(monkeypatch, capsys, name, key, value):
    proved = []
    monkeypatch.setattr(command, "prove_layouts", lambda options, overrides, argv: proved.append(
        tiny_config(options.name, 1, overrides)) or 0)
    assert fail_cleanly(main, [name, "--world", "1", f"--{key}", value]) == 0, capsys.readouterr().err
    assert str(value_at(proved[0], key)) == value
    assert fail_cleanly(main, ["llama3-tiny", "--world", "1", f"--{key}", value]) == 2
    assert capsys.readouterr().err.startswith(f"error: {'.'.join(key.split('.')[:3])}")


def test_a_window_of_ones_own_stays_in_the_wide_cells():
    cfg = tiny_config("llama3-tiny", 1, Overrides((("model.mixer.window", "7"),)))
    found = lattice.find_layouts(cfg, 1, kept=frozenset({"model.mixer.window"}))
    wide = found.layouts[0] | lattice.default_switches() | {"geometry": "wide"}
    assert found.config(wide).model.mixer.window == 7 and found.config(wide).train.seq_len == 240


def test_the_precisions_and_the_coordinate_check_take_overrides(monkeypatch, capsys):
    overrides = Overrides((("model.mlp.activation", "gelu"),))
    cell = Cell("bf16", "adamw", 0, 0, 0)
    assert cell.config("llama3-tiny", 1, "none", overrides).model.mlp.activation == "gelu"
    judged = []

    def make_rows(cells, world):
        def prove(prover, one):
            monkeypatch.setattr(prover, "single", lambda cfg, spoilt: judged.append(cfg))
            with contextlib.suppress(AttributeError):  # there are no runs to judge
                prover.prove(one)
            return [], []

        return [(one.words(world), functools.partial(prove, one=one)) for one in cells]

    monkeypatch.setattr("lab.proof.precision.command.choose_cells", lambda *of_proof: [cell])
    monkeypatch.setattr("lab.proof.precision.command.make_rows", make_rows)
    assert main(["llama3-tiny", "--precision", "--world", "1", "--model.mlp.activation=gelu"]) == 0
    assert capsys.readouterr().out.startswith("llama3-tiny model.mlp.activation=gelu: 1 cells of 1 ranks")
    assert [cfg.model.mlp.activation for cfg in judged] == ["gelu"]

    seen = []
    monkeypatch.setattr(mup, "rows", lambda cfg, widths, is_mup: seen.append(cfg.model.mlp.activation) or [])
    monkeypatch.setattr(mup, "verdict", lambda standard, of_mup: [])
    assert main(["llama3-tiny", "--coord", "--json", "--model.mlp.activation", "gelu"]) == 0
    assert seen == ["gelu", "gelu"]
    assert json.loads(capsys.readouterr().out)["name"] == "llama3-tiny model.mlp.activation=gelu"


@pytest.mark.parametrize("fp8, batches", [(None, [8, 8]), ("blockwise", [8, 8]), ("tensorwise", [1, 1])])
def test_one_process_has_the_microbatches_of_scales_in_every_phase(fp8, batches):
    """Its phases had whole batches, and scales of other tokens than the layout's."""
    name, phases = "llama3-tiny", ["--train.phases", "configs/phases/proof.yaml"]
    cfg = tiny_config(name, 2, read_overrides(phases, name))
    alone = single_process(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, fp8=fp8)))
    assert [phase.cfg.train.micro_batch for phase in get_phases(alone).all[1:]] == batches


@pytest.mark.parametrize("value, want", [(None, 60.0), ("7", 7.0)])
def test_the_ranks_of_a_proof_wait_as_long_as_is_stated(monkeypatch, value, want):
    made = []

    class Ranks:
        def __init__(self, size, timeout_s=60.0):
            made.append((size, timeout_s))

        def run(self, *_):
            raise ConfigError("enough")

    monkeypatch.setattr(command, "WorkerPool", Ranks)
    stated = [] if value is None else ["--parallel.timeout_s", value]
    with pytest.raises(ConfigError, match="enough"):
        main(["llama3-tiny", "--world", "2", "--layouts", "1", *stated])
    assert made == [(2, want)]
