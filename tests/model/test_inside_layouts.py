"""log.inside_every: every number of inside.jsonl is that of one process, whatever the layout."""

import math

import numpy as np
import pytest
import run_folder
from ranks import SIZES, job, write_documents

WORDS = (
    "--train.dtype fp64 --train.steps 3 --log.inside_every 1 --checkpoint.every none "
    "--optim.lr 0.02 --model.mixer.window 9"
).split()
MIXTURE = (
    "--model.mlp experts --model.mlp.experts 4 --model.mlp.top_k 2 --model.mlp.width 16 "
    "--model.mlp.shared.experts 1 --model.mlp.router.aux.weight 0.01 --model.mlp.activation relu2"
)
MODELS = {  # words of a model
    "dense": "--model.mixer.kv_heads 2 --model.mlp.activation relu2 --model.mixer.qk_norm head "
    "--model.mixer.bias qkv --data.doc_mask true",
    "tied": "--model.tied true --model.norm.place around --parallel.recompute full",
    "ahead": "--model.mtp.modules 1 --model.residual parallel --model.mixer.softcap 3",
    "mixture": MIXTURE,
    "biased": f"{MIXTURE} --model.mlp.bias true --model.mlp.router.scores sigmoid",
    "latent": f"{MIXTURE} --model.mixer.kind latent --model.mixer.kv_rank 8 --model.mixer.nope_dim 8 "
    "--model.mixer.rope_dim 4 --model.mixer.v_dim 8",
    "states": "--model.blocks.linear.mixer.kind delta --model.blocks.linear.mixer.heads 4 "
    "--model.blocks.linear.mixer.key_heads 2 --model.blocks.linear.mixer.key_dim 8 "
    "--model.blocks.linear.mixer.v_dim 8 --model.pattern linear,block",
    "bf16-states": "--optim.states bf16",
}
LAYOUTS = {  # (ranks, words)
    "mb2": (1, "--train.micro_batch 2"),
    "dp2": (2, "--parallel.zero 0"),
    "zero1": (2, "--parallel.zero 1"),
    "zero2": (2, "--parallel.zero 2"),
    "zero3": (2, "--parallel.zero 3 --parallel.recompute full"),
    "hsdp": (4, "--parallel.zero 1 --parallel.dp_rep 2"),
    "tp2": (2, "--parallel.tp 2"),
    "tp2-sp": (2, "--parallel.tp 2 --parallel.sp true --parallel.zero 0"),
    "tp4": (4, "--parallel.tp 4"),
    "pp2": (2, "--parallel.pp 2"),
    "pp2-zb-v": (2, "--parallel.pp 2 --parallel.schedule zb-v --model.layers 4"),
    "tp2-pp2": (4, "--parallel.tp 2 --parallel.pp 2"),
    "cp2": (2, "--parallel.cp 2"),
    "cp2-ulysses": (2, "--parallel.cp 2 --parallel.cp_kind ulysses --parallel.zero 3"),
    "tp2-cp2": (4, "--parallel.tp 2 --parallel.cp 2 --parallel.sp true"),
    "offload": (2, "--parallel.offload both --parallel.zero 1"),
    "ep2": (2, "--parallel.ep 2"),
    "ep2-chunks": (2, "--parallel.ep 2 --parallel.ep_chunks 2 --parallel.zero 3"),
    "ep2-bound": (2, "--parallel.ep 2 --parallel.ep_bound 1 --parallel.zero 1"),
    "ep2-etp2": (4, "--parallel.ep 2 --parallel.etp 2 --parallel.tp 2 --parallel.zero 1"),
}
OF_EXPERTS = ("ep2", "ep2-chunks", "ep2-bound", "ep2-etp2")
CELLS = [
    *(("dense", layout) for layout in LAYOUTS if layout not in OF_EXPERTS),
    *(("mixture", layout) for layout in ("mb2", "zero3", "tp2", "pp2", "cp2", "tp2-sp", *OF_EXPERTS)),
    *(("biased", layout) for layout in ("ep2-bound", "ep2-etp2")),
    *(("tied", layout) for layout in ("pp2", "tp2-pp2")),
    *(("ahead", layout) for layout in ("pp2", "zero3", "cp2")),
    *(("latent", layout) for layout in ("tp2", "cp2", "ep2")),
    *(("states", layout) for layout in ("tp2", "cp2")),
    *(("bf16-states", layout) for layout in ("zero1", "tp2")),
]
CORE = ["dense-tp2", "dense-pp2", "dense-zero3", "dense-cp2", "mixture-ep2", "mixture-tp2", "mixture-cp2"]


def numbers(folder) -> dict[str, float | None]:
    """{name and step: number} of inside.jsonl."""
    found = {}
    for row in run_folder.read_lines(folder / "inside.jsonl"):
        for key, value in row.items():
            for layer, number in enumerate(value if isinstance(value, list) else [value]):
                found[f"{key} of layer {layer} at step {row['step']}"] = number
    return found


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Documents of two letters: with so few tokens, no token opens some of the units."""
    rng = np.random.default_rng(0)
    documents = (rng.integers(97, 99, rng.integers(10, 60)) for _ in range(60))
    return write_documents(tmp_path_factory.mktemp("inside") / "text", documents)


@pytest.fixture(scope="module")
def trains(tmp_path_factory, prefix):
    """trains(model, layout) -> the numbers of a run; those of one process are computed once."""
    home, known = tmp_path_factory.mktemp("runs"), {}

    def run(model, layout, *more):
        world, words = LAYOUTS[layout] if layout else (1, "--train.micro_batch 4")
        name = "-".join(filter(None, (model, layout or "alone", *more))).replace(" ", "")
        if name not in known:
            args = ["llama3-tiny", *SIZES, *WORDS, "--data.path", prefix, *MODELS[model].split()]
            args += [*words.split(), *more, "--log.dir", str(home), "--log.name", name]
            end = job(home / name, world, args)
            assert end.codes == [0] * world, end.logs
            known[name] = numbers(home / name)
        return known[name]

    return run


@pytest.mark.slow(core=CORE)
@pytest.mark.parametrize(("model", "layout"), [pytest.param(*cell, id="-".join(cell)) for cell in CELLS])
def test_every_number_is_that_of_one_process(trains, model, layout):
    found = trains(model, layout)
    sizes = ["--model.layers", "4"] if "--model.layers 4" in LAYOUTS[layout][1] else []
    wanted = trains(model, None, *sizes)
    assert found.keys() == wanted.keys() and len(found) > 100
    dead = [number for name, number in found.items() if name.startswith("dead_units")]
    assert 0 < max(dead) < 1 and len(set(dead)) > 2
    for name, number in wanted.items():
        if number is None:
            assert found[name] is None, name
        else:
            assert math.isclose(found[name], number, rel_tol=1e-9, abs_tol=1e-12), name
