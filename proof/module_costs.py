"""Does a module say what it costs? python -m scripts.verify NAME --cost [--section.key VALUE ...]

A real step of two ranks, under each of LAYOUTS, beside what the planner adds up from the modules' `cost`:

    products    FLOPs of all matrix products outside of attention's core, forward and backward, over all
                ranks: equal. Not where the backward recomputes: torch stops at the last tensor that it needs
    exchanges   calls and bytes of each group and verb, as the ledger counts them, on each rank: equal
    saved       the most bytes that autograd keeps for the backward, on each rank: within saved_bound

Attention's own two products are left out: on a CPU they run in blocks, of which some are masked.
"""
import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from build import build_run
from config import Config, ConfigError
from config.terminal import hanging_lines, output_width
from kernels.grad import AccumulatingWeight, Compute
from model.describe import workload
from model.schedules import plan_pipeline
from model.sharding import parallel_dims
from parallel.pipeline.executor import WeightGradStore
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from plan import memory
from plan.bytes import step_bytes
from plan.job import Job, job_of_rank
from proof.random_tokens import RandomTokens
from proof.verify.overrides import Overrides
from proof.verify.tiny_config import tiny_config
from runtime.guard import NonFiniteGuard
from runtime.pool import WorkerPool
from train import train_step

WORLD = 2
STEP = 2  # the step that is measured: the first makes what later ones reuse

PARTS = "core,norm,act"
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"tp": 2, "sp": True, "async_tp": True},
    {"tp": 2, "sp": True, "recompute": "selective", "recompute_parts": PARTS},
    {"tp": 2, "sp": True, "async_tp": True, "recompute": "full"},
    {"tp": 2, "recompute": "full"},
    {"cp": 2, "cp_kind": "ring"},
    {"cp": 2, "cp_kind": "ulysses"},
    {"pp": 2},
    {"pp": 2, "schedule": "zb-h1"},
    {"zero": 3},
    {"ep": 2},
    {"tp": 2, "sp": True, "ep": 2},
    {"ep": 2, "ep_chunks": 3},
    {"ep": 2, "ep_chunks": 4, "recompute": "full"},
)

Ledger = dict[tuple[str, str], tuple[int, int]]  # {(group, verb): (calls, bytes)}


# ---- what a step really does -------------------------------------------------------------------------------


class ProductCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products of two matrices while it is entered. (Attention's have a batch.)"""

    # {operator: the places of the two matrices among its arguments}
    PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::addmm_": (1, 2)}

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        places = self.PRODUCTS.get(func._schema.name)
        if places is not None:
            left, right = (args[place] for place in places)
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


class KeptTensor:
    """A tensor that autograd keeps, in a wrapper of which it keeps the only reference."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class SavedBytes:
    """Bytes of all storages that autograd keeps, each once: now, and at most."""

    def __init__(self) -> None:
        self.storages: dict[int, list[int]] = {}  # {address: [how often it is kept, bytes]}
        self.now = 0
        self.peak = 0

    def pack(self, x: Tensor) -> KeptTensor:
        """A tensor that is kept as long as the result lives."""
        storage = x.untyped_storage()
        self.add(storage)
        self.storages[storage.data_ptr()][0] += 1
        held = KeptTensor(x)
        weakref.finalize(held, self.drop, storage.data_ptr())
        return held

    def add_recomputed(self, x: Tensor) -> None:
        """A tensor that the backward has computed again: it is kept as long as it lives."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.storages:
            self.add(storage)
            self.storages[storage.data_ptr()][0] += 1
            weakref.finalize(storage, self.drop, storage.data_ptr())

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() not in self.storages:
            self.storages[storage.data_ptr()] = [0, storage.nbytes()]
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def drop(self, address: int) -> None:
        self.storages[address][0] -= 1
        if not self.storages[address][0]:
            self.now -= self.storages.pop(address)[1]


@contextlib.contextmanager
def saved_by_autograd() -> Iterator[SavedBytes]:
    """Counts what autograd keeps in the context, what it recomputes there, and what split backwards defer."""
    saved = SavedBytes()
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.x)
    with watched_recomputation(saved), watched_deferred_grads(saved), hooks:
        yield saved


@contextlib.contextmanager
def watched_recomputation(saved: SavedBytes) -> Iterator[None]:
    """What torch's checkpoint computes again is kept by hooks of its own, which ours do not see."""
    hook = torch.utils.checkpoint._recomputation_hook
    start = hook.__init__

    def watched_start(self: Any, *args: Any) -> None:
        start(self, *args)
        pack = self.pack_hook

        def watched_pack(x: Tensor) -> Any:
            saved.add_recomputed(x)
            return pack(x)

        self.pack_hook = watched_pack

    with mock.patch.object(hook, "__init__", watched_start):
        yield


@contextlib.contextmanager
def watched_deferred_grads(saved: SavedBytes) -> Iterator[None]:
    """What a split backward keeps from its I to its W: the tensors that the deferred computations hold."""
    put = WeightGradStore.put

    def watched_put(self: WeightGradStore, weight: AccumulatingWeight, compute: Compute) -> None:
        held = [saved.pack(x) for x in tensors_of(compute, set())]

        def compute_and_drop(into: Tensor | None, add: bool) -> Any:
            try:
                return compute(into, add)
            finally:
                held.clear()

        put(self, weight, compute_and_drop if self.deferring else compute)

    with mock.patch.object(WeightGradStore, "put", watched_put):
        yield


def tensors_of(function: Callable[..., object], seen: set[int]) -> Iterator[Tensor]:
    """The tensors that a function holds in its closure, or in those of functions and objects there."""
    for cell in getattr(function, "__closure__", None) or ():
        yield from tensors_within(cell.cell_contents, seen)


def tensors_within(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Parameter):
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_within(one, seen)
    elif callable(value) and getattr(value, "__closure__", None):
        yield from tensors_of(value, seen)
    elif type(value).__module__.startswith("kernels."):
        for one in vars(value).values():
            yield from tensors_within(one, seen)


class StepCost(NamedTuple):
    """What one rank's step costs. flops: None where it is not compared."""
    flops: float | None
    ledger: Ledger
    saved: int


def measure(world: World, cfg: Config) -> StepCost:
    """On every rank: what step number STEP of this rank does."""
    mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
    run = build_run(cfg, mesh, torch.device("cpu"), data=None, steps=STEP)
    guard = NonFiniteGuard()
    tokens = RandomTokens(cfg, mesh.dp.index, mesh.dp.size)
    for step in range(1, STEP):
        train_step(run, step, tokens.microbatches(step - 1), guard)

    mesh.ledger.clear()
    microbatches = tokens.microbatches(STEP - 1)
    with saved_by_autograd() as saved, ProductCounter() as products:
        train_step(run, STEP, microbatches, guard)

    exchanges = counted_exchanges(mesh)
    for bucket in run.buckets:
        bucket.weights.wait_unshard()  # nothing is left under way; what it gathers is not the step's
    return StepCost(products.flops, exchanges, saved.peak)


def counted_exchanges(mesh: Mesh) -> Ledger:
    """What the mesh's groups have exchanged since its ledger was cleared."""
    ledger: Ledger = {}
    for (group, verb, what), calls in mesh.ledger.items():
        if what == "calls":
            ledger[group, verb] = (calls, mesh.ledger[group, verb, "bytes"])
    return ledger


# ---- what the modules say ----------------------------------------------------------------------------------


def planned(job: Job) -> StepCost:
    """What the planner says of the rank's step."""
    work = workload(job.cfg)
    flops = 0.0
    for stage in job.stages():
        cost = job.stage(stage).cost(work)
        forward = sum(product.flops for product in cost.products)
        flops += 3 * forward * job.schedule.microbatches  # the gradients of both operands
    return StepCost(
        None if recomputes(job.cfg) else flops,
        step_bytes(job),
        memory.peak_activation_bytes(job),
    )


def recomputes(cfg: Config) -> bool:
    return cfg.parallel.recompute != "none"


# ---- the command -------------------------------------------------------------------------------------------


def saved_bound(cfg: Config) -> float:
    """How far off the saved bytes may be, relative. Most are exact."""
    if cfg.model.experts is not None:
        return 0.15 if cfg.parallel.ep > 1 else 0.08  # experts, and ranks that divide them, get unequal rows
    if cfg.parallel.schedule.startswith("zb"):
        return 0.05  # the operands that a split backward keeps from its I to its W are estimated
    return 0.02  # parts that are recomputed one after the other


@dataclass(frozen=True)
class Comparison:
    """One line of the output. wrong: what differs; empty: nothing."""
    layout: str
    text: str
    wrong: tuple[str, ...]


def check(name: str, as_json: bool, overrides: Overrides = Overrides()) -> int:
    """Prints a line for each layout. Returns 0 if all costs are right, else 1.

    Raises ConfigError if the model can run under none of LAYOUTS, or if what its attention keeps is not
    counted exactly.
    """
    if config_of_layout(name, {}, overrides).model.attention == "reference":
        raise ConfigError("model.attention: reference is the definition, and what torch keeps of it is "
                          "counted within some percent; leave it out under --cost")
    pool = WorkerPool(WORLD)
    comparisons: list[Comparison] = []
    refused: dict[str, list[str]] = {}  # {why: the layouts}
    if not as_json:
        print(f"{overrides.title(name)}: a step of {WORLD} ranks, beside what the modules say that it costs")
    try:
        for parallel in LAYOUTS:
            title = title_of(parallel)
            try:
                cfg = config_of_layout(name, parallel, overrides)
                plan_pipeline(cfg, WORLD)
            except ConfigError as error:
                if not parallel:
                    raise
                refused.setdefault(str(error), []).append(title)
                continue
            found = compare(title, cfg, pool.run(measure, cfg))
            comparisons.append(found)
            print_comparison(found, as_json)
    finally:
        pool.close()

    right = sum(not found.wrong for found in comparisons)
    if not as_json:
        for why, titles in refused.items():
            start = f"refused {', '.join(titles)}: "
            print("\n".join(hanging_lines("  ", start + why, output_width())))
        print(f"{right} of {len(comparisons)} layouts cost what the modules say")
    return 0 if right == len(comparisons) else 1


def title_of(parallel: dict[str, Any]) -> str:
    """dp2, or the layout's settings: tp=2 sp=true."""
    settings = [f"{key}={value}".lower() for key, value in parallel.items() if key != "recompute_parts"]
    return " ".join(settings) or "dp2"


def config_of_layout(name: str, parallel: dict[str, Any], overrides: Overrides) -> Config:
    """The tiny twin of a recipe under a layout, with four layers."""
    cfg = tiny_config(name, WORLD, overrides)
    if cfg.model.experts is None and "ep" in parallel:
        raise ConfigError("model.experts: none, and ep shards experts")
    model = replace(cfg.model, layers=4)
    return replace(cfg, model=model, parallel=replace(cfg.parallel, **parallel))


def compare(title: str, cfg: Config, measured: list[StepCost]) -> Comparison:
    """measured: of each rank."""
    jobs = [job_of_rank(cfg, WORLD, rank) for rank in range(WORLD)]
    plans = [planned(job) for job in jobs]
    wrong: list[str] = []

    # products, over all ranks: experts of unequal load do as much together
    flops = sum(one.flops or 0.0 for one in measured)
    planned_flops = sum(one.flops or 0.0 for one in plans)
    is_compared = all(one.flops is not None for one in plans)
    if is_compared and flops != planned_flops:
        wrong.append(f"products: {planned_flops:,.0f} FLOPs planned, {flops:,.0f} measured")

    # exchanges and saved tensors, of each rank
    bound = saved_bound(cfg)
    for rank, (real, plan) in enumerate(zip(measured, plans)):
        for key in sorted({*real.ledger, *plan.ledger}):
            measured_calls, measured_bytes = real.ledger.get(key, (0, 0))
            planned_calls, planned_bytes = plan.ledger.get(key, (0, 0))
            if (measured_calls, measured_bytes) != (planned_calls, planned_bytes):
                group, verb = key
                wrong.append(
                    f"exchanges: {verb} in {group} on rank {rank}: "
                    f"{planned_calls} calls of {planned_bytes:,} bytes planned, "
                    f"{measured_calls} of {measured_bytes:,} measured"
                )
        if abs(real.saved - plan.saved) > bound * real.saved:
            wrong.append(f"saved: {plan.saved:,} bytes planned on rank {rank}, {real.saved:,} measured")

    product_text = f"{flops:,.0f} FLOPs" if is_compared else "(recomputed)"
    saved = max(one.saved for one in measured)
    planned_saved = max(one.saved for one in plans)
    sent = sum(nbytes for one in measured for _, nbytes in one.ledger.values())
    saved_text = f"saved {saved:,}" + ("" if saved == planned_saved else f" (planned {planned_saved:,})")
    text = f"products {product_text}, exchanges {sent:,} bytes, {saved_text}"
    return Comparison(title, text, tuple(wrong))


def print_comparison(found: Comparison, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"layout": found.layout, "ok": not found.wrong, "wrong": found.wrong}), flush=True)
        return
    start = f"{'WRONG' if found.wrong else 'ok':<6} {found.layout:<28} "
    print("\n".join(hanging_lines(start, found.text, output_width())), flush=True)
    for line in found.wrong:
        print(f"       {line}", flush=True)
