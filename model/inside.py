"""Statistics of each layer in every n-th step (log.inside_every), the same numbers under every layout.

Of the parameters of a layer and kind (attn.q, mlp.up, experts, router, norms, ...):

    grad_norm, grad_rms        the reduced gradient, without the loss scale and before clipping
    weight_norm, weight_rms    the master weights before the update
    update_norm                the masters after the step minus those before it; 0 if the step was skipped
    update_ratio               update_norm / weight_norm

Of a layer:

    block_rms                  its output: the residual stream
    mixer_rms, mlp_rms         what its token mixer and its MLP return, before a norm of what they give
    dead_units                 the share of the units of its MLP, or of all its experts, that no token of the
                               step opens: the input of the activation, of a gated unit the gate's, is at most
                               0 for every token
    largest_logit              the largest attention score (kernels/largest_score.py)
    router_entropy             in nats, of the mean over the counted tokens of the router's distribution
    expert_share               the share of the counted choices that its most chosen expert got

A recorded step is watched from outside: hooks of the modules, and a few functions replaced by ones that look
and pass on. Both are taken off again, so that other steps are as without them. Only the forward is watched,
not the part that recomputation repeats. Everything is summed on the device, over ranks in three or four
exchanges after the optimizer, and read with the log's other numbers.

A recorded step keeps a copy of the masters, computes the products of queries and keys once more, and under cp
gathers the keys. Masters in host memory are measured there.
"""
import contextlib
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from config import Config, ModelConfig, is_due, layer_model, modules_ahead
from kernels.activations import Activation
from kernels.expert_bias import members_of
from kernels.grad import accumulation_dtype
from kernels.router import RouterSums
from model.block import MIXERS, MLPS, TransformerBlock
from model.describe import all_parameters
from model.mlp import MLP
from model.moe import Experts
from model.norm import add_residual
from model.router import Router, RouterInputs, has_experts, mixture
from model.transformer import PipelineStage
from model.watching import LargestScores, replace_until
from parallel.extras import StepExtra
from parallel.microbatch import Microbatch
from parallel.sharding.bucket import Bucket
from parallel.sharding.spec import ParameterSpec
from parallel.topology.mesh import Mesh
from parallel.wire import comm

OF_PARAMETERS = ("grad_norm", "grad_rms", "weight_norm", "weight_rms", "update_norm", "update_ratio")
OUTPUTS = ("block", "mixer", "mlp")  # whose rms is measured

# parameters that are named by their role, not by their place in the layer
KIND_OF_ROLE = {
    "embedding": "embedding",
    "positions": "positions",
    "head": "head",
    "router": "router",
    "norm": "norms",
    "bias": "biases",
}


# ---- the names of the numbers ------------------------------------------------------------------------------


class Statistic(NamedTuple):
    """One number. layer: None outside of the layers. kind: of parameters, "" for what a layer has once."""
    name: str
    layer: int | None
    kind: str


class ParameterPlace(NamedTuple):
    """The layer and kind of a parameter."""
    layer: int | None
    kind: str


def place_of(key: str, spec: ParameterSpec) -> ParameterPlace:
    """Return the place of the global tensor `key`, which is a part of the parameter."""
    inside = re.fullmatch(r"layers\.(\d+)\.(.+)\.\w+|layers\.(\d+)\.(.+)", key)
    kind = KIND_OF_ROLE.get(spec.role)
    if inside is None:
        return ParameterPlace(None, f"outer_{kind}" if spec.role in ("norm", "bias") else kind or key)
    layer = int(inside[1] or inside[3])
    if spec.is_expert:
        return ParameterPlace(layer, "experts")
    return ParameterPlace(layer, kind or inside[2] or inside[4])


@lru_cache(maxsize=16)
def parameter_places(model: ModelConfig) -> tuple[ParameterPlace, ...]:
    """Return the places of all parameters of the model by layer; those outside of the layers are last."""
    places: dict[ParameterPlace, None] = {}
    for spec, keys in all_parameters(model):
        places |= dict.fromkeys(place_of(key, spec) for key in keys)
    last = model.layers + modules_ahead(model)
    return tuple(sorted(places, key=lambda place: last if place.layer is None else place.layer))


@lru_cache(maxsize=16)
def layers_with(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {statistic of a layer: the layers that have it}."""
    layers = range(model.layers + modules_ahead(model))
    parts = [layer_model(model, layer) for layer in layers]
    mixers = tuple(layer for layer, part in zip(layers, parts) if type(part.mixer) in MIXERS)
    mlps = tuple(layer for layer, part in zip(layers, parts) if type(part.mlp) in MLPS)
    experts = tuple(layer for layer in layers if has_experts(model, layer))
    return {
        "block_rms": tuple(layers),
        "mixer_rms": mixers,
        "mlp_rms": mlps,
        "dead_units": mlps,
        "largest_logit": tuple(layer for layer in mixers if parts[layer].mixer.has_softmax),
        "router_entropy": experts,
        "expert_share": experts,
    }


def statistics_of(model: ModelConfig) -> list[Statistic]:
    """Return the names of the numbers of a step, in the order of LayerStatistics.latest."""
    places = parameter_places(model)
    names = [Statistic(name, *place) for name in OF_PARAMETERS for place in places]
    for name, layers in layers_with(model).items():
        names += [Statistic(name, layer, "") for layer in layers]
    return names


# ---- the extra ---------------------------------------------------------------------------------------------


class OwnedPart(NamedTuple):
    """Elements of a bucket's owned shard that no other rank counts, all of one place."""
    bucket: int
    elements: slice
    row: int  # of the place

    def continues_in(self, other: "OwnedPart") -> bool:
        """Whether the other part is of the same place and follows at once."""
        return (self.bucket, self.row, self.elements.stop) == (other.bucket, other.row, other.elements.start)


class UnitSite(NamedTuple):
    """A module with units: an MLP, shared experts or the routed experts of a layer."""
    layer: int
    is_expert: bool
    module: MLP | Experts


class LayerStatistics(StepExtra):
    """Measure every n-th step (log.inside_every).

    latest: its numbers on the device, as statistics_of(model) names them; None after other steps. Collective
    in steps that are recorded.
    """

    def __init__(
        self, cfg: Config, stages: dict[int, PipelineStage], buckets: list[Bucket], mesh: Mesh,
        device: torch.device,
    ) -> None:
        model = cfg.model
        self.every = cfg.log.inside_every
        self.stages = list(stages.values())
        self.buckets = buckets
        self.mesh = mesh
        self.device = device
        self.dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no fp64
        self.latest: Tensor | None = None
        self.is_recorded = False  # the present step

        # parameters
        places = parameter_places(model)
        rows = {place: row for row, place in enumerate(places)}
        self.owned = owned_parts(buckets, rows)
        self.row_of_part = torch.tensor([part.row for part in self.owned], dtype=torch.int64, device=device)
        sizes = torch.zeros(len(places), dtype=self.dtype)
        for part in self.owned:
            sizes[part.row] += part.elements.stop - part.elements.start
        self.sizes = sizes.to(device)
        self.masters: list[Tensor] = []  # before the update
        self.grad_squares = self.sizes

        # layers
        found = [module for stage in self.stages for module in stage.modules()]
        self.blocks = [module for module in found if isinstance(module, TransformerBlock)]
        self.sites = [
            UnitSite(block.layer, isinstance(module, Experts), module)
            for block in self.blocks for module in block.modules() if isinstance(module, (MLP, Experts))
        ]
        self.scores = LargestScores(model, self.stages, mesh, device, self.dtype)
        self.forward = self.scores.forward
        self.num_layers = model.layers + modules_ahead(model)
        experts = mixture(model)
        self.num_experts = 0 if experts is None else experts.experts
        self.layers_with = {
            name: torch.tensor(layers, dtype=torch.int64, device=device)
            for name, layers in layers_with(model).items()
        }
        self.start()

    def start(self) -> None:
        """Forget what the forward has shown."""
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        self.outputs = zeros(self.num_layers, len(OUTPUTS), 2)  # sums of squares, numbers
        self.router_sums = zeros(self.num_layers, 2, self.num_experts)  # shares, counts
        self.scores.start()
        self.opened: dict[UnitSite, Tensor] = {}  # int32 [units], above 0 if a token has opened it

    # ---- hooks of the step ---------------------------------------------------------------------------------

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        self.latest = None
        self.is_recorded = is_due(self.every, step)

    def around_gradients(self, run: Any, step: int, compute: Callable[[], Tensor]) -> Tensor:
        if not self.is_recorded:
            return compute()
        self.start()
        with self.watching():
            return compute()

    @torch.no_grad()
    def gradients_ready(self, run: Any, step: int) -> None:
        if not self.is_recorded:
            return
        squares = self.sum_squares([bucket.grads.local for bucket in self.buckets])
        self.grad_squares = squares / run.scaler.scale.to(self.dtype).square()
        self.masters = [bucket.weights.master.clone() for bucket in self.buckets]

    @torch.no_grad()
    def weights_updated(self, run: Any, step: int, good: Tensor) -> None:
        if not self.is_recorded:
            return
        weight_squares = self.sum_squares(self.masters)
        for bucket, master in zip(self.buckets, self.masters):
            torch.sub(bucket.weights.master, master, out=master)
        update_squares = self.sum_squares(self.masters)
        self.masters = []
        parameters = torch.stack((self.sizes, self.grad_squares, weight_squares, update_squares))
        self.latest = self.over_ranks(parameters)
        self.start()  # frees what it holds

    # ---- parameters ----------------------------------------------------------------------------------------

    def sum_squares(self, flats: list[Tensor]) -> Tensor:
        """Return the sum of squares of each place over what this rank counts, without a host sync unless the
        numbers are in host memory. flats: for each bucket its owned shard."""
        total = torch.zeros_like(self.sizes)
        if self.owned:
            norms = [
                length_of(flats[part.bucket][part.elements], self.buckets[part.bucket].weights.local.dtype)
                for part in self.owned
            ]
            squares = torch.stack(norms).to(self.device, self.dtype).square()
            total.index_add_(0, self.row_of_part, squares)
        return total

    def over_ranks(self, parameters: Tensor) -> Tensor:
        """Sum over the ranks, and return the numbers of the step. parameters [4, places]: elements, squares
        of gradients, weights and updates."""
        sums = [parameters, self.outputs, self.router_sums, self.count_units()]
        flat = comm.all_reduce_sum(torch.cat([part.flatten() for part in sums]), self.mesh.world)
        parts = flat.split([part.numel() for part in sums])
        parameters, outputs, routers, units = (part.view_as(own) for part, own in zip(parts, sums))

        # of layers
        rms = (outputs[..., 0] / outputs[..., 1]).sqrt()  # [layers, outputs]
        of_layers = {f"{name}_rms": rms[:, index] for index, name in enumerate(OUTPUTS)}
        of_layers["dead_units"] = units[:, 0] / units[:, 1]
        of_layers["largest_logit"] = self.scores.over_ranks(self.mesh.world).amax(1)
        if self.num_experts:
            shares, counts = routers.unbind(1)
            mean = shares / shares.sum(-1, keepdim=True)
            of_layers["router_entropy"] = torch.special.entr(mean).sum(-1)
            of_layers["expert_share"] = counts.amax(-1) / counts.sum(-1)

        # in the order of statistics_of
        sizes, grads, weights, updates = parameters
        numbers = [grads.sqrt(), (grads / sizes).sqrt(), weights.sqrt(), (weights / sizes).sqrt()]
        numbers += [updates.sqrt(), (updates / weights).sqrt()]
        numbers += [of_layers[name][layers] for name, layers in self.layers_with.items() if name in of_layers]
        return torch.cat(numbers)

    def count_units(self) -> Tensor:
        """Return [layers, 2]: units that no token of any rank has opened, and all, where this rank counts
        them."""
        units = torch.zeros(self.num_layers, 2, dtype=self.dtype, device=self.device)
        for is_expert, group in ((False, self.mesh.dp_cp), (True, self.mesh.expert_dp)):
            opened = {site: flags for site, flags in self.opened.items() if site.is_expert == is_expert}
            if not opened:
                continue
            sizes = [len(flags) for flags in opened.values()]
            merged = comm.all_reduce_max(torch.cat(list(opened.values())), group)
            if group.index > 0:
                continue
            for site, flags in zip(opened, merged.split(sizes)):
                units[site.layer, 0] += (flags == 0).sum()
                units[site.layer, 1] += len(flags)
        return units

    # ---- watching ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward passes inside."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.scores.watching())
            for block in self.blocks:
                for index, module in enumerate((block, block.mixer, block.mlp)):
                    if module is not None:
                        note = partial(self.note_output, block.layer, index)
                        undo.callback(module.register_forward_hook(note).remove)
            for site in self.sites:
                if isinstance(site.module, Experts):
                    self.watch_experts(site, site.module, undo)
                else:
                    note = partial(self.note_units, site)
                    undo.callback(site.module.gate_up.register_forward_hook(note).remove)
            for stage in self.stages:
                for router in stage.routers():
                    replace_until(undo, router, "losses", partial(self.route, router, router.losses))
            yield

    @torch.no_grad()
    def note_output(self, layer: int, index: int, _: nn.Module, inputs: Any, output: Any) -> None:
        """Add the output of a block, mixer or MLP. tp ranks that hold the same tokens all add them, to both
        sums, whose ratio is then the same."""
        if not self.forward.is_on:
            return
        if index == OUTPUTS.index("block"):
            y = add_residual(*output[:2])
        else:
            y = output if isinstance(output, Tensor) else output[0]
        sums = self.outputs[layer, index]
        sums[0].add_(length_of(y, y.dtype).to(self.dtype).square())
        sums[1].add_(y.numel())

    def route(
        self, router: Router, losses: Callable[..., Any], sums: RouterSums, inputs: RouterInputs
    ) -> Any:
        """Compute the losses of a router, and look at its sums."""
        if self.forward.is_on:
            self.router_sums[router.layer] += torch.stack((sums.shares.sum(0), sums.counts.sum(0)))
        return losses(sums, inputs)

    @torch.no_grad()
    def note_units(self, site: UnitSite, _: nn.Module, inputs: Any, gate_up: Tensor) -> None:
        """Look at the inputs of an MLP's activation [b, s, 2f/tp], without a gate [b, s, f/tp]."""
        if self.forward.is_on:
            gate = gate_up.detach()[..., :site.module.down.weight.spec.shape[1]]
            self.open_units(site, ~(gate.flatten(0, -2).amax(0) <= 0))  # NaN opens a unit

    def watch_experts(self, site: UnitSite, experts: Experts, undo: contextlib.ExitStack) -> None:
        """Watch the activation of routed experts, whose rows are those of the latest call."""
        members: list[Tensor] = []

        @torch.no_grad()
        def begin(_: nn.Module, inputs: tuple[Any, Any]) -> None:
            if not self.forward.is_on:
                return
            rows, counts = inputs
            is_filled = (rows.probs.detach() != 0).to(accumulation_dtype(rows.x.dtype))
            members[:] = [members_of(counts, len(rows.probs), is_filled, is_filled)]  # [r, experts]

        def look(function: Callable[..., Tensor], gate_up: Tensor, *args: Any) -> Tensor:
            if self.forward.is_on:
                width = experts.down.spec.shape[1]
                positive = (gate_up.detach()[:, :width] > 0).to(members[0].dtype)  # [r, f/etp]
                self.open_units(site, (members[0].t() @ positive).flatten() > 0)
            return function(gate_up, *args)

        activation = experts.activation
        undo.callback(experts.register_forward_pre_hook(begin).remove)
        replace_until(undo, experts, "activation", watched(activation, look))

    def open_units(self, site: UnitSite, is_open: Tensor) -> None:
        """Mark the units [units] that a token has opened."""
        flags = is_open.to(torch.int32)
        earlier = self.opened.get(site)
        self.opened[site] = flags if earlier is None else torch.maximum(earlier, flags)


# ---- helpers -----------------------------------------------------------------------------------------------


def owned_parts(buckets: list[Bucket], rows: dict[ParameterPlace, int]) -> list[OwnedPart]:
    """Return what this rank owns and counts: all ranks together have each element once."""
    parts: list[OwnedPart] = []
    for index, bucket in enumerate(buckets):
        for slot in bucket.slots:
            if not slot.counted_in_norm or bucket.owners.index > 0:
                continue
            spec = slot.param.spec
            offset = slot.offset
            for box in spec.boxes:
                start, end = bucket.owned_part(offset, box.volume)
                offset += box.volume
                if start >= end:
                    continue
                found = OwnedPart(index, slice(start, end), rows[place_of(box.key, spec)])
                if parts and parts[-1].continues_in(found):
                    found = found._replace(elements=slice(parts.pop().elements.start, end))
                parts.append(found)
    return parts


def length_of(x: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Return the L2 norm of x, a scalar in fp32, or in fp64 if the run computes in fp64."""
    return torch.linalg.vector_norm(x, dtype=accumulation_dtype(compute_dtype))


def watched(activation: Activation, look: Callable[..., Tensor]) -> Activation:
    """Return the activation with both of its functions called through look(function, x, *args)."""
    weighted = activation.weighted
    return activation._replace(
        function=partial(look, activation.function),
        weighted=None if weighted is None else partial(look, weighted),
    )
