"""optim.qk_clip beside the rule of its paper (arXiv 2507.20534, section 2.1), in models of transformers: the
scores are what their softmax is given, and heads are scaled one by one."""

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers", reason="transformers is not installed: the reference is made of it")

import compare  # noqa: E402
import families  # noqa: E402
import theirs  # noqa: E402
from paper_rules import RULES  # noqa: E402
from test_oracle_formulas import ByHand  # noqa: E402

TAU = 0.2
WITHOUT_AHEAD = {**families.LATENTS[1].config, "num_nextn_predict_layers": 0}
DEEPSEEK = replace(
    families.LATENTS[1], mtp=0, args=f"{families.LATENTS[1].args} --model.mtp none", config=WITHOUT_AHEAD
)
CASES = {  # (family, optimizer)
    "grouped": (families.DENSE[2], "adamw"),
    "grouped by Muon": (families.DENSE[2], "muon"),
    "one key head for each query head": (families.DENSE[1], "adamw"),
    "biases": (families.DENSE[5], "adamw"),
    "latent": (families.LATENTS[0], "adamw"),
    "latent queries": (DEEPSEEK, "adamw"),
}


class Softmaxes(TorchFunctionMode):
    """Hands what a softmax of scores [b, h, s, s] is given to keep(scores)."""

    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.softmax and args[0].dim() == 4:
            self.keep(args[0].detach())
        return func(*args, **(kwargs or {}))


class Clipped:
    """An optimizer, and the paper's rule after each of its steps."""

    def __init__(self, model, recipe, rate, inner, clipped):
        self.inner, self.model, self.clipped = inner(model, recipe, rate), model, clipped
        self.moment = self.inner.moment
        self.largest = defaultdict(list)  # {name of a layer's attention: a number for each head and forward}
        for name, module in model.named_modules():
            if name.endswith(".self_attn"):
                mode = Softmaxes(partial(self.keep, name))
                module.register_forward_pre_hook(lambda *_, mode=mode: mode.__enter__() and None)
                module.register_forward_hook(lambda *_, mode=mode: mode.__exit__(None, None, None))

    def keep(self, name, scores):
        if torch.is_grad_enabled():
            self.largest[name].append([float(scores[:, head].max()) for head in range(scores.shape[1])])

    @torch.no_grad()
    def step(self, number, lr):
        self.inner.step(number, lr)
        for name, seen in self.largest.items():
            largest = [max(of_head) for of_head in zip(*seen)]
            gammas = [min(1.0, TAU / score) if score > 0 else 1.0 for score in largest]
            module = self.model.get_submodule(name)
            (latent if hasattr(module, "kv_b_proj") else grouped)(module, gammas)
            self.clipped.append(gammas)
        self.largest.clear()


def grouped(module, gammas):
    """Heads of one key head by the smallest of their gammas."""
    size, heads = module.head_dim, len(gammas)
    key_heads = module.k_proj.out_features // size
    for group in range(key_heads):
        readers = range(group * heads // key_heads, (group + 1) * heads // key_heads)
        of_key = min(gammas[head] for head in readers)
        scale(module.k_proj, group * size, size, math.sqrt(of_key))
        for head in readers:
            scale(module.q_proj, head * size, size, gammas[head] / math.sqrt(of_key))


def latent(module, gammas):
    """q^C and k^C by sqrt(gamma), q^R by gamma."""
    plain, turned, value = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    queries = module.q_proj if module.q_lora_rank is None else module.q_b_proj
    for head, gamma in enumerate(gammas):
        scale(queries, head * (plain + turned), plain, math.sqrt(gamma))
        scale(queries, head * (plain + turned) + plain, turned, gamma)
        scale(module.kv_b_proj, head * (plain + value), plain, math.sqrt(gamma))


def scale(projection, first, rows, factor):
    projection.weight[first : first + rows] *= factor
    if projection.bias is not None:
        projection.bias[first : first + rows] *= factor


@pytest.mark.parametrize("name", CASES)
def test_scores_are_clipped_as_the_paper_says(place, note, name):
    """Some head is clipped in each of 20 steps, and in most of them several by different gammas."""
    family, optimizer = CASES[name]
    recipe = replace(family.recipe, micro=2, docs=False)
    family = replace(family, name=f"qk-clip {name}", recipe=recipe)
    inner = theirs.TorchAdamW if optimizer == "adamw" else partial(ByHand, rule=RULES[optimizer])
    clipped = []
    more = f"--optim.qk_clip {TAU} --optim.name {optimizer}"
    by_hand = partial(Clipped, inner=inner, clipped=clipped)
    row, *_ = compare.prove(*place, family, more, optimizer=by_hand)
    note(row)
    layers = len(clipped) // recipe.steps
    of_steps = [sum(clipped[layers * step : layers * (step + 1)], []) for step in range(recipe.steps)]
    assert max(map(min, of_steps)) < 1
    assert sum(len({gamma for gamma in gammas if gamma < 1}) > 1 for gammas in of_steps) > recipe.steps / 2
