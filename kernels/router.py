"""Router: from logits to the experts of a token, their weights, and the sums that balance losses and
statistics need.

    logits    x W^T (+ b), [b, s, E]. 16-bit operands, fp32 accumulation: x is neither widened nor copied
    choice    index [b, s, k] and weights [b, s, k]; for each sequence RouterSums
    losses    from the sums: f of the load balance, and the step's statistics
    backward  from the gradients of the weights and of the losses to those of logits, x, W and b

On a GPU each line but the logits is one kernel, after Megatron-LM's fused router (moe_router_fusion). Partial
sums of its programs are added in order: no atomics, and bitwise reproducible. The backward keeps x, the
logits and the choice; scores are recomputed.

If two experts have the same score, the kernel takes the one with the lower number. torch.topk, which is used
on a CPU, does not specify which it takes.
"""
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.grad import accumulate_grad, accumulate_summed_grad, accumulation_dtype
from kernels.linear import (
    RecomputeFunction,
    get_source,
    multiply_into_fp32,
    recompute_input,
    write_wgrad,
)
from kernels.tiles import block_range, inside_matrix, load_fp32, tile_offsets
from kernels.triton_ import ceil_div, kernel_is_available, num_processors, power_of_2, tl, triton

# The statistics of a layer and step that follow the token count of each expert.
ROUTER_STATS = ("dropped", "entropy", "aux_loss", "z_loss")
EPSILON = 1e-20  # added to denominators
SMALLEST_SHARE = 1e-30  # lower bound of shares in the logarithm of the entropy

TILE = 1024  # scores that a program processes at a time
MAX_TOKENS = 64  # per tile
PROGRAMS = 4  # per processor, in kernels that sum
WARPS = 4


@dataclass(frozen=True)
class RoutingRule:
    """How a router scores experts and chooses among them.

    sigmoid: scores are sigmoids of the logits; else their softmax. The experts of a token come from its best
    top_groups of `groups` groups of experts: a softmax router scores a group by its best expert (DeepSeek-V2,
    arXiv 2405.04434, section 2.2.2), a sigmoid router by the sum of its best two (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2). renorm divides the chosen scores by their sum. All are multiplied by `scale`.
    """
    top_k: int
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    renorm: bool = True
    scale: float = 1.0


class RouterSums(NamedTuple):
    """Sums over the counted tokens of each sequence: counts and shares [b, E], squares and entropy [b].

    counts is how many tokens each expert was chosen for. shares sums scores divided by their sum over all
    experts, squares the squared logsumexp of the logits, entropy that of the shares.
    """
    counts: Tensor
    shares: Tensor
    squares: Tensor
    entropy: Tensor


class RouterChoice(NamedTuple):
    """index int64 [b, s, k]; weights [b, s, k], without gradients. sums is None outside of training."""
    index: Tensor
    weights: Tensor
    sums: RouterSums | None


@dataclass(frozen=True)
class RouterLosses:
    """Inputs of a router's losses, which are terms of the total loss, for its backward.

    load balance: aux_loss * scale * sum of shares * load; z: z_loss * scale * sum of squares, over the
    counted tokens. counted [b, s] holds bools, and scale is a scalar. load is [b, E], or [1, E] for all
    sequences, or None if aux_loss is 0.
    """
    counted: Tensor
    scale: Tensor
    load: Tensor | None
    aux_loss: float
    z_loss: float


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., d], weight [E, d], bias [E] -> [..., E] in fp32 or better. No gradients: see routed_weights."""
    x, weight = x.detach(), weight.detach()
    logits = multiply_into_fp32(x.flatten(0, -2), weight.t())
    if bias is not None:
        logits += bias.detach()
    return logits.view(*x.shape[:-1], -1)


@torch.no_grad()
def choose_experts(
    logits: Tensor,
    rule: RoutingRule,
    bias: Tensor | None = None,
    counted: Tensor | None = None,
    given: Tensor | None = None,
) -> RouterChoice:
    """Choose the experts of each token. logits [b, s, E].

    bias [E] is added to the scores for the choice only. counted bool [b, s] marks the tokens to sum over;
    with None there are no sums. given int64 [b, s, k]: the choice, if it is already made; the weights are
    still those of the logits.
    """
    if logits.numel() and kernel_is_available("router", logits):
        return launch_router(logits, rule, bias, counted, given)
    scores = compute_scores(logits, rule)
    index = best_experts(scores, rule, bias) if given is None else given
    weights = compute_weights(scores.gather(-1, index), rule)
    sums = None if counted is None else router_sums(logits, scores, index, counted, rule)
    return RouterChoice(index, weights, sums)


@torch.no_grad()
def router_statistics(
    sums: RouterSums,
    scale: Tensor,
    *,
    aux_loss: float,
    z_loss: float,
    load: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (statistics [E + len(ROUTER_STATS)] of a microbatch in fp64, the load of its balance loss).

    Nothing is dropped. load is as in RouterLosses; with None, it is computed from counts [b, E] or [1, E] as
    E times the share of each expert; without counts there is none, and aux_loss is 0.
    """
    if kernel_is_available("router statistics", sums.shares, load):
        return launch_statistics(sums, scale, load, counts, aux_loss=aux_loss, z_loss=z_loss)
    if counts is not None:
        total = counts.sum(-1, keepdim=True).clamp(min=1)
        load = counts * (counts.shape[-1] / total)
    dropped = aux = z = sums.entropy.new_zeros(())
    if load is not None:
        aux = scale * aux_loss * (sums.shares * load).sum()
    if z_loss:
        z = scale * z_loss * sums.squares.sum()
    stats = torch.stack((dropped, sums.entropy.sum(), aux, z))
    return torch.cat((sums.counts.sum(0), stats)).double(), load


def routed_weights(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    choice: RouterChoice,
    rule: RoutingRule,
    losses: RouterLosses | None = None,
    logit_bias: Tensor | None = None,
) -> Tensor:
    """Return choice.weights with gradients for x [b, s, d], weight [E, d] and logit_bias [E], where `logits`
    are their router_logits.

    losses adds its gradients in the backward, as a part of the total loss that is handled only here.
    """
    function, args = get_source(x)
    return _RoutedWeights.apply(x, weight, logit_bias, logits, choice, rule, losses, function, *args)


# ---- reference ---------------------------------------------------------------------------------------------

def compute_scores(logits: Tensor, rule: RoutingRule) -> Tensor:
    """[..., E] -> [..., E]."""
    return logits.sigmoid() if rule.sigmoid else logits.softmax(-1)


def best_experts(scores: Tensor, rule: RoutingRule, bias: Tensor | None) -> Tensor:
    """scores [b, s, E], bias [E] -> the indices of the top_k experts [b, s, k]."""
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if rule.groups > 1:
        groups = scores.unflatten(-1, (rule.groups, -1))
        if rule.sigmoid:
            score_of_group = groups.topk(2, -1).values.sum(-1)  # [b, s, groups]
        else:
            score_of_group = groups.amax(-1)
        best = score_of_group.topk(rule.top_groups, -1).indices
        is_excluded = torch.ones_like(score_of_group, dtype=torch.bool)
        is_excluded.scatter_(-1, best, False)
        groups = groups.masked_fill(is_excluded[..., None], float("-inf"))
        scores = groups.flatten(-2)
    return scores.topk(rule.top_k, -1).indices


def compute_weights(chosen: Tensor, rule: RoutingRule) -> Tensor:
    """Map the chosen scores [b, s, k] to the weights of the experts' outputs."""
    if rule.renorm:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + EPSILON)
    return chosen * rule.scale


def normalize_shares(scores: Tensor, rule: RoutingRule) -> Tensor:
    """Divide scores [b, s, E] by their sum over all experts."""
    return scores / (scores.sum(-1, keepdim=True) + EPSILON) if rule.sigmoid else scores


def router_sums(
    logits: Tensor, scores: Tensor, index: Tensor, counted: Tensor, rule: RoutingRule
) -> RouterSums:
    """Sum over logits and scores [b, s, E], index [b, s, k], counted [b, s]."""
    counted = counted.to(scores.dtype)
    shares = normalize_shares(scores, rule)
    is_counted = counted[..., None].expand(index.shape)
    hits = torch.zeros_like(scores).scatter_(-1, index, is_counted)  # [b, s, E]
    squares = logits.logsumexp(-1).square()  # [b, s]
    entropy = -(shares * shares.clamp(min=SMALLEST_SHARE).log()).sum(-1)
    return RouterSums(
        counts=hits.sum(1),
        shares=(shares * counted[..., None]).sum(1),
        squares=(squares * counted).sum(1),
        entropy=(entropy * counted).sum(1),
    )


def logits_gradient(
    dweights: Tensor, logits: Tensor, index: Tensor, rule: RoutingRule, losses: RouterLosses | None
) -> Tensor:
    """Return the gradient of the logits [b, s, E] from that of the weights [b, s, k], and of the losses."""
    scores = compute_scores(logits, rule)

    # the weights -> the chosen scores
    dchosen = dweights * rule.scale
    if rule.renorm:
        chosen = scores.gather(-1, index)
        total = chosen.sum(-1, keepdim=True) + EPSILON
        along_weights = (dchosen * chosen).sum(-1, keepdim=True) / total
        dchosen = (dchosen - along_weights) / total
    dscores = torch.zeros_like(scores).scatter_(-1, index, dchosen)

    # the load balance -> all shares -> all scores
    if losses is not None and losses.load is not None:
        factor = losses.aux_loss * losses.scale * losses.counted.to(scores.dtype)
        dshares = factor[..., None] * losses.load[:, None]  # [b, s, E]
        if rule.sigmoid:
            total = scores.sum(-1, keepdim=True) + EPSILON
            along_shares = (dshares * scores).sum(-1, keepdim=True) / total
            dshares = (dshares - along_shares) / total
        dscores = dscores + dshares

    # the scores -> the logits
    if rule.sigmoid:
        dlogits = dscores * scores * (1 - scores)
    else:
        dlogits = scores * (dscores - (dscores * scores).sum(-1, keepdim=True))

    # the z loss
    if losses is not None and losses.z_loss:
        factor = 2 * losses.z_loss * losses.scale * losses.counted.to(scores.dtype)
        dlogits = dlogits + (factor * logits.logsumexp(-1))[..., None] * logits.softmax(-1)
    return dlogits


# ---- Triton ------------------------------------------------------------------------------------------------
# A tile has TOKENS tokens of one sequence, with one slot per expert for each token. Slots are ordered by
# group: a group has SLOTS of them, and there are SLOT_GROUPS groups, both rounded up to powers of two. A slot
# without an expert has a logit of -inf.

@triton.jit
def experts_of_slots(
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT_GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Return (expert of each slot, whether it exists): [SLOT_GROUPS * SLOTS]. SIZE: experts of a group."""
    slots = tl.arange(0, SLOT_GROUPS * SLOTS)
    group = slots // SLOTS
    place = slots % SLOTS
    return group * SIZE + place, (place < SIZE) & (group < GROUPS)


@triton.jit
def load_logits(LOGITS, tokens, num_tokens, experts, exists, num_experts):
    """Load the logits of a tile: [TOKENS, all slots]."""
    inside = (tokens < num_tokens)[:, None] & exists[None, :]
    logits = load_fp32(LOGITS + tile_offsets(tokens, experts, num_experts), inside)
    return tl.where(exists[None, :], logits, float("-inf"))


@triton.jit
def row_softmax(logits) -> "tuple[tl.tensor, tl.tensor]":
    """Return (softmax, logsumexp) over the last dim of [M, N]."""
    largest = tl.max(logits, 1)
    exponentials = tl.exp(logits - largest[:, None])
    total = tl.sum(exponentials, 1)
    return exponentials / total[:, None], largest + tl.log(total)


@triton.jit
def stable_sigmoid(logits):
    return 1 / (1 + tl.exp(-logits))


@triton.jit
def mask_unselected_groups(
    scores,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    SLOT_GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Mask scores [TOKENS, all slots] to -inf outside of the token's best TOP_GROUPS groups."""
    tokens: tl.constexpr = scores.shape[0]
    by_group = tl.reshape(scores, (tokens, SLOT_GROUPS, SLOTS))

    # scores of groups
    best = tl.max(by_group, 2)  # [TOKENS, SLOT_GROUPS]
    if SIGMOID:
        first = tl.argmax(by_group, 2)
        is_first = tl.arange(0, SLOTS)[None, None, :] == first[:, :, None]
        best += tl.max(tl.where(is_first, float("-inf"), by_group), 2)

    # select the best of them
    groups = tl.arange(0, SLOT_GROUPS)[None, :]
    is_open = tl.zeros((tokens, SLOT_GROUPS), tl.int1)
    for _ in range(TOP_GROUPS):
        is_next = groups == tl.argmax(best, 1)[:, None]
        is_open = is_open | is_next
        best = tl.where(is_next, float("-inf"), best)
    by_group = tl.where(is_open[:, :, None], by_group, float("-inf"))
    return tl.reshape(by_group, scores.shape)


@triton.jit
def router_kernel(
    LOGITS, BIAS, COUNTED, GIVEN, INDEX, WEIGHTS, PARTIALS, s, scale,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
    EPSILON: tl.constexpr,
    SMALLEST_SHARE: tl.constexpr,
    SLOT_GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Compute INDEX and WEIGHTS [b, s, TOP_K] of every num_programs-th tile of a sequence, and this program's
    sums over them, PARTIALS [b, programs, 2 EXPERTS + 2]: counts, shares, squares, entropy.

    CHOICES is TOP_K, rounded up to a power of two. HAS_GIVEN: INDEX is a copy of GIVEN.
    """
    program = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    LOGITS += sequence * s * EXPERTS
    INDEX += sequence * s * TOP_K
    WEIGHTS += sequence * s * TOP_K

    SIZE: tl.constexpr = EXPERTS // GROUPS
    ALL: tl.constexpr = SLOT_GROUPS * SLOTS
    experts, exists = experts_of_slots(GROUPS=GROUPS, SIZE=SIZE, SLOT_GROUPS=SLOT_GROUPS, SLOTS=SLOTS)
    slots = tl.arange(0, ALL)[None, :]
    choices = tl.arange(0, CHOICES)
    if HAS_BIAS:
        bias = load_fp32(BIAS + experts, exists)[None, :]

    counts = tl.zeros((TOKENS, ALL), tl.float32)
    share_sums = tl.zeros((TOKENS, ALL), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    entropies = tl.zeros((TOKENS,), tl.float32)
    for first in range(program * TOKENS, s, tl.num_programs(0) * TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        logits = load_logits(LOGITS, tokens, s, experts, exists, EXPERTS)
        shares, logsumexp = row_softmax(logits)
        scores = shares
        if SIGMOID:
            scores = stable_sigmoid(logits)
            shares = scores / (tl.sum(scores, 1) + EPSILON)[:, None]

        # selection keys; NaN becomes inf, to be chosen first as in torch.topk
        left = scores
        if HAS_BIAS:
            left += bias
        left = tl.where(left != left, float("inf"), left)
        left = tl.where(exists[None, :], left, float("-inf"))
        if GROUPS > 1:
            left = mask_unselected_groups(
                left, TOP_GROUPS=TOP_GROUPS, SIGMOID=SIGMOID, SLOT_GROUPS=SLOT_GROUPS, SLOTS=SLOTS
            )

        # select the best, one after the other
        index = tl.zeros((TOKENS, CHOICES), tl.int32)
        chosen = tl.zeros((TOKENS, CHOICES), tl.float32)
        is_chosen = tl.zeros((TOKENS, ALL), tl.float32)
        for choice in range(TOP_K):
            if HAS_GIVEN:
                places = (sequence * s + tokens.to(tl.int64)) * TOP_K + choice
                expert = tl.load(GIVEN + places, tokens < s, 0).to(tl.int32)
                slot = expert // SIZE * SLOTS + expert % SIZE
            else:
                slot = tl.argmax(left, 1)  # the first of equals
            is_next = slots == slot[:, None]
            left = tl.where(is_next, float("-inf"), left)
            is_chosen += is_next.to(tl.float32)
            score = tl.sum(tl.where(is_next, scores, 0.0), 1)
            is_here = (choices == choice)[None, :]
            index = tl.where(is_here, (slot // SLOTS * SIZE + slot % SLOTS)[:, None], index)
            chosen = tl.where(is_here, score[:, None], chosen)

        # weights
        weights = chosen
        if RENORM:
            weights = weights / (tl.sum(chosen, 1) + EPSILON)[:, None]
        offsets = tile_offsets(tokens, choices, TOP_K)
        inside = inside_matrix(tokens, choices, s, TOP_K)
        tl.store(INDEX + offsets, index, inside)
        tl.store(WEIGHTS + offsets, weights * scale, inside)

        # sums over counted tokens
        if HAS_SUMS:
            counted = tl.load(COUNTED + sequence * s + tokens, tokens < s, 0).to(tl.float32)
            counts += is_chosen * counted[:, None]
            share_sums += shares * counted[:, None]
            squares += logsumexp * logsumexp * counted
            logarithms = tl.log(tl.maximum(shares, SMALLEST_SHARE))
            entropies -= tl.sum(shares * logarithms, 1) * counted

    if HAS_SUMS:
        PARTIALS += (sequence * tl.num_programs(0) + program) * (2 * EXPERTS + 2)
        tl.store(PARTIALS + experts, tl.sum(counts, 0), exists)
        tl.store(PARTIALS + EXPERTS + experts, tl.sum(share_sums, 0), exists)
        tl.store(PARTIALS + 2 * EXPERTS, tl.sum(squares, 0))
        tl.store(PARTIALS + 2 * EXPERTS + 1, tl.sum(entropies, 0))


@triton.jit
def statistics_kernel(
    SUMS, LOAD, COUNTS, NEW_LOAD, SCALE, STATS, b, experts, load_stride, counts_stride, aux_loss, z_loss,
    HAS_LOAD: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_Z: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute STATS [experts + 4] of a microbatch, from the SUMS [b, 2 experts + 2] of its sequences.

    One program. HAS_COUNTS: NEW_LOAD is computed from COUNTS. load_stride and counts_stride are the elements
    between sequences, or 0 if all share the same.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < experts
    counts = tl.zeros((BLOCK,), tl.float32)
    imbalance = tl.zeros((BLOCK,), tl.float32)
    squares = 0.0
    entropy = 0.0
    for sequence in range(b):
        sums = SUMS + sequence * (2 * experts + 2)
        counts += tl.load(sums + columns, inside, 0.0)
        if HAS_COUNTS:
            load = load_fp32(COUNTS + sequence * counts_stride + columns, inside)
            load *= experts / tl.maximum(tl.sum(load, 0), 1.0)
            tl.store(NEW_LOAD + sequence * load_stride + columns, load, inside)
        if HAS_LOAD:
            load = load_fp32(LOAD + sequence * load_stride + columns, inside)
        if HAS_COUNTS or HAS_LOAD:
            imbalance += tl.load(sums + experts + columns, inside, 0.0) * load
        squares += tl.load(sums + 2 * experts)
        entropy += tl.load(sums + 2 * experts + 1)

    # in the order of ROUTER_STATS; the first, dropped tokens, is 0
    scale = tl.load(SCALE).to(tl.float32)
    tl.store(STATS + columns, counts, inside)
    tl.store(STATS + experts, 0.0)
    tl.store(STATS + experts + 1, entropy)
    tl.store(STATS + experts + 2, scale * aux_loss * tl.sum(imbalance, 0))
    z = 0.0
    if HAS_Z:
        z = scale * z_loss * squares
    tl.store(STATS + experts + 3, z)


@triton.jit
def router_backward_kernel(
    DWEIGHTS, LOGITS, INDEX, COUNTED, LOAD, SCALE, DLOGITS, s, scale, aux_loss, z_loss, load_stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORM: tl.constexpr,
    HAS_AUX: tl.constexpr,
    HAS_Z: tl.constexpr,
    IN_TWO: tl.constexpr,
    EPSILON: tl.constexpr,
    ALL: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Compute DLOGITS of one tile, like logits_gradient: [b, s, EXPERTS], or with IN_TWO [b, s, 2 EXPERTS] in
    16 bits: the rounded values, followed by the rounding residues.
    """
    sequence = tl.program_id(1).to(tl.int64)
    tokens = block_range(tl.program_id(0), TOKENS)
    experts = tl.arange(0, ALL)
    exists = experts < EXPERTS
    logits = load_logits(LOGITS + sequence * s * EXPERTS, tokens, s, experts, exists, EXPERTS)
    softmax, logsumexp = row_softmax(logits)
    scores = softmax
    if SIGMOID:
        scores = stable_sigmoid(logits)

    # the weights -> the chosen scores
    choices = tl.arange(0, CHOICES)
    offsets = sequence * s * TOP_K + tile_offsets(tokens, choices, TOP_K)
    inside = inside_matrix(tokens, choices, s, TOP_K)
    dchosen = load_fp32(DWEIGHTS + offsets, inside) * scale  # [TOKENS, CHOICES]
    index = INDEX + sequence * s * TOP_K + tokens.to(tl.int64) * TOP_K  # [TOKENS]
    if RENORM:
        chosen = tl.zeros((TOKENS, CHOICES), tl.float32)
        for choice in range(TOP_K):
            expert = tl.load(index + choice, tokens < s, -1).to(tl.int32)
            score = tl.sum(tl.where(experts[None, :] == expert[:, None], scores, 0.0), 1)
            chosen = tl.where((choices == choice)[None, :], score[:, None], chosen)
        total = tl.sum(chosen, 1) + EPSILON
        along_weights = tl.sum(dchosen * chosen, 1) / total
        dchosen = (dchosen - along_weights[:, None]) / total[:, None]
    dscores = tl.zeros((TOKENS, ALL), tl.float32)
    for choice in range(TOP_K):
        expert = tl.load(index + choice, tokens < s, -1).to(tl.int32)
        gradient = tl.sum(tl.where((choices == choice)[None, :], dchosen, 0.0), 1)
        dscores += tl.where(experts[None, :] == expert[:, None], gradient[:, None], 0.0)

    # the load balance -> all shares -> all scores
    if HAS_AUX or HAS_Z:
        counted = tl.load(COUNTED + sequence * s + tokens, tokens < s, 0).to(tl.float32)
        counted *= tl.load(SCALE).to(tl.float32)
    if HAS_AUX:
        load = load_fp32(LOAD + sequence * load_stride + experts, exists)
        dshares = (aux_loss * counted)[:, None] * load[None, :]
        if SIGMOID:
            total = tl.sum(scores, 1) + EPSILON
            along_shares = tl.sum(dshares * scores, 1) / total
            dshares = (dshares - along_shares[:, None]) / total[:, None]
        dscores += dshares

    # the scores -> the logits
    if SIGMOID:
        dlogits = dscores * scores * (1 - scores)
    else:
        along_scores = tl.sum(dscores * scores, 1)
        dlogits = scores * (dscores - along_scores[:, None])
    if HAS_Z:
        dlogits += (2 * z_loss * counted * logsumexp)[:, None] * softmax

    inside = inside_matrix(tokens, experts, s, EXPERTS)
    width = 2 * EXPERTS if IN_TWO else EXPERTS
    pointers = DLOGITS + sequence * s * width + tile_offsets(tokens, experts, width)
    rounded = dlogits.to(DLOGITS.dtype.element_ty)
    tl.store(pointers, rounded, inside)
    if IN_TWO:
        tl.store(pointers + EXPERTS, dlogits - rounded.to(tl.float32), inside)


def launch_router(
    logits: Tensor,
    rule: RoutingRule,
    bias: Tensor | None,
    counted: Tensor | None,
    given: Tensor | None = None,
) -> RouterChoice:
    """Run choose_experts as one kernel, and the sum over its programs."""
    b, s, num_experts = logits.shape
    logits = logits.contiguous()
    index = logits.new_empty(b, s, rule.top_k, dtype=torch.int64)
    weights = logits.new_empty(b, s, rule.top_k)

    slots = power_of_2(num_experts // rule.groups)
    slot_groups = power_of_2(rule.groups)
    tokens = tokens_of_tile(slots * slot_groups)
    tiles = ceil_div(s, tokens)
    programs = tiles
    partials = None
    if counted is not None:
        programs = min(tiles, ceil_div(PROGRAMS * num_processors(logits.device), b))
        partials = logits.new_empty(b, programs, 2 * num_experts + 2)
        counted = counted.contiguous()
    router_kernel[(programs, b)](
        logits, bias, counted, None if given is None else given.contiguous(), index, weights, partials, s,
        rule.scale,
        EXPERTS=num_experts,
        GROUPS=rule.groups,
        TOP_GROUPS=rule.top_groups,
        TOP_K=rule.top_k,
        SIGMOID=rule.sigmoid,
        RENORM=rule.renorm,
        HAS_BIAS=bias is not None,
        HAS_SUMS=counted is not None,
        HAS_GIVEN=given is not None,
        EPSILON=EPSILON,
        SMALLEST_SHARE=SMALLEST_SHARE,
        SLOT_GROUPS=slot_groups,
        SLOTS=slots,
        CHOICES=power_of_2(rule.top_k),
        TOKENS=tokens,
        num_warps=WARPS,
    )
    if partials is None:
        return RouterChoice(index, weights, None)
    sums = partials.sum(1)  # [b, 2E + 2]
    by_kind = RouterSums(
        sums[:, :num_experts], sums[:, num_experts:-2], squares=sums[:, -2], entropy=sums[:, -1]
    )
    return RouterChoice(index, weights, by_kind)


def tokens_of_tile(slots: int) -> int:
    """Return how many tokens with `slots` scores a program processes at a time."""
    return max(1, min(MAX_TOKENS, TILE // slots))


def launch_statistics(
    sums: RouterSums,
    scale: Tensor,
    load: Tensor | None,
    counts: Tensor | None,
    *,
    aux_loss: float,
    z_loss: float,
) -> tuple[Tensor, Tensor | None]:
    """Run router_statistics as one kernel. sums comes from launch_router, adjacent in memory."""
    b, num_experts = sums.counts.shape
    stats = sums.counts.new_empty(num_experts + len(ROUTER_STATS), dtype=torch.float64)
    new_load = load
    if counts is not None:
        new_load = counts.new_empty(counts.shape)
    statistics_kernel[(1,)](
        sums.counts, load, counts, new_load, scale, stats, b, num_experts,
        load_stride=row_stride(new_load),
        counts_stride=row_stride(counts),
        aux_loss=aux_loss,
        z_loss=z_loss,
        HAS_LOAD=load is not None,
        HAS_COUNTS=counts is not None,
        HAS_Z=z_loss > 0,
        BLOCK=power_of_2(num_experts),
        num_warps=1,
    )
    return stats, new_load


def row_stride(load: Tensor | None) -> int:
    """Return the elements from the row of one sequence to that of the next: 0 if all share the same."""
    return 0 if load is None or len(load) == 1 else load.stride(0)


def launch_backward(
    dweights: Tensor,
    logits: Tensor,
    index: Tensor,
    rule: RoutingRule,
    losses: RouterLosses | None,
    dtype: torch.dtype,
) -> Tensor:
    """Run logits_gradient as one kernel: [b, s, E] in fp32, or [b, s, 2E] in 16 bits
    (router_backward_kernel)."""
    b, s, num_experts = logits.shape
    in_two = dtype != torch.float32
    dlogits = logits.new_empty(b, s, (1 + in_two) * num_experts, dtype=dtype)
    load = None if losses is None else losses.load
    slots = power_of_2(num_experts)
    tokens = tokens_of_tile(slots)
    router_backward_kernel[(ceil_div(s, tokens), b)](
        dweights.contiguous(), logits, index,
        None if losses is None else losses.counted.contiguous(),
        load,
        None if losses is None else losses.scale,
        dlogits, s, rule.scale,
        0.0 if losses is None else losses.aux_loss,
        0.0 if losses is None else losses.z_loss,
        row_stride(load),
        EXPERTS=num_experts,
        TOP_K=rule.top_k,
        SIGMOID=rule.sigmoid,
        RENORM=rule.renorm,
        HAS_AUX=load is not None,
        HAS_Z=losses is not None and losses.z_loss > 0,
        IN_TWO=in_two,
        EPSILON=EPSILON,
        ALL=slots,
        CHOICES=power_of_2(rule.top_k),
        TOKENS=tokens,
        num_warps=WARPS,
    )
    return dlogits


# ---- autograd ----------------------------------------------------------------------------------------------

class _RoutedWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        logit_bias: Tensor | None,
        logits: Tensor,
        choice: RouterChoice,
        rule: RoutingRule,
        losses: RouterLosses | None,
        function: RecomputeFunction | None,
        *args: Tensor,
    ) -> Tensor:
        inputs = args if function else (x,)
        ctx.save_for_backward(logits, choice.index, *inputs)
        ctx.weight = weight  # the Parameter itself, which has main_grad
        ctx.logit_bias = logit_bias
        ctx.rule = rule
        ctx.losses = losses
        ctx.function = function
        ctx.dtype = x.dtype
        ctx.triton = logits.numel() > 0 and kernel_is_available("router", logits)
        return choice.weights.view_as(choice.weights)

    @staticmethod
    def backward(ctx, dweights: Tensor) -> tuple[Tensor | None, ...]:
        logits, index, *inputs = ctx.saved_tensors
        x = recompute_input(ctx.function, None, *inputs)()
        weight = ctx.weight.detach()
        in_two = ctx.triton and x.dtype == weight.dtype != logits.dtype
        if ctx.triton:
            dtype = x.dtype if in_two else logits.dtype
            dlogits = launch_backward(dweights, logits, index, ctx.rule, ctx.losses, dtype)
        else:
            dlogits = logits_gradient(dweights, logits, index, ctx.rule, ctx.losses)

        flat_x = x.flatten(0, -2)  # [t, d]
        flat_dlogits = dlogits.flatten(0, -2)  # [t, E], in two [t, 2E]
        if in_two:
            dx = flat_dlogits @ weight.repeat(2, 1)
            dw = accumulate_grad(
                ctx.weight, lambda into, add: write_wgrad_in_two(into, flat_dlogits, flat_x, add))
        else:
            dx = flat_dlogits @ weight.to(logits.dtype)
            dw = accumulate_grad(
                ctx.weight,
                lambda into, add: write_wgrad(into, flat_dlogits, flat_x.to(logits.dtype), add),
            )
        dbias = None
        if ctx.logit_bias is not None:
            summed = flat_dlogits.sum(0, dtype=logits.dtype)
            dbias = accumulate_summed_grad(ctx.logit_bias, summed.view(-1, len(ctx.logit_bias)).sum(0))
        rest = [None] * (5 + len(inputs) * (ctx.function is not None))
        return dx.to(x.dtype).view(x.shape), dw, dbias, *rest


def write_wgrad_in_two(into: Tensor | None, dlogits: Tensor, x: Tensor, add: bool) -> Tensor:
    """into [E, d] = (or, add: +=) dy^T x, where dlogits [t, 2E] is dy rounded, and the rounding residue.

    x is [t, d]. One GEMM for both, so that x is read once. With into None, return dy^T x.
    """
    rounded, left = multiply_into_fp32(dlogits.t(), x).chunk(2)
    if into is None:
        return rounded + left
    if not add:
        return torch.add(rounded, left, out=into)
    return into.add_(rounded).add_(left)
