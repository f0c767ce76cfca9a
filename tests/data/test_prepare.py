"""data/prepare.py and its script: the same bytes whatever the workers, the kills and the kind of input."""

import gzip
import io
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import sysconfig
import time
from types import SimpleNamespace

import numpy as np
import pytest

from config import ConfigError, DataConfig
from data import documents, prepare, progress, tokenizer
from data.indexed import IndexedDataset
from scripts import prepare_data

ROOT = pathlib.Path(__file__).parents[2]
ENDS = (".bin", ".idx", ".crc", ".json")
UNIT = 20_000  # bytes: many units from little text


def texts(count=300, seed=0):
    rng = random.Random(seed)
    words = ["def", "return", "self", "x", "\n", "    ", "日本", "é", "(a, b)", "0123"]
    return [f"{i} " + " ".join(rng.choice(words) for _ in range(rng.randrange(1, 120))) for i in range(count)]


def jsonl(rows, key="text"):
    return "".join(
        json.dumps({key: t, "n": i}, ensure_ascii=i % 2 == 0) + "\n" for i, t in enumerate(rows)
    ).encode()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("in") / "a.jsonl"
    path.write_bytes(jsonl(texts()))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tok") / "t.model"
    tokenizer.train_bpe(texts(), 300, path)
    return str(path)


def content(out):
    """The content of its files, but for the time and the command in the .json."""
    found = {end: pathlib.Path(f"{out}{end}").read_bytes() for end in ENDS}
    sidecar = json.loads(found[".json"])
    if sidecar.pop("provenance", None):
        sidecar.pop("sha256")  # of the .json itself
    return {**found, ".json": sidecar}


def read_back(out):
    data, tok = IndexedDataset(out), tokenizer.load_tokenizer(f"{out}.tokenizer")
    return [tok.decode(data.document(i).tolist()) for i in range(data.documents)]


def test_texts_come_back_and_the_report_counts_them(corpus, model, tmp_path):
    report = prepare.prepare_corpus([corpus], model, tmp_path / "o", unit_bytes=UNIT)
    assert read_back(tmp_path / "o") == texts()
    data = IndexedDataset(tmp_path / "o")
    assert all(data.document(i)[-1] == 2 for i in range(300)) and report["shards"] > 4
    assert report["documents"] == 300 and report["tokens"] == data.tokens
    assert data.meta["text_bytes"] == sum(len(t.encode()) for t in texts())
    assert data.meta["tokenizer"]["fingerprint"] == tokenizer.load_tokenizer(model).fingerprint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.bin", "o.crc", "o.idx", "o.json", "o.tokenizer"]
    prepare.prepare_corpus([corpus], model, tmp_path / "p", append_eod=False)
    assert read_back(tmp_path / "p") == texts() and IndexedDataset(tmp_path / "p").tokens == data.tokens - 300


def test_workers_and_units_do_not_change_a_byte(corpus, model, tmp_path):
    found = []
    for workers, unit in ((1, UNIT), (2, UNIT), (1, 3001), (1, 10**9)):
        out = tmp_path / f"{workers}-{unit}"
        prepare.prepare_corpus([corpus], model, out, workers=workers, unit_bytes=unit)
        found.append(content(out))
    assert all(other == found[0] for other in found)


def test_every_kind_of_file_is_read(tmp_path):
    pa, zstandard = pytest.importorskip("pyarrow"), pytest.importorskip("zstandard")
    import pyarrow.parquet as pq

    rows, folder = texts(60), tmp_path / "in"
    folder.mkdir()
    raw = jsonl(rows)
    # BOM, CRLF, blank lines; two members; several frames
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + raw.replace(b"\n", b"\r\n\r\n"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(raw[:500]) + gzip.compress(raw[500:]))
    frame = zstandard.ZstdCompressor().compress
    (folder / "c.jsonl.zst").write_bytes(frame(raw[:999]) + frame(b"") + frame(raw[999:]))
    pq.write_table(pa.table({"text": rows, "other": range(60)}), folder / "d.parquet", row_group_size=7)
    (folder / "e.txt").write_text("one\ndocument", newline="")
    (folder / "sub").mkdir()
    (folder / "sub" / "f.md.gz").write_bytes(gzip.compress(b"zwei\r\nDokumente"))
    (folder / "ignored.png").write_bytes(b"\x89PNG")
    prepare.prepare_corpus([str(folder)], "bytes", tmp_path / "o", unit_bytes=3000)
    assert read_back(tmp_path / "o") == rows * 4 + ["one\ndocument", "zwei\r\nDokumente"]
    prepare.prepare_corpus([f"{folder}/*.jsonl*", f"{folder}/e.txt"], "bytes", tmp_path / "p")
    assert read_back(tmp_path / "p") == rows * 3 + ["one\ndocument"]


def test_a_hugging_face_data_set_is_read(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for k in range(3):
        (tmp_path / "set" / f"train-{k}.jsonl").write_bytes(jsonl(texts(20, k), "body"))
    prepare.prepare_corpus([f"hf:{tmp_path}/set"], "bytes", tmp_path / "o", key="body")
    assert read_back(tmp_path / "o") == [t for k in range(3) for t in texts(20, k)]
    with pytest.raises(ConfigError, match="hf:/no/such/set: "):
        prepare.prepare_corpus(["hf:/no/such/set"], "bytes", tmp_path / "o")


@pytest.mark.parametrize("name, config, split", [
    ("wiki", None, "train"),
    ("wiki:en", "en", "train"),
    ("wiki:test", None, "test"),
    ("wiki:en:test", "en", "test"),
    ("wiki::test", None, "test"),
    ("wiki:en:", "en", "train"),
    ("wiki:", None, "train"),
])
def test_the_name_of_a_hugging_face_data_set_says_config_and_split(monkeypatch, name, config, split):
    """One word is a config where the set has one of that name, else a split."""
    asked = []
    hub = SimpleNamespace(
        get_dataset_config_names=lambda repo: {"wiki": ["en", "de"]}[repo],
        load_dataset=lambda *args, **how: asked.append((args, how)),
    )
    monkeypatch.setitem(sys.modules, "datasets", hub)
    documents.hf_dataset(name)
    assert asked == [(("wiki", config), {"split": split, "streaming": True})]
    with pytest.raises(ConfigError, match=r"hf:a:b:c:d: write hf:NAME\[:CONFIG\]\[:SPLIT\]"):
        documents.hf_dataset("a:b:c:d")


def test_the_standard_library_is_found_without_its_tests():
    files = documents.stdlib_files()
    names = {os.path.basename(f) for f in files}
    assert {"argparse.py", "ast.py", "heapq.py"} <= names and len(files) > 300
    assert not any(part in documents.SKIP for f in files for part in pathlib.Path(f).parts[-3:])


def test_a_tokenizer_is_trained_on_no_more_text_than_it_needs(tmp_path, monkeypatch):
    """A document more is read only where characters are left."""
    monkeypatch.setattr(prepare, "TRAINING_CHARACTERS", 12)
    path = tmp_path / "a.jsonl"
    for texts_, taken in ((["abcdef"] * 9, 2), (["abcde"] * 9, 3), (["a" * 99] * 2, 1), (["", "abc"] * 2, 2)):
        path.write_bytes(jsonl(texts_))
        (unit,) = documents.plan_units([str(path)])
        job = prepare.TokenizeJob(parts="", key="text", append_eod=True, skip_bad=False)
        assert len(list(prepare.training_texts([unit], job, None))) == taken


def test_a_standard_library_that_has_changed_is_prepared_again(tmp_path, monkeypatch):
    source, found = tmp_path / "a.py", []
    monkeypatch.setattr(documents, "stdlib_files", lambda: [str(source)])
    for number in (1, 1, 2):
        source.write_text(f"x = {number}\n")
        found.append(prepare.prepare_stdlib(tmp_path / "cache", "bytes"))
        assert read_back(found[-1][0]) == [f"x = {number}\n"]
    assert [how.split()[0] for _, how in found] == ["made", "cached", "made"]


def test_any_fifth_of_the_standard_library_is_a_fair_sample():
    """Of modules outside packages: in the order of their names a fifth has 10 to 65 % of them."""
    files, root = documents.stdlib_files(), sysconfig.get_paths()["stdlib"]
    single = [os.path.dirname(f) == root for f in files]
    n = len(files) // 5
    shares = [sum(single[i * n : (i + 1) * n]) / n for i in range(5)]
    assert max(shares) - min(shares) < 0.25, shares


# ---- kills -------------------------------------------------------------------------------------------------

RUN = """
import os, sys
from data import prepare
source, model, out, point, nth = sys.argv[1:]
left = [int(nth)]
def fault_point(name):
    if name == point:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), 9)
prepare.prepare_corpus([source], model, out, unit_bytes=20000, fault_point=fault_point)
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", prepare.FAULT_POINTS)
def test_a_start_killed_anywhere_is_finished_by_the_next(corpus, model, tmp_path, point):
    """Over an older data set: after the kill that one, none or the new one opens; after the second start, the
    new one's bytes.
    """
    out = tmp_path / "o"
    prepare.prepare_corpus([corpus], model, tmp_path / "want", unit_bytes=UNIT)
    prepare.prepare_corpus([corpus], "bytes", out, unit_bytes=UNIT)
    old, want = content(out), content(tmp_path / "want")
    nth = 3 if "shard" in point or "merge" in point else 1
    done = subprocess.run([sys.executable, "-c", RUN, corpus, model, str(out), point, str(nth)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    if pathlib.Path(f"{out}.idx").exists():
        IndexedDataset(out).read(0, 10)
        assert content(out) in (old, want)
    report = prepare.prepare_corpus([corpus], model, out, unit_bytes=UNIT)
    assert content(out) == want and read_back(out) == texts()
    kept = {
        "prepare.planned": 0, "prepare.mid_shard": 2, "prepare.pre_shard_commit": 2,
        "prepare.mid_shard_commit": 2, "prepare.post_shard": 3,
    }
    assert report["shards_kept"] == kept.get(point, report["shards"])
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("o")) == [
        "o.bin", "o.crc", "o.idx", "o.json", "o.tokenizer",
    ]


def die(point):
    """A fault in the merge."""
    if point == "prepare.mid_merge":
        raise ZeroDivisionError


def test_other_inputs_or_settings_start_over(corpus, model, tmp_path):
    def unfinished():
        with pytest.raises(ZeroDivisionError):
            prepare.prepare_corpus([corpus], model, tmp_path / "o", unit_bytes=UNIT, fault_point=die)

    for change in ({"key": "n"}, {"append_eod": False}, {"unit_bytes": 5000}):
        unfinished()
        said = []
        try:
            report = prepare.prepare_corpus(
                [corpus], model, tmp_path / "o", **{"unit_bytes": UNIT, **change}, say=said.append
            )
            assert report["shards_kept"] == 0
        except documents.BadDocument as e:
            assert "'n' holds no text but int" in str(e)
        assert "starting over" in said[0]
    unfinished()
    assert prepare.prepare_corpus([corpus], model, tmp_path / "o", unit_bytes=UNIT)["shards_kept"] > 4
    unfinished()
    (tmp_path / "o.parts" / "000001.bin").write_bytes(b"torn")  # a shard that lost its end is made again
    report = prepare.prepare_corpus([corpus], model, tmp_path / "o", unit_bytes=UNIT)
    assert report["shards_kept"] == report["shards"] - 1 and read_back(tmp_path / "o") == texts()


def test_a_first_try_that_made_nothing_is_not_spoken_of(tmp_path, model):
    """Its input is mended: nothing is lost, and nothing is said of another run's settings."""
    path, said = tmp_path / "a.jsonl", []
    path.write_bytes(jsonl(texts(20)) + b"{broken\n")
    with pytest.raises(documents.BadDocument):
        prepare.prepare_corpus([str(path)], model, tmp_path / "o", say=said.append)
    path.write_bytes(jsonl(texts(20)))
    report = prepare.prepare_corpus([str(path)], model, tmp_path / "o", say=said.append)
    assert report["documents"] == 20 and said == []


def test_the_speed_is_of_tokenizing_alone(corpus, tmp_path, monkeypatch):
    """By a clock that this test moves: 100 s for the tokenizer, 2 s for each shard, 7 s for the merge."""
    now = [0.0]
    monkeypatch.setattr(prepare, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slower(name, seconds):
        real = getattr(prepare, name)

        def wrapper(*args, **keywords):
            now[0] += seconds
            return real(*args, **keywords)

        monkeypatch.setattr(prepare, name, wrapper)

    slower("train_tokenizer", 100)
    slower("make_shard", 2)
    slower("merge_shards", 7)
    report = prepare.prepare_corpus([corpus], "bpe-300", tmp_path / "o", unit_bytes=UNIT)
    assert report["shards"] > 4 and report["tokenizing_seconds"] == 2 * report["shards"]
    assert report["seconds"] == 107 + 2 * report["shards"]
    assert report["tokenized_bytes"] == report["text_bytes"] == sum(len(t.encode()) for t in texts())

    speed = report["text_bytes"] / 1e6 / (2 * report["shards"])
    lines = prepare_data.summary({**report, "sample": "a b"}).splitlines()
    said = next(line for line in lines if line.startswith("speed"))
    assert said.split()[1:3] == [f"{speed:.1f}", "MB/s,"] and f"{report['seconds']:.1f} s in all" in said
    rest = {**report, "sample": "", "tokenized_bytes": 0, "tokenizing_seconds": 0.0}
    assert "nothing was left to tokenize" in prepare_data.summary(rest)


def test_the_report_fits_into_80_columns(corpus, tmp_path, model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    report = prepare.prepare_corpus([corpus], model, tmp_path / "o", unit_bytes=UNIT)
    report |= {"out": "o", "sample": "word " * 40, "chat": "TemplateChat", "counted": report["tokens"]}
    report["template"] = "additional_chat_templates/tool_use.jinja with tools"
    lines = prepare_data.summary(report).splitlines()
    assert max(map(len, lines[:-1])) <= 80
    # a command stays on one line, which can be copied
    assert lines[-1] == "next      python train.py --data.path o --data.pack best_fit --data.doc_mask true"
    assert "".join(lines).count("word") == 40


@pytest.mark.parametrize("documents, words, told", [
    (1, " --data.valid VALID", True),
    (2, " --data.split 1,1", False),
    (10, " --data.split 9,1", False),
    (11, "", False),
])
def test_the_next_command_leaves_documents_for_validation(tmp_path, documents, words, told):
    (tmp_path / "x.jsonl").write_bytes(jsonl(["some text of a page"] * documents))
    report = prepare.prepare_corpus([str(tmp_path / "x.jsonl")], "bytes", tmp_path / "o")
    lines = prepare_data.summary({**report, "sample": ""}).splitlines()
    assert lines[-1] == f"next      python train.py --data.path {tmp_path}/o{words}"
    assert ("one document leaves none for validation" in " ".join(lines)) == told
    split = words.partition("--data.split ")[2] or DataConfig().split
    index = IndexedDataset(tmp_path / "o")
    train, valid = map(int, split.split(","))
    assert (index.split_point(train, train + valid) < index.tokens) == (documents > 1)


def test_data_made_with_a_run_s_tokenizer_is_for_its_model(corpus, tmp_path, model):
    """Not for a new model of the quickstart's shape."""
    (tmp_path / "qwen/tokenizer").mkdir(parents=True)
    assert prepare_data.run_of_tokenizer(f"{tmp_path}/qwen/tokenizer") is None
    (tmp_path / "qwen/config.yaml").write_text("")
    run = prepare_data.run_of_tokenizer(f"{tmp_path}/qwen/tokenizer")
    assert run == tmp_path / "qwen" and prepare_data.run_of_tokenizer(str(model)) is None
    report = prepare.prepare_corpus([corpus], model, tmp_path / "o", unit_bytes=UNIT) | {"sample": ""}
    last = prepare_data.summary(report, run).splitlines()[-1]
    assert last == (f"next      python train.py --config {run}/config.yaml --log.name o "
                    f"--checkpoint.init_from {run} --data.path {tmp_path}/o")


def workers_of(pid):
    def line(child):
        try:
            return pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            return b""

    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if b"spawn_main" in line(c)]


def wait_for(what, seconds=20):
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_a_dead_worker_is_named_and_a_dead_parent_takes_its_workers_along(model, tmp_path):
    (tmp_path / "big.jsonl").write_bytes(jsonl(texts()) * 700)
    command = [sys.executable, "-m", "scripts.prepare_data", "--input", str(tmp_path / "big.jsonl")]
    command += ["--tokenizer", model, "--out", str(tmp_path / "o"), "--workers", "2"]
    for kill_parent in (False, True):
        run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert wait_for(lambda pid=run.pid: len(workers_of(pid)) == 2)
        workers = workers_of(run.pid)
        wait_for(lambda: (tmp_path / "o.parts" / "000000.bin.tmp").exists())
        os.kill(run.pid if kill_parent else workers[0], signal.SIGKILL)
        _, told = run.communicate(timeout=20)
        if not kill_parent:
            assert run.returncode == 2 and "a worker died (exit code -9)" in told.splitlines()[-1]
        assert wait_for(lambda all_of=workers: not any(pathlib.Path(f"/proc/{w}").exists() for w in all_of))


# ---- bad input ---------------------------------------------------------------------------------------------

BAD = [
    (b"\xff\xfe", "invalid UTF-8"),
    (b'{"text": "a', "broken JSON"),
    (b"[1]", "not an object"),
    (b"{}", "no text under 'text'"),
    (b'{"text": 3}', "holds no text but int"),
    (b'{"text": "\\ud800"}', "lone surrogate"),
    (b"[" * 5_000, "broken JSON"),
    (b'{"text": null}', "no text under"),
]


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("line,why", BAD)
def test_bad_lines_are_named_and_skipped_on_request(tmp_path, line, why):
    good = jsonl(texts(40)).splitlines(keepends=True)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(good[:30]) + line + b"\n" + b"".join(good[30:]) + b'{"text": ""}\n' + line)
    for unit in (10**9, 500):  # in one piece, and cut so that the line numbers must be put together
        with pytest.raises(documents.BadDocument, match=f"x.jsonl:31: .*{why}.*--skip-bad") as e:
            prepare.prepare_corpus([str(path)], "bytes", tmp_path / "o", unit_bytes=unit)
        assert "\n" not in str(e.value)
    report = prepare.prepare_corpus([str(path)], "bytes", tmp_path / "o", unit_bytes=500, skip_bad=True)
    assert (report["bad"], report["empty"], report["documents"]) == (2, 1, 40)
    assert read_back(tmp_path / "o") == texts(40)
    assert [b.split(": ")[0] for b in report["bad_records"]] == [f"{path}:31", f"{path}:43"]


def test_a_start_without_skip_bad_does_not_reuse_shards_of_one_with_it(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(jsonl(texts(20)) + b"broken\n")

    settings = {"unit_bytes": 500, "skip_bad": True, "fault_point": die}
    with pytest.raises(ZeroDivisionError):
        prepare.prepare_corpus([str(tmp_path / "x.jsonl")], "bytes", tmp_path / "o", **settings)
    with pytest.raises(documents.BadDocument, match="x.jsonl:21"):
        prepare.prepare_corpus([str(tmp_path / "x.jsonl")], "bytes", tmp_path / "o", unit_bytes=500)


@pytest.mark.slow
def test_the_first_fault_is_told_by_many_workers(tmp_path):
    rows = jsonl(texts(400)).splitlines(keepends=True)
    for i in (350, 200, 120, 90):
        rows[i] = b"broken\n"
    (tmp_path / "x.jsonl").write_bytes(b"".join(rows))
    with pytest.raises(documents.BadDocument, match="x.jsonl:91: broken JSON"):
        prepare.prepare_corpus(
            [str(tmp_path / "x.jsonl")], "bytes", tmp_path / "o", unit_bytes=2000, workers=3
        )


@pytest.mark.parametrize("name,content,told", [
    ("x.txt", b"ok\nok\n\xc3(", "x.txt:3: invalid UTF-8 .byte 0xc3"),
    ("x.jsonl.gz", gzip.compress(jsonl(texts()))[:-900], "cannot be read to the end"),
    ("x.jsonl.gz", b"not gzip", "cannot be read to the end: Not a gzipped"),
    ("x.jsonl.zst", b"not zstd", "cannot be read to the end: not zstd"),
    ("x.jsonl.zst", "cut", "cannot be read to the end: the file is truncated"),
    ("x.parquet", b"PAR1", "not a parquet file"),
    ("x.jsonl", b"", "holds nothing to read"),
    ("x.txt", b"", r"the input has no documents \(1 empty, 0 bad\)"),
    *((name, content, r"the input has no documents \(0 empty, 0 bad\)")
      for name, content in (("x.jsonl", b"\n \r\n"), ("x.jsonl.gz", b""))),
    ("x.jsonl", b'{"text": ""}\n' * 3, r"no documents \(3 empty"),
    ("none.jsonl", None, "no such file"),
])
def test_files_that_cannot_be_read_are_refused_in_one_line(tmp_path, name, content, told):
    path = tmp_path / name
    if content == "cut":
        content = pytest.importorskip("zstandard").ZstdCompressor().compress(jsonl(texts()))[:-50]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as e:
        prepare.prepare_corpus([str(path)], "bytes", tmp_path / "o")
    assert "\n" not in str(e.value) and name in str(e.value)


def test_a_column_that_is_not_there_is_refused_with_those_there_are(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "x.parquet")
    with pytest.raises(
        ConfigError, match="x.parquet: no column 'text'; it has body, n: choose with --jsonl-key"
    ):
        prepare.prepare_corpus([str(tmp_path / "x.parquet")], "bytes", tmp_path / "o")


def nested_rows() -> list[dict]:
    return [{"id": n, "data": {"text": f"page {n}", "meta": {"body": f"body {n}"}}, "a.b": f"own {n}"}
            for n in range(7)]


@pytest.mark.parametrize("key,word", [("data.text", "page"), ("data.meta.body", "body"), ("a.b", "own")])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_key_may_be_a_path(tmp_path, key, word, kind):
    rows = nested_rows()
    if kind == "jsonl":
        (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    words = ["--input", tmp_path / f"x.{kind}", "--tokenizer", "bytes", "--out", tmp_path / "o"]
    assert script(*words, "--text-key", key) == 0
    found = IndexedDataset(tmp_path / "o")
    tokens = found.read(0, found.tokens)
    assert bytes(tokens[tokens < 256].astype(np.uint8)).decode() == "".join(f"{word} {n}" for n in range(7))


@pytest.mark.parametrize("key", ["data.none", "data.text.more", "none.text"])
def test_a_key_whose_path_is_not_there_is_refused(tmp_path, key):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in nested_rows()))
    with pytest.raises(ConfigError, match=rf"x.jsonl:1: no text under '{key}' .see --jsonl-key"):
        prepare.prepare_corpus([str(tmp_path / "x.jsonl")], "bytes", tmp_path / "o", key=key)


def test_a_second_process_at_the_same_out_is_refused(corpus, tmp_path):
    def second(name):
        if name == "prepare.planned":
            with pytest.raises(ConfigError, match="another process works on this --out"):
                prepare.prepare_corpus([corpus], "bytes", tmp_path / "o")

    prepare.prepare_corpus([corpus], "bytes", tmp_path / "o", fault_point=second)


# ---- the script --------------------------------------------------------------------------------------------


def script(*args):
    return prepare_data.main([str(a) for a in args])


def test_the_script_reports_what_it_has_made(corpus, tmp_path, capsys):
    words = ["--input", corpus, "--workers", 1]
    assert script(*words, "--tokenizer", "bpe-300", "--out", tmp_path / "o", "--json") == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert out.count("\n") == 1
    assert (report["documents"], report["tokenizer"]) == (300, "bpe-300")
    assert report["sample"].startswith("0 ")
    assert script(*words, "--tokenizer", tmp_path / "o.tokenizer", "--out", tmp_path / "p") == 0
    assert "300 documents" in capsys.readouterr().out and content(tmp_path / "p") == content(tmp_path / "o")


@pytest.mark.parametrize("args,told", [
    (["--input", "none.txt", "--tokenizer", "bytes"], "none.txt: no such file"),
    (["--input", "stdlib", "--tokenizer", "x"], "tokenizer x: No such"),
    (["--input", "stdlib", "--tokenizer", "bytes", "--workers", 0], "--workers: 0"),
    (["--input", __file__, "--tokenizer", "bpe-99999"], "ask for bpe-"),
    ([], ""),
    (["--input", "a", "--tokenizer", "b", "--worker-count", "2"], ""),
])
def test_the_script_says_mistakes_in_one_line(tmp_path, capsys, args, told):
    assert script(*args, *(["--out", tmp_path / "o"] if args else [])) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and told in err


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from scripts.prepare_data import main
sys.exit(main())
"""


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("limit", [5_000, 60_000])
def test_a_full_disk_is_code_82_and_the_same_command_finishes(corpus, model, tmp_path, limit):
    """In a shard and in the merge: 82, one line with the path; nothing half is left to be read."""
    args = ["--input", *[corpus] * 3, "--tokenizer", model, "--out", str(tmp_path / "o"), "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(limit), *args], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 82, done.stderr
    assert done.stderr.count("\n") == 1 and str(tmp_path / "o") in done.stderr
    assert not (tmp_path / "o.idx").exists()
    assert script(*args) == 0 and read_back(tmp_path / "o") == texts() * 3


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_the_share_the_speed_and_the_time_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for stream in (Terminal(), io.StringIO()):
        bar = progress.Progress(stream)
        for now[0], done in ((0, 0), (10, 50_000_000), (20, 100_000_000)):
            bar.show(done, 100_000_000)
        bar.end()
        assert "50%  50.0 of 100.0 MB  5.0 MB/s  eta 10s" in stream.getvalue()
        assert ("\r" in stream.getvalue()) == stream.isatty() and stream.getvalue().endswith("\n")


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_is_the_bytes_of_all_that_is_done(model, tmp_path, workers):
    """Units of two files each, and a last one of one: every report counts the files before it in its unit,
    too.
    """
    paths, told = [tmp_path / f"{i}.txt" for i in range(5)], []
    for i, path in enumerate(paths):
        path.write_text("some words " * (20 + i))
    sizes = [path.stat().st_size for path in paths]
    prepare.prepare_corpus(
        [str(path) for path in paths], model, tmp_path / "o", unit_bytes=sum(sizes[:2]) + 60,
        workers=workers, progress=lambda done, whole: told.append((done, whole)),
    )
    assert {whole for _, whole in told} == {sum(sizes)} and told[0][0] == 0
    done = [each for each, _ in told]
    assert done == sorted(done) and done[-1] == sum(sizes)
    if workers == 1:
        assert {sum(sizes[:2]), sum(sizes[:4])} <= set(done)


def test_a_limit_of_tokens_ends_after_the_unit_that_reaches_it(corpus, model, tmp_path):
    """And progress shows the bytes that this takes, as the units before let expect."""
    size, told = os.path.getsize(corpus), []
    whole = prepare.prepare_corpus([corpus], model, tmp_path / "whole", unit_bytes=UNIT)
    limit = whole["tokens"] // 2
    some = prepare.prepare_corpus(
        [corpus], model, tmp_path / "some", unit_bytes=UNIT, limit_tokens=limit,
        progress=lambda done, whole: told.append((done, whole)),
    )
    assert limit <= some["tokens"] < limit + whole["tokens"] * 1.5 * UNIT / size
    ids = IndexedDataset(tmp_path / "whole").read(0, some["tokens"])
    assert (IndexedDataset(tmp_path / "some").read(0, some["tokens"]) == ids).all()
    assert told[0] == (0, size) and 0.4 * size < told[-1][1] < 0.75 * size
    assert all(done <= expected for done, expected in told)


def test_progress_within_a_unit_is_the_bytes_up_to_the_last_line(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 1)
    paths, ends = [], []
    for number in range(3):
        paths.append(str(tmp_path / f"{number}.jsonl"))
        lines = jsonl([f"text {line}" for line in range(4)]).splitlines(keepends=True)
        pathlib.Path(paths[-1]).write_bytes(b"".join(lines))
        ends += [len(line) for line in lines]
    told = []
    prepare.prepare_corpus(paths, "bytes", tmp_path / "o", progress=lambda done, whole: told.append(done))
    assert told == sorted(told) and set(told) == {0, *np.cumsum(ends).tolist()}


def test_lines_of_a_piece_are_counted_from_its_file_s_start_in_jsonl_alone(tmp_path):
    """Rows of a table and documents of a hub's data set are numbers already."""
    path = tmp_path / "d"
    path.write_text("{}\n" * 9)
    assert documents.piece_location(documents.DocumentPiece("jsonl", str(path), 6, 27, 21), 2) == f"{path}:4"
    assert documents.piece_location(documents.DocumentPiece("jsonl", str(path), 0, 27, 27), 2) == f"{path}:2"
    assert documents.piece_location(documents.DocumentPiece("parquet", str(path), 6, 7, 21), 2) == f"{path}:2"
    assert documents.piece_location(documents.DocumentPiece("hf", str(path), 6, 9, 21), 2) == f"hf:{path}:2"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_script_says_that_memory_ran_out_in_one_line(tmp_path, workers):
    """A line of 600 MB that unpacks from 600 KB, in processes that may take 400 MB more."""
    with gzip.open(tmp_path / "bomb.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(600):
            file.write(b"a" * 1_000_000)
    code = f"""
import resource, sys
from scripts.prepare_data import main
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 400_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
if __name__ == "__main__":
    sys.exit(main(["--input", "bomb.txt.gz", "--tokenizer", "bytes", "--out", "o", "--workers", "{workers}"]))
"""
    (tmp_path / "limited.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "limited.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 81, done
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "error: out of memory: a document, or what one line of a compressed file unpacks to, does not fit; "
        "split it, or use fewer --workers"
    ]
    assert "Traceback" not in done.stderr
