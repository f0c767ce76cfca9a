"""Small runs as they were when last looked at: losses and checksums of weights and moments.

    PYTHONPATH=.:tests python tests/golden.py

rewrites tests/golden.json. Do it after a change that is meant to change numbers, and let the difference
show that it changes those alone: it is read line by line in a review.
"""

import json
import os
import pathlib
import platform
import re
import sys
import tempfile

import run_folder
import torch
from ranks import MODEL, corpus, job

from checkpoint.disk import store

FILE = pathlib.Path(__file__).with_name("golden.json")
STEPS = 24
RUN = (*MODEL, "--train.steps", str(STEPS), "--model.dropout", "0.1", "--checkpoint.every", "none")
MIXTURE = ("--model.mlp", "experts", "--model.mlp.experts", "4", "--model.mlp.top_k", "2")
LAYOUTS = {  # name: (ranks, words)
    "one rank": (1, ()),
    "dp2 zero1 in bf16": (2, ("--parallel.zero", "1", "--train.dtype", "bf16")),
    "tp2 sp": (2, ("--parallel.tp", "2", "--parallel.sp", "true")),
    "pp2": (2, ("--parallel.pp", "2", "--model.tied", "true")),
    "cp2 zero3": (2, ("--parallel.cp", "2", "--parallel.zero", "3")),
    "a mixture on ep2": (2, (*MIXTURE, "--parallel.ep", "2")),
}


def processor() -> str:
    """The processor, which decides which kernels torch and its libraries take."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    told = dict(re.split(r"\s*: ?", line, maxsplit=1) for line in lines if ":" in line)
    words = [told[key] for key in ("model name", "cpu family", "model", "stepping") if key in told]
    return ", ".join([*(words or [platform.processor()]), torch.backends.cpu.get_cpu_capability()])


def machine(layout: str = "") -> dict[str, str]:
    """Where the bits of a run repeat. In bf16 AMX has its own, which one virtual machine on a processor may
    use and another may not.
    """
    amx = ", AMX" if "bf16" in layout and torch.cpu._is_amx_tile_supported() else ""
    return {"torch": torch.__version__.partition("+")[0], "processor": processor() + amx}


def record(folder: pathlib.Path, data: str, name: str) -> dict:
    """A run of a layout: {"losses" and "targets": of each step, "checksums": {stored piece: end of its
    checksum}}."""
    world, words = LAYOUTS[name]
    args = ["llama3-tiny", *RUN, *words, "--data.path", data, "--log.dir", str(folder), "--log.name", "run"]
    end = job(folder, world, args)
    assert end.codes == [0] * world, end.logs
    rows = run_folder.steps(folder / "run")
    (_, path), *_ = store.committed_checkpoints(folder / "run" / "checkpoints")
    pieces = store.read_index(path)["pieces"]
    checksums = {f"{piece['key']} at {list(piece['start'])}": piece["checksum"][-16:] for piece in pieces}
    return {
        "losses": [row["loss"] for row in rows],
        "targets": [row["targets"] for row in rows],
        "checksums": checksums,
    }


def main() -> None:
    """Writes FILE, with the numbers of a machine without AMX."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # read at the first product
    with tempfile.TemporaryDirectory() as name:
        home = pathlib.Path(name)
        data = corpus(home)
        layouts = {}
        for number, layout in enumerate(LAYOUTS):
            layouts[layout] = record(home / str(number), data, layout)
            print(layout, layouts[layout]["losses"][-1], file=sys.stderr)
    FILE.write_text(json.dumps({"of": machine(), "layouts": layouts}, indent=0) + "\n")


if __name__ == "__main__":
    main()
