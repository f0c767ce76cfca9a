"""The environment of `scripts.bench first`, which must be set before torch and Triton are imported."""

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
FIRST = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # querying GPUs must not initialize CUDA; forked processes do
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TOKENIZERS_PARALLELISM": "false",
}
ON_A_CPU = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def prepare(argv: Sequence[str]) -> None:
    """Prepare the process for the arguments of scripts.bench. Only `first` needs it."""
    if argv[:1] != ["first"]:
        return
    words = " ".join(argv).replace("=", " ")
    is_on_cpu = "--device cpu" in words
    for name, value in (FIRST | (ON_A_CPU if is_on_cpu else {})).items():
        os.environ.setdefault(name, value)
    importlib.import_module("runtime")  # before torch
    sys.path.insert(0, str(TESTS))
    with contextlib.suppress(ModuleNotFoundError):  # without Triton, the rows of kernels report it
        # before the kernels, which import Triton only where they will run
        importlib.import_module("interpreter" if is_on_cpu else "triton")
