"""data/start_tokens.py: what a run reads of prepared files whose tokenizer begins documents with a token,
beside lists of tokens that are written by hand.
"""

import numpy as np
import pytest
import torch
from prepared_data import prepare_rows
from ranks import MODEL
from tokenizer_families import FAMILIES, make_tokenizer

import train
from config import ConfigError
from config.reading import resolve, split_argv
from data.indexed import IndexedDataset, IndexedDatasetWriter
from data.loader import open_loader
from data.start_tokens import StartedDocuments
from data.tokenizer import load_tokenizer
from parallel.microbatch import IGNORE_INDEX
from runtime.failure import fail_cleanly
from scripts import average, evaluate

TEXTS = [f"{'the cat sat ' * (number % 7)}on mat {number}" for number in range(50)]
ROWS = [{"text": text} for text in TEXTS]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Documents in files as prepare_data makes them, with a tokenizer that puts bos before a text."""
    home = tmp_path_factory.mktemp("starts")
    assert prepare_rows(ROWS, make_tokenizer("llama3", home / "tok"), home / "data") == 0
    return home


def documents_by_hand(home, start):
    """[start] + text + [eod] of each document, by the tokenizers library; whether each token is a start."""
    import tokenizers

    own = tokenizers.Tokenizer.from_file(str(home / "tok" / "tokenizer.json"))
    bos, eod = own.token_to_id(FAMILIES["llama3"].bos), own.token_to_id(FAMILIES["llama3"].eos)
    front = [bos] if start else []
    return [[*front, *own.encode(text, add_special_tokens=False).ids, eod] for text in TEXTS], bos


def written(home, name, documents, tokenizer=True):
    """The prefix of a file with these documents."""
    tok = load_tokenizer(home / "tok")
    with IndexedDatasetWriter(home / name, tok.vocab) as writer:
        for ids in documents:
            writer.add(ids)
        writer.finish(tok if tokenizer else None, 1)
    return home / name


def settings(home, path, *more):
    words = ["--data.path", path, "--data.split", "90,10", "--train.steps", "3", "--log.dir", home, *more]
    return ["llama3-tiny", *MODEL, *map(str, words)]


def loader(home, path, *more):
    name, file, rest = split_argv(settings(home, path, *more))
    return open_loader(resolve(name, file, rest), "train", 0, 1)


def test_any_range_is_that_of_the_documents_by_hand(home):
    documents, bos = documents_by_hand(home, True)
    stream = np.concatenate(documents)
    firsts = np.cumsum([0, *map(len, documents)])
    index = StartedDocuments(IndexedDataset(home / "data"), bos)
    assert (index.tokens, index.documents) == (len(stream), len(documents))
    assert [index.document_start(number) for number in range(len(firsts))] == firsts.tolist()
    draw = np.random.default_rng(0)
    for _ in range(300):
        first, stop = sorted(draw.choice(len(stream) + 1, 2, replace=False).tolist())
        assert index.read(first, stop).tolist() == stream[first:stop].tolist()
        assert index.counted(first, stop).tolist() == (stream[first:stop] != bos).tolist()
        inside = firsts[(firsts > first) & (firsts < stop)]
        assert index.document_starts(first, stop).tolist() == inside.tolist()
        assert index.document_at(first) == (firsts <= first).sum() - 1


@pytest.mark.parametrize("more", [(), ("--data.doc_mask", "true"), ("--data.pack", "best_fit")], ids=str)
def test_batches_hold_start_tokens_and_count_none(home, more):
    documents, bos = documents_by_hand(home, True)
    stream = np.concatenate(documents).tolist()
    data = loader(home, home / "data", *more)
    text = " ".join(map(str, stream))
    num_starts = 0
    for step in range(6):
        for batch in data.microbatches(step):
            for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist()):
                num_starts += tokens.count(bos)
                assert bos not in targets
                if "best_fit" not in more:
                    assert " ".join(map(str, tokens)) in text
    assert num_starts > 10
    assert data.prompts.document("a")[0] == bos


def test_a_file_that_has_start_tokens_is_read_as_it_is(home):
    documents, bos = documents_by_hand(home, True)
    there = loader(home, written(home, "there", documents))
    put = loader(home, home / "data")
    assert there.tokens == put.tokens
    for ours, theirs in zip(there.microbatches(1), put.microbatches(1)):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
    with pytest.raises(ConfigError, match="data.bos: false, but documents of .* begin with .*; leave"):
        loader(home, home / "there", "--data.bos", "false")
    documents[::2] = [ids[1:] for ids in documents[::2]]
    with pytest.raises(ConfigError, match="data.bos: some documents of .* and others do not; prepare"):
        loader(home, written(home, "mixed", documents))


def test_data_bos_false_puts_no_start_token(home):
    documents, bos = documents_by_hand(home, False)
    data = loader(home, home / "data", "--data.bos", "false")
    assert bos not in torch.cat([batch.tokens for batch in data.microbatches(0)])
    assert data.datasets[0].index.tokens == sum(map(len, documents))


def test_files_whose_documents_are_not_known_are_refused(home):
    documents, _ = documents_by_hand(home, False)
    np.concatenate(documents).astype("<u2").tofile(home / "raw.bin")
    words = ("--data.tokenizer", home / "tok")
    with pytest.raises(ConfigError, match="data.bos: .*raw.bin has no .idx .*data.bos false reads it"):
        loader(home, home / "raw.bin", *words)
    assert loader(home, home / "raw.bin", *words, "--data.bos", "false").tokens > 0
    documents, bos = documents_by_hand(home, True)
    np.concatenate(documents).astype("<u2").tofile(home / "begun.bin")
    assert loader(home, home / "begun.bin", *words).tokens > 0

    bare = written(home, "bare", documents, tokenizer=False)
    with pytest.raises(ConfigError, match="data.bos: .*bare does not say which tokenizer made it"):
        loader(home, bare, "--data.bos", "true")


def test_a_run_does_not_resume_with_the_other_choice(home, tmp_path, capsys):
    words = ["--log.name", "run", "--log.dir", tmp_path]
    assert train.main(settings(home, home / "data", *words)) == 0
    more = [*words, "--train.steps", "5", "--data.bos", "false"]
    said = "give the same data and data.bos, or start a new run .*init_changes data.bos$"
    with pytest.raises(ConfigError, match=said):
        train.main(settings(home, home / "data", *more))


# ---- how much counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--data.doc_mask", "true"), ("--data.pack", "best_fit")], ids=str)
def test_what_the_header_says_to_count_is_what_batches_count(home, more):
    """The share in three steps of four sequences."""
    data = loader(home, home / "data", *more)
    counts = data.count_targets(3)
    batches = [batch for step in range(3) for batch in data.microbatches(step)]
    targets = torch.cat([batch.targets for batch in batches])
    assert (counts.looked_at, counts.places) == (12, targets.numel())
    assert counts.targets == int((targets != IGNORE_INDEX).sum()) < counts.places
    assert counts.cut is None


def test_the_header_says_how_much_of_conversations_begins_before_its_sequence(home, tmp_path):
    """In the plain format, which has no token for a beginning of its own; all by hand from the lists."""
    make_tokenizer("llama3", tmp_path / "tok")
    (tmp_path / "tok" / "chat_template.jinja").unlink()
    # the second answer counts where the first is cut away
    turns = [("user", "the cat sat"), ("assistant", "on the mat")] * 2
    rows = [{"messages": [{"role": role, "content": text * (1 + number % 3)} for role, text in turns]}
            for number in range(40)]
    assert prepare_rows(rows, tmp_path / "tok", tmp_path / "chats", "--chat") == 0

    data = loader(tmp_path, tmp_path / "chats")
    counts = data.count_targets(3)
    cut = counted = 0
    for step in range(3):
        for batch in data.microbatches(step):
            for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist()):
                begins = False  # has a start token been seen in this sequence?
                for token, target in zip(tokens, targets):
                    begins |= token == data.prompts.start.id
                    counted += target != IGNORE_INDEX
                    cut += target != IGNORE_INDEX and not begins
    assert (counts.targets, counts.cut) == (counted, cut) and cut > 0


def test_the_prompt_of_samples_is_there_where_the_start_token_ends_documents_too(home, tmp_path):
    """GPT-2's <|endoftext|> is both."""
    assert prepare_rows(ROWS, make_tokenizer("gpt2", tmp_path / "tok"), tmp_path / "data") == 0
    data = loader(tmp_path, tmp_path / "data", "--data.bos", "true")
    assert data.prompts.start.id == data.tokenizer.eod
    assert data.opening_words() == "on mat 0"


def test_a_file_of_ids_has_what_ends_documents_in_front_of_them(tmp_path):
    """Where a tokenizer has one token for both, as GPT-2's: the first document alone has none before it."""
    home = make_tokenizer("gpt2", tmp_path / "tok")
    tok = load_tokenizer(home)
    assert tok.eod == tok.contract.start.id
    ids = np.concatenate([[*tok.encode(text), tok.eod] for text in TEXTS]).astype("<u2")
    ids.tofile(tmp_path / "raw.bin")
    words = settings(tmp_path, tmp_path / "raw.bin", "--data.tokenizer", home, "--log.name", "raw")
    assert train.main([*words, "--data.bos", "true"]) == 0


def test_data_that_names_no_tokenizer_is_not_read_otherwise_than_data_that_does(home, tmp_path, capsys):
    """It would have neither the start token nor the end of the others."""
    documents, _ = documents_by_hand(home, False)
    bare = written(home, "nameless", documents, tokenizer=False)
    blend = f"0.5 {home / 'data'} 0.5 {bare}"
    told = f"data.path: {bare} does not say .*{home / 'data'} does; .*tokenizer"
    with pytest.raises(ConfigError, match=told):
        loader(home, blend)
    named = loader(home, blend, "--data.tokenizer", home / "tok")
    assert all(isinstance(dataset.index, StartedDocuments) for dataset in named.datasets)

    words = settings(home, home / "data", "--log.dir", tmp_path, "--log.name", "run")
    assert train.main(words) == 0
    run, names = str(tmp_path / "run"), str(bare)
    assert fail_cleanly(evaluate.main, [run, "--data", names]) == 2
    assert "begin with '<|begin_of_text|>'" in (told := capsys.readouterr().err) and "--tokenizer" in told
    assert fail_cleanly(evaluate.main, [run, "--data", names, "--tokenizer", str(home / "tok")]) == 0


def test_models_whose_documents_begin_otherwise_are_not_averaged(home, tmp_path, capsys):
    for name, bos in (("with", "true"), ("without", "false")):
        words = settings(home, home / "data", "--log.dir", tmp_path, "--log.name", name, "--data.bos", bos)
        assert train.main(words) == 0
    folders = [str(tmp_path / name) for name in ("with", "without", "mean")]
    assert fail_cleanly(average.main, folders) == 2
    assert "begin differently" in capsys.readouterr().err and not (tmp_path / "mean").exists()
