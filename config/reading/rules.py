"""Rules that involve several config keys.

They are checked before any work starts. A config that breaks a rule is refused with one line that names the
key, what is wrong with it and, if possible, nearby values that are accepted (suggestions.py).
"""
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from config import (
    FIXED_SIDES,
    FP8_SIDES,
    MAX_LOSS_SCALE,
    OPTIMIZERS,
    Config,
    comma_separated,
    divisors,
    fp8_block,
    fp8_recipe,
    layer_kinds,
    layer_models,
    positive_integers,
    profiled_steps,
)
from config.axes import AXES, axis_degrees, ranks_of_layout, ranks_of_microbatch
from config.optimizers import optimizers_that, to_text
from config.parameter_groups import freezes
from config.reading.function import (
    BY_TEXT,
    FUNCTION_KEYS,
    START,
    TOKENIZER,
    differences,
    leaves_weights_alone,
    written,
)
from config.reading.kinds import every_path
from config.reading.loading import nearest_key
from config.reading.parse import HORIZONS, sections
from config.reading.phases import get_phases
from config.rule import Rule, nearby_multiples
from config.schema import NoPart
from config.tree import is_below, ranged_values
from model.delta import KimiConfig
from model.mla import LatentConfig
from model.mlp import MLPConfig
from model.parameter_groups import group_rules
from model.router import ExpertsConfig, mixture
from model.shared_keys import sharing_rules

ALIGNED_FEATURES = 8  # of 16 bits: rows that Hopper's TMA can read (kernels/linear.py)
RECOMPUTE_WORDS = {  # key of parallel.*: allowed words
    "recompute_parts": ("core", "norm", "act"),
    "recompute_stages": ("none", "selective", "full"),
}
FP8_BLOCKS = (16, 32, 64, 128)  # suggested values of train.fp8_block
EXPERTS_ALIKE = ("experts", "top_k", "router", "capacity")  # keys that all layers with experts share
FP8_UNIT = 16  # hardware reads fp8 matrices in multiples of this many elements


def validate(cfg: Config, world: int = 1) -> Rule | None:
    """Return the first multi-key rule that a run on `world` ranks breaks, or None."""
    for rules in RULES:
        for rule in rules(cfg, world):  # a generator: a rule may assume those before it
            if not rule.holds:
                return rule
    return None


# ---- single values ---------------------------------------------------------------------------------------

def range_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check value intervals: those of the types, and a few others."""
    for path, value, range_ in ranged_values(cfg):
        yield Rule(value is None or range_.holds(value), f"{path}: {value} {range_.message}")

    optim, scale = cfg.optim, cfg.train.loss_scale
    yield Rule(
        1 <= scale <= MAX_LOSS_SCALE and math.frexp(scale)[0] == 0.5,
        f"train.loss_scale: {scale:g} must be a power of two from 1 to {MAX_LOSS_SCALE:.0f}, "
        "so that scaling is exact; use 65536")
    yield Rule(
        0 < optim.decay_fraction <= 1,
        f"optim.decay_fraction: {optim.decay_fraction} must lie in (0, 1]")
    yield Rule(
        cfg.train.ema is None or 0 < cfg.train.ema < 1,
        f"train.ema: {cfg.train.ema} must lie in (0, 1), such as 0.999: what a step keeps of the average")
    yield Rule(
        optim.min_lr is None or optim.min_lr <= optim.lr,
        f"optim.min_lr: {optim.min_lr} must lie in [0, optim.lr = {optim.lr}]")


# ---- the model -------------------------------------------------------------------------------------------

def part_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check that a block has a token mixer, an MLP, or both."""
    model = cfg.model
    absent = [part for part in ("mixer", "mlp") if isinstance(getattr(model, part), NoPart)]
    yield Rule(
        len(absent) < 2,
        "model.mlp.kind: none, and so is model.mixer.kind; a block has one of them, or both")
    yield Rule(
        model.residual == "sequential" or not absent,
        f"model.residual: {model.residual}, and model.{''.join(absent[:1])}.kind is none; use sequential")
    yield Rule(
        model.residual != "parallel_norms" or model.norm.place != "after",
        "model.residual: parallel_norms, and model.norm.place after has no norms before; use parallel")


def mixer_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check the rules of the sequence mixer, defined next to its keys."""
    yield from cfg.model.mixer.rules(cfg)


def mlp_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check the rules of the MLP or the experts, defined next to their keys."""
    yield from cfg.model.mlp.rules(cfg)


def other_model_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check muP and learned positions."""
    model, optimizer, seq_len = cfg.model, cfg.optim.name, cfg.train.seq_len
    why_no_mup = OPTIMIZERS[optimizer].why_no_mup
    with_mup = optimizers_that(lambda spec: not spec.why_no_mup)
    yield Rule(
        not model.mup or not why_no_mup,
        f"optim.name: {optimizer} does not support muP (model.mup): {why_no_mup}; "
        f"use {to_text(with_mup, 'or')}")
    yield Rule(
        model.positions != "learned" or seq_len <= model.context,
        f"train.seq_len: {seq_len} is longer than the {model.context} learned positions (model.context); "
        "shorten it or raise model.context",
        "train.seq_len", [model.context // 2**i for i in range(4)])


def shared_key_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check layers that read the keys of others."""
    yield from sharing_rules(cfg.model)


def moe_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check what all kinds of blocks with experts must share."""
    first, parallel = mixture(cfg.model), cfg.parallel
    if first is None:
        key = next((key for key in ("ep", "etp", "ep_chunks") if getattr(parallel, key) > 1), "ep")
        yield Rule(
            getattr(parallel, key) == 1,
            f"parallel.{key}: shards experts, and no layer has any (model.mlp.kind); leave it at 1")
        return
    for name, like in layer_models(cfg.model).items():
        mlp = like.mlp
        for key in EXPERTS_ALIKE if isinstance(mlp, ExpertsConfig) else ():
            yield Rule(
                getattr(mlp, key) == getattr(first, key),
                f"model.blocks.{name}.mlp.{key}: {written(getattr(mlp, key))}, and other layers with experts "
                f"have {written(getattr(first, key))}; give all of them the same")


def row_bound_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check parallel.ep_bound: it needs experts without a capacity, and chunks of whole experts."""
    parallel, mlp = cfg.parallel, mixture(cfg.model)
    if parallel.ep_bound is None:
        return
    if mlp is None:
        yield Rule(
            False,
            "parallel.ep_bound: bounds rows for experts, and no layer has any (model.mlp.kind); leave it out")
        return
    yield Rule(
        mlp.capacity is None,
        "parallel.ep_bound: not possible with model.mlp.capacity, which bounds the rows of each expert "
        "already; leave it out, and for static shapes set model.mlp.capacity.pad true")
    local = mlp.experts // parallel.ep
    yield Rule(
        local % parallel.ep_chunks == 0,
        f"parallel.ep_chunks: {parallel.ep_chunks} does not divide the {local} experts of a rank "
        f"(model.mlp.experts / parallel.ep), which parallel.ep_bound needs; leave that out, or change this",
        "parallel.ep_chunks", divisors(local))


def routing_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check log.routing_every and train.replay_routing: they need routers, and steps that read the data of
    their number."""
    keys = {"log.routing_every": cfg.log.routing_every, "train.replay_routing": cfg.train.replay_routing}
    obstacles = {
        "a model without experts (model.mlp.kind), which has no routers": mixture(cfg.model) is None,
        "optim.spike_rewind, after which steps read other data": cfg.optim.spike_rewind is not None,
    }
    for key, value in keys.items():
        for obstacle, is_present in obstacles.items():
            yield Rule(value is None or not is_present, f"{key}: not possible with {obstacle}; leave it out")


def compressed_token_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check parallel.compress_tokens: it needs experts."""
    yield Rule(
        cfg.parallel.compress_tokens == "none" or mixture(cfg.model) is not None,
        "parallel.compress_tokens: compresses rows for experts, and no layer has any (model.mlp.kind); "
        "leave it out")


def expert_rank_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check the ranks that share experts."""
    parallel = cfg.parallel
    ranks = world // (parallel.pp * parallel.dp_rep)
    yield Rule(
        ranks % (parallel.ep * parallel.etp) == 0,
        f"parallel.ep*etp = {parallel.ep}*{parallel.etp} does not divide dp*cp*tp = {ranks}",
        "parallel.ep parallel.etp", divisors(ranks))


# ---- the run and its layout ------------------------------------------------------------------------------

def run_length_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check the length of the run and the recorded steps. Raises ConfigError if a key of profile cannot be
    parsed."""
    given = [key for key in HORIZONS if getattr(cfg.train, key) is not None]
    key = given[1] if len(given) > 1 else "steps"
    yield Rule(
        len(given) == 1,
        f"train.{key}: give exactly one of train.steps, train.tokens, train.flops; "
        f"got {' and '.join(given) or 'none'}")
    profiled_steps(cfg.profile.steps)
    profiled_steps(cfg.profile.memory, "memory")


def phase_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check train.phases: the run reaches every phase, each continues the weights of the one before, and
    the run's length does not depend on them."""
    train = cfg.train
    if train.phases is None:
        return
    yield Rule(
        train.flops is None,
        "train.flops: the FLOPs of a token differ from phase to phase (train.phases); give train.steps or "
        "train.tokens")
    phases = get_phases(cfg).all
    for phase in phases[1:]:
        for key, (old, new) in differences(phases[0].cfg.model, phase.cfg.model).items():
            yield Rule(
                leaves_weights_alone(key),
                f"train.phases: phase {phase.number}: {key}: {old} -> {new} changes the shapes of weights, "
                "which a phase keeps; begin a new run there, with checkpoint.init_from and "
                f"checkpoint.init_changes {key}")
    last = phases[-1]
    key, end, start = "steps", train.steps, last.steps_before
    if train.tokens is not None:
        key, end, start = "tokens", train.tokens, last.tokens_before
    yield Rule(
        end is None or end > start,
        f"train.{key}: the run ends after {end:,.0f} {key}, and phase {last.number} of train.phases begins "
        f"after {start:,}; raise train.{key}, or leave the phase out")


def layout_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check parallel degrees, stages and recompute modes."""
    parallel = cfg.parallel
    degrees = axis_degrees(parallel)
    in_world = {axis.key: degrees[axis.key] for axis in AXES if not axis.reuses_ranks}
    degree = ranks_of_layout(degrees)
    yield Rule(
        world % degree == 0,
        f"parallel.{'*'.join(in_world)} = {'*'.join(map(str, in_world.values()))} = {degree} "
        f"does not divide the world size {world}",
        " ".join(f"parallel.{key}" for key in in_world), divisors(world))

    if parallel.stages:
        yield from stages_rules(cfg)
    for key, known in RECOMPUTE_WORDS.items():
        words = comma_separated(getattr(parallel, key))
        unknown = next((word for word in words if word not in known), None)
        yield Rule(
            unknown is None,
            f"parallel.{key}: {unknown!r} is not one of {', '.join(known)}; separate them by commas")

    for axis in AXES:
        for key, size in axis.divides(cfg).items():
            yield Rule(
                size % degrees[axis.key] == 0,
                f"parallel.{axis.key}: {degrees[axis.key]} does not divide {key}={size}",
                f"parallel.{axis.key}", divisors(size))


def stages_rules(cfg: Config) -> Iterator[Rule]:
    """Check parallel.stages, if set."""
    stages, layers = cfg.parallel.stages, cfg.model.layers
    sizes = positive_integers(stages)
    yield Rule(
        sizes,
        f"parallel.stages: {stages!r} is not a list of layers for each stage; "
        "write it as 3,2,2,1, each at least 1")
    last = layers - sum(sizes[:-1])
    example = ",".join(map(str, [*sizes[:-1], last]))
    advice = f"; try parallel.stages {example}" if last > 0 else ""
    yield Rule(
        sum(sizes) == layers,
        f"parallel.stages: {stages} makes {sum(sizes)} layers, model.layers is {layers}{advice}")


def sequence_sharding_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check sequence and context parallelism."""
    model, train, parallel = cfg.model, cfg.train, cfg.parallel
    tp, cp = parallel.tp, parallel.cp
    # A cp rank holds two chunks of a sequence; sp shards what a rank holds.
    chunks = 2 if cp > 1 else 1
    unit = cp * math.lcm(chunks, tp if parallel.sp else 1)
    cause = f" and parallel.sp over tp={tp} require" if parallel.sp else " requires"
    yield Rule(
        train.seq_len % unit == 0,
        f"train.seq_len: {train.seq_len} is not a multiple of {unit}, as parallel.cp={cp}{cause}",
        "train.seq_len", nearby_multiples(train.seq_len, unit))
    exchanged = model.mixer.heads_over_tp() if model.mixer.has_softmax else {}  # the others pass states
    for name, heads in exchanged.items():
        yield Rule(
            cp == 1 or parallel.cp_kind == "ring" or heads % (tp * cp) == 0,
            f"parallel.cp_kind: ulysses gives each rank whole heads, and tp*cp = {tp}*{cp} does not divide "
            f"model.mixer.{name}={heads}; use ring, or another degree",
            "parallel.cp", divisors(heads))


# ---- precision and the step ------------------------------------------------------------------------------

def async_tensor_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check parallel.async_tp, which sends parts of the sequence and multiplies them one by one."""
    parallel = cfg.parallel
    yield Rule(
        not parallel.async_tp or parallel.sp,
        "parallel.async_tp: sends parts of the sequence, and without parallel.sp every rank has all of it; "
        "set parallel.sp true, or leave it out")
    yield Rule(
        not parallel.async_tp or fp8_recipe(cfg.train) is None,
        "parallel.async_tp: a product in fp8 needs the scale of all parts before the first is multiplied; "
        "set train.dtype bf16, or leave it out")


def fp8_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check which layers run in fp8, and that its scales divide their shapes."""
    model, train, parallel = cfg.model, cfg.train, cfg.parallel
    recipe = fp8_recipe(train)
    yield Rule(
        recipe is None or train.dtype in ("fp8", "fp64"),
        f"train.fp8: {train.fp8} belongs to train.dtype fp8, and the dtype is {train.dtype}; "
        "set train.dtype fp8, or leave train.fp8 out")
    if recipe is None:
        return

    keep, layers = train.fp8_keep, model.layers
    yield Rule(
        2 * keep < layers,
        f"train.fp8_keep: {keep} first and {keep} last layers in bf16 leave no layer in fp8 "
        f"(model.layers={layers})",
        "train.fp8_keep", range((layers + 1) // 2))

    yield Rule(
        recipe != "nvfp4" or mixture(model) is None,
        "train.fp8: nvfp4 has no products of experts; use mxfp8, or a model without experts")
    of_experts = [name for name in FP8_SIDES if name != "nvfp4"]
    yield Rule(
        not isinstance(model.mlp, ExpertsConfig) or parallel.etp == 1 or recipe in of_experts,
        f"parallel.etp: {parallel.etp} ranks share an expert, and a {recipe} scale would cover all of them; "
        f"use train.fp8 {' or '.join(of_experts)}, or parallel.ep")
    kv = model.mixer.heads_over_tp().get("kv_heads", parallel.tp)
    yield Rule(
        kv % parallel.tp == 0,
        f"parallel.tp: {parallel.tp} ranks share model.mixer.kv_heads={kv}, and shared heads do not support "
        "fp8; use at most that many ranks, or bf16",
        "parallel.tp", divisors(kv))
    yield from fp8_shape_rules(cfg, recipe)


def fp8_shape_rules(cfg: Config, recipe: str) -> Iterator[Rule]:
    """Check that features and tokens are multiples of the scale block, or of the hardware's unit."""
    train, parallel = cfg.train, cfg.parallel
    has_blocks = recipe in FP8_SIDES
    proof = train.dtype == "fp64"  # hardware limits do not apply
    block = fp8_block(train)
    is_fixed = recipe in FIXED_SIDES and not proof
    yield Rule(
        not is_fixed or block == FP8_SIDES[recipe],
        f"train.fp8_block: {block} is not the block of {recipe}, whose format fixes {FP8_SIDES.get(recipe)}; "
        "leave it out")
    yield Rule(
        not has_blocks or proof or (block >= 16 and block & block - 1 == 0),
        f"train.fp8_block: {block} must be a power of two, at least 16", "train.fp8_block", FP8_BLOCKS)
    yield Rule(
        recipe != "nvfp4" or (block > 1 and block & block - 1 == 0),
        f"train.fp8_block: {block} must be a power of two, at least 2, for the Hadamard transform of nvfp4",
        "train.fp8_block", (16, 8, 4, 2))

    can_choose_block = has_blocks and not is_fixed
    if can_choose_block:
        unit, unit_text = block, f"train.fp8_block={block}"
    elif has_blocks:
        unit, unit_text = block, f"{block}, the block of {recipe}"
    else:
        unit = 1 if proof else FP8_UNIT
        unit_text = f"{unit}, as fp8 products require"
    for key, (features, degree) in fp8_features(cfg).items():
        of_expert = key == "model.mlp.width" and isinstance(cfg.model.mlp, ExpertsConfig)
        degree_name = "etp" if of_expert else "tp"
        shards = f" / {degree_name} {degree}" if degree > 1 else ""
        yield Rule(
            features % (degree * unit) == 0,
            f"train.dtype: {features}{shards} features of {key} are not a multiple of {unit_text}; "
            "change it, or use bf16",
            keys="train.fp8_block" if can_choose_block else f"parallel.{degree_name}",
            values=FP8_BLOCKS if can_choose_block else divisors(degree))

    if has_blocks:
        chunks = 2 * parallel.cp if parallel.cp > 1 else 1
        chunks_text = f" / {chunks} chunks of cp {parallel.cp}" if chunks > 1 else ""
        yield Rule(
            train.seq_len % (chunks * unit) == 0,
            f"train.seq_len: {train.seq_len}{chunks_text} is not a multiple of {unit_text}, "
            "by which weight gradients are quantized",
            keys="train.fp8_block" if can_choose_block else "train.seq_len",
            values=FP8_BLOCKS if can_choose_block else nearby_multiples(train.seq_len, chunks * unit))
    else:
        tokens = train.micro_batch * train.seq_len // parallel.cp
        yield Rule(
            tokens % unit == 0,
            f"train.seq_len: {tokens} tokens of a microbatch and rank are not a multiple of {unit_text}",
            "train.seq_len", nearby_multiples(train.seq_len, unit * parallel.cp))


def fp8_features(cfg: Config) -> dict[str, tuple[int, int]]:
    """Return {key that sets the size: (features of an fp8 matrix, degree that shards them)}."""
    model, tp, etp = cfg.model, cfg.parallel.tp, cfg.parallel.etp
    features = {"model.hidden": (model.hidden, 1)}
    if isinstance(model.mlp, MLPConfig):
        features["model.mlp.width"] = (model.mlp.width, tp)
    if isinstance(model.mlp, ExpertsConfig):
        features["model.mlp.width"] = (model.mlp.width, etp)
        if model.mlp.shared:
            features["model.mlp.shared.experts"] = (model.mlp.shared_width, tp)
    of_mixer = model.mixer.features_over_tp(model.hidden)
    return features | {f"model.{key}": (size, tp) for key, size in of_mixer.items()}


def mps_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check for features that the GPU of a Mac (train.device mps) cannot run."""
    model, train, parallel = cfg.model, cfg.train, cfg.parallel
    obstacles = {
        f"{world} ranks (one GPU, whose tensors nothing carries to others)": world > 1,
        f"train.dtype={train.dtype} (but fp32, bf16 and fp16)": train.dtype in ("fp64", "fp8"),
        "model.mlp.kind experts (their routers count in fp64)": mixture(model) is not None,
        "train.compile (not tried there)": train.compile,
        f"parallel.offload={parallel.offload} (its memory is the host's)": parallel.offload != "none",
    }
    for obstacle, is_present in obstacles.items():
        yield Rule(
            train.device != "mps" or not is_present,
            f"train.device: mps does not run {obstacle}; train.device cpu does")


def cuda_graph_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check for features that a recording of a step (parallel/pipeline/graphs.py) cannot contain."""
    train, parallel = cfg.train, cfg.parallel
    obstacles = {
        f"{world} ranks, whose exchanges are not recorded": world > 1,
        f"train.device={train.device}, which has no graphs": train.device in ("cpu", "mps"),
        **mixture_obstacles(cfg),
        f"parallel.offload={parallel.offload}, whose copies involve the host": parallel.offload != "none",
        f"parallel.zero={parallel.zero}, which allocates and frees buffers in a step": parallel.zero > 1,
        "log.noise_scale, which reads gradients between two microbatches": cfg.log.noise_scale,
        "log.inside_every, which looks into the forward of some steps": cfg.log.inside_every is not None,
        "log.routing_every, which looks into the forward of some steps": cfg.log.routing_every is not None,
        "train.replay_routing, which reads files in the forward": cfg.train.replay_routing is not None,
        "optim.qk_clip, which looks into the forward": cfg.optim.qk_clip is not None,
        "distill.teacher, which was not tried in a recording": cfg.distill.teacher is not None,
    }
    for obstacle, is_present in obstacles.items():
        yield Rule(
            not train.cuda_graphs or not is_present,
            f"train.cuda_graphs: not possible with {obstacle}; leave it out")


def mixture_obstacles(cfg: Config) -> dict[str, bool]:
    """Return {why a recording cannot contain this mixture of experts: whether it applies}.

    It can if the host never reads a row count: if dropless (parallel/expert/dispatch.py), and if the kernels
    do the products (kernels/grouped_gemm.py).
    """
    mlp, dtype = mixture(cfg.model), cfg.train.dtype
    if mlp is None:
        return {}
    sizes = {"model.hidden": cfg.model.hidden, "model.mlp.width": mlp.width}
    unaligned = [f"{key}={size}" for key, size in sizes.items() if size % ALIGNED_FEATURES]
    return {
        "model.mlp.capacity without pad, where the host reads how many tokens are dropped":
            mlp.capacity is not None and not mlp.capacity.pad,
        f"experts in {dtype}, whose products may read numbers of rows on the host":
            dtype not in ("bf16", "fp16"),
        f"experts and {', '.join(unaligned)}, not a multiple of {ALIGNED_FEATURES}, so the host would "
        "multiply the experts one by one": bool(unaligned),
    }


def rerun_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check train.rerun_*: a step must be bitwise reproducible, and its numbers visible to the host."""
    train = cfg.train
    wishes = {
        "train.rerun_every": train.rerun_every is not None,
        "train.rerun_suspects": train.rerun_suspects,
    }
    obstacles = {
        "train.deterministic=false, whose kernels may give other bits each time":
            train.deterministic is False,
        "train.cuda_graphs, whose replay shows nothing of what is computed in it": train.cuda_graphs,
        "train.device=mps, whose kernels are not known to give the same bits twice": train.device == "mps",
    }
    for key, is_wished in wishes.items():
        for obstacle, is_present in obstacles.items():
            yield Rule(not is_wished or not is_present, f"{key}: not possible with {obstacle}; leave one out")


def optimizer_state_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check offload and bf16 states, which not every optimizer supports."""
    optim, offload = cfg.optim, cfg.parallel.offload
    spec = OPTIMIZERS[optim.name]
    with_offload = to_text(optimizers_that(lambda spec: spec.supports_offload))
    with_bf16 = optimizers_that(lambda spec: spec.supports_bf16_states)
    yield Rule(
        spec.supports_offload or offload not in ("optimizer", "both"),
        f"parallel.offload: {offload} supports the state of {with_offload} only, and optim.name is "
        f"{optim.name}; use none or activations")
    yield Rule(
        optim.states != "bf16" or spec.supports_bf16_states,
        f"optim.states: only {to_text(with_bf16)} rounds bf16 states stochastically, and rounding to "
        f"nearest would lose small updates of optim.name={optim.name}; use {to_text(with_bf16, 'or')}, "
        "or optim.states fp32")
    with_8bit = optimizers_that(lambda spec: spec.implementation_8bit)
    yield Rule(
        optim.states != "8bit" or bool(spec.implementation_8bit),
        f"optim.states: 8bit is of {to_text(with_8bit)}, and optim.name={optim.name}; use "
        f"{to_text(with_8bit, 'or')}, or optim.states fp32")
    yield Rule(
        optim.states != "8bit" or offload not in ("optimizer", "both"),
        f"parallel.offload: {offload} does not move moments in 8 bits (optim.states); use none or "
        "activations")


def qk_clip_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check optim.qk_clip: scores must follow the scale of the projections that it changes."""
    if cfg.optim.qk_clip is None:
        return
    yield Rule(
        cfg.optim.states != "bf16",
        "optim.qk_clip: optim.states bf16 would round small changes of the scale of weights away; use fp32")
    yield Rule(
        not freezes(cfg),
        "optim.qk_clip: it scales weights that may be frozen (lr_factor 0 in optim.groups, model.lora); "
        "leave one of them out")
    mixers = [like.mixer for like in layer_models(cfg.model).values() if like.mixer.has_softmax]
    yield Rule(
        bool(mixers),
        "optim.qk_clip: no layer of the model has attention scores; leave it out")
    obstacles = {
        "model.mixer.qk_norm, after which scores do not depend on the scale of weights": "qk_norm",
        "model.mixer.softcap, which bounds scores itself": "softcap",
        "model.mixer.keys_of, whose keys belong to heads of several layers": "keys_of",
    }
    for obstacle, key in obstacles.items():
        yield Rule(
            all(getattr(mixer, key, None) is None for mixer in mixers),
            f"optim.qk_clip: not possible with {obstacle}; leave one of them out")


def batch_rate_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check optim.lr_rule, which needs the batch at which the rates were tuned."""
    yield Rule(
        cfg.optim.lr_rule is None or cfg.optim.base_batch is not None,
        f"optim.base_batch: none, and optim.lr_rule {cfg.optim.lr_rule} multiplies optim.lr by a power of "
        "train.global_batch / optim.base_batch; give the sequences per step at which optim.lr was tuned")


def spike_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check optim.spike_*: the window must have a deviation, and the run must be able to skip data."""
    optim = cfg.optim
    yield Rule(
        optim.spike_window >= 2,
        f"optim.spike_window: {optim.spike_window} steps have no deviation; it must be at least 2")
    obstacles = {
        "optim.spike_sigma none, which detects no spikes: set it (OLMo uses 6)": optim.spike_sigma is None,
        "train.ramp, whose steps differ in batch size: leave one of them out":
            cfg.train.ramp is not None,
        "train.phases, whose data does not begin with the run: leave one of them out":
            cfg.train.phases is not None,
        "checkpoint.mirror, which keeps checkpoints that a rewind discards: leave one of them out":
            cfg.checkpoint.mirror is not None,
    }
    for obstacle, is_present in obstacles.items():
        yield Rule(
            optim.spike_rewind is None or not is_present,
            f"optim.spike_rewind: not possible with {obstacle}")
    yield Rule(
        optim.spike_rewind is None or optim.spike_rewind <= optim.spike_window,
        f"optim.spike_rewind: {optim.spike_rewind} spikes in a row never occur, since as many as "
        f"optim.spike_window={optim.spike_window} end the run; use a smaller number")


def data_parallel_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check ZeRO, reductions and their compression."""
    parallel = cfg.parallel
    zero, compress = parallel.zero, parallel.compress
    yield Rule(
        zero or parallel.dp_rep == 1,
        "parallel.dp_rep: replicates the shards of ZeRO, and parallel.zero is 0; "
        "set parallel.zero to 1, 2 or 3, or leave dp_rep at 1",
        "parallel.zero", (1, 2, 3))
    yield Rule(
        not zero or parallel.reduce in ("collective", "ring"),
        f"parallel.reduce: {parallel.reduce} computes whole sums, parallel.zero={zero} needs shards of them; "
        "use collective or ring, or parallel.zero 0")
    yield Rule(
        compress == "none" or parallel.reduce == "collective",
        f"parallel.compress: {compress} determines how gradients are summed, and so does "
        f"parallel.reduce={parallel.reduce}; use one of them")
    yield Rule(
        compress != "powersgd" or not zero,
        f"parallel.compress: powersgd factorizes whole gradients, and parallel.zero={zero} needs shards; "
        "use int8 or fp8, or parallel.zero 0")
    yield Rule(
        compress != "powersgd" or cfg.train.dtype != "fp16",
        "parallel.compress: powersgd carries errors over to the next step, whose loss scale may differ with "
        "train.dtype fp16; use train.dtype bf16")
    yield Rule(
        parallel.compress_weights == "none" or zero,
        f"parallel.compress_weights: {parallel.compress_weights} compresses gathered weights, and "
        "parallel.zero=0 gathers none; set parallel.zero to 1, 2 or 3, or leave it at none",
        "parallel.zero", (1, 2, 3))

    block = parallel.compress_block
    yield Rule(
        block % 64 == 0,
        f"parallel.compress_block: {block} is not a multiple of 64, the alignment of parameters",
        "parallel.compress_block", nearby_multiples(block, 64))
    yield from node_rules(cfg, world)


def node_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check parallel.reduce hierarchy: a data-parallel group must have equally many ranks on each of its
    nodes."""
    parallel = cfg.parallel
    stage_ranks = world // parallel.pp  # consecutive; ranks of one data-parallel group are `stride` apart
    node = parallel.node or world
    for name, stride in (("tp", parallel.tp), ("ep*etp", parallel.ep * parallel.etp)):
        stage_is_even = max(stage_ranks, node) % min(stage_ranks, node) == 0
        groups_are_even = max(stride, node) % min(stride, node) == 0
        yield Rule(
            parallel.reduce != "hierarchy" or (stage_is_even and groups_are_even),
            f"parallel.node: {node} divides the {stage_ranks} ranks of a stage unevenly with {name} {stride}",
            "parallel.node", divisors(stage_ranks))


# ---- batches, measurements, names ------------------------------------------------------------------------

def sequences_per_microbatch(cfg: Config, world: int) -> int:
    """Return the sequences of one microbatch over all data-parallel ranks. A global batch is a multiple of
    it."""
    return cfg.train.micro_batch * (world // ranks_of_microbatch(axis_degrees(cfg.parallel)))


def batch_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check the global batch."""
    train = cfg.train
    unit = sequences_per_microbatch(cfg, world)
    yield Rule(
        train.global_batch % unit == 0,
        f"train.global_batch: {train.global_batch} is not a multiple of train.micro_batch x dp = "
        f"{train.micro_batch} x {unit // train.micro_batch}",
        "train.global_batch", nearby_multiples(train.global_batch, unit))


def noise_scale_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check log.noise_scale, which needs whole gradients of a part of the batch."""
    model, parallel = cfg.model, cfg.parallel
    yield Rule(
        not cfg.log.noise_scale or parallel.cp == 1,
        f"log.noise_scale: needs the gradient of some sequences only, and parallel.cp={parallel.cp} ranks "
        "share each sequence; set parallel.cp 1, or leave it out")

    kv = model.mixer.heads_over_tp().get("kv_heads", parallel.tp)
    heads_are_shared = kv % parallel.tp != 0
    has_low_ranks = isinstance(model.mixer, (LatentConfig, KimiConfig))
    replicated = (has_low_ranks or model.mtp) and parallel.sp and parallel.tp > 1
    if replicated:
        cause = "with parallel.sp the matrices around latents and those of multi-token prediction have"
    else:
        cause = f"the matrices of model.mixer.kv_heads={kv} have"
    yield Rule(
        not cfg.log.noise_scale or not (heads_are_shared or replicated),
        f"log.noise_scale: at parallel.tp={parallel.tp} {cause} gradients that are summed over tp after the "
        "step; use a lower parallel.tp, or leave it out")


def ramp_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check that every batch size of train.ramp is possible."""
    train = cfg.train
    if not train.ramp:
        return
    unit = sequences_per_microbatch(cfg, world)
    numbers = positive_integers(train.ramp)
    yield Rule(
        len(numbers) in (3, 4),
        f"train.ramp: {train.ramp!r} must be START,INCREMENT,SAMPLES: three whole numbers above 0 and below "
        "1e9",
        ramp_unit=unit)

    start, increment = numbers[:2]
    yield Rule(
        start < train.global_batch and (train.global_batch - start) % increment == 0,
        f"train.ramp: {train.ramp} does not lead from {start} sequences by {increment} at a time to "
        f"train.global_batch={train.global_batch}",
        ramp_unit=unit)
    yield Rule(
        start % unit == increment % unit == 0,
        f"train.ramp: {train.ramp} has steps of {start} and {start + increment} sequences, and each must be "
        f"a multiple of train.micro_batch x dp = {train.micro_batch} x {unit // train.micro_batch}",
        ramp_unit=unit)


def checkpoint_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check the checkpoint section.

    A run has one starting point; checkpoint.init_changes names what weights depend on; checkpoint.keep_at is
    a list of steps, or log2; checkpoint.mirror is a URL; saves to memory are more frequent than those to
    disk.
    """
    checkpoint = cfg.checkpoint
    yield Rule(
        checkpoint.branch is None or (checkpoint.resume == "auto" and checkpoint.init_from is None),
        "checkpoint.branch: says what the run begins with, and so do checkpoint.resume and init_from; "
        "set one of them")
    for word in comma_separated(checkpoint.init_changes):
        problem = no_change_of_model(word)
        yield Rule(not problem, f"checkpoint.init_changes: {word}{problem}")
    keep_at = checkpoint.keep_at
    yield Rule(
        keep_at in (None, "log2") or positive_integers(keep_at),
        f"checkpoint.keep_at: {keep_at!r} is neither log2 nor a list of steps; write it as 100,200,1000")
    mirror = checkpoint.mirror
    yield Rule(
        mirror is None or "://" in mirror,
        f"checkpoint.mirror: {mirror!r} is not a URL; write it like s3://bucket/runs, or file:///folder")
    memory_every, every = checkpoint.memory_every, checkpoint.every
    yield Rule(
        memory_every is None or every is None or memory_every < every,
        f"checkpoint.memory_every: {memory_every} is not below checkpoint.every={every}, which saves to the "
        "disk; lower it, or leave it out")


def no_change_of_model(word: str) -> str:
    """Return the error about a word of checkpoint.init_changes, to follow the word, or "" if it is allowed.

    A word that does not begin with a section is the name of a weight, which is looked up in the checkpoint.
    """
    section, _, key = word.partition(".")
    section_type = sections().get(section)
    if section_type is None or word in FUNCTION_KEYS or word in (TOKENIZER, BY_TEXT, START):
        return ""
    if word not in every_path(Config):
        return ": no such key" + nearest_key(section_type, f"{section}.", key)
    return " does not change what weights compute; leave it out"


def task_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check that tasks are scored in a validation."""
    every, tasks_every = cfg.eval.every, cfg.eval.tasks_every
    if cfg.eval.tasks is None:
        return
    yield Rule(
        tasks_every is None or every is not None,
        f"eval.tasks_every: {tasks_every}, and eval.every none validates only at the end; set eval.every, or "
        "leave it out")
    unit = every or 1
    yield Rule(
        tasks_every is None or tasks_every % unit == 0,
        f"eval.tasks_every: {tasks_every} is not a multiple of eval.every={every}",
        "eval.tasks_every", nearby_multiples(tasks_every or unit, unit))


def adapter_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check model.lora, if it is set."""
    if cfg.model.lora is not None:
        from model.lora import lora_rules

        yield from lora_rules(cfg)


def name_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check the name of the run folder."""
    name = cfg.log.name
    is_plain = name is None or ("/" not in name and "\0" not in name and name not in ("", ".", ".."))
    yield Rule(is_plain, f"log.name: {name!r} must be a plain folder name; put the parent into log.dir")


def of_each_kind(rules: Callable[[Config, int], Iterator[Rule]]) -> Callable[[Config, int], Iterator[Rule]]:
    """Apply rules to each kind of block in model.pattern. Messages name keys as the kind states them."""
    def of_kinds(cfg: Config, world: int) -> Iterator[Rule]:
        variants = {variant.name: variant.changes for variant in cfg.model.blocks}
        for name, model in layer_models(cfg.model).items():
            stated = [path for path, _ in variants.get(name, ())]
            for rule in rules(replace(cfg, model=model), world):
                yield named_in_kind(rule, name, stated)

    return of_kinds


def named_in_kind(rule: Rule, name: str, stated: list[str]) -> Rule:
    """Rename the keys that a kind of block states to model.blocks.NAME.KEY."""
    if rule.holds:
        return rule
    message = rule.message
    for path in stated:
        message = re.sub(rf"\bmodel\.{re.escape(path)}\b", f"model.blocks.{name}.{path}", message)
    kept = [key for key in rule.keys.split() if not is_below(key.removeprefix("model."), stated)]
    return rule._replace(message=message, keys=" ".join(kept))


def pattern_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check kinds of blocks and their order. Raises ConfigError for a pattern that does not fit the
    layers."""
    model = cfg.model
    names = ", ".join(variant.name for variant in model.blocks)
    yield Rule(
        model.pattern is not None or not model.blocks,
        f"model.blocks: no layer is of the kinds {names}, since model.pattern is none; set it, as "
        f"({names}, block)...")
    layer_kinds(model)


def range_rules_of_kinds(cfg: Config, world: int) -> Iterator[Rule]:
    """Check the ranges of values that kinds of blocks state. Those of the model are checked already."""
    if cfg.model.pattern is not None:
        yield from of_each_kind(range_rules)(cfg, world)


# rules about train.phases: they hold for the whole run, however much of it is past
RULES_OF_PHASES = (phase_rules, spike_rules)
RULES_OF_WEIGHTS = (  # which ranks can hold a model that only computes
    of_each_kind(layout_rules), moe_rules, of_each_kind(mlp_rules), expert_rank_rules, adapter_rules,
)
RULES_OF_SEQUENCES = (of_each_kind(sequence_sharding_rules), other_model_rules)  # which it can compute on
# ordered: a rule may assume those before it
RULES: tuple[Callable[[Config, int], Iterator[Rule]], ...] = (
    range_rules,
    pattern_rules,
    range_rules_of_kinds,
    of_each_kind(part_rules),
    of_each_kind(mixer_rules),
    shared_key_rules,
    other_model_rules,
    run_length_rules,
    phase_rules,
    of_each_kind(layout_rules),
    of_each_kind(sequence_sharding_rules),
    async_tensor_rules,
    moe_rules,
    of_each_kind(mlp_rules),
    expert_rank_rules,
    row_bound_rules,
    routing_rules,
    compressed_token_rules,
    of_each_kind(fp8_rules),
    mps_rules,
    cuda_graph_rules,
    rerun_rules,
    optimizer_state_rules,
    qk_clip_rules,
    adapter_rules,
    group_rules,
    batch_rate_rules,
    spike_rules,
    data_parallel_rules,
    batch_rules,
    of_each_kind(noise_scale_rules),
    ramp_rules,
    checkpoint_rules,
    task_rules,
    name_rules,
)
