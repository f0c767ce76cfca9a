"""The moving average of the weights (train.ema): against torch's AveragedModel, the same under every layout,
bit for bit after a kill, at other layouts, through phases and branches, and what scripts read of it.
"""

import json
import math

import pytest
import run_folder
import torch
from program import settings, trained
from ranks import corpus
from test_resume import run, same_as_clean, weights
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from build import build_run
from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk.saver import CheckpointSaver
from checkpoint.trained import load_run
from config import ConfigError
from config.exit_codes import STOPPED_EARLY
from config.reading.tiny import tiny_config
from config.tree import with_values
from lab.proof.verify.trial import prove
from model.sharding import parallel_dims
from parallel.sharding.bucket import start_param_gathers
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh
from parallel.wire.strict import StrictMode
from parallel.wire.world import World
from scripts import convert, evaluate, generate

CPU = torch.device("cpu")
DECAY = 0.7


class Watch:
    """Torch's average of the same weights beside the run, which continues through resumes. Step `skipped` has
    no finite gradient.
    """

    def __init__(self, skipped: int):
        self.skipped = skipped
        self.compared = 0
        self.theirs = None

    def __call__(self, point, step=None, **shown):
        if point == "run.built":
            self.run = shown["run"]
        if point == "run.built" and self.theirs is None:
            self.copy = torch.nn.ParameterList([master.clone() for master in self.masters()])
            self.theirs = AveragedModel(self.copy, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            self.theirs.update_parameters(self.copy)  # their first update is a copy
        if point == "step.backward" and step == self.skipped:
            return "nan"
        if point == "step.end":
            assert bool(shown["ok"]) is (step != self.skipped)
            if shown["ok"]:
                for mine, master in zip(self.copy, self.masters()):
                    mine.data.copy_(master)
                self.theirs.update_parameters(self.copy)
            for ours, theirs in zip(self.run.ema.averages, self.theirs.parameters()):
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), step
                self.compared += ours.numel()
        return None

    def masters(self):
        masters = [bucket.weights.master.detach() for bucket in self.run.buckets]
        return [master.to(torch.promote_types(master.dtype, torch.float32)) for master in masters]


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "name, dtype, optim",
    [
        ("llama3-tiny", "fp64", {}),
        ("llama3-tiny", "fp32", {"name": "muon"}),
        ("mixtral-tiny", "bf16", {}),
        ("llama3.2-tiny", "bf16", {"states": "bf16"}),
    ],
)
def test_the_average_is_that_of_torch(tmp_path, name, dtype, optim):
    cfg = settings(corpus(tmp_path), name=name, train={"steps": 4, "dtype": dtype, "ema": DECAY}, optim=optim)
    watch = Watch(skipped=2)
    assert trained(World(), cfg, str(tmp_path / "run"), watch) == 0
    assert watch.compared > 4 * 1000
    for bucket in watch.run.buckets:  # the run has its own weights again after the last validation
        assert torch.equal(bucket.weights.local, bucket.weights.master.to(bucket.dtype))


def test_a_resume_continues_the_average(tmp_path):
    """By hand against torch, through a stop in step 3."""
    cfg = settings(corpus(tmp_path), train={"steps": 5, "ema": DECAY})
    watch, folder = Watch(skipped=2), tmp_path / "run"
    begun = []

    def observe(point, step=None, **shown):
        if point == "step.begin":
            begun.append(step)
            if begun == [1, 2, 3]:
                (folder / "STOP").write_text("requeue\n")
        return watch(point, step, **shown)

    assert trained(World(), cfg, str(folder), observe) == STOPPED_EARLY
    assert trained(World(), cfg, str(folder), observe) == 0
    assert begun == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_validation_with_the_average_changes_nothing(tmp_path, dtype):
    """The losses of a run with it are bit for bit those of a run without."""
    found = []
    for ema in (None, DECAY):
        cfg = settings(corpus(tmp_path), train={"steps": 4, "dtype": dtype, "ema": ema}, eval={"every": 1})
        folder = tmp_path / str(ema)
        assert trained(World(), cfg, str(folder), lambda *_, **__: None) == 0
        found.append(run_folder.rows(folder))
    assert len(found[0]) == len(found[1]) == 4 + 5
    for plain, averaged in zip(*found):
        for key in ("step", "loss", "grad_norm", "val_loss"):
            assert plain.get(key) == averaged.get(key)
        assert "val/ema/loss" not in plain and ("val/ema/loss" in averaged) == ("val_loss" in averaged)
    losses = [row["val/ema/loss"] - row["val_loss"] for row in found[1] if "val_loss" in row]
    assert losses[0] == 0 and all(losses[1:])


# ---- layouts -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, parallel, more",
    [
        ("llama3-tiny", {"zero": 1}, {}),
        ("llama3-tiny", {"zero": 3, "offload": "both"}, {}),
        ("llama3-tiny", {"zero": 2}, {"optim.name": "muon"}),
        ("llama3-tiny", {"tp": 2, "sp": True}, {"checkpoint.async_save": True}),
        ("llama3.2-tiny", {"pp": 2}, {}),
        ("mixtral-tiny", {"ep": 2, "zero": 1}, {}),
        ("llama3-tiny", {"zero": 1}, {"train.phases": json.dumps([
            {"after_steps": 1, "train.seq_len": 16, "parallel.zero": 3},
            {"after_steps": 3, "train.seq_len": 32, "parallel.zero": 0, "parallel.cp": 2},
        ])}),
        ("llama3-tiny", {"zero": 1}, {"train.phases": json.dumps([
            {"after_steps": 3, "train.seq_len": 16},  # which begins while weights of the first are gathered
        ])}),
    ],
    ids=["zero1", "zero3-offload", "zero2-muon", "tp2-async", "tied-pp2", "moe", "phases", "zero1-phases"],
)
def test_every_layout_averages_the_same(ranks, tmp_path, name, parallel, more):
    """Step 2 is the skipped one, and after step 3 the run is stopped and started again. The validation with
    the average and what checkpoints hold of it are compared, among all else. Strict: no exchange or copy is
    under way where the average is read or written.
    """
    layout = {f"parallel.{key}": value for key, value in parallel.items()}
    cfg = with_values(tiny_config(name, 2), {"train.ema": DECAY, **layout, **more})
    first, _ = prove(ranks(2), cfg, tmp_path, is_strict=True)
    assert not first.is_wrong, first


LAYOUTS = {
    "one": (1, {}),
    "zero1": (2, {"zero": 1}),
    "zero3 offload": (2, {"zero": 3, "offload": "both"}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
}


def config_at(layout: str):
    keys = {f"parallel.{key}": value for key, value in LAYOUTS[layout][1].items()}
    return with_values(tiny_config("llama3.2-tiny"), {"train.ema": DECAY, **keys})


def restart_while_weights_are_gathered(world) -> bool:
    """Whether the average is that of the weights, which a step over NCCL would not have yet."""
    cfg = config_at("zero1")
    made = build_run(cfg, Mesh.bind(parallel_dims(cfg, world.size), world), CPU, None, 10)
    masters = [bucket.weights.master.clone() for bucket in made.buckets]
    world.activity.strict = StrictMode()
    try:
        start_param_gathers(made.buckets, torch.tensor(True))
        made.ema.start()
    finally:
        world.activity.strict = None
    return all(map(torch.equal, made.ema.averages, masters))


def test_an_average_starts_from_weights_that_have_arrived(ranks):
    assert ranks(2).run(restart_while_weights_are_gathered) == [True, True]


class Facts:
    """The facts of data that a checkpoint records."""
    fingerprint = "data"
    is_chat = False
    has_start = False
    tokenizer = type("Tokenizer", (), {"fingerprint": "tokenizer"})


def average_of(key: str, shape, offset: int) -> torch.Tensor:
    """Values that tell a weight from its average, and each from all others."""
    stream = torch.Generator().manual_seed(sum(key.encode()) + offset)
    return torch.randn(shape, generator=stream, dtype=torch.float64)


def fill_or_check(world, layout: str, root, is_writer: bool) -> int:
    cfg = config_at(layout)
    mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
    made = build_run(cfg, mesh, CPU, Facts(), cfg.train.steps)
    checked = 0
    if not is_writer:
        state.load(made, store.quick_check(root / "step_00000001"))
    for bucket, average in zip(made.buckets, made.ema.averages):
        for offset, flat in enumerate((bucket.weights.master, average)):
            for box, part in get_boxes(bucket, flat):
                place = tuple(slice(start, start + size) for start, size in zip(box.start, box.size))
                want = average_of(box.key, box.shape, offset)[place]
                if is_writer:
                    part.copy_(want)
                else:
                    assert torch.equal(part, want), (box.key, offset)
                    checked += part.numel()
    if is_writer:
        state.save_run(made, CheckpointSaver(False), root, 1, fault_point=lambda *_, **__: None)
    return checked


@pytest.mark.slow
@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_reads_the_average_of_any(ranks, tmp_path, source):
    def on(layout: str, is_writer: bool) -> list[int]:
        world = LAYOUTS[layout][0]
        args = (layout, tmp_path, is_writer)
        return [fill_or_check(World(), *args)] if world == 1 else ranks(world).run(fill_or_check, *args)

    on(source, True)
    for layout in LAYOUTS:
        assert all(on(layout, False))


# ---- killed, branched, begun later -------------------------------------------------------------------------

EMA = ("--train.ema", str(DECAY))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("ema")
    assert run(home, "clean", extra=EMA) == 0, (home / "clean.log").read_text()
    return home


def kept(path) -> dict[str, torch.Tensor]:
    """{key: whole tensor} of a checkpoint of one process."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for shard in path.glob("*.safetensors"):
        found |= load_file(shard)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("point, step", [("step.end", 2), ("step.begin", 5), ("ckpt.pre_rename", 6),
                                         ("eval.end", 8)])
def test_a_killed_run_ends_with_the_same_average(home, point, step):
    name = f"{point}-{step}"
    assert home and run(home, name, f"{point}:step={step}:act=SIGKILL", EMA) == -9
    assert run(home, name, extra=EMA) == 0
    assert any(key.endswith("@ema") for key in weights(home / name))
    same_as_clean(home, name)


@pytest.mark.slow
def test_a_run_that_begins_to_average_and_one_that_ends(home):
    """The average begins at the weights of step 3, and the log says so."""
    assert run(home, "late", "step.begin:step=5:act=SIGKILL") == -9
    at_three = kept(home / "late" / "checkpoints" / "step_00000003")
    assert not any("@ema" in key for key in at_three)
    assert run(home, "late", "step.end:step=5:act=SIGTERM", EMA) == 75
    assert "it starts at the weights of that step" in (home / "late.log").read_text()
    assert run(home, "late", extra=()) == 0
    assert "the moving average in" in (home / "late.log").read_text()
    assert not any(key.endswith("@ema") for key in weights(home / "late"))


@pytest.mark.slow
def test_a_run_with_given_weights_averages_from_them(home):
    """A new run's average begins at the weights that it is given, not at the average of its source."""
    source = home / "clean" / "checkpoints" / "step_00000009"
    before = kept(source)
    names = [key for key in before if "@" not in key]
    more = (*EMA, "--checkpoint.init_from", str(home / "clean"), "--checkpoint.keep_at", "1")
    assert run(home, "early", extra=more) == 0
    after = kept(home / "early" / "checkpoints" / "step_00000001")
    for key in names:
        want = DECAY * before[key].double() + (1 - DECAY) * after[key].double()
        torch.testing.assert_close(after[f"{key}@ema"].double(), want, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_a_branch_continues_the_average_of_its_source(home):
    """One that changes nothing has, in the end, what its source has."""
    assert run(home, "trunk", extra=(*EMA, "--checkpoint.keep_every", "3")) == 0
    assert run(home, "branch", extra=("--checkpoint.branch", f"{home / 'trunk'}@6"), args=()) == 0
    assert weights(home / "branch") == weights(home / "trunk") == weights(home / "clean")


# ---- scripts -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scripts_read_the_average(home, tmp_path, capsys):
    last = run_folder.validations(home / "clean")[-1]
    assert last["step"] == 9
    assert last["val/ema/loss"] != last["val_loss"]
    found = {}
    for which in state.WEIGHTS:
        assert evaluate.main([str(home / "clean"), "--weights", which, "--samples", "4", "--json"]) == 0
        found[which] = json.loads(capsys.readouterr().out)["val_loss"]
    # one batch of the run's validation: the same four sequences
    assert math.isclose(found["trained"], last["val_loss"], rel_tol=1e-6)
    assert math.isclose(found["ema"], last["val/ema/loss"], rel_tol=1e-6)

    checkpoint = kept(home / "clean" / "checkpoints" / "step_00000009")
    model = load_run(str(home / "clean"), CPU, weights="ema")
    held = dict(model.stage.named_parameters())
    assert any(torch.equal(value, checkpoint[f"{key}@ema"]) for key in checkpoint for value in held.values()
               if f"{key}@ema" in checkpoint and checkpoint[f"{key}@ema"].shape == value.shape)

    assert generate.main([str(home / "clean"), "--weights", "ema", "--max-new-tokens", "2"]) == 0
    out = tmp_path / "hf"
    assert convert.main(["to-hf", str(home / "clean"), str(out), "--weights", "ema"]) == 0
    exported = kept(out)
    assert torch.equal(exported["model.norm.weight"], checkpoint["norm.weight@ema"])
    assert not torch.equal(exported["model.norm.weight"], checkpoint["norm.weight"])


@pytest.mark.slow
def test_scripts_refuse_what_is_not_there(home):
    assert run(home, "plain") == 0
    with pytest.raises(ConfigError, match="--weights: .* holds no moving average"):
        generate.main([str(home / "plain"), "--weights", "ema"])
    with pytest.raises(ConfigError, match="--weights: .* holds no moving average"):
        convert.main(["to-hf", str(home / "plain"), str(home / "hf"), "--weights", "ema"])
