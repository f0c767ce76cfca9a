"""The router of a mixture of experts: expert choice, weights, and balance losses.

Losses and statistics cover the tokens whose target is counted, like the main loss, and are divided by their
global number, so microbatches, accumulation and layout do not affect them. With p_i the scores of a token
(for sigmoid: divided by their sum) and sums over the T counted tokens of a step:

    load balance   weight / T * sum p_i f_i     f_i: E / top_k times expert i's share of the choices
    z              z_loss / T * sum logsumexp(logits)^2     (arXiv 2202.08906)

f is a constant for the gradient. `aux.over` selects what it is computed over:

    sequence   the token's own sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17-20)
    global     the global batch (arXiv 2501.11873). Its counts are known only after the step's last forward,
               so the previous step's counts are used, and 1 in the first step: exact, and the same in every
               layout
    micro      the microbatch, as in Switch Transformer and Hugging Face. It depends on how tokens are
               grouped, so scripts.verify refuses it

A balanced layer adds aux.weight to the loss, regardless of E and top_k. (Hugging Face's Mixtral adds top_k
times that, over all layers at once.) The gradients are added where the score gradients are computed
(kernels/router.py), on the stage that has the layer, and the losses are reported separately.

Capacity counts all tokens of a sequence, with or without a target. It applies only in training: evaluation
and generation, where later tokens are not known yet, drop nothing.
"""
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from config import ChannelMixer, Config, ModelConfig, divisors, layer_model, layer_models
from config.rule import Rule, nearby_multiples
from config.tree import BelowOne, Count, NotNegative, Positive, value_at, with_values
from kernels.cross_entropy import IGNORE_INDEX
from kernels.grad import accumulation_dtype
from kernels.router import (
    ROUTER_STATS,
    RouterChoice,
    RouterLosses,
    RouterSums,
    RoutingRule,
    choose_experts,
    routed_weights,
    router_logits,
    router_statistics,
)
from model.mlp import ExpertActivationName, SharedExpertsConfig, limit_rule
from parallel.context import zigzag
from parallel.rng import DropoutRng
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, ShardedParameter, parameter
from parallel.tensor.layers import replicated_vector
from parallel.tensor.regions import all_gather_sequence, local_chunk
from parallel.topology.mesh import Mesh
from parallel.wire import comm

# ---- keys --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BalanceLossConfig:
    """Load-balance loss of a router."""
    weight: NotNegative  # what a balanced layer adds to the loss; in Hugging Face's Mixtral a balanced layer
    #   adds top_k times its coefficient
    over: Literal["sequence", "global", "micro"] = "sequence"  # which load it balances: that of each
    #   sequence; that of the step, measured in the step before (arXiv 2501.11873); that of a micro-batch
    #   (arXiv 2101.03961), the only one that depends on micro_batch and layout


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a router chooses experts and weights them."""
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of experts: a softmax over all of them, or a sigmoid
    #   for each (DeepSeek-V3, arXiv 2412.19437)
    renorm: bool = True  # divide the scores of the chosen experts by their sum
    groups: Count = 1  # number of groups of experts; the experts of a token come from its best groups
    group_top_k: Count = 1  # number of groups that the experts of a token come from; the score of a group is
    #   the score of its best expert (softmax, arXiv 2405.04434) or the sum of its two best (sigmoid,
    #   arXiv 2412.19437)
    scale: Positive = 1.0  # factor of the weights of the chosen experts
    weighs: Literal["output", "input"] = "output"  # what the score of a routed expert multiplies: its output,
    #   or its input (Llama 4)
    logit_bias: bool = False  # a learned bias of the logits (gpt-oss)
    bias_rate: NotNegative | None = None  # a bias that affects only the choice of experts moves by this
    #   against the load after each step (aux-loss-free, arXiv 2408.15664); none: no such bias
    jitter: BelowOne = 0.0  # training: multiply the router's input by uniform(1 - jitter, 1 + jitter)
    #   (arXiv 2101.03961)
    aux: BalanceLossConfig | None = None  # load-balance loss
    z_loss: NotNegative = 0.0  # factor of the mean squared logsumexp of the logits (arXiv 2202.08906)


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """Expert capacity in training."""
    factor: Positive  # an expert takes at most this times its fair share of the tokens of a sequence
    drop: Literal["probability", "position"] = "probability"  # which tokens an expert over capacity drops:
    #   the least likely ones, or the last ones
    pad: bool = False  # each rank pads what it sends to every expert, so that no tensor shape depends on the
    #   routing


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ChannelMixer):
    """A mixture of experts instead of an MLP (arXiv 2101.03961): a router sends each token to some of
    them."""
    kind: Literal["experts"] = "experts"
    experts: Count = 8  # number of routed experts
    top_k: Count = 2  # number of routed experts that process a token
    width: Count = 352  # inner width of one expert
    activation: ExpertActivationName = "swiglu"  # of each expert, as that of an MLP
    bias: bool = False  # biases of the linear layers of each expert (gpt-oss)
    limit: Positive | None = None  # of each routed expert, as that of an MLP
    shared: SharedExpertsConfig | None = None  # experts that process every token
    router: RouterConfig = RouterConfig()
    capacity: CapacityConfig | None = None  # training: tokens beyond it are dropped; none: none are dropped

    @property
    def shared_width(self) -> int:
        """Return the total inner width of the shared experts, or 0 if there are none."""
        return self.shared.experts * self.width if self.shared else 0

    def rules(self, cfg: Config) -> Iterator[Rule]:
        model, train, parallel = cfg.model, cfg.train, cfg.parallel
        yield limit_rule("limit", self.limit, self.activation)
        yield limit_rule("shared.limit", self.shared and self.shared.limit, self.activation)
        factor = self.capacity.factor if self.capacity else math.inf
        yield Rule(
            factor >= 1 / self.experts,
            f"model.mlp.capacity.factor: {factor} is below 1/experts = {1 / self.experts:g}, and most tokens "
            "would be dropped; use 1 for a fair share, or model.mlp.capacity none to drop no token")

        # layout
        yield Rule(
            self.experts % parallel.ep == 0,
            f"parallel.ep: {parallel.ep} does not divide model.mlp.experts={self.experts}",
            "parallel.ep", divisors(self.experts))
        yield Rule(
            self.width % parallel.etp == 0,
            f"parallel.etp: {parallel.etp} does not divide model.mlp.width={self.width}",
            "parallel.etp", divisors(self.width))
        yield Rule(
            model.hidden % parallel.etp == 0 or not self.bias,
            f"parallel.etp: {parallel.etp} does not divide model.hidden={model.hidden}, over which the "
            "biases of experts are divided (model.mlp.bias)",
            "parallel.etp", divisors(model.hidden))
        yield Rule(
            self.shared_width % parallel.tp == 0,
            f"parallel.tp: {parallel.tp} does not divide the shared experts' width {self.shared_width}",
            "parallel.tp", divisors(self.shared_width))
        shards = parallel.cp * parallel.tp
        yield Rule(
            train.seq_len % shards == 0,
            f"train.seq_len: {train.seq_len} is not a multiple of cp*tp = {parallel.cp}*{parallel.tp}, "
            "over which the tokens of a mixture layer are sharded",
            "train.seq_len", nearby_multiples(train.seq_len, shards))
        yield from self.router_rules()

    def router_rules(self) -> Iterator[Rule]:
        """Check how many experts a token may choose, and from how many groups."""
        experts, groups, top_groups = self.experts, self.router.groups, self.router.group_top_k
        yield Rule(
            self.top_k <= experts,
            f"model.mlp.top_k: {self.top_k} is more than model.mlp.experts={experts}",
            "model.mlp.top_k", (experts,))
        yield Rule(
            experts % groups == 0,
            f"model.mlp.router.groups: {groups} does not divide model.mlp.experts={experts}",
            "model.mlp.router.groups", divisors(experts))
        yield Rule(
            top_groups <= groups,
            f"model.mlp.router.group_top_k: {top_groups} is more than model.mlp.router.groups={groups}",
            "model.mlp.router.group_top_k", (groups,))
        candidates = experts // groups * top_groups
        yield Rule(
            self.top_k <= candidates,
            f"model.mlp.top_k: {self.top_k} is more than the {candidates} experts of "
            f"model.mlp.router.group_top_k={top_groups} groups",
            "model.mlp.top_k model.mlp.router.group_top_k", range(1, experts + 1))
        yield Rule(
            self.router.scores == "softmax" or groups == 1 or experts // groups > 1,
            f"model.mlp.router.groups: {groups} groups have one expert each, and a sigmoid router adds up "
            "the scores of the best two of a group",
            "model.mlp.router.groups", divisors(experts))


# ---- derived settings --------------------------------------------------------------------------------------

def has_experts(model: ModelConfig, layer: int) -> bool:
    """Return whether the layer with this index has experts instead of an MLP."""
    return isinstance(layer_model(model, layer).mlp, ExpertsConfig)


@lru_cache(maxsize=1 << 12)
def mixture(model: ModelConfig) -> ExpertsConfig | None:
    """Return the experts of the first layer that has any, or None for a dense model.

    Other kinds of layers differ from it only in what computes a single expert (EXPERTS_ALIKE in
    config/reading/rules.py).
    """
    mlps = (like.mlp for like in layer_models(model).values())
    return next((mlp for mlp in mlps if isinstance(mlp, ExpertsConfig)), None)


def with_mlps(model: ModelConfig, change: Callable[[ChannelMixer], ChannelMixer]) -> ModelConfig:
    """Return the model with `change` applied to its MLPs and experts, including those of its block kinds."""
    def changed(path: str, value: Any) -> Any:
        part, _, key = path.partition(".")
        if part != "mlp":
            return value
        if not key:
            return change(value)
        return value_at(change(with_values(model.mlp, {key: value})), key)

    blocks = tuple(
        replace(variant, changes=tuple((path, changed(path, value)) for path, value in variant.changes))
        for variant in model.blocks
    )
    return replace(model, mlp=change(model.mlp), blocks=blocks)


def routing_rule(experts: ExpertsConfig) -> RoutingRule:
    """Return the rule by which routers of these experts choose."""
    router = experts.router
    return RoutingRule(
        experts.top_k,
        sigmoid=router.scores == "sigmoid",
        groups=router.groups,
        top_groups=router.group_top_k,
        renorm=router.renorm,
        scale=router.scale,
    )


# ---- routing -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class RouterInputs:
    """Router inputs in training.

    `counted` [b, s/cp/tp] says for each of this rank's tokens whether its target counts. `scale` is the loss
    scale divided by the global number of counted tokens. `jitter_rng` is None without jitter. `chosen`
    {layer: int64 [b, s/cp/tp, k]} holds the experts of these tokens if they are given, not chosen
    (train.replay_routing).
    """
    counted: Tensor
    scale: Tensor | float
    jitter_rng: DropoutRng | None
    chosen: Mapping[int, Tensor] | None = None


def make_router_inputs(cfg: Config, mesh: Mesh, targets: Tensor, scale: Tensor | float,
                  dropout_rng: DropoutRng | None) -> RouterInputs:
    """Build the router inputs from targets [b, s/cp]. `dropout_rng` covers this rank's tokens, sharded
    over tp under sp."""
    jitter_rng = dropout_rng if mixture(cfg.model).router.jitter else None
    if jitter_rng is not None and not cfg.parallel.sp:
        positions = local_chunk(jitter_rng.positions[None], mesh.tp)[0]
        jitter_rng = replace(jitter_rng, positions=positions)
    own_targets = local_chunk(targets, mesh.tp) if mesh.tp.size > 1 else targets
    return RouterInputs(own_targets != IGNORE_INDEX, scale, jitter_rng)


class Router(nn.Module):
    """x [b, s/cp/tp, d] -> the experts of these tokens and their weights, in fp32 or better.

    Besides its weight, and the logit bias that it learns with logit_bias, it keeps in fp64:

        bias [E]                        added to the scores only for the choice (arXiv 2408.15664)
        load [E]                        f of the previous step, for aux.over global
        stats [E + len(ROUTER_STATS)]   this rank's statistics of the step so far
    """

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        experts = cfg.model.mlp
        router = experts.router
        self.router = router
        self.top_k = experts.top_k
        self.capacity = experts.capacity
        self.layer = layer
        self.mesh = mesh
        self.key = f"layers.{layer}.mlp.router"
        self.num_experts = experts.experts
        self.rule = routing_rule(experts)

        # every tp rank routes its own tokens, with and without sp
        box = Box.whole(f"{self.key}.weight", (self.num_experts, cfg.model.hidden))
        spec = ParameterSpec((box,), "router", cfg.model.init_std, partial_over=("tp",))
        self.weight = parameter(spec)
        self.logit_bias: ShardedParameter | None = None
        if router.logit_bias:
            key = f"{self.key}.logit_bias"
            self.logit_bias = replicated_vector(key, self.num_experts, "bias", is_partial=True)
        self.bias: Tensor | None = None
        if router.bias_rate is not None:
            self.bias = torch.zeros(self.num_experts, dtype=torch.float64)
        self.load: Tensor | None = None
        if router.aux and router.aux.over == "global":
            self.load = torch.ones(self.num_experts, dtype=torch.float64)
        self.stats = torch.zeros(self.num_experts + len(ROUTER_STATS), dtype=torch.float64)

    def forward(self, x: Tensor, router_inputs: RouterInputs | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (index, probs, stats).

        index int64 [b, s, k] holds the experts of each token, -1 if dropped. probs [b, s, k] multiplies their
        outputs. stats [E + len(ROUTER_STATS)] covers this microbatch; it is None outside of training.
        """
        if router_inputs is not None and router_inputs.jitter_rng is not None:
            x = x.to(accumulation_dtype(x.dtype))
            jitter = self.router.jitter
            factors = router_inputs.jitter_rng.uniform(-1 - self.layer, x.shape[-1], jitter, x.dtype)
            x = x * factors

        # expert choice
        logits = router_logits(x, self.weight, self.logit_bias)  # [b, s, E]
        choice = self.choose(logits, router_inputs)
        if choice.sums is None or router_inputs is None:
            probs = routed_weights(x, self.weight, logits, choice, self.rule, logit_bias=self.logit_bias)
            return choice.index, probs, None

        # weights and losses
        losses, stats = self.losses(choice.sums, router_inputs)
        probs = routed_weights(
            x, self.weight, logits, choice, self.rule, losses, logit_bias=self.logit_bias)
        index = choice.index

        # drop tokens over capacity
        if self.capacity is not None:
            is_kept = self.apply_capacity(index, probs.detach())
            is_dropped = ~is_kept & router_inputs.counted[..., None]
            stats[self.num_experts + ROUTER_STATS.index("dropped")] = is_dropped.sum()
            index = index.masked_fill(~is_kept, -1)
            probs = probs * is_kept
        return index, probs, stats

    def choose(self, logits: Tensor, router_inputs: RouterInputs | None) -> RouterChoice:
        """Choose the experts of tokens with these logits [b, s, E], or take those that are given."""
        counted = chosen = None
        if router_inputs is not None:
            counted = router_inputs.counted
            chosen = None if router_inputs.chosen is None else router_inputs.chosen[self.layer]
        return choose_experts(logits, self.rule, self.bias, counted, chosen)

    # ---- losses --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def losses(self, sums: RouterSums, router_inputs: RouterInputs) -> tuple[RouterLosses, Tensor]:
        """Return this rank's loss terms of the router and its stats [E + len(ROUTER_STATS)]."""
        aux_weight = self.router.aux.weight if self.router.aux else 0.0
        z_loss = self.router.z_loss
        scale = router_inputs.scale
        if not isinstance(scale, Tensor):  # filled on the device: a copy would block the host
            scale = sums.shares.new_full((), scale)

        load: Tensor | None = None
        counts: Tensor | None = None
        if aux_weight and self.load is not None:
            load = self.load.to(sums.shares.dtype)[None]
        elif aux_weight:
            counts = self.balanced_counts(sums.counts)
        stats, load = router_statistics(
            sums,
            scale,
            aux_loss=aux_weight,
            z_loss=z_loss,
            load=load,
            counts=counts,
        )
        losses = RouterLosses(router_inputs.counted, scale, load, aux_loss=aux_weight, z_loss=z_loss)
        return losses, stats

    def balanced_counts(self, counts: Tensor) -> Tensor:
        """Return the counts that define f in the load-balance loss: this rank's [b, E] -> [b, E] or [1, E].

        One all-reduce over tp x cp.
        """
        if self.router.aux.over != "sequence":
            counts = counts.sum(0, keepdim=True)
        elif self.mesh.tp_cp.size > 1:
            counts = counts.clone()  # the sum over ranks is in place
        return comm.all_reduce_sum(counts, self.mesh.tp_cp)

    # ---- capacity (GShard, arXiv 2006.16668, section 2.2) --------------------------------------------------

    def expert_capacity(self, seq_len: int) -> int:
        """Return how many tokens of a sequence an expert takes. Requires a capacity."""
        return math.ceil(self.capacity.factor * seq_len * self.top_k / self.num_experts)

    @torch.no_grad()
    def apply_capacity(self, index: Tensor, probs: Tensor) -> Tensor:
        """Return which choices fit their expert's capacity: index, probs [b, s, k] -> bool [b, s, k].

        Choices compete across the full sequence: by position, or by probs if capacity.drop is probability.
        """
        tp, cp = self.mesh.tp, self.mesh.cp
        k = index.shape[-1]

        # gather index and probs of the full sequence in one exchange; expert numbers are exact as floats
        both = torch.stack((index.to(probs.dtype), probs), -1)
        both = both.flatten(2)  # [b, s, 2k]
        if tp.size > 1:
            both = all_gather_sequence(both, tp)
        if cp.size > 1:
            both = zigzag.unshard_sequence(comm.all_gather(both[None], cp))
        pairs = both.unflatten(-1, (k, 2)).flatten(1, 2)  # [b, s k, 2], in sequence order
        index, probs = pairs.unbind(-1)

        # admission order, and the rank of each choice within its expert
        order = torch.arange(index.shape[1], device=index.device)
        order = order.expand(index.shape)
        if self.capacity.drop == "probability":
            order = probs.argsort(dim=1, descending=True, stable=True)
        experts = torch.arange(self.num_experts, device=index.device)
        is_for_expert = (index.gather(1, order)[..., None] == experts).long()  # [b, s k, E]
        position_in_expert = (is_for_expert.cumsum(1) * is_for_expert).sum(-1)  # from 1

        capacity = self.expert_capacity(index.shape[1] // k)
        is_kept = torch.zeros_like(index, dtype=torch.bool)
        is_kept.scatter_(1, order, position_in_expert <= capacity)
        is_kept = is_kept.unflatten(1, (-1, k))
        if cp.size > 1:
            is_kept = zigzag.shard_sequence(is_kept, cp.size)[cp.index]
        return local_chunk(is_kept, tp)

    # ---- state across steps --------------------------------------------------------------------------------

    def move_states_to(self, device: torch.device) -> None:
        """Move bias, load and statistics to the device. The weight gets its storage elsewhere."""
        if self.bias is not None:
            self.bias = self.bias.to(device)
        if self.load is not None:
            self.load = self.load.to(device)
        self.stats = self.stats.to(device)

    def balance(self, counts: Tensor, is_good: Tensor) -> None:
        """Update bias and load after a step. counts [E]: tokens per expert in the global batch.

        The bias of an expert above the mean drops by bias_rate, that of one below it rises (arXiv 2408.15664,
        algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Where the bool scalar is_good is False
        nothing changes.
        """
        if self.bias is not None:
            change = self.router.bias_rate * torch.sign(counts.mean() - counts)
            self.bias += torch.where(is_good, change, 0.0)
        if self.load is not None:
            load = counts * (self.num_experts / counts.sum().clamp(min=1))
            self.load.copy_(torch.where(is_good, load, self.load))

    def boxes(self) -> list[tuple[Box, Tensor]]:
        """Return [(box, tensor)] of the state besides the weight that persists across steps."""
        results: list[tuple[Box, Tensor]] = []
        for name, value in (("bias", self.bias), ("load", self.load)):
            if value is not None:
                results.append((Box.whole(f"{self.key}.{name}", value.shape), value))
        return results
