"""train.cuda_graphs: the same losses and weights, bit for bit, as without. On a GPU through a real recording;
on a CPU through the held tensors alone, which is where a value of the step could be left behind.
"""

from dataclasses import replace

import pytest
import torch
from capture import recorded, watch_kernels
from steps import watched

from build import build_run
from config import ConfigError
from config.reading import resolve
from kernels import grouped_gemm, linear, triton_
from parallel.expert import dispatch
from parallel.microbatch import Microbatch
from parallel.pipeline.graphs import WARM_UP_STEPS, RecordedPipeline
from parallel.topology.mesh import Mesh
from runtime import setup
from train import train_step

ARGS = (
    "--model.vocab 100 --model.layers 1 --model.hidden 32 --model.mixer.heads 4 --model.mixer.kv_heads 2 "
    "--model.mlp.width 48 --train.seq_len 16 --train.micro_batch 2 --train.global_batch 4 --optim.warmup 4 "
    "--optim.lr 0.01"
).split()
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: a recording needs one")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]


def batches(step: int, docs: bool, device, number: int = 2) -> list[Microbatch]:
    stream = torch.Generator().manual_seed(step)
    ids = torch.randint(100, (4, 17), generator=stream)
    # another count of tokens each step
    targets = ids[:, 1:].masked_fill(torch.rand(4, 16, generator=stream) < 0.1 * step, -100)
    document = (torch.rand(4, 16, generator=stream) < 0.1).cumsum(1, dtype=torch.int32) if docs else None
    made = []
    for cut in (slice(0, 2), slice(2, 4))[:number]:
        documents, positions = None if document is None else document[cut], torch.arange(16).expand(2, -1)
        sequences = torch.arange(4)[cut]
        batch = Microbatch(ids[cut, :-1], targets[cut], positions, documents, sequences, step - 1)
        made.append(batch.to(device))
    return made


def trained(args: list[str], device: torch.device, graph: bool, numbers=(2,) * (WARM_UP_STEPS + 2)):
    """Losses and norms of some steps (one is skipped), and the weights after them. numbers: of
    microbatches, for each step.
    """
    cfg = resolve("llama3-tiny", None, [*ARGS, *args])
    run = build_run(cfg, Mesh.single(), device, None, 20)
    recording = RecordedPipeline(run.pipeline, device, run.buckets) if graph else None
    run = replace(run, recording=recording)
    told = []
    for step, number in enumerate(numbers, 1):

        def spoil():
            if step == WARM_UP_STEPS:
                run.buckets[0].grads.local[0] = float("nan")

        microbatches = batches(step, cfg.data.doc_mask, device, number)
        loss, norm, ok, _ = train_step(watched(run, spoil), step, microbatches)
        told += [loss.clone(), norm.clone(), ok.clone()]
    if recording is not None:
        assert recording.steps_run == numbers.count(numbers[-1]) and recording.replay is not None
    return told, [b.weights.master.clone() for b in run.buckets], run


def assert_same(plain, graph):
    """Every number that was told, and the weights, bit for bit."""
    for told, of_graph in zip(plain[0], graph[0]):
        assert torch.equal(told, of_graph) or (told.isnan() & of_graph.isnan()).all()
    assert all(map(torch.equal, plain[1], graph[1]))


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "args",
    [
        "", "--model.dropout 0.2", "--train.dtype bf16 --data.doc_mask true",
        "--parallel.recompute full --model.dropout 0.1", "--train.dtype fp16", "--optim.name muon",
        "--parallel.schedule zb-h1", "--model.mtp.modules 1", "--parallel.zero 1 --model.mup.base 16",
        "--train.dtype fp8 --model.layers 3",
    ],
)
def test_a_recorded_step_is_the_step(device, args):
    plain, graph = (trained(args.split(), torch.device(device), on) for on in (False, True))
    assert_same(plain, graph)
    assert len({float(loss) for loss in plain[0][::3]}) > WARM_UP_STEPS, "the steps are not all the same step"


def test_a_recording_quantizes_its_weights_itself(monkeypatch):
    """It repeats what ran when it was made. An evaluation before that step leaves its weights in 8 bits,
    which later steps must not find in the recording.
    """
    cfg = resolve("llama3-tiny", None, [*ARGS, "--train.dtype", "fp8", "--model.layers", "3"])
    device = torch.device("cpu")
    run = build_run(cfg, Mesh.single(), device, None, 20)
    run = replace(run, recording=RecordedPipeline(run.pipeline, device, run.buckets))
    params = [slot.param for bucket in run.buckets for slot in bucket.slots]
    for step in range(1, WARM_UP_STEPS + 2):
        with torch.no_grad():
            batch = batches(step, False, device)[0]
            run.stages[0](batch.tokens, batch, 1.0)
        assert any(param.quantized.pair is not None for param in params)

        kept = []
        run_pipeline = run.pipeline.run
        noting = lambda *args: kept.extend(p.quantized.pair for p in params) or run_pipeline(*args)
        with monkeypatch.context() as looking:
            looking.setattr(run.pipeline, "run", noting)
            train_step(run, step, batches(step, False, device))
        assert kept and all(pair is None for pair in kept)


@pytest.mark.parametrize("device", DEVICES)
def test_a_ramp_is_recorded_once_for_each_number_of_microbatches(device):
    args = ["--train.ramp", "2,2,64", "--model.dropout", "0.1"]
    numbers = (1,) * (WARM_UP_STEPS + 2) + (2,) * (WARM_UP_STEPS + 2)
    plain, graph = (trained(args, torch.device(device), on, numbers) for on in (False, True))
    assert_same(plain, graph)


MIXTURE = (
    "--train.dtype bf16 --model.mlp experts --model.mlp.experts 4 --model.mlp.top_k 2 "
    "--model.mlp.width 16 --model.mlp.router.aux.weight 0.1"
)


def record_on_cpu(monkeypatch) -> None:
    """A recording is one of operations and launches (capture.py), not of the pipeline."""
    recordings = watch_kernels(monkeypatch)

    def record(self):
        with recorded(recordings) as recording:
            self.loss = self.run_pipeline()
        # it has run once already, unlike a graph
        replays = iter([lambda: None])
        return lambda: next(replays, recording.replay)()

    monkeypatch.setattr(RecordedPipeline, "record", record)


@pytest.mark.parametrize("args", ["", "--train.dtype bf16 --parallel.recompute full"])
def test_a_step_learns_from_what_a_replay_has_written(monkeypatch, args):
    """The marks of written gradients are the host's, and a replay runs nothing there."""
    record_on_cpu(monkeypatch)
    numbers = (2,) * (WARM_UP_STEPS + 3)
    plain, graph = (trained(args.split(), torch.device("cpu"), on, numbers) for on in (False, True))
    assert_same(plain, graph)


@pytest.fixture
def mixtures_as_on_a_gpu(monkeypatch):
    """The kernels multiply, and the host is not told how many rows an expert has."""
    if torch.cuda.is_available() or not triton_.TRITON_AVAILABLE:
        pytest.skip("for a machine without a GPU, but with Triton, whose interpreter runs the kernels")
    monkeypatch.setattr(triton_, "DEVICES", ("cpu",))
    small = {"M": 16, "N": 16, "K": 16}
    for module, table in ((linear, "TILE"), (grouped_gemm, "TILE"), (grouped_gemm, "WGRAD")):
        monkeypatch.setattr(module, table, {**getattr(module, table), **small})
    monkeypatch.setattr(dispatch, "counts_stay_on_device", lambda choices: True)
    record_on_cpu(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("args", [
    "--model.mlp.router.scores sigmoid --model.mlp.router.bias_rate 0.001 --model.mlp.router.groups 2 "
    "--model.mlp.shared.experts 1 --model.mlp.router.z_loss 0.01",
    "--parallel.recompute full --model.mlp.router.aux.over global --model.mlp.router.jitter 0.1",
    "--model.mlp.capacity.factor 1.0 --model.mlp.capacity.pad true",
])
def test_a_mixture_is_recorded(mixtures_as_on_a_gpu, args):
    """Another division of the rows each step, from the same recording."""
    numbers = (1,) * (WARM_UP_STEPS + 3)
    args = [*MIXTURE.split(), "--train.global_batch", "2", *args.split()]
    plain, graph = (trained(args, torch.device("cpu"), on, numbers) for on in (False, True))
    assert_same(plain, graph)


@pytest.mark.slow
def test_counts_that_the_host_reads_are_seen(mixtures_as_on_a_gpu, monkeypatch):
    """Planted: how the rows are divided is what it was when the step was recorded."""
    monkeypatch.setattr(dispatch, "counts_stay_on_device", lambda choices: False)
    args, numbers = [*MIXTURE.split(), "--train.global_batch", "2"], (1,) * (WARM_UP_STEPS + 2)
    plain, graph = (trained(args, torch.device("cpu"), on, numbers) for on in (False, True))
    assert not all(torch.equal(a, b) for a, b in zip(plain[1], graph[1]))


@pytest.mark.parametrize("left", ["step", "tokens", "scale"])
def test_a_value_that_is_left_behind_is_seen(monkeypatch, left):
    """Planted: an input that a recording needs at each step is not copied."""

    def copy_inputs(self, new, scale):
        full(self, new, scale)
        if self.steps_run > WARM_UP_STEPS:
            if left == "scale":
                self.scale.fill_(2.0)
            else:
                for b in self.batches:
                    getattr(b, left).fill_(0)

    full = RecordedPipeline.copy_inputs
    plain = trained(["--model.dropout", "0.2"], torch.device("cpu"), False)
    monkeypatch.setattr(RecordedPipeline, "copy_inputs", copy_inputs)
    other = trained(["--model.dropout", "0.2"], torch.device("cpu"), True)
    assert not all(torch.equal(a, b) for a, b in zip(plain[1], other[1]))


def test_another_shape_is_an_error():
    *_, run = trained([], torch.device("cpu"), True)
    with pytest.raises(ValueError, match="train.cuda_graphs"):
        run.recording.run([], batches(1, True, "cpu"), run.scaler.scale)  # now with documents


def test_a_mixture_needs_hopper(monkeypatch):
    cfg = resolve("llama3-tiny", None, [*ARGS, *MIXTURE.split(), "--train.cuda_graphs", "true"])
    monkeypatch.setattr(setup, "pick_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(setup, "set_determinism", lambda *_: None)
    for chip in (8, 9):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, chip=chip: (chip, 0))
        if chip == 9:
            assert setup.read_environment(cfg).device.type == "cuda"
        else:
            with pytest.raises(ConfigError, match="train.cuda_graphs: with experts it needs Hopper"):
                setup.read_environment(cfg)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refused_without_a_gpu():
    for key in ("cuda_graphs", "unproven"):
        with pytest.raises(ConfigError, match=f"train.{key}: needs a GPU"):
            setup.read_environment(resolve("llama3-tiny", None, [f"--train.{key}", "true"]))
