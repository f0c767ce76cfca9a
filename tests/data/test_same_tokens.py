"""data/same_tokens.py: which rows of an embedding keep their meaning under another tokenizer."""

import pytest
import tokenizers
from tokenizer_families import FAMILIES, make_tokenizer

from data.same_tokens import NONE, ids_by_text
from data.tokenizer import load_tokenizer


@pytest.fixture
def named(tmp_path):
    """named(family) -> (our tokenizer, its ids by name, from the file itself)"""

    def make(name: str, **settings):
        home = make_tokenizer(name, tmp_path / name)
        of_file = tokenizers.Tokenizer.from_file(str(home / "tokenizer.json"))
        return load_tokenizer(home), of_file.token_to_id

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tokenizer_keeps_every_row_of_itself(named, name):
    tok, _ = named(name)
    found = ids_by_text(tok, tok)
    texts = [tok.processor.id_to_token(number) for number in range(tok.vocab)]
    for number, other in enumerate(found.tolist()):
        # a letter and the byte of it have one text: the letter is what texts are made of
        assert other == number or texts[number].startswith("<0x") and len(texts[other]) == 1


@pytest.mark.parametrize("there, here", [("llama2", "gpt2"), ("llama2", "olmo"), ("llama3", "gpt2")])
def test_a_token_that_ends_and_begins_documents_is_one_that_ends_them(named, there, here):
    source, id_there = named(there)
    target, id_here = named(here)
    family = FAMILIES[here]
    assert family.eos == family.bos
    assert ids_by_text(source, target)[id_here(family.eos)] == id_there(FAMILIES[there].eos)


def test_a_name_goes_before_what_a_token_is_for(named):
    """gpt2 ends documents with <|endoftext|>, qwen2 with <|im_end|>, and it has both."""
    source, id_there = named("qwen2")
    target, id_here = named("gpt2")
    assert ids_by_text(source, target)[id_here("<|endoftext|>")] == id_there("<|endoftext|>")
    smollm, get_id = named("smollm")
    found = ids_by_text(target, smollm)
    assert found[get_id("<|endoftext|>")] == id_here("<|endoftext|>")
    assert found[get_id("<|im_end|>")] == id_here("<|endoftext|>")  # ends documents here, and has no other


def test_rows_are_found_by_text_across_kinds_of_tokenizers(named):
    source, id_there = named("llama2")
    target, id_here = named("llama3")
    found = ids_by_text(source, target)
    assert found[id_here("a")] == id_there("a") and found[id_here("Ġ")] == id_there("▁")
    assert found[id_here("Ċ")] == id_there("<0x0A>")
    assert found[id_here("<|start_header_id|>")] == NONE
