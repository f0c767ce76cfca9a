"""A mixture of experts in the place of a block's MLP (arXiv 2101.03961, 2401.06066): router, experts, shared experts.

What counts. Losses and statistics of the router are over the tokens whose target counts, as the main loss is, and are divided
by the same global number of them: so micro-batches, accumulation and layout change nothing. With p_i the scores of a token
(sigmoid: divided by their sum), sums over counted tokens, T of them in all:

    load balance   aux_loss / T  sum p_i f_i        f_i: E / top_k times the share of the choices that expert i got
    z              z_loss / T    sum logsumexp(logits)^2                                                (arXiv 2202.08906)

f is a constant to the gradient. It is the token's own sequence's (`sequence`, DeepSeek-V3, arXiv 2412.19437, eq. 17-20), or that
of the whole global batch (`global`, arXiv 2501.11873). A step's counts are known only after its last forward, so `global` takes
those of the step before, and 1 in the first step: exact and the same in every layout, without a second forward. `micro` takes
the micro-batch's, as Switch Transformer and Hugging Face do; that depends on how tokens are grouped, so scripts.verify refuses it.
A balanced layer adds aux_loss to the loss, whatever E and top_k (Hugging Face's Mixtral: top_k times that, over all layers at once).

The losses enter where the scores are made (`attach`), each on the pipeline stage that has the layer, and are reported apart.
A capacity counts every token of a sequence, with or without a target, and holds in training alone: evaluation and generation,
where later tokens are not known yet, drop nothing.
"""
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from config import Config, is_moe, moe_ffn
from kernels.fp8_grouped import scaled_grouped_linear
from kernels.grad import wide
from kernels.grouped_gemm import grouped_linear
from kernels.linear import linear
from kernels.swiglu import weighted_swiglu
from model.mlp import MLP
from model.precision import of_layer
from parallel import comm, zigzag
from parallel.boxes import Box
from parallel.collectives import gather_dim1, join_dim1, split_dim1, take_dim1
from parallel.expert import Combine, Dispatch, plan
from parallel.mesh import Mesh
from parallel.rng import Noise
from parallel.spec import Spec, parameter

TOLD = ("dropped", "entropy", "aux_loss", "z_loss")  # what a layer tells of a step beside its experts' counts


@dataclass(frozen=True)
class Learning:
    """What a router needs in training. counted [b, s/cp/tp]: tokens of this rank whose target counts; scale: 1 / the global number
    of them; noise: for the jitter, None without."""
    counted: Tensor
    scale: Tensor | float
    noise: Noise | None


def learning(cfg: Config, mesh: Mesh, batch, scale, noise: Noise | None) -> Learning:
    """noise: of this rank's tokens, which are cut over tp where sp is on."""
    m = cfg.model
    if not m.jitter:
        noise = None
    elif not cfg.parallel.sp:
        noise = replace(noise, columns=take_dim1(noise.columns[None], mesh.tp)[0])
    return Learning(take_dim1(batch.targets, mesh.tp) != -100, scale, noise)


class Router(nn.Module):
    """x [b, s, d] -> each token's experts and their probabilities, in fp32 or better throughout."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        self.m, self.layer, self.mesh = cfg.model, layer, mesh
        m, self.key = self.m, f"layers.{layer}.mlp.router"
        # every tp rank routes its own tokens, with or without sp
        self.weight = parameter(Spec((Box.whole(f"{self.key}.weight", (m.experts, m.hidden)),), "normal", m.init_std, partial=("tp",)))
        self.bias = torch.zeros(m.experts, dtype=torch.float64) if m.router_bias else None  # only chooses
        self.load = torch.ones(m.experts, dtype=torch.float64) if m.aux_kind == "global" else None  # f of the step before
        self.told = torch.zeros(m.experts + len(TOLD), dtype=torch.float64)  # this rank's share of the step so far

    def forward(self, x: Tensor, learn: Learning | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """-> index int64 [b, s, k] (-1: dropped), probs [b, s, k], told [E + len(TOLD)] in fp64 (None outside of training)."""
        m = self.m
        x = x.to(wide(x.dtype))
        if learn is not None and learn.noise is not None:
            x = x * learn.noise.uniform(-1 - self.layer, x.shape[-1], m.jitter, x.dtype)
        logits = linear(x, self.weight)  # [b, s, E]
        scores = logits.softmax(-1) if m.router == "softmax" else logits.sigmoid()
        index = self.choose(scores.detach())
        if learn is None:
            return index, self.weigh(scores.gather(-1, index)), None
        aux, told = self.losses(logits, scores, index, learn)
        probs = self.weigh(attach(scores, aux).gather(-1, index))
        if m.capacity is not None:
            kept = self.keep(index, probs.detach())
            told[m.experts] = (~kept & learn.counted[..., None]).sum()
            index, probs = index.masked_fill(~kept, -1), probs * kept
        return index, probs, told

    def choose(self, scores: Tensor) -> Tensor:
        """scores [b, s, E] -> the top_k experts' numbers."""
        m = self.m
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        if m.router_groups > 1:
            groups = scores.unflatten(-1, (m.router_groups, -1))
            best = groups.amax(-1) if m.router == "softmax" else groups.topk(2, -1).values.sum(-1)  # [b, s, groups]
            open_ = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(m.router_group_top_k, -1).indices, True)
            scores = groups.masked_fill(~open_[..., None], float("-inf")).flatten(-2)
        return scores.topk(m.top_k, -1).indices

    def weigh(self, chosen: Tensor) -> Tensor:
        """The chosen scores [b, s, k] -> what their experts' outputs are multiplied by."""
        if self.m.router_renorm:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return chosen * self.m.router_scale

    def losses(self, logits: Tensor, scores: Tensor, index: Tensor, learn: Learning) -> tuple[Tensor, Tensor]:
        """-> what the router's losses add to the loss here (a scalar), and what there is to tell."""
        m, counted = self.m, learn.counted.to(scores.dtype)
        share = scores if m.router == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        hits = torch.zeros_like(scores).scatter_(-1, index, counted[..., None].expand(index.shape))  # [b, s, E]
        counts = hits.sum(1)  # [b, E]
        aux = logits.new_zeros(())
        if m.aux_loss:
            aux = learn.scale * m.aux_loss * ((share * counted[..., None]).sum(1) * self.shares(counts)).sum()
        z = logits.new_zeros(())
        if m.z_loss:
            z = learn.scale * m.z_loss * (logits.logsumexp(-1).square() * counted).sum()
        entropy = -(share.detach() * share.detach().clamp(min=1e-30).log()).sum(-1)
        told = torch.stack((logits.new_zeros(()), (entropy * counted).sum(), aux.detach(), z.detach()))
        return aux + z, torch.cat((counts.detach().sum(0), told)).double()

    @torch.no_grad()
    def shares(self, counts: Tensor) -> Tensor:
        """f, as the file's head defines it, from this rank's counts [b, E] -> [b, E] or [1, E]."""
        m = self.m
        if m.aux_kind == "global":
            return self.load.to(counts.dtype)[None]
        counts = counts.clone() if m.aux_kind == "sequence" else counts.sum(0, keepdim=True)
        counts = comm.sum_(counts, self.mesh.tokens)
        return counts * (m.experts / counts.sum(-1, keepdim=True).clamp(min=1))

    def room(self, s: int) -> int:
        """How many tokens of a sequence of s an expert takes."""
        return math.ceil(self.m.capacity * s * self.m.top_k / self.m.experts)

    @torch.no_grad()
    def keep(self, index: Tensor, probs: Tensor) -> Tensor:
        """bool [b, s, k]: which choices their experts have room for, by the whole sequence."""
        m, tp, cp = self.m, self.mesh.tp, self.mesh.cp
        b, mine, k = index.shape
        both = torch.stack((index.to(probs.dtype), probs), -1).flatten(2)  # one exchange for both: numbers of experts are exact
        if tp.size > 1:
            both = gather_dim1(both, tp)
        if cp.size > 1:
            both = zigzag.join(comm.gather(both[None], cp))
        index, probs = both.unflatten(-1, (k, 2)).flatten(1, 2).unbind(-1)  # [b, s k], in the order of the sequence
        room = self.room(index.shape[1] // k)
        order = torch.arange(index.shape[1], device=index.device).expand(index.shape)
        if m.drop == "probability":
            order = probs.argsort(dim=1, descending=True, stable=True)
        queue = torch.nn.functional.one_hot(index.gather(1, order).long(), m.experts)  # who comes when, at which expert
        place = (queue.cumsum(1) * queue).sum(-1)  # 1: first in its expert's queue
        kept = torch.zeros_like(index, dtype=torch.bool).scatter_(1, order, place <= room).unflatten(1, (-1, k))
        if cp.size > 1:
            kept = zigzag.split(kept, cp.size)[cp.index]
        return take_dim1(kept, tp)


    def boxes(self) -> list[tuple[Box, Tensor]]:
        """What it keeps beside its weight, under global names."""
        kept = (("bias", self.bias), ("load", self.load))
        return [(Box.whole(f"{self.key}.{name}", t.shape), t) for name, t in kept if t is not None]


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        ctx.one = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy, ctx.one


def attach(x: Tensor, loss: Tensor) -> Tensor:
    """x, whose backward also takes in the gradient of `loss`: a part of the total loss that is known only here."""
    return _Attach.apply(x, loss) if loss.requires_grad else x


class Experts(nn.Module):
    """The routed experts that this rank holds: gate and up as one grouped GEMM, then down."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        m, self.group, self.etp = cfg.model, mesh.experts, cfg.parallel.etp
        d, f = m.hidden, moe_ffn(m)
        here, part = m.experts // cfg.parallel.ep, f // self.etp
        first, at = self.group.index // self.etp * here, self.group.index % self.etp * part
        keys = [f"layers.{layer}.mlp.experts.{e}" for e in range(first, first + here)]
        inner = tuple(Box(f"{key}.{n}.weight", (f, d), (at, 0), (part, d)) for key in keys for n in ("gate", "up"))
        down = tuple(Box(f"{key}.down.weight", (d, f), (0, at), (d, part)) for key in keys)
        self.experts, fp8 = m.experts, of_layer(cfg, layer)
        self.linear = grouped_linear if fp8 is None else partial(scaled_grouped_linear, recipe=fp8[0], side=fp8[1])
        self.inner = parameter(Spec(inner, "normal", m.init_std, expert=True))
        self.down = parameter(Spec(down, "normal", m.init_std / math.sqrt(2 * m.layers), expert=True))

    def forward(self, x: Tensor, index: Tensor, probs: Tensor, dropped: bool, meanwhile: Iterator,
                room: int | None = None) -> tuple[Tensor, Tensor | None]:
        """x [b, s, d], index and probs [b, s, k] -> [b, s, d], and the second that `meanwhile` gives. meanwhile: work in two parts,
        done while the tokens are on their way there and back; room: see parallel/expert.py."""
        p = plan(index.flatten(0, 1), self.experts, self.group, self.etp, dropped, room)
        way = Dispatch(x.flatten(0, 1), probs.flatten(0, 1), p)
        next(meanwhile)
        rows, weight = way.rows()
        inner = weighted_swiglu(self.linear(rows, self.inner, p.counts), weight)
        back = Combine(self.linear(inner, self.down, p.counts), p)
        beside = next(meanwhile)
        return back.tokens().view(x.shape), beside


class MoE(nn.Module):
    """x [b, s, d] (sp: [b, s/tp, d]) -> the same, and what the router tells (None outside of training)."""

    def __init__(self, cfg: Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        m, self.sp, self.tp = cfg.model, cfg.parallel.sp, mesh.tp
        self.router = Router(cfg, mesh, layer)
        self.experts = Experts(cfg, mesh, layer)
        self.shared = MLP(cfg, mesh, layer, "mlp.shared", m.shared_experts * moe_ffn(m)) if m.shared_experts else None
        self.gate = parameter(Spec((Box.whole(f"layers.{layer}.mlp.shared_gate.weight", (1, m.hidden)),), "normal", m.init_std,
                                   partial=("tp",) if self.sp else ())) if m.shared_gate else None
        self.capacity, self.pad, self.cut = m.capacity is not None, m.pad, mesh.tokens.size

    def forward(self, x: Tensor, learn: Learning | None) -> tuple[Tensor, Tensor | None]:
        own = x if self.sp else split_dim1(x, self.tp)  # a tp rank routes its own tokens
        index, probs, told = self.router(own, learn)
        b, s, _ = own.shape
        room = b * min(self.router.room(s * self.cut), s) if self.pad and learn is not None else None  # a token takes one row of an expert
        y, beside = self.experts(own, index, probs, self.capacity and learn is not None, self.others(x), room)
        y = y if self.sp else join_dim1(y, self.tp, x.shape[1])
        return y if beside is None else y + beside, told

    def others(self, x: Tensor) -> Iterator[Tensor | None]:
        """The shared experts in two parts; the second gives their output, or None where there are none. The backward, which autograd
        runs in the order of the forward turned round, has the second's gradients under its way back, the first's under its way there."""
        h = None if self.shared is None else self.shared.active(x)
        yield None
        y = None if self.shared is None else self.shared.down(h)
        yield y if self.gate is None else y * linear(x.to(wide(x.dtype)), self.gate).sigmoid().to(y.dtype)


class Routers:
    """What the routers of this rank's stages keep beside their weights: from step to step, biases and loads, which checkpoints
    hold; within a step, what there is to tell. All ranks have the same after `settle`."""

    def __init__(self, cfg: Config, mesh: Mesh, stages: list, device: torch.device) -> None:
        self.m, self.mesh = cfg.model, mesh
        self.layers = [i for i in range(self.m.layers + self.m.mtp) if is_moe(self.m, i)]  # of the model
        self.here: list[Router] = [b.mlp.router for stage in stages for b in stage.every_block() if isinstance(b.mlp, MoE)]
        self.told: Tensor | None = None  # [mixture layers, E + len(TOLD)] of the last step, over all tokens
        for r in self.here:
            r.bias, r.load, r.told = (None if t is None else t.to(device) for t in (r.bias, r.load, r.told))

    def begin(self) -> None:
        for r in self.here:
            r.told.zero_()

    @torch.no_grad()
    def settle(self, ok: Tensor, scale: Tensor) -> None:
        """After the optimizer's step: one sum over all ranks, then biases move against the load. ok False: a skipped step; scale: of the loss."""
        if not self.layers:
            return
        m = self.m
        every = torch.zeros(len(self.layers), m.experts + len(TOLD), dtype=torch.float64, device=ok.device)
        for r in self.here:
            every[self.layers.index(r.layer)] = r.told
        self.told = comm.sum_(every, self.mesh.world)
        self.told[:, -2:] /= scale  # the losses
        for r in self.here:
            counts = self.told[self.layers.index(r.layer), :m.experts]
            if r.bias is not None:
                r.bias += torch.where(ok, m.router_bias_rate * torch.sign(counts.mean() - counts), 0.0)
            if r.load is not None:
                r.load.copy_(torch.where(ok, counts * (m.experts / counts.sum().clamp(min=1)), r.load))

    def boxes(self, alone: bool = False, weights: bool = False) -> list[tuple[Box, Tensor]]:
        """[(box, tensor)]: what a checkpoint keeps of them. alone: one rank of those that have the same brings it; weights: only
        what the model's output depends on."""
        if alone and (self.mesh.loss.index or self.mesh.tp.index):
            return []
        return [pair for r in self.here for pair in r.boxes() if not weights or pair[1] is r.bias]
