"""Grids of runs: what each run is, what is refused before any begins, a run that fails, and going on."""
import json
import shlex

import pytest
import run_folder
from ranks import MODEL, corpus

from config.reading import dump, resolve
from runtime.failure import fail_cleanly
from scripts import grid
from scripts.compare import __main__ as compare

STEPS = 3
AXES = ["--over", "optim.lr", "1e-3", "8e-3", "--over", "train.seed", "1", "2"]
NAMES = [f"optim.lr={rate}+train.seed={seed}" for rate in ("0.001", "0.008") for seed in (1, 2)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("grid")
    corpus(home)
    return home


def words(home, name, *more):
    place = ["--data.path", str(home / "text"), "--log.dir", str(home), "--log.name", name]
    return ["llama3-tiny", *MODEL, "--model.vocab", "257", *place, "--train.steps", str(STEPS), *more]


def run(capsys, *argv):
    """(exit code, lines of stdout, lines of stderr)"""
    code = fail_cleanly(grid.main, list(argv))
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


@pytest.fixture(scope="module")
def trained(home):
    assert grid.main([*words(home, "rates"), *AXES]) == 0
    return home / "rates"


def test_each_run_is_that_of_its_command(home, trained):
    """The config is train.py's own, losses follow the seed and the rate, and the manifest has every cell."""
    for name in NAMES:
        rate, seed = (part.split("=")[1] for part in name.split("+"))
        own = ["--optim.lr", rate, "--train.seed", seed, "--log.dir", str(trained), "--log.name", name]
        recipe, *argv = words(home, "rates", *own)
        text = (trained / name / "config.yaml").read_text()
        assert text == dump(resolve(recipe, None, argv)) and run_folder.summary(trained / name)["finished"]
    losses = {name: tuple(run_folder.losses(trained / name).values()) for name in NAMES}
    assert {len(each) for each in losses.values()} == {STEPS} and len(set(losses.values())) == 4
    manifest = json.loads((trained / "grid.json").read_text())
    assert [cell["name"] for cell in manifest["cells"]] == NAMES
    assert manifest["cells"][1]["values"] == {"optim.lr": "0.001", "train.seed": "2"}


def test_the_same_command_goes_on_and_takes_more_values(home, trained, capsys):
    before = {name: (trained / name / "metrics.jsonl").read_text() for name in NAMES}
    code, out, _ = run(capsys, *words(home, "rates"), *AXES, "3", "--part", "1/6")  # 1e-3 is 0.001
    assert code == 0 and out[0].startswith(f"[1/1] {NAMES[0]}: validation loss ")
    assert {name: (trained / name / "metrics.jsonl").read_text() for name in NAMES} == before
    assert "the run is already finished" in (trained / f"{NAMES[0]}.log").read_text()
    names = [cell["name"] for cell in json.loads((trained / "grid.json").read_text())["cells"]]
    assert len(names) == 6 and set(NAMES) < set(names)  # those of before, and a third seed of each rate

    # what has not begun is named, and the others are compared
    assert compare.main([str(trained), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [group["seeds"] for group in found["groups"]] == [[1, 2], [1, 2]]
    assert [group["setting"] for group in found["groups"]] == ["optim.lr=0.001", "optim.lr=0.008"]
    missing = [name for name in names if name not in NAMES]
    assert found["left_out"] == [f"{trained / name}: has not begun" for name in missing]


def test_another_grid_under_its_name_is_refused(home, trained, capsys):
    before = (trained / "grid.json").read_text()
    for more, what in (
        ((*AXES, "--optim.warmup", "1"), "optim.warmup 2, not 1"),
        (AXES[:4], "keys ['optim.lr', 'train.seed'], not ['optim.lr']"),
    ):
        code, out, err = run(capsys, *words(home, "rates"), *more)
        assert (code, out, len(err)) == (2, [], 1)
        assert err[0].startswith(f"error: --log.name: {trained} holds a grid with {what}")
    assert (trained / "grid.json").read_text() == before


@pytest.mark.parametrize("argv, message", [
    (["--over", "parallel.tp", "1", "3"], "parallel.tp=3: parallel.tp*pp*cp*dp_rep = 3*1*1*1 = 3 does not"),
    (["--over", "optim.lr", "1e-3", "-1"], "optim.lr=-1.0: optim.lr: -1.0 must be above 0"),
    (["--over", "optim.lr", "1e-3", "0.001"], "--over: two runs would be named optim.lr=0.001"),
    (["--over", "train.sede", "1"], "train.sede=1: train.sede: no such key; did you mean train.seed?"),
    (["--over", "data.valid", "{home}/none"], "data.valid={home}_none: data.valid: "),
    (["--over", "optim.momentum", "0.9"], "optim.momentum=0.9: optim.momentum: 0.9 does nothing: it belongs"),
    (["--over", "parallel.vpp", "2"], "parallel.vpp=2: parallel.schedule: 1f1b has 1 chunk a rank, not 2"),
    (["--over", "train.seed", "1", "--train.seed", "2"], "train.seed: given twice"),
    (["--over", "train.seed", "1", "--over", "train.seed", "2"], "train.seed: given twice"),
    (["--over", "train.seed"], "--over: train.seed has no values"),
    (["--over", "log.dir", "a"], "log.dir: a grid names the folders of its runs itself"),
    (["--over", "seed", "1"], "--over: seed is not a key"),
    (["--over", "data.cache", "x" * 250], "--over: the folder of a run would have a name of "),
    (["--over", "train.seed", "1", "2", "--part", "3/2"], "--part: '3/2' must be K/M"),
    (["--over", "train.seed", "1", "--nproc", "0"], "--nproc: 0; at least 1"),
    ([], "--over: missing"),
])
def test_a_mistake_is_one_line_before_any_run(home, capsys, argv, message):
    argv = [word.format(home=home) for word in argv]
    code, out, err = run(capsys, *words(home, "wrong"), *argv)
    assert (code, out, len(err)) == (2, [], 1), err
    assert err[0].startswith("error: " + message.format(home=str(home).replace("/", "_"))), err
    assert not (home / "wrong").exists()


def test_a_grid_has_a_name(capsys):
    code, _, err = run(capsys, "llama3-tiny", "--over", "train.seed", "1")
    assert code == 2 and err[0].startswith("error: log.name: missing")


def test_a_run_that_fails_is_named_and_the_others_go_on(home, capsys):
    argv = [*words(home, "holed"), "--over", "train.seed", "1", "2", "3"]
    assert run(capsys, *argv, "--part", "1/3")[0] == 0
    (home / "holed" / "train.seed=2").write_text("a file, where the run's folder belongs")
    code, out, err = run(capsys, *argv)
    assert code != 0 and err == [f"error: 1 of 3 runs are not finished: train.seed=2 ({code})"]
    assert out[1].startswith(f"[2/3] train.seed=2: ended with code {code} (")
    assert out[1].endswith(f"{home}/holed/train.seed=2.log says why")
    assert out[2].startswith("[3/3] train.seed=3: validation loss ")
    assert "error:" in (home / "holed" / "train.seed=2.log").read_text()


def test_the_commands_are_listed(home, capsys):
    code, out, _ = run(capsys, *words(home, "listed"), *AXES, "--nproc", "2", "--parallel.tp", "2", "--list",
                       "--part", "2/2")
    assert code == 0 and not (home / "listed").exists()
    assert [line.split()[-1] for line in out] == NAMES[1::2]
    for line, name in zip(out, NAMES[1::2]):
        launch, rest = line.split(" -- ")
        recipe, *argv = shlex.split(rest)
        cfg = resolve(recipe, None, argv)
        assert launch == "python -m scripts.launch --nproc 2" and cfg.parallel.tp == 2
        assert f"optim.lr={cfg.optim.lr}+train.seed={cfg.train.seed}" == cfg.log.name == name


def test_values_with_commas_and_parts_of_a_model_are_values(home, capsys):
    """A comma would not do between values: these have their own."""
    axes = ["--over", "model.pattern", "(block, wide)...", "block, 3 wide"]
    axes += ["--over", "checkpoint.keep_at", "1,2"]
    axes += ["--model.blocks.wide.mlp.width", "80", "--model.layers", "4"]
    code, out, _ = run(capsys, *words(home, "commas"), *axes, "--list")
    assert code == 0 and len(out) == 2
    recipe, *argv = shlex.split(out[1].split("train.py ")[1])
    cfg = resolve(recipe, None, argv)
    assert cfg.model.pattern == "block, 3 wide" and cfg.checkpoint.keep_at == "1,2"
    assert cfg.log.name == "model.pattern=block,_3_wide+checkpoint.keep_at=1,2"
