"""Strong and weak scaling: cells, efficiencies by hand, and a real measurement on one and two ranks."""

import csv
import json
import sys
from dataclasses import replace

import pytest
from small_jobs import SMALL, settings_of

from config import ConfigError
from lab.scaling.command import main
from lab.scaling.systems import (
    Hardware,
    MeasuredCell,
    ScalingCell,
    ScalingLayout,
    Systems,
    efficiencies,
    keep_systems,
    make_cell,
    parse_layout,
    read_cells,
    systems_lines,
    write_cell,
)
from plan.cost import Efficiency, cluster
from plan.machine import Machine, read_machine

DP, TP = ScalingLayout("dp", ()), ScalingLayout("tp2", (("parallel.tp", "2"),))
SETTINGS = settings_of(SMALL)
SYSTEMS = Systems("quickstart", ("strong", "weak"), (DP, TP), (1, 2, 4), 6, SETTINGS)


def measured(mode, layout, ranks, *, tokens, step_s, forecast_s=None):
    name, flops = f"{mode}-{layout}-{ranks}", 6e6 * tokens
    cell = ScalingCell(name, mode, layout, ranks, 1, tokens, flops, forecast_s, peak_flops=1e12)
    return MeasuredCell(cell, step_s, 0.1, None)


def test_a_layout_is_read_from_words():
    assert parse_layout("") == DP
    assert parse_layout("tp 2") == parse_layout("--parallel.tp 2") == parse_layout("tp=2") == TP
    both = parse_layout("pp 2, train.micro_batch 4")
    assert both.settings == (("parallel.pp", "2"), ("train.micro_batch", "4"))
    assert both.name == "pp2-micro_batch4"
    with pytest.raises(ConfigError, match="--layout: 'tp' is not a list of keys with values"):
        parse_layout("tp")


def test_batches_stay_or_grow_and_what_is_not_possible_is_told():
    strong, weak = make_cell(SYSTEMS, "strong", DP, 4, None), make_cell(SYSTEMS, "weak", DP, 4, None)
    assert (strong.name, strong.global_batch, strong.forecast_s) == ("strong-dp-4", 4, None)
    assert (weak.name, weak.global_batch, weak.tokens) == ("weak-dp-4", 16, 16 * 32)
    assert make_cell(SYSTEMS, "weak", TP, 2, None).global_batch == 8
    with pytest.raises(ConfigError, match=r"parallel\.tp"):
        make_cell(SYSTEMS, "strong", TP, 1, None)


def test_a_cluster_twice_as_fast_is_forecast_half_the_time():
    slow = cluster("h100-ib")
    flops = {dtype: 2 * rate for dtype, rate in slow.flops.items()}
    links = {"hbm": 2 * slow.hbm, "inside": 2 * slow.inside, "between": 2 * slow.between}
    fast = replace(slow, flops=flops, **links)
    efficiency = Efficiency(hop=0.0, op=0.0, route=0.0)
    seconds = []
    for hardware in (Hardware(slow, efficiency), Hardware(fast, efficiency)):
        cell = make_cell(SYSTEMS, "strong", DP, 2, hardware)
        seconds.append(cell.forecast_s)
        assert cell.peak_flops == hardware.cluster.flops["fp32"]
    assert seconds[0] == pytest.approx(2 * seconds[1])


def test_efficiencies_are_those_by_hand():
    cells = [
        measured("strong", "dp", 1, tokens=100, step_s=1.0, forecast_s=1.0),
        measured("strong", "dp", 4, tokens=100, step_s=0.5, forecast_s=0.25),
        measured("weak", "dp", 2, tokens=200, step_s=1.0),
        measured("weak", "tp2", 2, tokens=200, step_s=2.0),
        measured("weak", "tp2", 4, tokens=400, step_s=4.0),
    ]
    share = efficiencies(cells)
    assert share["strong-dp-1"] == (1.0, 1.0)
    assert share["strong-dp-4"] == (0.5, 1.0)
    assert share["weak-dp-2"] == (1.0, None)
    assert share["weak-tp2-2"] == (0.5, None), "beside the fastest with the fewest ranks"
    assert share["weak-tp2-4"] == (0.25, None)
    assert cells[1].mfu == pytest.approx(6e8 / (0.5 * 4 * 1e12))
    lines = systems_lines(cells)
    assert len(lines) == 6 and "50%" in lines[2] and "-" in lines[3]
    narrow = systems_lines(cells, 80)
    assert max(map(len, lines)) > 80 >= max(map(len, narrow)) and "efficiency" in narrow[0]


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--ranks", "1,1"], "--ranks: different numbers of processes"),
        (["--ranks", "0"], "--ranks: different numbers of processes, all at least 1"),
        (["--steps", "3"], "--steps: 3; at least 5"),
        (["--layout", "tp 2", "--layout", "tp=2"], "--layout: the same layout twice"),
        (["--only", "3"], "--only: 3 is not one of --ranks 1,2"),
        (["--cluster", "moon"], "--cluster: no such cluster 'moon'"),
        (["--cluster", "v100-ib", "--train.dtype", "bf16"], "train.dtype: .* has no bf16 for v100-ib"),
    ],
)
def test_bad_input_is_refused_with_its_key(argv, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        main(["systems", "--out", str(tmp_path), *argv, *SMALL])


def test_a_weak_batch_grows_in_whole_sequences():
    odd = Systems("quickstart", ("weak",), (DP,), (2, 3), 6, (*SETTINGS, ("train.global_batch", "5")))
    with pytest.raises(ConfigError, match="does not grow to 3 ranks in whole sequences"):
        make_cell(odd, "weak", DP, 3, None)


def test_a_folder_holds_the_cells_of_one_job(tmp_path):
    keep_systems(SYSTEMS, tmp_path, "h100-ib")
    more = replace(SYSTEMS, ranks=(1, 8), layouts=(DP, ScalingLayout("pp2", (("parallel.pp", "2"),))))
    keep_systems(more, tmp_path, "h100-ib")
    kept = json.loads((tmp_path / "systems.json").read_text())
    assert kept["ranks"] == [1, 2, 4, 8] and len(kept["layouts"]) == 3
    for other, cluster_name, message in (
        (replace(SYSTEMS, steps=9), "h100-ib", "a measurement with steps 6, not 9"),
        (replace(SYSTEMS, ranks=(2, 4)), "h100-ib", "a measurement with fewest ranks 1, not 2"),
        (SYSTEMS, None, "a measurement with cluster h100-ib, not None"),
    ):
        with pytest.raises(ConfigError, match=message):
            keep_systems(other, tmp_path, cluster_name)

    write_cell(make_cell(SYSTEMS, "strong", DP, 2, None), tmp_path / "old")
    with pytest.raises(ConfigError, match="has results, and no systems.json"):
        keep_systems(SYSTEMS, tmp_path / "old", None)
    (tmp_path / "old" / "strong-dp-2" / "cell.json").write_text("{}")
    with pytest.raises(ConfigError, match="cell.json: does not say what was measured"):
        read_cells(tmp_path / "old")


def test_a_cell_whose_run_failed_has_no_times(tmp_path, capsys):
    """Steps of a run that did not end well are there, and are not a measurement."""
    argv = ["systems", "--out", str(tmp_path), "--mode", "strong", "--ranks", "1", "--layout", ""]
    argv += ["--cluster", "h100-ib", "--train.dtype", "fp32", *SMALL]
    cell = tmp_path / "strong-dp-1"
    cell.mkdir()
    rows = [{"step": step, "loss": 3.0, "step_ms": 5.0} for step in range(1, 9)]
    (cell / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    failing = ["--launcher", f"{sys.executable} -c 'raise SystemExit(3)'"]
    assert main([*argv, *failing]) == 3
    assert "strong-dp-1: ended with code 3" in capsys.readouterr().out
    assert read_cells(tmp_path) == [] and not (tmp_path / "systems.csv").exists()
    assert main([*argv, "--launcher", f"{sys.executable} -c 'pass'"]) == 0
    assert [each.cell.name for each in read_cells(tmp_path)] == ["strong-dp-1"]


@pytest.mark.slow
def test_two_ranks_are_measured_beside_the_forecast(tmp_path, capsys):
    """The real thing: the machine is measured, train.py runs, the table is of what its metrics say."""
    argv = ["systems", "--out", str(tmp_path), "--mode", "strong", "--ranks", "2", "--steps", "6"]
    assert main([*argv, "--layout", "", "--layout", "tp 3", *SMALL]) == 0
    assert "strong-tp3-2: not possible: " in capsys.readouterr().out
    with open(tmp_path / "systems.csv", newline="") as file:
        rows = {(row["layout"], row["ranks"]): row for row in csv.DictReader(file)}
    assert set(rows) == {("dp", "2")}
    for row in rows.values():
        assert float(row["tokens_per_s"]) == pytest.approx(4 * 32 / (float(row["step_ms"]) / 1e3))
        assert float(row["forecast_ms"]) > 0 and 0 < float(row["mfu"]) < 1
    assert float(rows["dp", "2"]["efficiency"]) == 1.0
    machine = read_machine(tmp_path / "machine-2.json")
    assert machine.ranks == 2 and 0 < machine.hop < 1 and machine.link < 1e12
    assert json.loads((tmp_path / "strong-dp-2" / "cell.json").read_text())["ranks"] == 2
    assert (tmp_path / "systems.png").stat().st_size > 1000

    # refused: the old times stay with the old batch
    before = (tmp_path / "strong-dp-2" / "cell.json").read_text()
    with pytest.raises(ConfigError, match="a measurement with train.global_batch 4, not 8"):
        main([*argv, *SMALL, "--train.global_batch", "8"])
    assert (tmp_path / "strong-dp-2" / "cell.json").read_text() == before


def test_a_machine_is_a_cluster():
    machine = Machine(2, "fp32", 1e12, 2e11, 1e10, 1e9, 1e-5, 1e-6)
    hardware = Hardware(machine.as_cluster(), machine.as_efficiency())
    cell = make_cell(SYSTEMS, "strong", DP, 2, hardware)
    assert cell.peak_flops == 1e12
    assert cell.forecast_s > cell.flops / (2 * 1e12), "no faster than its products"
