"""After an out-of-memory: the memory held by a rank, and settings that would reduce it.

All figures are the planner's (plan/memory.py), for the fullest rank. `python -m plan.advice` runs the advice
for a rank without memory left: it reads the pickled arguments of memory_advice from standard input.
"""
import math
import pickle
import sys
from collections.abc import Iterator
from typing import NamedTuple

from config import Config, ConfigError
from config.reading import get_phases
from config.tree import with_values
from config.values import Values
from model.router import mixture
from plan.communicators import Gpu, communicator_bytes, reserved_bytes
from plan.memory import passing_bytes, peak_activation_bytes, state_bytes
from plan.search import TRANSIENT_BYTES, make_job

MIB = 2**20
GIB = 2**30
NUM_ADVISED = 3  # settings named in a message
COMMUNICATORS = "buffers of NCCL's communicators"  # plan/communicators.py
MIN_SAVING = 0.02  # fraction of the total: settings that save less are not named


class Holdings(NamedTuple):
    """Bytes held by the fullest rank, as {category: bytes}, the largest first."""
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Saving(NamedTuple):
    """A setting, and the bytes that the fullest rank would hold with it."""
    values: Values  # {section.key: value}
    total: int

    def __str__(self) -> str:
        words = " ".join(f"--{key} {str(value).lower()}" for key, value in self.values.items())
        return f"{words} ({size_text(self.total)})"


def size_text(num_bytes: float) -> str:
    if num_bytes < GIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"


def holdings(cfg: Config, world: int, gpu: Gpu | None) -> Holdings:
    """Return the holdings of the fullest of `world` ranks, in its fullest phase (train.phases).

    `gpu` is None if the job runs on CPUs. Raises ConfigError if train.py refuses the job.
    """
    of_phases = [holdings_of_phase(phase.cfg, world, gpu) for phase in get_phases(cfg).all]
    return max(of_phases, key=lambda held: held.total)


def holdings_of_phase(cfg: Config, world: int, gpu: Gpu | None) -> Holdings:
    """Return the holdings of the fullest rank in one phase."""
    job, _ = make_job(cfg, world)
    communicators = 0 if gpu is None else communicator_bytes(job, gpu)
    ranks: list[Holdings] = []
    for here in job.of_pipeline_ranks():
        parts = state_bytes(here)
        parts["temporary full weights and gradients"] = passing_bytes(here)
        parts["activations"] = peak_activation_bytes(here)
        parts[COMMUNICATORS] = communicators
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        ranks.append(Holdings(dict(ordered)))
    return max(ranks, key=lambda rank: rank.total)


def cheaper_settings(cfg: Config, is_on_gpu: bool) -> Iterator[Values]:
    """Yield changes that may take less memory, those with the least slowdown first."""
    parallel = cfg.parallel
    if parallel.zero == 0:
        yield {"parallel.zero": 1}
    if cfg.train.micro_batch % 2 == 0:
        yield {"train.micro_batch": cfg.train.micro_batch // 2}
    is_same_everywhere = parallel.recompute_stages is None
    if is_same_everywhere and parallel.recompute == "none":
        yield {"parallel.recompute": "selective"}
    yield {"parallel.tp": 2 * parallel.tp, "parallel.sp": True}
    for zero in (2, 3):
        if parallel.zero < zero:
            yield {"parallel.zero": zero}
    for axis in ("pp", "cp", "ep"):
        if axis != "ep" or mixture(cfg.model) is not None:
            yield {f"parallel.{axis}": 2 * getattr(parallel, axis)}
    if is_same_everywhere and parallel.recompute != "full":
        yield {"parallel.recompute": "full"}
    if parallel.offload == "none" and is_on_gpu:
        yield {"parallel.offload": "optimizer"}
        yield {"parallel.offload": "both"}


def find_savings(cfg: Config, world: int, gpu: Gpu | None) -> list[Saving]:
    """Return the settings that save memory and that train.py accepts, in the order of cheaper_settings."""
    now = holdings(cfg, world, gpu).total
    savings: list[Saving] = []
    for values in cheaper_settings(cfg, is_on_gpu=gpu is not None):
        try:
            total = holdings(with_values(cfg, values), world, gpu).total
        except ConfigError:
            continue
        if total < (1 - MIN_SAVING) * now:
            savings.append(Saving(values, total))
    return savings


def choose_savings(cfg: Config, world: int, gpu: Gpu | None, usable: float) -> list[Saving]:
    """Return at most NUM_ADVISED savings: the cheapest settings that fit into `usable` bytes of a GPU.

    If none fits alone, return several that fit together, followed by those that save most.
    """
    savings = find_savings(cfg, world, gpu)
    most = sorted(savings, key=lambda saving: saving.total)
    if gpu is None:
        return most[:NUM_ADVISED]
    fitting = [saving for saving in savings if saving.total <= usable]
    if not fitting:
        fitting = settings_together(cfg, world, gpu, usable) + most
    return fitting[:NUM_ADVISED]


def settings_together(cfg: Config, world: int, gpu: Gpu, usable: float) -> list[Saving]:
    """Combine settings, adding the one that saves most until they fit: [saving], or [] if none do."""
    together: Values = {}
    while True:
        savings = find_savings(with_values(cfg, together), world, gpu)
        if not savings:
            return []
        best = min(savings, key=lambda saving: saving.total)
        together = {**together, **best.values}
        if best.total <= usable:
            return [Saving(together, best.total)]


def memory_advice(cfg: Config, world: int, capacity: float | None, gpu: Gpu = Gpu()) -> str:
    """Return one line: what the fullest rank holds, and settings with which it would hold less.

    `capacity` is the memory of a GPU in bytes, or None if the job runs on CPUs. Raises ConfigError if
    train.py refuses the job.
    """
    on_gpu = None if capacity is None else gpu
    held = holdings(cfg, world, on_gpu)
    largest = ", ".join(f"{what} {size_text(nbytes)}" for what, nbytes in list(held.parts.items())[:3])
    communicators = held.parts[COMMUNICATORS]
    if communicators and COMMUNICATORS not in largest:
        largest += f", {COMMUNICATORS} {size_text(communicators)}"
    of_capacity = "" if capacity is None else f" of {size_text(capacity)}"
    text = f"according to the planner, the fullest rank holds {size_text(held.total)}{of_capacity}: {largest}"
    usable = math.inf if capacity is None else capacity - reserved_bytes(gpu) - TRANSIENT_BYTES
    if capacity is not None and held.total <= usable:
        text += ", which fits: does another process use this GPU"
    savings = choose_savings(cfg, world, on_gpu, usable)
    if not savings:
        return f"{text}; no single setting would reduce it: more ranks would, or a smaller model"
    fitting = [str(saving) for saving in savings if capacity is not None and saving.total <= usable]
    others = [str(saving) for saving in savings if str(saving) not in fitting]
    for lead, settings in (("it would fit with", fitting), ("less with", others)):
        if settings:
            text += f"; {lead} {', or '.join(settings)}"
    return text


if __name__ == "__main__":
    try:
        cfg, world, capacity, gpu = pickle.load(sys.stdin.buffer)
        print(memory_advice(cfg, world, capacity, Gpu(gpu)))
    except ConfigError as refusal:  # the planner accepts fewer jobs than train.py
        print(f"the planner has no advice ({refusal})")
