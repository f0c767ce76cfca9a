"""Model size and cost per token, summed over the model's parameters (model/describe.py), and how a table or a
header describes model, layout and batch."""
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from config import Config, ModelConfig
from config.axes import AXES, axis_degrees, ranks_of_microbatch
from config.numbers import parameter_count
from config.parameter_groups import freezes
from config.terminal import table_lines
from model.describe import describe_model
from model.flops import training_flops
from model.router import mixture
from parallel.sharding.spec import ParameterSpec, ShardedParameter

LOOKUP_ROLES = ("embedding", "positions", "head")  # of the embedding and the output head


Condition = Callable[[ParameterSpec], bool]


def always(spec: ParameterSpec) -> bool:
    return True


@lru_cache(maxsize=1024)
def parameters(model: ModelConfig) -> Mapping[str, int]:
    """Return {"total", "active": used by one token, "embedding": tables, and the head if it is not tied,
    "experts": all routed ones, "ahead": the modules of multi-token prediction}.

    Modules of multi-token prediction are only used in training, and not included in the others. The
    vocabulary counts as published, without padding.
    """
    main = replace(model, mtp=None)
    total = count_elements(main)
    experts = count_elements(main, lambda spec: spec.is_expert)
    mlp = mixture(model)
    used_experts = experts * mlp.top_k // mlp.experts if mlp else 0
    return {
        "total": total,
        "active": total - experts + used_experts,
        "embedding": count_elements(main, lambda spec: spec.role in LOOKUP_ROLES),
        "experts": experts,
        "ahead": count_elements(model) - total,
    }


@lru_cache(maxsize=1024)
def trained_parameters(model: ModelConfig, groups: str | None) -> int:
    """Return how many parameters train under these optim.groups, multi-token prediction included."""
    return count_elements(model, lambda spec: not spec.is_frozen, groups)


def count_elements(
    model: ModelConfig, is_counted: Condition = always, groups: str | None = None
) -> int:
    """Count the elements of the selected parameters, all by default."""
    parts = describe_model(model, groups).parts
    shared_table = parts[0].shared_table
    elements = 0
    for part, repeats in Counter(parts).items():
        elements += repeats * total_size(part.params, is_counted)
    return elements if shared_table is None else elements + total_size((shared_table,), is_counted)


def total_size(params: Iterable[ShardedParameter], is_counted: Condition) -> int:
    specs = [param.spec for param in params]
    return sum(spec.numel for spec in specs if is_counted(spec))


@lru_cache(maxsize=1024)
def flops_per_token(
    model: ModelConfig, seq_len: int, documents: tuple[int, ...] = (), groups: str | None = None
) -> float:
    """Return the model FLOPs per token of forward and backward: three times those of the forward, unless
    parameters are frozen (groups: optim.groups).

    Softmax attention counts the keys visible to a causal query, MoE the experts used by a token. Multi-token
    prediction counts; recompute and vocabulary padding do not. `documents` are the lengths of the ranges that
    attend to each other (data.doc_mask), by default full sequences.
    """
    counted = replace(model, vocab=model.vocab or 0, vocab_multiple=1)
    return training_flops(counted, documents or (seq_len,), seq_len, groups)


# ---- train.py --list ---------------------------------------------------------------------------------------


def table(configs: Mapping[str, Config], width: int | None = None) -> str:
    """Return the table of `train.py --list`, one line per recipe. A vocabulary size left to the tokenizer
    counts as 0 rows here. `width` is the terminal's columns, or None for unlimited."""
    rows: list[dict[str, str]] = []
    for name, cfg in configs.items():
        model = cfg.model
        counted = parameters(model)
        experts = mixture(model)
        rows.append({
            "recipe": name,
            "params": size_text(counted["total"]),
            "active": size_text(counted["active"]),
            "layers": str(model.layers),
            "width": str(model.hidden),
            "heads/kv": heads_text(model),
            "experts": f"{experts.experts}:{experts.top_k}" if experts else "-",
            "vocab": str(model.vocab or "data"),
            "context": context_text(model.context),
        })
    return "\n".join(table_lines(rows, to_left=["recipe"], first_to_go=["vocab", "context"], width=width))


def heads_text(model: ModelConfig) -> str:
    """Format as 32/8: heads, and key heads or groups shared by several; "-" without heads."""
    heads = [*model.mixer.heads_over_tp().values()]
    return f"{heads[0]}/{heads[-1]}" if heads else "-"


def context_text(tokens: int) -> str:
    """Format as 131072, or 10M for whole millions (2^20)."""
    millions, rest = divmod(tokens, 2**20)
    return str(tokens) if rest else f"{millions}M"


def size_text(count: int) -> str:
    """Format as 1.24B, 12.88B, 124.4M."""
    unit, divisor = ("B", 1e9) if count >= 1e9 else ("M", 1e6)
    size = count / divisor
    return f"{size:.{1 if size >= 100 else 2}f}{unit}"


# ---- the header --------------------------------------------------------------------------------------------


def model_line(cfg: Config, sizes: tuple[int, int]) -> str:
    """Describe the model. sizes: parameters (in total, without embeddings)."""
    model = cfg.model
    total, without_embeddings = sizes
    all_heads, *shared = model.mixer.heads_over_tp().values() or (0,)
    heads = f"{all_heads} heads"
    if shared and shared[0] != all_heads:
        heads += f" ({shared[0]} {'kv' if model.mixer.has_softmax else 'shared'})"
    if model.pattern:
        heads += f", blocks {model.pattern}"
    size = f"{parameter_count(total)} params ({parameter_count(without_embeddings)} without embeddings)"
    parts = [
        f"{model.preset or 'its own shape'}   {size}",
        f"{model.layers} layers",
        f"d {model.hidden}",
        heads,
    ]
    experts = mixture(model)
    if experts:
        parts.append(f"{experts.experts} experts, {experts.top_k} a token")
    parts.append(f"vocab {model.vocab or 0:,}")
    if freezes(cfg):
        parts.append(f"{parameter_count(trained_parameters(model, cfg.optim.groups))} params train")
    return " · ".join(parts)


def data_parallel_size(cfg: Config, world: int) -> int:
    return world // ranks_of_microbatch(axis_degrees(cfg.parallel))


def layout_line(cfg: Config, world: int) -> str:
    """Describe the layout; dp includes the replicas of dp_rep."""
    parts = [f"world {world} = dp {data_parallel_size(cfg, world)}"]
    for axis in AXES:
        is_in_model = mixture(cfg.model) or not axis.of_experts
        if is_in_model and axis.key != "dp_rep":
            parts.append(f"{axis.word} {getattr(cfg.parallel, axis.key)}")
    return " · ".join([*parts, cfg.train.dtype])


def batch_line(cfg: Config, world: int) -> str:
    train = cfg.train
    sequences = train.micro_batch * data_parallel_size(cfg, world)
    accumulation = train.global_batch // sequences
    tokens = train.global_batch * train.seq_len
    text = f"{sequences} seq x {train.seq_len} tok x {accumulation} accum = {tokens:,} tok/step"
    return text + (f" (ramp {train.ramp})" if train.ramp else "")
