"""scripts.corpus on a stand-in for the hosts: what it makes is what pyarrow and the tokenizers library make
of the same files, whatever is killed on the way, and a run trains on it.
"""

import gzip
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import yaml
from corpus_server import serving
from prepared_data import byte_level_bpe
from run_folder import steps
from waiting import wait_until

from data import corpora
from data.remote import PART_BYTES
from scripts import corpus

ROOT = pathlib.Path(__file__).parents[2]
END = "<|endoftext|>"
EDU, C4, DCLM, CLIMB = (
    "HuggingFaceFW/fineweb-edu/sample/10BT", "allenai/c4/en", "mlfoundations/dclm-baseline-1.0",
    "karpathy/climbmix-400b-shuffle",
)
SHARDS = 3
ROWS = 60  # of a shard
SCORE = "fasttext_openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train_prob"


def texts(seed: int) -> list[str]:
    stream = random.Random(seed)
    words = ["the", "shard", "of", "a", "corpus", "naïve", "日本", "0123", "\n", "(x)"]
    return [f"{seed} {n} " + " ".join(stream.choices(words, k=stream.randrange(5, 60))) for n in range(ROWS)]


def scores(seed: int) -> list[float]:
    stream = random.Random(-seed)
    return [round(stream.uniform(2.5, 5), 3) for _ in range(ROWS)]


def write_parquet(path: pathlib.Path, columns: dict) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=25)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """Files of four corpora as their hosts name them, and of what is not theirs."""
    zstandard = pytest.importorskip("zstandard")
    home = tmp_path_factory.mktemp("hosts")
    for shard in range(SHARDS):
        edu, climb, c4, dclm = (texts(100 * kind + shard) for kind in range(4))
        write_parquet(home / EDU / f"{shard:03d}_00000.parquet", {"text": edu, "score": scores(shard)})
        write_parquet(home / CLIMB / f"shard_{shard:05d}.parquet", {"text": climb})
        path = home / C4 / f"c4-train.{shard:05d}-of-01024.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(lines({"text": text, "url": "u"} for text in c4)))
        path = home / DCLM / "global-shard_01_of_10" / f"local-shard_{shard}_of_10"
        path.mkdir(parents=True)
        content = lines({"text": text, SCORE: score} for text, score in zip(dclm, scores(shard)))
        (path / "shard_00000000_processed.jsonl.zst").write_bytes(zstandard.compress(content))
    write_parquet(home / CLIMB / "shard_06542.parquet", {"text": ["held out"]})
    (home / C4 / "c4-validation.00000-of-00008.json.gz").write_bytes(gzip.compress(lines([{"text": "no"}])))
    (home / DCLM / "README.md").write_text("a card")
    return home


def lines(records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = byte_level_bpe(["the", "shard", "corpus"])
    made.add_tokens([tokenizers.AddedToken(END, special=True, normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder


def command(*words, **options):
    """Run scripts.corpus as a user does. Return what subprocess.run returns."""
    line = [sys.executable, "-m", "scripts.corpus", *map(str, words), "--workers", "1"]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, **options)


def error_line(stderr: str) -> str:
    """The one line that is no progress."""
    (line,) = (line for line in stderr.splitlines() if not line.startswith("prepare "))
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def in_order(paths) -> list[pathlib.Path]:
    """Of one corpus, whose names in the dataset are hashed."""
    def digest(path):
        owner = next(each for each in (EDU, C4, DCLM, CLIMB) if each in str(path)).split("/")[0]
        parts = path.parts[path.parts.index(owner) + 2 :]
        return hashlib.sha256("/".join(parts).encode()).hexdigest()

    return sorted(paths, key=digest)


def their_ids(tokenizer, chosen: list[str]) -> np.ndarray:
    theirs = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = theirs.token_to_id(END)
    return np.array([token for text in chosen for token in [*theirs.encode(text).ids, end]], "<u2")


def read_parquet(path) -> list[dict]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


def ids_of(out, name) -> np.ndarray:
    return np.fromfile(out / f"{name}.bin", "<u2")


def content(out) -> dict[str, bytes]:
    """Of all files, without time and command in the .json and what follows from them."""
    found = {}
    for path in sorted(file for file in out.rglob("*") if file.is_file() and file.name != "lock"):
        found[str(path.relative_to(out))] = path.read_bytes()
        if path.name in ("fineweb-edu-10bt.json", "c4.json"):
            sidecar = json.loads(path.read_bytes())
            inputs = sidecar.pop("provenance")["inputs"]
            sidecar.pop("sha256")
            found[str(path.relative_to(out))] = json.dumps([sidecar, [each["sha256"] for each in inputs]])
    return found


# ---- what is made ------------------------------------------------------------------------------------------


def test_a_mixture_over_http_has_the_tokens_of_the_libraries_and_trains(stand_in, tokenizer, tmp_path):
    out = tmp_path / "mix"
    with serving(stand_in) as server:
        done = command(
            "fineweb-edu-10bt:0.7", "dclm:0.3", "--min-score", 3.5, "--min-characters", 60,
            "--tokenizer", tokenizer, "--out", out, "--from", server.url,
        )
    assert done.returncode == 0, done.stderr
    kept = [
        row["text"] for path in in_order((stand_in / EDU).iterdir()) for row in read_parquet(path)
        if row["score"] >= 3.5 and len(row["text"]) >= 60
    ]
    assert 20 < len(kept) < SHARDS * ROWS - 20
    assert np.array_equal(ids_of(out, "fineweb-edu-10bt"), their_ids(tokenizer, kept))
    assert len(ids_of(out, "dclm")) > 1000
    assert not (out / "downloads").exists()

    (report,) = (line for line in done.stdout.splitlines() if line.startswith("fineweb-edu-10bt"))
    assert f"{SHARDS} files, {len(kept)} documents" in report
    assert f"{SHARDS * ROWS - len(kept)} filtered out" in report
    label, *next_step = done.stdout.splitlines()[-1].split()
    assert label == "next"
    assert yaml.safe_load((out / "data.yaml").read_text()) == {
        "data": {"path": f"0.7 {out}/fineweb-edu-10bt 0.3 {out}/dclm"}
    }
    run = subprocess.run(
        [sys.executable, *next_step[1:], "--train.steps", "2", "--train.seq_len", "32", "--eval.batches", "1",
         "--log.dir", str(tmp_path), "--log.name", "run"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )
    assert run.returncode == 0, run.stderr
    assert [row["step"] for row in steps(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("name, folder, read", [
    ("climbmix", CLIMB, read_parquet),
    ("c4", C4, lambda path: map(json.loads, gzip.open(path, "rt"))),
    ("dclm", DCLM, None),
])
def test_each_format_of_a_local_copy_is_read(stand_in, tokenizer, tmp_path, name, folder, read):
    """Without validation data, in the order of the hashes of the names."""
    import zstandard

    def read_zst(path):
        return map(json.loads, zstandard.decompress(path.read_bytes(), 1 << 20).splitlines())

    out = tmp_path / name
    done = command(name, "--tokenizer", tokenizer, "--out", out, "--from", stand_in)
    assert done.returncode == 0, done.stderr
    files = [
        path for path in (stand_in / folder).rglob("*")
        if path.is_file() and not {"shard_06542", "c4-validation", "README"} & {path.name.partition(".")[0]}
    ]
    assert len(files) == SHARDS
    chosen = [row["text"] for path in in_order(files) for row in (read or read_zst)(path)]
    assert len(chosen) == SHARDS * ROWS
    assert np.array_equal(ids_of(out, name), their_ids(tokenizer, chosen))
    record = json.loads((out / corpora.RECORD).read_text())
    assert [file["sha256"] for file in record["files"][name]] == [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in in_order(files)
    ]


def test_tokens_are_those_of_the_first_files_that_hold_them(stand_in, tokenizer, tmp_path):
    """The same with two workers, which have read further."""
    first, second, _ = (
        their_ids(tokenizer, [row["text"] for row in read_parquet(path)])
        for path in in_order((stand_in / EDU).iterdir())
    )
    words = ["fineweb-edu-10bt", "--tokenizer", str(tokenizer), "--from", str(stand_in)]
    for limit, workers, expected in (
        (len(first), 1, first),
        (len(first) + 1, 1, np.concatenate((first, second))),
        (len(first) + 1, 2, np.concatenate((first, second))),
    ):
        out = tmp_path / f"{limit}-{workers}"
        more = ["--out", str(out), "--tokens", str(limit), "--workers", str(workers)]
        assert corpus.main([*words, *more]) == 0
        assert np.array_equal(ids_of(out, "fineweb-edu-10bt"), expected)
    out = tmp_path / "files"
    assert corpus.main([*words, "--out", str(out), "--files", "1", "--tokens", "1M"]) == 0
    assert np.array_equal(ids_of(out, "fineweb-edu-10bt"), first)


def test_broken_records_are_refused_or_counted(tokenizer, tmp_path, capsys):
    file = tmp_path / C4 / "c4-train.00000-of-01024.json.gz"
    file.parent.mkdir(parents=True)
    records = [lines([{"text": "sound"}]), b"{broken\n", lines([{"text": ""}, {"text": "as well"}])]
    file.write_bytes(gzip.compress(b"".join(records)))
    words = ["c4", "--tokenizer", tokenizer, "--from", tmp_path, "--out", tmp_path / "out", "--workers", 1]
    line = refusal(capsys, *words)
    assert line.startswith(f"file://{file}:2: broken JSON") and "skip such records with --skip-bad" in line
    assert corpus.main([str(word) for word in [*words, "--skip-bad", "--json"]]) == 0
    report = json.loads(capsys.readouterr().out)["corpora"]["c4"]
    assert [report[name] for name in ("documents", "bad", "empty", "dropped")] == [2, 1, 1, 0]
    assert np.array_equal(ids_of(tmp_path / "out", "c4"), their_ids(tokenizer, ["sound", "as well"]))


def test_a_tokenizer_is_trained_on_all_corpora_of_a_mixture(stand_in, tmp_path):
    """Pieces of words that only one of them has; and what is trained is kept for both."""
    home = tmp_path / "hosts"
    write_parquet(home / CLIMB / "shard_00000.parquet", {"text": ["zebra quagga"] * 400})
    path = home / C4 / "c4-train.00000-of-01024.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(lines([{"text": "wombat dingo"}] * 400)))
    out = tmp_path / "out"
    done = command("climbmix:0.5", "c4:0.5", "--train-tokenizer", 310, "--out", out, "--from", home)
    assert done.returncode == 0, done.stderr
    for name in ("climbmix", "c4"):
        assert len(ids_of(out, name)) <= 400 * 6
        files = [out / f"{name}.tokenizer" / each.name for each in (out / "tokenizer").iterdir()]
        assert files
        assert all(file.read_bytes() == (out / "tokenizer" / file.name).read_bytes() for file in files)


# ---- kills and failures ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Two corpora; the first has a shard of three parts, nearly all of it in a column that is not read."""
    home = tmp_path_factory.mktemp("large")
    blob = np.random.default_rng(0).bytes(int(2.3 * PART_BYTES) // ROWS)
    write_parquet(
        home / EDU / "000_00000.parquet",
        {"text": texts(0), "score": scores(0), "blob": [blob[n:] + blob[:n] for n in range(ROWS)]},
    )
    path = home / C4 / "c4-train.00000-of-01024.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(lines({"text": text} for text in texts(1))))
    return home


def test_a_killed_download_goes_on_where_it_was_and_ends_in_the_same_bytes(large, tokenizer, tmp_path):
    words = ["fineweb-edu-10bt:0.5", "c4:0.5", "--tokenizer", tokenizer]
    with serving(large) as server:
        words += ["--from", server.url]
        whole = command(*words, "--out", tmp_path / "whole")
        assert whole.returncode == 0, whole.stderr

        server.held_from = 2 * PART_BYTES
        server.ranges.clear()
        out = tmp_path / "killed"
        line = [sys.executable, "-m", "scripts.corpus", *map(str, [*words, "--out", out, "--workers", 1])]
        process = subprocess.Popen(line, cwd=ROOT)
        host = server.url.removeprefix("http://")
        part = out / "downloads" / "http" / host / EDU / "000_00000.parquet.part"
        assert wait_until(lambda: part.exists() and part.stat().st_size == 2 * PART_BYTES)
        assert wait_until(lambda: ("000_00000.parquet", 2 * PART_BYTES) in server.ranges)
        process.send_signal(signal.SIGKILL)
        process.wait()
        server.held_from = None
        server.release.set()
        server.ranges.clear()
        again = command(*words, "--out", out)
        assert again.returncode == 0, again.stderr
        asked = [first for name, first in server.ranges if name == "000_00000.parquet"]
    assert asked == [2 * PART_BYTES]
    expected = {name.replace("whole", "killed"): text for name, text in content(tmp_path / "whole").items()}
    expected["data.yaml"] = expected["data.yaml"].replace(b"whole", b"killed")
    assert content(out) == expected


@pytest.mark.slow
def test_a_finished_corpus_of_a_mixture_is_not_read_again(large, tokenizer, tmp_path):
    """A record that breaks the second corpus ends the first start."""
    home = tmp_path / "hosts"
    shutil.copytree(large, home)
    path = home / C4 / "c4-train.00000-of-01024.json.gz"
    sound = path.read_bytes()
    path.write_bytes(sound[:-20])
    words = ["fineweb-edu-10bt:0.5", "c4:0.5", "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    with serving(home) as server:
        broken = command(*words, "--from", server.url)
        assert broken.returncode == 2
        line = error_line(broken.stderr)
        assert path.name in line and "cannot be read to the end" in line
        server.ranges.clear()
        command(*words, "--from", server.url)
        assert "000_00000.parquet" not in {name for name, _ in server.ranges}


@pytest.mark.slow
def test_a_store_that_fails_is_asked_again_and_may_have_no_ranges(large, tokenizer, tmp_path):
    words = ["fineweb-edu-10bt", "--tokenizer", tokenizer]
    with serving(large) as server:
        server.failing = 2
        done = command(*words, "--out", tmp_path / "failing", "--from", server.url)
        assert done.returncode == 0 and server.failing == 0, done.stderr
        server.has_ranges = False
        server.ranges.clear()
        done = command(*words, "--out", tmp_path / "plain", "--from", server.url)
        assert done.returncode == 0 and server.ranges == [("000_00000.parquet", 0)], done.stderr
        server.has_ranges, server.failing = True, 99
        done = command(*words, "--out", tmp_path / "gone", "--from", server.url)
        assert done.returncode == 82
        assert "000_00000.parquet: the store failed: " in error_line(done.stderr)
        server.failing = 0
        done = command(*words, "--out", tmp_path / "gone", "--from", server.url)
        assert done.returncode == 0, done.stderr
    found = [ids_of(tmp_path / name, "fineweb-edu-10bt") for name in ("failing", "plain", "gone")]
    assert all(np.array_equal(each, found[0]) for each in found)


# ---- refusals ----------------------------------------------------------------------------------------------


def refusal(capsys, *words) -> str:
    """The one line of a command that exits with 2."""
    assert corpus.main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert not out
    return error_line(err)


@pytest.mark.parametrize("how", ["other text", "as long", "gone"])
def test_a_file_that_has_changed_is_refused_by_its_name(stand_in, tokenizer, tmp_path, capsys, how):
    home = tmp_path / "hosts"
    shutil.copytree(stand_in / EDU, home / EDU)
    file = home / EDU / "001_00000.parquet"
    words = ["fineweb-edu-10bt", "--tokenizer", tokenizer, "--out", tmp_path / "out", "--workers", 1]
    with serving(home) as server:
        assert corpus.main([str(word) for word in [*words, "--from", server.url]]) == 0
        before = content(tmp_path / "out")
        capsys.readouterr()
        if how == "gone":
            file.unlink()
        elif how == "as long":
            changed = file.read_bytes()
            file.write_bytes(changed[:300] + bytes([changed[300] ^ 1]) + changed[301:])
        else:
            write_parquet(file, {"text": texts(7), "score": scores(7)})
        line = refusal(capsys, *words, "--from", server.url)
    assert line.startswith(f"{server.url}/{EDU}/001_00000.parquet: has changed since this corpus was first ")
    assert "give another --out" in line
    assert content(tmp_path / "out") == before
    if how == "as long":  # a copy elsewhere is compared by its sha256, and a sound one is accepted
        assert f"{EDU}/001_00000.parquet: has changed" in refusal(capsys, *words, "--from", home)
        assert corpus.main([str(word) for word in [*words, "--from", stand_in]]) == 0


@pytest.mark.slow
def test_a_file_that_changes_while_it_is_fetched_is_refused(large, tokenizer, tmp_path):
    home = tmp_path / "hosts"
    shutil.copytree(large, home)
    file = home / EDU / "000_00000.parquet"
    with serving(home) as server:
        server.held_from = 2 * PART_BYTES
        line = [sys.executable, "-m", "scripts.corpus", "fineweb-edu-10bt", "--tokenizer", str(tokenizer),
                "--out", str(tmp_path / "out"), "--from", server.url, "--workers", "1"]
        process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert wait_until(lambda: (file.name, 2 * PART_BYTES) in server.ranges)
        changed = bytearray(file.read_bytes())
        changed[100] ^= 1
        file.write_bytes(changed)
        server.release.set()
        _, error = process.communicate()
    assert process.returncode == 2
    assert f"{file.name}: has changed since this corpus was first listed" in error_line(error)


def test_another_request_for_a_folder_is_refused(stand_in, tokenizer, tmp_path, capsys):
    words = ["--tokenizer", tokenizer, "--from", stand_in, "--out", tmp_path / "out", "--workers", 1]
    assert corpus.main([str(word) for word in ["climbmix", *words]]) == 0
    capsys.readouterr()
    line = refusal(capsys, "c4", *words)
    assert "holds a corpus with corpora climbmix:1, and c4:1 is asked for; choose another --out" in line
    line = refusal(capsys, "climbmix", *words, "--tokens", "1K")
    assert "with --tokens none, and 1000 is asked for" in line
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    line = refusal(capsys, "climbmix", *words, "--out", other)
    assert line == f"--out: {other} holds thesis.tex, but no corpus; choose another folder"


def test_what_is_not_finished_may_be_asked_for_otherwise(stand_in, tmp_path, capsys):
    """A wrong column, and with another size the tokenizer is trained again."""
    words = ["climbmix", "--from", stand_in, "--out", tmp_path / "out", "--workers", 1]
    assert "no column 'body'" in refusal(capsys, *words, "--train-tokenizer", 300, "--jsonl-key", "body")
    home = tmp_path / "out" / corpora.TOKENIZER
    home.mkdir()  # as if the first start had come so far
    assert corpus.main([str(word) for word in [*words, "--train-tokenizer", 310]]) == 0
    assert "bpe-310" in json.loads((tmp_path / "out" / "climbmix.json").read_text())["tokenizer"]["name"]
    capsys.readouterr()
    line = refusal(capsys, *words, "--train-tokenizer", 300)
    assert "with --tokenizer bpe-310, and bpe-300 is asked for" in line


@pytest.mark.parametrize("words, says", [
    ("fineweb-edo --tokenizer bytes", "fineweb-edo: no such corpus; did you mean fineweb-edu?"),
    ("c4:0.5 dclm:0.4 --tokenizer bytes", "c4:0.5 dclm:0.4: the weights sum to 0.9, not to 1"),
    ("c4:-0.5 dclm:1.5 --tokenizer bytes", "c4:-0.5: the weight must be above 0"),
    ("c4 dclm --tokenizer bytes", "c4: a mixture needs the weight of each corpus, as in c4:0.5"),
    ("c4:0.5 c4:0.5 --tokenizer bytes", "c4: named twice"),
    ("c4:half --tokenizer bytes", "c4:half: expected NAME:WEIGHT"),
    ("c4", "--tokenizer: give either a tokenizer, or --train-tokenizer N"),
    ("c4 --tokenizer bpe-300", "--tokenizer: bpe-300 is trained here; write --train-tokenizer 300"),
    ("c4 --tokenizer bytes --tokens ten", "--tokens: expected a number of tokens such as 500M or 10B"),
    ("c4 --tokenizer bytes --files 0", "--files: 0 must be at least 1"),
    ("c4 --tokenizer bytes --min-score 1", "--min-score: c4 has no score"),
    ("fineweb-edu-10bt --tokenizer bytes --min-score nan", "--min-score: nan is not a finite number"),
    ("climbmix --tokenizer bytes --min-characters 99999", "no documents (0 empty, "),
    ("climbmix --tokenizer bytes --score-key s", "--score-key: is for --min-score"),
    ("climbmix --tokenizer bytes --jsonl-key body", "no column 'body'; it has text: choose with --jsonl-key"),
    ("climbmix --tokenizer bytes --min-score 1 --score-key s",
     "no column 's'; it has text: choose with --score-key"),
    ("c4 --tokenizer bytes --jsonl-key body", "json.gz:1: no text under 'body' (see --jsonl-key)"),
    ("c4 --tokenizer bytes --min-score 1 --score-key s", "json.gz:1: no number under 's'"),
    ("fineweb-edu --tokenizer bytes", "fineweb-edu has no file data/*/*.parquet; give a folder or URL with"),
])
def test_a_mistake_is_one_line(stand_in, tmp_path, capsys, words, says):
    place = ["--out", tmp_path / "out", "--from", stand_in, "--workers", 1]
    assert says in refusal(capsys, *words.split(), *place)


def test_a_file_in_the_place_of_the_folder_is_one_line(stand_in, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    words = ["climbmix", "--tokenizer", "bytes", "--from", stand_in, "--out", tmp_path / "out"]
    assert "is a file; name a folder" in refusal(capsys, *words)


def test_no_network_names_the_way_out(tmp_path, capsys):
    """A port where nothing listens; the hub's own address is tried in no test."""
    with serving(tmp_path) as server:
        url = server.url
    line = refusal(capsys, "c4", "--tokenizer", "bytes", "--out", tmp_path / "out", "--from", url)
    assert line.startswith("c4: cannot be listed: ") and "--from FOLDER_OR_URL" in line
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_is_told_before_the_first_file(stand_in, tmp_path, capsys):
    """A sparse file of 8 TB asks for 10 TB of tokens."""
    home = tmp_path / "hosts"
    shutil.copytree(stand_in / CLIMB, home / CLIMB)
    with open(home / CLIMB / "shard_00007.parquet", "wb") as file:
        file.truncate(8 * 10**12)
    words = ["climbmix", "--tokenizer", "bytes", "--from", home, "--out", tmp_path / "out", "--workers", 1]
    line = refusal(capsys, *words)
    assert "needs at least 18,666.7 GB" in line and "fewer --tokens or --files" in line


# ---- the hub -----------------------------------------------------------------------------------------------


def test_the_hub_s_own_client_fetches_from_a_hub_that_tells_sha256(large, tokenizer, tmp_path):
    """What arrives damaged, and what has changed, is refused; the latter before a byte is fetched."""
    pytest.importorskip("huggingface_hub")
    home, out = tmp_path / "hosts", tmp_path / "out"
    shutil.copytree(large, home)
    file = home / EDU / "000_00000.parquet"
    words = ["fineweb-edu-10bt", "--tokenizer", tokenizer, "--out", out]
    with serving(home) as server:
        env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1"}
        server.is_damaging = True
        damaged = command(*words, env=env)
        assert damaged.returncode == 2
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert f"{file.name}: has changed since this corpus was first listed" in error_line(damaged.stderr)
        record = json.loads((out / corpora.RECORD).read_text())
        assert [each["sha256"] for each in record["files"]["fineweb-edu-10bt"]] == [digest]

        server.is_damaging = False
        done = command(*words, env=env)
        assert done.returncode == 0, done.stderr
        assert np.array_equal(ids_of(out, "fineweb-edu-10bt"), their_ids(tokenizer, texts(0)))

        changed = bytearray(file.read_bytes())
        changed[100] ^= 1
        file.write_bytes(changed)
        server.ranges.clear()
        refused = command(*words, env=env)
        assert refused.returncode == 2 and not server.ranges
        assert f"sha256 {digest[:12]} then" in error_line(refused.stderr)


def test_rows_have_what_they_need():
    for name, row in corpora.read_corpora().items():
        assert row.url(None) == f"hf://datasets/{row.repo}@{row.revision}", name
        assert 1e10 <= row.tokens <= 1e13 and row.license and row.source[4] == "."
