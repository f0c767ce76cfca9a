"""A small config and process description, so that each test says only what it is about."""

import pytest
import torch

from config.reading import defaults
from config.tree import with_values
from parallel.extras import StepResult
from runtime.metrics import MetricsLogger
from runtime.setup import LaunchEnv


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def cfg():
    sizes = {"train.steps": 10, "train.global_batch": 2, "train.micro_batch": 2, "train.seq_len": 8}
    return with_values(defaults(), {"log.every": 4, "log.name": "t", **sizes})


@pytest.fixture
def metrics(tmp_path, cfg):
    """make(steps=10, start_step=0, env=None) -> MetricsLogger in tmp_path, 16 tokens a step, 100 FLOPs a
    token.
    """

    def make(steps=10, start_step=0, env=None):
        return MetricsLogger(
            tmp_path, cfg, env or LaunchEnv(), steps=steps, flops_per_token=100.0, start_step=start_step
        )

    return make


@pytest.fixture
def feed():
    """feed(metrics, first, last, loss=f): steps of 0.5 s, 0.1 s of it waiting for data; returns the skipped
    flags.
    """

    def run(m, first, last, loss=lambda s: 7 - s / 10):
        flags = []
        for step in range(first, last + 1):
            value = torch.tensor(loss(step), dtype=torch.float32)
            flags.append(
                m.log_step(
                    step, StepResult(value, value * 2, torch.isfinite(value), torch.tensor(16)),
                    learning_rate=1e-3, seconds=0.5, data_seconds=0.1,
                )
            )
        return flags

    return run
