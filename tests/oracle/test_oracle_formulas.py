"""Beside the formulas of papers, where transformers has no model: muP, the gradient noise scale, capacities,
and each optimizer."""

import hashlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: the reference is made of it")

import compare  # noqa: E402
import families  # noqa: E402
import theirs  # noqa: E402
from paper_rules import RULES, Update, adamw, dion, muon, normuon  # noqa: E402

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
def test_mup_starts_and_learns_as_its_table_says(place, note, base, scores):
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
def test_the_noise_scale_is_that_of_its_formula(place, note, docs, micro):
    family = families.variant(replace(LLAMA, name="noise scale llama2"), docs, micro)
    row, *_ = compare.prove(*place, family, "--log.noise_scale true")
    assert "noise" in row.errors
    note(row)


@pytest.mark.slow
@pytest.mark.parametrize("by_place", [False, True])
def test_experts_over_their_capacity_drop_tokens(place_without_ties, note, by_place):
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
    """A rule of tests/paper_rules.py over all tensors. libraries(self): torch's own optimizers, where it has
    them, of copies of the weights, which take the same gradients.
    """

    def __init__(self, model, recipe, rate, rule, libraries=None) -> None:
        self.r, self.rate, self.rule, self.params = recipe, rate, rule, dict(model.named_parameters())
        self.state = {name: {} for name in self.params}
        self.copies = {name: torch.nn.Parameter(p.detach().clone()) for name, p in self.params.items()}
        self.libraries = libraries(self) if libraries else []

    @torch.no_grad()
    def step(self, number: int, lr: float) -> None:
        r = self.r
        for name, w in self.params.items():
            decay = r.weight_decay / self.rate(name) if w.dim() > 1 else 0.0
            self.copies[name].grad = w.grad.clone()
            update = Update(number, lr * self.rate(name), decay, r.beta1, r.beta2, r.momentum, r.eps)
            w.copy_(self.updated(name, w, w.grad, self.state[name], update))
        for optim in self.libraries:
            for group in optim.param_groups:
                group["lr"] = lr
            with Wider():
                optim.step()

    def updated(self, name, w, g, state, update):
        of_matrices = self.rule in (dion, muon, normuon)
        rule = adamw if of_matrices and not is_hidden(name) else self.rule
        return rule(w, g, state, update)

    def groups(self, names) -> list[dict]:
        return [
            {"params": [p], "weight_decay": self.r.weight_decay if p.dim() > 1 else 0.0}
            for p in (self.copies[n] for n in names)
        ]

    def moment(self, name: str, moment: str) -> torch.Tensor:
        """NorMuon's second moment of a row is that of each of its elements in a checkpoint."""
        return self.state[name][moment].expand_as(self.params[name])

    def distance_of_libraries(self) -> float:
        """Largest difference of the libraries' copies from the rule's weights."""
        if not self.libraries:
            return 0.0
        return max(compare.gap(self.copies[n].detach(), self.params[n].detach()) for n in self.params)


def is_hidden(name: str) -> bool:
    return ".self_attn." in name or ".mlp." in name


class Wider(torch.overrides.TorchFunctionMode):
    """torch.optim.Muon rounds to bf16 whatever it is given; here to fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (torch.Tensor.double if func is torch.Tensor.bfloat16 else func)(*args, **(kwargs or {}))


def sgd_of_torch(mine: ByHand) -> list:
    return [torch.optim.SGD(mine.groups(mine.params), lr=0.0, momentum=mine.r.momentum)]


def muon_of_torch(mine: ByHand) -> list:
    """torch keeps (1 - momentum) times the momentum, which the iteration's first division takes out again but
    for the eps beside the norm: with it at 0 there and 1e-7 here, a relative 1e-7 / |momentum| lies between
    the two.
    """
    r = mine.r
    hidden, others = ([n for n in mine.params if is_hidden(n) == wanted] for wanted in (True, False))
    how = {"momentum": r.momentum, "nesterov": True, "eps": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    return [
        torch.optim.Muon(mine.groups(hidden), lr=0.0, **how),
        torch.optim.AdamW(mine.groups(others), lr=0.0, betas=(r.beta1, r.beta2), eps=r.eps),
    ]


MATRICES = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")


class DionByHand(ByHand):
    """Dion, whose Q^T begins with normal numbers, of a generator with the hash of (seed, name, 0)."""

    def __init__(self, model, *rest, **more) -> None:
        super().__init__(model, *rest, **more)
        for key in (f"layers.{i}.{part}.weight" for i in range(2) for part in MATRICES):
            name, _ = theirs.place(model, key)
            digest = hashlib.sha256(f"1234/{key}@dion_q/0".encode()).digest()
            stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self.state[name]["dion_q"] = torch.randn(self.params[name].shape, generator=stream).double()


class AdamBf16(ByHand):
    """AdamW whose weights and moments are stored in bf16, rounded stochastically (arXiv 2010.06192): 16
    random bits below the last one that bf16 keeps are added, the carry decides. The bits: splitmix64's
    finalizer of a hash of (seed, step, name) plus the element's number; the lowest 16 for the weight, the
    next for m, the next for v."""

    def updated(self, name, w, g, state, update):
        new = super().updated(name, w, g, state, update)
        key = next(k for k in self.keys if theirs.place(self.model, k + ".weight")[0] == name)
        digest = hashlib.sha256(f"round/1234/{update.step}/{key}.weight".encode()).digest()
        x = np.arange(w.numel(), dtype=np.uint64) + np.uint64(int.from_bytes(digest[:8], "little"))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        bits = x ^ (x >> np.uint64(31))
        state["adam_m"] = nearby(state["adam_m"], bits >> np.uint64(16))
        state["adam_v"] = nearby(state["adam_v"], bits >> np.uint64(32))
        return nearby(new, bits)

    def __init__(self, model, *rest) -> None:
        super().__init__(model, *rest)
        parts = (*MATRICES, "attn_norm", "mlp_norm")
        self.model = model
        self.keys = ["embed", "head", "norm", *(f"layers.{i}.{part}" for i in range(2) for part in parts)]


def nearby(x: torch.Tensor, bits: np.ndarray) -> torch.Tensor:
    """x -> the bf16 number below or above, by the low 16 bits, in x's dtype."""
    raw = x.float().numpy().view(np.uint32).ravel() + (bits & np.uint64(0xFFFF)).astype(np.uint32)
    return torch.from_numpy((raw & np.uint32(0xFFFF0000)).view(np.float32)).to(x.dtype).view(x.shape)


# what of the recipe fits a rule: the clip bites in some steps and not in others
RECIPES = {
    "adamw": {},
    "adamw-bf16": {},
    "muon": {},
    "normuon": {},
    "dion": {},
    "lamb": {"clip": 1.5},
    "lion": {"lr": 3e-3, "min_lr": 3e-4},
    "sgd": {"lr": 0.1, "min_lr": 0.02},
    "lars": {"lr": 0.5, "min_lr": 0.1, "clip": 2.2},
}
BY_HAND = {"dion": DionByHand}
# (torch's own, how far it may end from the rule's)
LIBRARIES = {"sgd": (sgd_of_torch, 1e-9), "muon": (muon_of_torch, 1e-4)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_an_optimizer_trains_as_the_rule_of_its_paper(place, note, name):
    """Tables without padding: LAMB and LARS count its rows in the norms."""
    rule, _, states = name.partition("-")
    recipe = replace(LLAMA.recipe, docs=True, micro=2, decay="wsd", **RECIPES[name])
    family = replace(LLAMA, name=f"{name} llama2", recipe=recipe)
    more = f"--optim.name {rule} --model.vocab_multiple 1" + " --optim.states bf16" * bool(states)
    library, distance = LIBRARIES.get(name, (None, 0.0))
    made = []

    def optimizer(*args) -> ByHand:
        kind = AdamBf16 if states else BY_HAND.get(rule, ByHand)
        made.append(kind(*args, RULES[rule], library))
        return made[0]

    row, *_ = compare.prove(*place, family, more, optimizer=optimizer)
    note(row)
    assert made[0].distance_of_libraries() <= distance


class GroupedAdamW(theirs.TorchAdamW):
    """torch.optim.AdamW with three groups of parameters more: the embedding, attention, and all norms."""

    def __init__(self, model, recipe, rate) -> None:
        super().__init__(model, recipe, rate)
        for name, group in zip(self.params, self.optim.param_groups):
            if "embed_tokens" in name:
                group |= {"rate": 0.3, "weight_decay": 0.0}
            elif ".self_attn." in name:
                group |= {"rate": 2.0, "weight_decay": 0.5}
            elif "norm" in name:
                group |= {"rate": 0.5}


@pytest.mark.slow
def test_groups_of_parameters_train_as_torchs(place, note):
    groups = (
        "embedding: lr_factor 0.3, weight_decay 0; layers.*.attn.*: lr_factor 2, weight_decay 0.5; "
        "norm: lr_factor 0.5"
    )
    family = replace(LLAMA, name="groups llama2")
    more = f"--model.vocab_multiple 1 --optim.groups '{groups}'"
    row, *_ = compare.prove(*place, family, more, optimizer=GroupedAdamW)
    note(row)


@pytest.mark.slow
@pytest.mark.parametrize("name,power", [("lion", 1.0), ("muon", 0.5), ("normuon", 0.5), ("dion", 0.5)])
def test_mup_scales_the_rates_of_lion_and_muon(place, note, name, power):
    """Hidden matrices learn m^-power times as fast: a sign's update grows with the width as Adam's does; an
    orthogonal one of Adam's size has a spectral norm that grows as the width's root (arXiv 2310.17813)."""
    recipe = replace(LLAMA.recipe, docs=True, micro=2, **RECIPES[name])
    family = replace(LLAMA, name=f"muP {name} llama2", logits=1 / WIDER, recipe=recipe)
    row, *_ = compare.prove(
        *place,
        family,
        f"--optim.name {name} --model.mup.base 16",
        lambda weight: mup_rate(weight) ** power,
        partial(BY_HAND.get(name, ByHand), rule=RULES[name]),
    )
    note(row)
