"""Runs train.py's own loop on a rank of a warm pool, so that a proof covers the program itself."""
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import train
from config import Config
from model.context import GenerationCache
from model.generate import LogitsOf, generate
from parallel.extras import FaultHook
from parallel.wire.world import World
from runtime import closing, evaluate
from runtime.experts import ExpertLoadMap
from runtime.setup import LaunchEnv
from runtime.stop import SIGNALS


@contextlib.contextmanager
def no_pictures() -> Iterator[None]:
    """Disable loss.png and experts.png, which take longer to draw than a tiny run takes to train."""
    no_loss = mock.patch.object(closing, "loss_png", lambda *_: None)
    no_experts = mock.patch.object(ExpertLoadMap, "draw", lambda *_: None)
    with no_loss, no_experts:
        yield


@contextlib.contextmanager
def observed_sampling(observe_logits: Callable[[Tensor], object]) -> Iterator[None]:
    """Pass the logits [vocab] of every token sampled during evaluation to observe_logits."""

    def observed_generate(
        logits_of: LogitsOf, prompt: list[int], max_new: int, **options: Any
    ) -> Iterator[int]:
        def observed_logits(
            tokens: Tensor, positions: Tensor, cache: GenerationCache | None, position: int
        ) -> Tensor:
            logits = logits_of(tokens, positions, cache, position)
            observe_logits(logits)
            return logits

        return generate(observed_logits, prompt, max_new, **options)

    with mock.patch.object(evaluate, "generate", observed_generate):
        yield


def run_loop(
    world: World,
    cfg: Config,
    folder: Path,
    observe: FaultHook | None = None,
    observe_logits: Callable[[Tensor], object] = lambda logits: None,
) -> int:
    """Run train.train in the run folder `folder` and return its exit code.

    Every rank of the world calls it with the same arguments. The console output of rank N goes to
    console.rankN.log in the folder. For `observe` see train.train, for `observe_logits` observed_sampling.
    """
    folder.mkdir(parents=True, exist_ok=True)
    env = LaunchEnv(
        rank=world.rank,
        world=world.size,
        local_rank=world.rank,
        local_world=world.size,
        device=torch.device("cpu"),
        host=f"node{world.rank}",  # in-memory checkpoints are copied to other nodes
    )
    # train.train installs handlers; a worker of a pool must still die on a signal after the run
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with open(folder / f"console.rank{world.rank}.log", "a") as console:
            with no_pictures(), observed_sampling(observe_logits), contextlib.redirect_stdout(console):
                return train.train(cfg, env, world, folder, observe=observe)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
