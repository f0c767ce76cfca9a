"""How many kernels a mixture of experts launches on a GPU, counted on tensors without values.

Down the paths of the Triton kernels: a launch of ours is one, and so is every operation of torch that is
neither a view nor an allocation. (Some of torch's are several kernels: a sort is one for a few bits of keys.)
"""

import importlib
import pkgutil
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from build import build_run
from config.reading import resolve
from kernels import triton_
from model.router import RouterInputs
from parallel.sharding import spec
from parallel.topology.mesh import Mesh

META = torch.device("meta")
NO_KERNELS = ("promote_types", "empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view")
SIZES = {
    "model.vocab": 512,
    "model.layers": 1,
    "model.hidden": 64,
    "model.mixer.heads": 4,
    "model.mixer.kv_heads": 2,
    "model.mlp.width": 32,
    "train.seq_len": 32,
    "train.micro_batch": 2,
    "train.global_batch": 2,
    "train.dtype": "bf16",
}


class CountedOperations(TorchDispatchMode):
    """Counts torch's operations that launch a kernel, by name."""

    def __init__(self, counts: Counter):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema = function._schema
        name = schema.name.removeprefix("aten::")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not is_view and name not in NO_KERNELS:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class CountedLaunch:
    """A kernel of ours on tensors without values: it is counted, and does nothing."""

    def __init__(self, name: str, counts: Counter):
        self.name, self.counts = name, counts

    def __getitem__(self, grid):
        def launch(*args, **meta):
            self.counts[self.name] += 1
        return launch


def count_launches(monkeypatch, *args: str) -> tuple[Counter, Counter]:
    """Count the launches of a mixture layer: (forward, backward)."""
    if not triton_.TRITON_AVAILABLE:
        pytest.skip("no Triton for this platform")
    counts: Counter = Counter()
    monkeypatch.setattr(triton_, "DEVICES", ("cuda", "meta"))
    names = [f"kernels.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]
    for module in map(importlib.import_module, names):
        for name in [n for n in vars(module) if n.endswith("_kernel") and n != "sdpa_kernel"]:
            monkeypatch.setattr(module, name, CountedLaunch(name, counts))
        for name, value in (("skewed", lambda *_: None), ("library_adds_in_fp32", lambda *_: True)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(spec, "draw_normal", lambda *_: None)  # initial weights are drawn on the host

    sizes = [part for key, value in SIZES.items() for part in (f"--{key}", str(value))]
    cfg = resolve("llama3-tiny", None, [*sizes, *args])
    with META:
        run = build_run(cfg, Mesh.single(), META, None, 10)
        for bucket in run.buckets:
            bucket.grads.start_step()
        mixture = run.stages[0].blocks[0].mlp
        x = torch.empty(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
        learn = RouterInputs(torch.empty(2, 32, dtype=torch.bool), torch.empty(()), None)
        dy = torch.empty_like(x)
        counts.clear()
        with CountedOperations(counts):
            y, _ = mixture(x, learn)
        forward = counts.copy()
        counts.clear()
        with CountedOperations(counts):
            y.backward(dy)
    return forward, counts


# settings: the most launches of a forward, and of a backward
CASES = {
    "--model.mlp experts --model.mlp.experts 8 --model.mlp.top_k 2 --model.mlp.router.aux.weight 0.01 "
    "--model.mlp.router.z_loss 0.001": (13, 15),
    "--model.mlp experts --model.mlp.experts 16 --model.mlp.top_k 4 --model.mlp.router.scores sigmoid "
    "--model.mlp.router.bias_rate 0.001 "
    "--model.mlp.router.groups 4 --model.mlp.router.group_top_k 2 "
    "--model.mlp.router.aux.weight 0.01": (13, 15),
}


@pytest.mark.parametrize("args, bounds", CASES.items())
def test_a_mixture_layer_launches_few_kernels(monkeypatch, args, bounds):
    counted = count_launches(monkeypatch, *args.split())
    for count, bound in zip(counted, bounds):
        assert count.total() <= bound, f"{count.total()} launches: {dict(count)}"
