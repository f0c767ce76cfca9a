"""A recipe shrunk to a tiny twin of itself, for tests and proofs: its features stay."""
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from config.reading.arguments import resolve
from config.schema import ChannelMixer, Config, ModelConfig, NoPart, TokenMixer
from model.rope import RopeConfig, with_fitting_longrope, with_original_context
from model.router import ExpertsConfig, with_mlps

NUM_STEPS = 20  # the steps a run is configured for; a proof runs 4 of them
SAVED = 3  # the step after which a proof stops a layout, saves and resumes

SETTINGS = {
    "train.dtype": "fp64",
    # only 4 of these run: warm-up (1, 2), plateau (3) and decay (from 4 on) come early
    "train.steps": NUM_STEPS,
    "train.seq_len": 32,
    "train.micro_batch": 1,
    "train.fp8_block": 4,
    "train.threads": 1,
    "model.dropout": 0.1,
    "optim.clip": 0.5,
    "optim.eps": 1e-4,
    "optim.warmup": 2,
    "optim.decay": "wsd",
    "optim.decay_fraction": 0.85,
    "parallel.recompute_parts": "core,norm,act",
    "parallel.bucket_mb": 0.03,
    "parallel.node": 2,
    "data.split": "70,30",
    "eval.batches": 1,
    "eval.sample": 3,
    # longer than a window, and an even number of tokens, like a part of a sequence
    "eval.prompt": "proofs of many layouts",
    "log.every": 1,
    "eval.every": SAVED,
    "checkpoint.every": SAVED,
}


def arguments(settings: Mapping[str, object]) -> list[str]:
    """Return {"train.steps": 20} as command-line arguments."""
    words: list[str] = []
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    return words


MIXER_SIZES = {
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 8,
    "key_heads": 4,
    "key_dim": 6,
    "dim": 6,
    "groups": 4,
    "state": 10,
    "window": 11,
    "chunk": 13,
    "kv_rank": 12,
    "q_rank": 20,
    "nope_dim": 8,
    "rope_dim": 4,
    "v_dim": 6,
    "value_dim": 6,
}


ORIGINAL_CONTEXT = 16  # for scaled RoPE
GROWTH_EVERY = 5  # positions that share a factor of growing scores


def with_sizes(
    model: ModelConfig, sizes: Mapping[str, int], mlp: Callable[[ChannelMixer], ChannelMixer]
) -> ModelConfig:
    """Return the model with these sizes in all its mixers, including those of its block variants, and with
    its MLPs and experts mapped by `mlp`. A second window is half as long.
    """
    model = with_mlps(model, mlp)
    blocks = [
        replace(variant, changes=tuple(
            (path, shrunk_value(path, value, sizes, model.mixer)) for path, value in variant.changes))
        for variant in model.blocks
    ]
    return replace(
        model,
        mixer=shrunk_mixer(model.mixer, sizes),
        blocks=tuple(blocks),
    )


def shrunk_mlp(mlp: ChannelMixer) -> ChannelMixer:
    """Return the MLP or MoE of the shrunk recipe. Its routers change faster than usual."""
    if isinstance(mlp, NoPart):
        return mlp
    if not isinstance(mlp, ExpertsConfig):
        return replace(mlp, width=48)
    router = replace(
        mlp.router,
        groups=min(mlp.router.groups, 4),
        bias_rate=None if mlp.router.bias_rate is None else 0.01,
        aux=mlp.router.aux and replace(mlp.router.aux, weight=10 * mlp.router.aux.weight),
        jitter=0.05 if mlp.router.scores == "softmax" else 0.0,
    )
    return replace(mlp, experts=8, top_k=min(mlp.top_k, 3), width=16, router=router)


def shrunk_mixer(mixer: TokenMixer, sizes: Mapping[str, int]) -> TokenMixer:
    stated = {name: size for name, size in sizes.items() if getattr(mixer, name, None) is not None}
    growth = getattr(mixer, "growth", None)
    if growth is not None:
        stated["growth"] = replace(growth, every=GROWTH_EVERY)
    return with_original_context(replace(mixer, **stated), ORIGINAL_CONTEXT)


def shrunk_value(path: str, value: Any, sizes: Mapping[str, int], mixer: TokenMixer) -> Any:
    """Return the shrunk value or part of a block variant."""
    if path == "mixer":
        return shrunk_mixer(value, sizes)
    if path == "mixer.rope":
        return value and with_original_context(replace(mixer, rope=value), ORIGINAL_CONTEXT).rope
    if path == "mixer.rope.scaling":
        return value and with_original_context(replace(mixer, rope=RopeConfig(scaling=value)),
                                               ORIGINAL_CONTEXT).rope.scaling
    size = sizes.get(path.removeprefix("mixer."))
    if value is None or size is None:
        return value
    return size // 2 if path == "mixer.window" and getattr(mixer, "window", None) else size


def tiny_config(name: str, world: int = 1) -> Config:
    """Return the recipe `name`, shrunk so that a laptop proves a layout in seconds, with all its features.

    The batch is divisible by the world size, and usually by 2 after that. Raises ConfigError if there is no
    such recipe.
    """
    global_batch = world * (-(-8 // world))
    if world > 1 and world % 2 == 1:
        global_batch *= 2
    cfg = resolve(name, None, arguments({**SETTINGS, "train.global_batch": global_batch}))

    model = cfg.model
    shrunk = replace(
        with_sizes(model, MIXER_SIZES, shrunk_mlp),
        layers=8,
        hidden=32,
        vocab=257,
        vocab_multiple=32,
        context=32,
    )
    return replace(cfg, model=with_fitting_longrope(shrunk))
