"""Rotary positions (RoPE, arXiv 2104.09864): config keys, context-extension scalings and the tables of a
pass. Also attention scores that grow with the position of the query."""
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from config import Config, ModelConfig, TokenMixer, layer_models, rotated_dim
from config.rule import Rule
from config.tree import Count, CountOrZero, NotNegative, Portion, Positive, Positives, with_values
from kernels import rope

# ---- keys --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """RoPE for a longer context by position interpolation (arXiv 2306.15595)."""
    kind: Literal["linear"] = "linear"
    factor: Positive  # all positions are divided by it


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """RoPE for a longer context, as in Llama 3.1 (arXiv 2407.21783)."""
    kind: Literal["llama3"] = "llama3"
    factor: Positive  # context length / original
    original: Count = 8192  # context length before scaling
    low_freq: Positive = 1.0  # channels that rotate fewer times than this within `original` are slowed down
    #   by the factor
    high_freq: Positive = 4.0  # channels that rotate more often than this stay unchanged, with a ramp between
    #   the two limits


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """RoPE for a longer context by YaRN (arXiv 2309.00071)."""
    kind: Literal["yarn"] = "yarn"
    factor: Positive  # context length / original
    original: Count = 8192  # context length before scaling
    low_freq: Positive = 1.0  # channels that rotate fewer times than this within `original` are slowed down
    #   by the factor (beta_slow)
    high_freq: Positive = 32.0  # channels that rotate more often than this stay unchanged, with a ramp
    #   between the two limits (beta_fast)
    mscale: NotNegative = 1.0  # cos and sin are multiplied by f(mscale) / f(mscale_all), where f(m) = 1 + m
    #   ln(factor) / 10
    truncate: bool = True  # the limits of the ramp are whole channels (false: gpt-oss)
    mscale_all: NotNegative = 0.0  # latent attention multiplies its scores by f(mscale_all) squared
    #   (DeepSeek)


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """RoPE for a longer context by LongRoPE (arXiv 2402.13753)."""
    kind: Literal["longrope"] = "longrope"
    factor: Positive  # context length / original; above 1, cos and sin are multiplied by sqrt(1 + ln(factor)
    #   / ln(original))
    original: Count = 8192  # context length before scaling
    short: Positives  # each pair of channels is slowed by its own number here, at all positions of a run
    #   whose sequences (train.seq_len) have at most `original` tokens
    long: Positives  # the same where the sequences are longer; a text that grows beyond `original` while it
    #   is generated is read again with them


Scaling = Llama3Scaling | YarnScaling | LinearScaling | LongRopeScaling


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions (arXiv 2104.09864)."""
    base: Positive = 10000.0  # base of the rotary wavelengths
    share: Portion = 1.0  # of the channels of a head, the first ones: those that are rotated (GPT-NeoX)
    pairs: bool = False  # true: rotate channels 2i and 2i + 1 together; false: i and i + dim/2
    scaling: Scaling | None = None  # for a longer context than the model was trained on


@dataclass(frozen=True, kw_only=True)
class GrowthConfig:
    """Queries at position p are multiplied by 1 + rate ln(1 + floor((p + first) / every)) (Llama 4)."""
    rate: Positive = 0.1  # of the growth
    every: Count = 8192  # positions that share a factor
    first: CountOrZero = 0  # number of the first position: 1 in Llama 4, 0 in Ministral 3


def scaling_rules(settings: RopeConfig | None, rotated: int) -> Iterator[Rule]:
    """Check limits, and the count of numbers per channel pair. `rotated` counts channels of a head."""
    scaling = settings.scaling if settings else None
    yield Rule(
        not isinstance(scaling, YarnScaling) or scaling.low_freq <= scaling.high_freq,
        "model.mixer.rope.scaling.low_freq: must not lie above high_freq of the same scaling")
    if not isinstance(scaling, LongRopeScaling):
        return
    for name in ("short", "long"):
        count = len(getattr(scaling, name))
        yield Rule(
            count == rotated // 2,
            f"model.mixer.rope.scaling.{name}: {count} numbers, and {rotated} channels of a head are "
            f"rotated; give {rotated // 2}, one for each pair")
    yield Rule(
        scaling.original > 1,
        f"model.mixer.rope.scaling.original: {scaling.original}, and its logarithm is a divisor; use the "
        "number of tokens that the model was trained on")


# ---- derived settings --------------------------------------------------------------------------------------

def with_original_context(mixer: TokenMixer, original: int) -> TokenMixer:
    """Return the mixer with `original` as its context length before RoPE scaling, if that applies."""
    settings = getattr(mixer, "rope", None)
    if settings is None or not isinstance(settings.scaling, (Llama3Scaling, YarnScaling, LongRopeScaling)):
        return mixer
    return with_values(mixer, {"rope.scaling.original": original})


def with_fitting_longrope(model: ModelConfig) -> ModelConfig:
    """Return the model with as many LongRoPE numbers as it rotates channel pairs: truncated, or padded
    with the last one."""
    settings = getattr(model.mixer, "rope", None)
    if settings is None or not isinstance(settings.scaling, LongRopeScaling):
        return model
    pairs, scaling = rotated_dim(model) // 2, settings.scaling
    fitting = {
        f"mixer.rope.scaling.{name}": numbers[:pairs] + numbers[-1:] * (pairs - len(numbers))
        for name, numbers in (("short", scaling.short), ("long", scaling.long))
    }
    return with_values(model, fitting)


def rope_switches(model: ModelConfig) -> set[int]:
    """Return the sequence lengths beyond which all tokens, from the first on, are rotated by other angles."""
    of_kinds = (getattr(like.mixer, "rope", None) for like in layer_models(model).values())
    scalings = [settings.scaling for settings in of_kinds if settings]
    return {scaling.original for scaling in scalings if isinstance(scaling, LongRopeScaling)}


class Rotation(NamedTuple):
    """Settings of rotary tables. `channels` counts the rotated channels of a head."""
    base: float
    scaling: Scaling | None
    channels: int


def get_rotation(model: ModelConfig) -> Rotation | None:
    """Return how a layer rotates queries and keys, or None without RoPE. Takes the model of one layer
    (config.layer_model)."""
    settings = getattr(model.mixer, "rope", None)
    return None if settings is None else Rotation(settings.base, settings.scaling, rotated_dim(model))


# ---- tables of a pass --------------------------------------------------------------------------------------

def query_growth(cfg: Config, growth: GrowthConfig, positions: Tensor) -> Tensor:
    """Return the factor of the queries [b, s, 1, 1] at positions [b, s], in fp32, or fp64 in an fp64 run."""
    dtype = torch.float64 if cfg.train.dtype == "fp64" else torch.float32
    steps = torch.div(positions + growth.first, growth.every, rounding_mode="floor")
    return (1 + growth.rate * torch.log1p(steps.to(dtype)))[..., None, None]


def rope_tables(
    cfg: Config, rotation: Rotation, positions: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [b, s, 1, rotated / 2] at positions [b, s] (arXiv 2104.09864), in fp32, or fp64 in
    an fp64 run. `length` counts tokens of whole sequences, across ranks and earlier passes."""
    dtype = torch.float64 if cfg.train.dtype == "fp64" else torch.float32
    device = positions.device  # where the frequencies are computed: a copy from the host would block it
    if rotation.scaling is None:
        frequencies = rope.plain_frequencies(rotation.channels, rotation.base, device)
        return rope.cos_sin_tables(positions, frequencies, dtype)
    frequencies, scale = scaled_frequencies(rotation, length, device)
    return rope.cos_sin_tables(positions, frequencies, dtype, scale)


def scaled_frequencies(rotation: Rotation, length: int, device: torch.device) -> tuple[Tensor, float]:
    """Return the frequencies [rotated / 2] for a longer context than the model was trained on, and the scale
    of cos and sin.

    Those of Llama 3.1 (arXiv 2407.21783), YaRN (arXiv 2309.00071) or LongRoPE (arXiv 2402.13753), or of
    interpolated positions (arXiv 2306.15595). YaRN and LongRoPE also scale the tables. DeepSeek's models set
    that scale to 1 and scale the scores instead (model/mla.py).
    """
    scaling = rotation.scaling
    scaled: dict[str, Any] = {}
    if isinstance(scaling, LongRopeScaling):
        scaled = {"slowed": scaling.long if length > scaling.original else scaling.short}
    elif scaling is not None:
        scaled = {"factor": scaling.factor, "kind": scaling.kind}
    if isinstance(scaling, (Llama3Scaling, YarnScaling)):
        scaled |= {"low": scaling.low_freq, "high": scaling.high_freq, "original": scaling.original}
    if isinstance(scaling, YarnScaling):
        scaled |= {"truncate": scaling.truncate}
    scale = 1.0
    if isinstance(scaling, YarnScaling):
        scale = (rope.yarn_mscale(scaling.factor, scaling.mscale)
                 / rope.yarn_mscale(scaling.factor, scaling.mscale_all))
    elif isinstance(scaling, LongRopeScaling):
        scale = rope.longrope_scale(scaling.factor, scaling.original)
    return rope.frequencies(rotation.channels, rotation.base, **scaled, device=device), scale
