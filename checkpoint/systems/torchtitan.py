"""Read torchtitan folders: torch.distributed.checkpoint, with the names of Llama 3, Qwen3 (dense or a
mixture) or DeepSeek-V3.

The folder has only tensors, so the model is the run's, except for what shapes determine. Their Llama 3
rotates channels 2i and 2i + 1 of a head together; if the run rotates halves, the rows of q and k are
reordered while reading, which does not change the function.

Sources: state_dict_adapter.py of each model and models/common/rope.py of torchtitan.
"""
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoint.disk.tensors_by_name import NamedTensors
from checkpoint.hf.families.family import Arrangement, Family
from checkpoint.hf.families.names import in_layer, with_leaf
from checkpoint.hf.families.table import FAMILIES
from checkpoint.hf.tensors import MAX_NAMED
from checkpoint.systems.composed import renamed
from checkpoint.systems.dcp import METADATA, open_dcp
from checkpoint.systems.foreign import ForeignIndex, foreign_index
from checkpoint.systems.system_rules import check_dims
from config import ConfigError, ModelConfig, head_dim
from config.reading import build_tree
from config.reading.flat import FlatModel, flat_model, from_flat
from config.tree import plain_data, with_values
from model.attention import AttentionConfig
from parallel.sharding.boxes import Box

STEP = re.compile(r"step-(\d+)")
NUMBER = re.compile(r"\d+")
# saved in addition to the weights: other state, and buffers that follow from the model
NO_WEIGHT = re.compile(
    r"(optimizer|lr_scheduler|dataloader|train_state)(\..*)?"
    r"|(.*\.)?(freqs_cis|rope\.cache|rope_cache|tokens_per_expert|tokens_per_expert_E)"
)
SPELLINGS = (  # of older and newer versions, and the names used here
    (re.compile(r"^model\."), ""),
    (re.compile(r"^output\.weight$"), "lm_head.weight"),
    (re.compile(r"\.attention\.qkv_linear\."), ".attention."),
    (re.compile(r"\.moe\.routed_experts\.inner_experts\."), ".moe.experts."),
    (re.compile(r"\.(w[123])_E(FD|DF)$"), r".\1"),
    (re.compile(r"\.expert_bias_E$"), ".expert_bias"),
)

OUTER = {"embed": "tok_embeddings", "norm": "norm", "head": "lm_head"}
BLOCK = in_layer("layers", {
    "attn_norm": "attention_norm",
    "mlp_norm": "ffn_norm",
    "attn.o": "attention.wo",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
})
QKV = in_layer("layers", {"attn.q": "attention.wq", "attn.k": "attention.wk", "attn.v": "attention.wv"})
QK_NORM = in_layer("layers", {"attn.q_norm": "attention.q_norm", "attn.k_norm": "attention.k_norm"})
LATENT = in_layer("layers", {
    "attn.q": "attention.wq",
    "attn.q_a": "attention.wq_a",
    "attn.q_norm": "attention.q_norm",
    "attn.q_b": "attention.wq_b",
    "attn.kv_a": "attention.wkv_a",
    "attn.kv_norm": "attention.kv_norm",
    "attn.kv_b": "attention.wkv_b",
})
EXPERTS = in_layer("layers", {  # stacked per layer
    "mlp.experts.{expert}.gate.weight": "moe.experts.w1",
    "mlp.experts.{expert}.up.weight": "moe.experts.w3",
    "mlp.experts.{expert}.down.weight": "moe.experts.w2",
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.router.bias": "moe.expert_bias",
    "mlp.shared.gate.weight": "moe.shared_experts.w1.weight",
    "mlp.shared.up.weight": "moe.shared_experts.w3.weight",
    "mlp.shared.down.weight": "moe.shared_experts.w2.weight",
})
STACKED = [name for ours, name in EXPERTS.items() if "{expert}" in ours]
STACK = re.compile(r"\.moe\.experts\.w[123]$")
VECTOR = re.compile(r"norm\.weight$|expert_bias$")
ROUTING = ("mlp.router.scores", "mlp.router.bias_rate", "mlp.router.renorm", "mlp.router.scale")
LATENT_EPS = 1e-5  # of all norms there
ABSENT = ("mtp", "mup")  # there; differences that a run may have


@dataclass(frozen=True)
class TitanModel:
    """A model of torchtitan.

    `like` is the Hugging Face family that computes the same, apart from the `free` keys and from RoPE, which
    rotates neighbouring pairs or halves.
    """
    name: str
    like: str
    tensors: dict[str, str]
    in_pairs: bool
    free: tuple[str, ...] = ()

    def family(self) -> Family:
        return replace(
            FAMILIES[self.like],
            model_type=f"torchtitan's {self.name}",
            tensors=self.tensors,
            prefix="",
            arrangements=dict.fromkeys(STACKED, lambda model: Arrangement(leading=model.mlp.experts)),
            config="the run's recipe",
        )


LLAMA = TitanModel("Llama 3", "llama", with_leaf("weight", OUTER | BLOCK | QKV), in_pairs=True)
QWEN = TitanModel("Qwen3", "qwen3", with_leaf("weight", OUTER | BLOCK | QKV | QK_NORM), in_pairs=False)
QWEN_MOE = replace(
    QWEN, like="qwen3_moe", tensors=QWEN.tensors | EXPERTS, free=("mlp.router.bias_rate", "mlp.router.scale")
)
DEEPSEEK = TitanModel(
    "DeepSeek-V3",
    "deepseek_v3",
    with_leaf("weight", OUTER | BLOCK | LATENT) | EXPERTS,
    in_pairs=True,
    free=(*ROUTING, "mixer.norm_eps"),
)


# ---- the folder --------------------------------------------------------------------------------------------

def find_torchtitan(path: Path) -> Path | None:
    """Return the folder with .metadata: the path itself, or its newest step-N."""
    steps = {
        int(match[1]): folder
        for folder in path.glob("step-*")
        if (match := STEP.fullmatch(folder.name)) and (folder / METADATA).is_file()
    }
    folder = path if (path / METADATA).is_file() or not steps else steps[max(steps)]
    return folder if (folder / METADATA).is_file() else None


def open_torchtitan(folder: Path, run: ModelConfig) -> ForeignIndex:
    """Open the tensors under our names, as those of the run's model.

    Raises ConfigError naming the file, the tensors that no model of torchtitan has, or the keys of the run's
    model that its counterpart cannot express.
    """
    tensors = with_todays_names(open_dcp(folder))
    titan = detect_model(tensors.tensors)
    known = {NUMBER.sub("N", name.format(layer=0)) for name in titan.tensors.values()}
    unknown = Counter(name for full in tensors.tensors if (name := NUMBER.sub("N", full)) not in known)
    if unknown or "tok_embeddings.weight" not in tensors.tensors:
        said = [f"{name} ({count:,})" if count > 1 else name for name, count in unknown.items()]
        more = f" and {len(said) - MAX_NAMED:,} more" if len(said) > MAX_NAMED else ""
        found = f"{', '.join(said[:MAX_NAMED])}{more}: no weights of" if said else "holds no embedding of"
        raise ConfigError(f"{folder}: {found} torchtitan's {titan.name} (Llama 3, Qwen3 and DeepSeek-V3 are "
                          "supported); convert it to a Hugging Face folder")
    for name, info in tensors.tensors.items():
        dims = 3 if STACK.search(name) else 1 if VECTOR.search(name) else 2
        check_dims(name, info.shape, dims, str(folder))
    check_form(titan, run, folder)

    model = model_there(titan, run, tensors)
    if titan is LLAMA and not model.mixer.rope.pairs:
        tensors = with_halves(tensors, head_dim(model))
    note = (f"{folder} does not describe its model: what shapes do not show (RoPE, epsilons) is taken from "
            "this run")
    return foreign_index(folder, titan.family(), model, tensors, notes=(note,))


def with_todays_names(tensors: NamedTensors) -> NamedTensors:
    """Return only the weights, under one spelling of their names."""
    names: dict[str, str] = {}
    for stored in tensors.tensors:
        name = stored
        for spelling, ours in SPELLINGS:
            name = spelling.sub(ours, name)
        if NO_WEIGHT.fullmatch(name):
            continue
        if name in names:
            raise ConfigError(f"{tensors.where}: {names[name]} and {stored} are the same tensor; keep one")
        names[name] = stored
    return renamed(tensors, names)


def detect_model(names: Iterable[str]) -> TitanModel:
    """Return the model that has tensors of these names."""
    parts = {name.split(".", 2)[2] for name in names if name.startswith("layers.") and name.count(".") > 1}
    if any(part.startswith("attention.wkv_a.") for part in parts):
        return DEEPSEEK
    has_experts = any(part.startswith("moe.") for part in parts)
    if any(part.startswith("attention.q_norm.") for part in parts):
        return QWEN_MOE if has_experts else QWEN
    return LLAMA


def check_form(titan: TitanModel, run: ModelConfig, folder: Path) -> None:
    """Raise ConfigError naming the keys of the run's model that its counterpart cannot express."""
    has_rope = getattr(run.mixer, "rope", None) is not None
    compared = {**dict.fromkeys(ABSENT), **({"mixer.rope.pairs": False} if has_rope else {})}
    obstacles = FAMILIES[titan.like].obstacles(with_values(run, compared))
    names = [name for name in obstacles if name not in titan.free]
    if names:
        keys = ", ".join(f"model.{name}" for name in names)
        raise ConfigError(f"{folder}: holds torchtitan's {titan.name}, which has no form for {keys} as the "
                          "run has it; set the model as it is there")


def model_there(titan: TitanModel, run: ModelConfig, tensors: NamedTensors) -> ModelConfig:
    """Return the run's model, updated with what names and shapes say about its counterpart."""
    shapes = {name: info.shape for name, info in tensors.tensors.items()}
    vocab, hidden = shapes["tok_embeddings.weight"]
    layers = {int(name.split(".")[1]) for name in shapes if name.startswith("layers.")}
    values: dict[str, Any] = {
        "vocab": vocab,
        "hidden": hidden,
        "layers": 1 + max(layers, default=0),
        "tied": run.tied or "lm_head.weight" not in shapes,
        **dict.fromkeys(ABSENT),
    }
    if not (titan is LLAMA and isinstance(run.mixer, AttentionConfig)):
        values["mixer.rope.pairs"] = titan.in_pairs
    if titan is DEEPSEEK:
        values["mixer.norm_eps"] = LATENT_EPS
    values |= attention_there(run, hidden, of_any_layer(shapes))
    flat, _ = flat_model(with_values(run, values))
    flat = with_values(flat, mlp_there(flat, of_any_layer(shapes)))
    return build_tree(ModelConfig, from_flat(plain_data(flat)), "model.")


def of_any_layer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return {name in a layer: shape in the last layer that has it}."""
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name.startswith("layers."):
            _, _, name_in_layer = name.split(".", 2)
            result[name_in_layer] = shape
    return result


def attention_there(run: ModelConfig, hidden: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the heads that match the rows of q and k, with the head size from the head norm or the run."""
    if not isinstance(run.mixer, AttentionConfig) or "attention.wk.weight" not in shapes:
        return {}
    size = shapes.get("attention.q_norm.weight", (head_dim(run),))[0]
    heads, kv_heads = (shapes[f"attention.{name}.weight"][0] / size for name in ("wq", "wk"))
    if heads != int(heads) or kv_heads != int(kv_heads):
        return {}
    return {"mixer.heads": int(heads), "mixer.kv_heads": int(kv_heads), "mixer.head_dim": size}


def mlp_there(run: FlatModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if "feed_forward.w1.weight" in shapes:
        values["mlp.width"] = shapes["feed_forward.w1.weight"][0]
    if "moe.experts.w1" in shapes:
        values["experts"], values["moe_ffn"], _ = shapes["moe.experts.w1"]
    elif run.experts is not None:
        values["experts"] = None
    if "moe.router.gate.weight" in shapes:
        values["router_bias"] = "moe.expert_bias" in shapes
    return values


def with_halves(tensors: NamedTensors, size: int) -> NamedTensors:
    """Return the tensors with rows of q and k reordered to halves. `size` is that of a head.

    Row i + j size/2 of a head is row 2i + j there.
    """
    rotated = re.compile(r"layers\.\d+\.attention\.w[qk]\.weight")

    def read_box(want: Box) -> Tensor:
        if not rotated.fullmatch(want.key):
            return tensors.read_box(want)
        # all heads that contain the rows
        end = want.start[0] + want.size[0]
        first_row = want.start[0] // size * size
        end_row = -(-end // size) * size
        start = (first_row, *want.start[1:])
        rows = (end_row - first_row, *want.size[1:])
        heads = tensors.read_box(Box(want.key, want.shape, start, rows))

        # neighbouring pairs -> halves
        pairs = heads.unflatten(0, (-1, size // 2, 2))
        halves = pairs.transpose(1, 2).flatten(0, 2)
        return halves[want.start[0] - first_row:end - first_row]

    return replace(tensors, read_box=read_box)
