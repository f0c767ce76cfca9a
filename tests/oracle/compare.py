"""Two trainings of one model side by side: the largest relative error of everything that both told."""

import math
import pathlib
import shlex
from dataclasses import dataclass

import ours
import theirs
import torch
from ours import Corpus, Run
from theirs import Family, Told
from torch import Tensor, nn

BOUND = 1e-9


@dataclass(frozen=True)
class Row:
    """Largest relative errors of one run."""

    name: str
    errors: dict[str, float]


def gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest number of the reference."""
    return float((ours.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-300))


def check_first(first: dict[str, Tensor], std: float, layers: int, width: float = 1.0) -> None:
    """Initial weights: norms 1, biases and sinks 0, matrices normal with the recipe's std, output projections
    that over sqrt(2 layers); under muP of a model `width` times as wide (arXiv 2203.03466, table 8) hidden
    matrices width^-1/2 and what reads off a fixed number of values (routers, gates) 1 / width of that. Mean
    and std within five standard errors, no two tensors alike."""
    for key, w in first.items():
        if w.dim() == 1:
            assert (w == (0.0 if key.endswith(("bias", "sinks")) else 1.0)).all(), key
            continue
        want = std / (2 * layers) ** 0.5 if key.endswith(("attn.o.weight", ".down.weight")) else std
        if key.startswith("layers."):
            want /= width if key.endswith((".router.weight", "shared_gate.weight")) else width**0.5
        n = w.numel()
        assert abs(float(w.mean())) < 5 * want / n**0.5, key
        assert abs(float(w.double().square().mean().sqrt()) / want - 1) < 5 / (2 * n) ** 0.5, key
    drawn = [float(w.flatten()[0]) for w in first.values() if w.dim() > 1]
    assert len(set(drawn)) == len(drawn)


def lists(ours: list[float], theirs: list[float]) -> float:
    """Largest relative error of numbers that each stand alone."""
    assert len(ours) == len(theirs), f"{len(ours)} numbers beside {len(theirs)}"
    assert [a is None for a in ours] == [b is None for b in theirs]
    return max(abs(a - b) / abs(b) if b else abs(a) for a, b in zip(ours, theirs) if b is not None)


def samples(corpus: Corpus, family: Family, batches: list[dict], split: str) -> tuple[list[list], list[int]]:
    """Microbatches as the model saw them -> the same from the corpus, as lists of pieces; where each sample
    begins."""
    r = family.recipe
    starts = [[corpus.start(b, row, r.docs, split) for row in range(len(b["tokens"]))] for b in batches]
    assert all(len(row) == r.micro for row in starts) and sum(map(len, starts)) % r.batch == 0
    pieces = [[corpus.pieces(at, r.seq, r.docs) for at in row] for row in starts]
    return pieces, [at for row in starts for at in row]


def prove(
    home: pathlib.Path,
    corpus: Corpus,
    family: Family,
    more: str = "",
    rate=lambda name: 1.0,
    optimizer=theirs.TorchAdamW,
) -> tuple[Row, Run, Told, nn.Module]:
    """Train both; compare every loss, norm, rate, validation, weight and moment."""
    r = family.recipe
    name = f"{family.name}{' docs' * r.docs} mb{r.micro}"
    run = ours.run(
        home, name.replace(" ", "-"), corpus, [*family.args.split(), *r.arguments(), *shlex.split(more)]
    )

    # what was read
    steps, starts = [], []
    for batches in run.steps:
        pieces, at = samples(corpus, family, batches, "train")
        steps.append(pieces)
        starts += at
    ours.check_order(starts, r.seq, corpus.bounds("train"))
    valid, at = samples(corpus, family, run.valid, "valid")
    ours.check_order(at, r.seq, corpus.bounds("valid"))

    # the same by hand
    model = theirs.build(family)
    theirs.take(model, run.first)
    optim = optimizer(model, r, rate)
    told = theirs.follow(model, family, r, steps, valid, optim)

    # side by side
    errors = {
        "loss": lists(run.of("loss"), told.losses),
        "norm": lists(run.of("grad_norm"), told.norms),
        "rate": lists(run.of("lr"), told.rates),
        "valid": lists(run.of("val_loss"), told.valid),
    }
    if family.router.aux or family.router.z:
        errors["router"] = max(lists(run.of("aux_loss"), told.aux), lists(run.of("z_loss"), told.z))
    if "noise_s" in run.rows[1]:
        s, g2 = ([one[i] for one in told.noise] for i in (0, 1))
        errors["noise"] = max(
            lists(run.of("noise_s"), s),
            lists(run.of("noise_g2"), g2),
            lists(run.of("noise_scale"), smooth(s, g2)),
        )
    errors |= tensors(run, model, family, optim, told.rates)
    clipped = sum(norm > r.clip for norm in told.norms)
    assert 0 < clipped < r.steps, f"the clip bites in {clipped} steps of {r.steps}: {told.norms}"
    return Row(name, errors), run, told, model


def smooth(s: list[float], g2: list[float]) -> list[float | None]:
    """The noise scale S / |G|^2 of running means of both, which keep 0.95 of what they were a step; None
    below zero."""
    out, a, b = [], s[0], g2[0]
    for i, (x, y) in enumerate(zip(s, g2)):
        a, b = (0.95 * a + 0.05 * x, 0.95 * b + 0.05 * y) if i else (x, y)
        out.append(a / b if min(a, b) > 0 else None)
    return out


@torch.no_grad()
def tensors(run: Run, model: nn.Module, family: Family, optim, rates: list[float]) -> dict[str, float]:
    """Errors of weights and moments over all that the checkpoint holds; each of theirs must be there."""
    theirs_, worst, seen = dict(model.named_parameters()), {"weights": 0.0, "moments": 0.0}, 0
    routers = {
        key: model.get_submodule(theirs.place(model, key + ".weight")[0].removesuffix(".weight"))
        for key in {k.rpartition(".")[0] for k in run.last if k.endswith((".router.bias", ".router.load"))}
    }
    for key, mine in run.last.items():
        body, _, moment = key.partition("@")
        if body.endswith(".router.bias"):
            worst["weights"] = max(worst["weights"], gap(mine, routers[body[:-5]].e_score_correction_bias))
            continue
        if body.endswith(".router.load"):
            worst["weights"] = max(worst["weights"], gap(mine, routers[body[:-5]].load))
            continue
        name, part = theirs.place(model, body)
        want = part(optim.moment(name, moment) if moment else theirs_[name])
        kind = "moments" if moment else "weights"
        seen += 0 if moment else want.numel()
        if family.kind == "GPT2" and body.endswith("attn.k.bias"):
            # a shift that all keys share changes no probability: no gradient, both hold rounding errors alone
            assert max(float(mine.abs().max()), float(want.abs().max())) < (1e-15 if moment else 1e-8), key
            continue
        if len(mine) > len(want):  # rows behind the vocabulary: no gradient, weight decay alone
            left = 0.0 if moment else math.prod(1 - lr * family.recipe.weight_decay for lr in rates)
            want = torch.cat((want, run.first[body][len(want) :] * left))
        error = gap(mine, want)
        if error > BOUND:
            print(f"{family.name}: {key} differs by {error:.1e}")
        worst[kind] = max(worst[kind], error)
    assert seen == sum(p.numel() for p in theirs_.values())
    return worst
