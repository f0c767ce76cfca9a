"""log.inside_every in one process: every number of a step of train.py beside transformers' model, whose
layers are looked at by hand, and torch.optim.
"""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed: the reference is made of it")

import families  # noqa: E402
import ours  # noqa: E402
import theirs  # noqa: E402
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402

# five tokens a step: some units are opened by none
RECIPE = theirs.Recipe(steps=20, seq=5, micro=1, batch=1, warmup=1, clip=0.05, decay="constant")
MISTRAL = families.DENSE[4]
MIXTRAL = replace(
    families.MIXTURES[0],
    args=f"mixtral-tiny {families.GROUPED} --model.mlp.experts 6 --model.mlp.router.aux none",
)
CASES = {
    "llama3": families.DENSE[2],
    "mistral": replace(
        MISTRAL,
        args=MISTRAL.args.replace("window 7", "window 3"),
        config={**MISTRAL.config, "sliding_window": 3},
    ),
    "mixtral": MIXTRAL,
}
EVERY = 2


def kind_of(key: str) -> tuple[int | None, str]:
    """(layer, kind) of a weight."""
    if not key.startswith("layers."):
        return None, {"embed": "embedding", "head": "head", "norm": "outer_norms"}[key.split(".")[0]]
    layer, body = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", key).groups()
    body = "norms" if body.endswith("norm") else "experts" if ".experts." in body else body
    return int(layer), body.replace("mlp.router", "router")


def rms(x: Tensor) -> float:
    return float(x.detach().square().mean().sqrt())


def seen_inside(model, tokens: Tensor, targets: Tensor) -> dict[str, list[float | None]]:
    """Forward and backward of the mean loss, and {statistic: of each layer}."""
    layers, outputs, gates, projections = model.model.layers, {}, {}, {}
    hooks = []

    def keep(name, module, where=outputs):
        def look(_, args, output):
            where[name] = output[0] if isinstance(output, tuple) else output

        hooks.append(module.register_forward_hook(look))

    for i, layer in enumerate(layers):
        keep(("block_rms", i), layer)
        keep(("mixer_rms", i), layer.self_attn)
        keep(("mlp_rms", i), layer.mlp)
        keep(("q", i), layer.self_attn.q_proj, projections)
        keep(("k", i), layer.self_attn.k_proj, projections)
        if hasattr(layer.mlp, "gate_proj"):
            keep(i, layer.mlp.gate_proj, gates)
    routed, inputs = {}, {}
    for i, router in enumerate(theirs.routers_of(model)):
        def route(_, args, output, i=i):
            inputs[i], routed[i] = args[0], output[2]

        hooks.append(router.register_forward_hook(route))

    with theirs.wide():
        out = model(input_ids=tokens, output_hidden_states=True)
        torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten()).backward()
        cos, sin = model.model.rotary_emb(out.hidden_states[0], torch.arange(tokens.shape[1])[None])
    for hook in hooks:
        hook.remove()

    seen = {name: [None] * len(layers) for name in ("block_rms", "mixer_rms", "mlp_rms")}
    for (name, i), x in outputs.items():
        seen[name][i] = rms(x)
    for i, h in enumerate(out.hidden_states[1:-1]):  # the last is behind the last norm
        assert rms(h) == seen["block_rms"][i]

    # scores
    s, window = tokens.shape[1], getattr(model.config, "sliding_window", None)
    distance = torch.arange(s)[:, None] - torch.arange(s)
    visible = (distance >= 0) & (distance < (window or s))
    seen["largest_logit"] = []
    for i, layer in enumerate(layers):
        size = layer.self_attn.head_dim
        q, k = (projections[name, i].unflatten(-1, (-1, size)).transpose(1, 2) for name in "qk")
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q @ k.mT) * layer.self_attn.scaling
        seen["largest_logit"].append(float(scores[..., visible].detach().max()))

    # units and routers
    if gates:
        seen["dead_units"] = [float((g <= 0).flatten(0, 1).all(0).double().mean()) for g in gates.values()]
        return seen
    seen |= {"dead_units": [], "router_entropy": [], "expert_share": []}
    for i, layer in enumerate(layers):
        x, chosen = inputs[i].reshape(-1, 32), routed[i].reshape(-1, routed[i].shape[-1])
        mean = (x @ layer.mlp.gate.weight.T).softmax(-1).mean(0)
        seen["router_entropy"].append(float(-(mean * mean.log()).sum().detach()))
        counts = torch.bincount(chosen.flatten(), minlength=len(mean))
        seen["expert_share"].append(int(counts.max()) / int(counts.sum()))
        dead = []
        for e, gate_up in enumerate(layer.mlp.experts.gate_up_proj):
            gate = (x[(chosen == e).any(1)] @ gate_up.T).chunk(2, -1)[0]
            dead.append((gate <= 0).all(0))
        seen["dead_units"].append(float(torch.cat(dead).double().mean()))
    return seen


@pytest.mark.parametrize("family", CASES.values(), ids=CASES)
def test_every_number_of_a_step_is_that_of_another_program(tmp_path, family):
    corpus = ours.write_corpus(tmp_path)
    more = f"--model.vocab_multiple 1 --log.inside_every {EVERY} --optim.name adamw"
    run = ours.run(tmp_path, "run", corpus, [*family.args.split(), *RECIPE.arguments(), *more.split()])
    rows = [json.loads(line) for line in (tmp_path / "run" / "inside.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(EVERY, RECIPE.steps + 1, EVERY))

    # the same steps by hand, up to the one that is compared
    model = theirs.build(family)
    theirs.take(model, run.first)
    optim = theirs.TorchAdamW(model, RECIPE, lambda name: 1.0)
    for step, (batch,) in enumerate(run.steps[:EVERY], 1):
        model.zero_grad()
        seen = seen_inside(model, batch["tokens"], batch["targets"])
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip)
        optim.step(step, RECIPE.rate(step))
    after = {name: p.detach() for name, p in model.named_parameters()}

    parts: dict[tuple, list] = {}
    for key in run.first:
        name, part = theirs.place(model, key)
        views = [part(t).flatten() for t in (grads[name], before[name], after[name] - before[name])]
        parts.setdefault(kind_of(key), []).append(torch.stack(views))
    for (layer, kind), found in parts.items():
        grad, weight, update = torch.cat(found, 1)
        numbers = {
            "grad_norm": grad.norm(), "grad_rms": rms(grad),
            "weight_norm": weight.norm(), "weight_rms": rms(weight),
            "update_norm": update.norm(), "update_ratio": update.norm() / weight.norm(),
        }
        for name, number in numbers.items():
            if layer is None:
                seen[f"{name}/{kind}"] = float(number)
            else:
                seen.setdefault(f"{name}/{kind}", [None] * 2)[layer] = float(number)

    row = rows[0]
    assert row.pop("step") == EVERY and row.keys() == seen.keys()
    for name, want in seen.items():
        assert row[name] == pytest.approx(want, rel=1e-9), name
    assert any(0 < share < 0.5 for share in row["dead_units"]) and min(row["grad_norm/attn.q"]) > 0
