"""A step that a run has measured sets the proportion of the forecasts."""

import json

import pytest

from config import ConfigError
from config.reading import dump, resolve
from plan.cost import cluster, forecast
from plan.efficiency import get_efficiency
from plan.measured import read_measured, scaled, times_the_forecast
from plan.search import make_job

HARDWARE = cluster("h100-ib")
EFFICIENCY = get_efficiency(HARDWARE)
SETTINGS = ["--train.global_batch", "128", "--parallel.tp", "4", "--parallel.pp", "4"]


def run_folder(home, tokens_per_s, *more, **changed):
    """The folder of a run of 64 ranks, as train.py leaves it."""
    home.mkdir()
    cfg = resolve("llama3-8b", None, [*SETTINGS, *more])
    (home / "config.yaml").write_text(dump(cfg))
    (home / "summary.json").write_text(json.dumps({"world": 64, "tokens_per_s": tokens_per_s} | changed))
    return home


def seconds(name, world, words, efficiency):
    job, microbatches = make_job(resolve(name, None, words), world)
    return forecast(job, microbatches, HARDWARE, efficiency).step


@pytest.mark.parametrize(
    "name, words",
    [
        ("llama3-8b", [*SETTINGS, "--parallel.schedule", "zb-v"]),
        ("mixtral-8x7b", ["--train.global_batch", "128", "--parallel.ep", "8", "--parallel.ep_chunks", "2"]),
    ],
)
def test_every_forecast_takes_that_much_longer(name, words):
    before, after = (seconds(name, 64, words, each) for each in (EFFICIENCY, scaled(EFFICIENCY, 1.3)))
    assert after == pytest.approx(1.3 * before, rel=1e-9)


def test_the_forecast_of_the_measured_job_is_what_was_measured(tmp_path):
    context = resolve("llama3-8b", None, SETTINGS).train.seq_len
    expected = seconds("llama3-8b", 64, SETTINGS, EFFICIENCY)
    measured = read_measured(run_folder(tmp_path / "run", 128 * context / (1.2 * expected)))
    ratio = times_the_forecast(measured, HARDWARE, EFFICIENCY)
    assert ratio == pytest.approx(1.2, rel=1e-9)
    assert seconds("llama3-8b", 64, SETTINGS, scaled(EFFICIENCY, ratio)) == pytest.approx(measured.seconds)


@pytest.mark.parametrize(
    "tokens_per_s, words, changed, message",
    [
        (1.0, [], {}, "give a run on such GPUs"),
        (1e12, [], {}, "give a run on such GPUs"),
        (None, [], {}, "summary.json has no tokens_per_s or world"),
        (1e5, [], {"world": None}, "summary.json has no tokens_per_s or world"),
        (1e5, ["--train.ramp", "16:16:1e6"], {}, "its steps differ"),
    ],
)
def test_a_run_that_says_nothing_of_the_cluster_is_refused(tmp_path, tokens_per_s, words, changed, message):
    folder = run_folder(tmp_path / "run", tokens_per_s, *words, **changed)
    with pytest.raises(ConfigError, match=message):
        times_the_forecast(read_measured(folder), HARDWARE, EFFICIENCY)


def test_a_dtype_of_which_the_cluster_knows_nothing_is_refused(tmp_path):
    hardware = cluster("a100-ib")
    folder = run_folder(tmp_path / "run", 1e5, "--train.dtype", "fp8")
    with pytest.raises(ConfigError, match="trained in fp8, for which a100-ib has no figure"):
        times_the_forecast(read_measured(folder), hardware, get_efficiency(hardware))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read.*give the folder of a run that has ended"):
        read_measured(tmp_path)
