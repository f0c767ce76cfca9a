"""Text that a tokenizer loses: counted by prepare_data, refused above a share, and not in bits per
byte. From a user's files on, with small tokenizers of each kind.
"""

import io
import json

import prepared_data
import pytest
import sentencepiece
import tokenizers
from prepared_data import byte_level_bpe, metrics, prepare_rows, write_jsonl
from ranks import MODEL

import train
from config import ConfigError
from data import prepare, tokenizer
from data.indexed import IndexedDataset
from data.lengths import is_exact
from data.prompts import open_prompts
from scripts import evaluate

TEXTS = ["def f(x):\n    return  x\n", "漢字 かな", "Привет 🙂"]
PLAIN = ["some words to learn from and more words", "aaa bbb ccc some more of them"]
END = {"tokenizer_config.json": json.dumps({"eos_token": "</s>"})}


def made(kind, home):
    """A tokenizer of each kind that learned nothing but PLAIN."""
    home.mkdir()
    if kind in ("unigram", "bpe"):  # sentencepiece's defaults
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(PLAIN * 9), model_writer=model, model_type=kind, vocab_size=40,
            minloglevel=3, hard_vocab_limit=False,
        )
        (home / "tokenizer.model").write_bytes(model.getvalue())
        return home
    if kind == "ours":
        tokenizer.train_bpe(PLAIN * 9, 285, home / "tokenizer.model")
        return home
    special = ["</s>", "<unk>"]
    if kind == "lower":  # as many bytes as before, and other ones
        some = byte_level_bpe((), 258, special)
        some.normalizer = tokenizers.normalizers.Lowercase()
    else:
        models, trainers = tokenizers.models, tokenizers.trainers
        model, trainer = {"word": (models.WordLevel, trainers.WordLevelTrainer),
                          "json-bpe": (models.BPE, trainers.BpeTrainer)}[kind]
        some = tokenizers.Tokenizer(model(unk_token="<unk>"))
        some.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        some.train_from_iterator(PLAIN, trainer(vocab_size=300, special_tokens=special, show_progress=False))
    some.save(str(home / "tokenizer.json"))
    for name, content in END.items():
        (home / name).write_text(content)
    return home


def prepared(tmp_path, texts, home, *more):
    return prepare_rows([{"text": text} for text in texts], home, tmp_path / "out", *more)


def report_of(capsys):
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind, unknown", [
    ("unigram", "漢字 б"), ("word", "漢字 б"), ("json-bpe", "漢 字 б"), ("ours", ""), ("lower", ""),
])
def test_what_a_tokenizer_does_not_know_is_named(tmp_path, kind, unknown):
    prompts = open_prompts(tokenizer.load_tokenizer(made(kind, tmp_path / "t")), None)
    assert prompts.unknown_texts("aaa 漢字  б aaa") == unknown.split()


@pytest.mark.parametrize("kind", ["unigram", "bpe", "word", "json-bpe", "lower"])
def test_what_is_lost_is_counted_and_refused(tmp_path, capsys, kind):
    home = made(kind, tmp_path / "t")
    texts = [text.upper() for text in PLAIN] if kind == "lower" else TEXTS
    assert prepared(tmp_path, texts, home) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--max-lost" in err and " % of the text's bytes" in err
    assert not (tmp_path / "out.idx").exists()

    assert prepared(tmp_path, texts, home, "--max-lost", "100", "--json") == 0
    report = report_of(capsys)
    whole = sum(len(text.encode()) for text in texts)
    back = [tokenizer.load_tokenizer(home).decode(ids) for ids in documents(tmp_path / "out")]
    least = sum(max(0, len(text.encode()) - len(there.encode())) for text, there in zip(texts, back))
    least = sum(letter.isupper() for text in texts for letter in text) if kind == "lower" else least // 2
    assert least <= report["lost_bytes"] <= whole and report["lost_bytes"] > 0.01 * whole
    assert (report["unknown_tokens"] > 0) == (kind != "lower")
    meta = IndexedDataset(tmp_path / "out").meta
    assert (meta["lost_bytes"], meta["unknown_tokens"]) == (report["lost_bytes"], report["unknown_tokens"])
    assert prepared(tmp_path, texts, home, "--max-lost", "100") == 0
    assert f"{report['lost_bytes']:,} bytes" in " ".join(capsys.readouterr().out.split())


def documents(out):
    data = IndexedDataset(out)
    return [data.document(number)[:-1].tolist() for number in range(data.documents)]


@pytest.mark.parametrize("kind", ["ours", "bytes"])
def test_a_tokenizer_that_knows_all_bytes_loses_nothing(tmp_path, capsys, kind):
    home = kind if kind == "bytes" else made(kind, tmp_path / "t")
    assert prepared(tmp_path, [*TEXTS, " begins", "\n"], home, "--json") == 0
    report = report_of(capsys)
    assert report["lost_bytes"] == report["unknown_tokens"] == 0


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_report_is_the_same_from_batches_of_any_size(tmp_path, capsys, monkeypatch, is_chat):
    """With unknown tokens, empty, bad and long documents, and keys that nothing reads."""
    home = made("word", tmp_path / "t")
    rows = [{"text": text} for text in [*TEXTS, "", *PLAIN, None, *TEXTS, None, ""]]
    words = []
    if is_chat:
        said = [[("user", row["text"]), ("assistant", row["text"] or "")] * (1 + number % 4)
                for number, row in enumerate(rows)]
        rows = [{"messages": [{"role": role, "content": text, "mood": 1} for role, text in chat]}
                for chat in said]
        words = ["--chat", "--seq-len", 24, "--long", "anywhere"]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    found = []
    for size in (1, 50, 1 << 20):
        monkeypatch.setattr(prepare, "BATCH_CHARACTERS", size)
        out = tmp_path / f"{size}"
        command = ["--input", source, "--tokenizer", home, "--out", out, "--max-lost", 100, "--skip-bad"]
        assert prepared_data.prepare(*command, "--json", *words) == 0
        report, data = report_of(capsys), IndexedDataset(out)
        assert (report["documents"], report["tokens"]) == (data.documents, data.tokens)
        assert report["counted"] == data.meta.get("counted", 0)
        found.append({key: value for key, value in report.items() if "second" not in key and key != "out"})
    assert found[0] == found[1] == found[2]
    assert all(found[0][name] for name in ("unknown_tokens", "lost_bytes", "bad", "documents"))


@pytest.mark.parametrize("kind, own", [
    ("bytes", True), ("unigram", True), ("ours", True), ("lower", True), ("word", False), ("json-bpe", False),
])
def test_bytes_of_tokens_are_those_of_the_text_where_the_decoder_adds_none(tmp_path, kind, own):
    tok = tokenizer.load_tokenizer(kind if kind == "bytes" else made(kind, tmp_path / "t"))
    assert is_exact(tok, {"lost_bytes": 0, "text_bytes": 9000}) == own
    assert not is_exact(tok, {"lost_bytes": 9, "text_bytes": 9000})


def test_the_share_that_is_lost_is_of_the_bytes_of_the_text(tmp_path, capsys):
    """4 of 1,000 bytes are two characters that nothing has learned: 0.4 %."""
    home = made("unigram", tmp_path / "t")
    text = "some words " * 90 + "é é"
    text = "a" * (1000 - len(text.encode())) + text
    assert len(text.encode()) == 1000
    assert prepared(tmp_path, [text], home, "--max-lost", "0.39") == 2
    assert "0.4" in capsys.readouterr().err


def test_shards_that_were_refused_are_kept_for_the_next_start(tmp_path, capsys):
    """The same command with a larger share has nothing left to do."""
    home = made("word", tmp_path / "t")
    assert prepared(tmp_path, TEXTS, home) == 2
    assert prepared(tmp_path, TEXTS, home, "--max-lost", "100") == 0
    assert "nothing was left to tokenize" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_that_nothing_can_make_good_ends_the_work(tmp_path, workers):
    """Not after all of it: the second of four files is enough to know."""
    home = made("word", tmp_path / "t")
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("漢字 " * 3000)
    inputs = [str(tmp_path / f"{number}.txt") for number in range(4)]
    with pytest.raises(ConfigError, match="loses .*--max-lost 30 %"):
        prepare.prepare_corpus(
            inputs, str(home), tmp_path / "out", workers=workers, unit_bytes=20_000, max_lost=30
        )
    assert len(list((tmp_path / "out.parts").glob("00*.json"))) < 4


@pytest.mark.parametrize("share", ["-1", "nan", "101"])
def test_a_share_out_of_range_is_refused(tmp_path, capsys, share):
    assert prepared(tmp_path, TEXTS, "bytes", f"--max-lost={share}") == 2
    assert capsys.readouterr().err.startswith("error: --max-lost: ")


@pytest.mark.parametrize("kind, prints", [("unigram", False), ("ours", True)])
def test_bits_per_byte_are_of_the_true_bytes_or_none(tmp_path, capsys, kind, prints):
    home = made(kind, tmp_path / "t")
    assert prepared(tmp_path, [*TEXTS, *PLAIN] * 40, home, "--max-lost", "100") == 0
    words = ["llama2-tiny", *MODEL, "--data.path", tmp_path / "out", "--train.steps", "1"]
    more = ["--log.dir", tmp_path, "--log.name", "r", "--checkpoint.every", "1"]
    capsys.readouterr()
    assert train.main([str(word) for word in [*words, *more]]) == 0
    out = capsys.readouterr().out
    values = metrics(tmp_path / "r", "val_bpb")
    assert values and all((value is not None) == prints for value in values)
    assert ("bpb" in out) == prints
    assert evaluate.main([str(tmp_path / "r")]) == 0
    assert ("bits per byte" in capsys.readouterr().out) == prints


@pytest.mark.parametrize("words, kept", [
    (["--long", "anywhere"], 2), (["--long", "turns"], 2), (["--skip-bad"], 1),
])
def test_what_is_lost_of_conversations_that_are_cut_is_counted_once(tmp_path, capsys, words, kept):
    """Letters that the tokenizer makes small are lost: of the conversations that are written, each once."""
    home = made("lower", tmp_path / "t")
    (home / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    said = [("user", "Ab </s> cD"), ("assistant", "EF")]
    chats = [said, said * 30]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    text = "".join(f"{role} {content}</s>" for chat in chats[:kept] for role, content in chat)

    command = ["--chat", "--seq-len", 64, "--max-lost", 100, "--json", *words]
    assert prepare_rows(rows, home, tmp_path / "out", *command) == 0
    report = report_of(capsys)
    assert (report["text_bytes"], report["lost_bytes"]) == (len(text), sum(map(str.isupper, text)))
    assert (report["documents"] > kept) == ("turns" in words) and report["long"] == 1


@pytest.mark.parametrize("answer, lost", [("more words", 0), ("more 漢字 words", 6)])
def test_control_tokens_of_a_template_are_not_lost(tmp_path, capsys, answer, lost):
    """The ids of this tokenizer have no texts of their own, so whole conversations are decoded."""
    home = made("word", tmp_path / "t")
    (home / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }} </s> {% endfor %}{% if add_generation_prompt %} {% endif %}"
    )
    said = [{"role": "user", "content": "some words"}, {"role": "assistant", "content": answer}]
    command = ["--chat", "--max-lost", 100, "--json"]
    assert prepare_rows([{"messages": said}], home, tmp_path / "out", *command) == 0
    report = report_of(capsys)
    assert (report["lost_bytes"], report["unknown_tokens"]) == (lost, int(lost > 0))
