"""Steps that are computed again from the same state (train.rerun_every, train.rerun_suspects).

A device may compute wrongly without a word (arXiv 2102.11245), and no checksum of what is stored or sent sees
that. Forward and backward are therefore run twice, before the optimizer: from the same weights, samples,
dropout masks, biases of routers and errors of compression. Megatron-LM's rerun state machine does so too.

    the same bits twice   the data, the code, or a device that errs each time in the same way: the run goes
                          on, and skips the step if it is not finite or a spike
    other bits            a device or a link is wrong: a third run tells which of the two was, and the run
                          ends with code 80. Nothing of the step is applied or saved

Compared are checksums of all that each rank sends and receives, of its gradients before each sum and after
the last, and of loss and gradient norm (parallel/wire/record.py). So the rank that computed wrongly is told
from those that were sent its numbers. Masks are functions of seed, step and place (parallel/rng.py), and no
kernel draws from a generator, so there is no state of one to restore.

Cost: a forward and a backward more for each step that is run again. A step that may be run again is recorded:
its numbers are read once more, the gathers of its weights are awaited before it, and with PowerSGD a copy of
the error is kept.
"""
import dataclasses
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from config import TrainConfig, is_due
from parallel.sharding.bucket import Bucket, wait_param_gathers
from parallel.sharding.powersgd import CompressionState
from parallel.sharding.replicas import name_of
from parallel.sharding.views import owned_part
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.record import NumbersRecord, RecordEntry, different

GRADIENT = "the gradient of "  # begins the name of an entry
MAX_NAMED = 4  # ranks that a message names


class ComputeDiffers(RuntimeError):
    """A step gave other bits when it was computed again. The message names rank, host and parameter."""

    exit_code = 80


class StepNumbers(NamedTuple):
    """The results of forward and backward beside gradients, scalars on the device.

    loss, norm: of the step, without the loss scale. num_targets: those that count in the loss.
    """
    loss: Tensor
    norm: Tensor
    num_targets: Tensor


ComputeStep = Callable[[], StepNumbers]  # runs forward and backward, and sums the gradients


class StepReruns:
    """Runs steps again and compares.

    latest: what the rerun of the last step has shown, for the log, or None if it was not suspect.
    """

    def __init__(self, cfg: TrainConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        self.every = cfg.rerun_every
        self.suspects = cfg.rerun_suspects
        self.buckets = buckets
        self.mesh = mesh
        # a ledger of its own: what a step sends is compared with closed forms
        self.everyone = dataclasses.replace(mesh.world, ledger=Counter())
        self.latest: str | None = None
        self.record: NumbersRecord | None = None  # of the run under way
        self.first: tuple[StepNumbers, NumbersRecord] | None = None  # of the step under way
        self.begun_with: list[CompressionState | None] = []  # of each bucket's PowerSGD
        if self.every is not None or self.suspects:
            for bucket in buckets:
                bucket.grads.before_sum.append(partial(self.look_at_gradients, bucket))

    # ---- what a step calls ---------------------------------------------------------------------------------

    def run_first(self, step: int, compute: ComputeStep) -> StepNumbers:
        """compute(), recorded if the step may be run again."""
        self.latest = None
        self.first = None
        if not self.suspects and not is_due(self.every, step):
            return compute()
        compressions = [bucket.grads.powersgd for bucket in self.buckets]
        self.begun_with = [None if one is None else one.state() for one in compressions]
        self.first = self.run_recorded(compute)
        return self.first[0]

    def compare(self, step: int, compute: ComputeStep, is_good: Tensor) -> None:
        """Runs the step again if that is due, or if it is suspect on any rank. Collective.

        is_good: a bool scalar; False: the step is not finite or a spike. Raises ComputeDiffers on all ranks.
        """
        if self.first is None:
            return
        is_suspect = self.suspects and self.is_so_anywhere([not bool(is_good)])[0]
        if is_suspect or is_due(self.every, step):
            self.compare_runs(step, compute)
        if is_suspect:
            self.latest = (
                f"step {step:,} is not finite or a spike, and was computed again: the same bits everywhere. "
                "So it is due to the data or the code, or to a device that errs each time in the same way"
            )
        self.first = None
        self.begun_with = []

    # ---- a run ---------------------------------------------------------------------------------------------

    def run_recorded(self, compute: ComputeStep) -> tuple[StepNumbers, NumbersRecord]:
        """compute() from the weights alone: without what an earlier run has gathered or made of them."""
        wait_param_gathers(self.buckets)
        for bucket in self.buckets:
            bucket.weights.drop_quantized()
            if bucket.zero == 3:
                bucket.weights.reshard()

        activity = self.mesh.world.activity
        record = NumbersRecord()
        self.record = activity.record = record
        try:
            numbers = compute()
        finally:
            self.record = activity.record = None

        for bucket in self.buckets:
            for slot in bucket.slots:
                start, end = owned_part(bucket, slot.offset, slot.numel)
                if start < end:
                    record.add_own(f"{GRADIENT}{name_of(slot)}, summed", bucket.grads.local[start:end])
        record.add_own("the loss", numbers.loss)
        record.add_own("the gradient norm", numbers.norm)
        return numbers, record

    def run_again(self, compute: ComputeStep) -> NumbersRecord:
        """The same step once more."""
        for bucket, state in zip(self.buckets, self.begun_with):
            if bucket.grads.powersgd is not None and state is not None:
                bucket.grads.powersgd.restore(state)
        return self.run_recorded(compute)[1]

    def look_at_gradients(self, bucket: Bucket, flat: Tensor) -> None:
        """Notes this rank's gradients [size of the bucket], before they are summed."""
        if self.record is not None:
            for slot in bucket.slots:
                self.record.add_own(f"{GRADIENT}{name_of(slot)}", slot.view_in(flat))

    # ---- the comparison ------------------------------------------------------------------------------------

    def compare_runs(self, step: int, compute: ComputeStep) -> None:
        """Runs the step again. Raises ComputeDiffers if that gives other bits, after a third run."""
        assert self.first is not None  # the step was recorded
        device = self.buckets[0].grads.local.device
        record = self.first[1]
        first = record.digests(device)
        second = self.run_again(compute).digests(device)
        if not self.is_so_anywhere([first != second])[0]:
            return

        third = self.run_again(compute).digests(device)
        is_first_other, is_second_other = self.is_so_anywhere([third != first, third != second])
        if not is_second_other:
            which = "a third run is like the second, so the first was wrong"
        elif not is_first_other:
            which = "a third run is like the first, so the second was wrong"
        else:
            which = "a third run is like neither: a device that often errs, or kernels that do not repeat"
        blame = self.who_is_wrong(different(record, first, second))
        raise ComputeDiffers(
            f"step {step:,}, computed again from the same state, gave other numbers: {blame}; {which}; "
            "nothing of the step is applied or saved. Leave that device out, and start again"
        )

    def is_so_anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag, whether it is true on any rank. Collective: one all-reduce, on the host."""
        own = torch.tensor(flags, dtype=torch.int32)
        return [bool(flag) for flag in comm.all_reduce_max(own, self.everyone).tolist()]

    def who_is_wrong(self, entries: list[RecordEntry]) -> str:
        """Names ranks and hosts, in the same words on every rank. Collective.

        entries: those of this rank that differ.
        """
        gradients = [entry.what for entry in entries if entry.what.startswith(GRADIENT)]
        own = {
            "host": socket.gethostname(),
            "what": entries[0].what if entries else "",
            "gradient": gradients[0] if gradients else "",
            "is_own": bool(entries) and entries[0].is_own,
        }
        of_ranks = list(enumerate(comm.all_gather_objects(own, self.everyone)))
        wrong = [(rank, said) for rank, said in of_ranks if said["is_own"]]
        told = [(rank, said) for rank, said in of_ranks if said["what"]]
        verb = "computed wrongly" if wrong else "received other numbers, though all sent the same: a bad link"

        texts: list[str] = []
        for rank, said in (wrong or told)[:MAX_NAMED]:
            more = f", then in {said['gradient']}" if said["gradient"] not in ("", said["what"]) else ""
            texts.append(f"rank {rank} on {said['host']} {verb}, first in {said['what']}{more}")
        return "; ".join(texts)
