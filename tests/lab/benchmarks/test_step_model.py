"""The modelled step: it records what runs, and counts what formulas, modules and the interpreter count.

No time is tested: the rates are assumptions.
"""

import importlib
import json
import math
import pkgutil
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

import torch
from triton.runtime import interpreter
from triton.runtime.jit import KernelInterface

import kernels
from config import Config, ConfigError
from kernels import (
    adam,
    attention,
    cross_entropy,
    embedding,
    grouped_gemm,
    linear,
    norm,
    permute,
    rope,
    swiglu,
    triton_,
)
from kernels.unproven import head_norm
from lab.benchmarks import command, step_model
from lab.benchmarks.shape import Shape
from lab.benchmarks.step_model import SCENARIOS, build_config, document_lengths, record, record_step
from model.flops import flops_of_parts, keys_seen
from model.mla import LatentConfig
from plan.count import parameters
from plan.record.kernel_source import plain_function
from plan.record.launches import CHIPS, Chip, Recorder, simulated_cpu, simulated_gpu, without_initial_weights
from plan.record.rates import ASSUMED_RATES, BANDWIDTH
from plan.record.role import RoleRecord
from plan.record.work import KERNELS, PARTS, Facts, judge
from runtime.failure import fail_cleanly

H200 = CHIPS["h200"]
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU"
)


def tiny(name: str) -> Config:
    scenario = SCENARIOS[name]
    return build_config(scenario, Shape.gpu_models(True)[scenario.shape])


def tiny_documents(name: str) -> tuple[int, ...]:
    scenario = SCENARIOS[name]
    return document_lengths(scenario, Shape.gpu_models(True)[scenario.shape])


# ---- the tables know every kernel --------------------------------------------------------------------------


def kernels_of_ours() -> set[str]:
    """module.name of every kernel: of the functions under triton.jit, those that are named *_kernel."""
    names = set()
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            is_own = isinstance(value, KernelInterface) and name.endswith("_kernel")
            if is_own and plain_function(value).__module__ == module.name:
                names.add(f"{module.name.removeprefix('kernels.')}.{name}")
    return names


def test_every_kernel_has_a_row():
    ours = kernels_of_ours()
    assert len(ours) > 15
    new, gone = ours - set(KERNELS), set(KERNELS) - ours
    assert not new, f"give each a row in KERNELS (plan/record/work.py), and RATES if its rate is new: {new}"
    assert not gone, f"KERNELS in plan/record/work.py has rows of kernels that are gone: {gone}"


def test_products_into_fp32_need_no_meta_function(monkeypatch):
    """That of torch 2.11 raises TypeError for addmm with an output dtype."""
    call = torch._ops.OpOverload.__call__

    def as_in_2_11(self, *args, **kwargs):
        if self is torch.ops.aten.addmm.dtype_out:
            raise TypeError("_fn() got an unexpected keyword argument 'out_dtype'")
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", as_in_2_11)
    with pytest.raises(TypeError):
        as_in_2_11(torch.ops.aten.addmm.dtype_out)
    launches = record(tiny("dense"), H200).launches
    judged = [judge(launch, Facts(1.0)) for launch in launches]
    weights = {one.launch.kernel for one in judged if one.part == "weight gradients"}
    assert weights == {"aten.mm"}, "the trial of addmm failed: our own kernel runs"


@pytest.mark.slow(every=17)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_launch_has_a_part_and_the_host_never_waits(name):
    step = step_model.model_step(name, H200, tiny=True)
    assert step_model.unknown_lines([step]) == []
    assert step.host_reads == ()
    assert {group.part for group in step.groups} <= set(PARTS)
    assert step.launches > 100 and step.ms[0] > step.ms[1] > step.ms[2] > 0


def test_a_kernel_without_a_row_is_shown(monkeypatch):
    monkeypatch.delitem(KERNELS, "swiglu.swiglu_kernel")
    step = step_model.model_step("dense", H200, tiny=True)
    (line,) = step_model.unknown_lines([step])
    assert "swiglu.swiglu_kernel" in line and "plan/record/work.py" in line
    layers = Shape.gpu_models(True)["dense"].layers
    assert step.of_part("unknown")[0].launches == layers, "it still counts"


# ---- the paths are those of the GPU ------------------------------------------------------------------------


def test_the_step_takes_the_paths_of_an_h200():
    counts = Counter(launch.kernel for launch in record(tiny("dense"), H200).launches)
    layers = Shape.gpu_models(True)["dense"].layers
    assert counts["aten._scaled_dot_product_cudnn_attention"] == layers
    assert counts["aten.mm"] == 3 * (4 * layers + 1)  # weight gradients through the library, the head's too
    assert not counts["aten.addmm"] and not counts["linear.wgrad_kernel"]  # the first microbatch writes
    assert counts["swiglu.swiglu_kernel"] == counts["swiglu.swiglu_backward_kernel"] == layers
    assert counts["norm.forward_kernel"] == counts["norm.backward_kernel"] == 2 * layers + 1
    assert not any("attention_for_cpu" in kernel or "safe_softmax" in kernel for kernel in counts)


@pytest.mark.parametrize("name", ["dense+tensorwise", "dense+rowwise"])
def test_only_the_forwards_products_have_fast_sums(name):
    rates: Counter[tuple[str, str | None]] = Counter()
    for launch in record(tiny(name), H200).launches:
        if launch.kernel == "aten._scaled_mm":
            done = judge(launch, Facts(1.0))
            rates[f"{launch.phase}, {done.part}", done.rate] += 1
    count = rates["forward, products", "library fp8"]
    assert count > 0
    exact = ("backward, products", "backward, weight gradients")
    assert rates == {("forward, products", "library fp8"): count} | dict.fromkeys(
        ((part, "library fp8, exact sums") for part in exact), count
    )


ATTENTION = {
    "dense": "aten._scaled_dot_product_cudnn_attention",
    "dense+mla": "aten._scaled_dot_product_cudnn_attention",
    "packed": "torch_attn._varlen_attn",
    "packed-uneven": "torch_attn._varlen_attn",
    "packed+cudnn": "aten._cudnn_attention",
    "packed-uneven+cudnn": "aten._cudnn_attention",
    "dense+documents": "torch_attn._varlen_attn",
}


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_full_size_takes_its_library(name):
    """As without flash-attn. Tiny documents are too short for a library."""
    pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no attention of variable length")
    scenario = SCENARIOS[name]
    shape = replace(Shape.gpu_models(False)[scenario.shape], layers=2)
    recorder = record(build_config(scenario, shape), H200, document_lengths(scenario, shape), scenario.cudnn)
    counts = Counter(launch.kernel.removesuffix("_forward") for launch in recorder.launches)
    kernel = ATTENTION[name]
    attention_launches = {name: n for name, n in counts.items() if "attn" in name or "attention" in name}
    assert attention_launches == {kernel: 2, f"{kernel}_backward": 2}
    assert not recorder.host_reads


def test_flash_attn_of_this_machine_is_not_asked(monkeypatch):
    """The page says what runs without it, on every machine that writes the page."""
    pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no attention of variable length")
    installed = ModuleType("flash_attn_interface")
    installed.flash_attn_varlen_func = lambda *_, **__: pytest.fail("flash-attn was called")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", installed)
    shape = replace(Shape.gpu_models(False)["packed"], layers=1)
    recorder = record(build_config(SCENARIOS["packed"], shape), H200, shape.documents)
    assert any(launch.kernel == "torch_attn._varlen_attn" for launch in recorder.launches)


def test_the_library_of_the_model_is_taken_back():
    """Meta functions that the model registers for cuDNN do not stay in this process."""
    operation = "aten::_cudnn_attention_forward"
    was_known = torch._C._dispatch_has_kernel_for_dispatch_key(operation, "Meta")
    record(tiny("packed+cudnn"), H200, tiny_documents("packed+cudnn"), cudnn=True)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(operation, "Meta") == was_known
    assert torch.backends.cudnn.version.__module__ == "torch.backends.cudnn"


def test_tiny_documents_take_the_kernels_of_triton():
    name = "dense+documents"
    counts = Counter(launch.kernel for launch in record(tiny(name), H200, tiny_documents(name)).launches)
    assert counts["attention_triton.forward_kernel"] == Shape.gpu_models(True)["dense"].layers
    assert not counts["torch_attn._varlen_attn"]


def test_exact_results_refuse_cudnn():
    torch.set_deterministic_debug_mode("error")
    try:
        counts = Counter(launch.kernel for launch in record(tiny("dense"), H200).launches)
    finally:
        torch.set_deterministic_debug_mode("default")
    assert counts["aten._scaled_dot_product_flash_attention"]
    assert not counts["aten._scaled_dot_product_cudnn_attention"]


@pytest.mark.parametrize("name", ["8b", "moe"])
def test_states_in_bf16_move_16_bytes_a_parameter_in_place_of_30(name):
    """By hand: three states read and written, in 2 bytes or in 4; the gradient in 4; the weights, which are
    their own masters in bf16, or once more."""
    total = parameters(tiny(name).model)["total"]
    for scenario, of_parameter in ((name, 3 * 8 + 4 + 2), (f"{name}+states", 3 * 4 + 4)):
        moved = 0.0
        for launch in record(tiny(scenario), H200).launches:
            if launch.kernel == "adam.adamw_kernel":
                moved += judge(launch, Facts(1.0)).nbytes
        assert moved == pytest.approx(of_parameter * total, rel=0.01)


def test_a_value_that_the_host_asks_for_is_seen():
    recorder = Recorder()
    with simulated_gpu(H200, recorder) as device, recorder.recording():
        x = torch.ones(3, device=device)
        assert x.is_cuda and x.device == device and torch.cuda.get_device_capability() == (9, 0)
        assert bool(x.sum() > 0)
    assert len(recorder.host_reads) == 1 and x.device.type == "meta"


# ---- recorded on meta = recorded in a real run -------------------------------------------------------------


def signature(step: RoleRecord) -> list[tuple]:
    """Every launch in its order, views left out: a meta tensor has some others."""
    return [
        (launch.kernel, launch.phase, launch.file, launch.function, launch.read, launch.written)
        for launch in step.launches
        if launch.launches
    ]


def real_run(cfg: Config, documents: tuple[int, ...]) -> list[tuple]:
    """Records a step that computes."""
    recorder = Recorder(executes=True)
    device = torch.device("cpu")
    return signature(record_step(cfg, recorder, device, documents))


def first_difference(real: list[tuple], on_meta: list[tuple]) -> str:
    for index, (a, b) in enumerate(zip(real, on_meta)):
        if a != b:
            return f"launch {index}: {a} for real, {b} on meta"
    return f"{len(real)} launches for real, {len(on_meta)} on meta"


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", ["dense", "dense+documents", "dense+qk_norm", "dense+mla"])
def test_the_cpu_path_is_the_same_on_meta(name):
    """The torch references: the same operations, run for real and on tensors without storage.

    A mixture is missing: on a CPU it reads how many rows each expert has, and meta tensors have no values.
    """
    cfg = replace(tiny(name), train=replace(tiny(name).train, device="cpu"))
    documents = tiny_documents(name)
    real = real_run(cfg, documents)

    recorder = Recorder()
    with simulated_cpu(recorder) as device, without_initial_weights():
        on_meta = signature(record_step(cfg, recorder, device, documents))
    assert len(real) > 200
    assert real == on_meta, first_difference(real, on_meta)


def without_bytes_of_counts(launches: list[tuple]) -> list[tuple]:
    """Leave out the bytes that row_tiles_kernel reads: the rows of each expert."""
    return [(*one[:4], 0, one[5]) if "row_tiles_kernel" in one[0] else one for one in launches]


@INTERPRETED
@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe", "dense+documents"])
def test_the_kernels_path_is_the_same_on_meta(name, monkeypatch):
    """Triton's kernels: launched through the interpreter in a step that computes, and only recorded on meta.

    The library's products into fp32 and its attention are for CUDA alone, so both runs are without them.
    """
    cfg = replace(tiny(name), model=replace(tiny(name).model, layers=1))
    monkeypatch.setattr(attention, "choose_kind", lambda *_: "triton")
    monkeypatch.setattr(linear, "library_adds_in_fp32", lambda *_: False)
    monkeypatch.setattr(grouped_gemm, "library_multiplies", lambda *_: False)
    monkeypatch.setattr(triton_, "DEVICES", ("cpu", "cuda"))
    documents = tiny_documents(name)
    on_meta = signature(record(cfg, replace(H200, processors=3), documents))
    real = real_run(replace(cfg, train=replace(cfg.train, device="cpu")), documents)
    if name == "moe":  # on a CPU the rows of each expert are numbers of the host: int32, not int64
        real, on_meta = (without_bytes_of_counts(launches) for launches in (real, on_meta))
    assert real == on_meta, first_difference(real, on_meta)
    assert sum("_kernel" in one[0] for one in real) > 15


# ---- FLOPs: those that the modules say they cost -----------------------------------------------------------


@pytest.mark.slow(every=7)
@pytest.mark.parametrize(
    "name, size",
    [
        *((name, "tiny") for name in SCENARIOS),
        *((name, "full") for name in ("dense", "moe", "dense+mla", "packed-uneven+cudnn")),
    ],
)
def test_the_flops_are_those_of_the_modules(name, size):
    """Products: of the forward, twice again in the backward. Attention: two products, then five, or seven.

    The router's backward computes more than the model asks for: it has the gradient of the logits in two
    halves of 16 bits, so both of its products there are twice as large.
    """
    scenario = SCENARIOS[name]
    shape = Shape.gpu_models(size == "tiny")[scenario.shape]
    shape = replace(shape, layers=3)
    cfg = build_config(scenario, shape)
    model = replace(cfg.model, vocab_multiple=1)
    documents = document_lengths(scenario, shape) or (shape.seq,)
    keys = keys_seen(documents, None)
    facts = Facts(keys)
    whole = shape.tokens * sum(flops_of_parts(model, documents, shape.seq))
    of_one_key = shape.tokens * sum(flops_of_parts(model, (1,), shape.seq))
    attention = (whole - of_one_key) / (keys - 1) * keys
    products = whole - attention

    found: Counter[str] = Counter()
    for launch in record(cfg, H200, document_lengths(scenario, shape), scenario.cudnn).launches:
        done = judge(launch, facts)
        found[done.part] += done.flops
    of_router = 2.0 * shape.tokens * shape.hidden * (shape.experts or 0) * shape.layers
    of_others = products - of_router
    assert found["products"] == pytest.approx(2 * of_others, rel=1e-9)
    assert found["weight gradients"] == pytest.approx(of_others, rel=1e-9)
    assert found["router"] == pytest.approx((1 + 2 * 2) * of_router, rel=1e-9)
    assert found["attention forward"] == pytest.approx(attention, rel=1e-9)
    ratio = found["attention backward"] / attention
    latent = isinstance(model.mixer, LatentConfig)
    assert latent or ratio in (pytest.approx(2.5), pytest.approx(3.5))
    assert not latent or 2.5 < ratio < 4


# ---- bytes: as the interpreter counts them -----------------------------------------------------------------


def touched_bytes(monkeypatch, call) -> tuple[int, int]:
    """(read, written) of a launch on real tensors: each address once, as the interpreter meets them."""
    loads: dict[int, int] = {}
    stores: dict[int, int] = {}
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def note(found, pointers, mask):
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        for address in pointers.data[mask.data.astype(bool)].ravel().tolist():
            found[address] = size

    def noting_load(self, pointers, mask, *rest, **words):
        note(loads, pointers, mask)
        return load(self, pointers, mask, *rest, **words)

    def noting_store(self, pointers, value, mask, *rest):
        note(stores, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(builder, "create_masked_load", noting_load)
        patched.setattr(builder, "create_masked_store", noting_store)
        call()
    return sum(loads.values()), sum(stores.values())


def interpreted_launches(dtype: torch.dtype) -> dict:
    """{kernel: a call that starts it alone}, on the CPU."""
    x, residual, dy = (torch.randn(6, 48).to(dtype) for _ in range(3))
    weight, bias = torch.randn(48).to(dtype), torch.randn(48).to(dtype)
    scale, mean = torch.rand(6), torch.rand(6)
    gate_up, factors = torch.randn(6, 96).to(dtype), torch.rand(6)
    targets = torch.randint(48, (6,))
    state = [torch.rand(50) for _ in range(4)]
    weight_copy = torch.rand(50).to(dtype)
    numbers = adam.AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 3, torch.ones(()), torch.tensor(True))
    qkv = torch.randn(2, 5, 4, 16).to(dtype)
    tables = torch.rand(2, 5, 1, 8), torch.rand(2, 5, 1, 8)
    dq, dk, dv = torch.randn(2, 5, 2, 16).to(dtype), torch.randn(2, 5, 1, 16).to(dtype), qkv[:, :, 3:]
    head_weights = torch.randn(16).to(dtype), torch.randn(16).to(dtype)
    slots = torch.randperm(6).view(3, 2)
    into, ids = torch.zeros(6, 48), torch.arange(6)
    return {
        "norm.forward_kernel": lambda: norm.launch_forward(x, None, weight, None, 1e-5),
        "norm.forward_kernel, residual": lambda: norm.launch_forward(x, residual, weight, None, 1e-5),
        "norm.forward_kernel, layer": lambda: norm.launch_forward(x, residual, weight, bias, 1e-5),
        "norm.backward_kernel": lambda: norm.launch_backward(dy, None, x, weight, scale, None),
        "norm.backward_kernel, layer": lambda: norm.launch_backward(dy, residual, x, weight, scale, mean),
        "swiglu.swiglu_kernel": lambda: swiglu.launch_swiglu(gate_up),
        "swiglu.swiglu_kernel, weighted": lambda: swiglu.launch_swiglu(gate_up, factors),
        "swiglu.swiglu_backward_kernel": lambda: swiglu.launch_swiglu_backward(dy, gate_up),
        "swiglu.weighted_backward_kernel": lambda: swiglu.launch_weighted_backward(dy, gate_up, factors),
        "swiglu.gelu_backward_kernel": lambda: swiglu.launch_gelu_backward(dy, x),
        "cross_entropy.softmax_kernel": lambda: cross_entropy.launch_softmax(
            x.clone(), targets, torch.ones(()), 48, 0, None
        ),
        "adam.adamw_kernel": lambda: adam.launch_adamw(*state, numbers, None),
        "adam.adamw_kernel, copy": lambda: adam.launch_adamw(*state, numbers, weight_copy),
        "rope.rope_kernel": lambda: rope.launch_rope(qkv[:, :, :3], qkv[:, :, :3], *tables),
        "unproven.head_norm.head_norm_kernel": lambda: head_norm.launch_head_norm(
            qkv, *head_weights, *tables, heads=2, kv=1, eps=1e-5
        ),
        "unproven.head_norm.head_norm_backward_kernel": lambda: head_norm.launch_head_norm_backward(
            dq, dk, dv, qkv, *head_weights, *tables, 1e-5
        ),
        "permute.sum_kernel": lambda: permute.launch_sum_rows(x, slots, True),
        "embedding.add_rows_kernel": lambda: embedding.launch_add_rows(into, ids, dy),
    }


@pytest.mark.slow(every=13)
@INTERPRETED
@pytest.mark.parametrize("kernel", interpreted_launches(torch.bfloat16))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_those_that_the_interpreter_touches(kernel, dtype, monkeypatch):
    """Bytes by the source of a kernel, against each address that it meets."""
    torch.manual_seed(0)
    call = interpreted_launches(dtype)[kernel]
    recorder = Recorder(executes=True)
    with recorder.recording():
        touched = touched_bytes(monkeypatch, call)
    (launch,) = [launch for launch in recorder.launches if launch.is_triton]
    assert launch.kernel == kernel.split(",")[0]
    assert (launch.read, launch.written) == touched
    assert judge(launch, Facts(1)).nbytes == sum(touched)


# ---- other chips -------------------------------------------------------------------------------------------


def of_three_layers(name: str, gpu: str) -> step_model.RecordedStep:
    """A step as wide as the full one; in fp8 the first and the last layer stay in bf16."""
    shape = replace(Shape.gpu_models(False)[SCENARIOS[name].shape], layers=3)
    return step_model.recorded_step(name, CHIPS[gpu], shape)


def costs(step: step_model.RecordedStep) -> list[tuple]:
    return [(work.launch.kernel, work.part, work.rate, work.nbytes, work.flops) for work in step.works]


@pytest.mark.slow(core=["h100-2.8"])
@pytest.mark.parametrize("gpu, terabytes", [("h100", 2.8), ("h200", 3.65), ("b200", 6.2)])
def test_the_command_moves_bytes_at_the_rate_of_the_gpu(gpu, terabytes, capsys):
    assert step_model.main(["8b", "--json", "--gpu", gpu]) == 0
    parts = json.loads(capsys.readouterr().out)["steps"]["8b"]["parts"]
    for part in ("elementwise forward", "elementwise backward", "optimizer"):
        low, middle, high = parts[part]["ms"]
        assert parts[part]["gigabytes"] / middle == pytest.approx(terabytes, rel=0.01)
        assert low > middle > high


@pytest.mark.parametrize("name", ["dense", "moe", "8b+tensorwise"])
def test_an_h100_starts_what_an_h200_starts(name):
    """So that one record serves both."""
    assert (CHIPS["h100"].capability, CHIPS["h100"].processors) == (H200.capability, H200.processors)
    first, second = (of_three_layers(name, gpu) for gpu in ("h100", "h200"))
    assert costs(first) == costs(second) and first.host == second.host


@pytest.mark.slow(every=7)
@pytest.mark.parametrize("name", SCENARIOS)
def test_all_chips_compute_the_same_flops(name):
    """And move as many bytes, where they choose the same kernels; partial sums are one a processor."""
    steps = step_model.steps_of_chips(name, tiny=True)
    assert list(steps) == list(ASSUMED_RATES)
    old, new = steps["h200"], steps["b200"]
    assert new.flops == old.flops and new.model_flops == old.model_flops
    assert new.host_reads == ()
    kernels = [Counter({group.kernel: group.launches for group in step.groups}) for step in (old, new)]
    chooses_others = name.startswith("moe") or name == "dense+mxfp8+unproven"
    assert (kernels[0] != kernels[1]) == chooses_others
    assert chooses_others or new.nbytes == pytest.approx(old.nbytes, rel=0.02)
    for gpu, step in steps.items():
        peak = {"h100": 989e12, "h200": 989e12, "b200": 2250e12}[gpu]
        assert step_model.unknown_lines([step]) == []
        assert step.mfu[1] == pytest.approx(100 * step.model_flops / (1e-3 * step.step_ms[1]) / peak)


def test_times_scale_with_the_rates_of_the_chip():
    """The same launches: products by the chip's products, what memory bounds by its memory."""
    recorded = of_three_layers("dense", "b200")
    shape = replace(Shape.gpu_models(False)["dense"], layers=3)

    def parts(chip: Chip) -> dict[str, float]:
        step = step_model.priced_step("dense", chip, shape, recorded)
        return {part: sum(group.ms[1] for group in step.of_part(part)) for part in PARTS}

    old, new = parts(H200), parts(CHIPS["b200"])
    assert old["products"] / new["products"] == pytest.approx(1550 / 690)
    assert old["attention forward"] / new["attention forward"] == pytest.approx(1240 / 560)
    assert old["optimizer"] / new["optimizer"] == pytest.approx(6.2 / 3.65, rel=0.01)
    assert old["small"] == new["small"]  # the time of a launch


def test_mxfp8_takes_the_products_of_a_b200_where_asked_for():
    for name, kernels in (
        ("dense+mxfp8", {"fp8_gemm.scaled_kernel"}), ("dense+mxfp8+unproven", {"aten._scaled_mm"})
    ):  # fmt: skip
        works = of_three_layers(name, "b200").works
        found = {work.launch.kernel for work in works if work.rate and "fp8" in work.rate}
        assert found == kernels


# ---- the command -------------------------------------------------------------------------------------------


def test_the_page_is_written_between_its_marks(tmp_path, capsys):
    page, before = tmp_path / "page.md", tmp_path / "before.json"
    page.write_text("first\n<!-- written by: nothing -->\nold\n<!-- end of what is written -->\nlast\n")
    assert step_model.main(["dense", "--tiny", "--json"]) == 0
    before.write_text(capsys.readouterr().out)

    assert step_model.main(["dense", "moe", "--tiny", "--page", str(page), "--before", str(before)]) == 0
    text = page.read_text()
    assert text.startswith("first\n") and text.endswith("\nlast\n") and "old" not in text
    assert "dense: before, and now" in text and "| weight gradients |" in text
    assert f"python -m scripts.bench model dense moe --tiny --page {page}" in text

    assert "On three GPUs" not in text
    assert step_model.main(["dense", "--tiny", "--chips", "--page", str(page)]) == 0
    text = page.read_text()
    head = "| H100: ms | H100: MFU, % | H200: ms | H200: MFU, % | B200: ms | B200: MFU, % |\n"
    assert "### On three GPUs\n\n| scenario | layers " + head in text
    assert "The rates of B200 that are others" in text and "Dao-AILab/quack" in text

    page.write_text("no marks")
    with pytest.raises(ConfigError, match="has no lines"):
        step_model.main(["dense", "--tiny", "--page", str(page)])


@pytest.mark.slow
def test_times_follow_from_the_rates():
    """Twice the bandwidth: what memory bounds takes half, and products take as long as before."""
    slow = step_model.model_step("dense", H200)
    faster = BANDWIDTH._replace(middle=2 * BANDWIDTH.middle)
    fast = step_model.model_step("dense", H200, rates=replace(step_model.ASSUMED, bandwidth=faster))

    def ms(step, part):
        return sum(group.ms[1] for group in step.of_part(part))

    assert ms(fast, "products") == pytest.approx(ms(slow, "products"))
    assert ms(fast, "elementwise forward") == pytest.approx(ms(slow, "elementwise forward") / 2, rel=0.01)
    assert ms(slow, "optimizer") == pytest.approx(1e3 * 30 * slow.parameters / 3.65e12, rel=0.01)
    seconds = 1e-3 * slow.step_ms[1]
    assert slow.mfu[1] == pytest.approx(100 * slow.model_flops / seconds / 989e12)


def test_the_command_offers_the_chips_that_have_rates(capsys):
    with pytest.raises(SystemExit):
        raise SystemExit(fail_cleanly(step_model.main, ["dense", "--gpu", "a100"]))
    offered = capsys.readouterr().err.partition("choose from ")[2]
    assert offered.strip(" )\n") == ", ".join(repr(gpu) for gpu in ASSUMED_RATES)


def test_an_unknown_scenario_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(fail_cleanly(step_model.main, ["nosuch"]))
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_the_command_runs_in_a_process_of_its_own(capfd):
    assert command.main(["model", "8b", "--tiny", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert set(result["steps"]) == {"8b"} and math.isfinite(result["steps"]["8b"]["ms"][0])
