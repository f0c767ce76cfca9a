"""Every kernel compiles for Ampere, Hopper and Blackwell, and tests/kernels/aot.txt says what into."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import triton_kernels

from kernels import triton_

HERE = pathlib.Path(__file__).parent
PARTS = 4  # of the kernels, each of which is one test
SPILLS = {
    ("fp8_swiglu_back_row", "sm_100"): 2,
    ("fp8_swiglu_back_group", "sm_100"): 4,
    ("grouped_gather_dgrad", "sm_100"): 3,
    ("latent_queries_backward", "sm_100"): 4,
    ("attention_dq_192_128_window", "sm_80"): 15,
    ("attention_dq_192_128_window", "sm_86"): 3,
    ("attention_dkv_192_128_window", "sm_100"): 64,
    ("attention_dq_256_256", "sm_80"): 21,
    ("attention_dq_256_256", "sm_86"): 7,
    ("attention_dkv_256_256", "sm_100"): 98,
    ("attention_dq_256_256_softcap", "sm_80"): 51,
}  # instructions: around the loop over query heads, over tiles, in a kernel that is bound by memory, or of
# attention with the largest heads outside Hopper. Nothing else may.
SPILLS_OF_ANOTHER = {  # {first line of its table: where it spills more than that of aot.txt}
    "triton 3.7.1": {
        ("attention_dkv_192_128_window", "sm_100"): 149,
        ("attention_dkv_256_256", "sm_100"): 211,
        ("attention_dkv_256_256_softcap", "sm_100"): 204,
    },
}
# of a processor, at least: of a short product, another program hides where one begins and ends
PROGRAMS = {
    "grouped": 2,
    "grouped_dgrad": 2,
    "grouped_wgrad": 2,
    "grouped_wgrad_first": 2,
    "grouped_gather_dgrad": 2,
    "grouped_scatter": 2,
    "grouped_scatter_dgrad": 2,
    "grouped_wgrad_gather": 2,
    "grouped_wgrad_gather_first": 2,
    "grouped_wgrad_gather_dy": 2,
    "grouped_wgrad_gather_dy_first": 2,
    "scaled_grouped_matrix": 2,
    "fp8_tensor_pair": 4,
    "fp8_row_pair": 2,
    "fp8_swiglu_tensor": 4,
    "fp8_swiglu_back_tensor": 2,
}
# that multiply while the next operands arrive
IN_FLIGHT = (
    "weight_gradient",
    "grouped",
    "grouped_dgrad",
    "grouped_gather",
    "grouped_gather_dgrad",
    "grouped_scatter",
    "grouped_scatter_dgrad",
    "grouped_wgrad_gather",
    "grouped_wgrad_gather_dy",
    "scaled_row_add_e5m2",
    "scaled_grouped_row",
    "scaled_grouped_row_e5m2",
    "scaled_grouped_matrix",
)
# read few numbers, each by one thread
NARROW = ("expert_order_count", "router_statistics")
LARGEST = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
}  # bytes of shared memory a block can have


def rows(text: str) -> dict:
    """{(kernel, chip): {column: text}} of a table as aot.py prints it."""
    lines = text.splitlines()
    return {
        tuple(line.split()[:2]): dict(
            zip(
                ("registers", "spills", "shared", "warps", "programs", "flight", "wide", "atomics", "mma"),
                line.split(maxsplit=10)[2:],
            )
        )
        for line in lines[2:]
    }


@pytest.fixture(scope="module")
def table() -> str:
    return (HERE / "aot.txt").read_text()


def check_promises(text: str) -> None:
    gemm = ("attention", "grouped", "weight_gradient", "scaled")
    found = rows(text)
    spills = SPILLS | SPILLS_OF_ANOTHER.get(text.splitlines()[0], {})
    assert {chip for _, chip in found} <= set(LARGEST)
    for (name, chip), row in found.items():
        assert int(row["spills"]) <= spills.get((name, chip), 0), (name, chip)
        assert int(row["shared"]) <= LARGEST[chip] and int(row["atomics"]) == 0, (name, chip)
        assert int(row["programs"]) >= PROGRAMS.get(name, 1), (name, chip)
        if chip == "sm_90" and name in IN_FLIGHT:
            assert int(row["flight"]) > 0, (name, chip)
        if name.startswith(gemm):
            tensor_core = {
                "sm_80": "HMMA",
                "sm_86": "HMMA",
                "sm_90": "QGMMA" if name.startswith("scaled") else "HGMMA",
                "sm_100": "UTC",
            }[chip]  # Q: of fp8
            assert tensor_core in row["mma"], (name, chip)
        else:
            assert row["mma"] == "-" and (int(row["wide"]) > 0 or name in NARROW), (name, chip)


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("registers, shared, warps, chip, programs", [
    (90, 131104, 8, 90, 1),  # shared memory
    (90, 98328, 8, 90, 2),
    (182, 98328, 8, 90, 1),  # registers: 182 are 184 in units, times 256 threads
    (32, 32, 8, 90, 8),  # warps
    (16, 0, 1, 80, 32),  # programs
    (128, 80 << 10, 8, 80, 2),
    (32, 32, 4, 86, 12),  # warps, 48 of them
])
def test_programs_of_a_processor(registers, shared, warps, chip, programs):
    assert aot_module().programs_of_processor(registers, shared, warps, chip) == programs


def environment(cache: pathlib.Path) -> dict[str, str]:
    """That of a process that compiles. cache: the folder for what it compiles."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return clean | {"TRITON_CACHE_DIR": str(cache)}


def aot_module():
    pytest.importorskip("triton", reason="no Triton for this platform")
    spec = importlib.util.spec_from_file_location("aot", HERE / "aot.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["aot"] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def test_every_kernel_is_in_the_table(table):
    module = aot_module()
    compiled = {triton_kernels.full_name(case.kernel) for case in module.CASES.values()}
    assert compiled == {place.full_name for place in triton_kernels.places()} and len(compiled) > 30
    wanted = {(name, f"sm_{chip}") for name, case in module.CASES.items() for chip in case.chips}
    assert set(rows(table)) == wanted


def test_the_table_holds_what_it_promises(table):
    assert {chip for _, chip in rows(table)} == set(LARGEST)
    check_promises(table)


@pytest.mark.slow
@pytest.mark.skipif(not triton_.TRITON_AVAILABLE, reason="no Triton for this platform")
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_the_table_is_what_the_kernels_compile_to(table, tmp_path, part):
    """Another Triton has another table; what this one promises holds there too."""
    made = subprocess.run(
        [sys.executable, HERE / "aot.py", "--part", str(part), str(PARTS)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    version, columns, *compiled = made.stdout.splitlines()
    assert compiled
    if version != table.splitlines()[0]:
        check_promises(made.stdout)
        return
    kernels = list(dict.fromkeys(line.split()[0] for line in table.splitlines()[2:]))
    kept = set(kernels[part - 1 :: PARTS])
    expected = [line for line in table.splitlines()[2:] if line.split()[0] in kept]
    assert compiled == expected, (
        "python tests/kernels/aot.py > tests/kernels/aot.txt, and read the difference"
    )
