"""The same training written by hand around models of transformers; nothing here imports a line of Bevatron.

transformers computes norms, softmax and rotary angles in fp32 whatever the model's dtype, which hides
everything below 1e-7. `Wide` runs its code with fp64 wherever it asks for fp32; nothing else about it is
changed.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.overrides import TorchFunctionMode

WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Wide(TorchFunctionMode):
    """Every torch function is called with fp64 instead of fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [WIDE.get(x, x) if isinstance(x, torch.dtype) else x for x in args]
        kwargs = {k: WIDE.get(x, x) if isinstance(x, torch.dtype) else x for k, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def wide() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


# ---- what is trained, and how ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A run's settings; `arguments` says them to train.py, `follow` takes them from here."""

    steps: int = 20
    seq: int = 24
    micro: int = 1
    batch: int = 4
    docs: bool = False
    lr: float = 1e-2
    min_lr: float = 1e-3
    warmup: int = 2
    decay: str = "cosine"
    decay_fraction: float = 0.4
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.1
    eval_every: int = 7
    eval_batches: int = 2

    def arguments(self) -> list[str]:
        keys = {
            "train.steps": self.steps,
            "train.seq_len": self.seq,
            "train.micro_batch": self.micro,
            "train.global_batch": self.batch,
            "data.doc_mask": str(self.docs).lower(),
            "optim.lr": self.lr,
            "optim.warmup": self.warmup,
            "optim.decay": self.decay,
            "optim.beta1": self.beta1,
            "optim.beta2": self.beta2,
            "optim.momentum": self.momentum,
            "optim.eps": self.eps,
            "optim.weight_decay": self.weight_decay,
            "optim.clip": self.clip,
            "eval.every": self.eval_every,
            "eval.batches": self.eval_batches,
        }
        # what would do nothing is refused
        if self.decay == "wsd":
            keys["optim.decay_fraction"] = self.decay_fraction
        if self.decay != "constant":
            keys["optim.min_lr"] = self.min_lr
        return [word for key, value in keys.items() for word in (f"--{key}", str(value))]

    def rate(self, step: int) -> float:
        """The learning rate of update `step` = 1 .. steps. Warm-up: at most a tenth of a short horizon."""
        rise = self.warmup if self.steps >= 10 * self.warmup else self.steps // 10
        if step <= rise:
            return self.lr * step / rise
        gone = (step - rise) / (self.steps - rise)
        if self.decay == "cosine":
            return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * gone)) / 2
        if self.decay == "linear":
            return self.lr - (self.lr - self.min_lr) * gone
        if self.decay == "wsd":  # flat, then a straight line over the last share of the horizon
            left = min(1.0, (self.steps - step) / (self.decay_fraction * self.steps))
            return self.min_lr + (self.lr - self.min_lr) * left
        return self.lr


@dataclass(frozen=True)
class Router:
    """Terms that training adds to a mixture. kind: whose load is balanced; bias_rate: of the selection bias;
    capacity: of an expert, in fair shares of a sequence; by_place: the last are dropped, not the least
    likely.
    """

    aux: float = 0.0
    kind: str = "sequence"
    z: float = 0.0
    sigmoid: bool = False
    bias_rate: float | None = None
    capacity: float | None = None
    by_place: bool = False


@dataclass(frozen=True)
class Family:
    """args: our recipe's name and what makes it small; kind, config: the same model as transformers says it.
    logits, scores: factors of the logits and, beside 1 / sqrt(head_dim), of attention's scores (muP)."""

    name: str
    args: str
    kind: str
    config: dict
    router: Router = Router()
    recipe: Recipe = Recipe()
    mtp: int = 0
    mtp_weight: float = 0.3
    logits: float = 1.0
    scores: float = 1.0
    tied: bool = False


# ---- their model and our names -----------------------------------------------------------------------------


class Ahead(nn.Module):
    """One module of multi-token prediction (arXiv 2412.19437, section 2.2, eq. 21 to 23), which transformers
    leaves out: h' = M [norm(embedding of the token ahead) ; norm(h)], a block of the model, a norm before the
    shared head. (The paper writes the two halves the other way round; the released weights have the embedding
    first.)"""

    def __init__(self, block: nn.Module, width: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (nn.RMSNorm(width, eps=eps) for _ in range(3))
        self.eh_proj, self.block = nn.Linear(2 * width, width, bias=False), block

    def forward(self, h: Tensor, e: Tensor, angles, mask: Tensor) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(e), self.hnorm(h)), -1))
        return self.norm(self.block(x, attention_mask=mask, position_embeddings=angles))


def build(family: Family) -> nn.Module:
    """transformers' model in fp64 from its config class; its modules of multi-token prediction as `ahead`."""
    transformers.logging.set_verbosity_error()
    with wide():
        config = getattr(transformers, f"{family.kind}Config")(
            **{
                "vocab_size": 257,
                "pad_token_id": None,
                "bos_token_id": None,
                "eos_token_id": None,
                "use_cache": False,
                "tie_word_embeddings": family.tied,
                **family.config,
            }
        )
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
        )
        layer = type(model.model.layers[-1]) if family.mtp else None
        model.ahead = nn.ModuleList(
            Ahead(layer(config, config.num_hidden_layers + k), config.hidden_size, config.rms_norm_eps)
            for k in range(family.mtp)
        )
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = module.scaling * family.scores
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        assert t.dtype == torch.float64 or not t.is_floating_point(), f"{name} is {t.dtype}"
    return model.train()


ATTENTION = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_b": "self_attn.kv_b_proj",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
    "attn.k_norm": "self_attn.k_norm",
}
MLP = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
# where a family has other names, or stacks its experts as [E, inputs, outputs]
OWN_NAMES = {
    "gpt_oss": {"mlp.router": "mlp.router"},
    "llama4_text": {
        "mlp.router": "feed_forward.router",
        **{
            f"mlp.{ours}{part}": f"feed_forward.{theirs}{part}_proj"
            for ours, theirs in (("", ""), ("shared.", "shared_expert."))
            for part in ("gate", "up", "down")
        },
    },
}
TURNED_EXPERTS = {  # {kind: (its name, which of the outputs are gate and up)}
    "gpt_oss": ("mlp.experts", (slice(0, None, 2), slice(1, None, 2))),
    "llama4_text": ("feed_forward.experts", (slice(None, 20), slice(20, None))),
}
ROUTERS = ("topkrouter", "llama4router")  # ends of the names of their modules
AHEAD = {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "head_norm": "norm"}
TABLES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
}
GPT2 = {
    "embed.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attn.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def place(model: nn.Module, key: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Our key -> the name of their parameter, and which part of that tensor it is: a view in the shape of
    ours."""
    kind = model.config.model_type
    whole = lambda t: t
    if not key.startswith("layers."):
        return (GPT2 if kind == "gpt2" else TABLES)[key], whole
    layer, body, leaf = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias|logit_bias|sinks)", key).groups()
    if kind == "gpt2":
        turned = (lambda t: t.t()) if leaf == "weight" and "norm" not in body else whole
        if body in ("attn.q", "attn.k", "attn.v"):
            third = "qkv".index(body[-1])
            return f"transformer.h.{layer}.attn.c_attn.{leaf}", lambda t: turned(t.chunk(3, -1)[third])
        return f"transformer.h.{layer}.{GPT2_BLOCK[body]}.{leaf}", turned

    depth = model.config.num_hidden_layers
    inside = f"model.layers.{layer}" if int(layer) < depth else f"ahead.{int(layer) - depth}.block"
    if body in AHEAD:
        return f"ahead.{int(layer) - depth}.{AHEAD[body]}.{leaf}", whole
    if leaf == "sinks":
        return f"{inside}.self_attn.sinks", whole
    expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)", body)
    if expert and kind in TURNED_EXPERTS:
        number, which = int(expert[1]), expert[2]
        name, halves = TURNED_EXPERTS[kind]
        name = f"{inside}.{name}.{'down' if which == 'down' else 'gate_up'}_proj{'_bias' * (leaf == 'bias')}"
        outputs = slice(None) if which == "down" else halves[which == "up"]
        return name, lambda t: t[number].t()[outputs]
    if body in OWN_NAMES.get(kind, {}):
        return f"{inside}.{OWN_NAMES[kind][body]}.{leaf.removeprefix('logit_')}", whole
    if expert:
        number, which = int(expert[1]), expert[2]
        if which == "down":
            return f"{inside}.mlp.experts.down_proj", lambda t: t[number]
        return f"{inside}.mlp.experts.gate_up_proj", lambda t: t[number].chunk(2)[which == "up"]
    if body.startswith("mlp.shared."):
        shared = "shared_expert" if kind == "qwen2_moe" else "shared_experts"
        return f"{inside}.mlp.{shared}.{body.rpartition('.')[2]}_proj.{leaf}", whole
    if body == "attn.q_norm":
        return f"{inside}.self_attn.{'q_a_layernorm' if 'deepseek' in kind else 'q_norm'}.{leaf}", whole
    return f"{inside}.{ {**ATTENTION, **MLP}[body] }.{leaf}", whole


@torch.no_grad()
def take(model: nn.Module, first: dict[str, Tensor]) -> None:
    """Our weights before the first step into their model; every element of it is filled."""
    theirs, filled = dict(model.named_parameters()), 0
    for key, value in first.items():
        name, part = place(model, key)
        view = part(theirs[name])
        view.copy_(value[: len(view)])  # behind the vocabulary our tables are padded
        filled += view.numel()
    assert filled == sum(p.numel() for p in theirs.values()), "their model has weights that ours has not"


# ---- one pass ----------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """Results of one forward pass: the summed loss of the counted tokens and their number, the further
    tokens' loss, and of each router the samples' counted tokens: [(sample, logits [tokens, experts], choices
    [tokens, k])]."""

    loss: Tensor
    tokens: int
    ahead: Tensor | float = 0.0
    routed: list[list[tuple[int, Tensor, Tensor]]] = field(default_factory=list)


def routers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.lower().endswith(ROUTERS)]


def forward(model: nn.Module, family: Family, samples: list[list]) -> Pass:
    """samples: each a list of pieces (numpy int64 [n]), whose n - 1 last tokens are predicted from those
    before them in the piece alone. A piece is a row of the batch: what is filled up behind it cannot be seen,
    since attention is causal."""
    rows = [(i, torch.from_numpy(p)) for i, pieces in enumerate(samples) for p in pieces if len(p) > 1]
    longest = max(len(p) for _, p in rows)
    ids = torch.stack([torch.nn.functional.pad(p, (0, longest - len(p))) for _, p in rows])
    seen: list[tuple[Tensor, Tensor]] = []

    def look(module, args, output):
        if family.kind == "Llama4Text":
            weights, logits = output
            chosen = logits.topk(module.top_k, -1).indices
        else:
            _, weights, chosen = output
            x = args[0].reshape(-1, module.weight.shape[1])
            logits = linear(x, module.weight, getattr(module, "bias", None))
        seen.append((logits.view(*shape, -1), chosen.view(*shape, -1)))
        if family.router.capacity is None or not torch.is_grad_enabled():
            return None
        kept = room(
            family.router, weights.detach().view(*shape, -1), chosen.view(*shape, -1), len(module.weight)
        )
        return None, weights * kept.view(weights.shape), chosen

    hooks = [m.register_forward_hook(look) for m in routers_of(model)]
    with wide():
        # the next token
        shape = (len(rows), longest - 1)
        base = model.transformer if family.kind == "GPT2" else model.model
        h = base(input_ids=ids[:, :-1]).last_hidden_state
        out = Pass(summed(model, family, h, rows, 1), sum(len(p) - 1 for _, p in rows))
        out.routed += [counted(rows, 1, *one) for one in seen]
        # further ones
        for k, module in enumerate(model.ahead, 1):
            shape = (len(rows), longest - 1 - k)
            seen.clear()
            places = torch.arange(shape[1])[None]
            mask = torch.full((shape[1], shape[1]), float("-inf"), dtype=torch.float64).triu(1)[None, None]
            angles = model.model.rotary_emb(h, places)
            h = module(h[:, : shape[1]], model.model.embed_tokens(ids[:, k:-1]), angles, mask)
            out.ahead = out.ahead + summed(model, family, h, rows, 1 + k) * family.mtp_weight / family.mtp
            out.routed += [counted(rows, 1 + k, *one) for one in seen]
    for hook in hooks:
        hook.remove()
    return out


def summed(model: nn.Module, family: Family, h: Tensor, rows: list, ahead: int) -> Tensor:
    """h [rows, n, d] -> the summed cross entropy of the tokens `ahead` places further on in each piece."""
    logits = linear(h, model.get_output_embeddings().weight) * family.logits
    known = [max(0, len(p) - ahead) for _, p in rows]
    return sum(cross_entropy(x[:n], p[ahead:], reduction="sum") for x, n, (_, p) in zip(logits, known, rows))


def counted(rows: list, ahead: int, logits: Tensor, chosen: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Select the tokens of each piece that have a target."""
    known = [max(0, len(p) - ahead) for _, p in rows]
    return [(i, x[:n], c[:n]) for (i, _), n, x, c in zip(rows, known, logits, chosen)]


def room(r: Router, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """Which choices [sequences, n, k] find room: an expert takes the likeliest (or the first) capacity * n *
    k / E of a sequence."""
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    for row, (w, c) in enumerate(zip(weights, chosen)):
        most = math.ceil(r.capacity * c.numel() / experts)
        for e in range(experts):
            at = (c == e).nonzero()
            order = at if r.by_place else at[w[c == e].argsort(descending=True)]
            for token, slot in order[:most].tolist():
                kept[row, token, slot] = True
    return kept


# ---- the router's losses -----------------------------------------------------------------------------------


def balance(family: Family, routed: list, load: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
    """Terms of one router in the loss of a microbatch: (load balance, z). routed: `counted`'s; load: f of
    the step before (arXiv 2501.11873); tokens: of the step.

    Sequence-wise (arXiv 2412.19437, eq. 17 to 20): alpha sum_i f_i P_i with
        f_i = E / (k n) sum_t 1(t chose i)    and    P_i = 1 / n sum_t s_ti / sum_j s_tj
    over a sequence's n tokens, weighted n / tokens. Micro: the same over a microbatch (arXiv 2101.03961,
    eq. 4 to 6). z: the mean of logsumexp^2 (arXiv 2202.08906, eq. 5).
    """
    r = family.router
    groups = sorted({i for i, *_ in routed}) if r.kind == "sequence" else [None]
    aux = torch.zeros((), dtype=torch.float64)
    for group in groups:
        logits = torch.cat([x for i, x, _ in routed if group in (None, i)])
        chosen = torch.cat([c for i, _, c in routed if group in (None, i)])
        n, experts = logits.shape
        if n == 0:
            continue
        scores = logits.sigmoid() if r.sigmoid else logits.exp()
        p = (scores / scores.sum(1, keepdim=True)).mean(0)
        share = chosen.flatten().bincount(minlength=experts).double() / (chosen.shape[1] * n)
        f = share * experts if load is None else load
        aux = aux + r.aux * (f * p).sum() * n / tokens
    everything = torch.cat([x for _, x, _ in routed])
    return aux, r.z * everything.exp().sum(1).log().square().sum() / tokens


# ---- training ----------------------------------------------------------------------------------------------


@dataclass
class Told:
    """Results of the reference in each step; norms of the first microbatch's and the step's gradients of
    hidden matrices."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)
    aux: list[float] = field(default_factory=list)
    z: list[float] = field(default_factory=list)
    noise: list[tuple[float, float]] = field(default_factory=list)


def is_vector(name: str, p: Tensor) -> bool:
    """Also one of each expert, in one tensor."""
    return p.dim() == 1 or name.endswith("_bias")


class TorchAdamW:
    """torch.optim.AdamW in two groups: matrices decay, vectors do not. rate: factor of the learning rate by
    name (muP), with weight decay times learning rate as it was."""

    MOMENTS = {"adam_m": "exp_avg", "adam_v": "exp_avg_sq"}

    def __init__(
        self, model: nn.Module, recipe: Recipe, rate: Callable[[str], float] = lambda name: 1.0
    ) -> None:
        self.params = dict(model.named_parameters())
        groups = [
            {
                "params": [p],
                "rate": rate(name),
                "weight_decay": 0.0 if is_vector(name, p) else recipe.weight_decay / rate(name),
            }
            for name, p in self.params.items()
        ]
        self.optim = torch.optim.AdamW(groups, lr=0.0, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps)

    def step(self, number: int, lr: float) -> None:
        for group in self.optim.param_groups:
            group["lr"] = lr * group["rate"]
        self.optim.step()

    def moment(self, name: str, moment: str) -> Tensor:
        return self.optim.state[self.params[name]][self.MOMENTS[moment]]


def follow(
    model: nn.Module, family: Family, recipe: Recipe, steps: list[list[list]], valid: list[list], optim
) -> Told:
    """steps: of each step its microbatches, of each its samples as lists of pieces; valid: the validation's
    batches."""
    told, params = Told(), list(model.parameters())
    routers = routers_of(model)
    load = [torch.ones(len(m.weight)) if family.router.kind == "global" else None for m in routers]

    def validate() -> None:
        with torch.no_grad():
            passes = [forward(model, family, samples) for samples in valid]
        told.valid.append(float(sum(p.loss for p in passes)) / sum(p.tokens for p in passes))

    validate()
    for number, batches in enumerate(steps, 1):
        tokens = sum(len(piece) - 1 for samples in batches for pieces in samples for piece in pieces)
        model.zero_grad()
        loss, aux, z, counts, first = 0.0, 0.0, 0.0, [0] * len(routers), None
        for samples in batches:
            p = forward(model, family, samples)
            losses = [balance(family, routed, f, tokens) for routed, f in zip(p.routed, load)]
            mine = sum(a for a, _ in losses) + sum(b for _, b in losses)
            ((p.loss + p.ahead) / tokens + mine).backward()
            loss += float(p.loss.detach()) / tokens
            aux += sum(float(a.detach()) for a, _ in losses)
            z += sum(float(b.detach()) for _, b in losses)
            for i, (m, routed) in enumerate(zip(routers, p.routed)):
                chosen = torch.cat([c for *_, c in routed]).flatten()
                counts[i] = counts[i] + chosen.bincount(minlength=len(m.weight)).double()
            first = first or (p.tokens, hidden_square(model) * (tokens / p.tokens) ** 2)

        # clip and update
        norm = math.sqrt(sum(float(g.grad.square().sum()) for g in params if g.grad is not None))
        told.noise.append(noise(*first, tokens, hidden_square(model)))
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # an expert that no token chose
            p.grad *= min(1.0, recipe.clip / (norm + 1e-6))
        lr = recipe.rate(number)
        optim.step(number, lr)

        # what routers keep
        for i, m in enumerate(routers):
            if family.router.bias_rate is not None:
                m.e_score_correction_bias += family.router.bias_rate * (counts[i].mean() - counts[i]).sign()
            if family.router.kind == "global":
                load[i] = counts[i] * len(m.weight) / counts[i].sum()
        for list_, value in (
            (told.losses, loss),
            (told.norms, norm),
            (told.rates, lr),
            (told.aux, aux),
            (told.z, z),
        ):
            list_.append(value)
        if number % recipe.eval_every == 0 or number == len(steps):
            validate()
    for m, f in zip(routers, load):
        m.load = f
    return told


def hidden_square(model: nn.Module) -> float:
    """|gradient|^2 of the matrices between hidden features: attention and dense MLP."""
    return sum(
        float(p.grad.square().sum())
        for name, p in model.named_parameters()
        if p.dim() == 2 and p.grad is not None and (".self_attn." in name or ".mlp." in name)
    )


def noise(small: int, small_square: float, big: int, big_square: float) -> tuple[float, float]:
    """S and |G|^2 (arXiv 1812.06162, appendix A.1, eq. A.2 and A.3), in tokens."""
    g2 = (big * big_square - small * small_square) / (big - small) if big > small else float("nan")
    s = (small_square - big_square) / (1 / small - 1 / big) if big > small else float("nan")
    return s, g2
