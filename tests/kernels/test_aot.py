"""Every kernel compiles for Ampere, Hopper and Blackwell, and tests/kernels/aot.txt says what into."""

import os
import pathlib
import subprocess
import sys

import pytest

from kernels import triton_

HERE = pathlib.Path(__file__).parent
PARTS = 4  # of the kernels, each of which is one test: tests/draw.py takes some of them
SPILLS = {
    ("attention_dkv_256_256", "sm_100"): 26
}  # instructions, of triton 3.7.1 alone: around the loop over query heads. Nothing else may.
LARGEST = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
}  # bytes of shared memory a block can have


def rows(text: str) -> dict:
    """{(kernel, chip): {column: text}} of a table as aot.py prints it."""
    lines = text.splitlines()
    return {
        tuple(line.split()[:2]): dict(
            zip(
                ("registers", "spills", "shared", "warps", "wide", "atomics", "mma"),
                line.split(maxsplit=8)[2:],
            )
        )
        for line in lines[2:]
    }


@pytest.fixture(scope="module")
def table() -> str:
    return (HERE / "aot.txt").read_text()


def check_promises(text: str) -> None:
    gemm = ("attention", "grouped", "weight_gradient", "scaled", "symmetric")
    found = rows(text)
    assert {chip for _, chip in found} == set(LARGEST)
    for (name, chip), row in found.items():
        assert int(row["spills"]) <= SPILLS.get((name, chip), 0), (name, chip)
        assert int(row["shared"]) <= LARGEST[chip] and int(row["atomics"]) == 0, (name, chip)
        if name.startswith(gemm) and name != "attention_delta":
            tensor_core = {
                "sm_80": "HMMA",
                "sm_90": "QGMMA" if name.startswith("scaled") else "HGMMA",
                "sm_100": "UTC",
            }[chip]  # Q: of fp8
            assert tensor_core in row["mma"], (name, chip)
        else:
            assert row["mma"] == "-" and int(row["wide"]) > 0, (name, chip)


def test_the_table_holds_what_it_promises(table):
    check_promises(table)


@pytest.mark.skipif(not triton_.TRITON_AVAILABLE, reason="no Triton for this platform")
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_the_table_is_what_the_kernels_compile_to(table, tmp_path, part):
    """Another Triton has another table; what this one promises holds there too."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    made = subprocess.run(
        [sys.executable, HERE / "aot.py", "--part", str(part), str(PARTS)],
        env=clean | {"TRITON_CACHE_DIR": str(tmp_path)},
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
