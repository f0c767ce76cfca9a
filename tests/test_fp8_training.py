"""Training in fp8: as bf16 trains, within a margin; with gradients near fp32's; and the same bits when it is
resumed.
"""

from dataclasses import replace

import pytest
import run_folder
import torch
from random_tokens import RandomTokens
from ranks import MODEL, corpus, job

import config
from build import build_run
from config.reading import resolve
from kernels import triton_
from kernels.fp8_linear import RECIPES, Fp8Scaling, scaled_linear
from kernels.nvfp4_linear import Nvfp4Scaling
from kernels.unproven import fp8_norm, fp8_rope, fp8_swiglu
from kernels.unproven.fp8_origin import deferred_tensor
from parallel.topology.dims import ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from train import train_step

STEPS = 30
DENSE = (*RECIPES, "nvfp4")  # the recipes of a model without experts
# of the loss, relative, over the last ten steps
MARGIN = {"tensorwise": 0.02, "rowwise": 0.02, "blockwise": 0.02, "mxfp8": 0.02, "nvfp4": 0.04}
# of y, dx, dW against fp32
GRADIENTS = {
    "tensorwise": (0.06, 0.12, 0.12), "rowwise": (0.05, 0.10, 0.10), "blockwise": (0.05, 0.06, 0.06),
    "mxfp8": (0.05, 0.06, 0.06), "nvfp4": (0.2, 0.3, 0.3),
}
SMALL = (
    "--model.layers 4 --model.hidden 64 --model.mixer.heads 4 --model.mixer.kv_heads 2 --model.mlp.width 128 "
    "--model.vocab 64 --model.vocab_multiple 64 --train.seq_len 32 --train.micro_batch 4 "
    f"--train.global_batch 8 --train.steps {STEPS} --optim.warmup 4 --optim.lr 0.004 --train.fp8_block 32"
).split()


class Counting(RandomTokens):
    """Sequences that count on from a random token: something to learn."""

    def microbatches(self, step):
        made = super().microbatches(step)
        return [
            replace(b, tokens=ids, targets=(ids * 5 + 3) % 64)
            for b in made
            for ids in [(b.tokens[:, :1] * 5 ** torch.arange(b.tokens.shape[1])[None] % 64)]
        ]


def in_fp8(recipe: str) -> list[str]:
    words = ["--train.dtype", "fp8", "--train.fp8", recipe]
    return [*words, "--train.fp8_block", "16"] if recipe == "nvfp4" else words


def make_job(*keys) -> config.Config:
    return resolve("llama3-tiny", None, [*SMALL, *keys])


def losses(world: World, cfg: config.Config) -> list[float]:
    mesh = Mesh.bind(ParallelDims(world.size, tp=cfg.parallel.tp), world)
    run = build_run(cfg, mesh, torch.device("cpu"), None, STEPS)
    data = Counting(cfg, mesh.dp.index, mesh.dp.size)
    return [float(train_step(run, step, data.microbatches(step - 1))[0]) for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def bf16():
    return losses(World(), make_job("--train.dtype", "bf16"))


def follow(eight: list[float], bf16: list[float], recipe: str) -> None:
    assert eight != bf16 and bf16[-1] < 0.8 * bf16[0]
    a, b = sum(eight[-10:]), sum(bf16[-10:])
    assert abs(a - b) <= MARGIN[recipe] * b, (a / b, eight[-1], bf16[-1])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", DENSE)
def test_the_loss_follows_bf16(bf16, recipe):
    follow(losses(World(), make_job(*in_fp8(recipe))), bf16, recipe)


@pytest.mark.slow
def test_blocks_that_run_again_round_alike():
    """NVFP4: the gradients' random bits are those of the element, however often and in which micro-batches
    its forward runs.
    """
    kept = losses(World(), make_job(*in_fp8("nvfp4")))
    for mode in ("full", "selective"):
        assert losses(World(), make_job(*in_fp8("nvfp4"), "--parallel.recompute", mode)) == kept


MIXTURE = (
    "--model.mlp experts --model.mlp.experts 4 --model.mlp.top_k 2 --model.mlp.width 64 "
    "--model.mlp.shared.experts 1 --model.mlp.router.aux.weight 0.01"
).split()


@pytest.fixture(scope="module")
def mixture():
    return losses(World(), make_job("--train.dtype", "bf16", *MIXTURE))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_of_a_mixture_follows_bf16(mixture, recipe):
    follow(losses(World(), make_job("--train.dtype", "fp8", "--train.fp8", recipe, *MIXTURE)), mixture,
           recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", DENSE)
def test_weights_that_travel_in_eight_bits(ranks, bf16, recipe):
    """ZeRO-3 gathers its weights in e4m3 (parallel/wire/compress.py); the linears quantize what arrived.
    Every rank has the same loss.
    """
    cfg = make_job(*in_fp8(recipe), *"--parallel.zero 3 --parallel.compress_weights fp8".split())
    one, other = ranks(2).run(losses, cfg)
    assert one == other
    uncompressed = replace(cfg, parallel=replace(cfg.parallel, compress_weights="none"))
    assert one != ranks(2).run(losses, uncompressed)[0]
    follow(one, bf16, recipe)


def test_the_first_and_last_layers_stay():
    cfg = make_job("--train.dtype", "fp8")
    stage = build_run(cfg, Mesh.single(), torch.device("cpu"), None, STEPS).stages[0]
    kept = [
        [m.scaling is None for m in (b.mixer.qkv, b.mixer.out, b.mlp.gate_up, b.mlp.down)]
        for b in stage.blocks
    ]
    assert kept == [[True] * 4, [False] * 4, [False] * 4, [True] * 4]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", DENSE)
def test_a_resumed_run_is_bitwise(tmp_path, recipe):
    """Two ranks, saved after 3 of 6 steps, killed in the fifth and started again."""
    words = (
        "--model.layers 3 --model.hidden 64 --model.mlp.width 64 --model.mixer.kv_heads 4 "
        "--parallel.tp 2 --train.seq_len 32 --train.steps 6 --checkpoint.every 3 --train.fp8_block 32"
    )
    place = ("--data.path", corpus(tmp_path), "--log.dir", str(tmp_path))
    args = ["llama3-tiny", *MODEL, *words.split(), *in_fp8(recipe), *place]
    whole = job(tmp_path / "w", 2, [*args, "--log.name", "whole"])
    assert whole.codes == [0, 0], whole.logs
    fault = "step.begin:rank=0:step=5:act=SIGKILL"
    assert job(tmp_path / "k", 2, [*args, "--log.name", "killed"], fault).codes != [0, 0]
    again = job(tmp_path / "r", 2, [*args, "--log.name", "killed"])
    assert again.codes == [0, 0], again.logs
    found = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in run_folder.steps(tmp_path / name)]
        for name in ("whole", "killed")
    ]
    assert found[0] == found[1] and len(found[0]) == 6


@pytest.mark.parametrize("recipe", DENSE)
def test_gradients_are_near_those_of_fp32(recipe):
    g = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(*s, generator=g) for s in ((2, 96, 64), (128, 64), (2, 96, 128)))
    # features and tokens of very different size
    x, dy = x * torch.logspace(-1, 1, 64), dy * torch.logspace(-3, 0, 192).view(2, 96, 1)
    exact = [t.clone().requires_grad_() for t in (x, w)]
    y = exact[0] @ exact[1].t()
    want = [y.detach(), *torch.autograd.grad(y, exact, dy)]
    low = [t.bfloat16().requires_grad_() for t in (x, w)]
    scaling = Fp8Scaling(recipe, 32)
    if recipe == "nvfp4":
        bits = torch.randint(-(2**63), 2**63 - 1, (192, 128), generator=g)
        scaling = Nvfp4Scaling(recipe, 16, start_pass=lambda: lambda: bits)
    y = scaled_linear(*low, None, None, scaling)
    got = [y.detach(), *torch.autograd.grad(y, low, dy.bfloat16())]
    off = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, want)]
    assert all(0.005 < a <= b for a, b in zip(off, GRADIENTS[recipe])), off


# ---- results that are left to the casts of their readers (kernels/unproven/fp8_origin.py) ------------------

TWO_MICROBATCHES = ["--train.micro_batch", "1", "--train.global_batch", "2"]
TWO_BLOCKS = [*SMALL, *TWO_MICROBATCHES, "--model.layers", "2", "--train.fp8_keep", "0"]
RECOMPUTED = ("--parallel.recompute", "selective", "--parallel.recompute_parts", "norm,act")
FORMULAS_OF_A_BLOCK = {  # of one pass forward and back
    "dense": {"norm": 2, "swiglu": 1, "swiglu_backward": 1, "rope_backward": 1},
    # its router reads the second norm's result
    "mixture": {"norm": 1, "swiglu": 1, "swiglu_backward": 1, "rope_backward": 1},
}


def step_of_kernels(world: World, cfg: config.Config) -> tuple[list, dict[str, int]]:
    """One step with every kernel in Triton's interpreter -> the loss, the norm and all weights after it; and
    how many results were left unwritten."""
    counts: dict[str, int] = {}

    def counted(origin, shape, like):
        counts[origin.formula] = counts.get(origin.formula, 0) + 1
        return deferred_tensor(origin, shape, like)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_, "DEVICES", ("cpu",))
        for module in (fp8_norm, fp8_rope, fp8_swiglu):
            patch.setattr(module, "deferred_tensor", counted)
        mesh = Mesh.bind(ParallelDims(world.size, tp=cfg.parallel.tp), world)
        run = build_run(cfg, mesh, torch.device("cpu"), None, STEPS)
        data = Counting(cfg, mesh.dp.index, mesh.dp.size)
        results = train_step(run, 1, data.microbatches(0))
    weights = [p.detach().float().clone() for stage in run.stages.values() for p in stage.parameters()]
    return [float(results[0]), *weights], counts


@pytest.mark.slow
@pytest.mark.skipif(not triton_.TRITON_AVAILABLE, reason="no Triton for this platform")
@pytest.mark.parametrize("kind", FORMULAS_OF_A_BLOCK)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("more", [(), RECOMPUTED], ids=["kept", "recomputed"])
def test_unwritten_results_train_with_the_same_bits(kind, recipe, more):
    keys = [*TWO_BLOCKS, *(MIXTURE if kind == "mixture" else ()), *more]
    cfg = resolve("llama3-tiny", None, [*keys, "--train.dtype", "fp8", "--train.fp8", recipe])
    unproven = replace(cfg, train=replace(cfg.train, unproven=True))
    got, counts = step_of_kernels(World(), unproven)
    want, none = step_of_kernels(World(), cfg)
    microbatches = cfg.train.global_batch // cfg.train.micro_batch
    for formula, count in FORMULAS_OF_A_BLOCK[kind].items():
        if formula == "rope_backward" and recipe in ("blockwise", "mxfp8"):
            continue  # kernels/unproven/fp8_rope.py
        is_repeated = bool(more) and not formula.endswith("_backward")
        assert counts[formula] == count * cfg.model.layers * microbatches * (2 if is_repeated else 1)
    assert none == {} and got[0] == want[0] and got[0] == got[0]
    assert all(torch.equal(one, other) for one, other in zip(got[1:], want[1:]))
