"""The experts of tokens, recorded (log.routing_every) and replayed (train.replay_routing): by train.py, under
every layout, and refused in a line where they do not fit.
"""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import run_folder
from ranks import MODEL, corpus, job
from safetensors.numpy import load_file

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 3
MIXTURE = (
    "--model.mlp experts --model.mlp.experts 4 --model.mlp.top_k 2 --model.mlp.width 16 "
    "--model.mlp.shared.experts 1 --model.mlp.router.aux.weight 0.01"
)
MODELS = {
    "mixture": MIXTURE,
    "sigmoid": f"{MIXTURE} --model.mlp.router.scores sigmoid --model.mlp.router.groups 2 "
    "--model.mlp.router.bias_rate 0.01 --model.mtp.modules 1",
    "capacity": f"{MIXTURE} --model.mlp.capacity.factor 0.8",
}
OTHER_INIT = ("--train.seed", "7", "--model.init_std", "0.1")
LAYOUTS = {  # (ranks, words)
    "mb2": (1, "--train.micro_batch 2"),
    "full": (1, "--parallel.recompute full"),
    "zero0": (2, "--parallel.zero 0"),
    "zero3": (2, "--parallel.zero 3 --parallel.recompute full"),
    "tp2": (2, "--parallel.tp 2"),
    "tp2-sp": (2, "--parallel.tp 2 --parallel.sp true --parallel.recompute full"),
    "pp2": (2, "--parallel.pp 2 --parallel.recompute full"),
    "pp2-zb-v": (2, "--parallel.pp 2 --parallel.schedule zb-v --model.layers 4"),
    "tp2-pp2": (4, "--parallel.tp 2 --parallel.pp 2"),
    "cp2": (2, "--parallel.cp 2 --parallel.recompute selective"),
    "cp2-ulysses": (2, "--parallel.cp 2 --parallel.cp_kind ulysses --parallel.zero 3"),
    "tp2-cp2": (4, "--parallel.tp 2 --parallel.cp 2 --parallel.sp true"),
    "ep2-bound": (2, "--parallel.ep 2 --parallel.ep_bound 1 --parallel.zero 1"),
    "ep4": (4, "--parallel.ep 4"),
    "ep2-etp2": (4, "--parallel.ep 2 --parallel.etp 2 --parallel.tp 2 --parallel.zero 1"),
}
CELLS = [
    *(("mixture", layout) for layout in LAYOUTS),
    *(("sigmoid", layout) for layout in ("full", "pp2", "tp2-sp", "cp2", "zero3", "ep4")),
    *(("capacity", layout) for layout in ("full", "tp2", "cp2", "zero3")),
]
CORE = ["mixture-tp2-pp2", "mixture-cp2", "mixture-ep4", "mixture-ep2-bound", "sigmoid-tp2-sp", "sigmoid-pp2"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("routing"))


def arguments(prefix, folder, name, model, *more):
    args = ["llama3-tiny", *MODEL, *MODELS.get(model, "").split(), "--data.path", prefix]
    args += ["--train.dtype", "fp64", "--train.steps", str(STEPS)]
    args += ["--checkpoint.every", "none", "--optim.lr", "0.02"]
    return [*args, "--log.dir", str(folder), "--log.name", name, *more]


def choices(folder) -> dict[str, np.ndarray]:
    """{step and layer: its experts}"""
    return {f"{path.parent.name}/{path.stem}": np.load(path) for path in folder.glob("routing/*/*.npy")}


def check_same_choices(found, wanted):
    assert found.keys() == wanted.keys() and wanted
    for name, own in wanted.items():
        assert found[name].dtype == own.dtype and np.array_equal(found[name], own), name


def numbers(folder) -> dict[str, float]:
    """{name and step: number} of metrics.jsonl, but for those of time."""
    kept = ("loss", "grad_norm", "val_loss", "moe_load", "moe_entropy", "moe_dropped", "aux_loss")
    found = {}
    for row in run_folder.rows(folder):
        for name in kept:
            value = row.get(name, [])
            for place, number in enumerate(value if isinstance(value, list) else [value]):
                found[f"{name} {place} of step {row['step']}"] = number
    return found


@pytest.fixture(scope="module")
def record(tmp_path_factory, prefix):
    """record(model, layers) -> the folder of a run from other weights that has recorded every step."""
    home, made = tmp_path_factory.mktemp("records"), set()

    def run(model, *more):
        name = "".join((model, *more))
        if name not in made:
            args = arguments(prefix, home, name, model, "--log.routing_every", "1", *OTHER_INIT, *more)
            end = job(home / f"{name}-job", 1, args)
            assert end.codes == [0], end.logs
            made.add(name)
        return home / name

    return run


@pytest.fixture(scope="module")
def replayed(tmp_path_factory, prefix, record):
    """replayed(model, layout) -> the folder of a run that replays the record, and records what it does."""
    home, made = tmp_path_factory.mktemp("replays"), set()

    def run(model, layout, *more):
        world, words = LAYOUTS[layout] if layout else (1, "")
        name = "-".join((model, layout or "alone", *more)).replace(" ", "")
        if name not in made:
            source = record(model, *more)
            args = [*arguments(prefix, home, name, model, "--log.routing_every", "1"), *more, *words.split()]
            end = job(home / f"{name}-job", world, [*args, "--train.replay_routing", str(source)])
            assert end.codes == [0] * world, end.logs
            made.add(name)
        return home / name

    return run


# ---- one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_replay_takes_the_choices_of_another_router(tmp_path, prefix, record, replayed, model):
    """And not its own, which differ: of its first step, the routers of the same weights without a replay."""
    wanted = choices(record(model))
    layers = json.loads((record(model) / "routing" / "routing.json").read_text())
    assert layers == {"experts": 4, "top_k": 2, "layers": [0, 1, 2] if model == "sigmoid" else [0, 1]}
    assert len(wanted) == STEPS * len(layers["layers"])
    assert all(ids.shape == (4, 16, 2) and ids.dtype == np.uint8 for ids in wanted.values())
    check_same_choices(choices(replayed(model, None)), wanted)

    free = arguments(prefix, tmp_path, "free", model, "--log.routing_every", "2")
    assert job(tmp_path / "job", 1, free).codes == [0]
    own = choices(tmp_path / "free")
    assert {name.split("/")[0] for name in own} == {"step_2"}
    assert all((own[name] != wanted[name]).mean() > 0.2 for name in own)


@pytest.mark.parametrize("more", [(), ("--parallel.recompute", "full")], ids=["kept", "recomputed"])
def test_a_run_that_replays_its_own_record_is_itself_bit_for_bit(tmp_path, prefix, more):
    beside = ("--train.rerun_every", "2", "--checkpoint.every", str(STEPS), *more)
    first = arguments(prefix, tmp_path, "first", "sigmoid", "--log.routing_every", "1", *beside)
    again = arguments(prefix, tmp_path, "again", "sigmoid", *beside)
    plain = arguments(prefix, tmp_path, "plain", "sigmoid", *beside)
    for name, args in (
        ("plain", plain), ("first", first),
        ("again", [*again, "--train.replay_routing", str(tmp_path / "first")]),
    ):
        end = job(tmp_path / f"{name}-job", 1, args)
        assert end.codes == [0], end.logs
    runs = [numbers(tmp_path / name) for name in ("plain", "first", "again")]
    assert runs[0] == runs[1] == runs[2] and len(runs[0]) > 20
    assert not (tmp_path / "plain" / "routing").exists()
    folders = [tmp_path / name / "checkpoints" / f"step_{STEPS:08}" for name in ("plain", "again")]
    saved, again = ([load_file(path) for path in sorted(folder.glob("shard_*"))] for folder in folders)
    assert sum(map(len, saved)) > 20
    for one, other in zip(saved, again, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)


def test_a_replay_goes_on_after_a_kill(tmp_path, prefix, record, replayed):
    source = ("--train.replay_routing", str(record("mixture")))
    args = arguments(prefix, tmp_path, "run", "mixture", "--log.routing_every", "1", *source)
    args += ["--checkpoint.every", "1"]
    assert job(tmp_path / "k", 1, args, fault="step.begin:step=3:act=SIGKILL").codes == [-9]
    assert job(tmp_path / "k", 1, args).codes == [0]
    check_same_choices(choices(tmp_path / "run"), choices(record("mixture")))
    assert numbers(tmp_path / "run") == numbers(replayed("mixture", None))


# ---- layouts -----------------------------------------------------------------------------------------------


@pytest.mark.slow(core=CORE)
@pytest.mark.parametrize(("model", "layout"), [pytest.param(*cell, id="-".join(cell)) for cell in CELLS])
def test_a_record_of_one_process_replays_under_every_layout(record, replayed, model, layout):
    sizes = ("--model.layers", "4") if "--model.layers 4" in LAYOUTS[layout][1] else ()
    wanted, found = numbers(replayed(model, None, *sizes)), numbers(replayed(model, layout, *sizes))
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert sum(name.startswith("grad_norm") for name in wanted) == STEPS
    check_same_choices(choices(replayed(model, layout, *sizes)), choices(record(model, *sizes)))


def test_a_record_of_a_layout_is_that_of_one_process(tmp_path, prefix, record):
    args = arguments(prefix, tmp_path, "run", "mixture", "--log.routing_every", "1", *OTHER_INIT)
    end = job(tmp_path / "job", 4, [*args, "--parallel.tp", "2", "--parallel.pp", "2"])
    assert end.codes == [0] * 4, end.logs
    check_same_choices(choices(tmp_path / "run"), choices(record("mixture")))


# ---- bad input ---------------------------------------------------------------------------------------------


WRONG = {  # {what is wrong: (words of the run, what the line says)}
    "experts": ("--model.mlp.experts 8", "recorded with model.mlp.experts 4, and this run has 8"),
    "top_k": ("--model.mlp.top_k 1", "recorded with model.mlp.top_k 2, and this run has 1"),
    "layers": ("--model.layers 3", "recorded with mixture layers 0,1, and this run has 0,1,2"),
    "batch": ("--train.global_batch 8", "has uint8 [4, 16, 2], and step 1 of this run has [8, 16, 2]"),
    "seq_len": ("--train.seq_len 8", "has uint8 [4, 16, 2], and step 1 of this run has [4, 8, 2]"),
    "steps": ("--train.steps 9", "has no record of step 4, and this run has steps up to 9"),
    "dense": ("", "not possible with a model without experts"),
}


def refused(home, folder, args) -> str:
    """The line with which a run is refused, before its first step."""
    end = job(home, 1, args)
    assert end.codes == [2] and len(end.errors()) == 1, end.logs
    assert not (folder / "metrics.jsonl").exists() or not run_folder.steps(folder)
    return end.errors()[0]


@pytest.mark.parametrize("what", WRONG)
def test_a_record_of_another_run_is_refused(tmp_path, prefix, record, what):
    words, told = WRONG[what]
    model = "dense" if what == "dense" else "mixture"
    args = arguments(prefix, tmp_path, "run", model, *words.split())
    args += ["--train.replay_routing", str(record("mixture"))]
    line = refused(tmp_path / "j", tmp_path / "run", args)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # nor has it validated
    assert line.startswith("error: train.replay_routing: ") and told in line


@pytest.mark.parametrize("damage", ["nothing", "text", "key", "cut", "signed", "layer", "equal", "large"])
def test_a_damaged_record_is_refused(tmp_path, prefix, record, damage):
    """What the heads of the files show, before any work; ids that are no experts, as they are read."""
    folder = tmp_path / "broken" / "routing"
    for name, ids in choices(record("mixture")).items():
        if damage == "equal":
            ids[:] = 1
        if damage == "large":
            ids = ids + np.uint8(3)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{name}.npy", ids.astype(np.int8) if damage == "signed" else ids)
    if damage == "layer":
        (folder / "step_2" / "layer_1.npy").unlink()
    if damage == "cut":
        (folder / "step_2" / "layer_0.npy").write_bytes(b"\x93NUMPY")
    text = {"text": "{", "key": '{"experts": 4}'}.get(damage, '{"experts": 4, "top_k": 2, "layers": [0, 1]}')
    if damage != "nothing":
        (folder / "routing.json").write_text(text)
    args = arguments(prefix, tmp_path, "run", "mixture", "--train.replay_routing", str(tmp_path / "broken"))
    line = refused(tmp_path / "j", tmp_path / "run", args)
    assert line.startswith("error: train.replay_routing: ") and str(tmp_path / "broken") in line


@pytest.mark.parametrize("words", [
    "train.py mixtral-tiny --dry-run --world 2", "-m scripts.plan mixtral-tiny --gpus 2 --cluster h100-ib",
])
def test_the_dry_run_and_the_planner_take_the_keys(words):
    keys = "--log.routing_every 5 --train.replay_routing runs/nowhere --model.vocab 512"
    argv = [sys.executable, *words.split(), *keys.split()]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (ROOT / "runs" / "nowhere").exists()
