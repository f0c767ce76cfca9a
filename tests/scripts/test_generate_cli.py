"""scripts.generate: what it writes is what the model says when it reads the whole text again for each
token.
"""

import json

import pytest
import torch
from ranks import MODEL, SIZES, corpus, write_documents
from tokenizer_families import write_one_word

import train
from checkpoint.trained import load_run
from config import ConfigError
from data.tokenizer import load_tokenizer
from scripts.generate import main

FAMILIES = {
    "llama2-tiny": MODEL,
    "gpt2-tiny": (*MODEL, "--model.context", "32"),
    "mistral-tiny": (*MODEL, "--model.mixer.window", "5"),
    "deepseek-v2-lite-tiny": (*SIZES, "--model.mlp.experts", "4", "--model.mlp.width", "16"),
}
PROMPT, NEW = "abc", 12


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a run of each family, trained for six steps at a rate that leaves no token likely
    everywhere.
    """
    home = tmp_path_factory.mktemp("generate")
    data = corpus(home)
    for name, model in FAMILIES.items():
        words = [*model, "--train.steps", "6", "--optim.lr", "0.03", "--train.dtype", "fp64"]
        place = ("--data.path", data, "--log.dir", str(home), "--log.name", name)
        assert train.main([name, *words, *place]) == 0
    return home


def read_anew(run, length: int) -> tuple[str, list[int]]:
    """The likeliest tokens after PROMPT, each from a forward over all that stands before it, without a
    cache.
    """
    loaded = load_run(str(run), torch.device("cpu"))
    ids = start = loaded.tokenizer.encode(PROMPT)
    for _ in range(length):
        places = torch.arange(len(ids))[None]
        with torch.no_grad():
            logits = loaded.stage.logits(torch.tensor([ids]), places, position=len(ids) - 1)
        ids = [*ids, int(logits.argmax())]
    return PROMPT + loaded.tokenizer.decode(ids[len(start) :]), ids


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_likeliest_text_is_that_of_a_model_without_a_cache(home, capsys, name):
    text, ids = read_anew(home / name, NEW)
    words = [str(home / name), "--prompt", PROMPT, "--max-new-tokens", str(NEW), "--temperature", "0"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("tokens_per_s") > 0
    assert told == {"text": text, "prompt_tokens": len(PROMPT), "new_tokens": NEW}
    assert len(set(ids)) > 3  # not a constant
    (checkpoint,) = (home / name / "checkpoints").glob("step_*")
    assert main([str(checkpoint), *words[1:]]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_samples_have_seeds_that_follow_each_other(home, capsys):
    words = [str(home / "llama2-tiny"), "--max-new-tokens", "8"]

    def texts(*more: str) -> list[str]:
        assert main([*words, "--json", *more]) == 0
        return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]

    three = texts("--samples", "3", "--seed", "5")
    assert three == texts("--seed", "5") + texts("--seed", "6") + texts("--seed", "7")
    assert len(set(three)) == 3
    assert texts("--top-k", "1") == texts("--temperature", "0") == texts("--top-p", "1e-9")
    assert main([*words, "--samples", "2"]) == 0
    lines = capsys.readouterr().out.split("--- sample ")
    assert lines[0] == "" and [part.split("\n")[0] for part in lines[1:]] == ["0", "1"]


def test_threads_are_those_that_are_asked_for(home, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    words = [str(home / "llama2-tiny"), "--max-new-tokens", "1"]
    assert main(words) == 0 and main([*words, "--threads", "3"]) == 0
    assert asked == [3]
    with pytest.raises(ConfigError, match="^--threads: 0; at least 1$"):
        main([*words, "--threads", "0"])


def test_learned_positions_end_the_text(home, capsys):
    """As many tokens as there are positions are read; the one after the last of them is still written."""
    assert main([str(home / "gpt2-tiny"), "--prompt", "a" * 30, "--max-new-tokens", "50", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["new_tokens"] == 3
    assert err == "note: the text ends where the 32 learned positions of the model do\n"
    with pytest.raises(ConfigError, match="^--prompt: 33 tokens, and the model has 32 learned positions"):
        main([str(home / "gpt2-tiny"), "--prompt", "a" * 33])


def test_a_text_beyond_the_context_says_so(home, capsys):
    """Rotary positions go on; the model was not trained on them."""
    context = load_run(str(home / "llama2-tiny"), torch.device("cpu")).cfg.model.context
    words = [str(home / "llama2-tiny"), "--max-new-tokens", "3", "--temperature", "0", "--prompt"]
    assert main([*words, "a" * (context - 8)]) == 0 and capsys.readouterr().err == ""
    assert main([*words, "a" * context]) == 0
    assert f"were made for {context:,} (model.context)" in capsys.readouterr().err


def test_words_that_the_tokenizer_does_not_know_are_counted(tmp_path, capsys):
    data = write_documents(tmp_path / "data", [[0] * 30] * 60, load_tokenizer(write_one_word(tmp_path)))
    settings = [*MODEL, "--train.steps", "1", "--data.path", data, "--log.name", "r"]
    assert train.main(["llama2-tiny", *settings, "--log.dir", str(tmp_path)]) == 0
    capsys.readouterr()
    told = "unknown to the tokenizer json-3: the model does not see what they say"
    cases = (
        ("--prompt a/a", []),
        ("--prompt a/b/b/c", [f"3 of the 4 tokens of --prompt are {told} ('b', 'c')"]),
        ("--chat a --chat a", [told]),  # of the plain format
        ("--chat b --chat a/b --chat b/c --chat c/b", [f"{told} ('b')", f"{told} ('c')"]),
    )
    for words, notes in cases:
        words = [word.replace("/", " ") for word in words.split()]
        assert main([str(tmp_path / "r"), *words, "--max-new-tokens", "1", "--temperature", "0"]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == len(notes) and all(map(str.endswith, lines, notes)), lines


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "words",
    ["--max-new-tokens 0", "--temperature -1", "--samples 0", "--top-k 0", "--top-p 0", "--top-p 1.5"],
)
def test_what_is_out_of_range_is_refused(home, words):
    with pytest.raises(ConfigError, match=f"^{words.split()[0]}: out of range"):
        main([str(home / "llama2-tiny"), *words.split()])
