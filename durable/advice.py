"""Ask the planner for advice when memory runs out (plan/advice.py, in a separate process)."""
import contextlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from config import Config
from durable.start_layout import rank_device
from parallel.wire.world import World
from runtime import failure

ADVICE_TIMEOUT_S = 120  # for the planner's process


@contextlib.contextmanager
def advised_on_memory(cfg: Config, world: World) -> Iterator[None]:
    """Turn an out-of-memory error inside into OutOfMemory with the planner's advice."""
    try:
        yield
    except failure.OutOfMemory:  # already has advice: raised when a phase begins inside
        raise
    except (MemoryError, RuntimeError) as error:
        if not failure.is_out_of_memory(error):
            raise
        advice = ask_for_advice(cfg, world)
        cause = failure.one_line(error).partition(" Exception raised from ")[0]  # the C++ stack
        raise failure.OutOfMemory(f"out of memory: {cause}; {advice}") from error


def ask_for_advice(cfg: Config, world: World) -> str:
    """Run the planner in another process, since this one has no memory left, and return its advice."""
    device = rank_device(world.device)
    capacity = device.memory if device.gpu else None
    question = pickle.dumps((cfg, world.size, capacity, device.gpu.lower()))
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "plan.advice"],
            cwd=Path(__file__).parent.parent,
            input=question,
            capture_output=True,
            check=True,
            timeout=ADVICE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"the planner has no advice ({failure.one_line(error)})"
    return answer.stdout.decode().strip()
