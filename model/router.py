"""The router of a mixture of experts: which experts a token gets, with which weights, and the losses that
balance them.

Losses and statistics are over the tokens whose target is counted, as the main loss is, and are divided by the
same global number of them. So microbatches, accumulation and layout change nothing. With p_i the scores of a
token (sigmoid: divided by their sum), sums over counted tokens, T of them in the step:

    load balance   aux_loss / T * sum p_i f_i     f_i: E / top_k times the share of the choices of expert i
    z              z_loss / T * sum logsumexp(logits)^2     (arXiv 2202.08906)

f is a constant for the gradient. model.aux_kind says over what it is taken:

    sequence   the token's own sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17-20)
    global     the global batch (arXiv 2501.11873). Its counts are known only after the step's last forward,
               so those of the step before are taken, and 1 in the first step: exact, and the same in every
               layout
    micro      the microbatch, as in Switch Transformer and Hugging Face. It depends on how tokens are
               grouped, so scripts.verify refuses it

A balanced layer adds aux_loss to the loss, whatever E and top_k. (Hugging Face's Mixtral: top_k times that,
over all layers at once.) The losses are attached where the scores are computed (attach_loss), each on the
stage that has the layer, and are reported separately.

A capacity counts all tokens of a sequence, with or without a target. It holds in training alone: evaluation
and generation, where later tokens are not known yet, drop nothing.
"""
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from config import Config, ConfigError, ModelConfig
from kernels.cross_entropy import IGNORE_INDEX
from kernels.grad import accumulation_dtype
from kernels.linear import linear
from parallel.context import zigzag
from parallel.cost import Cost, Exchange, MatrixProduct, SavedTensor, Workload
from parallel.rng import DropoutRng
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, parameter
from parallel.tensor.regions import all_gather_sequence, local_chunk
from parallel.topology.mesh import Mesh
from parallel.wire import comm

# The statistics of a layer and step, beside how many tokens each expert got.
ROUTER_STATS = ("dropped", "entropy", "aux_loss", "z_loss")
EPSILON = 1e-20  # added to sums that divide


def expert_count(model: ModelConfig) -> int:
    """Number of routed experts of a mixture layer. Raises ConfigError for a dense model."""
    if model.experts is None:
        raise ConfigError("model.experts: none, and a mixture layer has some; give their number")
    return model.experts


@dataclass(frozen=True)
class RouterInputs:
    """What a router needs in training.

    counted [b, s/cp/tp]: is the target of each of this rank's tokens counted? scale: 1 / the global number of
    counted tokens, times the loss scale. jitter_rng: None without model.jitter.
    """
    counted: Tensor
    scale: Tensor | float
    jitter_rng: DropoutRng | None


def make_router_inputs(cfg: Config, mesh: Mesh, targets: Tensor, scale: Tensor | float,
                  dropout_rng: DropoutRng | None) -> RouterInputs:
    """targets [b, s/cp]. dropout_rng: of this rank's tokens, which are divided over tp under sp."""
    jitter_rng = dropout_rng if cfg.model.jitter else None
    if jitter_rng is not None and not cfg.parallel.sp:
        positions = local_chunk(jitter_rng.positions[None], mesh.tp)[0]
        jitter_rng = replace(jitter_rng, positions=positions)
    return RouterInputs(local_chunk(targets, mesh.tp) != IGNORE_INDEX, scale, jitter_rng)


class Router(nn.Module):
    """x [b, s/cp/tp, d] -> the experts of these tokens, and the weights of these, in fp32 or better.

    Beside its weight it keeps, in fp64:

        bias [E]                        added to the scores for the choice alone (arXiv 2408.15664)
        load [E]                        f of the step before, for model.aux_kind global
        stats [E + len(ROUTER_STATS)]   this rank's statistics of the step so far
    """

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        model = cfg.model
        self.model = model
        self.layer = layer
        self.mesh = mesh
        self.key = f"layers.{layer}.mlp.router"
        self.num_experts = expert_count(model)

        # every tp rank routes its own tokens, with and without sp
        box = Box.whole(f"{self.key}.weight", (self.num_experts, model.hidden))
        spec = ParameterSpec((box,), "router", model.init_std, partial_over=("tp",))
        self.weight = parameter(spec)
        self.bias: Tensor | None = None
        if model.router_bias:
            self.bias = torch.zeros(self.num_experts, dtype=torch.float64)
        self.load: Tensor | None = None
        if model.aux_kind == "global":
            self.load = torch.ones(self.num_experts, dtype=torch.float64)
        self.stats = torch.zeros(self.num_experts + len(ROUTER_STATS), dtype=torch.float64)

    def forward(self, x: Tensor, router_inputs: RouterInputs | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns (index, probs, stats).

        index int64 [b, s, k]: the experts of each token; -1: dropped. probs [b, s, k]: what their outputs are
        multiplied by. stats [E + len(ROUTER_STATS)]: of this microbatch; None outside of training.
        """
        # scores of all experts
        x = x.to(accumulation_dtype(x.dtype))
        if router_inputs is not None and router_inputs.jitter_rng is not None:
            jitter = self.model.jitter
            factors = router_inputs.jitter_rng.uniform(-1 - self.layer, x.shape[-1], jitter, x.dtype)
            x = x * factors
        logits = linear(x, self.weight)  # [b, s, E]
        is_softmax = self.model.router == "softmax"
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()

        # the choice, and the weights of the chosen
        index = self.choose_experts(scores.detach())
        if router_inputs is None:
            return index, self.expert_weights(scores.gather(-1, index)), None
        loss, stats = self.losses(logits, scores, index, router_inputs)
        probs = self.expert_weights(attach_loss(scores, loss).gather(-1, index))

        # what finds no place at its expert is dropped
        if self.model.capacity is not None:
            is_kept = self.apply_capacity(index, probs.detach())
            is_dropped = ~is_kept & router_inputs.counted[..., None]
            stats[self.num_experts + ROUTER_STATS.index("dropped")] = is_dropped.sum()
            index = index.masked_fill(~is_kept, -1)
            probs = probs * is_kept
        return index, probs, stats

    def choose_experts(self, scores: Tensor) -> Tensor:
        """scores [b, s, E] -> the numbers of the top_k experts [b, s, k].

        With router_groups only experts of the best groups: a softmax router takes a group's best score
        (DeepSeek-V2, arXiv 2405.04434, section 2.2.2), a sigmoid router the sum of its best two (DeepSeek-V3,
        arXiv 2412.19437, section 2.1.2).
        """
        model = self.model
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        if model.router_groups > 1:
            groups = scores.unflatten(-1, (model.router_groups, -1))
            if model.router == "softmax":
                score_of_group = groups.amax(-1)  # [b, s, groups]
            else:
                score_of_group = groups.topk(2, -1).values.sum(-1)
            best = score_of_group.topk(model.router_group_top_k, -1).indices
            is_excluded = torch.ones_like(score_of_group, dtype=torch.bool)
            is_excluded.scatter_(-1, best, False)
            groups = groups.masked_fill(is_excluded[..., None], float("-inf"))
            scores = groups.flatten(-2)
        return scores.topk(model.top_k, -1).indices

    def expert_weights(self, chosen: Tensor) -> Tensor:
        """The chosen scores [b, s, k] -> what the outputs of their experts are multiplied by."""
        if self.model.router_renorm:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + EPSILON)
        return chosen * self.model.router_scale

    def cost(self, work: Workload, tokens: int, copies_input: bool) -> Cost:
        """tokens: that this rank routes. copies_input: its input is a tensor of its own, of the dtype of
        sums. It keeps logits, scores and what the losses need of them."""
        num_experts, hidden = self.weight.spec.shape
        numbers = 4 * num_experts + (hidden if copies_input else 0)  # of a token
        exchanges: tuple[Exchange, ...] = ()
        if self.model.aux_loss and self.load is None:
            sequences = work.micro_batch if self.model.aux_kind == "sequence" else 1
            counts_bytes = sequences * num_experts * work.accumulation_bytes
            exchanges = (Exchange("tp_cp", "all_reduce", counts_bytes),)
        return Cost(
            products=(MatrixProduct(tokens, hidden, num_experts),),
            saved=(SavedTensor(tokens * numbers * work.accumulation_bytes),),
            exchanges=exchanges,
        )

    # ---- losses --------------------------------------------------------------------------------------------

    def losses(self, logits: Tensor, scores: Tensor, index: Tensor,
               router_inputs: RouterInputs) -> tuple[Tensor, Tensor]:
        """What the router adds to the loss on this rank (a scalar), and its stats [E + len(ROUTER_STATS)]."""
        model = self.model
        counted = router_inputs.counted.to(scores.dtype)
        shares = scores
        if model.router == "sigmoid":
            shares = scores / (scores.sum(-1, keepdim=True) + EPSILON)
        is_counted = counted[..., None].expand(index.shape)
        hits = torch.zeros_like(scores).scatter_(-1, index, is_counted)  # [b, s, E]
        counts = hits.sum(1)  # [b, E]

        aux_loss = logits.new_zeros(())
        if model.aux_loss:
            counted_shares = (shares * counted[..., None]).sum(1)  # [b, E]
            imbalance = (counted_shares * self.expert_load(counts)).sum()
            aux_loss = router_inputs.scale * model.aux_loss * imbalance
        z_loss = logits.new_zeros(())
        if model.z_loss:
            squares = logits.logsumexp(-1).square()
            z_loss = router_inputs.scale * model.z_loss * (squares * counted).sum()

        shares = shares.detach()
        log_shares = shares.clamp(min=1e-30).log()
        entropy = -(shares * log_shares).sum(-1)
        total_entropy = (entropy * counted).sum()
        dropped = logits.new_zeros(())  # set by forward
        stats = torch.stack((dropped, total_entropy, aux_loss.detach(), z_loss.detach()))
        stats = torch.cat((counts.detach().sum(0), stats))
        return aux_loss + z_loss, stats.double()

    @torch.no_grad()
    def expert_load(self, counts: Tensor) -> Tensor:
        """f of the load-balance loss, from this rank's counts [b, E] -> [b, E] or [1, E].

        One all-reduce over tp x cp, except for the global kind.
        """
        if self.load is not None:
            return self.load.to(counts.dtype)[None]
        if self.model.aux_kind == "sequence":
            counts = counts.clone()
        else:
            counts = counts.sum(0, keepdim=True)
        counts = comm.all_reduce_sum(counts, self.mesh.tp_cp)
        total = counts.sum(-1, keepdim=True).clamp(min=1)
        return counts * (self.num_experts / total)

    # ---- capacity (GShard, arXiv 2006.16668, section 2.2) --------------------------------------------------

    def expert_capacity(self, seq_len: int) -> int:
        """How many tokens of a sequence an expert takes. Raises ConfigError without model.capacity."""
        model = self.model
        if model.capacity is None:
            raise ConfigError("model.capacity: none, and an expert then takes any number of tokens")
        return math.ceil(model.capacity * seq_len * model.top_k / self.num_experts)

    @torch.no_grad()
    def apply_capacity(self, index: Tensor, probs: Tensor) -> Tensor:
        """index, probs [b, s, k] -> bool [b, s, k]: for which choices their experts have capacity.

        The choices of the full sequence compete: by position, or with model.drop probability by probs.
        """
        tp, cp = self.mesh.tp, self.mesh.cp
        k = index.shape[-1]

        # index and probs of the full sequence, in one exchange; the numbers of experts are exact as floats
        both = torch.stack((index.to(probs.dtype), probs), -1)
        both = both.flatten(2)  # [b, s, 2k]
        if tp.size > 1:
            both = all_gather_sequence(both, tp)
        if cp.size > 1:
            both = zigzag.unshard_sequence(comm.all_gather(both[None], cp))
        pairs = both.unflatten(-1, (k, 2)).flatten(1, 2)  # [b, s k, 2], in the order of the sequence
        index, probs = pairs.unbind(-1)

        # the order in which choices are admitted, and the position of each among those of its expert
        order = torch.arange(index.shape[1], device=index.device)
        order = order.expand(index.shape)
        if self.model.drop == "probability":
            order = probs.argsort(dim=1, descending=True, stable=True)
        is_for_expert = one_hot(index.gather(1, order).long(), self.num_experts)  # [b, s k, E]
        position_in_expert = (is_for_expert.cumsum(1) * is_for_expert).sum(-1)  # from 1

        capacity = self.expert_capacity(index.shape[1] // k)
        is_kept = torch.zeros_like(index, dtype=torch.bool)
        is_kept.scatter_(1, order, position_in_expert <= capacity)
        is_kept = is_kept.unflatten(1, (-1, k))
        if cp.size > 1:
            is_kept = zigzag.shard_sequence(is_kept, cp.size)[cp.index]
        return local_chunk(is_kept, tp)

    # ---- what it keeps from step to step -------------------------------------------------------------------

    def move_states_to(self, device: torch.device) -> None:
        """Moves bias, load and statistics to the device; the weight has its storage from elsewhere."""
        if self.bias is not None:
            self.bias = self.bias.to(device)
        if self.load is not None:
            self.load = self.load.to(device)
        self.stats = self.stats.to(device)

    def balance(self, counts: Tensor, is_good: Tensor) -> None:
        """After a step. counts [E]: the tokens of each expert in the global batch.

        The bias of an expert with more than the mean falls by router_bias_rate, that of one with fewer rises
        (arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2). is_good: a bool scalar;
        where it is False nothing changes.
        """
        if self.bias is not None:
            change = self.model.router_bias_rate * torch.sign(counts.mean() - counts)
            self.bias += torch.where(is_good, change, 0.0)
        if self.load is not None:
            load = counts * (self.num_experts / counts.sum().clamp(min=1))
            self.load.copy_(torch.where(is_good, load, self.load))

    def boxes(self) -> list[tuple[Box, Tensor]]:
        """[(box, tensor)] of what it keeps beside its weight from step to step."""
        found: list[tuple[Box, Tensor]] = []
        for name, value in (("bias", self.bias), ("load", self.load)):
            if value is not None:
                found.append((Box.whole(f"{self.key}.{name}", value.shape), value))
        return found


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, ctx.one


def attach_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Returns x. Its backward also computes the gradient of `loss`, a part of the total loss that only this
    place knows.
    """
    return _AttachLoss.apply(x, loss) if loss.requires_grad else x
