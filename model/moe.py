"""A mixture of experts in the place of a block's MLP (arXiv 2101.03961, 2401.06066): router, routed and
shared experts."""
from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn

from config import Config, expert_ffn_size
from kernels.fp8_grouped import scaled_grouped_linear
from kernels.grad import accumulation_dtype
from kernels.grouped_gemm import grouped_linear
from kernels.linear import linear
from kernels.swiglu import weighted_swiglu
from model.init import residual_std
from model.mlp import MLP
from model.precision import fp8_of_layer
from model.router import Router, RouterInputs, expert_count
from parallel.cost import Cost, Exchange, MatrixProduct, MemoryTraffic, SavedTensor, Workload, total
from parallel.expert.dispatch import Combine, Dispatch, dispatch_cost, plan_dispatch
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, ShardedParameter, parameter
from parallel.tensor.layers import partial_over_tp
from parallel.tensor.regions import gather_from_tp, outside_region, scatter_to_tp
from parallel.topology.mesh import Mesh


class MoE(nn.Module):
    """x [b, s, d] (sp: [b, s/tp, d]) -> the same, and the router's stats (None outside of training)."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        model = cfg.model
        self.sp = cfg.parallel.sp
        self.tp = mesh.tp
        self.has_capacity = model.capacity is not None
        self.pad_to_capacity = model.pad
        self.token_shards = mesh.tp_cp.size  # of a sequence
        self.router = Router(cfg, mesh, layer)
        self.experts = Experts(cfg, mesh, layer)
        self.shared = None
        if model.shared_experts:
            width = model.shared_experts * expert_ffn_size(model)
            self.shared = MLP(cfg, mesh, layer, "mlp.shared", width)
        self.gate = shared_expert_gate(cfg, layer) if model.shared_gate else None

    def forward(self, x: Tensor, training: RouterInputs | None) -> tuple[Tensor, Tensor | None]:
        own = x if self.sp else scatter_to_tp(x, self.tp)  # a tp rank routes its own tokens
        index, probs, stats = self.router(own, training)
        capacity = None
        if self.pad_to_capacity and training is not None:
            b, s, _ = own.shape
            capacity_of_sequence = self.router.expert_capacity(s * self.token_shards)
            capacity = b * min(capacity_of_sequence, s)  # a token takes one row of an expert
        may_drop = self.has_capacity and training is not None

        y, shared_y = self.experts(
            own,
            index,
            probs,
            may_drop=may_drop,
            capacity=capacity,
            meanwhile=self.shared_experts_in_two_parts(x),
        )
        if not self.sp:
            y = gather_from_tp(y, self.tp, x.shape[1])
        return y if shared_y is None else y + shared_y, stats

    def shared_experts_in_two_parts(self, x: Tensor) -> Iterator[Tensor | None]:
        """The computation of the shared experts in two parts; the second yields their output, or None if
        there are none.

        Autograd runs the backward in the reverse order of the forward. So the gradients of the second part
        run during its exchange back, those of the first during its exchange to the experts.
        """
        if self.shared is None:
            yield from (None, None)
            return
        activated = self.shared.hidden_activation(x)
        yield None
        y: Tensor = self.shared.down(activated)
        if self.gate is not None:
            wide_x = x.to(accumulation_dtype(x.dtype))
            gate = linear(wide_x, self.gate).sigmoid()
            y = y * gate.to(y.dtype)
        yield y

    # ---- what it costs -------------------------------------------------------------------------------------

    def cost(self, work: Workload) -> Cost:
        """Where every expert gets its fair share of the rows."""
        tokens = work.tokens // self.tp.size  # that this rank routes
        is_widened = work.compute_bytes != work.accumulation_bytes
        is_scattered = self.tp.size > 1 and not self.sp
        return total((
            self.router.cost(work, tokens, copies_input=is_widened or is_scattered),
            self.experts.cost(work, tokens),
            self.shared_experts_cost(work),
            self.gate_cost(work),
            Cost(exchanges=() if self.sp else self.scatter_exchanges(work)),
        ))

    def shared_experts_cost(self, work: Workload) -> Cost:
        """Their products run during the exchanges of rows. Without them, the input is kept for the router."""
        if self.shared is None:
            return Cost(saved=(SavedTensor(self.hidden_bytes(work), part="norm"),))
        shared = self.shared.cost(work).as_inner()
        return shared.beside(self.experts.group.name)

    def hidden_bytes(self, work: Workload) -> int:
        """Of the hidden states of this rank's tokens."""
        hidden = self.router.weight.spec.shape[1]
        return work.tokens * hidden * work.compute_bytes

    def gate_cost(self, work: Workload) -> Cost:
        """It keeps its input in the dtype of sums, and the output of the shared experts."""
        if self.gate is None:
            return Cost()
        tokens = outside_region(work.tokens, self.tp, self.sp)
        outputs, hidden = self.gate.spec.shape
        output_bytes = hidden * work.compute_bytes
        input_bytes = 0  # it is the shared experts' input
        if work.compute_bytes != work.accumulation_bytes:
            input_bytes = hidden * work.accumulation_bytes
        token_bytes = output_bytes + input_bytes + work.accumulation_bytes
        return Cost(
            products=(MatrixProduct(tokens, hidden, outputs),),
            saved=(SavedTensor(tokens * token_bytes),),
        )

    def scatter_exchanges(self, work: Workload) -> tuple[Exchange, ...]:
        """Of scatter_to_tp's backward, and of gather_from_tp."""
        nbytes = self.hidden_bytes(work)
        return (
            Exchange("tp", "all_gather", nbytes, phase="output"),
            Exchange("tp", "all_gather", nbytes, phase="backward"),
        )


def shared_expert_gate(cfg: Config, layer: int) -> ShardedParameter:
    """A sigmoid gate on the output of the shared experts (Qwen2-MoE): [1, d]."""
    box = Box.whole(f"layers.{layer}.mlp.shared_gate.weight", (1, cfg.model.hidden))
    partial_over = partial_over_tp(cfg.parallel.sp)
    spec = ParameterSpec((box,), "gate", cfg.model.init_std, partial_over=partial_over)
    return parameter(spec)


def expert_matrices(boxes: list[Box], std: float) -> ShardedParameter:
    """One matrix of each expert of this rank, stacked."""
    return parameter(ParameterSpec(tuple(boxes), "hidden", std, is_expert=True))


class Experts(nn.Module):
    """The routed experts that this rank has: gate and up as one grouped matrix product, then down."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        model = cfg.model
        hidden = model.hidden
        width = expert_ffn_size(model)
        self.group = mesh.ep_etp
        self.etp = cfg.parallel.etp
        self.num_experts = expert_count(model)
        self.top_k = model.top_k

        # which experts, and which part of their inner width
        num_here = self.num_experts // cfg.parallel.ep
        self.num_here = num_here
        first = self.group.index // self.etp * num_here
        local_width = width // self.etp
        start = self.group.index % self.etp * local_width
        keys = [f"layers.{layer}.mlp.experts.{expert}" for expert in range(first, first + num_here)]
        gate_up: list[Box] = []
        down: list[Box] = []
        for key in keys:
            for name in ("gate", "up"):
                gate_up.append(Box(
                    f"{key}.{name}.weight",
                    shape=(width, hidden),
                    start=(start, 0),
                    size=(local_width, hidden),
                ))
            down.append(Box(
                f"{key}.down.weight",
                shape=(hidden, width),
                start=(0, start),
                size=(hidden, local_width),
            ))
        self.gate_up = expert_matrices(gate_up, model.init_std)
        self.down = expert_matrices(down, residual_std(model))

        fp8 = fp8_of_layer(cfg, layer)
        self.in_fp8 = fp8 is not None
        self.grouped_linear = grouped_linear
        if fp8 is not None:
            recipe, side = fp8
            self.grouped_linear = partial(scaled_grouped_linear, recipe=recipe, side=side)

    def forward(
        self,
        x: Tensor,
        index: Tensor,
        probs: Tensor,
        *,
        may_drop: bool,
        capacity: int | None,
        meanwhile: Iterator[Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """x [b, s, d], index and probs [b, s, k] -> [b, s, d], and what the second part of `meanwhile`
        yields.

        meanwhile: computation in two parts; they run during the exchange to the experts, and during the one
        back. may_drop, capacity: see plan_dispatch.
        """
        index, probs = index.flatten(0, 1), probs.flatten(0, 1)  # [t, k]
        plan = plan_dispatch(index, self.num_experts, self.group, self.etp, may_drop, capacity)
        dispatch = Dispatch(x.flatten(0, 1), probs, plan)
        next(meanwhile)
        rows, row_probs = dispatch.rows()

        gate_up = self.grouped_linear(rows, self.gate_up, plan.rows_per_expert)
        activated = weighted_swiglu(gate_up, row_probs)
        rows = self.grouped_linear(activated, self.down, plan.rows_per_expert)
        combine = Combine(rows, plan)
        shared_y = next(meanwhile)
        return combine.tokens().view(x.shape), shared_y

    def cost(self, work: Workload, tokens: int) -> Cost:
        """tokens: that this rank routes. It keeps the rows, gate and up, the activation's output, and the
        probabilities."""
        rows = tokens * self.top_k * self.etp
        gate_up_width = self.gate_up.spec.shape[0] // self.num_here
        hidden = self.gate_up.spec.shape[1]
        width = self.down.spec.shape[1]
        exchanged = dispatch_cost(work, self.group, tokens=tokens, hidden=hidden,
                                  num_experts=self.num_experts, top_k=self.top_k, etp=self.etp)

        activation_bytes = rows * (gate_up_width + width) * work.compute_bytes
        row_bytes = rows * hidden * work.compute_bytes
        probability_bytes = rows * work.accumulation_bytes
        computed = Cost(
            products=(
                MatrixProduct(rows, hidden, gate_up_width, count=self.num_here, fp8=self.in_fp8),
                MatrixProduct(rows, width, hidden, count=self.num_here, fp8=self.in_fp8),
            ),
            traffic=(MemoryTraffic(activation_bytes),),
            saved=(SavedTensor(row_bytes + activation_bytes + probability_bytes),),
        )
        return exchanged + computed
