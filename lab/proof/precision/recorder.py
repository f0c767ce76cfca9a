"""Records a run of train.train on one rank: weights, masters, moments and gradients of every step."""
import contextlib
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import Config
from lab.proof.precision.row_errors import watched_rows
from lab.proof.verify.loop import run_loop
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.slots import Slot
from parallel.sharding.views import get_boxes
from parallel.wire import comm, compress
from parallel.wire.world import World
from runtime.run import TrainingRun

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # {bytes an element: dtype}

# A part of a global tensor: its key and shape, the start and size of the part, and the index of its first
# element in a flat tensor.
FlatPart = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def bits(x: Tensor) -> Tensor:
    """Return the bits of x as integers. Unlike floats, NaN equals NaN, and 0 differs from -0."""
    return x.contiguous().view(INTEGERS[x.itemsize])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


class LargestValue(TorchDispatchMode):
    """Tracks how close the results of operations come to the overflow of a dtype.

    `largest` is the largest finite magnitude of a result of the dtype since the last `take`. Views,
    uninitialized buffers and collectives compute nothing and are ignored.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.largest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.is_view or "c10d" in func.namespace or "empty" in func.name():
            return results
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.dtype == self.dtype and result.numel():
                sizes = result.detach().abs()
                largest = torch.where(sizes.isfinite(), sizes, 0).max()
                self.largest = max(self.largest, float(largest))
        return results

    def take(self) -> float:
        """Return `largest` and reset it."""
        largest, self.largest = self.largest, 0.0
        return largest


class RunRecorder:
    """Observes one rank: copies what the rank owns after every step, and checks what it can immediately.

    `spoilt` steps get a NaN gradient, on the ranks with `spoils`. `values` tracks the largest value of a
    step. `wrong` collects outright errors.
    """

    run: TrainingRun  # set by run_built, too: buckets, those that train, since frozen ones have no masters
    buckets: list[Bucket]

    def __init__(self, spoilt: frozenset[int], spoils: bool, values: LargestValue) -> None:
        self.spoilt = spoilt
        self.spoils = spoils
        self.values = values
        self.largest = [0.0]  # [state]: the largest value of the preceding step
        self.wrong: list[str] = []
        # [state][bucket]: {"master" | "own" | name of a moment: flat tensor}; state 0 is before the first
        # step
        self.states: list[list[dict[str, Tensor]]] = []
        # [state]: {bucket: the whole weights read between this state and the next}
        self.weights_read: list[dict[int, Tensor]] = []
        self.grads: list[list[Tensor]] = []  # [step][bucket], times the loss scale
        self.steps: list[dict[str, Any]] = []  # [state]: loss, norm, ok, loss scale, good steps

    def __call__(self, point: str, step: int | None = None, **shown: Any) -> str | None:
        """Handle one of train.train's FAULT_POINTS. Returns "nan" if the gradient is to become NaN."""
        if step is None:  # a point during a save
            return None
        if point == "run.built":
            self.run_built(step, shown["run"])
        elif point == "step.backward":
            return self.grads_ready(step)
        elif point == "step.end":
            self.step_end(step, **shown)
        elif point == "eval.end":
            self.steps[-1]["eval"] = shown["loss"]
        return None

    # ---- the points of the loop ----

    def run_built(self, step: int, run: TrainingRun) -> None:
        self.run = run
        self.buckets = [bucket for bucket in run.buckets if bucket.trains]
        self.steps.append({"step": step, **self.scaler_state()})
        self.watch_reads(run)
        self.record_state(step)

    def watch_reads(self, run: TrainingRun) -> None:
        """Record the weights of each bucket whenever they are about to be read: once ZeRO has gathered them;
        without ZeRO, before the forward of the parts that use them."""
        get_index: dict[int, int] = {}  # {id(parameter): its bucket}
        for i, bucket in enumerate(self.buckets):
            get_index.update({id(slot.param): i for slot in bucket.slots if bucket.zero == 0})
            if bucket.zero > 0:
                bucket.weights.wait_unshard = self.recording(i, bucket.weights.wait_unshard)
        for stage in run.stages.values():
            for part in stage.parts():
                found = {get_index[id(param)] for param in part.parameters() if id(param) in get_index}
                part.register_forward_pre_hook(partial(self.record_reads, found))

    def recording(self, i: int, wait_unshard: Callable[[], None]) -> Callable[[], None]:
        """Wrap the wait_unshard of bucket i to record the weights that are about to be read."""

        def wait_and_record() -> None:
            wait_unshard()
            self.record_reads({i})

        return wait_and_record

    def record_reads(self, indices: set[int], *_: object) -> None:
        """Record the full weights of these buckets, or compare them with those of the reads before."""
        after = f"after step {self.steps[-1]['step']}"
        for i in indices:
            bucket = self.buckets[i]
            weights = bucket.weights.full
            assert weights is not None
            first = self.weights_read[-1].setdefault(i, weights.clone())
            if not same_bits(first, weights):
                self.wrong.append(f"{after}: bucket {i} was read twice and differed")
            for slot in bucket.slots:
                if slot.param.data_ptr() != slot.view_in(weights).data_ptr():
                    self.wrong.append(f"{after}: {slot.param.spec.boxes[0].key} is no view of its bucket")

    def grads_ready(self, step: int) -> str | None:
        for i, bucket in enumerate(self.buckets):
            wide = torch.promote_types(bucket.dtype, torch.float32)
            full = bucket.grads.full
            is_wide = bucket.grads.local.dtype == wide and (full is None or full.dtype == wide)
            if not is_wide:
                self.wrong.append(
                    f"step {step}: gradients of bucket {i} are {bucket.grads.local.dtype}, not {wide}"
                )
        self.grads.append([bucket.grads.local.clone() for bucket in self.buckets])
        return "nan" if step in self.spoilt and self.spoils else None

    def step_end(self, step: int, loss: Tensor, norm: Tensor, ok: Tensor) -> None:
        wide = torch.promote_types(self.buckets[0].dtype, torch.float32)
        if loss.dtype != wide or norm.dtype != wide:
            self.wrong.append(f"step {step}: loss is {loss.dtype} and norm {norm.dtype}, not {wide}")
        self.largest.append(self.values.take())
        recorded = {"step": step, "loss": float(loss), "norm": float(norm), "ok": bool(ok)}
        self.steps.append(recorded | self.scaler_state())
        self.record_state(step)
        if not ok:
            self.check_unchanged(step)

    def check_unchanged(self, step: int) -> None:
        """Check that the last two states are equal, except weights that are quantized from step 1 on."""
        for i, (old, new) in enumerate(zip(*self.states[-2:])):
            for name in new:
                may_change = name == "own" and self.buckets[i].weights.is_quantized
                if not may_change and not same_bits(old[name], new[name]):
                    self.wrong.append(f"step {step} was skipped and changed {name} of bucket {i}")

    # ---- recording ----

    def scaler_state(self) -> dict[str, float]:
        scaler = self.run.scaler
        return {"scale": float(scaler.scale), "good": float(scaler.good_steps)}

    def record_state(self, step: int) -> None:
        """Copy what this rank owns, and check that its weights are its masters rounded."""
        moments = self.run.optim.state()
        self.weights_read.append({})
        now: list[dict[str, Tensor]] = []
        for i, bucket in enumerate(self.buckets):
            state = {"master": bucket.weights.master.clone(), "own": bucket.weights.local.clone()}
            for name, flat_tensors in moments.items():
                flat = flat_tensors[i]
                if flat is not None:
                    state[name] = flat.clone()
            now.append(state)

        is_first = not self.states
        for i, (bucket, state) in enumerate(zip(self.buckets, now)):
            if bucket.weights.is_quantized and bucket.zero < 3 and is_first:
                continue  # initially, own weights are quantized as the other ranks see them
            own, rounded = state["own"], state["master"].to(bucket.dtype)
            if same_bits(own, rounded):
                continue
            num_wrong = len(rounded)
            if own.dtype == rounded.dtype:
                num_wrong = int((bits(own) != bits(rounded)).sum())
            self.wrong.append(
                f"after step {step}: {num_wrong} of {len(rounded)} own weights of bucket {i} "
                "are not their masters rounded"
            )
        self.states.append(now)

    def finish(self) -> dict[str, Any]:
        """Check after the run that each rank read the shards of all ranks. Collective.

        Returns the record of this rank, as torch.save writes it; `recorded_run.read_run` joins the records of
        all ranks.
        """
        for n, (state, weights_read) in enumerate(zip(self.states, self.weights_read)):
            after = f"after step {self.steps[n]['step']}"
            is_last = n == len(self.states) - 1
            for i, bucket in enumerate(self.buckets):
                expected = expected_weights(bucket, state[i]["master"])
                if i in weights_read:
                    if not same_bits(expected, weights_read[i]):
                        self.wrong.append(
                            f"{after}: what was read of bucket {i} is not the shares of all ranks"
                        )
                elif not is_last:
                    self.wrong.append(f"{after}: bucket {i} was never read")
                weights_read.setdefault(i, expected)
        return {
            "owned_parts": [owned_parts(bucket) for bucket in self.buckets],
            "whole_parts": [whole_parts(bucket) for bucket in self.buckets],
            "states": self.states,
            "weights_read": self.weights_read,
            "grads": self.grads,
            "steps": self.steps,
            "largest": self.largest,
            "wrong": self.wrong,
        }


def expected_weights(bucket: Bucket, master: Tensor) -> Tensor:
    """Return the whole weights [size] that every rank should read, from all ranks' masters. Collective."""
    own = master.to(bucket.dtype)
    whole = comm.all_gather(own, bucket.groups.shard) if bucket.zero else own
    if not bucket.weights.is_quantized:
        return whole
    sharing = bucket.sharding
    quantized = compress.quantized_copy(
        whole, bucket.groups.shard.size, sharing.weight_codec, sharing.alignment
    )
    return quantized.to(bucket.dtype)


def owned_parts(bucket: Bucket) -> list[FlatPart]:
    """Locate the elements of the owned range in the global tensors."""
    first = int(bucket.weights.master.storage_offset())
    parts: list[FlatPart] = []
    for box, part in get_boxes(bucket, bucket.weights.master):
        offset = int(part.storage_offset()) - first
        parts.append((box.key, box.shape, box.start, box.size, offset))
    return parts


def whole_parts(bucket: Bucket) -> list[FlatPart]:
    """Locate the elements of the whole bucket in the global tensors."""
    parts: list[FlatPart] = []
    for slot in bucket.slots:
        for box, offset in offsets_of_boxes(slot):
            parts.append((box.key, box.shape, box.start, box.size, offset))
    return parts


def offsets_of_boxes(slot: Slot) -> list[tuple[Box, int]]:
    """Return [(box, offset of its first element in the bucket)] of a parameter."""
    boxes: list[tuple[Box, int]] = []
    offset = slot.offset
    for box in slot.param.spec.boxes:
        boxes.append((box, offset))
        offset += prod(box.size)
    return boxes


def record_run(world: World, cfg: Config, folder: Path, spoilt: frozenset[int]) -> int:
    """Train with train.train, save this rank's record in folder/record.RANK and return the exit code.
    Collective.
    """
    # a gradient replicated on several ranks must be spoilt on all of them
    is_replicated = cfg.parallel.zero == 0 or cfg.parallel.dp_rep > 1
    values = LargestValue(torch.float16)
    watch = RunRecorder(spoilt, spoils=is_replicated or world.rank == world.size - 1, values=values)
    rows: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        if cfg.train.dtype == "fp16":
            stack.enter_context(values)
        if cfg.parallel.compress_tokens != "none":
            stack.enter_context(watched_rows(rows))
        code = run_loop(world, cfg, folder, watch)
    torch.save(watch.finish() | {"rows": rows}, folder / f"record.{world.rank}")
    return code
