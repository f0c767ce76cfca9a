"""Rules of families in which some layers have Mamba-2 instead of attention: Granite hybrid, and
Nemotron-H, whose layers have only a mixer or only an MLP."""
import math
from dataclasses import dataclass

from checkpoint.hf.layer_types import FULL
from checkpoint.hf.rules import (
    EXPERTS_BESIDE,
    ROPE,
    FamilyError,
    Field,
    FieldGroup,
    Fixed,
    Rule,
    is_number,
    layers_of,
    number,
    plain_number,
    read_rules,
    typed_list,
    write_rules,
)
from checkpoint.hf.state_layers import EARLIER_TYPES, LINEAR, StateLayers
from config import ModelConfig, NoPart, Tree
from config.pattern import pattern_text
from config.reading.kinds import stated_leaves
from model.mamba import MambaConfig

# ---- Granite hybrid ----------------------------------------------------------------------------------------

def read_mamba_head(keys: Tree) -> Tree:
    """Read the head size. All heads together are mamba_expand times the width."""
    inner = plain_number(keys, "mamba_expand") * plain_number(keys, "hidden_size")
    heads, dim = plain_number(keys, "mamba_n_heads"), keys.get("mamba_d_head")
    dim = inner // heads if dim in ("auto", None) and heads else dim
    if not is_number(dim) or dim * heads != inner:
        raise FamilyError(
            f"mamba_d_head = {dim!r}, of {heads} heads, is not mamba_expand x hidden_size = {inner}")
    return {"mixer.dim": int(dim)}


def write_mamba_head(layer: ModelConfig) -> Tree:
    return {
        "mamba_d_head": layer.mixer.dim,
        "mamba_expand": layer.mixer.heads * layer.mixer.dim // layer.hidden,
    }


def mamba_head_obstacles(layer: ModelConfig) -> list[str]:
    return ["mixer.dim"] if layer.mixer.heads * layer.mixer.dim % layer.hidden else []


def read_step_limits(keys: Tree) -> Tree:
    """Read the minimum step. Steps must have no maximum."""
    limits = keys.get("time_step_limit") or [0.0, math.inf]
    is_pair = isinstance(limits, list) and len(limits) == 2 and is_number(limits[0]) and limits[0] >= 0
    if not is_pair or limits[1] != math.inf:
        raise FamilyError(f"time_step_limit = {limits!r} is not supported, only a minimum step and Infinity")
    return {"mixer.dt_min": float(limits[0])}


def write_step_limits(layer: ModelConfig) -> Tree:
    least = layer.mixer.dt_min
    return {"time_step_limit": [least, {"__float__": "Infinity"}]} if least else {}


def linear_everywhere(keys: Tree) -> list[bool]:
    return [True] * int(plain_number(keys, "num_hidden_layers"))


def read_granite_positions(keys: Tree) -> Tree:
    kind = keys.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise FamilyError(f"position_embedding_type = {kind!r} is not supported, only rope and null")
    rotary = ROPE.read(keys)
    return rotary if kind == "rope" else {"mixer.rope": None}


def write_granite_positions(model: ModelConfig) -> Tree:
    if model.mixer.rope is None:
        return {"position_embedding_type": None}
    return {**ROPE.write(model), "position_embedding_type": "rope"}


def read_granite_mlp(keys: Tree) -> Tree:
    """Read the MLP that every token uses. With experts, it becomes the shared experts."""
    shared, expert = plain_number(keys, "shared_intermediate_size"), plain_number(keys, "intermediate_size")
    experts = number(keys, "num_local_experts", nullable=True)
    chosen = number(keys, "num_experts_per_tok", nullable=True)
    if not experts:
        return {"mlp.width": shared}
    beside = EXPERTS_BESIDE.read(keys)
    if not beside["shared_experts"]:
        raise FamilyError("shared_intermediate_size = 0 is not supported beside experts")
    return {
        "mlp.width": expert,
        "experts": experts,
        "top_k": chosen,
        "moe_ffn": expert,
        "router": "softmax",
        "router_renorm": True,
        **beside,
    }


def write_granite_mlp(model: ModelConfig) -> Tree:
    if model.experts is None:
        width = model.mlp.width
        return {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "intermediate_size": width,
            "shared_intermediate_size": width,
        }
    return {
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "intermediate_size": model.moe_ffn,
        **EXPERTS_BESIDE.write(model),
    }


def granite_mlp_obstacles(model: ModelConfig) -> list[str]:
    if model.experts is None:
        return []
    found = [name for name, value in (("router", "softmax"), ("router_renorm", True))
             if getattr(model, name) != value]
    return found if model.shared_experts else [*found, "shared_experts"]


def granite_position_obstacles(model: ModelConfig) -> list[str]:
    rope = model.mixer.rope
    if rope is None:
        return []
    plain = {"mixer.rope.share": rope.share == 1, "mixer.rope.pairs": not rope.pairs}
    return [*(name for name, is_plain in plain.items() if not is_plain), *ROPE.obstacles(model)]


GRANITE_POSITIONS = FieldGroup(
    ("mixer.rope",), read_granite_positions, write_granite_positions, granite_position_obstacles
)
GRANITE_MLP = FieldGroup(
    ("mlp.width", "experts", "top_k", "moe_ffn", "shared_experts", "router", "router_renorm"),
    read_granite_mlp,
    write_granite_mlp,
    granite_mlp_obstacles,
)
GRANITE_MAMBA = (
    Fixed("mixer.kind", "mamba"),
    Field("mixer.heads", "mamba_n_heads", minimum=1),
    FieldGroup(("mixer.dim",), read_mamba_head, write_mamba_head, mamba_head_obstacles),
    Field("mixer.groups", "mamba_n_groups", minimum=1),
    Field("mixer.state", "mamba_d_state", minimum=1),
    Field("mixer.conv", "mamba_d_conv", minimum=1),
    FieldGroup(("mixer.dt_min",), read_step_limits, write_step_limits),
)
GRANITE_STATES = StateLayers(LINEAR, "mamba", rules=GRANITE_MAMBA, usual=linear_everywhere)


def write_granite_layers(model: ModelConfig) -> Tree:
    """Return the keys of all layers. Models without Mamba layers need consistent Mamba sizes too, for
    transformers."""
    unused = {"mamba_n_heads": 1, "mamba_d_head": model.hidden, "mamba_expand": 1}
    return unused | GRANITE_STATES.write(model)


GRANITE_LAYERS = FieldGroup(
    ("blocks", "pattern"), GRANITE_STATES.read, write_granite_layers, GRANITE_STATES.obstacles
)


# ---- Nemotron-H --------------------------------------------------------------------------------------------

MAMBA, ATTENTION, DENSE, SPARSE = "M", "*", "-", "E"  # letters of hybrid_override_pattern
LETTERS = {LINEAR: MAMBA, FULL: ATTENTION, "mlp": DENSE, "moe": SPARSE}
KINDS = {MAMBA: "mamba", ATTENTION: "attention", DENSE: "mlp", SPARSE: "mlp"}  # of blocks


@dataclass(frozen=True)
class SinglePartLayers:
    """Layers with only a mixer or only an MLP.

    `mamba` holds the rules of Mamba mixers, `experts` those of mixtures in models that have them.
    """
    mamba: tuple[Rule, ...]
    experts: tuple[Rule, ...]

    def read(self, keys: Tree) -> Tree:
        letters = self.read_letters(keys)
        if DENSE in letters and SPARSE in letters:
            raise FamilyError(
                "hybrid_override_pattern has layers of an MLP (-) beside layers of experts (E), which no "
                "kind of block tells apart here")
        kinds: Tree = {KINDS[ATTENTION]: {"mlp.kind": "none"}, KINDS[DENSE]: {"mixer.kind": "none"}}
        kinds[KINDS[MAMBA]] = {"mlp.kind": "none", **read_rules(self.mamba, keys)}
        names = [KINDS[letter] for letter in letters]
        return {
            "layers": len(letters),
            "blocks": {name: kinds[name] for name in dict.fromkeys(names)},
            "pattern": pattern_text(names),
            **(read_rules(self.experts, keys) if SPARSE in letters else {}),
        }

    def read_letters(self, keys: Tree) -> str:
        """Return the letter of each layer. Raises FamilyError."""
        types, letters = typed_list(str, keys, "layers_block_type"), keys.get("hybrid_override_pattern")
        layers = number(keys, "num_hidden_layers", nullable=True)
        if types:
            letters = "".join(LETTERS.get(EARLIER_TYPES.get(name, name), "?") for name in types)
        if not isinstance(letters, str) or not letters or set(letters) - set(LETTERS.values()):
            said = types or letters
            raise FamilyError(f"layers_block_type = {said!r} is not a list of {', '.join(LETTERS)}")
        if layers not in (None, len(letters)):
            raise FamilyError(
                f"layers_block_type names {len(letters)} layers, num_hidden_layers is {layers}")
        return letters

    def write(self, model: ModelConfig) -> Tree:
        layers = layers_of(model)
        names = {letter: name for name, letter in LETTERS.items()}
        letters = [self.letter(model, layer, index) for index, layer in enumerate(layers)]
        keys: Tree = {"layers_block_type": [names[letter] for letter in letters]}
        first = next((layer for layer in layers if isinstance(layer.mixer, MambaConfig)), None)
        if first is not None:
            keys |= write_rules(self.mamba, first)
        return keys | (write_rules(self.experts, model) if model.experts else {})

    def letter(self, model: ModelConfig, layer: ModelConfig, index: int) -> str:
        if isinstance(layer.mixer, NoPart):
            return SPARSE if model.has_experts(index) else DENSE
        return ATTENTION if layer.mixer.has_softmax else MAMBA

    def obstacles(self, model: ModelConfig) -> list[str]:
        """Return fields that these layers cannot express. Attention and MLPs must match the model's, and all
        Mamba layers must be alike."""
        layers = layers_of(model)
        mambas = [layer for layer in layers if isinstance(layer.mixer, MambaConfig)]
        covered = {name for rule in self.mamba for name in rule.fields}
        for index, layer in enumerate(layers):
            is_mlp = isinstance(layer.mixer, NoPart)
            if is_mlp == isinstance(layer.mlp, NoPart) or layer.norm != model.norm:
                return ["blocks", "pattern"]
            if is_mlp:
                is_lost = layer.mlp != model.mlp or (model.experts and not model.has_experts(index))
            elif layer.mixer.has_softmax:
                is_lost = layer.mixer != model.mixer
            else:
                is_lost = layer not in mambas[:1] or not set(stated_leaves(layer.mixer, "mixer.")) <= covered
                is_lost |= any(rule.obstacles(layer) for rule in self.mamba)
            if is_lost:
                return ["blocks", "pattern"]
        experts = self.experts if model.experts else ()
        return [name for rule in experts for name in rule.obstacles(model)]

    def group(self) -> FieldGroup:
        fields = ("layers", "blocks", "pattern", *(name for rule in self.experts for name in rule.fields))
        return FieldGroup(fields, self.read, self.write, self.obstacles)


def read_shared_expert(keys: Tree) -> Tree:
    """Read the width of the shared expert, regardless of n_shared_experts."""
    shared = plain_number(keys, "moe_shared_expert_intermediate_size")
    expert = plain_number(keys, "moe_intermediate_size")
    if not expert or not shared or shared % expert:
        raise FamilyError(
            f"moe_shared_expert_intermediate_size = {shared} is not a multiple of moe_intermediate_size = "
            f"{expert}")
    return {"shared_experts": shared // expert}


NEMOTRON_MAMBA = (
    Fixed("mixer.kind", "mamba"),
    Field("mixer.heads", "mamba_num_heads", minimum=1),
    Field("mixer.dim", "mamba_head_dim", minimum=1),
    Field("mixer.groups", "n_groups", minimum=1),
    Field("mixer.state", "ssm_state_size", minimum=1),
    Field("mixer.conv", "conv_kernel", minimum=1),
    Field("mixer.dt_min", "time_step_min", minimum=0),
)
NEMOTRON_SHARED = FieldGroup(
    ("shared_experts",),
    read_shared_expert,
    lambda model: {
        "moe_shared_expert_intermediate_size": model.shared_experts * model.moe_ffn,
        "n_shared_experts": 1,
    },
    lambda model: [] if model.shared_experts else ["shared_experts"],
)


def nemotron_layers(experts: tuple[Rule, ...]) -> FieldGroup:
    """Return the rules of the layers. `experts` has the rules of a sigmoid-routed mixture, except shared
    experts."""
    others = (rule for rule in experts if "shared_experts" not in rule.fields)
    return SinglePartLayers(NEMOTRON_MAMBA, (*others, NEMOTRON_SHARED)).group()
