"""No host sync in the step: what would make the host wait for a GPU is found without one.

The step runs on meta tensors, which have no values: a number that is read back cannot be, and every operation
passes a mode that knows the silent ones (copies between host and device, results whose shape depends on
values). Once with the torch references, once down the paths of the Triton kernels, whose launches do nothing
here.
"""

import importlib
import pkgutil
from unittest.mock import Mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from build import build_run
from config.reading import resolve
from kernels import grouped_gemm, triton_
from model.sharding import parallel_dims
from optim.clip import clip_factor
from parallel.context.zigzag import shard_batch
from parallel.extras import StepResult
from parallel.microbatch import Microbatch
from parallel.sharding import spec
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Activity, Group
from plan.record.wire import RecordingWire
from runtime.metrics import MetricsLogger
from runtime.setup import LaunchEnv
from train import train_step

META = torch.device("meta")
WAITS = (
    "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "bincount", "unique",
    "repeat_interleave.Tensor", "equal.default",
)
ARGS = (
    "--model.vocab 500 --model.layers 1 --model.hidden 32 --model.mixer.heads 4 --model.mlp.width 48 "
    "--train.seq_len 32 --train.micro_batch 2 --train.global_batch 4"
).split()


class NoLists(TorchFunctionMode):
    """Raises where a tensor is made of the host's numbers: on a GPU that is a copy, which the host waits
    for.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        copies = (torch.tensor, torch.as_tensor, torch.from_numpy)
        assert function not in copies, f"{function.__name__} waits for the device"
        return function(*args, **(kwargs or {}))


class NoWaiting(TorchDispatchMode):
    """Raises at an operation for which the host of a GPU waits."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = str(function), kwargs or {}
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
        masks = [i for i in indices if isinstance(i, torch.Tensor) and i.dtype == torch.bool]
        assert not any(f"aten.{w}" in name for w in WAITS), f"{name} waits for the device"
        assert not (masks and "aten.index" in name), f"{name} with a mask waits for the device"
        if "_to_copy" in name or "aten.copy_" in name:
            to = torch.device(kwargs.get("device") or tensors[0].device)
            devices = {t.device.type for t in tensors} | {to.type}
            assert devices == {"meta"}, f"{name} copies between host and device"
        return function(*args, **kwargs)


class Launch:
    """A kernel on tensors without values: launched on any grid, it does nothing."""

    def __getitem__(self, grid):
        assert all(isinstance(n, int) and n > 0 for n in grid)
        return lambda *args, **how: None


def step_once(monkeypatch, *args: str, mesh: Mesh | None = None) -> None:
    grouped = () if "latent" in args else ("--model.mixer.kv_heads", "2")
    cfg = resolve("llama3-tiny", None, [*ARGS, *grouped, *args])
    monkeypatch.setattr(spec, "draw_normal", lambda *_: None)  # initial weights are drawn on the host
    with META:
        run = build_run(cfg, mesh or Mesh.single(), META, None, 10)
        docs = torch.zeros(2, 32, dtype=torch.int32) if cfg.data.doc_mask else None
        ids = torch.zeros(2, 32, dtype=torch.int64)
        batch = Microbatch(ids, ids, ids, docs, torch.arange(2), 1)
    with NoLists(), NoWaiting():
        train_step(run, 1, [batch, batch])


# ---- one of several ranks ----------------------------------------------------------------------------------


LAYOUTS = [
    "--parallel.tp 2", "--parallel.tp 2 --parallel.sp true",
    "--parallel.tp 2 --parallel.sp true --parallel.async_tp true", "--parallel.cp 2",
    "--parallel.cp 2 --parallel.cp_kind ulysses",
    "--parallel.cp 2 --data.doc_mask true --model.mixer.window 8",
    "--parallel.pp 2", "--parallel.pp 2 --parallel.schedule zb-v", "--parallel.zero 1",
    "--parallel.zero 2 --optim.name muon", "--parallel.zero 3 --parallel.recompute full",
    "--parallel.zero 1 --parallel.dp_rep 2", "--parallel.compress int8", "--parallel.compress powersgd",
    "--parallel.reduce ring", "--model.tied true --parallel.pp 2",
    "--log.inside_every 1 --parallel.cp 2 --parallel.zero 3", "--log.inside_every 1 --parallel.tp 2",
    "--optim.qk_clip 1 --parallel.cp 2 --parallel.zero 1",
]


@pytest.mark.slow(every=8)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("args", LAYOUTS)
def test_nothing_in_a_step_of_a_layout_waits_for_the_device(monkeypatch, args, rank):
    launch_nothing(monkeypatch)
    world = 4 if "dp_rep" in args else 2
    words = ["--train.dtype", "bf16", "--model.layers", "4", *args.split()]
    dims = parallel_dims(resolve("llama3-tiny", None, [*ARGS, *words]), world)
    sequences = 4 * dims.dp_shard * dims.dp_replicate  # two microbatches on each rank
    words += ["--train.global_batch", str(sequences)]
    mesh = Mesh.without_processes(dims, rank, Activity(wire=RecordingWire()))
    step_once(monkeypatch, *words, mesh=mesh)


def test_logging_a_step_does_not_wait(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "Event", Mock())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    cfg = resolve("llama3-tiny", None, ["--train.steps", "9", "--log.every", "5"])
    env = LaunchEnv(device=torch.device("cuda", 0))
    log = MetricsLogger(tmp_path, cfg, env, steps=9, flops_per_token=1.0, start_step=1)
    loss, is_good = torch.zeros((), device=META), torch.zeros((), device=META, dtype=torch.bool)
    for step in (3, 4):
        result = StepResult(loss, loss, is_good, loss)
        with NoLists(), NoWaiting():
            flags = log.log_step(step, result, learning_rate=0.1, data_seconds=0.0, seconds=1.0)
        assert flags == []


def launch_nothing(monkeypatch) -> None:
    """The paths of the Triton kernels, whose launches do nothing."""
    if not triton_.TRITON_AVAILABLE:
        pytest.skip("no Triton for this platform")
    monkeypatch.setattr(triton_, "DEVICES", ("cuda", "meta"))
    for found in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"kernels.{found.name}")
        for name in [n for n in vars(module) if n.endswith("_kernel") and n != "sdpa_kernel"]:
            monkeypatch.setattr(module, name, Launch())


CASES = [
    "--optim.name adamw", "--model.dropout 0.1", "--model.dropout 0.1 --parallel.recompute full",
    "--data.doc_mask true", "--model.mixer.window 8",
    "--model.mixer.qk_norm head --parallel.recompute selective --parallel.recompute_parts core,norm,act",
    "--parallel.schedule zb-h1", "--train.dtype fp16", "--optim.name muon", "--optim.name lamb",
    "--optim.name normuon --optim.orthogonalize polar-express", "--optim.name dion",
    "--optim.qk_clip 1", "--optim.states 8bit",
    "--optim.name lars", "--optim.name lion", "--optim.name sgd", "--model.mtp.modules 1",
    "--model.positions learned --model.mixer.rope none --model.mixer.bias all --model.norm.kind layernorm "
    "--model.mlp.activation gelu --model.mlp.bias true --model.tied true",
    "--model.mixer.kind latent --model.mixer.kv_rank 16 --model.mixer.rope.scaling.kind yarn "
    "--model.mixer.rope.scaling.factor 4",
    "--parallel.zero 3",
    "--optim.clip none",
    "--log.noise_scale true --model.mup.base 16",
    "--log.inside_every 1 --data.doc_mask true --parallel.recompute full",
]


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("kernel", ["reference", "triton"])
@pytest.mark.parametrize("args", CASES)
def test_nothing_in_a_dense_step_waits_for_the_device(monkeypatch, args, kernel):
    if kernel == "triton":
        launch_nothing(monkeypatch)
    step_once(monkeypatch, *args.split(), *([] if "dtype" in args else ["--train.dtype", "bf16"]))


def test_cutting_a_sequence_does_not_wait():
    with META:
        batch = Microbatch(*(torch.zeros(2, 32, dtype=torch.int64) for _ in range(3)))
    with NoLists(), NoWaiting():
        assert shard_batch(batch, Group("cp", (0, 1), 1)).tokens.shape == (2, 16)


EXPERTS = ("--model.mlp", "experts", "--model.mlp.experts", "4", "--model.mlp.width", "32")
MIXTURE = (*EXPERTS, "--train.dtype", "bf16")


@pytest.mark.parametrize("args", [
    "",
    "--model.mlp.router.scores sigmoid --model.mlp.shared.experts 1",
    "--model.mlp.router.groups 2 --model.mlp.router.group_top_k 1",
    "--parallel.recompute full",
    "--model.mlp.capacity.factor 1.0 --model.mlp.capacity.pad true",
    "--model.mlp.bias true --model.mlp.router.logit_bias true",
    "--log.inside_every 1 --model.mlp.shared.experts 1",
    "--model.mlp.bias true --model.mlp.router.weighs input --model.mlp.capacity.factor 1.0 "
    "--model.mlp.capacity.pad true",
])
def test_a_mixture_on_one_rank_does_not_wait(monkeypatch, args):
    """Its grouped products read on the device how many rows each expert has."""
    launch_nothing(monkeypatch)
    monkeypatch.setattr(grouped_gemm, "skewed", lambda *_: None)  # it asks for the chip
    step_once(monkeypatch, *MIXTURE, *args.split())


@pytest.mark.parametrize("args", ["--model.mlp.capacity.factor 1.0", "reference"])
def test_a_mixture_that_drops_or_has_no_kernels_reads_its_counts(monkeypatch, args):
    """Known, and why config/reading/rules.py refuses train.cuda_graphs there."""
    if args == "reference":
        args = ""
    else:
        launch_nothing(monkeypatch)
        monkeypatch.setattr(grouped_gemm, "skewed", lambda *_: None)
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError), match="waits|meta"):
        step_once(monkeypatch, *MIXTURE, *args.split())


@pytest.mark.parametrize("planted", ["item", "truth", "cpu", "to", "mask", "tensor"])
def test_each_wait_for_the_device_is_seen(planted):
    x, host = torch.zeros(4, device=META), torch.zeros(4)
    sins = {
        "item": lambda: x.sum().item(),
        "truth": lambda: bool(x.sum() > 0),
        "cpu": lambda: x.cpu(),
        "to": lambda: host.to(META),
        "mask": lambda: x[x > 0],
        "tensor": lambda: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=META),
    }
    with NoLists(), NoWaiting(), pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
        sins[planted]()


def test_clipping_stays_on_the_device():
    with NoLists(), NoWaiting():
        assert clip_factor(torch.zeros((), device=META), 1.0).device == META
