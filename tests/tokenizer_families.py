"""Tiny tokenizers of the kinds that published families have: the same special tokens, post-processor, way of
splitting text, and chat template, with a vocabulary of bytes and a few merges.
"""

import json
import pathlib
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

SPACE = "▁"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}" + CHATML
)
QWEN3 = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + "
    "m.content | trim + '<|eot_id|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}"
    "{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = m.role %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
SMOLLM = (
    "{% for m in messages %}{% if loop.first and messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OLMO = (  # marks of turns are words
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """The traits that tell the tokenizers of a family from others.

    splits: "bytes" (byte-level BPE), "prefix" (sentencepiece's, with a space before a text) or "spaces"
    (without). puts_start: does its post-processor put bos before a text? special, marks: added tokens,
    special and not. settings: more of tokenizer_config.json. stops: of generation_config.json.
    """
    splits: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    puts_start: bool = False
    template: str | None = None
    marks: tuple[str, ...] = ()
    settings: tuple[tuple[str, object], ...] = ()
    stops: tuple[str, ...] = ()


FAMILIES = {
    "llama2": Family("prefix", ("<unk>", "<s>", "</s>"), "</s>", "<s>", True, LLAMA2,
                     settings=(("add_bos_token", True),)),
    "llama3": Family(
        "bytes",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>", "<|begin_of_text|>", True, LLAMA3, stops=("<|end_of_text|>", "<|eot_id|>"),
    ),
    "qwen2": Family("bytes", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", template=QWEN2,
                    settings=(("add_bos_token", False),), stops=("<|im_end|>", "<|endoftext|>")),
    "qwen3": Family("bytes", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", template=QWEN3,
                    marks=("<think>", "</think>")),
    "mistral": Family("spaces", ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>", True, MISTRAL),
    "gemma": Family("spaces", ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
                    "<eos>", "<bos>", True, GEMMA, stops=("<eos>", "<end_of_turn>")),
    "deepseek": Family("bytes", ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
                       "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", True, DEEPSEEK,
                       marks=("<｜User｜>", "<｜Assistant｜>")),
    "phi3": Family(
        "prefix", ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>", "<s>", False, PHI3, settings=(("add_bos_token", False),),
        stops=("<|endoftext|>", "<|end|>"),
    ),
    "gpt2": Family("bytes", ("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>"),
    "smollm": Family("bytes", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_start|>",
                     template=SMOLLM),
    "olmo": Family("bytes", ("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>", template=OLMO),
}


def byte_level(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    """A byte-level BPE without the special tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["the cat sat on the mat, user assistant"] * 9, trainer)
    return made


def sentencepiece_like(special: tuple[str, ...], has_prefix: bool) -> tokenizers.Tokenizer:
    """Characters, bytes and a few merges, as a sentencepiece model has become one of `tokenizers`."""
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE]
    names += [chr(code) for code in range(33, 127)]
    merges = [("t", "h"), ("th", "e"), (SPACE, "the"), ("a", "t"), (SPACE, "s"), ("e", "r")]
    names += ["".join(merge) for merge in merges]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    steps = [normalizers.Prepend(SPACE)] if has_prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return made


def write_one_word(folder):
    """A tokenizer.json of the word a between blanks: all others are unknown. Returns the folder."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1, "<eos>": 2}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["<eos>"])
    words.save(str(folder / "tokenizer.json"))
    return folder


def make_tokenizer(name: str, home: pathlib.Path) -> pathlib.Path:
    """Writes the folder `home` of a tokenizer of this family."""
    family = FAMILIES[name]
    home.mkdir(parents=True, exist_ok=True)
    if family.splits == "bytes":
        made = byte_level(family.special)
    else:
        made = sentencepiece_like(family.special, family.splits == "prefix")
    added = [(text, True) for text in family.special] + [(text, False) for text in family.marks]
    for text, is_special in added:
        token = tokenizers.AddedToken(text, special=is_special, normalized=False)
        (made.add_special_tokens if is_special else made.add_tokens)([token])
    if family.puts_start:
        start = [(family.bos, made.token_to_id(family.bos))]
        made.post_processor = processors.TemplateProcessing(f"{family.bos} $A", special_tokens=start)
    elif family.splits == "bytes":
        made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.save(str(home / "tokenizer.json"))

    names = {"bos_token": family.bos, "eos_token": family.eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    settings = {**names, "clean_up_tokenization_spaces": False, **dict(family.settings)}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    if family.template:
        (home / "chat_template.jinja").write_text(family.template)
    if family.stops:
        ids = [made.token_to_id(text) for text in family.stops]
        (home / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return home
