"""A mixture of experts instead of a block's MLP (arXiv 2101.03961, 2401.06066): router, routed and shared
experts."""
from functools import partial

from torch import Tensor, nn

from config import Config
from kernels.activations import ACTIVATIONS, get_activation
from kernels.expert_bias import add_expert_bias, members_of
from kernels.fp8_grouped import scaled_grouped_linear
from kernels.grad import LateWeightGrads, accumulation_dtype
from kernels.grouped_gemm import grouped_linear
from kernels.linear import linear
from kernels.permute import RowOrder, permute, unpermute
from model.init import residual_std
from model.mlp import MLP
from model.precision import fp8_of_layer
from model.router import ROUTER_STATS, Router, RouterInputs
from parallel.expert.bounded import plan_bounded_dispatch
from parallel.expert.dispatch import (
    Combine,
    Dispatch,
    DispatchPlan,
    ExpertRows,
    RowExchange,
    plan_dispatch,
)
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, ShardedParameter, parameter
from parallel.tensor.layers import partial_over_tp
from parallel.tensor.regions import gather_from_tp, scatter_to_tp
from parallel.topology.mesh import Mesh


class MoE(nn.Module):
    """x [b, s/cp, d] (sp: [b, s/cp/tp, d]) -> the same, and the router's statistics.

    The statistics [E + len(ROUTER_STATS)] (model/router.py) are None outside of training.
    """

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        experts = cfg.model.mlp
        self.sp = cfg.parallel.sp
        self.tp = mesh.tp
        self.ep_etp = mesh.ep_etp
        self.etp = cfg.parallel.etp
        self.num_chunks = cfg.parallel.ep_chunks if mesh.ep_etp.size > 1 else 1
        self.num_experts = experts.experts
        self.has_capacity = experts.capacity is not None
        self.pad_to_capacity = self.has_capacity and experts.capacity.pad
        self.token_shards = mesh.tp_cp.size  # per sequence
        self.row_bound = cfg.parallel.ep_bound if mesh.ep_etp.size > 1 else None
        self.is_bounded = self.row_bound is not None  # False while a step is computed again
        self.row_exchange = RowExchange
        if cfg.parallel.compress_tokens == "fp8" and mesh.ep_etp.size > 1:
            from parallel.expert.coded import CodedRowExchange

            self.row_exchange = CodedRowExchange

        # construction order = order in the bucket
        self.shared_gate = SharedExpertGate(cfg, layer) if experts.shared and experts.shared.gate else None
        self.router = Router(cfg, mesh, layer)
        self.experts = Experts(cfg, mesh, layer)
        self.shared_experts = SharedExperts(cfg, mesh, layer) if experts.shared else None

    def forward(self, x: Tensor, router_inputs: RouterInputs | None) -> tuple[Tensor, Tensor | None]:
        # route: each tp rank routes its own tokens
        is_scattered = self.tp.size > 1 and not self.sp
        routed = scatter_to_tp(x, self.tp) if is_scattered else x  # [b, s/cp/tp, d]
        index, probs, stats = self.router(routed, router_inputs)

        # dispatch, overlapped with the shared experts up to their last product
        probs = probs.flatten(0, 1)  # [t, k]
        plan = self.plan_dispatch(index, router_inputs is not None)
        if stats is not None and plan.num_over is not None:
            stats[self.num_experts + ROUTER_STATS.index("dropped")] += plan.num_over
        dispatch = Dispatch(routed.flatten(0, 1), probs, plan, self.experts.late_grads, self.row_exchange)
        shared_activation = None
        if self.shared_experts is not None:
            shared_activation = self.shared_experts.hidden_activation(x)

        # experts: the next chunk arrives and the last one returns while one is computed
        combine = Combine(plan, dispatch.late_grads, self.row_exchange)
        for chunk, rows in zip(plan.chunks, dispatch.chunks()):
            combine.send(self.experts(rows, chunk.rows_per_expert))

        # combine, overlapped with the last product of the shared experts
        shared_output = None
        if self.shared_experts is not None and shared_activation is not None:
            shared_output = self.shared_experts.down(shared_activation)
            if self.shared_gate is not None:
                shared_output = self.shared_gate(shared_output, x)
        y = combine.tokens().view(routed.shape)
        if is_scattered:
            y = gather_from_tp(y, self.tp, x.shape[1])
        return y if shared_output is None else y + shared_output, stats

    def plan_dispatch(self, index: Tensor, is_training: bool) -> DispatchPlan:
        """Plan which rows go to which rank. index [b, s/cp/tp, k] holds the experts of the routed tokens.

        Only training drops tokens and pads to the capacity, so that each rank sends every expert equally many
        rows; and only training bounds the rows between two ranks.
        """
        if self.row_bound is not None and self.is_bounded and is_training:
            return plan_bounded_dispatch(
                index.flatten(0, 1),
                self.num_experts,
                self.ep_etp,
                self.etp,
                bound=self.row_bound,
                num_chunks=self.num_chunks,
            )
        capacity = None
        if self.pad_to_capacity and is_training:
            b, s, _ = index.shape
            capacity_of_sequence = self.router.expert_capacity(s * self.token_shards)
            capacity = b * min(capacity_of_sequence, s)  # a token takes at most one row of an expert
        return plan_dispatch(
            index.flatten(0, 1),
            num_experts=self.num_experts,
            group=self.ep_etp,
            etp=self.etp,
            may_drop=self.has_capacity and is_training,
            capacity=capacity,
            num_chunks=self.num_chunks,
        )


class SharedExperts(MLP):
    """The experts that process every token (DeepSeekMoE, arXiv 2401.06066, section 3.2), as one MLP of their
    total width.

    Its halves, hidden_activation and down, overlap the two exchanges of the routed experts. Autograd runs the
    backward in reverse, so the gradients of `down` overlap the backward of the combine, and those of
    hidden_activation overlap the backward of the dispatch.
    """

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__(cfg, mesh, layer, cfg.model.mlp.shared)


class SharedExpertGate(nn.Module):
    """y -> y * sigmoid(x w), one factor per token (Qwen2-MoE); y is the shared experts' output for x.

    Both [b, s/cp, d] (sp: [b, s/cp/tp, d]).
    """

    def __init__(self, cfg: Config, layer: int) -> None:
        super().__init__()
        box = Box.whole(f"layers.{layer}.mlp.shared_gate.weight", (1, cfg.model.hidden))
        partial_over = partial_over_tp(cfg.parallel.sp)
        self.weight = parameter(ParameterSpec((box,), "gate", cfg.model.init_std, partial_over=partial_over))

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        x = x.to(accumulation_dtype(x.dtype))
        gate = linear(x, self.weight).sigmoid()  # [b, s/cp, 1]
        return y * gate.to(y.dtype)


class Experts(nn.Module):
    """This rank's routed experts: gate and up (or only up, see kernels/activations.py) as one grouped matrix
    product, then down.

    Holds E / ep experts, sharded by etp along the inner width. With model.mlp.bias, an etp rank has the gate
    and up biases of its part of the width, and 1 / etp of the d down biases, which are added only once.
    """

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        model = cfg.model
        gate_up, down = expert_boxes(cfg, mesh, layer)
        self.gate_up = expert_matrices(gate_up, model.init_std)
        self.down = expert_matrices(down, residual_std(model))
        parameters = [self.gate_up, self.down]
        self.gate_up_bias: ShardedParameter | None = None
        self.down_bias: ShardedParameter | None = None
        if model.mlp.bias:
            self.gate_up_bias = expert_biases([bias_box(box) for box in gate_up])
            self.down_bias = expert_biases(down_bias_boxes(down, cfg, mesh))
            parameters += [self.gate_up_bias, self.down_bias]
        self.first_biased = self.down_bias.spec.boxes[0].start[0] if self.down_bias is not None else 0

        # computed in the backward while the rows' gradients are exchanged (parallel/expert)
        self.late_grads = LateWeightGrads()
        for param in parameters:
            param.late_grads = self.late_grads

        self.activation = get_activation(model.mlp.activation, model.mlp.limit)
        self.weighs_input = model.mlp.router.weighs == "input"
        fp8 = fp8_of_layer(cfg, layer)
        self.product = grouped_linear
        if fp8 is not None:
            self.product = partial(scaled_grouped_rows, recipe=fp8[0], side=fp8[1])

    def forward(self, rows: ExpertRows, rows_per_expert: list[int] | Tensor) -> Tensor:
        """Return rows like rows.x: for each, the sum of its experts' outputs weighted by their
        probabilities."""
        x, order, probs = rows
        gate_up = self.product(x, self.gate_up, rows_per_expert, gather=order)  # [r, 2f/etp]
        weight: Tensor | None = probs  # of an expert's output
        if self.weighs_input:
            gate_up = gate_up * probs[:, None].to(gate_up.dtype)
            weight = None
        if self.gate_up_bias is not None:
            members = members_of(rows_per_expert, len(probs), gate_up)
            gate_up = add_expert_bias(gate_up, self.gate_up_bias, members)

        activation = self.activation
        activated = activation.function(gate_up) if weight is None else activation.weighted(gate_up, weight)
        y = self.product(activated, self.down, rows_per_expert, combine=order)  # of activated [r, f/etp]
        if self.down_bias is not None:
            members = members_of(rows_per_expert, len(probs), y, weight, order)
            y = add_expert_bias(y, self.down_bias, members, self.first_biased)
        return y


def scaled_grouped_rows(
    x: Tensor,
    weight: Tensor,
    counts: list[int] | Tensor,
    *,
    recipe: str,
    side: int,
    gather: RowOrder | None = None,
    combine: RowOrder | None = None,
) -> Tensor:
    """Like grouped_linear, for a product that needs rows in expert order: copies them in and back."""
    if gather is not None:
        x = permute(x, *gather)
    y = scaled_grouped_linear(x, weight, counts, recipe, side)
    return y if combine is None else unpermute(y, *combine)


def expert_boxes(cfg: Config, mesh: Mesh, layer: int) -> tuple[list[Box], list[Box]]:
    """Return (gate and up, down) boxes: where each matrix of this rank's experts lies in its global
    matrix."""
    model = cfg.model
    etp = cfg.parallel.etp
    width = model.mlp.width
    local_width = width // etp
    start = mesh.ep_etp.index % etp * local_width

    num_local = model.mlp.experts // cfg.parallel.ep
    first = mesh.ep_etp.index // etp * num_local
    names = ("gate", "up") if ACTIVATIONS[model.mlp.activation].is_gated else ("up",)
    gate_up: list[Box] = []
    down: list[Box] = []
    for expert in range(first, first + num_local):
        key = f"layers.{layer}.mlp.experts.{expert}"
        for name in names:
            gate_up.append(Box(
                f"{key}.{name}.weight",
                shape=(width, model.hidden),
                start=(start, 0),
                size=(local_width, model.hidden),
            ))
        down.append(Box(
            f"{key}.down.weight",
            shape=(model.hidden, width),
            start=(0, start),
            size=(model.hidden, local_width),
        ))
    return gate_up, down


def expert_matrices(boxes: list[Box], std: float) -> ShardedParameter:
    """Create one matrix per local expert, stacked along dim 0."""
    return parameter(ParameterSpec(tuple(boxes), "hidden", std, is_expert=True))


def expert_biases(boxes: list[Box]) -> ShardedParameter:
    """Create the biases of the local experts, concatenated."""
    return parameter(ParameterSpec(tuple(boxes), "bias", is_expert=True))


def bias_box(weight: Box) -> Box:
    """Return the box of the biases for the outputs of one matrix that this rank holds."""
    key = weight.key.removesuffix(".weight") + ".bias"
    return Box(key, weight.shape[:1], weight.start[:1], weight.size[:1])


def down_bias_boxes(down: list[Box], cfg: Config, mesh: Mesh) -> list[Box]:
    """Return the boxes of the down biases. Each etp rank has a partial sum of all d outputs and adds d /
    etp biases."""
    etp = cfg.parallel.etp
    first = mesh.ep_etp.index % etp
    size = cfg.model.hidden // etp
    return [bias_box(box).rows(first * size, (first + 1) * size) for box in down]
