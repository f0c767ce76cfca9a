"""The table of the Hugging Face families: what distinguishes the models of one model_type from all others.

Import (config.json, names of tensors), export and the tokenizer's files read this table, and nothing else
knows a model_type. To add a family, add a record to FAMILIES. Its rules are in the order in which config.json
is written; a later rule of a field or key replaces an earlier one.

Export looks at every field of ModelConfig and at every tensor. A value that has no form in the family is
refused, so a new key of the model is refused until a rule covers it (its default must be the model without
it), and so is a tensor that Family.tensors does not name.
"""
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from checkpoint.hf_layer_types import (
    AFMOE_LAYERS,
    COHERE2_LAYERS,
    EXAONE4_LAYERS,
    GEMMA2_LAYERS,
    GEMMA3_LAYERS,
    GPT_OSS_LAYERS,
    GRANITE_SWA_LAYERS,
    LAGUNA_LAYERS,
    LLAMA4_LAYERS,
    LLAMA4_LAYER_DEFAULTS,
    MIMO_LAYERS,
    MIMO_SPELLINGS,
    OLMO3_LAYERS,
)
from checkpoint.hf_mamba_layers import GRANITE_LAYERS, GRANITE_MLP, GRANITE_POSITIONS, nemotron_layers
from checkpoint.hf_rules import (
    ALL_BIASES,
    APERTUS_SCALED_ROPE,
    ATTENTION_BIAS,
    ATTENTION_MULTIPLIER,
    CWM_ROPE,
    CWM_WINDOWS,
    DIVIDED_LOGITS,
    DOTS_NO_WINDOW,
    EQUAL_BIASES,
    ERNIE_LAYERS,
    EXPERTS_BESIDE,
    EXPERTS_OF_FFN,
    GATING,
    GPT2_DROPOUT,
    GPT2_HEADS,
    GPT2_WIDTH,
    GROWING_ROPE,
    HEADS_DIVIDE_HIDDEN,
    HEAD_DIM,
    HUNYUAN_ROPE,
    INIT_STD_BY_WIDTH,
    INIT_STD_UP_TO_1,
    LAYER_WINDOWS,
    MISTRAL4_GROWING_ROPE,
    MLA_HEADS,
    MLA_ROPE,
    MLP_LAYER_TYPES,
    MOE_LAYERS,
    MOE_TOPK,
    MTP_WITH_EXPERTS,
    MUP_ENABLED,
    NO_ATTENTION_DROPOUT,
    NO_HEAD_DIM,
    NO_PADDING,
    NO_ROPE_LAYERS,
    NO_WINDOW,
    PHI3_ROPE,
    PLAIN_WINDOW,
    QK_NORM_OF_HEADS,
    QUERY_SCALAR,
    QWEN_DENSE_LAYERS,
    QWEN_WINDOW,
    RESIDUAL_DROPOUT,
    ROOT_OF_WIDTH,
    ROPE,
    SEED_BIASES,
    SHARED_WIDTH,
    STATED_MTP,
    UNUSED_WIDTH,
    V2_GROUPS,
    Field,
    Fixed,
    Idle,
    NotedKeys,
    Only,
    Rule,
    UnlikeFamily,
    bias_of_qkv,
    deepseek_experts,
    one_of_null,
    read_rules,
    share_of_rope,
    spell_out,
    write_rules,
)
from checkpoint.hf_state_layers import (
    KIMI_DENSE_LAYERS,
    KIMI_LAYERS,
    LFM2_LAYERS,
    LFM2_WIDTH,
    OLMO_HYBRID_LAYERS,
    OLMO_HYBRID_ROPE,
    QWEN_LAYERS,
    SHARE_OF_ROPE,
    TEXT_ROPE,
)
from config import (
    TRAINING_ONLY_KEYS,
    ConfigError,
    MLPConfig,
    ModelConfig,
    Tree,
    expert_ffn_size,
    layer_model,
    modules_ahead,
    no_effect,
)
from config.tree import has_path, is_below, stated_leaves, value_at

# Fields that change training or speed, and not the function of the weights.
NOT_THE_MODEL = (*TRAINING_ONLY_KEYS, "mtp.weight", "preset", "mixer.kernel", "vocab_multiple", "dropout")
# Keys of any config.json that change no logits: what it was made by, tokens, what a call returns, dropout,
# losses of the training, and settings of generation, which older folders have here.
NO_LOGITS = frozenset(
    """architectures auto_map dtype torch_dtype torchscript transformers_version transformers.js_config
    tokenizer_class use_cache use_bfloat16 tf_legacy_loss unsloth_fixed unsloth_version attn_implementation
    pretraining_tp chunk_size_feed_forward pruned_heads gradient_checkpointing is_decoder is_encoder_decoder
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix
    model_type finetuning_task id2label label2id num_labels problem_type task_specific_params
    output_attentions output_hidden_states output_router_logits output_scores return_dict
    return_dict_in_generate
    attention_dropout hidden_dropout embd_pdrop attn_pdrop resid_pdrop initializer_range
    residual_dropout embedding_dropout output_dropout
    router_aux_loss_coef router_jitter_noise router_z_loss_coef aux_loss_alpha seq_aux ep_size
    do_sample early_stopping num_beams num_beam_groups num_return_sequences diversity_penalty length_penalty
    repetition_penalty temperature top_k top_p typical_p max_length min_length no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id exponential_decay_length_penalty remove_invalid_values""".split()
)
# Fields that hf.fold_mup multiplies into the weights.
FOLDED = ("mup",)
# The numbers in our names of tensors: layers.3.mlp.experts.7.up.weight
NUMBERED = re.compile(r"\b(layer|expert)s\.(\d+)\.")
LAYER = re.compile(r"\.layers\.(\d+)\.")  # in theirs


def head_if_tied(model: ModelConfig) -> dict[str, str]:
    """A tied head may be stored beside the embedding."""
    return {"lm_head.weight": "embed.weight"} if model.tied else {}


def head_and_mtp(model: ModelConfig) -> dict[str, str]:
    """Each module of multi-token prediction may have copies of the embedding and the head."""
    copies = head_if_tied(model)
    head = "embed.weight" if model.tied else "head.weight"
    for layer in range(model.layers, model.layers + modules_ahead(model)):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "embed.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = head
    return copies


def kind_before(model: ModelConfig, path: str) -> str:
    """The key that says why the model lacks a key: the kind of its part, or the part that is none."""
    part = path.rpartition(".")[0]
    if not has_path(model, part):
        return kind_before(model, part)
    return part if value_at(model, part) is None else f"{part}.kind"


@dataclass(frozen=True)
class Arrangement:
    """How a tensor of theirs holds ours, which are stacked along their rows.

    Rows come in groups. In each group the first of ours has its share of the rows, then the second.
    """
    groups: int = 1
    transpose: bool = False  # of the matrix that they make
    inner: bool = False  # with a dim of size 1 after the rows (torch.nn.Conv1d)
    outer: bool = False  # with a dim of size 1 before the rows
    leading: int | None = None  # stacks along a first dim in front


PLAIN_ARRANGEMENT = Arrangement()
ArrangementOf = Callable[[ModelConfig], Arrangement]  # of the model as the tensor's layer has it


def changes_nothing(key: str) -> bool:
    """Whether a key of any config.json changes no logits. Those that begin with _ are of transformers
    itself."""
    return key in NO_LOGITS or key.startswith("_")


@dataclass(frozen=True)
class Family:
    """How the models of one model_type are written."""
    model_type: str
    architecture: str  # the model class of transformers
    rules: tuple[Rule, ...]
    defaults: dict[str, object]  # of transformers' config class: a config.json may leave out what equals them
    tensors: dict[str, str]  # {our name: their name}; {layer} and {expert} stand for numbers
    aliases: dict[str, str] = field(default_factory=dict)  # {second name of a key: key} (attribute_map)
    prefix: str = "model."  # of their names; base models without a head leave it out
    copies: Callable[[ModelConfig], dict[str, str]] = head_if_tied  # {their name: our name} of a second copy
    # {their name in `tensors`: how it holds ours}, where it is more than ours one after the other
    arrangements: dict[str, ArrangementOf] = field(default_factory=dict)
    # {their name, with {layer}: its value} of numbers that each layer has, and that do not learn
    constants: dict[str, float] = field(default_factory=dict)
    tokenizer_keys: dict[str, object] = field(default_factory=dict)  # that tokenizer_config.json needs
    norms_below_one: bool = False  # weights of norms are stored as w - 1
    # {kind of a layer's mixer: {our name: their name}}: what such a layer has otherwise than `tensors`
    of_mixers: dict[str, dict[str, str]] = field(default_factory=dict)
    # {kind of a layer's mixer: {part of a name that a folder may have: what is written for it}}
    spellings: dict[str, dict[str, str]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # with these their names of tensors begin that transformers does not load
    config: str = "config.json"  # what says the model, in errors
    code: str = ""  # the model_type whose code of transformers is run, where it has none for this one

    def read(self, hf_config: Tree) -> Tree:
        """{field of ModelConfig: value}, for config.build_tree. Raises UnlikeFamily."""
        keys = NotedKeys({**self.defaults, **self.with_first_names(hf_config)})
        values = read_rules(self.rules, keys)
        for key, value in hf_config.items():
            if value is not None and key not in keys.asked | set(self.aliases) and not changes_nothing(key):
                raise UnlikeFamily(
                    f"{key} = {value!r}: nothing here reads this key of a {self.model_type}, so the model "
                    "may be another one; take the key out of config.json if it changes nothing"
                )
        return values

    def with_first_names(self, hf_config: Tree) -> Tree:
        """The keys of hf_config, and those that it has under a second name (aliases).

        Raises UnlikeFamily if a key has two values.
        """
        keys = dict(hf_config)
        for alias, key in self.aliases.items():
            if alias not in hf_config:
                continue
            value = hf_config[alias]
            if keys.setdefault(key, value) != value:
                raise UnlikeFamily(f"{key} = {keys[key]!r} and {alias} = {value!r} are one key, and differ")
        return keys

    def write(self, model: ModelConfig) -> Tree:
        """The keys of config.json that describe a model without obstacles."""
        return write_rules(self.rules, spell_out(model))

    def obstacles(self, model: ModelConfig) -> list[str]:
        """The fields of the model, out of all that it has, whose values have no form in this family."""
        explicit = spell_out(model)
        kinds = [rule for rule in self.rules if "mixer.kind" in rule.fields]
        found = [name for rule in kinds for name in rule.obstacles(explicit)]
        others = ["mixer"] if found else []  # parts of another kind, which have other fields
        if not isinstance(model.mlp, MLPConfig):
            others.append("mlp")
            found.append("mlp.kind")
        covered: set[str] = set()
        for rule in self.rules:
            reads_other = not rule.fields or any(is_below(name, others) for name in rule.fields)
            if others and reads_other:
                continue
            found += rule.obstacles(explicit)
            covered.update(rule.fields)
        found += [path for path in stated_leaves(model) if not is_below(path, covered)]

        ignored = {*NOT_THE_MODEL, *FOLDED, *no_effect(model)}
        named = dict.fromkeys(name if has_path(model, name) else kind_before(model, name) for name in found)
        return [name for name in named if not is_below(name, ignored)]

    def hf_name(self, key: str, model: ModelConfig) -> str:
        """Their name of our tensor `key`. Raises ConfigError if the family has no such tensor.

        layers.3.attn.q.weight -> model.layers.3.self_attn.q_proj.weight
        """
        return self.template(key, model).format(**numbers_in(key))

    def template(self, key: str, model: ModelConfig) -> str:
        """Their name of our tensor `key`, with {layer} and {expert}. Raises ConfigError as hf_name."""
        name = self.names(key, model).get(without_numbers(key))
        if name is None:
            raise ConfigError(f"{key}: this tensor has no form in {self.model_type} (Family.tensors)")
        return name

    def names(self, key: str, model: ModelConfig) -> dict[str, str]:
        """{our name: their name} of a layer like that of our tensor `key`."""
        layer = numbers_in(key).get("layer")
        if not self.of_mixers or layer is None:
            return self.tensors
        own = self.of_mixers.get(layer_model(model, int(layer)).mixer.kind, {})
        return own | {ours: theirs for ours, theirs in self.tensors.items() if ours not in own}

    def usual_name(self, name: str, model: ModelConfig) -> str:
        """Their name of a tensor as it is written; a folder may have it in another spelling."""
        layer = LAYER.search(name)
        if not self.spellings or layer is None:
            return name
        kind = layer_model(model, int(layer[1])).mixer.kind
        spellings = self.spellings.get(kind, {})
        other = next((part for part in spellings if part in name), None)
        return name if other is None else name.replace(other, spellings[other])

    def arrangement(self, key: str, model: ModelConfig) -> Arrangement:
        """How theirs holds our tensor `key`."""
        arrangement_of = self.arrangements.get(self.template(key, model))
        if arrangement_of is None:
            return PLAIN_ARRANGEMENT
        return arrangement_of(layer_model(model, int(numbers_in(key).get("layer", 0))))

    def constants_of(self, model: ModelConfig) -> dict[str, float]:
        """{their name: its value} of numbers in the folder that are the same in every model."""
        layers = range(model.layers)
        return {name.format(layer=layer): value for name, value in self.constants.items() for layer in layers}

    def place_in_stack(self, key: str, model: ModelConfig) -> tuple[int, int]:
        """The place of ours in a tensor of theirs: by expert, then in the order of `names`."""
        names = list(self.names(key, model))
        return int(numbers_in(key).get("expert", 0)), names.index(without_numbers(key))


def numbers_in(key: str) -> dict[str, str]:
    """{"layer": "3"}: the numbers in our name of a tensor."""
    return dict(NUMBERED.findall(key))


def without_numbers(key: str) -> str:
    """layers.3.attn.q.weight -> layers.{layer}.attn.q.weight"""
    return NUMBERED.sub(r"\1s.{\1}.", key)


LACKING = {  # model_type of other models: the part that they need
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), "embeddings for each layer"),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa", "mistral_large4", "mistral_large4_text"),
        "sparse attention by an indexer",
    ),
    **dict.fromkeys(("glm5_next", "glm5_next_text", "hy_v4"), "hyper-connections or an indexer"),
    "deepseek_v4": "compressed attention or hyper-connections",
    "minimax": "lightning attention",
    "nanochat": "norms without a weight",
    **dict.fromkeys(("step3p5", "step3p7"), "a SwiGLU that is clamped after its activation"),
}


# ---- models of more than text ------------------------------------------------------------------------------

WRAPPERS = {  # model_type: that of its text part, where text_config does not say it
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
TEXT_PARTS = (("model.language_model.", "model."), ("language_model.", ""))  # (start of its names, ours)
BESIDE_TEXT = (  # with these the names of the others begin
    "model.visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "model.vision_tower.",
    "model.vision_model.", "model.multi_modal_projector.",
)


def text_names(names: Collection[str]) -> dict[str, str]:
    """{name in a model of text alone: name} of the tensors of a folder; of all of them where it is one."""
    if not any(name.startswith(start) for name in names for start, _ in TEXT_PARTS):
        return {name: name for name in names}
    found: dict[str, str] = {}
    for name in names:
        if name.startswith(BESIDE_TEXT):
            continue
        start, short = next((pair for pair in TEXT_PARTS if name.startswith(pair[0])), ("", ""))
        found[short + name.removeprefix(start)] = name
    return found


# ---- names of tensors --------------------------------------------------------------------------------------

def with_leaf(leaf: str, names: dict[str, str]) -> dict[str, str]:
    return {f"{ours}.{leaf}": f"{theirs}.{leaf}" for ours, theirs in names.items()}


def in_layer(prefix: str, names: dict[str, str]) -> dict[str, str]:
    """The names of a layer. prefix: what stands before the layer's number in theirs."""
    return {f"layers.{{layer}}.{ours}": f"{prefix}.{{layer}}.{theirs}" for ours, theirs in names.items()}


def convolutions(*names: str) -> dict[str, ArrangementOf]:
    """The arrangement of weights [channels, 1, width] with these names in a layer."""
    full = [f"model.layers.{{layer}}.{name}.weight" for name in names]
    return dict.fromkeys(full, lambda model: Arrangement(inner=True))


OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
NORMS = in_layer("model.layers", {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
QKV = in_layer("model.layers", {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
})
OUTPUT = in_layer("model.layers", {"attn.o": "self_attn.o_proj"})
QK_NORM = in_layer("model.layers", {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"})
MLP = in_layer("model.layers", {
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
})
MLA = in_layer("model.layers", {
    "attn.q": "self_attn.q_proj",
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj",
})
MIXTRAL_EXPERTS = in_layer("model.layers", {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.{expert}.gate": "block_sparse_moe.experts.{expert}.w1",
    "mlp.experts.{expert}.up": "block_sparse_moe.experts.{expert}.w3",
    "mlp.experts.{expert}.down": "block_sparse_moe.experts.{expert}.w2",
})
EXPERTS = in_layer("model.layers", {
    "mlp.router": "mlp.gate",
    "mlp.experts.{expert}.gate": "mlp.experts.{expert}.gate_proj",
    "mlp.experts.{expert}.up": "mlp.experts.{expert}.up_proj",
    "mlp.experts.{expert}.down": "mlp.experts.{expert}.down_proj",
})
ONE_ROUTER = in_layer("model.layers", {"mlp.router": "mlp.gate"})
ONE_SHARED_EXPERT = in_layer("model.layers", {
    "mlp.shared_gate": "mlp.shared_expert_gate",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
})
SHARED_EXPERTS = in_layer("model.layers", {
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
})
ROUTER_BIAS = in_layer("model.layers", {"mlp.router.bias": "mlp.gate.e_score_correction_bias"})
MTP = in_layer("model.layers", {
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "head_norm": "shared_head.norm",
})

NORMS_AFTER = in_layer("model.layers", {
    "attn_norm_after": "post_attention_layernorm",
    "mlp_norm_after": "post_feedforward_layernorm",
})
NORMS_AROUND = NORMS_AFTER | in_layer("model.layers", {
    "attn_norm": "input_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
})
ONE_NORM = in_layer("model.layers", {"attn_norm": "input_layernorm"})  # of attention and MLP side by side
GLM4_NORMS = NORMS | in_layer("model.layers", {
    "attn_norm_after": "post_self_attn_layernorm",
    "mlp_norm_after": "post_mlp_layernorm",
})
APERTUS_NORMS = in_layer(
    "model.layers", {"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
)
XIELU = in_layer("model.layers", {"mlp.alpha_p": "mlp.act_fn.alpha_p", "mlp.alpha_n": "mlp.act_fn.alpha_n"})
UP_AND_DOWN = in_layer("model.layers", {"mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"})

GPT2_OUTER = {"embed": "transformer.wte", "positions": "transformer.wpe", "head": "lm_head"}
GPT2_MATRICES = in_layer("transformer.h", {
    "attn.q": "attn.c_attn",  # q, k and v are stacked
    "attn.k": "attn.c_attn",
    "attn.v": "attn.c_attn",
    "attn.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
})
GPT2_BIASED = {
    "norm": "transformer.ln_f",
    **in_layer("transformer.h", {"attn_norm": "ln_1", "mlp_norm": "ln_2"}),
    **GPT2_MATRICES,
}

# Their names of tensors that are stacked: q, k and v, or gate and up.
PHI_QKV = in_layer("model.layers", dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attn.qkv_proj"))
PHI_MLP = in_layer("model.layers", {
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
    "mlp.down": "mlp.down_proj",
})
SARVAM_QKV = in_layer(
    "model.layers", dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attention.query_key_value")
)
SARVAM = {
    **OUTER,
    "embed": "model.word_embeddings",
    **in_layer("model.layers", {
        "attn.o": "attention.dense",
        "attn.q_norm": "attention.query_layernorm",
        "attn.k_norm": "attention.key_layernorm",
    }),
}
SARVAM_ROUTER_BIAS = in_layer("model.layers", {"mlp.router.bias": "mlp.gate.expert_bias"})
HUNYUAN_QK_NORM = in_layer("model.layers", {
    "attn.q_norm": "self_attn.query_layernorm",
    "attn.k_norm": "self_attn.key_layernorm",
})
HUNYUAN_MOE = in_layer("model.layers", {
    "mlp.router": "mlp.gate.wg",
    "mlp.experts.{expert}.gate": "mlp.experts.{expert}.gate_proj",
    "mlp.experts.{expert}.up": "mlp.experts.{expert}.up_proj",
    "mlp.experts.{expert}.down": "mlp.experts.{expert}.down_proj",
    "mlp.shared.gate": "mlp.shared_mlp.gate_proj",
    "mlp.shared.up": "mlp.shared_mlp.up_proj",
    "mlp.shared.down": "mlp.shared_mlp.down_proj",
})
ERNIE_ROUTER_BIAS = in_layer(
    "model.layers", {"mlp.router.bias": "mlp.moe_statics.e_score_correction_bias"}
)
EXAONE_ROUTER_BIAS = in_layer("model.layers", {"mlp.router.bias": "mlp.e_score_correction_bias"})
AFMOE_NORMS = in_layer("model.layers", {
    "attn_norm": "input_layernorm",
    "attn_norm_after": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_norm_after": "post_mlp_layernorm",
    "attn.gate": "self_attn.gate_proj",
})
AFMOE_EXPERTS = EXPERTS | in_layer("model.layers", {"mlp.router": "mlp.router.gate"})
GRANITE_STACKS = in_layer("model.layers", {  # the experts of a layer are stacked
    "mlp.experts.{expert}.gate": "block_sparse_moe.input_linear",
    "mlp.experts.{expert}.up": "block_sparse_moe.input_linear",
    "mlp.experts.{expert}.down": "block_sparse_moe.output_linear",
})
STACKED_EXPERTS = in_layer("model.layers", {  # the experts of a layer are stacked
    "mlp.experts.{expert}.gate.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.{expert}.up.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.{expert}.down.weight": "mlp.experts.down_proj",
})
GRANITE_EXPERTS = GRANITE_STACKS | in_layer("model.layers", {"mlp.router": "block_sparse_moe.router.layer"})
GPT_OSS_STACKS = {  # of each expert gate and up in turn, row by row
    f"layers.{{layer}}.mlp.experts.{{expert}}.{ours}.{leaf}": f"model.layers.{{layer}}.mlp.experts.{theirs}"
    for leaf, end in (("weight", ""), ("bias", "_bias"))
    for ours, theirs in (
        ("gate", f"gate_up_proj{end}"), ("up", f"gate_up_proj{end}"), ("down", f"down_proj{end}"))
}
GPT_OSS_OTHERS = in_layer("model.layers", {
    "attn.sinks": "self_attn.sinks",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.logit_bias": "mlp.router.bias",
})
LLAMA4_STACKS = {
    f"layers.{{layer}}.mlp.experts.{{expert}}.{ours}.weight":
        f"model.layers.{{layer}}.feed_forward.experts.{theirs}"
    for ours, theirs in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj"))
}
LLAMA4_MLP = in_layer("model.layers", {
    "mlp.gate": "feed_forward.gate_proj",
    "mlp.up": "feed_forward.up_proj",
    "mlp.down": "feed_forward.down_proj",
    "mlp.router": "feed_forward.router",
    "mlp.shared.gate": "feed_forward.shared_expert.gate_proj",
    "mlp.shared.up": "feed_forward.shared_expert.up_proj",
    "mlp.shared.down": "feed_forward.shared_expert.down_proj",
})
LAGUNA = in_layer("model.layers", {
    "attn.gate": "self_attn.g_proj",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
})
GRANITE_SWA_EXPERTS = {
    **in_layer("model.layers", {
        **dict.fromkeys(("mlp.shared.gate.weight", "mlp.shared.up.weight"), "shared_mlp.input_linear.weight"),
        "mlp.shared.down.weight": "shared_mlp.output_linear.weight",
        "mlp.router.weight": "block_sparse_moe.router.weight",
    }),
    **{ours: theirs.replace(".mlp.", ".block_sparse_moe.") for ours, theirs in STACKED_EXPERTS.items()},
}
GRANITE_SINKS = in_layer("model.layers", {"attn.sinks": "self_attn.sinks"})
SINKS = in_layer("model.layers", {"attn.sinks": "self_attn.attention_sink_bias"})
LAGUNA_ROUTER_BIAS = in_layer(
    "model.layers", {"mlp.router.bias": "mlp.experts.e_score_correction_bias"}
)
HUNYUAN_EXPERTS = in_layer("model.layers", {
    "mlp.router": "mlp.router.gate",
    "mlp.shared.gate": "mlp.shared_mlp.gate_proj",
    "mlp.shared.up": "mlp.shared_mlp.up_proj",
    "mlp.shared.down": "mlp.shared_mlp.down_proj",
})
MINIMAX_ROUTER_BIAS = in_layer(
    "model.layers", {"mlp.router.bias": "block_sparse_moe.e_score_correction_bias"}
)
HUNYUAN_ROUTER_BIAS = in_layer("model.layers", {"mlp.router.bias": "mlp.expert_bias"})
LFM2_NAMES = {
    **OUTER,
    "norm": "model.embedding_norm",
    **QKV,
    **in_layer("model.layers", {
        "attn_norm": "operator_norm",
        "mlp_norm": "ffn_norm",
        "attn.o": "self_attn.out_proj",
        "attn.q_norm": "self_attn.q_layernorm",
        "attn.k_norm": "self_attn.k_layernorm",
    }),
}
LFM2_CONV = in_layer("model.layers", {
    **dict.fromkeys(("attn.B", "attn.C", "attn.x"), "conv.in_proj"),
    "attn.conv": "conv.conv",
    "attn.o": "conv.out_proj",
})
LFM2_MLP = in_layer("model.layers", {
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
})
LFM2_EXPERTS = in_layer("model.layers", {
    "mlp.router": "feed_forward.gate",
    "mlp.experts.{expert}.gate": "feed_forward.experts.{expert}.w1",
    "mlp.experts.{expert}.up": "feed_forward.experts.{expert}.w3",
    "mlp.experts.{expert}.down": "feed_forward.experts.{expert}.w2",
})
LFM2_ROUTER_BIAS = in_layer("model.layers", {"mlp.router.bias": "feed_forward.expert_bias"})
QWEN_LINEAR = in_layer("model.layers", {
    **dict.fromkeys(("attn.q_conv", "attn.k_conv", "attn.v_conv"), "linear_attn.conv1d"),
    "attn.norm": "linear_attn.norm",
    "attn.o": "linear_attn.out_proj",
})
QWEN_RATES = in_layer("model.layers", {
    "attn.A_log": "linear_attn.A_log",
    "attn.dt_bias": "linear_attn.dt_bias",
})
QWEN_NEXT_LINEAR = QWEN_LINEAR | in_layer("model.layers", {
    **dict.fromkeys(("attn.q", "attn.k", "attn.v", "attn.z"), "linear_attn.in_proj_qkvz"),
    **dict.fromkeys(("attn.b", "attn.a"), "linear_attn.in_proj_ba"),
})
QWEN35_LINEAR = QWEN_LINEAR | in_layer("model.layers", {
    **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "linear_attn.in_proj_qkv"),
    "attn.z": "linear_attn.in_proj_z",
    "attn.b": "linear_attn.in_proj_b",
    "attn.a": "linear_attn.in_proj_a",
})
KIMI_LINEAR = in_layer("model.layers", {
    **{f"attn.{name}": f"self_attn.{name}_proj" for name in (*"qkvbo", "f_a", "f_b", "g_a", "g_b")},
    **{f"attn.{name}_conv": f"self_attn.{name}_conv1d" for name in "qkv"},
    "attn.norm": "self_attn.o_norm",
})
KIMI_RATES = in_layer("model.layers", {
    "attn.A_log": "self_attn.A_log",
    "attn.dt_bias": "self_attn.dt_bias",
})
KIMI_EXPERTS = MIXTRAL_EXPERTS | in_layer("model.layers", {
    f"mlp.shared.{name}": f"block_sparse_moe.shared_experts.{name}_proj" for name in ("gate", "up", "down")
})
KIMI_ROUTER_BIAS = in_layer(
    "model.layers", {"mlp.router.bias": "block_sparse_moe.gate.e_score_correction_bias"}
)
KIMI_SPELLINGS = {  # transformers saves a dense MLP as if it were one of experts
    f".block_sparse_moe.{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")
}
OLMO_LINEAR = in_layer("model.layers", {
    **{f"attn.{ours}": f"linear_attn.{theirs}_proj" for ours, theirs in zip("qkvabzo", "qkvabgo")},
    **{f"attn.{name}_conv": f"linear_attn.{name}_conv1d" for name in "qkv"},
    "attn.norm": "linear_attn.o_norm",
    "attn_norm": "attention_layer_norm",
    "mlp_norm": "feedforward_layer_norm",
})
QWEN_HYBRID = OUTER | NORMS | QKV | OUTPUT | QK_NORM | MLP | in_layer(
    "model.layers", {"attn.gate": "self_attn.q_proj"}  # after the queries of each head
)
def mamba_names(prefix: str, module: str, norm: str) -> dict[str, str]:
    """Their names of the tensors of a layer with Mamba-2, leaf included. module: of the mixer; norm: before
    it."""
    matrices = in_layer(prefix, {
        "attn_norm": norm,
        **dict.fromkeys((f"attn.{name}" for name in ("z", "x", "B", "C", "dt")), f"{module}.in_proj"),
        "attn.norm": f"{module}.norm",
        "attn.o": f"{module}.out_proj",
    })
    convolution = in_layer(prefix, dict.fromkeys(
        (f"attn.{name}_conv" for name in ("x", "B", "C")), f"{module}.conv1d"))
    rates = in_layer(prefix, {f"attn.{name}": f"{module}.{name}" for name in ("A_log", "dt_bias", "D")})
    return with_leaf("weight", matrices | convolution) | with_leaf("bias", convolution) | rates


GRANITE_SHARED = in_layer("model.layers", {  # of layers without experts their MLP
    **dict.fromkeys(("mlp.gate", "mlp.up", "mlp.shared.gate", "mlp.shared.up"), "shared_mlp.input_linear"),
    **dict.fromkeys(("mlp.down", "mlp.shared.down"), "shared_mlp.output_linear"),
})
NEMOTRON_H_TENSORS = with_leaf("weight", {
    "embed": "backbone.embeddings",
    "norm": "backbone.norm_f",
    "head": "lm_head",
    **in_layer("backbone.layers", {
        "attn_norm": "norm",
        "attn.q": "mixer.q_proj",
        "attn.k": "mixer.k_proj",
        "attn.v": "mixer.v_proj",
        "attn.o": "mixer.o_proj",
        "mlp_norm": "norm",
        "mlp.up": "mixer.up_proj",
        "mlp.down": "mixer.down_proj",
        "mlp.router": "mixer.gate",
        "mlp.experts.{expert}.up": "mixer.experts.{expert}.up_proj",
        "mlp.experts.{expert}.down": "mixer.experts.{expert}.down_proj",
        "mlp.shared.up": "mixer.shared_experts.up_proj",
        "mlp.shared.down": "mixer.shared_experts.down_proj",
    }),
}) | in_layer("backbone.layers", {"mlp.router.bias": "mixer.gate.e_score_correction_bias"})
STARCODER_MLP = in_layer("model.layers", {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})

GPT2_TENSORS = with_leaf("weight", GPT2_OUTER | GPT2_BIASED) | with_leaf("bias", GPT2_BIASED)
LLAMA_TENSORS = with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | MLP)
QWEN3_TENSORS = LLAMA_TENSORS | with_leaf("weight", QK_NORM)
DOTS_TENSORS = QWEN3_TENSORS | with_leaf("weight", EXPERTS | SHARED_EXPERTS) | ROUTER_BIAS
STARCODER_TENSORS = (
    with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | STARCODER_MLP)
    | with_leaf("bias", {"norm": OUTER["norm"]} | NORMS | QKV | OUTPUT | STARCODER_MLP)
)
DEEPSEEK_V2_TENSORS = with_leaf("weight", OUTER | NORMS | MLA | OUTPUT | MLP | EXPERTS | SHARED_EXPERTS)


def gpt_oss_stack(name: str) -> ArrangementOf:
    """The arrangement of a tensor of all experts: matrices are transposed."""
    is_matrix = not name.endswith("_bias")

    def arrangement(model: ModelConfig) -> Arrangement:
        pairs = expert_ffn_size(model) if "gate_up" in name else 1
        return Arrangement(groups=pairs, transpose=is_matrix, leading=model.experts)

    return arrangement


# ---- rules that families share -----------------------------------------------------------------------------

def without(rules: tuple[Rule, ...], name: str) -> tuple[Rule, ...]:
    """The rules but for that of one field."""
    return tuple(rule for rule in rules if name not in rule.fields)


LAYERS_AND_WIDTH = (
    Fixed("mixer.kind", "attention"),
    Field("layers", "num_hidden_layers"),
    Field("hidden", "hidden_size"),
    Field("mixer.heads", "num_attention_heads", minimum=1),
)
REST_OF_SIZES = (
    Field("mlp.width", "intermediate_size"),
    Field("vocab", "vocab_size"),
    Field("context", "max_position_embeddings"),
    Field("norm.eps", "rms_norm_eps", minimum=0),
    Field("init_std", "initializer_range"),
    Field("tied", "tie_word_embeddings"),
)
KV_HEADS = Field("mixer.kv_heads", "num_key_value_heads", nullable=True)
SIZES = (*LAYERS_AND_WIDTH, KV_HEADS, HEAD_DIM, *REST_OF_SIZES)

# What the decoders with rotary positions have in common.
ROTARY = (
    Fixed("positions", None),
    Only("partial_rotary_factor", (1.0,), written=False),
    Only("quantization_config", (None,), written=False),
)
DECODER = (
    Fixed("norm.kind", "rmsnorm"),
    Fixed("mlp.activation", "swiglu"),
    Only("hidden_act", ("silu", "swish")),
    *ROTARY,
)
NO_MLP_BIAS = Fixed("mlp.bias", False)


def without_rope_share(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules but for that all channels of a head are rotated."""
    return tuple(rule for rule in rules if getattr(rule, "key", "") != "partial_rotary_factor")


NO_BIAS = (Fixed("mixer.bias", None), NO_MLP_BIAS)
NO_QK_NORM = Fixed("mixer.qk_norm", None)
NO_ATTENTION_BIAS = Only("attention_bias", (False,))
NO_QWEN_WINDOW = (
    NO_WINDOW,
    Only("use_sliding_window", (False,)),
    Idle(("sliding_window", "max_window_layers")),
)

EXPERTS_PER_TOKEN = Field("top_k", "num_experts_per_tok")
QWEN_EXPERTS = (
    Field("experts", "num_experts"),
    EXPERTS_PER_TOKEN,
    Field("moe_ffn", "moe_intermediate_size"),
    Field("router_renorm", "norm_topk_prob"),
    Field("moe_every", "decoder_sparse_step"),
)
DEEPSEEK_SIZES = (
    Fixed("mixer.kind", "latent"),
    *without(LAYERS_AND_WIDTH, "mixer.kind"),
    *REST_OF_SIZES,
    Field("mixer.kv_rank", "kv_lora_rank"),
    Field("mixer.q_rank", "q_lora_rank", nullable=True),
    Field("mixer.nope_dim", "qk_nope_head_dim"),
    Field("mixer.rope_dim", "qk_rope_head_dim"),
    Field("mixer.v_dim", "v_head_dim"),
    Idle(("head_dim", "qk_head_dim")),  # transformers writes what follows from the others
)
DEEPSEEK_EXPERTS = (
    Field("experts", "n_routed_experts"),
    EXPERTS_PER_TOKEN,
    Field("moe_ffn", "moe_intermediate_size"),
    Field("shared_experts", "n_shared_experts"),
    Field("first_dense", "first_k_dense_replace"),
    Field("router_scale", "routed_scaling_factor"),
)
SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")  # of GPT-2's other heads
NO_EXPERTS = Idle((  # where a model has none; else other rules read them
    "n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor",
    "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
    "moe_layer_freq",
))
NO_NEMOTRON_EXPERTS = Idle((  # where a model has none; else other rules read them
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
    "moe_shared_expert_intermediate_size", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
))
ROUTER_GROUPS = (Field("router_groups", "n_group"), Field("router_group_top_k", "topk_group"))
SIGMOID_EXPERTS = (
    Field("experts", "n_routed_experts"),
    EXPERTS_PER_TOKEN,
    Field("moe_ffn", "moe_intermediate_size"),
    Field("shared_experts", "n_shared_experts"),
    Field("router_renorm", "norm_topk_prob"),
    *ROUTER_GROUPS,
    Field("router_scale", "routed_scaling_factor"),
    Fixed("router", "sigmoid"),
    Fixed("router_bias", True),
)

def without_key(defaults: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in defaults.items() if name != key}


ROPE_DEFAULTS: dict[str, object] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
QWEN_WINDOW_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
DEEPSEEK_DEFAULTS: dict[str, object] = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": None,
}


# Gemma: norms of w - 1, GeGLU, an embedding times the root of its width.
GELU_TANH = ("gelu_pytorch_tanh", "gelu")
GEMMA = (
    *SIZES,
    ROOT_OF_WIDTH,
    ATTENTION_BIAS,
    NO_MLP_BIAS,
    Fixed("norm.kind", "rmsnorm"),
    Fixed("mlp.activation", "geglu"),
    *ROTARY,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    Only("use_bidirectional_attention", (None, False), written=False),
    Idle(("hidden_act",)),  # published folders have both names, and hidden_activation counts
)
GEMMA_AROUND = (
    *GEMMA,
    HEADS_DIVIDE_HIDDEN,
    Fixed("norm.place", "around"),
    Only("hidden_activation", GELU_TANH[:1]),
    QUERY_SCALAR,
    Field("mixer.softcap", "attn_logit_softcapping", nullable=True),
    Field("logit_cap", "final_logit_softcapping", nullable=True),
)
GEMMA_DEFAULTS = {
    **ROPE_DEFAULTS,
    "head_dim": 256,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
OLMO2 = (
    *LAYERS_AND_WIDTH,
    KV_HEADS,
    NO_HEAD_DIM,
    *REST_OF_SIZES,
    ATTENTION_BIAS,
    NO_MLP_BIAS,
    Fixed("mixer.qk_norm", "whole"),
    Fixed("norm.place", "after"),
    *DECODER,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
)
OLMO2_TENSORS = (
    with_leaf("weight", OUTER | NORMS_AFTER | QKV | OUTPUT | QK_NORM | MLP) | with_leaf("bias", QKV | OUTPUT)
)
COHERE = (
    *LAYERS_AND_WIDTH,
    KV_HEADS,
    NO_HEAD_DIM,
    *without(REST_OF_SIZES, "norm.eps"),
    Field("norm.eps", "layer_norm_eps", minimum=0),
    Field("logit_scale", "logit_scale"),
    ATTENTION_BIAS,
    NO_MLP_BIAS,
    NO_QK_NORM,
    Fixed("norm.kind", "layernorm"),
    Fixed("norm.bias", False),
    Fixed("residual", "parallel"),
    Fixed("mlp.activation", "swiglu"),
    Only("hidden_act", ("silu", "swish")),
    *ROTARY,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    Idle(("rms_norm_eps",)),
)
COHERE_DEFAULTS = {
    **without_key(ROPE_DEFAULTS, "rms_norm_eps"),
    "rope_theta": 500000.0,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
COHERE_TENSORS = (
    with_leaf("weight", OUTER | ONE_NORM | QKV | OUTPUT | MLP)
    | with_leaf("bias", QKV | OUTPUT)
)
COHERE2_SPELLINGS = (  # published folders say again what the class computes
    Only("use_qk_norm", (False,), written=False),
    Only("use_gated_activation", (True,), written=False),
    Only("use_parallel_block", (True,), written=False),
    Only("rotary_pct", (1.0,), written=False),
    Only("position_embedding_type", ("rope_gptj",), written=False),
    Only("order_of_interleaved_layers", ("local_attn_first",), written=False),
    Idle(("head_dim", "cache_implementation", "use_embedding_sharing", "use_parallel_embedding")),
)
HUNYUAN_TOKENS = (
    "eod_token_id", "org_vocab_size", "sep_token_id", "text_start_id", "text_end_id", "mask_init_id",
    "im_start_id", "im_end_id", "im_newline_id", "pad_id", "bos_id", "eos_id", "eod_id",
)
HUNYUAN = (
    ATTENTION_BIAS,
    NO_MLP_BIAS,
    Fixed("mixer.qk_norm", "after_rope"),
    NO_WINDOW,
    *DECODER,
    HUNYUAN_ROPE,
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
    Idle(HUNYUAN_TOKENS),
    Only("use_qk_norm", (True,), written=False),
    Only("use_cla", (False,), written=False),
)
GRANITE = (
    *LAYERS_AND_WIDTH,
    KV_HEADS,
    NO_HEAD_DIM,
    *REST_OF_SIZES,
    ATTENTION_BIAS,
    NO_QK_NORM,
    NO_WINDOW,
    *DECODER,
    ROPE,
    ATTENTION_MULTIPLIER,
    DIVIDED_LOGITS,
    Field("embed_scale", "embedding_multiplier"),
    Field("residual_scale", "residual_multiplier"),
    NO_ATTENTION_DROPOUT,
)
GRANITE_HYBRID = tuple(  # what other rules read there
    rule for rule in GRANITE if not {"mixer.window", "mixer.rope.base", "mlp.width"} & {*rule.fields}
)
GRANITE_SWA = (
    *(rule for rule in GRANITE if rule not in (NO_WINDOW, ROPE)),
    Fixed("mixer.sinks", True),
    GRANITE_SWA_LAYERS,
)
GRANITE_DEFAULTS = {
    **ROPE_DEFAULTS,
    "attention_bias": False,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "max_position_embeddings": 2048,
}
LFM2 = (
    *LAYERS_AND_WIDTH,
    KV_HEADS,
    NO_HEAD_DIM,
    HEADS_DIVIDE_HIDDEN,
    *without(without(REST_OF_SIZES, "mlp.width"), "norm.eps"),
    Field("norm.eps", "norm_eps", minimum=0),
    *NO_BIAS,
    Fixed("mixer.qk_norm", "head"),
    Fixed("mixer.window", None),
    LFM2_LAYERS,
    *DECODER,
    ROPE,
    NO_PADDING,
    Only("conv_bias", (False,)),
    # Published folders say again what the class computes, or how the weights began.
    Only("block_use_swiglu", (True,), written=False),
    Only("use_pos_enc", (True,), written=False),
    Idle((
        "theta", "num_heads", "block_dim", "conv_dim", "conv_dim_out", "block_norm_eps",
        "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init",
    )),
)
LFM2_DEFAULTS = {
    **without_key(without_key(ROPE_DEFAULTS, "head_dim"), "rms_norm_eps"),
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "max_position_embeddings": 128000,
}
QWEN_STATE = (
    *SIZES,
    *NO_BIAS,
    NO_ATTENTION_BIAS,
    Fixed("mixer.qk_norm", "head"),
    Fixed("mixer.gate", "channel"),
    Fixed("mixer.window", None),
    QWEN_LAYERS,
    *without_rope_share(DECODER),
    NO_ATTENTION_DROPOUT,
    Only("use_sliding_window", (False,), written=False),
    Only("attn_output_gate", (True,), written=False),
    Idle(("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")),
)
NO_DENSE_LAYERS = Only("mlp_only_layers", ([], None), written=False)
QWEN_SHARED_EXPERT = (
    Field("experts", "num_experts"),
    EXPERTS_PER_TOKEN,
    Field("moe_ffn", "moe_intermediate_size"),
    SHARED_WIDTH,
    Fixed("shared_gate", True),
    Fixed("router", "softmax"),
)
QWEN_STATE_DEFAULTS = {
    **ROPE_DEFAULTS,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
}
QWEN_SHARED_EXPERT_DEFAULTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN_ARRANGEMENTS: dict[str, ArrangementOf] = {  # the rows of queries and gates alternate by heads
    "model.layers.{layer}.self_attn.q_proj.weight": lambda model: Arrangement(groups=model.mixer.heads),
    **convolutions("linear_attn.conv1d"),
}
GLM = (
    *SIZES,
    bias_of_qkv("attention_bias"),
    NO_MLP_BIAS,
    NO_QK_NORM,
    NO_WINDOW,
    *without_rope_share(DECODER),
    share_of_rope(0.5),
    Fixed("mixer.rope.pairs", True),
    NO_ATTENTION_DROPOUT,
    NO_PADDING,
)
GLM_DEFAULTS = {
    **ROPE_DEFAULTS,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "max_position_embeddings": 131072,
}


# ---- the table ---------------------------------------------------------------------------------------------

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    rules=(
        *DEEPSEEK_SIZES,
        deepseek_experts(*DEEPSEEK_EXPERTS),
        STATED_MTP,
        Field("mixer.rope.pairs", "rope_interleave"),
        deepseek_experts(
            *ROUTER_GROUPS,
            Field("router_renorm", "norm_topk_prob"),
            Fixed("router", "sigmoid"),
            Fixed("router_bias", True),
        ),
        NO_MLP_BIAS,
        NO_WINDOW,
        *DECODER,
        NO_ATTENTION_BIAS,
        Only("scoring_func", ("sigmoid",)),
        Only("topk_method", ("noaux_tc",)),
        Only("moe_layer_freq", (1,)),
        MLA_ROPE,
        NO_ATTENTION_DROPOUT,
        MLA_HEADS,
        MTP_WITH_EXPERTS,
        NO_EXPERTS,
    ),
    defaults={
        **DEEPSEEK_DEFAULTS,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "rope_interleave": True,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    tensors=DEEPSEEK_V2_TENSORS | with_leaf("weight", MTP) | ROUTER_BIAS,
    copies=head_and_mtp,
)

# In the order of preference: a model that several families can express is written as the first of them.
FAMILIES = {family.model_type: family for family in (
    Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        rules=(
            Fixed("mixer.kind", "attention"),
            Field("layers", "n_layer"),
            Field("hidden", "n_embd"),
            Field("mixer.heads", "n_head", minimum=1),
            GPT2_HEADS,
            GPT2_WIDTH,
            Field("vocab", "vocab_size"),
            Field("context", "n_positions"),
            Field("norm.eps", "layer_norm_epsilon", minimum=0),
            Field("init_std", "initializer_range"),
            Field("tied", "tie_word_embeddings"),
            Fixed("norm.kind", "layernorm"),
            Fixed("mlp.activation", "gelu"),
            Fixed("positions", "learned"),
            Fixed("mixer.rope", None),
            Fixed("mixer.bias", "all"),
            Fixed("mlp.bias", True),
            NO_QK_NORM,
            Fixed("mixer.window", None),
            Only("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
            Only("scale_attn_weights", (True,)),
            Only("scale_attn_by_inverse_layer_idx", (False,)),
            Only("add_cross_attention", (False,)),
            Only("quantization_config", (None,), written=False),
            GPT2_DROPOUT,
            Idle(("reorder_and_upcast_attn", "n_ctx")),
            Idle(tuple(f"summary_{word}" for word in SUMMARY)),
        ),
        defaults={
            "n_inner": None,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
        },
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        tensors=GPT2_TENSORS,
        arrangements=dict.fromkeys(
            with_leaf("weight", GPT2_MATRICES).values(), lambda model: Arrangement(transpose=True)
        ),
        prefix="transformer.",
    ),
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        rules=(
            *SIZES,
            HEADS_DIVIDE_HIDDEN,
            INIT_STD_UP_TO_1,
            ATTENTION_BIAS,
            NO_QK_NORM,
            NO_WINDOW,
            *DECODER,
            ROPE,
            NO_ATTENTION_DROPOUT,
            Field("mlp.bias", "mlp_bias"),
        ),
        defaults={
            **ROPE_DEFAULTS,
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 2048,
        },
        tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        rules=(*SIZES, *NO_BIAS, NO_QK_NORM, *DECODER, ROPE, NO_ATTENTION_DROPOUT, PLAIN_WINDOW),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 131072,
        },
        tensors=LLAMA_TENSORS,
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        rules=(
            *SIZES,
            Fixed("mixer.bias", "qkv"),
            NO_MLP_BIAS,
            NO_QK_NORM,
            *DECODER,
            ROPE,
            NO_ATTENTION_DROPOUT,
            QWEN_WINDOW,
        ),
        defaults={
            **ROPE_DEFAULTS,
            **QWEN_WINDOW_DEFAULTS,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
        },
        tensors=LLAMA_TENSORS | with_leaf("bias", QKV),
        # Beside a qwen2 model, transformers 5 silently replaces the splitting of any tokenizer.json by that
        # of Qwen, unless tokenizer_config.json names code of its own.
        tokenizer_keys={"auto_map": {"AutoTokenizer": [None, "tokenizer.PreTrainedTokenizerFast"]}},
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        rules=(
            *SIZES,
            *NO_BIAS,
            Fixed("mixer.qk_norm", "head"),
            *DECODER,
            NO_ATTENTION_BIAS,
            ROPE,
            NO_ATTENTION_DROPOUT,
            QWEN_WINDOW,
        ),
        defaults={
            **ROPE_DEFAULTS,
            **QWEN_WINDOW_DEFAULTS,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
        tensors=QWEN3_TENSORS,
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        rules=(
            *SIZES,
            Field("experts", "num_local_experts"),
            EXPERTS_PER_TOKEN,
            EXPERTS_OF_FFN,
            *NO_BIAS,
            NO_QK_NORM,
            *DECODER,
            ROPE,
            NO_ATTENTION_DROPOUT,
            PLAIN_WINDOW,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 131072,
        },
        aliases={"num_experts": "num_local_experts"},
        tensors=LLAMA_TENSORS | with_leaf("weight", MIXTRAL_EXPERTS),
    ),
    Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        rules=(
            *SIZES,
            *QWEN_EXPERTS,
            bias_of_qkv("qkv_bias"),
            NO_MLP_BIAS,
            NO_QK_NORM,
            Fixed("shared_gate", True),
            *DECODER,
            *NO_QWEN_WINDOW,
            ROPE,
            NO_ATTENTION_DROPOUT,
            QWEN_DENSE_LAYERS,
            SHARED_WIDTH,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "norm_topk_prob": False,
            "max_position_embeddings": 32768,
        },
        aliases={"num_local_experts": "num_experts"},
        tensors=LLAMA_TENSORS | with_leaf("weight", EXPERTS | ONE_SHARED_EXPERT) | with_leaf("bias", QKV),
    ),
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        rules=(
            *SIZES,
            *QWEN_EXPERTS,
            *NO_BIAS,
            Fixed("mixer.qk_norm", "head"),
            *DECODER,
            NO_ATTENTION_BIAS,
            *NO_QWEN_WINDOW,
            ROPE,
            NO_ATTENTION_DROPOUT,
            QWEN_DENSE_LAYERS,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 4,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "max_position_embeddings": 32768,
        },
        aliases={"num_local_experts": "num_experts"},
        tensors=QWEN3_TENSORS | with_leaf("weight", EXPERTS),
    ),
    Family(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        rules=(
            *LAYERS_AND_WIDTH,
            KV_HEADS,
            NO_HEAD_DIM,
            *REST_OF_SIZES,
            Field("experts", "num_experts"),
            EXPERTS_PER_TOKEN,
            EXPERTS_OF_FFN,
            Field("router_renorm", "norm_topk_prob"),
            *NO_BIAS,
            Fixed("mixer.qk_norm", "whole"),
            NO_WINDOW,
            *DECODER,
            NO_ATTENTION_BIAS,
            Only("clip_qkv", (None,)),
            Only("sliding_window", (None,), written=False),
            ROPE,
            NO_ATTENTION_DROPOUT,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": False,
            "max_position_embeddings": 4096,
        },
        aliases={"num_local_experts": "num_experts"},
        tensors=QWEN3_TENSORS | with_leaf("weight", EXPERTS),
    ),
    Family(
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        rules=(
            *SIZES,
            Field("experts", "n_routed_experts"),
            EXPERTS_PER_TOKEN,
            Field("moe_ffn", "moe_intermediate_size"),
            Field("shared_experts", "n_shared_experts"),
            Field("first_dense", "first_k_dense_replace"),
            Field("router_renorm", "norm_topk_prob"),
            *ROUTER_GROUPS,
            Field("router_scale", "routed_scaling_factor"),
            *NO_BIAS,
            Fixed("mixer.qk_norm", "head"),
            Fixed("router", "sigmoid"),
            Fixed("router_bias", True),
            *DECODER,
            NO_ATTENTION_BIAS,
            ROPE,
            NO_ATTENTION_DROPOUT,
            DOTS_NO_WINDOW,
            Idle(("sliding_window", "max_window_layers")),
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 2048,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        tensors=DOTS_TENSORS,
    ),
    Family(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        rules=(
            *DEEPSEEK_SIZES,
            deepseek_experts(*DEEPSEEK_EXPERTS, Fixed("router_renorm", False)),
            Fixed("mixer.rope.pairs", True),
            NO_MLP_BIAS,
            NO_WINDOW,
            *DECODER,
            NO_ATTENTION_BIAS,
            Only("mlp_bias", (False,)),
            Only("norm_topk_prob", (False,)),
            Only("scoring_func", ("softmax",)),
            Only("moe_layer_freq", (1,)),
            MLA_ROPE,
            NO_ATTENTION_DROPOUT,
            MLA_HEADS,
            HEADS_DIVIDE_HIDDEN,
            V2_GROUPS,
            NO_EXPERTS,
        ),
        defaults={
            **DEEPSEEK_DEFAULTS,
            "max_position_embeddings": 2048,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
        },
        aliases={"num_experts": "n_routed_experts"},
        tensors=DEEPSEEK_V2_TENSORS,
    ),
    DEEPSEEK_V3,
    Family(
        # Goes out as llama or qwen2, but for what llama refuses: heads that do not divide hidden, say.
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        rules=(
            *SIZES,
            SEED_BIASES,
            Field("mlp.bias", "mlp_bias"),
            NO_QK_NORM,
            NO_WINDOW,
            *DECODER,
            ROPE,
            RESIDUAL_DROPOUT,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 524288,
        },
        tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
    ),
    Family(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        rules=(
            *LAYERS_AND_WIDTH,
            KV_HEADS,
            NO_HEAD_DIM,
            *without(REST_OF_SIZES, "norm.eps"),
            Field("norm.eps", "norm_epsilon", minimum=0),
            Fixed("norm.kind", "layernorm"),
            Fixed("mlp.activation", "gelu"),
            Fixed("mixer.bias", "all"),
            Fixed("mlp.bias", True),
            NO_QK_NORM,
            Only("use_bias", (True,)),  # without, the norms have biases all the same
            Only("hidden_act", ("gelu_pytorch_tanh", "gelu_new")),
            *ROTARY,
            ROPE,
            RESIDUAL_DROPOUT,
            PLAIN_WINDOW,
            # of older folders
            Only("norm_type", ("layer_norm",), written=False),
            Only("mlp_type", ("default",), written=False),
            Only("scale_attn_weights", (True,), written=False),
            Idle((
                "activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32",
                "scale_attention_softmax_in_fp32",
            )),
        ),
        defaults={
            **without_key(ROPE_DEFAULTS, "rms_norm_eps"),
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "initializer_range": 0.018042,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "max_position_embeddings": 4096,
        },
        tensors=STARCODER_TENSORS,
    ),
    Family(
        model_type="solar_open",
        architecture="SolarOpenForCausalLM",
        rules=(
            *without(SIZES, "mlp.width"),
            UNUSED_WIDTH,
            *SIGMOID_EXPERTS,
            bias_of_qkv("attention_bias"),
            NO_MLP_BIAS,
            NO_QK_NORM,
            NO_WINDOW,
            *DECODER,
            Only("use_qk_norm", (False,), written=False),
            Only("first_k_dense_replace", (0,), written=False),
            ROPE,
            NO_ATTENTION_DROPOUT,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "attention_bias": False,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 131072,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        tensors=LLAMA_TENSORS | with_leaf("weight", EXPERTS | SHARED_EXPERTS) | with_leaf("bias", QKV)
        | ROUTER_BIAS,
    ),
    Family(
        # transformers runs it as glm4_moe. With norms of q and k, and without biases, it goes out as dots1.
        model_type="sarvam_moe",
        architecture="SarvamMoEForCausalLM",
        rules=(
            *SIZES,
            *SIGMOID_EXPERTS,
            Field("first_dense", "first_k_dense_replace"),
            bias_of_qkv("attention_bias"),
            QK_NORM_OF_HEADS,
            NO_MLP_BIAS,
            NO_WINDOW,
            *DECODER,
            ROPE,
            NO_ATTENTION_DROPOUT,
            Only("num_nextn_predict_layers", (0,)),
            # of older folders
            Only("use_bias", (False,), written=False),
            Only("moe_router_enable_expert_bias", (True,), written=False),
            Only("score_function", ("sigmoid",), written=False),
            Idle(("max_window_layers",)),
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "initializer_range": 0.006,
            "rope_theta": 8e6,
            "attention_bias": False,
            "use_qk_norm": True,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1024,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "max_position_embeddings": 131072,
        },
        aliases={
            "num_local_experts": "n_routed_experts",
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "num_mtp_layers": "num_nextn_predict_layers",
            "use_qkv_bias": "attention_bias",
        },
        tensors=with_leaf("weight", SARVAM | SARVAM_QKV | NORMS | MLP | EXPERTS | SHARED_EXPERTS)
        | with_leaf("bias", SARVAM_QKV)
        | SARVAM_ROUTER_BIAS,
    ),
    Family(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        rules=(
            *LAYERS_AND_WIDTH,
            KV_HEADS,
            HEAD_DIM,
            *REST_OF_SIZES,
            ATTENTION_BIAS,
            Field("mlp.bias", "mlp_bias"),
            NO_QK_NORM,
            NO_WINDOW,
            Only("use_sliding_window", (False,)),
            Idle(("sliding_window",)),
            NO_ROPE_LAYERS,
            *DECODER,
            ROPE,
            NO_ATTENTION_DROPOUT,
            NO_PADDING,
            Idle(("no_rope_layer_interval",)),
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "max_position_embeddings": 32768,
        },
        tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
    ),
    Family(
        model_type="ministral",
        architecture="MinistralForCausalLM",
        rules=(*SIZES, *NO_BIAS, NO_QK_NORM, *DECODER, ROPE, NO_ATTENTION_DROPOUT, LAYER_WINDOWS),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 131072,
        },
        tensors=LLAMA_TENSORS,
    ),
    Family(
        model_type="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        rules=(
            *SIZES,
            ALL_BIASES,
            NO_QK_NORM,
            NO_WINDOW,
            *DECODER,
            ROPE,
            Fixed("mixer.rope.pairs", True),
            NO_PADDING,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
            "max_position_embeddings": 131072,
        },
        tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
    ),
    Family(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        rules=(
            *SIZES,
            *SIGMOID_EXPERTS,
            Field("first_dense", "first_k_dense_replace"),
            STATED_MTP,
            bias_of_qkv("attention_bias"),
            QK_NORM_OF_HEADS,
            Fixed("mlp.bias", False),
            NO_WINDOW,
            *without_rope_share(DECODER),
            share_of_rope(0.5),
            NO_ATTENTION_DROPOUT,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 1,
            "max_position_embeddings": 131072,
        },
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        tensors=DOTS_TENSORS | with_leaf("bias", QKV) | with_leaf("weight", MTP),
        copies=head_and_mtp,
    ),
    Family(
        model_type="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        rules=(
            *SIZES,
            Field("experts", "num_local_experts"),
            EXPERTS_PER_TOKEN,
            EXPERTS_OF_FFN,
            Fixed("router", "sigmoid"),
            Fixed("router_bias", True),
            Fixed("router_renorm", True),
            *NO_BIAS,
            Fixed("mixer.qk_norm", "whole"),
            NO_WINDOW,
            *without_rope_share(DECODER),
            share_of_rope(1.0),
            NO_ATTENTION_DROPOUT,
            NO_PADDING,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 196608,
        },
        aliases={"num_experts": "num_local_experts"},
        tensors=QWEN3_TENSORS | with_leaf("weight", MIXTRAL_EXPERTS) | MINIMAX_ROUTER_BIAS,
    ),
    Family(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        rules=(
            *GEMMA,
            NO_QK_NORM,
            NO_WINDOW,
            Only("hidden_act", GELU_TANH),
            Only("hidden_activation", (None, *GELU_TANH), written=False),
            ROPE,
        ),
        defaults={**GEMMA_DEFAULTS, "num_key_value_heads": 16, "max_position_embeddings": 8192},
        tensors=LLAMA_TENSORS,
        norms_below_one=True,
    ),
    Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        rules=(*GEMMA_AROUND, NO_QK_NORM, GEMMA2_LAYERS),
        defaults={
            **GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "max_position_embeddings": 8192,
        },
        tensors=with_leaf("weight", OUTER | NORMS_AROUND | QKV | OUTPUT | MLP)
        | with_leaf("bias", QKV | OUTPUT),
        norms_below_one=True,
    ),
    Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        rules=(
            *GEMMA_AROUND,
            Fixed("mixer.qk_norm", "head"),
            Idle(("_sliding_window_pattern",)),
            GEMMA3_LAYERS,
        ),
        defaults={
            **GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "max_position_embeddings": 131072,
        },
        tensors=with_leaf("weight", OUTER | NORMS_AROUND | QKV | OUTPUT | QK_NORM | MLP)
        | with_leaf("bias", QKV | OUTPUT),
        norms_below_one=True,
    ),
    Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        rules=(*OLMO2, NO_WINDOW, ROPE),
        defaults={
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "max_position_embeddings": 2048,
        },
        tensors=OLMO2_TENSORS,
    ),
    Family(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        rules=(*OLMO2, OLMO3_LAYERS),
        defaults={
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "attention_bias": False,
            "sliding_window": 4096,
            "max_position_embeddings": 2048,
        },
        tensors=OLMO2_TENSORS,
    ),
    Family(
        model_type="granite",
        architecture="GraniteForCausalLM",
        rules=(
            *GRANITE,
            Field("mlp.bias", "mlp_bias"),
        ),
        defaults={**GRANITE_DEFAULTS, "mlp_bias": False},
        tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
    ),
    Family(
        model_type="arcee",
        architecture="ArceeForCausalLM",
        rules=(
            *SIZES,
            HEADS_DIVIDE_HIDDEN,
            ATTENTION_BIAS,
            Field("mlp.bias", "mlp_bias"),
            NO_QK_NORM,
            NO_WINDOW,
            Fixed("norm.kind", "rmsnorm"),
            Fixed("mlp.activation", "relu2"),
            Only("hidden_act", ("relu2",)),
            *ROTARY,
            ROPE,
            NO_ATTENTION_DROPOUT,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 4096,
        },
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | UP_AND_DOWN)
        | with_leaf("bias", QKV | OUTPUT | UP_AND_DOWN),
    ),
    Family(
        model_type="nemotron",
        architecture="NemotronForCausalLM",
        rules=(
            *LAYERS_AND_WIDTH,
            KV_HEADS,
            HEAD_DIM,
            *without(REST_OF_SIZES, "norm.eps"),
            Field("norm.eps", "norm_eps", minimum=0),
            ATTENTION_BIAS,
            Field("mlp.bias", "mlp_bias"),
            NO_QK_NORM,
            NO_WINDOW,
            Fixed("norm.kind", "layernorm"),
            Fixed("mlp.activation", "relu2"),
            Only("hidden_act", ("relu2",)),
            *without_rope_share(ROTARY),
            share_of_rope(0.5),
            NO_ATTENTION_DROPOUT,
        ),
        defaults={
            **without_key(ROPE_DEFAULTS, "rms_norm_eps"),
            "norm_eps": 1e-5,
            "initializer_range": 0.0134,
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 4096,
        },
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | UP_AND_DOWN)
        | with_leaf("bias", {"norm": OUTER["norm"]} | NORMS | QKV | OUTPUT | UP_AND_DOWN),
        norms_below_one=True,
    ),
    Family(
        model_type="apertus",
        architecture="ApertusForCausalLM",
        rules=(
            *LAYERS_AND_WIDTH,
            KV_HEADS,
            NO_HEAD_DIM,
            *REST_OF_SIZES,
            ATTENTION_BIAS,
            NO_MLP_BIAS,
            Fixed("mixer.qk_norm", "head"),
            NO_WINDOW,
            Fixed("norm.kind", "rmsnorm"),
            Fixed("mlp.activation", "xielu"),
            Only("hidden_act", ("xielu",)),
            *ROTARY,
            APERTUS_SCALED_ROPE,
            NO_ATTENTION_DROPOUT,
            NO_PADDING,
            Only("mlp_bias", (False,), written=False),
            Only("qk_norm", (True,), written=False),
            Idle(("post_norm",)),  # transformers does not read it
        ),
        defaults={
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12e6,
            "attention_bias": False,
            "max_position_embeddings": 65536,
        },
        tensors=with_leaf("weight", OUTER | APERTUS_NORMS | QKV | OUTPUT | QK_NORM | UP_AND_DOWN)
        | with_leaf("bias", QKV | OUTPUT)
        | XIELU,
        constants={"model.layers.{layer}.mlp.act_fn.beta": 0.5, "model.layers.{layer}.mlp.act_fn.eps": -1e-6},
    ),
    Family(
        model_type="cohere",
        architecture="CohereForCausalLM",
        rules=(*COHERE, NO_WINDOW, Only("use_qk_norm", (False,)), ROPE, Fixed("mixer.rope.pairs", True)),
        defaults=COHERE_DEFAULTS,
        tensors=COHERE_TENSORS,
    ),
    Family(
        model_type="cohere2",
        architecture="Cohere2ForCausalLM",
        rules=(*COHERE, *COHERE2_SPELLINGS, COHERE2_LAYERS),
        defaults={**COHERE_DEFAULTS, "rope_theta": 10000.0, "sliding_window": 4096},
        tensors=COHERE_TENSORS,
    ),
    Family(
        model_type="glm",
        architecture="GlmForCausalLM",
        rules=GLM,
        defaults=GLM_DEFAULTS,
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | PHI_MLP) | with_leaf("bias", QKV),
    ),
    Family(
        model_type="glm4",
        architecture="Glm4ForCausalLM",
        rules=(*GLM, Fixed("norm.place", "around")),
        defaults=GLM_DEFAULTS,
        tensors=with_leaf("weight", OUTER | GLM4_NORMS | QKV | OUTPUT | PHI_MLP) | with_leaf("bias", QKV),
    ),
    Family(
        model_type="exaone4",
        architecture="Exaone4ForCausalLM",
        rules=(
            *SIZES,
            *NO_BIAS,
            Fixed("mixer.qk_norm", "head"),
            Fixed("norm.place", "after"),
            *DECODER,
            NO_ATTENTION_DROPOUT,
            EXAONE4_LAYERS,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "max_position_embeddings": 2048,
        },
        tensors=with_leaf("weight", OUTER | NORMS_AFTER | QKV | OUTPUT | QK_NORM | MLP),
    ),
    Family(
        model_type="hunyuan_v1_dense",
        architecture="HunYuanDenseV1ForCausalLM",
        rules=(
            *SIZES,
            *HUNYUAN,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "max_position_embeddings": 2048,
        },
        aliases={"attention_head_dim": "head_dim"},
        tensors=LLAMA_TENSORS | with_leaf("weight", HUNYUAN_QK_NORM) | with_leaf("bias", QKV | OUTPUT),
    ),
    Family(
        model_type="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        rules=(
            *SIZES,
            Field("experts", "num_experts"),
            MOE_TOPK,
            EXPERTS_OF_FFN,
            Fixed("shared_experts", 1),
            Fixed("router_renorm", True),
            Fixed("router", "softmax"),
            Only("use_mixed_mlp_moe", (True,), written=False),
            Only("norm_topk_prob", (True,), written=False),
            Only("moe_layer_num_skipped", (0,), written=False),
            Idle(("num_shared_expert", "moe_intermediate_size")),  # the shapes of the weights say them, too
            *HUNYUAN,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "num_experts": 1,
            "moe_topk": 1,
            "max_position_embeddings": 2048,
        },
        aliases={"attention_head_dim": "head_dim"},
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | HUNYUAN_QK_NORM | HUNYUAN_MOE)
        | with_leaf("bias", QKV | OUTPUT),
    ),
    Family(
        model_type="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        rules=(
            *LAYERS_AND_WIDTH,
            KV_HEADS,
            NO_HEAD_DIM,
            *REST_OF_SIZES,
            Field("experts", "moe_num_experts"),
            Field("top_k", "moe_k"),
            Field("moe_ffn", "moe_intermediate_size"),
            Field("shared_experts", "moe_num_shared_experts"),
            ERNIE_LAYERS,
            Field("moe_every", "moe_layer_interval", minimum=1),
            Fixed("router", "softmax"),
            Fixed("router_bias", True),
            Fixed("router_renorm", True),
            Idle(("moe_norm_min", "num_experts", "num_experts_per_tok")),
            Only("use_bias", (False,)),
            *NO_BIAS,
            NO_QK_NORM,
            NO_WINDOW,
            *DECODER,
            ROPE,
            Fixed("mixer.rope.pairs", True),
            NO_PADDING,
        ),
        defaults={
            **without_key(ROPE_DEFAULTS, "head_dim"),
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "max_position_embeddings": 131072,
        },
        tensors=LLAMA_TENSORS | with_leaf("weight", EXPERTS | SHARED_EXPERTS) | ERNIE_ROUTER_BIAS,
        arrangements=dict.fromkeys(ERNIE_ROUTER_BIAS.values(), lambda model: Arrangement(leading=1)),
    ),
    Family(
        model_type="afmoe",
        architecture="AfmoeForCausalLM",
        rules=(
            *SIZES,
            Field("experts", "num_experts"),
            EXPERTS_PER_TOKEN,
            Field("moe_ffn", "moe_intermediate_size"),
            Field("shared_experts", "num_shared_experts"),
            Field("first_dense", "num_dense_layers"),
            Field("router_scale", "route_scale"),
            Fixed("router", "sigmoid"),
            Fixed("router_bias", True),
            Fixed("router_renorm", True),
            *NO_BIAS,
            NO_ATTENTION_BIAS,
            Fixed("mixer.qk_norm", "head"),
            Fixed("mixer.gate", "channel"),
            Fixed("norm.place", "around"),
            MUP_ENABLED,
            *DECODER,
            AFMOE_LAYERS,
            NO_ATTENTION_DROPOUT,
            Only("score_func", ("sigmoid",), written=False),
            Only("route_norm", (True,), written=False),
            Only("n_group", (1,), written=False),
            Only("topk_group", (1,), written=False),
            Idle(("num_expert_groups", "num_limited_groups", "load_balance_coeff", "use_grouped_mm")),
        ),
        defaults={
            **ROPE_DEFAULTS,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "route_scale": 1.0,
            "sliding_window": 1024,
            "mup_enabled": False,
            "max_position_embeddings": 16384,
        },
        tensors=with_leaf(
            "weight", OUTER | AFMOE_NORMS | QKV | OUTPUT | QK_NORM | MLP | AFMOE_EXPERTS | SHARED_EXPERTS
        )
        | HUNYUAN_ROUTER_BIAS,
    ),
    Family(
        model_type="laguna",
        architecture="LagunaForCausalLM",
        rules=(
            *without(LAYERS_AND_WIDTH, "mixer.heads"),
            Field("mixer.kv_heads", "num_key_value_heads"),
            Field("mixer.head_dim", "head_dim", minimum=1),
            *REST_OF_SIZES,
            Field("experts", "num_experts"),
            EXPERTS_PER_TOKEN,
            Field("moe_ffn", "moe_intermediate_size"),
            SHARED_WIDTH,
            MLP_LAYER_TYPES,
            Field("router_scale", "moe_routed_scaling_factor"),
            Fixed("router", "sigmoid"),
            Fixed("router_bias", True),
            Fixed("router_renorm", True),
            *NO_BIAS,
            NO_ATTENTION_BIAS,
            Fixed("mixer.qk_norm", "head"),
            GATING,
            Fixed("mixer.gate_by", "softplus"),
            *without_rope_share(DECODER),
            LAGUNA_LAYERS,
            NO_ATTENTION_DROPOUT,
            Only("moe_router_logit_softcapping", (0.0,), written=False),
            Only("moe_apply_router_weight_on_input", (False,), written=False),
            Only("qkv_bias", (False,), written=False),
            Only("norm_topk_prob", (True,), written=False),
            Idle(("mlp_only_layers", "decoder_sparse_step")),  # mlp_layer_types says it
        ),
        defaults={
            **without_key(ROPE_DEFAULTS, "rope_theta"),
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 512,
            "num_attention_heads": 48,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "moe_routed_scaling_factor": 1.0,
            "mlp_layer_types": None,
            "max_position_embeddings": 131072,
        },
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | QK_NORM | MLP | EXPERTS | LAGUNA)
        | LAGUNA_ROUTER_BIAS,
    ),
    Family(
        model_type="mimo_v2_flash",
        architecture="MiMoV2FlashForCausalLM",
        rules=(
            *LAYERS_AND_WIDTH,
            Field("mixer.head_dim", "head_dim", minimum=1),
            Field("mixer.value_dim", "v_head_dim"),
            one_of_null("mixer.value_scale", "attention_value_scale"),
            *REST_OF_SIZES,
            Field("experts", "n_routed_experts"),
            EXPERTS_PER_TOKEN,
            Field("moe_ffn", "moe_intermediate_size"),
            Field("router_renorm", "norm_topk_prob"),
            *ROUTER_GROUPS,
            one_of_null("router_scale", "routed_scaling_factor"),
            Fixed("router", "sigmoid"),
            Fixed("router_bias", True),
            MLP_LAYER_TYPES,
            bias_of_qkv("attention_bias"),
            NO_MLP_BIAS,
            NO_QK_NORM,
            *without_rope_share(DECODER),
            MIMO_LAYERS,
            MIMO_SPELLINGS,
            NO_ATTENTION_DROPOUT,
            Idle(("attention_chunk_size", "hybrid_block_size", "partial_rotary_factor")),
        ),
        defaults={
            **without_key(ROPE_DEFAULTS, "rope_theta"),
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "attention_value_scale": 0.707,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "sliding_window": 129,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "mlp_layer_types": None,
            "max_position_embeddings": 131072,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | MLP | EXPERTS) | with_leaf("bias", QKV)
        | ROUTER_BIAS | SINKS,
        unread=("model.mtp.",),
    ),
    Family(
        model_type="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        rules=(
            *SIZES,
            Field("experts", "num_experts"),
            EXPERTS_PER_TOKEN,
            Field("moe_ffn", "moe_intermediate_size"),
            Field("shared_experts", "num_shared_experts", minimum=1),
            Field("router_renorm", "norm_topk_prob"),
            *ROUTER_GROUPS,
            Field("router_scale", "routed_scaling_factor"),
            Field("first_dense", "first_k_dense_replace"),
            Fixed("router", "sigmoid"),
            Fixed("router_bias", True),
            *NO_BIAS,
            Fixed("mixer.qk_norm", "head"),
            *DECODER,
            NO_ATTENTION_DROPOUT,
            EXAONE4_LAYERS,
            Only("num_nextn_predict_layers", (0, None), written=False),
            Only("mtp_share_layers", (False,), written=False),
            Only("scoring_func", ("sigmoid",), written=False),
            Only("topk_method", ("noaux_tc",), written=False),
            Idle(("mlp_layer_types", "is_moe_layer")),
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 2048,
        },
        tensors=DOTS_TENSORS | EXAONE_ROUTER_BIAS,
    ),
    Family(
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        rules=(
            *GRANITE,
            Field("experts", "num_local_experts"),
            EXPERTS_PER_TOKEN,
            EXPERTS_OF_FFN,
            Fixed("router", "softmax"),
            Fixed("router_renorm", True),
            NO_MLP_BIAS,
        ),
        defaults={**GRANITE_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | GRANITE_EXPERTS)
        | with_leaf("bias", QKV | OUTPUT),
        arrangements=dict.fromkeys(
            with_leaf("weight", GRANITE_STACKS).values(), lambda model: Arrangement(leading=model.experts)
        ),
    ),
    Family(
        model_type="granite_swa",
        architecture="GraniteSWAForCausalLM",
        rules=(*GRANITE_SWA, Field("mlp.bias", "mlp_bias")),
        defaults={
            **GRANITE_DEFAULTS,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
            "mlp_bias": False,
            "max_position_embeddings": 8192,
        },
        tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP) | GRANITE_SINKS,
    ),
    Family(
        model_type="granitemoe_swa",
        architecture="GraniteMoeSWAForCausalLM",
        rules=(
            *GRANITE_SWA,
            Field("experts", "num_local_experts"),
            EXPERTS_PER_TOKEN,
            EXPERTS_OF_FFN,
            EXPERTS_BESIDE,
            Fixed("router", "softmax"),
            Fixed("router_renorm", True),
            NO_MLP_BIAS,
        ),
        defaults={
            **GRANITE_DEFAULTS,
            "sliding_window": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 0,
        },
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT) | with_leaf("bias", QKV | OUTPUT)
        | GRANITE_SINKS | GRANITE_SWA_EXPERTS,
        arrangements={
            name: lambda model: Arrangement(leading=model.experts)
            for name in GRANITE_SWA_EXPERTS.values() if ".experts." in name
        },
    ),
    Family(
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        rules=(
            *GRANITE_HYBRID,
            Fixed("mixer.window", None),
            GRANITE_POSITIONS,
            GRANITE_MLP,
            GRANITE_LAYERS,
            NO_MLP_BIAS,
            Only("mamba_conv_bias", (True,)),
            Only("mamba_proj_bias", (False,)),
            Only("normalization_function", ("rmsnorm",), written=False),
            Idle(("mamba_chunk_size", "init_method")),
        ),
        defaults={
            **GRANITE_DEFAULTS,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        aliases={"layers_block_type": "layer_types"},
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | GRANITE_EXPERTS | GRANITE_SHARED)
        | with_leaf("bias", QKV | OUTPUT),
        of_mixers={"mamba": mamba_names("model.layers", "mamba", "input_layernorm")},
        arrangements={
            **dict.fromkeys(
                with_leaf("weight", GRANITE_STACKS).values(), lambda model: Arrangement(leading=model.experts)
            ),
            "model.layers.{layer}.mamba.conv1d.weight": lambda model: Arrangement(inner=True),
        },
    ),
    Family(
        model_type="nemotron_h",
        architecture="NemotronHForCausalLM",
        rules=(
            *without(LAYERS_AND_WIDTH, "layers"),
            KV_HEADS,
            HEAD_DIM,
            *without(REST_OF_SIZES, "norm.eps"),
            Field("norm.eps", "layer_norm_epsilon", minimum=0),
            *NO_BIAS,
            NO_QK_NORM,
            Fixed("mixer.window", None),
            Fixed("mixer.rope", None),
            nemotron_layers(SIGMOID_EXPERTS),
            Fixed("norm.kind", "rmsnorm"),
            Fixed("mlp.activation", "relu2"),
            Only("mlp_hidden_act", ("relu2",)),
            *without_rope_share(ROTARY),
            Only("mlp_bias", (False,)),
            Only("use_bias", (False,)),
            Only("use_conv_bias", (True,)),
            Only("mamba_proj_bias", (False,), written=False),
            Only("mamba_hidden_act", ("silu", "swish")),
            Only("moe_latent_size", (None,), written=False),
            Only("sliding_window", (None,), written=False),
            NO_ATTENTION_BIAS,
            NO_ATTENTION_DROPOUT,
            NO_NEMOTRON_EXPERTS,
            # Published folders say again what the class computes, or how the weights began.
            Idle((
                "expand", "chunk_size", "mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep",
                "residual_in_fp32", "rescale_prenorm_residual", "time_step_max", "time_step_floor",
                "time_step_limit", "time_step_rank", "rms_norm_eps", "norm_eps", "attention_head_dim",
                "rope_theta", "partial_rotary_factor", "num_nextn_predict_layers", "mtp_layers_block_type",
                "mtp_hybrid_override_pattern", "moe_shared_expert_overlap",
            )),
        ),
        defaults={
            "num_hidden_layers": None,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "time_step_min": 0.001,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
        tensors=NEMOTRON_H_TENSORS,
        of_mixers={"mamba": mamba_names("backbone.layers", "mixer", "norm")},
        arrangements={"backbone.layers.{layer}.mixer.conv1d.weight": lambda model: Arrangement(inner=True)},
        prefix="backbone.",
        unread=("mtp.",),
    ),
    Family(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        rules=(
            *SIZES,
            Field("experts", "num_local_experts"),
            EXPERTS_PER_TOKEN,
            EXPERTS_OF_FFN,
            Fixed("router", "softmax"),
            Fixed("router_renorm", True),
            Fixed("router_logit_bias", True),
            Fixed("mlp.bias", True),
            Fixed("mlp.activation", "clamped_swiglu"),
            ATTENTION_BIAS,
            Fixed("mixer.sinks", True),
            NO_QK_NORM,
            Fixed("norm.kind", "rmsnorm"),
            *ROTARY,
            GPT_OSS_LAYERS,
            NO_ATTENTION_DROPOUT,
            NO_PADDING,
            Only("hidden_act", ("silu",)),
            Only("swiglu_alpha", (1.702,), written=False),
            Only("swiglu_limit", (7.0,), written=False),
            Idle(("initial_context_length", "experts_per_token")),  # again what other keys say
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_hidden_layers": 36,
            "num_local_experts": 128,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "head_dim": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "max_position_embeddings": 131072,
        },
        aliases={"num_experts": "num_local_experts"},
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT)
        | with_leaf("bias", QKV | OUTPUT)
        | GPT_OSS_OTHERS
        | GPT_OSS_STACKS,
        arrangements={name: gpt_oss_stack(name) for name in GPT_OSS_STACKS.values()},
    ),
    Family(
        model_type="llama4_text",
        architecture="Llama4ForCausalLM",
        rules=(
            *without(SIZES, "mlp.width"),
            Field("mlp.width", "intermediate_size_mlp"),
            Field("moe_ffn", "intermediate_size"),
            Field("experts", "num_local_experts"),
            EXPERTS_PER_TOKEN,
            MOE_LAYERS,
            Fixed("shared_experts", 1),
            Fixed("router", "sigmoid"),
            Fixed("router_renorm", False),
            Fixed("router_weighs", "input"),
            ATTENTION_BIAS,
            NO_MLP_BIAS,
            *DECODER,
            LLAMA4_LAYERS,
            NO_ATTENTION_DROPOUT,
            NO_PADDING,
            Idle(("no_rope_layer_interval", "for_llm_compressor", "cache_implementation")),
        ),
        defaults={
            **ROPE_DEFAULTS,
            **LLAMA4_LAYER_DEFAULTS,
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
            "moe_layers": None,
            "attention_bias": False,
        },
        tensors=with_leaf("weight", OUTER | NORMS | QKV | OUTPUT | LLAMA4_MLP)
        | with_leaf("bias", QKV | OUTPUT)
        | LLAMA4_STACKS,
        arrangements=dict.fromkeys(
            LLAMA4_STACKS.values(), lambda model: Arrangement(transpose=True, leading=model.experts)
        ),
    ),
    Family(
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        rules=(
            *SIZES, *NO_BIAS, NO_QK_NORM, *DECODER, GROWING_ROPE, NO_ATTENTION_DROPOUT, NO_PADDING,
            PLAIN_WINDOW,
        ),
        defaults={
            **without_key(ROPE_DEFAULTS, "rope_theta"),
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "max_position_embeddings": 262144,
        },
        tensors=LLAMA_TENSORS,
    ),
    Family(
        model_type="lfm2",
        architecture="Lfm2ForCausalLM",
        rules=(*LFM2, LFM2_WIDTH),
        defaults={
            **LFM2_DEFAULTS,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
        aliases={"tie_embedding": "tie_word_embeddings"},
        tensors=with_leaf("weight", LFM2_NAMES | LFM2_MLP),
        of_mixers={"short_conv": with_leaf("weight", LFM2_CONV)},
        arrangements=convolutions("conv.conv"),
    ),
    Family(
        model_type="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        rules=(
            *LFM2,
            Field("mlp.width", "intermediate_size"),
            Field("experts", "num_experts"),
            EXPERTS_PER_TOKEN,
            Field("moe_ffn", "moe_intermediate_size"),
            Field("first_dense", "num_dense_layers"),
            Field("router_renorm", "norm_topk_prob"),
            Field("router_scale", "routed_scaling_factor"),
            Field("router_bias", "use_expert_bias"),
            Fixed("router", "sigmoid"),
        ),
        defaults={
            **LFM2_DEFAULTS,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        aliases={"tie_embedding": "tie_word_embeddings"},
        tensors=with_leaf("weight", LFM2_NAMES | LFM2_MLP | LFM2_EXPERTS) | LFM2_ROUTER_BIAS,
        of_mixers={"short_conv": with_leaf("weight", LFM2_CONV)},
        arrangements=convolutions("conv.conv"),
    ),
    Family(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        rules=(
            *QWEN_STATE,
            SHARE_OF_ROPE,
            *QWEN_SHARED_EXPERT,
            Field("router_renorm", "norm_topk_prob"),
            Field("moe_every", "decoder_sparse_step", minimum=1),
            QWEN_DENSE_LAYERS,
        ),
        defaults={
            **QWEN_STATE_DEFAULTS,
            **QWEN_SHARED_EXPERT_DEFAULTS,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
        tensors=with_leaf("weight", QWEN_HYBRID | EXPERTS | ONE_SHARED_EXPERT),
        of_mixers={"delta": with_leaf("weight", QWEN_NEXT_LINEAR) | QWEN_RATES},
        arrangements=QWEN_ARRANGEMENTS | dict.fromkeys(
            (f"model.layers.{{layer}}.linear_attn.{name}.weight" for name in ("in_proj_qkvz", "in_proj_ba")),
            lambda model: Arrangement(groups=model.mixer.heads_over_tp()["key_heads"]),
        ),
        norms_below_one=True,
        unread=("mtp.",),
    ),
    Family(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        rules=(*QWEN_STATE, TEXT_ROPE, NO_DENSE_LAYERS),
        defaults={**QWEN_STATE_DEFAULTS, "num_key_value_heads": 4},
        tensors=with_leaf("weight", QWEN_HYBRID),
        of_mixers={"delta": with_leaf("weight", QWEN35_LINEAR) | QWEN_RATES},
        arrangements=QWEN_ARRANGEMENTS,
        norms_below_one=True,
        unread=("mtp.",),
    ),
    Family(
        model_type="olmo_hybrid",
        architecture="OlmoHybridForCausalLM",
        rules=(
            *OLMO2,
            Fixed("mixer.window", None),
            OLMO_HYBRID_ROPE,
            OLMO_HYBRID_LAYERS,
            Idle((  # how the rates of the states begin
                "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
                "linear_dt_init_floor",
            )),
        ),
        defaults={
            **without_key(ROPE_DEFAULTS, "head_dim"),
            "attention_bias": False,
            "linear_num_key_heads": None,
            "linear_num_value_heads": None,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
            "max_position_embeddings": 65536,
        },
        tensors=OLMO2_TENSORS,
        of_mixers={"delta": with_leaf("weight", OLMO_LINEAR) | QWEN_RATES},
        arrangements=convolutions("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
        spellings={
            "delta": {
                ".input_layernorm.": ".attention_layer_norm.",
                ".post_attention_layernorm.": ".feedforward_layer_norm.",
            },
            "attention": {".feedforward_layer_norm.": ".post_attention_layernorm."},
        },
        unread=("mtp.",),
    ),
    Family(
        model_type="kimi_linear",
        architecture="KimiLinearForCausalLM",
        rules=(
            *without(without(DEEPSEEK_SIZES, "context"), "tied"),
            Field("context", "model_max_length"),
            Fixed("tied", False),
            Only("tie_word_embeddings", (False,)),  # transformers makes a separate head in any case
            MLA_HEADS,
            NO_ATTENTION_BIAS,
            NO_MLP_BIAS,
            Fixed("mixer.window", None),
            Fixed("mixer.rope", None),
            *DECODER,
            NO_ATTENTION_DROPOUT,
            NO_PADDING,
            KIMI_LAYERS,
            Field("experts", "num_experts"),
            Field("top_k", "num_experts_per_token"),
            Field("moe_ffn", "moe_intermediate_size"),
            Field("shared_experts", "num_shared_experts"),
            Field("router_renorm", "moe_renormalize"),
            Field("router_groups", "num_expert_group"),
            Field("router_group_top_k", "topk_group"),
            Field("router_scale", "routed_scaling_factor"),
            Fixed("router", "sigmoid"),
            Fixed("router_bias", True),
            KIMI_DENSE_LAYERS,
            # Published folders say again what the class computes.
            Only("mla_use_nope", (True,), written=False),
            Only("moe_router_activation_func", ("sigmoid",), written=False),
            Only("moe_layer_freq", (1,), written=False),
            Only("topk_method", ("noaux_tc",), written=False),
            Only("num_nextn_predict_layers", (0, None), written=False),
            Idle(("use_grouped_topk", "rope_theta", "rope_scaling", "rope_parameters")),
        ),
        defaults={
            **without_key(without_key(DEEPSEEK_DEFAULTS, "rope_theta"), "q_lora_rank"),
            "q_lora_rank": None,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "moe_intermediate_size": 1024,
            "num_shared_experts": 1,
            "moe_renormalize": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "model_max_length": 1048576,
        },
        aliases={
            "max_position_embeddings": "model_max_length",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
        },
        tensors=with_leaf("weight", OUTER | NORMS | MLA | OUTPUT | MLP | KIMI_EXPERTS) | KIMI_ROUTER_BIAS,
        of_mixers={"kimi": with_leaf("weight", KIMI_LINEAR) | KIMI_RATES},
        arrangements={
            **convolutions("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
            "model.layers.{layer}.self_attn.A_log": lambda model: Arrangement(
                leading=1, outer=True, inner=True
            ),
        },
        spellings={"kimi": KIMI_SPELLINGS, "latent": KIMI_SPELLINGS},
    ),
    Family(
        # AutoModelForCausalLM does not know it: its class is named.
        model_type="mistral4",
        architecture="Mistral4ForCausalLM",
        rules=(
            *DEEPSEEK_SIZES,
            deepseek_experts(*DEEPSEEK_EXPERTS, Field("router_renorm", "norm_topk_prob")),
            Field("mixer.rope.pairs", "rope_interleave"),
            NO_MLP_BIAS,
            NO_WINDOW,
            *DECODER,
            NO_ATTENTION_BIAS,
            MISTRAL4_GROWING_ROPE,
            NO_ATTENTION_DROPOUT,
            NO_PADDING,
            MLA_HEADS,
            Only("n_group", (1,)),
            Only("topk_group", (1,)),
            NO_EXPERTS,
        ),
        defaults={
            **without_key(DEEPSEEK_DEFAULTS, "rope_theta"),
            "num_key_value_heads": 32,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "rope_interleave": True,
            "max_position_embeddings": 1048576,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        tensors=with_leaf("weight", OUTER | NORMS | MLA | OUTPUT | MLP | SHARED_EXPERTS | ONE_ROUTER)
        | STACKED_EXPERTS,
        arrangements=dict.fromkeys(
            STACKED_EXPERTS.values(), lambda model: Arrangement(leading=model.experts)
        ),
    ),
    # The families below are only read: an earlier one can express every model of theirs, and is written.
    Family(
        model_type="hy_v3",  # goes out as dots1
        architecture="HYV3ForCausalLM",
        rules=(
            *SIZES,
            Field("experts", "num_experts"),
            EXPERTS_PER_TOKEN,
            Field("moe_ffn", "moe_intermediate_size"),
            Field("shared_experts", "num_shared_experts"),
            MLP_LAYER_TYPES,
            Field("router_scale", "router_scaling_factor"),
            Fixed("router", "sigmoid"),
            Fixed("router_bias", True),
            Fixed("router_renorm", True),
            *NO_BIAS,
            Fixed("mixer.qk_norm", "head"),
            NO_WINDOW,
            *DECODER,
            NO_ATTENTION_BIAS,
            Only("mlp_bias", (False,)),
            ROPE,
            NO_ATTENTION_DROPOUT,
            # Its module of multi-token prediction has other names, and transformers does not run it.
            Only("num_nextn_predict_layers", (0,), written=False),
            Only("qk_norm", (True,), written=False),
            Only("route_norm", (True,), written=False),
            Only("moe_router_use_sigmoid", (True,), written=False),
            Only("moe_router_enable_expert_bias", (True,), written=False),
            Idle(("enable_moe_fp32_combine", "enable_lm_head_fp32", "enable_attention_fp32_softmax")),
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.006,
            "rope_theta": 11158840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "mlp_layer_types": None,
            "max_position_embeddings": 131072,
        },
        aliases={"num_local_experts": "num_experts", "expert_hidden_dim": "moe_intermediate_size"},
        tensors=QWEN3_TENSORS | with_leaf("weight", EXPERTS | HUNYUAN_EXPERTS) | HUNYUAN_ROUTER_BIAS,
    ),
    Family(
        model_type="glm4_moe_lite",  # goes out as deepseek_v3
        architecture="Glm4MoeLiteForCausalLM",
        rules=(
            *DEEPSEEK_SIZES,
            *SIGMOID_EXPERTS,
            MLP_LAYER_TYPES,
            STATED_MTP,
            Field("mixer.rope.pairs", "rope_interleave"),
            NO_MLP_BIAS,
            NO_WINDOW,
            *DECODER,
            NO_ATTENTION_BIAS,
            Only("topk_method", ("noaux_tc",), written=False),
            Only("scoring_func", ("sigmoid",), written=False),
            MLA_ROPE,
            NO_ATTENTION_DROPOUT,
            MLA_HEADS,
        ),
        defaults={
            **DEEPSEEK_DEFAULTS,
            "num_key_value_heads": 20,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "rope_interleave": True,
            "mlp_layer_types": None,
            "max_position_embeddings": 202752,
        },
        aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
        tensors=DEEPSEEK_V2_TENSORS | with_leaf("weight", MTP) | ROUTER_BIAS,
        copies=head_and_mtp,
    ),
    Family(
        model_type="youtu",  # goes out as deepseek_v2 or deepseek_v3, whose layers are all dense
        architecture="YoutuForCausalLM",
        rules=(
            *without(DEEPSEEK_SIZES, "init_std"),
            INIT_STD_BY_WIDTH,
            Field("mixer.rope.pairs", "rope_interleave"),
            NO_MLP_BIAS,
            NO_WINDOW,
            *DECODER,
            NO_ATTENTION_BIAS,
            Only("mlp_bias", (False,), written=False),
            Idle(("embedding_initializer_range",)),
            MLA_ROPE,
            NO_ATTENTION_DROPOUT,
            MLA_HEADS,
        ),
        defaults={
            **without_key(DEEPSEEK_DEFAULTS, "initializer_range"),
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
            "rope_interleave": True,
            "max_position_embeddings": 131072,
        },
        tensors=with_leaf("weight", OUTER | NORMS | MLA | OUTPUT | MLP),
    ),
    Family(
        model_type="internlm3",  # transformers runs it as llama; goes out as llama
        architecture="InternLM3ForCausalLM",
        rules=(
            *SIZES,
            HEADS_DIVIDE_HIDDEN,
            EQUAL_BIASES,
            NO_QK_NORM,
            NO_WINDOW,
            *DECODER,
            ROPE,
            NO_ATTENTION_DROPOUT,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 32768,
        },
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        tensors=LLAMA_TENSORS | with_leaf("bias", QKV | OUTPUT | MLP),
    ),
    Family(
        # Without longrope and a partial rotation it goes out as llama or, with a window, as mistral.
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        rules=(
            *LAYERS_AND_WIDTH,
            KV_HEADS,
            NO_HEAD_DIM,
            *REST_OF_SIZES,
            *NO_BIAS,
            NO_QK_NORM,
            *without_rope_share(DECODER),
            NO_ATTENTION_BIAS,
            PHI3_ROPE,
            NO_ATTENTION_DROPOUT,
            NO_PADDING,
            PLAIN_WINDOW,
            Only("mlp_bias", (False,), written=False),
            Only("lm_head_bias", (False,), written=False),
            Only("full_attn_mod", (1,), written=False),
            Idle(("interpolate_factor",)),
        ),
        defaults={
            **ROPE_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        tensors=with_leaf("weight", OUTER | NORMS | PHI_QKV | OUTPUT | PHI_MLP),
    ),
    Family(
        model_type="cwm",  # goes out as ministral, or as llama where no layer has a window
        architecture="CwmForCausalLM",
        rules=(
            *SIZES,
            *NO_BIAS,
            NO_QK_NORM,
            *DECODER,
            Only("mlp_bias", (False,), written=False),
            CWM_ROPE,
            NO_ATTENTION_DROPOUT,
            CWM_WINDOWS,
        ),
        defaults={
            **ROPE_DEFAULTS,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": 8192,
            "max_position_embeddings": 131072,
        },
        tensors=LLAMA_TENSORS,
    ),
    Family(
        model_type="qwen3_5_moe_text",  # goes out as qwen3_next
        architecture="Qwen3_5MoeForCausalLM",
        rules=(
            *without(QWEN_STATE, "mlp.width"),
            UNUSED_WIDTH,
            TEXT_ROPE,
            *QWEN_SHARED_EXPERT,
            Fixed("router_renorm", True),
            NO_DENSE_LAYERS,
        ),
        defaults={
            **QWEN_STATE_DEFAULTS,
            **QWEN_SHARED_EXPERT_DEFAULTS,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        tensors=with_leaf("weight", QWEN_HYBRID | EXPERTS | ONE_SHARED_EXPERT),
        of_mixers={"delta": with_leaf("weight", QWEN35_LINEAR) | QWEN_RATES},
        arrangements=QWEN_ARRANGEMENTS,
        norms_below_one=True,
        unread=("mtp.",),
    ),
    # Kimi K2; the folder has code that is not run. Goes out as deepseek_v3.
    replace(DEEPSEEK_V3, model_type="kimi_k2", code="deepseek_v3"),
)}
