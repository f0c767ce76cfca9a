"""data/contract.py: what ends documents, which ids there are, and who said so; from a user's folder on."""

import json

import numpy as np
import pytest
import tokenizers
from prepared_data import byte_level_bpe, prepare_rows
from ranks import MODEL

import train
from config import ConfigError
from data import tokenizer
from data.indexed import IndexedDataset, IndexedDatasetWriter
from runtime.failure import fail_cleanly
from scripts import convert, evaluate, generate

ENDS = ("<|endoftext|>", "<|im_end|>", "</s>", "<pad>")


def make_folder(home, settings, added=ENDS, special=True):
    """A byte-level tokenizer.json with 256 bytes and `added`, and {file: its content} beside it."""
    home.mkdir(exist_ok=True)
    made = byte_level_bpe(["ab"])
    made.add_tokens([tokenizers.AddedToken(name, special=special, normalized=False) for name in added])
    made.save(str(home / "tokenizer.json"))
    for name, content in settings.items():
        (home / name).write_text(json.dumps(content))
    return home


def ids_of(home):
    return tokenizers.Tokenizer.from_file(str(home / "tokenizer.json")).token_to_id


def prepared(tmp_path, home, *more, texts=("one text", "another")):
    """The exit code of prepare_data on `texts`."""
    return prepare_rows([{"text": text} for text in texts], home, tmp_path / "out", *more)


def run_words(tmp_path, path, *more):
    words = ["llama2-tiny", *MODEL, "--data.path", path, "--train.steps", "1", "--eval.batches", "1"]
    return [str(word) for word in [*words, "--log.dir", tmp_path, "--log.name", "r", *more]]


# what published folders say, and what ends their documents; ids of the folder stand as names
TOKENIZER, CONFIG, GENERATION = "tokenizer_config.json", "config.json", "generation_config.json"
AGREE = {
    "llama2": ({TOKENIZER: "</s>", CONFIG: "</s>", GENERATION: "</s>"}, "</s>"),
    "llama3-instruct": (
        {TOKENIZER: "<|im_end|>", CONFIG: ["<|endoftext|>", "</s>", "<|im_end|>"],
         GENERATION: ["<|endoftext|>", "</s>", "<|im_end|>"]},
        "<|im_end|>",
    ),
    "qwen": ({TOKENIZER: "<|im_end|>", CONFIG: "<|im_end|>", GENERATION: ["<|im_end|>", "<|endoftext|>"]},
             "<|im_end|>"),
    "gemma": ({TOKENIZER: "</s>", CONFIG: ["</s>", "<|im_end|>"], GENERATION: ["</s>", "<|im_end|>"]},
              "</s>"),
    "phi4-mini": ({TOKENIZER: "<|endoftext|>", CONFIG: "<|endoftext|>",
                   GENERATION: ["<|im_end|>", "<|endoftext|>"]}, "<|endoftext|>"),
    "gpt2": ({CONFIG: "<|endoftext|>", GENERATION: "<|endoftext|>"}, "<|endoftext|>"),
    "lists-alone": ({CONFIG: ["<|im_end|>", "</s>"], GENERATION: ["</s>", "<|im_end|>"]}, "<|im_end|>"),
    "map": ({TOKENIZER: "</s>", "special_tokens_map.json": "</s>"}, "</s>"),
}
DIFFER = {
    "a-default-config": {TOKENIZER: "<|endoftext|>", CONFIG: "</s>"},
    "yi-chat": {TOKENIZER: "<|im_end|>", CONFIG: "</s>", GENERATION: "<|im_end|>"},
    "llama3-early": {TOKENIZER: "<|im_end|>", CONFIG: "<|endoftext|>",
                     GENERATION: ["<|endoftext|>", "<|im_end|>"]},
    "generation": {TOKENIZER: "</s>", GENERATION: ["<|endoftext|>", "<|im_end|>"]},
    "map": {TOKENIZER: "</s>", "special_tokens_map.json": "<|endoftext|>"},
    "text-config": {TOKENIZER: "</s>", CONFIG: {"text_config": "<|endoftext|>"}},  # of a model with images
}


def settings_of(home, said):
    """{file: content}: names where files write names, ids where they write ids."""
    make_folder(home, {})
    get_id = ids_of(home)

    def content(file, value):
        if isinstance(value, dict):
            return {key: content(file, inner) for key, inner in value.items()}
        if file in (CONFIG, GENERATION):
            ids = [get_id(name) for name in value] if isinstance(value, list) else get_id(value)
            return {"eos_token_id": ids}
        return {"eos_token": {"content": value} if file.startswith("special") else value}

    return {file: content(file, value) for file, value in said.items()}


@pytest.mark.parametrize("name", AGREE)
def test_files_that_agree_say_what_ends_a_document(tmp_path, capsys, name):
    said, end = AGREE[name]
    home = make_folder(tmp_path / "t", settings_of(tmp_path / "t", said))
    assert prepared(tmp_path, home) == 0
    want = ids_of(home)(end)
    data = IndexedDataset(tmp_path / "out")
    assert [int(data.document(number)[-1]) for number in range(2)] == [want, want]
    assert f"{end!r} (id {want})" in " ".join(capsys.readouterr().out.split())
    made_with = data.meta["tokenizer"]
    assert (made_with["eod"], made_with["eod_text"]) == (want, end)
    assert set(made_with["eod_named_by"]) == set(said)


@pytest.mark.parametrize("name", DIFFER)
def test_files_that_differ_are_refused_until_the_user_chooses(tmp_path, capsys, name):
    home = make_folder(tmp_path / "t", settings_of(tmp_path / "t", DIFFER[name]))
    get_id = ids_of(home)
    assert prepared(tmp_path, home) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "--eod" in told and "data.eod" in told
    assert sum(file in told for file in DIFFER[name]) >= 2
    assert not (tmp_path / "out.idx").exists()

    for choice in ("<|endoftext|>", get_id("</s>")):
        assert prepared(tmp_path, home, "--eod", choice) == 0
        want = get_id(choice) if isinstance(choice, str) else choice
        assert f"(id {want})" in capsys.readouterr().out
        assert IndexedDataset(tmp_path / "out").document(0)[-1] == want
        kept = tokenizer.load_tokenizer(tmp_path / "out.tokenizer")  # the copy has no contradiction
        assert kept.eod == want


def test_raw_ids_with_a_folder_that_contradicts_itself_need_data_eod(tmp_path):
    home = make_folder(tmp_path / "t", settings_of(tmp_path / "t", DIFFER["a-default-config"]))
    end = ids_of(home)("<|endoftext|>")
    ids = np.full(4000, 65, "<u2")
    ids[::40] = end
    ids.tofile(tmp_path / "x.bin")
    words = run_words(tmp_path, tmp_path / "x.bin", "--data.tokenizer", home, "--data.doc_mask", "true")
    with pytest.raises(ConfigError, match="tokenizer_config.json.*config.json.*data.eod"):
        train.main(words)
    assert train.main([*words, "--data.eod", "<|endoftext|>"]) == 0
    assert tokenizer.load_tokenizer(tmp_path / "r" / "tokenizer").eod == end


def test_a_run_refuses_another_end_than_that_of_its_data(tmp_path):
    home = make_folder(tmp_path / "t", settings_of(tmp_path / "t", AGREE["llama2"][0]))
    assert prepared(tmp_path, home, texts=["some words " * 9] * 99) == 0
    with pytest.raises(ConfigError, match="data.eod: .*'</s>' .id .*prepare"):
        train.main(run_words(tmp_path, tmp_path / "out", "--data.eod", "<|im_end|>"))
    other = make_folder(tmp_path / "o", {TOKENIZER: {"eos_token": "</s>"}}, added=(*ENDS, "<new>"))
    words = run_words(tmp_path, tmp_path / "out", "--data.tokenizer", other, "--data.eod", "</s>")
    with pytest.raises(ConfigError, match="data.tokenizer: .*/o is .* was made with"):  # the end is the same
        train.main(words)
    assert train.main(run_words(tmp_path, tmp_path / "out", "--data.eod", "</s>")) == 0


@pytest.mark.parametrize("settings, told", [
    ({CONFIG: {"eos_token_id": 50256}}, "config.json: eos_token_id 50256 .* ids 0 to 259"),
    ({CONFIG: {"eos_token_id": -1}}, "config.json: eos_token_id -1"),
    ({TOKENIZER: {"eos_token": "<|nothing|>"}}, "tokenizer_config.json: eos_token '<|nothing|>'"),
    ({}, "several tokens that may end a document.*'<|endoftext|>'.*'</s>'.*--eod"),
])
def test_an_end_that_is_not_there_is_refused(tmp_path, capsys, settings, told):
    """It was taken, and the model grew by 50,000 rows; or it was passed over without a word."""
    home = make_folder(tmp_path / "t", settings)
    assert prepared(tmp_path, home) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    pieces = told.replace("<|", "<.").split(".*")
    places = [err.replace("<|", "<.").find(piece.strip()) for piece in pieces]
    assert -1 not in places and places == sorted(places), err
    assert prepared(tmp_path, home, "--eod", "</s>") == 0


@pytest.mark.parametrize("choice", ["<|nothing|>", "260", "-1", "a"])
def test_a_choice_that_ends_nothing_is_refused(tmp_path, capsys, choice):
    """Not there, out of range, or what text makes."""
    home = make_folder(tmp_path / "t", settings_of(tmp_path / "t", AGREE["llama2"][0]))
    assert prepared(tmp_path, home, f"--eod={choice}") == 2
    assert capsys.readouterr().err.startswith("error: --eod: ")


def test_a_sentencepiece_model_and_a_file_beside_it_must_agree(tmp_path, capsys):
    tokenizer.train_bpe(["some words to learn from, and more"] * 9, 280, tmp_path / "tokenizer.model")
    (tmp_path / CONFIG).write_text(json.dumps({"eos_token_id": 7}))
    assert prepared(tmp_path, tmp_path / "tokenizer.model") == 2
    err = capsys.readouterr().err
    assert "tokenizer.model" in err and "config.json" in err and "'</s>' (id 2)" in err
    assert prepared(tmp_path, tmp_path / "tokenizer.model", "--eod", "</s>") == 0
    assert prepared(tmp_path, tmp_path / "tokenizer.model", "--eod", "<s>") == 2
    assert "tokenizer.model itself ends documents with '</s>' (id 2)" in capsys.readouterr().err
    assert prepared(tmp_path, "bytes", "--eod", "</s>") == 2


# ---- which ids there are -----------------------------------------------------------------------------------


def test_another_model_s_config_does_not_make_the_model_grow(tmp_path, capsys):
    """LlamaConfig's default of 32,000 beside a tokenizer of 260 ids."""
    said = {TOKENIZER: {"eos_token": "</s>"}, CONFIG: {"vocab_size": 32000}}
    home = make_folder(tmp_path / "t", said)
    assert prepared(tmp_path, home, texts=["some words " * 9] * 99) == 0
    assert "config.json" in (out := capsys.readouterr().out) and "32,000" in out  # said, since not followed
    assert tokenizer.load_tokenizer(home).vocab == 260
    assert train.main(run_words(tmp_path, tmp_path / "out")) == 0
    assert "\n  vocab: 260" in (tmp_path / "r" / "config.yaml").read_text()


def test_another_model_s_start_is_not_taken_for_a_control_token(tmp_path):
    """LlamaConfig's default of 1 is a plain letter of this tokenizer."""
    said = {TOKENIZER: {"eos_token": "</s>"}, CONFIG: {"bos_token_id": 1, "pad_token_id": 3}}
    home = make_folder(tmp_path / "t", said)
    assert prepared(tmp_path, home) == 0 == prepared(tmp_path, home, "--eod", "<|im_end|>")
    assert tokenizer.load_tokenizer(home).bos is None


def test_what_prepare_decided_is_printed_and_kept(tmp_path, capsys):
    settings = {TOKENIZER: {"eos_token": "</s>", "bos_token": "<|im_end|>", "pad_token": "<pad>"}}
    home = make_folder(tmp_path / "tok", settings)
    assert prepared(tmp_path, home) == 0
    said = json.loads((tmp_path / "out.json").read_text())["tokenizer"]
    ids = ids_of(home)
    for kind, text in (("eod", "</s>"), ("bos", "<|im_end|>"), ("pad", "<pad>")):
        assert said[kind] == ids(text) and said[f"{kind}_text"] == text
        assert said[f"{kind}_named_by"] == [TOKENIZER]
    printed = " ".join(capsys.readouterr().out.split())
    for label, text in (("end", "</s>"), ("start", "<|im_end|>"), ("pad", "<pad>")):
        assert f"{label} {text!r} (id {ids(text)})" in printed, printed


def test_ids_with_holes_are_all_of_the_vocabulary(tmp_path):
    """A count of tokens is less than the largest id where ids are left out."""
    home = make_folder(tmp_path / "t", {TOKENIZER: {"eos_token": "</s>"}})
    spec = json.loads((home / "tokenizer.json").read_text())
    for entry in spec["added_tokens"]:
        entry["id"] += 40
        spec["model"]["vocab"][entry["content"]] = entry["id"]
    (home / "tokenizer.json").write_text(json.dumps(spec))
    assert tokenizer.load_tokenizer(home).vocab == 300


@pytest.mark.parametrize("place", [5, 199_990])
@pytest.mark.parametrize("value, kind", [(-3, "<i4"), (300, "<i4"), (300, "<u2")])
def test_ids_out_of_range_are_refused_before_the_first_step(tmp_path, place, value, kind):
    """In Megatron's files, and in raw ones: with place and value, wherever they stand."""
    ids = np.full(200_000, 65, kind)
    ids[place] = value
    if kind == "<u2":
        ids.tofile(tmp_path / "x.bin")
        path, where = tmp_path / "x.bin", f"x.bin: token {place}"
    else:
        with IndexedDatasetWriter(tmp_path / "x", 70_000) as writer:
            for begin in range(0, len(ids), 10_000):
                writer.add(np.where(ids < 0, 66, ids)[begin:begin + 10_000])
            writer.finish(tokenizer.load_tokenizer("bytes"), 1)
        (tmp_path / "x.json").unlink()  # as Megatron's own
        ids.tofile(tmp_path / "x.bin")
        path, where = tmp_path / "x", f"x.bin: document {place // 10_000}, token {place % 10_000}"
    words = run_words(tmp_path, path, "--data.tokenizer", "bytes", "--log.name", "never")
    with pytest.raises(ConfigError, match=f"{where}: id {value} "):
        train.main(words)
    assert not (tmp_path / "never" / "metrics.jsonl").exists()


def test_a_large_file_is_sampled_and_the_run_says_so(tmp_path, monkeypatch, capsys):
    from data import indexed

    monkeypatch.setattr(indexed, "PROBED_BLOCKS", 2)
    np.full(3 * indexed.BLOCK, 65, "<u2").tofile(tmp_path / "x.bin")  # six blocks
    assert train.main(run_words(tmp_path, tmp_path / "x.bin", "--data.tokenizer", "bytes")) == 0
    assert "ids looked at in 2 of 6 blocks" in " ".join(capsys.readouterr().out.split())


# ---- an imported model -------------------------------------------------------------------------------------


@pytest.fixture
def published(transformers, tmp_path):
    """A model of transformers beside such a tokenizer: LlamaConfig's default end, 2, is a plain letter."""
    home = make_folder(tmp_path / "hf", {TOKENIZER: {"eos_token": "<|endoftext|>"}})
    small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    made = transformers.LlamaConfig(vocab_size=260, max_position_embeddings=64, **small)
    transformers.LlamaForCausalLM(made).save_pretrained(home)
    assert json.loads((home / CONFIG).read_text())["eos_token_id"] == 2
    return home


def test_one_choice_goes_in_and_out_of_an_imported_model(tmp_path, capsys, published):
    run, out = str(tmp_path / "run"), str(tmp_path / "out-hf")
    came_in = ["from-hf", str(published), run]
    assert fail_cleanly(convert.main, came_in) == 2
    told = capsys.readouterr().err
    assert "tokenizer_config.json" in told and "config.json" in told and "--eod" in told
    assert fail_cleanly(convert.main, [*came_in, "--eod", "<|endoftext|>"]) == 0
    end = ids_of(published)("<|endoftext|>")
    assert tokenizer.load_tokenizer(tmp_path / "run" / "tokenizer").eod == end

    # the run's own copy has no contradiction; the folder, if it is named, still has
    assert prepared(tmp_path, published, "--eod", end, texts=["some words " * 9] * 9) == 0
    for program, words in (
        (generate.main, [run, "--max-new-tokens", "2"]),
        (evaluate.main, [run, "--data", str(tmp_path / "out")]),
        (convert.main, ["to-hf", run, out]),
    ):
        assert fail_cleanly(program, [*words, "--tokenizer", str(published)]) == 2, words
        assert "--eod" in capsys.readouterr().err
        assert fail_cleanly(program, [*words, "--tokenizer", str(published), "--eod", str(end)]) == 0, words
    written = {name: json.loads((tmp_path / "out-hf" / name).read_text()) for name in (TOKENIZER, CONFIG)}
    assert written[TOKENIZER]["eos_token"] == "<|endoftext|>" and written[CONFIG]["eos_token_id"] == end


# ---- a folder that is corrected ----------------------------------------------------------------------------


def test_a_folder_that_is_corrected_after_a_failed_start_is_read_again(tmp_path, capsys):
    """A correction beside tokenizer.json changes no id of text; the input stays as it is."""
    home = make_folder(tmp_path / "t", {TOKENIZER: {"eos_token": "</s>", "bos_token": "</s>"}})
    (tmp_path / "bad.jsonl").write_text('{"text": "one text"}\nbroken\n')
    assert prepared(tmp_path, home, "--input", tmp_path / "bad.jsonl") == 2
    corrected = {"eos_token": "</s>", "bos_token": "<|im_end|>"}
    (home / TOKENIZER).write_text(json.dumps(corrected))
    assert prepared(tmp_path, home, "--input", tmp_path / "bad.jsonl", "--skip-bad") == 0
    assert json.loads((tmp_path / "out.tokenizer" / TOKENIZER).read_text()) == corrected
    assert "start     '<|im_end|>'" in capsys.readouterr().out
