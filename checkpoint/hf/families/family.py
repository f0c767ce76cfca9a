"""A Hugging Face family: how config.json and the tensors of one model_type are written.

Export checks every field of ModelConfig and every tensor. A value that the family cannot express is refused,
so a new model key is refused until a rule covers it (its default must be the model without it), and so is a
tensor that Family.tensors does not name.
"""
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from checkpoint.hf.rules import FamilyError, Rule, TrackedKeys, read_parts, spell_out, write_rules
from config import ConfigError, ModelConfig, Tree, layer_model, modules_ahead
from config.reading.flat import FLAT_NAMES, LIMITS, flat_model
from config.reading.kinds import stated_leaves
from config.tree import has_path, is_below, value_at
from model.mlp import MLPConfig
from model.router import ExpertsConfig

# fields that affect training or speed, but not the function of the weights
NOT_THE_MODEL = ("mtp.weight", "preset", "mixer.kernel", "vocab_multiple", "dropout")
# Keys of any config.json that do not affect logits: provenance, tokens, what a call returns, dropout,
# training losses, and generation settings, which older folders have here.
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
# fields that hf.fold_mup multiplies into the weights
FOLDED = ("mup",)
# the numbers in our tensor names: layers.3.mlp.experts.7.up.weight
NUMBERED = re.compile(r"\b(layer|expert)s\.(\d+)\.")
LAYER = re.compile(r"\.layers\.(\d+)\.")  # in theirs


def changes_nothing(key: str) -> bool:
    """Return whether a key of any config.json does not affect logits. Keys that begin with _ are internal
    to transformers."""
    return key in NO_LOGITS or key.startswith("_")


def kind_before(model: ModelConfig, path: str) -> str:
    """Return the key that explains why the model lacks a key: the kind of its part, or the part that is
    none."""
    part = path.rpartition(".")[0]
    if not has_path(model, part):
        return kind_before(model, part)
    return part if value_at(model, part) is None else f"{part}.kind"


@dataclass(frozen=True)
class Arrangement:
    """How a tensor of theirs holds ours, stacked along rows.

    Rows come in groups. Each group has the first of our tensors' share of the rows, then the second's, and so
    on.
    """
    groups: int = 1
    transpose: bool = False  # of the resulting matrix
    inner: bool = False  # with a dim of size 1 after the rows (torch.nn.Conv1d)
    outer: bool = False  # with a dim of size 1 before the rows
    leading: int | None = None  # stacked along a leading dim
    turned: bool = False  # the halves of each of our groups are swapped


HEAD = "lm_head.weight"  # in most families
PLAIN_ARRANGEMENT = Arrangement()
ArrangementOf = Callable[[ModelConfig], Arrangement]  # takes the model of the tensor's layer


def head_if_tied(model: ModelConfig) -> dict[str, str]:
    """Return a second copy of the head, which may be stored if it is tied."""
    return {HEAD: "embed.weight"} if model.tied else {}


def head_and_mtp(model: ModelConfig) -> dict[str, str]:
    """Return the copies of embedding and head that each multi-token prediction module may have."""
    copies = head_if_tied(model)
    head = "embed.weight" if model.tied else "head.weight"
    for layer in range(model.layers, model.layers + modules_ahead(model)):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "embed.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = head
    return copies


@dataclass(frozen=True)
class Family:
    """How models of one model_type are written."""
    model_type: str
    architecture: str  # the model class of transformers
    rules: tuple[Rule, ...]
    defaults: dict[str, object]  # of transformers' config class: a config.json may omit values equal to them
    tensors: dict[str, str]  # {our name: their name}; {layer} and {expert} stand for numbers
    aliases: dict[str, str] = field(default_factory=dict)  # {second name of a key: key} (attribute_map)
    prefix: str = "model."  # of their names; base models without a head omit it
    copies: Callable[[ModelConfig], dict[str, str]] = head_if_tied  # {their name: our name} of a second copy
    # {their name in `tensors`: how it holds ours}, if more than ours concatenated
    arrangements: dict[str, ArrangementOf] = field(default_factory=dict)
    # {their name, with {layer}: value} of numbers in each layer that are not learned
    constants: dict[str, float] = field(default_factory=dict)
    tokenizer_keys: dict[str, object] = field(default_factory=dict)  # required in tokenizer_config.json
    norms_below_one: bool = False  # norm weights are stored as w - 1
    # {kind of a layer's mixer: {our name: their name}}: how such a layer differs from `tensors`
    of_mixers: dict[str, dict[str, str]] = field(default_factory=dict)
    # {kind of a layer's mixer: {part of a name in a folder: how we write it}}
    spellings: dict[str, dict[str, str]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # prefixes of their tensors that transformers does not load
    leaves_modules_ahead: bool = False  # nor does it load multi-token prediction layers after the last
    config: str = "config.json"  # where the model is described, for errors
    code: str = ""  # the model_type whose transformers code runs it, if it has none for this one
    within: str = ""  # likewise, a multimodal one, if it has this one only as a text part

    @property
    def head(self) -> str:
        """Their name of the output head."""
        return self.tensors.get("head.weight", HEAD)

    def read(self, hf_config: Tree) -> Tree:
        """Return {field of ModelConfig: value}, for config.build_tree. Raises FamilyError."""
        keys = TrackedKeys({**self.defaults, **self.with_first_names(hf_config)})
        values = read_parts(self.rules, keys)
        for key, value in hf_config.items():
            if value is not None and key not in keys.asked | set(self.aliases) and not changes_nothing(key):
                raise FamilyError(
                    f"{key} = {value!r}: this key is unknown for a {self.model_type}, so the model "
                    "may be a different one; remove the key from config.json if it changes nothing"
                )
        return values

    def with_first_names(self, hf_config: Tree) -> Tree:
        """Return the keys of hf_config, resolving second names (aliases).

        Raises FamilyError if a key has two values.
        """
        keys = dict(hf_config)
        for alias, key in self.aliases.items():
            if alias not in hf_config:
                continue
            value = hf_config[alias]
            if keys.setdefault(key, value) != value:
                raise FamilyError(
                    f"{key} = {keys[key]!r} and {alias} = {value!r} are the same key, and differ"
                )
        return keys

    def write(self, model: ModelConfig) -> Tree:
        """Return the config.json keys of a model without obstacles."""
        return write_rules(self.rules, spell_out(model))

    def obstacles(self, model: ModelConfig) -> list[str]:
        """Return all fields of the model whose values this family cannot express."""
        flat, lost = flat_model(model)
        explicit = spell_out(model)
        kinds = [rule for rule in self.rules if "mixer.kind" in rule.fields]
        found = [name for rule in kinds for name in rule.obstacles(explicit)]
        others = ["mixer"] if found else []  # parts of another kind, with other fields
        if not isinstance(flat.mlp, MLPConfig):
            others.append("mlp")
            found.append("mlp.kind")
        covered: set[str] = set()
        for rule in self.rules:
            reads_other = not rule.fields or any(is_below(name, others) for name in rule.fields)
            if others and reads_other:
                continue
            found += rule.obstacles(explicit)
            covered.update(rule.fields)
        found += [path for path in stated_leaves(flat) if not is_below(path, covered)]

        ignored = {*NOT_THE_MODEL, *FOLDED}
        if flat.experts is None:
            ignored |= (FLAT_NAMES | LIMITS).keys() - {"experts"}
        in_blocks = flat.experts is not None and not isinstance(model.mlp, ExpertsConfig)
        names = dict.fromkeys(FLAT_NAMES, "blocks") if in_blocks else FLAT_NAMES
        for name, path in LIMITS.items():
            is_stated = has_path(model, path) and value_at(model, path) is not None
            names = {**names, name: path if is_stated else "blocks"}
        ours = [names.get(name, name) for name in (*lost, *found) if not is_below(name, ignored)]
        return list(dict.fromkeys(
            name if has_path(model, name) else kind_before(model, name) for name in ours))

    def hf_name(self, key: str, model: ModelConfig) -> str:
        """Return their name of our tensor `key`. Raises ConfigError if the family has no such tensor.

        layers.3.attn.q.weight -> model.layers.3.self_attn.q_proj.weight
        """
        return self.template(key, model).format(**numbers_in(key))

    def template(self, key: str, model: ModelConfig) -> str:
        """Return their name of our tensor `key`, with {layer} and {expert}. Raises ConfigError like
        hf_name."""
        name = self.names(key, model).get(without_numbers(key))
        if name is None:
            raise ConfigError(f"{key}: this tensor has no form in {self.model_type} (Family.tensors)")
        return name

    def names(self, key: str, model: ModelConfig) -> dict[str, str]:
        """Return {our name: their name} for layers like that of our tensor `key`."""
        layer = numbers_in(key).get("layer")
        if not self.of_mixers or layer is None:
            return self.tensors
        own = self.of_mixers.get(layer_model(model, int(layer)).mixer.kind, {})
        return own | {ours: theirs for ours, theirs in self.tensors.items() if ours not in own}

    def usual_name(self, name: str, model: ModelConfig) -> str:
        """Return the canonical spelling of their tensor name; folders may use another."""
        layer = LAYER.search(name)
        if not self.spellings or layer is None:
            return name
        kind = layer_model(model, int(layer[1])).mixer.kind
        spellings = self.spellings.get(kind, {})
        other = next((part for part in spellings if part in name), None)
        return name if other is None else name.replace(other, spellings[other])

    def arrangement(self, key: str, model: ModelConfig) -> Arrangement:
        """Return how theirs holds our tensor `key`."""
        arrangement_of = self.arrangements.get(self.template(key, model))
        if arrangement_of is None:
            return PLAIN_ARRANGEMENT
        return arrangement_of(layer_model(model, int(numbers_in(key).get("layer", 0))))

    def get_constants(self, model: ModelConfig) -> dict[str, float]:
        """Return {their name: value} of numbers in the folder that are the same in every model."""
        layers = range(model.layers)
        return {name.format(layer=layer): value for name, value in self.constants.items() for layer in layers}

    def place_in_stack(self, key: str, model: ModelConfig) -> tuple[int, int]:
        """Return the sort key of our tensors within one of theirs: by expert, then in the order of
        `names`."""
        names = list(self.names(key, model))
        return int(numbers_in(key).get("expert", 0)), names.index(without_numbers(key))


def numbers_in(key: str) -> dict[str, str]:
    """Return the numbers in our name of a tensor: {"layer": "3"}."""
    return dict(NUMBERED.findall(key))


def without_numbers(key: str) -> str:
    """Replace numbers by placeholders: layers.3.attn.q.weight -> layers.{layer}.attn.q.weight."""
    return NUMBERED.sub(r"\1s.{\1}.", key)
