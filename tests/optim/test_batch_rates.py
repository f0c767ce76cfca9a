"""optim.lr_rule: rates grow with the batch by the formula, in the steps, at the start and in the record."""

import json
import math

import pytest
import torch
from ranks import MODEL, corpus

import train
from build import build_run
from config import ConfigError
from config.reading import resolve
from config.reading.schedules import plan_pipeline
from config.reading.tiny import tiny_config
from config.tree import with_values
from parallel.topology.mesh import Mesh

POWERS = {"linear": 1.0, "sqrt": 0.5}


def rates(steps: int, **keys) -> list[float]:
    given = {key.replace("__", "."): value for key, value in keys.items()}
    cfg = with_values(tiny_config("llama3-tiny"), {"train.steps": steps, **given})
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), None, steps)
    return [run.learning_rate(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize("rule", POWERS)
@pytest.mark.parametrize("min_lr", [None, 1e-4])
@pytest.mark.parametrize("base", [1, 3, 8, 64])
def test_every_rate_is_multiplied_by_the_formula(rule, min_lr, base):
    keys = {"optim__min_lr": min_lr, "optim__warmup": 5, "train__global_batch": 8}
    plain = rates(60, **keys)
    scaled = rates(60, **keys, optim__lr_rule=rule, optim__base_batch=base)
    factor = (8 / base) ** POWERS[rule]
    assert scaled == pytest.approx([factor * rate for rate in plain], rel=1e-12)
    assert (scaled == plain) == (base == 8)


def test_a_phase_with_another_batch_has_its_rate_and_a_ramp_that_of_its_end():
    """The schedule continues; from step 31 on its rates are those of the other batch."""
    phases = json.dumps([{"after_steps": 30, "train.global_batch": 16}])
    keys = {"train__global_batch": 4, "optim__warmup": 5, "train__phases": phases}
    plain, scaled = rates(60, **keys), rates(60, **keys, optim__lr_rule="sqrt", optim__base_batch=4)
    assert scaled[:30] == plain[:30]
    assert scaled[30:] == pytest.approx([2 * rate for rate in plain[30:]], rel=1e-12)

    keys = {"train__global_batch": 8, "train__ramp": "4,4,40"}
    plain, scaled = rates(60, **keys), rates(60, **keys, optim__lr_rule="linear", optim__base_batch=4)
    assert scaled == pytest.approx([2 * rate for rate in plain], rel=1e-12)


def test_a_rule_without_a_base_is_refused():
    with pytest.raises(ConfigError, match=r"^optim\.base_batch: none, .* give the sequences per step"):
        plan_pipeline(resolve("llama3-tiny", None, ["--optim.lr_rule", "linear"]), 1)


def test_the_start_and_the_metrics_tell_the_rate(tmp_path, capsys):
    data = corpus(tmp_path)
    words = f"--data.path {data} --train.steps 3 --train.global_batch 8 --train.micro_batch 1 "
    words += "--eval.sample 0 --optim.lr 0.004 --optim.warmup 0 --optim.decay constant --optim.lr_rule sqrt "
    words += "--optim.base_batch 4"
    argv = ["llama2-tiny", *MODEL, *words.split(), "--log.name", "r", "--log.dir", str(tmp_path)]
    assert train.main(argv) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rate ")]
    said = "optim.lr 0.004 x 1.414 = 0.005657, by the root of train.global_batch / optim.base_batch = 8/4"
    assert line.split(None, 1)[1] == said
    rows = [json.loads(row) for row in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    found = [row["lr"] for row in rows if "lr" in row]
    assert found == pytest.approx([0.004 * math.sqrt(2)] * 3, rel=1e-9)
