"""A tokenizer.json of ours gives our ids, on everything we can think of, or is refused."""

import io
import random
import sysconfig
from pathlib import Path

import pytest
import sentencepiece

from checkpoint.hf import tokenizer as hf_tokenizer
from data import tokenizer

STDLIB = Path(sysconfig.get_paths()["stdlib"])
TEXTS = [
    (STDLIB / f"{name}.py").read_text(encoding="utf-8")
    for name in ("argparse", "ast", "heapq", "textwrap", "difflib")
]


@pytest.fixture(scope="module")
def bpe():
    return tokenizer.train_bpe([*TEXTS, "漢字かな 漢字 naïve café — “quoted” " * 20], 700)


def test_bpe_is_exact_on_real_lines_and_on_random_ones(bpe):
    theirs = hf_tokenizer.load_encoder(
        hf_tokenizer.check_exact(hf_tokenizer.from_sentencepiece(bpe.model), bpe.encode)
    )
    pieces = [bpe.processor.id_to_piece(i).replace("▁", " ") for i in range(259, bpe.vocab)]
    draw = random.Random(0)
    for n in range(4000):
        text = "".join(draw.choices(pieces if n % 2 else "aab =-_\n01é漢<s>▁\t", k=draw.randint(1, 16)))
        assert bpe.encode(text) == theirs(text), text


def test_an_exported_bpe_decodes_to_the_text(bpe):
    import tokenizers

    made = tokenizers.Tokenizer.from_str(
        hf_tokenizer.check_exact(hf_tokenizer.from_sentencepiece(bpe.model), bpe.encode)
    )
    for text in (TEXTS[0][:3000], "  two  spaces  ", "漢字 👩‍👩‍👧 naïve\n\n"):
        assert made.decode(made.encode(text).ids) == text


def test_the_byte_tokenizer_is_exact():
    ours = tokenizer.load_tokenizer("bytes")
    theirs = hf_tokenizer.load_encoder(
        hf_tokenizer.check_exact(hf_tokenizer.from_bytes(ours.eod), ours.encode)
    )
    every = "".join(map(chr, [*range(0x300), 0x2581, 0xFFFF, 0x1F600]))
    assert theirs(every) == ours.encode(every)


@pytest.mark.parametrize("settings, why", [
    ({"model_type": "unigram"}, "not a BPE model"),
    ({"add_dummy_prefix": True, "user_defined_symbols": ["<b>"]}, "space in front"),
    ({"remove_extra_whitespaces": True}, "repeated spaces"),
    ({"normalization_rule_name": "nmt_nfkc"}, "normalises"),
    ({"user_defined_symbols": ["a b"]}, "symbol of the user's"),
])
def test_what_cannot_be_exact_is_refused(settings, why):
    with pytest.raises(hf_tokenizer.ExportRefused, match=why):
        hf_tokenizer.from_sentencepiece(trained(**settings))


def trained(**settings) -> bytes:
    """A .model file that sentencepiece makes with other settings than ours."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[0].splitlines()),
        model_writer=model,
        vocab_size=500,
        minloglevel=3,
        byte_fallback=True,
        **{
            "model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
            "add_dummy_prefix": False, **settings,
        },
    )
    return model.getvalue()


def test_a_space_in_front_is_exact_in_both_directions():
    """Llama's and Mistral's models have one (add_dummy_prefix)."""
    import tokenizers

    model = trained(add_dummy_prefix=True)
    ours = sentencepiece.SentencePieceProcessor(model_proto=model)
    text = hf_tokenizer.check_exact(hf_tokenizer.from_sentencepiece(model), ours.encode)
    theirs, made = hf_tokenizer.load_encoder(text), tokenizers.Tokenizer.from_str(text)
    draw = random.Random(0)
    pieces = [ours.id_to_piece(i).replace("▁", " ") for i in range(259, ours.vocab_size())]
    for n in range(2000):
        line = "".join(draw.choices(pieces if n % 2 else "aab =-_\n01é漢<s>▁\t", k=draw.randint(0, 16)))
        assert ours.encode(line) == theirs(line), line
        assert ours.decode(ours.encode(line)) == made.decode(theirs(line), skip_special_tokens=False), line


def test_a_tokenizer_with_other_ids_is_refused(bpe):
    made = hf_tokenizer.from_sentencepiece(bpe.model)
    made["model"]["merges"] = made["model"]["merges"][::-1]
    with pytest.raises(hf_tokenizer.ExportRefused, match="the ids differ on"):
        hf_tokenizer.check_exact(made, bpe.encode)
