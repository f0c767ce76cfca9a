"""Extras of the step and the loop: in order where the config asks for them, else not even imported."""

import contextlib
import io
import json
import pathlib
import subprocess
import sys

import pytest
from program import settings
from ranks import MODEL, corpus

from build import extras_of_step
from optim.spikes import SpikeState
from parallel.extras import Extra, Extras, StepExtra
from parallel.topology.mesh import Mesh

ROOT = pathlib.Path(__file__).parent.parent
# what a run loads only for one of its keys
ON_DEMAND = {
    "durable.memory": "--checkpoint.memory_every 2",
    "durable.memory_saves": "--checkpoint.memory_every 2", "durable.rewind": "--optim.spike_sigma 50",
    "optim.ema": "--train.ema 0.9", "optim.noise": "--log.noise_scale true",
    "parallel.pipeline.graphs": "--train.cuda_graphs true", "runtime.profile": "--profile.steps 1",
    "durable.rerun": "--train.rerun_every 1",
    "model.inside": "--log.inside_every 1", "runtime.inside": "--log.inside_every 1",
    "kernels.largest_score": "--log.inside_every 1", "model.watching": "--log.inside_every 1",
    "model.qk_clip": "--optim.qk_clip 100",
    "optim.adamw_8bit": "--optim.states 8bit", "kernels.dynamic_codes": "--optim.states 8bit",
}
NEVER_HERE = {
    "durable.uploader", "data.task_files", "data.task_scores", "durable.faults", "durable.slow",
    "model.bounded_rows", "parallel.expert.coded", "model.distill", "kernels.distillation",
    "checkpoint.teacher", "runtime.tracker_sinks", "runtime.tensorboard_sink", "runtime.routing",
}
PROGRAM = """
import json, sys, train
code = train.main(sys.argv[2:])
loaded = [name for name in sys.modules if name in sys.argv[1].split()]
print(json.dumps([code, sorted(loaded)]))
"""


def loaded(tmp_path, words):
    """The names of ON_DEMAND and NEVER_HERE that a run has imported."""
    names = " ".join([*ON_DEMAND, *NEVER_HERE])
    prefix = corpus(tmp_path)
    args = ["llama3-tiny", *MODEL, "--data.path", prefix, "--train.steps", "1", *words]
    args += ["--log.dir", str(tmp_path), "--log.name", "run"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, names, *args], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    code, found = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    return set(found)


def test_what_a_run_does_not_ask_for_is_not_imported(tmp_path, real_starts):
    assert loaded(tmp_path, []) == set()


@pytest.mark.slow
def test_what_a_run_asks_for_is_imported(tmp_path, real_starts):
    graphs = ON_DEMAND["parallel.pipeline.graphs"]  # a recording holds neither reruns nor the noise scale
    words = " ".join(sorted({words for words in ON_DEMAND.values() if words != graphs}))
    (tmp_path / "memory").mkdir()
    words += f" --checkpoint.memory_dir {tmp_path / 'memory'}"
    assert loaded(tmp_path, words.split()) == set(ON_DEMAND) - {"parallel.pipeline.graphs"}


def test_the_step_has_what_the_config_asks_for_in_the_order_of_the_calls(tmp_path):
    """The record ends before others send something; what is suspect is known before a step is run again."""
    words = "--train.rerun_every 1 --optim.spike_sigma 50 --log.noise_scale true --train.ema 0.9"

    def names(*words):
        cfg = settings(str(tmp_path / "none"), *words)
        mesh = Mesh.single()
        spikes = SpikeState(cfg.optim, "cpu", mesh.world)
        return [type(extra).__name__ for extra in extras_of_step(cfg, [], mesh, spikes).extras]

    with contextlib.redirect_stdout(io.StringIO()):
        assert names() == []
        order = ["StepRecorder", "SpikeState", "StepReruns", "GradientNoiseScale", "WeightEMA"]
        assert names(*words.split()) == order


def test_each_moment_goes_through_all_in_order():
    """Also those that pass a value on: a verdict, whether the step is saved; and the first that goes back."""
    calls = []

    class Told(StepExtra):
        def __init__(self, name, back_to=None):
            self.name, self.back_to = name, back_to

        def before_step(self, run, step):
            calls.append((self.name, step))

        def judge(self, run, step, gradients, *, good, again):
            return [*good, self.name]

        def after_step(self, run, step):
            calls.append(self.name)
            return self.back_to

        def after_save(self, run, step, saved):
            return saved or self.name == "b"

        def may_save(self, run, step):
            return self.name != "a"

    extras = Extras([Extra(), Told("a"), Told("b", back_to=4), Told("c", back_to=2)])
    extras.before_step(None, 7)
    assert extras.judge(None, 7, None, good=[], again=None) == ["a", "b", "c"]
    assert extras.after_step(None, 7) == 4
    assert calls == [("a", 7), ("b", 7), ("c", 7), "a", "b", "c"]
    assert extras.after_save(None, 7, False) and not Extras([Told("a")]).after_save(None, 7, False)
    assert not extras.may_save(None, 7) and extras[2:] and Extras(extras[2:]).may_save(None, 7)


def test_every_moment_of_an_extra_is_one_of_extras():
    """Else a moment that a new thing overrides would never come."""
    moments = {name for kind in (Extra, StepExtra) for name in vars(kind) if not name.startswith("_")}
    assert moments == {name for name in vars(Extras) if not name.startswith("_")}
