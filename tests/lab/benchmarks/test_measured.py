"""The step model with measured rates: a launch gets the rate at its size, and the largest gap is named."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lab.benchmarks import card, first_jobs, step_model
from lab.benchmarks.first_plan import SCENARIOS, SECTIONS
from lab.benchmarks.first_table import make_table
from lab.benchmarks.measured import compare, get_component, measured_rates, modelled_components
from plan.record.launches import CHIPS
from plan.record.rates import ASSUMED, RATES, TERA, Work, interpolated, seconds
from plan.record.work import KERNELS

MEMORY = 14 * card.GIB
CHIP = replace(CHIPS["h200"], memory_bytes=MEMORY)
MACHINE = card.GpuMachine("NVIDIA H200", "580", "2.11", MEMORY)


def rate(name, value, work=0.0, state="ok"):
    return {"section": "rates", "row": name, "rate": name, "value": value, "work": work, "state": state}


@pytest.fixture(scope="module")
def modelled():
    """The dense step of a chip with little memory, as a job reports it."""
    run = first_jobs.FirstRun("cuda", False, "", Path(), MACHINE, jobs=8, chip=CHIP)
    messages = []
    report = lambda **message: messages.append(message)
    first_jobs.report_modelled(report, frozenset(), step="dense ours", scenario="dense", run=run)
    return {"section": "modelled", **messages[-1]}


def test_a_rate_is_interpolated_by_size():
    points = ((1e9, 100.0), (1e11, 300.0))
    sizes = (1.0, 1e9, 1e10, 1e11, 1e15)
    assert [round(interpolated(points, size)) for size in sizes] == [100, 100, 200, 300, 300]


def test_measured_rates_come_before_assumed_ones():
    rates = measured_rates([
        rate("library", 400.0, 1e12),
        rate("library", 600.0, 1e12),  # of one size: their mean
        rate("library, weights", 250.0, 1e12),
        rate("memory", 2.0, 1e9),
        rate("norm.forward_kernel", 1.0, 1e9),
        rate("shortest", 4.0),
        rate("host: triton", 30.0),
        rate("own", 1.0, 1e12, state="wrong"),
    ])  # fmt: skip
    assert rates.shortest.middle == 4.0 and rates.host["triton"].middle == 30.0
    assert rates.host["operation"] == ASSUMED.host["operation"] and "own" not in rates.points

    def ms(part, kernel, rate, flops=0.0, nbytes=0.0, ends=0):
        return 1e3 * seconds(Work(part, kernel, rate, flops, nbytes, 1, ends), "middle", rates)

    assert ms("products", "aten.mm", "library", 1e12) == pytest.approx(1e15 / (500 * TERA))
    # what is measured has the ends of tiles in it; what is assumed has them beside
    assert ms("weight gradients", "aten.addmm", "library", 1e12, ends=10**9) == pytest.approx(4.0)
    own = ms("weight gradients", "linear.wgrad_kernel", "own", 1e12, ends=10**9)
    assert own == pytest.approx(1e15 / (570 * TERA) + 1e12 / (3.65 * TERA))
    assert ms("elementwise forward", "norm.forward_kernel", None, nbytes=1e9) == pytest.approx(1.0)
    assert ms("optimizer", "adam.adamw_kernel", None, nbytes=1e9) == pytest.approx(0.5)
    assert ms("small", "aten.add", None, nbytes=1.0) == pytest.approx(0.004)


def test_assumed_rates_give_the_time_of_the_step_model(modelled):
    """The report of a job has everything that the model needs."""
    step = step_model.model_step("dense", CHIP)
    assert modelled["layers"] == step.layers < 5 and modelled["model_flops"] == step.model_flops
    assert sum(modelled_components(modelled, ASSUMED).values()) == pytest.approx(step.step_ms[1], rel=1e-6)


def test_every_rate_that_is_measured_is_one_of_the_model():
    """And every kernel of ours whose bandwidth is measured moves bytes in a step."""
    from lab.benchmarks import rates
    from lab.benchmarks.shape import Shape

    shapes = Shape.gpu_models(False)
    place = rates.RateInputs(None, *(shapes[name] for name in ("dense", "8b", "moe", "packed-uneven")))
    place = replace(place, device=type("Device", (), {"type": "cuda"}))
    names = {case.rate for case in rates.rate_cases(place, False)} - {""}
    products = {name.removesuffix(", weights") for name in names} & set(RATES)
    known = {*RATES, *KERNELS, "memory", "library, weights"}
    assert names <= known and len(products) > 10
    cases = {case.name for case in rates.rate_cases(place, False)}
    assert len([name for name in cases if name.endswith(", forward") and " x " in name]) == 8


@pytest.mark.slow(every=4)
@pytest.mark.parametrize(
    "name, component",
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NTN", "products"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention forward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", "attention backward"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention backward"),
        ("swiglu_kernel", "elementwise"),
        ("softmax_kernel", "cross entropy"),
        ("adamw_kernel", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name, component):
    known = {full.partition(".")[2]: first_component(full) for full in KERNELS}
    assert get_component(name, known) == component


def first_component(full):
    from lab.benchmarks.measured import COMPONENTS, OTHER

    return COMPONENTS.get(KERNELS[full].part, OTHER)


def test_the_largest_gap_comes_first(modelled):
    expected = modelled_components(modelled, ASSUMED)
    shape = card.fitted_shape("dense", "ours", MEMORY, False)
    kernels = {
        "nvjet_tst_128x256": expected["products"] + 7.0,
        "forward_kernel": 1.0,  # of the norm: the step has no attention of ours
        "adamw_kernel": expected["optimizer"] + 20.0,
    }
    row = {
        "section": "dense ours", "row": "dense ours", "state": "ok", "ms": 200.0, "spread": 0.0, "gib": 1.0,
        "loss": 1.0, "first s": 1.0, "shape": asdict(shape), "planned gib": 1.0, "kernels": kernels,
    }  # fmt: skip
    row |= card.derived_figures(row, shape, 989e12)
    found = compare(modelled, row, ASSUMED)
    gaps = {name: measured - modelled for name, modelled, measured in found["components"]}
    assert list(gaps)[:3] == ["between kernels", "optimizer", "products"]
    assert gaps["products"] == pytest.approx(7.0) and gaps["optimizer"] == pytest.approx(20.0)
    assert gaps["elementwise"] == pytest.approx(1.0 - expected["elementwise"])
    assert found["ratio"] == pytest.approx(200.0 / found["modelled ms"])

    text = make_table([modelled, row], {"card": "NVIDIA H200"}, 1.0)
    lines = [line for line in text.splitlines() if line.startswith("| dense ours | ")]
    assert lines[0].startswith(f"| dense ours | {shape.layers} | ")
    assert lines[1].startswith("| dense ours | between kernels | ")
    fewer = row | {"shape": row["shape"] | {"layers": 1}}
    assert compare(modelled, fewer, ASSUMED)["components"] == []


def test_steps_of_the_plan_have_scenarios():
    names = {section.name for section in SECTIONS}
    assert set(SCENARIOS) <= names and set(SCENARIOS.values()) <= set(step_model.SCENARIOS)
