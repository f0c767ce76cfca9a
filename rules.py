"""Every rule that spans config keys. It runs before any work starts; each refusal is one line that names the key, what is
wrong with it, and values nearby that would do.
"""
import contextlib
import dataclasses
import math
from collections.abc import Callable

from config import (HORIZONS, LARGEST_SCALE, Config, ConfigError, divisors, fp8_recipe, head_dim, is_moe, kv_heads, moe_ffn,
                    numbers, span, value_dim, words)

NO_MUP = {"sgd": "its muP rates are others (arXiv 2203.03466, table 8), and not here",
          "lamb": "its trust ratio sets each tensor's step, for which muP has no rule",
          "lars": "its trust ratio sets each tensor's step, for which muP has no rule"}
PARTS, MODES = ("core", "norm", "act"), ("none", "selective", "full")


def nearby(cfg: Config, key: str, values, check) -> str:
    """Up to four of `values`, those nearest to what `key` has, with which check(config) passes: text for the end of an error."""
    section, name = key.split(".")
    part, good = getattr(cfg, section), []
    now = getattr(part, name) or 0
    for v in sorted(set(values), key=lambda v: (abs(v - now), v)):
        with contextlib.suppress(ConfigError):
            check(dataclasses.replace(cfg, **{section: dataclasses.replace(part, **{name: v})}))
            good.append(v)
        if len(good) == 4:
            break
    return f"; try {key} {', '.join(map(str, sorted(good)))}" if good else ""


def nearby_ramp(cfg: Config, unit: int, check) -> str:
    """The ramp nearest to train.ramp, in multiples of `unit` sequences, that check(config) lets pass: text for the end of an error."""
    t = cfg.train
    first, more, samples = (numbers(t.ramp) + [unit, unit, 100 * t.global_batch])[:3] if len(numbers(t.ramp)) != 3 else numbers(t.ramp)
    every = [(start, step) for start in range(unit, t.global_batch, unit) for step in divisors(t.global_batch - start) if step % unit == 0]
    for start, step in sorted(every, key=lambda s: (abs(s[0] - first), abs(s[1] - more)))[:50] if check else ():
        with contextlib.suppress(ConfigError):
            ramp = f"{start},{step},{samples}"
            check(dataclasses.replace(cfg, train=dataclasses.replace(t, ramp=ramp)))
            return f"; try train.ramp {ramp}"
    return "; leave it out"


def validate(cfg: Config, world: int = 1, fits: Callable[[Config], object] | None = None) -> None:
    """Every rule that spans keys. Raises ConfigError: one line naming the key and the way out, with values that fits(config)
    lets pass; None: without."""
    m, t, o, p = cfg.model, cfg.train, cfg.optim, cfg.parallel

    def need(ok, text, keys="", values=(), tip=str):
        if not ok:
            tips = (nearby(cfg, key, values, fits) for key in keys.split() if fits)
            raise ConfigError(text + next(filter(None, tips), "") + tip())

    positive = {"model": ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "vocab_multiple", "context", "window",
                          "experts", "top_k", "moe_ffn", "moe_every", "router_groups", "router_group_top_k", "router_scale", "capacity",
                          "kv_rank", "q_rank", "nope_dim", "rope_dim", "v_dim", "mup_base", "mup_head_dim", "rope_factor", "rope_original"),
                "train": ("steps", "tokens", "flops", "seq_len", "micro_batch", "global_batch", "max_minutes", "threads", "fp8_block",
                          "loss_scale_window"),
                "optim": ("lr", "eps", "clip"),
                "parallel": ("tp", "pp", "cp", "ep", "etp", "dp_rep", "bucket_mb", "node", "compress_block", "powersgd_rank"),
                "eval": ("every", "batches"), "checkpoint": ("every", "keep"), "log": ("every",)}
    for section, keys in positive.items():
        for key in keys:
            value = getattr(getattr(cfg, section), key)
            need(value is None or value > 0, f"{section}.{key}: {value} must be above 0")
    need(1 <= t.loss_scale <= LARGEST_SCALE and math.frexp(t.loss_scale)[0] == 0.5,
         f"train.loss_scale: {t.loss_scale:g} must be a power of two from 1 to {LARGEST_SCALE:.0f}, which changes no bit; take 65536")
    for key in ("beta1", "beta2", "momentum"):
        need(0 <= getattr(o, key) < 1, f"optim.{key}: {getattr(o, key)} must lie in [0, 1)")
    need(cfg.eval.temperature >= 0 and cfg.eval.sample >= 0, "eval.temperature, eval.sample: must not be negative")
    need(0 <= m.dropout < 1, f"model.dropout: {m.dropout} must lie in [0, 1)")
    need(0 < o.decay_fraction <= 1, f"optim.decay_fraction: {o.decay_fraction} must lie in (0, 1]")
    need(o.weight_decay >= 0, f"optim.weight_decay: {o.weight_decay} must not be negative")
    need(o.warmup >= 0, f"optim.warmup: {o.warmup} must not be negative")
    need(o.min_lr is None or 0 <= o.min_lr <= o.lr, f"optim.min_lr: {o.min_lr} must lie in [0, optim.lr = {o.lr}]")
    need(m.head_dim or m.kv_rank or m.hidden % m.heads == 0,
         f"model.heads: {m.heads} does not divide model.hidden={m.hidden}, and model.head_dim is not set",
         "model.heads", divisors(m.hidden))
    need(m.heads % kv_heads(m) == 0,
         f"model.kv_heads: {kv_heads(m)} does not divide model.heads={m.heads}", "model.kv_heads", divisors(m.heads))
    need(m.attention not in ("flash", "triton") or t.device != "cpu",
         f"model.attention: {m.attention} needs a GPU, and train.device is cpu; take auto")
    need(m.attention != "flash" or t.dtype in ("bf16", "fp8"), f"model.attention: flash-attn has no {t.dtype}; set train.dtype bf16 or take auto")
    need(m.attention != "triton" or t.dtype != "fp64", "model.attention: the Triton kernels have no fp64; take auto or reference")
    key, turned = ("model.rope_dim", m.rope_dim) if m.kv_rank else ("model.head_dim", head_dim(m))
    need(m.positions != "rope" or turned % 2 == 0, f"{key}: {turned} must be even for RoPE", key, (turned - 1, turned + 1))
    latent = {"kv_heads": m.kv_heads in (None, m.heads), "head_dim": not m.head_dim, "positions": m.positions == "rope", "bias": not m.bias,
              "qkv_bias": not m.qkv_bias, "qk_norm": not m.qk_norm}
    for field, ok in latent.items():
        need(not m.kv_rank or ok, f"model.{field}: {getattr(m, field)} has no meaning with latent attention (model.kv_rank={m.kv_rank}); "
             "leave it at its default, or model.kv_rank out")
    need(m.kv_rank or not (m.q_rank or m.rope_pairs or m.rope_mscale_all),
         "model.kv_rank: q_rank, rope_pairs and rope_mscale_all belong to latent attention; give kv_rank, or leave them out")
    need(m.rope_kind != "yarn" or m.rope_low_freq < m.rope_high_freq,
         f"model.rope_low_freq: {m.rope_low_freq} must lie below model.rope_high_freq={m.rope_high_freq}")
    need(not m.mup_base or o.name not in NO_MUP,
         f"optim.name: {o.name} and model.mup_base do not go together: {NO_MUP.get(o.name)}; take adamw, lion or muon")
    need(m.mup_base or not m.mup_head_dim, "model.mup_head_dim: is that of muP's base model; give model.mup_base as well, or leave it out")
    need(m.mtp >= 0 and m.mtp_weight >= 0, "model.mtp, model.mtp_weight: must not be negative")
    need(m.qk_norm or not m.qk_norm_whole, "model.qk_norm_whole: says how model.qk_norm is done, which is off; turn that on")
    need(m.positions != "learned" or t.seq_len <= m.context,
         f"train.seq_len: {t.seq_len} is longer than the {m.context} learned positions (model.context); shorten it or raise model.context",
         "train.seq_len", [m.context // 2**i for i in range(4)])
    given = [h for h in HORIZONS if getattr(t, h) is not None]
    need(len(given) == 1, f"train.{given[1] if len(given) > 1 else 'steps'}: give exactly one of train.steps, train.tokens, train.flops; "
                          + (f"got {' and '.join(given)}" if given else "got none"))
    span(cfg.profile.steps)
    degree = p.tp * p.pp * p.cp * p.dp_rep
    need(world % degree == 0, f"parallel.tp*pp*cp*dp_rep = {p.tp}*{p.pp}*{p.cp}*{p.dp_rep} = {degree} does not divide the world size {world}",
         "parallel.tp parallel.pp parallel.cp parallel.dp_rep", divisors(world))
    dp = world // (p.tp * p.pp * p.cp)
    if p.stages:
        cut = numbers(p.stages)
        need(cut, f"parallel.stages: {p.stages!r} is no list of layers a stage; write it as 3,2,2,1, each at least 1")
        rest = m.layers - sum(cut[:-1])
        need(sum(cut) == m.layers, f"parallel.stages: {p.stages} makes {sum(cut)} layers, model.layers is {m.layers}"
             + (f"; try parallel.stages {','.join(map(str, [*cut[:-1], rest]))}" if rest > 0 else ""))
    for key, known in (("recompute_parts", PARTS), ("recompute_stages", MODES)):
        odd = next((w for w in words(getattr(p, key)) if w not in known), None)
        need(odd is None, f"parallel.{key}: {odd!r} is not one of {', '.join(known)}; write them with commas between")
    for key, value in (("model.heads", m.heads), ("model.kv_heads", kv_heads(m)), ("model.ffn", m.ffn), ("model.vocab_multiple", m.vocab_multiple)):
        shared = key == "model.kv_heads" and p.tp % value == 0 and not m.qk_norm_whole  # several ranks compute the same head
        need(value % p.tp == 0 or shared, f"parallel.tp: {p.tp} does not divide {key}={value}", "parallel.tp", divisors(value))
    part = p.cp * math.lcm(2 if p.cp > 1 else 1, p.tp if p.sp else 1)  # cp holds two chunks a rank; sp cuts what a rank holds
    need(t.seq_len % part == 0, f"train.seq_len: {t.seq_len} is not a multiple of {part}, into which parallel.cp={p.cp}"
         f"{f' and parallel.sp over tp={p.tp} cut' if p.sp else ' cuts'} it",
         "train.seq_len", [part * max(1, t.seq_len // part + i) for i in range(-1, 3)])
    for key, value in (("model.heads", m.heads), ("model.kv_heads", kv_heads(m))):
        need(p.cp == 1 or p.cp_kind == "ring" or value % (p.tp * p.cp) == 0,
             f"parallel.cp_kind: ulysses gives each rank whole heads, and tp*cp = {p.tp}*{p.cp} does not divide {key}={value}; "
             "take ring, or another degree", "parallel.cp", divisors(value))
    mixture(cfg, world, need)
    eight_bits(cfg, need)
    recordable(cfg, world, need)
    need(o.name == "adamw" or p.offload not in ("optimizer", "both"),
         f"parallel.offload: {p.offload} keeps the state of adamw in host memory, not that of optim.name={o.name}; use none or activations")
    need(o.states == "fp32" or o.name == "adamw",
         "optim.states: bf16 is rounded stochastically by adamw alone, and nearest rounding would lose what "
         f"optim.name={o.name} adds; take adamw, or optim.states fp32")
    need(p.zero or p.dp_rep == 1, "parallel.dp_rep: replicates the shards of ZeRO; set parallel.zero to 1, 2 or 3, or leave dp_rep at 1",
         "parallel.zero", (1, 2, 3))
    need(not p.zero or p.reduce in ("collective", "ring"),
         f"parallel.reduce: {p.reduce} makes whole sums, parallel.zero={p.zero} wants shards of them; use collective or ring, or parallel.zero 0")
    need(p.compress == "none" or p.reduce == "collective",
         f"parallel.compress: {p.compress} says how gradients are summed, and so does parallel.reduce={p.reduce}; use one of them")
    need(p.compress != "powersgd" or not p.zero,
         f"parallel.compress: powersgd has factors of whole gradients, parallel.zero={p.zero} wants shards of them; "
         "use int8 or fp8, or parallel.zero 0")
    need(p.compress != "powersgd" or t.dtype != "fp16",
         "parallel.compress: powersgd keeps errors from step to step, which a changing loss scale (fp16) would make wrong; "
         "use train.dtype bf16")
    need(p.compress_weights == "none" or p.zero,
         f"parallel.compress_weights: {p.compress_weights} is for weights that are gathered, and parallel.zero=0 gathers none; "
         "set parallel.zero to 1, 2 or 3, or leave it at none", "parallel.zero", (1, 2, 3))
    need(p.compress_block % 64 == 0, f"parallel.compress_block: {p.compress_block} is not a multiple of 64, from which parameters begin",
         "parallel.compress_block", [64 * max(1, p.compress_block // 64 + i) for i in range(-1, 3)])
    a, node = world // p.pp, p.node or world  # a stage's ranks in a row; those of one data-parallel group are tp apart
    for key, apart in (("tp", p.tp), ("ep*etp", p.ep * p.etp)):
        need(p.reduce != "hierarchy" or max(a, node) % min(a, node) == max(apart, node) % min(apart, node) == 0,
             f"parallel.node: {node} cuts the {a} ranks of a stage unevenly at {key} {apart}", "parallel.node", divisors(a))
    need(t.global_batch % (t.micro_batch * dp) == 0,
         f"train.global_batch: {t.global_batch} is not a multiple of train.micro_batch x dp = {t.micro_batch} x {dp}",
         "train.global_batch", [t.micro_batch * dp * max(1, t.global_batch // (t.micro_batch * dp) + i) for i in range(-1, 3)])
    need(not cfg.log.noise_scale or p.cp == 1,
         f"log.noise_scale: wants the gradient of some sequences alone, and parallel.cp={p.cp} ranks hold parts of each; "
         "set parallel.cp 1, or leave it out")
    latent = (m.kv_rank or m.mtp) and p.sp and p.tp > 1
    need(not cfg.log.noise_scale or (kv_heads(m) % p.tp == 0 and not latent), f"log.noise_scale: at parallel.tp={p.tp}"
         + (" with parallel.sp the matrices behind latents and further tokens have" if latent else f" model.kv_heads={kv_heads(m)} has")
         + " gradients that are summed over tp after the step; take a lower parallel.tp, or leave it out")
    if t.ramp:
        unit, tip = t.micro_batch * dp, lambda: nearby_ramp(cfg, t.micro_batch * dp, fits)
        start, more, *rest = numbers(t.ramp) + [0, 0]
        need(len(numbers(t.ramp)) == 3, f"train.ramp: {t.ramp!r} must be START,INCREMENT,SAMPLES: three whole numbers above 0 and below 1e9", tip=tip)
        need(start < t.global_batch and (t.global_batch - start) % more == 0,
             f"train.ramp: {t.ramp} does not lead from {start} sequences by {more} at a time to train.global_batch={t.global_batch}", tip=tip)
        need(start % unit == more % unit == 0,
             f"train.ramp: {t.ramp} has steps of {start} and {start + more} sequences, and each must be a multiple of train.micro_batch x dp = "
             f"{t.micro_batch} x {dp}", tip=tip)
    need(not cfg.log.name or ("/" not in cfg.log.name and "\0" not in cfg.log.name and cfg.log.name not in (".", "..")),
         f"log.name: {cfg.log.name!r} must be a plain folder name; put the parent into log.dir")


def eight_bits(cfg: Config, need) -> None:
    """The rules of fp8. need: as in `mixture`."""
    m, t, p = cfg.model, cfg.train, cfg.parallel
    recipe = fp8_recipe(t)
    need(recipe is None or t.dtype in ("fp8", "fp64"),
         f"train.fp8: {t.fp8} says how train.dtype fp8 scales, and the dtype is {t.dtype}; set train.dtype fp8, or leave train.fp8 out")
    if recipe is None:
        return
    need(t.fp8_keep >= 0, f"train.fp8_keep: {t.fp8_keep} must not be negative", "train.fp8_keep", (0, 1))
    need(2 * t.fp8_keep < m.layers,
         f"train.fp8_keep: {t.fp8_keep} first and {t.fp8_keep} last layers in bf16 leave none of model.layers={m.layers} in fp8",
         "train.fp8_keep", range((m.layers + 1) // 2))
    need(m.experts is None or p.etp == 1 or recipe == "blockwise",
         f"parallel.etp: {p.etp} ranks share an expert, and a scale of {recipe} would span them; take train.fp8 blockwise, or parallel.ep")
    need(kv_heads(m) % p.tp == 0,
         f"parallel.tp: {p.tp} ranks share model.kv_heads={kv_heads(m)}, and shared heads have no fp8; use at most that many, or bf16",
         "parallel.tp", divisors(kv_heads(m)))
    proof = t.dtype == "fp64"  # no chip has a say
    need(recipe != "blockwise" or proof or (t.fp8_block >= 16 and t.fp8_block & t.fp8_block - 1 == 0),
         f"train.fp8_block: {t.fp8_block} must be a power of two from 16 on", "train.fp8_block", (16, 32, 64, 128))
    unit = t.fp8_block if recipe == "blockwise" else 1 if proof else 16
    of = f"train.fp8_block={unit}" if recipe == "blockwise" else f"{unit}, in which chips read fp8"
    dims = {"model.hidden": (m.hidden, 1), "model.heads": (m.heads * value_dim(m), p.tp)}
    if not all(is_moe(m, i) for i in range(m.layers)):
        dims["model.ffn"] = (m.ffn, p.tp)
    if m.experts:
        dims["model.moe_ffn"] = (moe_ffn(m), p.etp)
    if m.experts and m.shared_experts:
        dims["model.shared_experts"] = (m.shared_experts * moe_ffn(m), p.tp)
    if not m.kv_rank:
        dims["model.kv_heads"] = (kv_heads(m) * head_dim(m), p.tp)
    elif not m.q_rank:
        dims["model.heads"] = (m.heads * math.gcd(head_dim(m), value_dim(m)), p.tp)
    blocks = ("train.fp8_block", (16, 32, 64, 128)) if recipe == "blockwise" else None
    for key, (size, cut) in dims.items():
        by = "etp" if key == "model.moe_ffn" else "tp"
        need(size % (cut * unit) == 0, f"train.dtype: {size}{f' / {by} {cut}' if cut > 1 else ''} features of {key} are no multiple of {of}; "
             "change it, or use bf16", *blocks or (f"parallel.{by}", divisors(cut)))
    tokens, chunks = t.micro_batch * t.seq_len // p.cp, 2 * p.cp if p.cp > 1 else 1
    if recipe == "blockwise":
        need(t.seq_len % (chunks * unit) == 0,
             f"train.seq_len: {t.seq_len}{f' / {chunks} chunks of cp {p.cp}' if chunks > 1 else ''} is no multiple of {of}, "
             "along which the weights' gradients are quantized", *blocks)
    else:
        need(tokens % unit == 0, f"train.seq_len: {tokens} tokens of a microbatch and rank are no multiple of {of}",
             "train.seq_len", [unit * p.cp * max(1, t.seq_len // (unit * p.cp) + i) for i in range(-1, 3)])


def recordable(cfg: Config, world: int, need) -> None:
    """What a recording of forward and backward (runtime/graphs.py) cannot hold. need(ok, text): as in `validate`."""
    p = cfg.parallel
    against = {f"{world} ranks, whose exchanges are not recorded": world > 1, "train.device=cpu, which records nothing": cfg.train.device == "cpu",
               "model.experts: how tokens are shared out is read on the host": cfg.model.experts is not None,
               f"parallel.offload={p.offload}, whose copies go through the host": p.offload != "none",
               f"parallel.zero={p.zero}, whose buffers come and go": p.zero > 1,
               "log.noise_scale, which looks into the step between two microbatches": cfg.log.noise_scale}
    why = next((w for w, there in against.items() if there), "")
    need(not cfg.train.cuda_graphs or not why, f"train.cuda_graphs: cannot be with {why}; leave it out")


def mixture(cfg: Config, world: int, need) -> None:
    """The rules of a mixture of experts. need(ok, text, keys, values): as in `validate`."""
    m, t, p = cfg.model, cfg.train, cfg.parallel
    if m.experts is None:
        need(p.ep == p.etp == 1, f"parallel.{'ep' if p.ep > 1 else 'etp'}: shares out experts, and model.experts is none; leave it at 1")
        need(m.capacity is None, "model.capacity: is an expert's, and model.experts is none; leave it out")
        return
    inner = world // (p.pp * p.dp_rep)
    need(m.experts % p.ep == 0, f"parallel.ep: {p.ep} does not divide model.experts={m.experts}", "parallel.ep", divisors(m.experts))
    need(moe_ffn(m) % p.etp == 0, f"parallel.etp: {p.etp} does not divide model.moe_ffn={moe_ffn(m)}", "parallel.etp", divisors(moe_ffn(m)))
    need(inner % (p.ep * p.etp) == 0, f"parallel.ep*etp = {p.ep}*{p.etp} does not divide dp*cp*tp = {inner}",
         "parallel.ep parallel.etp", divisors(inner))
    need(m.top_k <= m.experts, f"model.top_k: {m.top_k} is more than model.experts={m.experts}", "model.top_k", (m.experts,))
    need(m.experts % m.router_groups == 0, f"model.router_groups: {m.router_groups} does not divide model.experts={m.experts}",
         "model.router_groups", divisors(m.experts))
    need(m.router_group_top_k <= m.router_groups,
         f"model.router_group_top_k: {m.router_group_top_k} is more than model.router_groups={m.router_groups}",
         "model.router_group_top_k", (m.router_groups,))
    chosen = m.experts // m.router_groups * m.router_group_top_k
    need(m.top_k <= chosen, f"model.top_k: {m.top_k} is more than the {chosen} experts of model.router_group_top_k={m.router_group_top_k} groups",
         "model.top_k model.router_group_top_k", range(1, m.experts + 1))
    need(m.router == "softmax" or m.router_groups == 1 or m.experts // m.router_groups > 1,
         f"model.router_groups: {m.router_groups} groups of one expert have no two best", "model.router_groups", divisors(m.experts))
    need(m.capacity is None or m.capacity >= 1 / m.experts,
         f"model.capacity: {m.capacity} is below 1/experts = {1 / m.experts:g}, and most tokens would be dropped; "
         "1 is a fair share, none drops nothing")
    need(m.capacity is not None or not m.pad, "model.pad: fills up to model.capacity, which is none; set it, or leave pad out")
    need(0 <= m.jitter < 1, f"model.jitter: {m.jitter} must lie in [0, 1)")
    for key in ("shared_experts", "first_dense", "aux_loss", "z_loss", "router_bias_rate"):
        need(getattr(m, key) >= 0, f"model.{key}: {getattr(m, key)} must not be negative")
    need(any(is_moe(m, i) for i in range(m.layers)), f"model.first_dense: {m.first_dense} and model.moe_every={m.moe_every} leave none of the "
         f"{m.layers} layers experts", "model.first_dense model.moe_every", range(m.layers))
    need(not m.shared_gate or m.shared_experts, "model.shared_gate: there are no shared experts to gate; set model.shared_experts")
    need(m.activation == "swiglu" and not m.bias,
         f"model.experts: an expert is a SwiGLU without biases, not {m.activation}{' with biases' * m.bias}; "
         "set model.activation swiglu and model.bias false")
    need(m.shared_experts * moe_ffn(m) % p.tp == 0, f"parallel.tp: {p.tp} does not divide the shared experts' width {m.shared_experts * moe_ffn(m)}",
         "parallel.tp", divisors(m.shared_experts * moe_ffn(m)))
    need(t.seq_len % (p.cp * p.tp) == 0,
         f"train.seq_len: {t.seq_len} is not a multiple of cp*tp = {p.cp}*{p.tp}, over which a mixture's tokens are cut",
         "train.seq_len", [p.cp * p.tp * max(1, t.seq_len // (p.cp * p.tp) + i) for i in range(-1, 3)])
