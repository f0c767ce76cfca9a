"""train.py's own loop in a rank of a warm pool: what a proof runs, so that it proves the program itself."""
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

import train
from config import Config
from parallel.comm import World
from runtime.experts import LoadMap
from runtime.setup import Env
from runtime.stop import SIGNALS


@contextlib.contextmanager
def no_pictures() -> Iterator[None]:
    """Without loss.png and experts.png, which take longer to draw than a tiny run to train."""
    of_loss = mock.patch.object(train, "loss_png", lambda *_: None)
    of_experts = mock.patch.object(LoadMap, "png", lambda *_: None)
    with of_loss, of_experts:
        yield


def run_loop(world: World, cfg: Config, folder: Path, watch: Callable | None = None) -> int:
    """train.train in the run folder `folder` -> its exit code.

    Every rank of the world calls it with the same arguments; what the console would show goes to
    console.rankN.log there. watch: see train.train."""
    folder.mkdir(parents=True, exist_ok=True)
    rank, size = world.rank, world.size
    env = Env(rank=rank, world=size, local_rank=rank, local_world=size, device=torch.device("cpu"))
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with open(folder / f"console.rank{rank}.log", "a") as console:
            with no_pictures(), contextlib.redirect_stdout(console):
                return train.train(cfg, env, world, folder, watch=watch)
    finally:  # a rank that lives on must still end when it is told to
        for number, handler in handlers.items():
            signal.signal(number, handler)
