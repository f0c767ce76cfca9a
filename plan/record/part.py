"""A microbatch in one part of the model: the real module, recorded once for each form that it takes.

A part is a unit run by a stage: the embedding, a block, or the output head with multi-token prediction. Its
forward and backward run on tensors without storage (plan/record/launches.py) and on a made-up mesh
(model/describe.py), along the code paths of a chip or of a CPU, so it needs no separate description. Routers
are assumed to give each expert an equal share, every target counts, and with data.doc_mask a sequence is one
document.
"""

import contextlib
import functools
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import kernels.grad
from config import Config, head_shape, layer_model, modules_ahead
from model.block import BlockOutput
from model.context import ForwardContext, LossInputs
from model.describe import mesh_of_one_stage
from model.flops import keys_of_layer
from model.precision import DTYPES
from model.router import has_experts, mixture
from model.sharding import set_rates, sharding_config
from model.transformer import PipelineStage
from model.watching import LargestScores
from parallel.context.zigzag import shard_batch
from parallel.pipeline.executor import WeightGradStore
from parallel.sharding.bucket import Bucket, split_into_buckets
from parallel.sharding.spec import sharded_parameters
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Activity
from parallel.wire.lanes import PostedExchange, Wait
from plan.record.events import Event as RecordedEvent
from plan.record.launches import (
    META,
    Chip,
    Launch,
    Recorder,
    simulated_cpu,
    simulated_gpu,
    without_initial_weights,
)
from plan.record.rates import NO_FASTER
from plan.record.role import microbatch, noted_reads
from plan.record.wire import RecordingWire
from plan.record.work import BACKWARD, FORWARD, Facts, judge

ATTENTION_FILES = ("kernels/attention.py", "kernels/partial_attention.py")  # attention products on a CPU
SEQUENCES_ON_THE_LINE = (2, 4)
RANKS_ON_THE_LINE = (4, 8)  # expert-parallel; with fewer, a kernel may have too many experts


# ---- records -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Amount:
    """Work between two exchanges.

    products, products8, attention: FLOPs of matrix products, of those with 8-bit operands, and of the
    attention core.
    nbytes: read and written. launches: number of kernels. host_reads: device values that the host waits for.
    """

    products: float = 0.0
    products8: float = 0.0
    attention: float = 0.0
    nbytes: float = 0.0
    launches: float = 0.0
    host_reads: float = 0.0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(*(one + more for one, more in zip(self.numbers, other.numbers)))

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


class Post(NamedTuple):
    """An exchange starts. number: "0", "1", ... within its phase. nbytes: of the larger side."""

    number: str
    group: str
    verb: str
    nbytes: float


class Await(NamedTuple):
    """The part waits until exchange `number` of its phase has ended."""

    number: str


Event = Amount | Post | Await


@dataclass(frozen=True, eq=False)
class PhaseRecord:
    """A forward or a backward of one microbatch.

    events: in order. weights: the fraction of the work spent on weight gradients. peak: the most temporary
    bytes in addition to those alive at its start. This includes the input from the neighboring part.
    """

    events: tuple[Event, ...]
    weights: Amount
    peak: float

    @property
    def work(self) -> Amount:
        return sum((one for one in self.events if isinstance(one, Amount)), Amount())

    @property
    def exchanges(self) -> tuple[Post, ...]:
        return tuple(one for one in self.events if isinstance(one, Post))


@dataclass(frozen=True, eq=False)
class PartRecord:
    """One microbatch of a part on one rank.

    first: the forward of a step's first microbatch, which quantizes the weights to 8 bits for the whole step.
    inputs: the first part of a split backward, which leaves weight gradients to the second; without split
    backwards, the whole backward. kept: bytes between forward and backward, other than parameters and
    context. The previous part's output counts here, if it is kept. context: bytes shared by the blocks of a
    stage: rotary tables, the mask.
    kept_for_weights: bytes between the two parts of a split backward. kept_in_step: bytes of 8-bit weights.
    """

    forward: PhaseRecord
    backward: PhaseRecord
    first: PhaseRecord
    inputs: PhaseRecord
    kept: float
    kept_for_weights: float
    kept_in_step: float
    context: float


# ---- recording ---------------------------------------------------------------------------------------------


class PartForm(NamedTuple):
    """Everything that determines a record. layer: of a block, or "embedding" or "head", then without the
    blocks of multi-token prediction. chip: whose code paths are taken; None is a CPU. is_split: some
    backwards run in two parts. has_input_grad: see PartDescription."""

    cfg: Config
    layer: int | str
    chip: Chip | None = None
    is_split: bool = False
    has_input_grad: bool = True


@functools.lru_cache(maxsize=1 << 14)
def get_part_record(form: PartForm) -> PartRecord:
    """Return the record of a part, derived if possible from those of few sequences and few expert-parallel
    ranks.

    From two sequences on, a block's record is linear, through those of two and of four; parts of a single
    sequence avoid copies. An output head splits its tokens into chunks, and an embedding's gradient has at
    most as many rows as its table. From two expert-parallel ranks on, it is linear in the experts per rank,
    through those of four and of eight ranks, while ranks have several experts (tests/plan/test_part.py). Rows
    under parallel.ep_bound are on neither line: their number is rounded up, and has an upper limit.
    """
    cfg = form.cfg
    if isinstance(form.layer, str) or not has_experts(cfg.model, form.layer):
        undivided = with_keys(
            cfg, "parallel", ep=1, etp=1, ep_chunks=1, ep_bound=None, compress_tokens="none")
        form = form._replace(cfg=undivided)
        if form.cfg != cfg:
            return get_part_record(form)

    if cfg.parallel.ep_bound is not None and isinstance(form.layer, int):
        return record_part(form)
    b, (one, two) = cfg.train.micro_batch, SEQUENCES_ON_THE_LINE
    if b > 1 and b not in (one, two) and isinstance(form.layer, int):
        forms = [form._replace(cfg=with_keys(cfg, "train", micro_batch=number)) for number in (one, two)]
        return on_the_line(*map(get_part_record, forms), steps=(b - one) / (two - one))

    ep, (one, two) = cfg.parallel.ep, RANKS_ON_THE_LINE
    if ep > 1 and ep not in (one, two) and has_several_experts(cfg, max(ep, two)):
        forms = [form._replace(cfg=with_keys(cfg, "parallel", ep=ranks)) for ranks in (one, two)]
        return on_the_line(*map(get_part_record, forms), steps=(1 / ep - 1 / one) / (1 / two - 1 / one))
    return record_part(form)


def has_several_experts(cfg: Config, ep: int) -> bool:
    """Return whether all `ep` ranks have several experts per chunk: a single one needs no row order."""
    mlp = mixture(cfg.model)
    experts, rest = divmod(mlp.experts if mlp else 0, ep)
    return rest == 0 and experts >= 2 * cfg.parallel.ep_chunks


def with_keys(cfg: Config, section: str, **values: Any) -> Config:
    """Return the config with other values in one section."""
    return replace(cfg, **{section: replace(getattr(cfg, section), **values)})


def on_the_line(one: Any, two: Any, steps: float) -> Any:
    """Return one + steps * (two - one) for every number of two records.
    Raises ValueError if they differ in structure."""
    if type(one) is not type(two):
        raise ValueError(f"records of different microbatches are unlike: {one} and {two}")
    if isinstance(one, (int, float)):
        return one + steps * (two - one)
    if isinstance(one, str):
        if one != two:
            raise ValueError(f"records of different microbatches are unlike: {one} and {two}")
        return one
    if isinstance(one, tuple):
        found = [on_the_line(*pair, steps) for pair in zip(one, two, strict=True)]
        return type(one)(*found) if hasattr(one, "_fields") else tuple(found)
    names = [field.name for field in fields(one)]
    return type(one)(*(on_the_line(getattr(one, name), getattr(two, name), steps) for name in names))


def record_part(form: PartForm) -> PartRecord:
    """Record a microbatch of the part; then, if backwards are split, one with a split backward.

    If the first microbatch quantizes weights for the step, record another before the last.
    """
    recorder = Recorder(with_views=False)
    wire = RecordingWire(recorder.now, recorder.events)
    mesh = mesh_of_one_stage(form.cfg, Activity(wire=wire))
    claimed = simulated_cpu(recorder) if form.chip is None else simulated_gpu(form.chip, recorder)
    notes = contextlib.redirect_stderr(io.StringIO())  # from kernels that do not run on a chip
    with notes, claimed as device, without_initial_weights(), recorder.recording(), noted_reads(recorder):
        with META:
            runner = PartRunner(form, mesh, device, recorder)
        first = second = runner.run()
        if first.left:  # 8-bit weights, made once
            second = runner.run()
        split = runner.run(is_split=True) if form.is_split else second
    return PartRecord(
        forward=second.forward,
        backward=second.backward,
        first=first.forward if first.left else second.forward,
        inputs=split.backward,
        kept=second.kept,
        kept_for_weights=split.kept_for_weights,
        kept_in_step=first.left,
        context=runner.context_bytes,
    )


class NoBlock(nn.Module):
    """Stands for a block that has a separate record."""

    def forward(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> BlockOutput:
        return x, residual, None


class MicrobatchRun(NamedTuple):
    """One microbatch. left: bytes alive after it that were not alive before."""

    forward: PhaseRecord
    backward: PhaseRecord
    kept: float
    kept_for_weights: float
    left: float


class PartRunner:
    """A part with storage for its weights and gradients, and a microbatch for it."""

    def __init__(self, form: PartForm, mesh: Mesh, device: torch.device, recorder: Recorder) -> None:
        cfg = form.cfg
        layer = form.layer if isinstance(form.layer, int) else 0
        self.facts = Facts(keys_of_layer(cfg.model, layer, (cfg.train.seq_len,)))
        self.recorder = recorder
        self.stage = PipelineStage(cfg, mesh, *layers_of_part(cfg, form.layer))
        part = self.stage.blocks[0] if self.stage.blocks else (self.stage.embedding or self.stage.head)
        set_rates(cfg, part)
        self.layer = form.layer
        if self.stage.head is not None and self.stage.head.mtp is not None:
            for module in self.stage.head.mtp.modules_ahead:
                module.block = NoBlock()

        # storage
        self.dtype = DTYPES[cfg.train.dtype]
        self.store = WeightGradStore()
        self.buckets = make_buckets(part, cfg, mesh, device)
        for weight in sharded_parameters(part):
            weight.weight_grad_store = self.store

        # a microbatch, and the hidden states around it
        lengths = (cfg.train.seq_len,) if cfg.data.doc_mask else ()
        whole = microbatch(cfg, device, 1, lengths).with_tokens_ahead(modules_ahead(cfg.model))
        self.microbatch = shard_batch(whole, mesh.cp)
        b, s = self.microbatch.tokens.shape
        shape = (b, s // mesh.tp.size if cfg.parallel.sp else s, cfg.model.hidden)
        self.leaf = torch.empty(shape, dtype=self.dtype, device=device, requires_grad=form.has_input_grad)
        self.grad = torch.empty(shape, dtype=self.dtype, device=device)
        self.has_residual = cfg.parallel.recompute != "full"
        self.scale = torch.empty((), dtype=torch.promote_types(self.dtype, torch.float32), device=device)
        self.scores: LargestScores | None = None
        if cfg.optim.qk_clip is not None:
            self.scores = LargestScores(cfg.model, [self.stage], mesh, device, torch.float64)
            self.scores.forward.is_on = True  # a part runs without its stage
        before = recorder.memory.now
        self.context = self.stage.context_of(self.microbatch, self.scale)
        self.context_bytes = recorder.memory.now - before

    def run(self, is_split: bool = False) -> MicrobatchRun:
        """Run forward and backward of a microbatch.
        If `is_split`, weight gradients wait until it has ended."""
        memory = self.recorder.memory
        shared = self.context.shared_keys
        self.lend_keys()
        before = memory.now
        inputs = self.inputs()
        self.begin_phase()
        with self.scores_watched():
            outputs = self.forward(*inputs)
        edges = [get_gradient_edge(x) for x in outputs if x.requires_grad]
        read = shared.kept.get(self.stage.first, ())  # by later blocks, which hold it
        edges_of_keys = [get_gradient_edge(x) for x in read if x.requires_grad]
        forward = self.end_phase(before, [])
        del inputs, outputs
        kept = memory.now - before

        begin = memory.now
        grads = [self.scale if self.layer == "head" else self.grad.clone()] * len(edges)
        grads += [torch.empty_like(x) for x in read if x.requires_grad]
        self.begin_phase()
        spans: list[tuple[int, int]] = []
        self.store.deferring = is_split
        with noted_weight_grads(self.recorder, spans):
            if edges:  # something trains, here or below
                torch.autograd.backward(edges + edges_of_keys, grads)
        self.store.deferring = False
        backward = self.end_phase(begin, spans)
        del edges, edges_of_keys, grads, read
        shared.kept.clear()
        self.leaf.grad = None
        kept_for_weights = memory.now - before
        self.store.compute(0)
        return MicrobatchRun(forward, backward, kept, kept_for_weights, memory.now - before)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return (x, residual) as made by the previous part, or () for the embedding."""
        if self.layer == "embedding":
            return ()
        if self.has_residual:
            return self.leaf.clone(), self.leaf.clone()
        return (self.leaf.clone(),)

    def forward(self, x: Tensor | None = None, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        stage, batch = self.stage, self.microbatch
        if self.layer == "embedding":
            return (stage.embedding(batch.tokens, batch.positions, self.context.dropout_rng),)
        if self.layer == "head":
            inputs = LossInputs(batch, self.scale, self.context)
            return (stage.head(x, inputs, residual=residual),)
        y, residual, stats = stage.blocks[0](x, residual, self.context)
        if stats is not None:
            stage.blocks[0].add_router_stats(stats)
        return (y,) if residual is None else (y, residual)

    def scores_watched(self) -> contextlib.AbstractContextManager[None]:
        """Return what watches the forward, as under optim.qk_clip."""
        return contextlib.nullcontext() if self.scores is None else self.scores.watching()

    def lend_keys(self) -> None:
        """Provide a block with the keys and values of an earlier one, if it reads any."""
        keys, like = self.context.shared_keys, layer_model(self.stage.cfg.model, self.stage.first)
        if self.stage.first in keys.sources:
            shape, (b, s) = head_shape(like), self.microbatch.tokens.shape
            heads = max(1, shape.kv_heads // self.stage.mesh.tp.size)
            k = self.leaf.new_empty(b, s, heads, shape.head_dim, requires_grad=True)
            v = self.leaf.new_empty(b, s, heads, shape.value_dim, requires_grad=True)
            keys.kept[keys.sources[self.stage.first]] = (k, v)

    def begin_phase(self) -> None:
        self.recorder.clear()
        self.recorder.memory.begin()

    def end_phase(self, begin: int, weight_spans: list[tuple[int, int]]) -> PhaseRecord:
        """Record a phase. `begin` are the bytes at its start. `weight_spans` (first, last) are launches that
        compute weight gradients."""
        recorder = self.recorder
        works = [get_amount(launch, self.facts) for launch in recorder.launches]
        weights = sum((one for first, last in weight_spans for one in works[first:last]), Amount())
        events = list(iter_events(recorder.events, works))
        if recorder.host_reads:
            events.append(Amount(host_reads=len(recorder.host_reads)))
        return PhaseRecord(tuple(events), weights, recorder.memory.peak - begin)


def make_buckets(part: nn.Module, cfg: Config, mesh: Mesh, device: torch.device) -> list[Bucket]:
    """Allocate storage for a part's weights, and for their gradients in a step."""
    sharding, dtype = sharding_config(cfg), DTYPES[cfg.train.dtype]
    buckets: list[Bucket] = []
    for members in split_into_buckets(list(sharded_parameters(part)), sharding):
        bucket = Bucket(members, mesh, sharding, dtype=dtype, device=device, seed=cfg.train.seed)
        bucket.grads.start_step()
        buckets.append(bucket)
    return buckets


def layers_of_part(cfg: Config, layer: int | str) -> tuple[int, int]:
    """Return (first, last) of a stage that only has this part."""
    if layer == "embedding":
        return 0, 0
    if layer == "head":
        return cfg.model.layers, cfg.model.layers
    return int(layer), int(layer) + 1


@contextlib.contextmanager
def noted_weight_grads(recorder: Recorder, spans: list[tuple[int, int]]) -> Iterator[None]:
    """Note the launches that compute weight gradients: (first, last), last excluded."""
    real = kernels.grad.write_grad

    def write_grad(*args: Any) -> None:
        first = len(recorder.launches)
        real(*args)
        spans.append((first, len(recorder.launches)))

    with mock.patch.object(kernels.grad, "write_grad", write_grad):
        yield


def get_amount(launch: Launch, facts: Facts) -> Amount:
    judged = judge(launch, facts)
    flops = {}
    if judged.part in (FORWARD, BACKWARD) or launch.file in ATTENTION_FILES:
        flops["attention"] = judged.flops
    elif judged.rate is not None and "fp8" in judged.rate and judged.rate not in NO_FASTER:
        flops["products8"] = judged.flops
    else:
        flops["products"] = judged.flops
    return Amount(**flops, nbytes=judged.nbytes, launches=launch.launches)


def iter_events(posted: Iterable[RecordedEvent], works: list[Amount]) -> Iterator[Event]:
    """Yield what is posted and awaited, with the work in between."""
    numbers: dict[int, str] = {}
    done = 0
    for event in posted:
        if isinstance(event, PostedExchange):
            if event.verb == "receive":
                continue
            numbers[event.number] = str(len(numbers))
            found: Event = Post(numbers[event.number], event.group, event.verb, event.nbytes)
        elif isinstance(event, Wait) and event.number in numbers:
            found = Await(numbers[event.number])
        else:
            continue
        if event.time > done:
            yield sum(works[done:event.time], Amount())
            done = event.time
        yield found
    if done < len(works):
        yield sum(works[done:], Amount())
