"""Records of what the parts of a stage do in a microbatch (plan/record/part.py).

All records follow the code paths of one chip, an H100: other chips differ in few kernels, and not in their
communication.
"""
from functools import lru_cache

from config import modules_ahead
from model.describe import PartDescription, first_layer_like
from plan.job import Job
from plan.record.launches import CHIPS
from plan.record.part import PartForm, PartRecord, get_part_record, with_keys

CHIP = CHIPS["h100"]


@lru_cache(maxsize=1 << 14)
def records_of_part(
    part: PartDescription, micro_batch: int, is_split: bool = False
) -> tuple[PartRecord, ...]:
    """Return the records of a part in forward order. An output head starts with the blocks of multi-token
    prediction, which hold their activations while the losses are computed.

    A microbatch has `micro_batch` sequences. If `is_split`, some backwards run in two parts.
    """
    cfg = with_keys(part.cfg, "train", micro_batch=micro_batch)
    chip = None if cfg.train.dtype == "fp64" else CHIP  # fp64 is for proofs on CPUs
    layers: list[int | str] = []
    if part.layer == "head":
        first = cfg.model.layers
        layers += [first_layer_like(cfg, layer) for layer in range(first, first + modules_ahead(cfg.model))]
    return tuple(get_part_record(PartForm(cfg, layer, chip, is_split, part.has_input_grad))
                 for layer in (*layers, part.layer))


def records_of_stage(job: Job, number: int) -> list[PartRecord]:
    """Return the records of a stage in forward order; blocks of one kind share the same object."""
    is_split = job.schedule.splits_backward
    records: list[PartRecord] = []
    for part in job.parts[number]:
        records += records_of_part(part, job.cfg.train.micro_batch, is_split)
    return records
