"""What no model of transformers has, from the papers' formulas: muP, the gradient noise scale, capacities,
and each optimizer."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: the reference is made of it")

import compare  # noqa: E402
import families  # noqa: E402
import theirs  # noqa: E402

LLAMA, MIXTRAL = families.DENSE[1], families.MIXTURES[0]
QWEN2_MOE = families.MIXTURES[1]
WIDER = 2.0  # hidden 32 beside a tuned model of 16


# ---- muP ---------------------------------------------------------------------------------------------------


def mup_rate(name: str) -> float:
    """arXiv 2203.03466, table 8, Adam: tables and vectors learn at the tuned rate, hidden matrices, routers
    and gates at 1 / m."""
    inside = ".self_attn." in name or ".mlp." in name
    return 1 / WIDER if inside and not name.endswith(".bias") else 1.0


MUP = {"llama": (LLAMA, 0.5), "tied": (replace(LLAMA, tied=True), 1.0), "qwen2-moe": (QWEN2_MOE, 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize("base,scores", MUP.values(), ids=MUP)
def test_mup(place, note, base, scores):
    """Scores grow as 1 / head_dim from the tuned head_dim on: sqrt(2 / 8) of the usual ones."""
    more = "--model.mup.base 16"
    more += " --model.mup.head_dim 2" * (scores != 1.0) + " --model.tied true" * base.tied
    family = replace(base, name=f"muP {base.name}{' tied' * base.tied}", logits=1 / WIDER, scores=scores)
    row, run, *_ = compare.prove(*place, family, more, mup_rate)
    compare.check_first(run.first, families.STD, 2, WIDER)
    note(row)


# ---- noise scale, capacities -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("docs,micro", [(True, 1), (False, 2)])
def test_noise_scale(place, note, docs, micro):
    family = families.variant(replace(LLAMA, name="noise scale llama2"), docs, micro)
    row, *_ = compare.prove(*place, family, "--log.noise_scale true")
    assert "noise" in row.errors
    note(row)


@pytest.mark.slow
@pytest.mark.parametrize("by_place", [False, True])
def test_capacity(place_without_ties, note, by_place):
    """Experts turn away what is over 3/4 of their fair share of a sequence, in training alone."""
    drop = "position" if by_place else "probability"
    router = replace(MIXTRAL.router, kind="sequence", capacity=0.75, by_place=by_place)
    family = families.variant(replace(MIXTRAL, name=f"mixtral drops by {drop}", router=router), False, 2)
    capacity = f"--model.mlp.capacity.factor 0.75 --model.mlp.capacity.drop {drop}"
    row, run, *_ = compare.prove(
        *place_without_ties, family, f"--model.mlp.router.aux.over sequence {capacity}"
    )
    assert min(run.of("moe_dropped")) > 0.1
    note(row)


# ---- optimizers --------------------------------------------------------------------------------------------


class ByHand:
    """A rule over whole tensors, as a paper has it. library: torch's own, where there is one, that takes the
    same gradients in a copy of the weights; LIBRARY: how far it may end from the rule's, None: there is
    none."""

    LIBRARY: float | None = None

    def __init__(self, model, recipe, rate) -> None:
        self.r, self.rate, self.params = recipe, rate, dict(model.named_parameters())
        self.state = {name: {} for name in self.params}
        self.copies = {name: torch.nn.Parameter(p.detach().clone()) for name, p in self.params.items()}
        self.libraries = self.library() if self.LIBRARY else []

    @torch.no_grad()
    def step(self, number: int, lr: float) -> None:
        for name, w in self.params.items():
            decay = self.r.weight_decay / self.rate(name) if w.dim() > 1 else 0.0
            self.copies[name].grad = w.grad.clone()
            w.copy_(self.rule(name, w, w.grad, self.state[name], number, lr * self.rate(name), decay))
        for optim in self.libraries:
            for group in optim.param_groups:
                group["lr"] = lr
            with Wider():
                optim.step()

    def rule(self, name, w, g, s, step, lr, decay):
        raise NotImplementedError

    def library(self) -> list:
        raise NotImplementedError

    def groups(self, names) -> list[dict]:
        return [
            {"params": [p], "weight_decay": self.r.weight_decay if p.dim() > 1 else 0.0}
            for p in (self.copies[n] for n in names)
        ]

    def moment(self, name: str, moment: str) -> torch.Tensor:
        return self.state[name][moment]

    def check(self) -> float:
        """Largest difference of the library's copy from the rule's weights."""
        if not self.libraries:
            return 0.0
        return max(compare.gap(self.copies[n].detach(), self.params[n].detach()) for n in self.params)


class Wider(torch.overrides.TorchFunctionMode):
    """torch.optim.Muon rounds to bf16 whatever it is given; here to fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (torch.Tensor.double if func is torch.Tensor.bfloat16 else func)(*args, **(kwargs or {}))


class SGD(ByHand):
    """Polyak 1964, with L2 decay in the gradient."""

    LIBRARY = 1e-9

    def rule(self, name, w, g, s, step, lr, decay):
        s["momentum"] = self.r.momentum * s.get("momentum", 0) + g + decay * w
        return w - lr * s["momentum"]

    def library(self):
        return [torch.optim.SGD(self.groups(self.params), lr=0.0, momentum=self.r.momentum)]


class Lion(ByHand):
    """arXiv 2302.06675, algorithm 2."""

    def rule(self, name, w, g, s, step, lr, decay):
        m = s.get("lion_m", torch.zeros_like(w))
        s["lion_m"] = self.r.beta2 * m + (1 - self.r.beta2) * g
        return w - lr * ((self.r.beta1 * m + (1 - self.r.beta1) * g).sign() + decay * w)


class LAMB(ByHand):
    """arXiv 1904.00962, algorithm 2 with phi the identity. What does not decay moves without the ratio."""

    def rule(self, name, w, g, s, step, lr, decay):
        b1, b2 = self.r.beta1, self.r.beta2
        m = s["adam_m"] = b1 * s.get("adam_m", 0) + (1 - b1) * g
        v = s["adam_v"] = b2 * s.get("adam_v", 0) + (1 - b2) * g**2
        r = m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + self.r.eps) + decay * w
        return w - lr * (w.norm() / r.norm() if w.dim() > 1 else 1.0) * r


class LARS(ByHand):
    """arXiv 1708.03888, algorithm 1 with eta 0.001; the ratio over the decayed gradient's norm. As LAMB of
    what does not decay."""

    def rule(self, name, w, g, s, step, lr, decay):
        r = g + decay * w
        rate = lr * (0.001 * w.norm() / r.norm() if w.dim() > 1 else 1.0)
        s["momentum"] = self.r.momentum * s.get("momentum", 0) + rate * r
        return w - s["momentum"]


class Adam(ByHand):
    """arXiv 1711.05101, algorithm 2."""

    def rule(self, name, w, g, s, step, lr, decay):
        b1, b2 = self.r.beta1, self.r.beta2
        m = s["adam_m"] = b1 * s.get("adam_m", 0) + (1 - b1) * g
        v = s["adam_v"] = b2 * s.get("adam_v", 0) + (1 - b2) * g**2
        return w - lr * (m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + self.r.eps) + decay * w)


class Muon(Adam):
    """Keller Jordan 2024 with arXiv 2502.16982's scale 0.2 sqrt(max(m, n)) on hidden matrices; AdamW on the
    rest.

    torch's keeps (1 - momentum) times the momentum, which the iteration's first division takes out again but
    for the eps beside the norm: with it at 0 there and 1e-7 here, a relative 1e-7 / |momentum| lies between
    the two.
    """

    LIBRARY = 1e-4

    def rule(self, name, w, g, s, step, lr, decay):
        if not (".self_attn." in name or ".mlp." in name):
            return super().rule(name, w, g, s, step, lr, decay)
        m = s["muon_m"] = self.r.momentum * s.get("muon_m", 0) + g
        x = g + self.r.momentum * m
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        return w * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(w.shape)) * x

    def library(self):
        hidden = [n for n in self.params if ".self_attn." in n or ".mlp." in n]
        adam = [n for n in self.params if n not in hidden]
        return [
            torch.optim.Muon(
                self.groups(hidden),
                lr=0.0,
                momentum=self.r.momentum,
                nesterov=True,
                eps=0.0,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(self.groups(adam), lr=0.0, betas=(self.r.beta1, self.r.beta2), eps=self.r.eps),
        ]


class AdamBf16(Adam):
    """AdamW whose weights and moments are stored in bf16, rounded stochastically (arXiv 2010.06192): 16
    random bits below the last one that bf16 keeps are added, the carry decides. The bits: splitmix64's
    finalizer of a hash of (seed, step, name) plus the element's number; the lowest 16 for the weight, the
    next for m, the next for v."""

    def rule(self, name, w, g, s, step, lr, decay):
        new = super().rule(name, w, g, s, step, lr, decay)
        key = next(k for k in self.keys if theirs.place(self.model, k + ".weight")[0] == name)
        digest = hashlib.sha256(f"round/1234/{step}/{key}.weight".encode()).digest()
        x = np.arange(w.numel(), dtype=np.uint64) + np.uint64(int.from_bytes(digest[:8], "little"))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        bits = x ^ (x >> np.uint64(31))
        s["adam_m"] = nearby(s["adam_m"], bits >> np.uint64(16))
        s["adam_v"] = nearby(s["adam_v"], bits >> np.uint64(32))
        return nearby(new, bits)

    def __init__(self, model, recipe, rate) -> None:
        super().__init__(model, recipe, rate)
        parts = ["attn.q", "attn.k", "attn.v", "attn.o", "attn_norm", "mlp_norm", "mlp.gate", "mlp.up"]
        parts.append("mlp.down")
        self.model = model
        self.keys = ["embed", "head", "norm", *(f"layers.{i}.{part}" for i in range(2) for part in parts)]


def nearby(x: torch.Tensor, bits: np.ndarray) -> torch.Tensor:
    """x -> the bf16 number below or above, by the low 16 bits, in x's dtype."""
    raw = x.float().numpy().view(np.uint32).ravel() + (bits & np.uint64(0xFFFF)).astype(np.uint32)
    return torch.from_numpy((raw & np.uint32(0xFFFF0000)).view(np.float32)).to(x.dtype).view(x.shape)


# the rule, and what of the recipe fits it; the clip bites in some steps and not in others
RULES = {
    "adamw": (Adam, {}),
    "adamw-bf16": (AdamBf16, {}),
    "muon": (Muon, {}),
    "lamb": (LAMB, {"clip": 1.5}),
    "lion": (Lion, {"lr": 3e-3, "min_lr": 3e-4}),
    "sgd": (SGD, {"lr": 0.1, "min_lr": 0.02}),
    "lars": (LARS, {"lr": 0.5, "min_lr": 0.1, "clip": 2.2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_optimizer(place, note, name):
    """Tables without padding: LAMB and LARS count its rows in the norms."""
    rule, changes = RULES[name]
    family = replace(
        LLAMA, name=f"{name} llama2", recipe=replace(LLAMA.recipe, docs=True, micro=2, decay="wsd", **changes)
    )
    more = f"--optim.name {name.partition('-')[0]} --model.vocab_multiple 1"
    more += " --optim.states bf16" * (rule is AdamBf16)
    made = []

    def optimizer(*args) -> ByHand:
        made.append(rule(*args))
        return made[0]

    row, *_ = compare.prove(*place, family, more, optimizer=optimizer)
    note(row)
    assert made[0].check() <= (rule.LIBRARY or 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name,power", [("lion", 1.0), ("muon", 0.5)])
def test_mup_of_other_optimizers(place, note, name, power):
    """Hidden matrices learn m^-power times as fast: a sign's update grows with the width as Adam's does; an
    orthogonal one of Adam's size has a spectral norm that grows as the width's root (arXiv 2310.17813)."""
    rule, changes = RULES[name]
    alone = type(name, (rule,), {"LIBRARY": None})
    recipe = replace(LLAMA.recipe, docs=True, micro=2, **changes)
    family = replace(LLAMA, name=f"muP {name} llama2", logits=1 / WIDER, recipe=recipe)
    row, *_ = compare.prove(
        *place,
        family,
        f"--optim.name {name} --model.mup.base 16",
        lambda weight: mup_rate(weight) ** power,
        alone,
    )
    note(row)
