"""Recompute steps from the same state to detect silent errors (train.rerun_every, train.rerun_suspects).

A device may silently compute wrong results (arXiv 2102.11245), which checksums of stored or sent data cannot
detect. Forward and backward are therefore run twice before the optimizer, from the same weights, samples,
dropout masks, router biases and compression errors, like in Megatron-LM's rerun state machine.

    identical bits   the data, the code, or a device that makes the same error each time: the run continues,
                     and skips the step if it is not finite or a spike
    different bits   a device or a link is faulty: a third run tells which of the two runs was wrong, and the
                     run ends with code 80. Nothing of the step is applied or saved

The comparison covers checksums of everything that each rank sends and receives, of its gradients before each
reduction and after the last, and of loss and gradient norm (parallel/wire/record.py). So the rank that
computed wrong results is distinguished from the ranks that received them. Masks are functions of seed, step
and position (parallel/rng.py), and no kernel uses a generator, so there is no RNG state to restore.

Costs an additional forward and backward for each recomputed step. A step that may be recomputed is recorded:
its data is read once more for checksums, its weight all-gathers complete before it starts, and with PowerSGD
a copy of the error is kept.
"""
import dataclasses
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from config import TrainConfig, is_due
from parallel.extras import Gradients, StepExtra
from parallel.microbatch import Microbatch
from parallel.sharding.bucket import Bucket, get_compression, restore_compression, wait_param_gathers
from parallel.sharding.powersgd import CompressionState
from parallel.sharding.replicas import get_name
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.record import NumbersRecord, RecordEntry, different

GRADIENT = "the gradient of "  # prefix of an entry's name
MAX_NAMED = 4  # ranks named in a message


class ComputeMismatch(RuntimeError):
    """A recomputed step has different bits. The message names rank, host and parameter."""

    exit_code = 80


class StepRecorder(StepExtra):
    """Record every computation of each step that may be recomputed.

    record: the record of the last complete computation, or None. begun_with: each bucket's PowerSGD state
    before the first one. It must come before all extras that communicate in judge().
    """

    def __init__(self, cfg: TrainConfig, buckets: list[Bucket], mesh: Mesh) -> None:
        self.every = cfg.rerun_every
        self.suspects = cfg.rerun_suspects
        self.buckets = buckets
        self.activity = mesh.world.activity
        self.under_way: NumbersRecord | None = None
        self.record: NumbersRecord | None = None
        self.begun_with: list[CompressionState | None] = []
        for bucket in buckets:
            bucket.grads.before_sum.append(partial(self.record_gradients, bucket))

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        """Start a record from the weights alone, dropping gathered and quantized copies of them."""
        if not self.suspects and not is_due(self.every, step):
            return
        if not self.begun_with:  # the first computation
            self.begun_with = get_compression(self.buckets)
        wait_param_gathers(self.buckets)
        for bucket in self.buckets:
            bucket.weights.drop_quantized()
            if bucket.zero == 3:
                bucket.weights.reshard()
        self.under_way = self.activity.record = NumbersRecord()

    def judge(
        self, run: Any, step: int, gradients: Gradients, *, good: Tensor, again: Callable[[], Gradients]
    ) -> Tensor:
        self.finish(gradients)
        return good

    def finish(self, gradients: Gradients) -> None:
        """Complete the record in progress, if any, with the reduced gradients, the loss and the norm."""
        record = self.under_way
        self.stop()
        if record is None:
            return
        for bucket in self.buckets:
            for slot in bucket.grads.slots:
                start, end = bucket.owned_part(slot.offset, slot.numel)
                if start < end:
                    record.add_own(f"{GRADIENT}{get_name(slot)}, summed", bucket.grads.local[start:end])
        record.add_own("the loss", gradients.loss)
        record.add_own("the gradient norm", gradients.norm)
        self.record = record

    def close(self) -> None:
        """Stop a record that an exception has left in progress."""
        self.stop()

    def stop(self) -> None:
        self.under_way = self.activity.record = None

    def restore(self) -> None:
        """Restore the state from before the step."""
        restore_compression(self.buckets, self.begun_with)

    def forget(self) -> None:
        """Drop the records once the step will not be recomputed."""
        self.record = None
        self.begun_with = []

    def record_gradients(self, bucket: Bucket, flat: Tensor) -> None:
        """Record this rank's gradients [size of the bucket] before they are reduced."""
        if self.under_way is not None:
            for slot in bucket.slots:
                self.under_way.add_own(f"{GRADIENT}{get_name(slot)}", slot.view_in(flat))


class StepReruns(StepExtra):
    """Recompute steps and compare. It must come after all other extras that judge a step."""

    def __init__(self, cfg: TrainConfig, recorder: StepRecorder, mesh: Mesh) -> None:
        self.every = cfg.rerun_every
        self.suspects = cfg.rerun_suspects
        self.recorder = recorder
        # a separate ledger, since a step's traffic is checked against closed forms
        self.everyone = dataclasses.replace(mesh.world, ledger=Counter())
        self.lines: list[str] = []  # results of rerunning suspect steps

    def judge(
        self, run: Any, step: int, gradients: Gradients, *, good: Tensor, again: Callable[[], Gradients]
    ) -> Tensor:
        """Recompute the step if that is due, or if the step is suspect on any rank. Collective.

        A step is suspect if it is not finite or a spike. Raises ComputeMismatch on all ranks.
        """
        if self.recorder.record is None:
            return good
        is_wrong = ~good & (gradients.targets > 0)
        is_suspect = self.suspects and self.is_so_anywhere([bool(is_wrong)])[0]
        if is_suspect or is_due(self.every, step):
            self.compare_runs(step, self.recorder.record, again)
        if is_suspect:
            self.lines.append(
                f"step {step:,} is not finite or a spike, and was recomputed: the same bits everywhere. So "
                "it is due to the data or the code, or to a device that errs in the same way each time"
            )
        self.recorder.forget()
        return good

    def pop_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    # ---- the comparison ------------------------------------------------------------------------------------

    def run_again(self, again: Callable[[], Gradients]) -> NumbersRecord:
        """Recompute the same step and return its record."""
        self.recorder.restore()
        self.recorder.finish(again())
        assert self.recorder.record is not None  # as for the first computation
        return self.recorder.record

    def compare_runs(self, step: int, record: NumbersRecord, again: Callable[[], Gradients]) -> None:
        """Recompute the step. Raises ComputeMismatch, after a third run, if the bits differ."""
        device = self.recorder.buckets[0].grads.local.device
        first = record.digests(device)
        second = self.run_again(again).digests(device)
        if not self.is_so_anywhere([first != second])[0]:
            return

        third = self.run_again(again).digests(device)
        is_first_other, is_second_other = self.is_so_anywhere([third != first, third != second])
        if not is_second_other:
            which = "a third run is like the second, so the first was wrong"
        elif not is_first_other:
            which = "a third run is like the first, so the second was wrong"
        else:
            which = "a third run is like neither: a device that often errs, or kernels that do not repeat"
        blame = self.who_is_wrong(different(record, first, second))
        raise ComputeMismatch(
            f"step {step:,}, recomputed from the same state, gave different numbers: {blame}; {which}; "
            "nothing of the step is applied or saved. Exclude that device, and start again"
        )

    def is_so_anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is true on any rank. Collective: one all-reduce on the host."""
        own = torch.tensor(flags, dtype=torch.int32)
        return [bool(flag) for flag in comm.all_reduce_max(own, self.everyone).tolist()]

    def who_is_wrong(self, entries: list[RecordEntry]) -> str:
        """Name the faulty ranks and hosts, with the same message on every rank. Collective.

        entries: this rank's differing entries.
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
        bad_link = "received different numbers, though all sent the same: a bad link"
        verb = "computed wrongly" if wrong else bad_link

        texts: list[str] = []
        for rank, said in (wrong or told)[:MAX_NAMED]:
            more = f", then in {said['gradient']}" if said["gradient"] not in ("", said["what"]) else ""
            texts.append(f"rank {rank} on {said['host']} {verb}, first in {said['what']}{more}")
        return "; ".join(texts)
