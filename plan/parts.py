"""What the parts of a stage do in a microbatch, as they are recorded (plan/record/part.py).

All take the paths that our code takes on one chip, an H100: those of others differ in few kernels, and in
nothing that is exchanged.
"""
from functools import lru_cache

from config import modules_ahead
from model.describe import PartDescription, first_layer_like
from plan.job import Job
from plan.record.launches import CHIPS
from plan.record.part import PartForm, PartRecord, record_of, with_keys

CHIP = CHIPS["h100"]


@lru_cache(maxsize=1 << 14)
def records_of_part(
    part: PartDescription, micro_batch: int, is_split: bool = False
) -> tuple[PartRecord, ...]:
    """In the order of the forward: of an output head first the blocks of multi-token prediction, which keep
    what they keep while the losses are computed.

    micro_batch: sequences of a microbatch. is_split: some backwards run in two parts.
    """
    cfg = with_keys(part.cfg, "train", micro_batch=micro_batch)
    chip = None if cfg.train.dtype == "fp64" else CHIP  # of proofs, on CPUs
    layers: list[int | str] = []
    if part.layer == "head":
        first = cfg.model.layers
        layers += [first_layer_like(cfg, layer) for layer in range(first, first + modules_ahead(cfg.model))]
    return tuple(record_of(PartForm(cfg, layer, chip, is_split)) for layer in (*layers, part.layer))


def records_of_stage(job: Job, number: int) -> list[PartRecord]:
    """In the order of the forward; those of blocks of one kind are the same object."""
    is_split = job.schedule.splits_backward
    records: list[PartRecord] = []
    for part in job.parts[number]:
        records += records_of_part(part, job.cfg.train.micro_batch, is_split)
    return records
