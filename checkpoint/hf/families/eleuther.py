"""EleutherAI: GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373)."""
from checkpoint.hf.families.family import Arrangement, Family
from checkpoint.hf.families.names import in_layer, with_leaf
from checkpoint.hf.families.rules import LAYERS_AND_WIDTH, NO_QK_NORM, REST_OF_SIZES, without
from checkpoint.hf.rules import (
    ATTENTION_BIAS,
    GPT2_HEADS,
    NO_WINDOW,
    FamilyError,
    Field,
    FieldGroup,
    Fixed,
    Idle,
    Only,
    share_of_rope,
    with_keys,
)
from config import ModelConfig, Tree

ROPE_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}  # {usual: theirs}
SHARE = share_of_rope(0.25)
RESIDUALS = {True: "parallel_norms", False: "sequential"}  # {use_parallel_residual: model.residual}


def read_neox_rope(keys: Tree) -> Tree:
    """Read RoPE under the family's names of base and share, or in rope_parameters."""
    return SHARE.read(with_keys(keys, {usual: keys.get(theirs) for usual, theirs in ROPE_NAMES.items()}))


def write_neox_rope(model: ModelConfig) -> Tree:
    return {ROPE_NAMES.get(key, key): value for key, value in SHARE.write(model).items()}


def read_residual(keys: Tree) -> Tree:
    is_parallel = keys.get("use_parallel_residual")
    if not isinstance(is_parallel, bool):
        raise FamilyError(f"use_parallel_residual = {is_parallel!r} is neither true nor false")
    return {"residual": RESIDUALS[is_parallel]}


NEOX_ROPE = FieldGroup(SHARE.fields, read_neox_rope, write_neox_rope, SHARE.obstacles)
NEOX_RESIDUAL = FieldGroup(
    ("residual",),
    read_residual,
    lambda model: {"use_parallel_residual": model.residual != "sequential"},
    lambda model: ["residual"] if model.residual == "parallel" else [],
)
NEOX_DROPOUT = FieldGroup((), write=lambda model: {"attention_dropout": 0.0, "hidden_dropout": model.dropout})

NEOX_OUTER = {"embed": "gpt_neox.embed_in", "head": "embed_out"}
NEOX_BIASED = {
    "norm": "gpt_neox.final_layer_norm",
    **in_layer("gpt_neox.layers", {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attention.query_key_value"),
        "attn.o": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }),
}

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    rules=(
        *LAYERS_AND_WIDTH,
        GPT2_HEADS,
        *without(REST_OF_SIZES, "norm.eps"),
        Field("norm.eps", "layer_norm_eps", minimum=0),
        ATTENTION_BIAS,
        Fixed("mlp.bias", True),
        NO_QK_NORM,
        NO_WINDOW,
        NEOX_RESIDUAL,
        Fixed("norm.kind", "layernorm"),
        Fixed("mlp.activation", "gelu_erf"),
        Only("hidden_act", ("gelu",)),
        Fixed("positions", None),
        NEOX_ROPE,
        NEOX_DROPOUT,
        Only("quantization_config", (None,), written=False),
        Idle(("classifier_dropout",)),
    ),
    defaults={
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "attention_bias": True,
        "use_parallel_residual": True,
        "hidden_act": "gelu",
        "rotary_emb_base": 10000.0,
        "rotary_pct": 0.25,
    },
    tensors=with_leaf("weight", NEOX_OUTER | NEOX_BIASED) | with_leaf("bias", NEOX_BIASED),
    arrangements={  # rows of q, k and v for each head
        f"gpt_neox.layers.{{layer}}.attention.query_key_value.{leaf}":
            lambda model: Arrangement(groups=model.mixer.heads)
        for leaf in ("weight", "bias")
    },
    copies=lambda model: {"embed_out.weight": "embed.weight"} if model.tied else {},
    prefix="gpt_neox.",
)
