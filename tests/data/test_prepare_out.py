"""Nothing of the user's at --out and beside it is replaced or deleted (data/prepare.py)."""

import json
import os
import pathlib
import shlex

import pytest
from prepared_data import prepare
from ranks import MODEL

import train
from config import ConfigError
from data.indexed import IndexedDataset
from data.loader import check_path
from scripts import prepare_data

ONE = json.dumps({"text": "one text"}) + "\n"
CHAT = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})


def prepared(*words):
    return prepare("--tokenizer", "bytes", *words)


def refused(capsys, folder, *words):
    """The one line with which prepare_data refuses; nothing in the folder has changed."""
    before = tree(folder)
    capsys.readouterr()
    assert prepared(*words) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1, told
    assert tree(folder) == before
    return told


def tree(folder):
    return {path: path.is_file() and path.read_bytes() for path in pathlib.Path(folder).rglob("*")}


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


# ---- the user's input --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, words, out", [
    ("chats.json", "--chat --input chats.json", "chats"),  # the sidecar's name
    ("in/chats.json", "--input in", "in/chats"),
    *((f"real/d{end}", f"--input link/d{end}", "real/d")  # by a link to its folder
      for end in (".bin", ".idx", ".crc", ".mask", ".mask.crc", ".parts/a.jsonl", ".tokenizer/a.jsonl")),
])
def test_no_file_of_out_is_an_input(tmp_path, capsys, name, words, out):
    """Nor one that a folder of the input holds."""
    written(tmp_path / name, CHAT + "\n" if "--chat" in words else ONE)
    (tmp_path / "link").symlink_to("real")
    *options, given = words.split()
    told = refused(capsys, tmp_path, *options, tmp_path / given, "--out", tmp_path / out)
    source = tmp_path / (name if given == "in" else given)
    assert f"--out: {tmp_path / out} would replace the input {source}; choose another --out" in told


def test_the_command_that_is_printed_does_not_replace_its_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/data/chats.json", "runs/data/a.parts/a.jsonl", "runs/data/b/b.json"):
        path = written(pathlib.Path(name), ONE)
        with pytest.raises(ConfigError, match="holds no tokens") as error:
            check_path(name, "--data.path", "bytes")
        command = str(error.value).split("make them with ")[1].split(", then ")[0]
        assert prepare_data.main([*shlex.split(command)[3:], "--workers", "1"]) == 0
        assert path.read_text() == ONE


# ---- what is not ours --------------------------------------------------------------------------------------

MOVE = "choose another --out, or move it"


@pytest.mark.parametrize("files, told", [
    *(({"d.json": content}, ["d.json: was not written by prepare_data", "choose another --out"])
      for content in ("", CHAT + "\n" + CHAT, '{"model": "tiny", "tokens": 3}', "[1, 2]")),
    ({"d.bin": "ids of the user"}, ["d.bin: was not written by prepare_data, which would replace it"]),
    ({"d.parts/000000.json": "{}", "d.parts/sub/a.txt": "mine"},
     ["d.parts: is not an unfinished run of prepare_data", MOVE]),
    ({"d.tokenizer/tokenizer.json": "{}", "d.tokenizer/model.safetensors": "weights"},
     ["d.tokenizer: holds model.safetensors", MOVE]),
    ({"d.parts": "mine"}, ["d.parts: is not", MOVE]),
    ({"d.tokenizer": "mine"}, ["d.tokenizer: is not", MOVE]),
], ids=["an empty .json", "chats", "a .json of another program", "a list", "a .bin as of nanoGPT",
        "a folder .parts", "a model in .tokenizer", "a file .parts", "a file .tokenizer"])
def test_what_the_user_has_instead_of_our_files_stays(tmp_path, capsys, files, told):
    """It is neither replaced, nor is its deletion advised."""
    source = written(tmp_path / "in.jsonl", ONE)
    for name, content in files.items():
        written(tmp_path / name, content)
    first, *others = told
    line = refused(capsys, tmp_path, "--input", source, "--out", tmp_path / "d")
    assert f"{tmp_path}/{first}" in line and all(text in line for text in others)


def test_data_beside_another_file_is_refused_without_the_advice_to_delete_it(tmp_path):
    source = written(tmp_path / "in.jsonl", ONE * 99)
    assert prepared("--input", source, "--out", tmp_path / "d") == 0
    other = written(tmp_path / "d.json", CHAT + "\n" + CHAT)
    words = ["llama2-tiny", *MODEL, "--data.path", tmp_path / "d", "--log.dir", tmp_path]
    with pytest.raises(ConfigError) as error:
        train.main([str(word) for word in words])
    told = str(error.value)
    assert f"{other}: is another file" in told and "move it" in told and "rename" in told
    assert "delete" not in told and "sha256" not in told
    assert other.read_text() == CHAT + "\n" + CHAT


def test_a_sidecar_of_ours_is_replaced_even_if_it_is_damaged(tmp_path):
    source = written(tmp_path / "in.jsonl", ONE)
    assert prepared("--input", source, "--out", tmp_path / "d") == 0
    whole = (tmp_path / "d.json").read_bytes()
    for damaged in (whole.replace(b"bytes", b"butes"), whole[:len(whole) // 2], whole):
        (tmp_path / "d.json").write_bytes(damaged)
        assert prepared("--input", source, "--out", tmp_path / "d") == 0
        assert IndexedDataset(tmp_path / "d").documents == 1


def test_what_a_killed_start_has_left_without_a_plan_is_taken(tmp_path):
    source = written(tmp_path / "in.jsonl", ONE)
    written(tmp_path / "d.parts" / "lock", "")
    written(tmp_path / "d.parts" / "plan.tmp", "ab")
    assert prepared("--input", source, "--out", tmp_path / "d") == 0
    assert not (tmp_path / "d.parts").exists()


def test_a_kill_while_the_folder_is_emptied_leaves_what_says_that_it_is_ours(tmp_path, monkeypatch):
    """By a start with other settings, and at the end of one: the same command finishes."""
    source = written(tmp_path / "in.jsonl", ONE + "broken\n")
    command = ["--input", source, "--out", tmp_path / "d"]
    assert prepared(*command) == 2
    remove, is_due = os.unlink, []

    def unlink(path, **keywords):
        remove(path, **keywords)
        if is_due and (str(path).startswith(f"{tmp_path}/d.parts") or "dir_fd" in keywords):
            raise KeyboardInterrupt

    command.append("--skip-bad")
    for more in (["--no-append-eod"], []):
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink)
            is_due.append(True)
            assert prepared(*command, *more) == 130
        names = os.listdir(tmp_path / "d.parts")
        assert "plan" in names and len(names) > 2
        (tmp_path / "d.parts" / "plan").write_text("another")
    assert prepared(*command) == 0
    assert IndexedDataset(tmp_path / "d").tokens == 9 and not (tmp_path / "d.parts").exists()


# ---- the name of --out -------------------------------------------------------------------------------------


def test_a_slash_at_the_end_of_out_is_not_part_of_it(tmp_path, capsys):
    """The completion of a shell adds it, where a folder has that name."""
    source = written(tmp_path / "corpus" / "a.jsonl", ONE)
    out = f"{tmp_path}/corpus/"
    assert prepared("--input", source, "--out", out, "--show", 1) == 0
    printed = capsys.readouterr().out
    assert "sample    'one text'" in printed and f"--data.path {tmp_path}/corpus " in printed
    assert IndexedDataset(tmp_path / "corpus").documents == 1
    assert prepare_data.main(["--out", out, "--show", "1"]) == 0
    assert "document 1 of 1" in capsys.readouterr().out


def test_what_lies_in_the_input_folder_and_is_ours_is_not_read(tmp_path):
    """After a failed start, and after a finished one: the folder is the input, and --out is in it."""
    source = written(tmp_path / "corpus" / "a.jsonl", ONE + "broken\n")
    out = tmp_path / "corpus" / "tokens"
    command = ["--input", tmp_path / "corpus", "--out", out]
    assert prepared(*command) == 2
    assert (tmp_path / "corpus" / "tokens.parts" / "plan").exists()
    written(tmp_path / "corpus" / "tokens.tokenizer.tmp" / "tokenizer.json", "{}")  # of a kill in the merge
    assert prepared(*command, "--skip-bad") == 0
    tokens = IndexedDataset(out).tokens
    source.write_text(ONE * 2)
    assert prepared(*command) == 0
    assert (tokens, IndexedDataset(out).tokens) == (9, 18)
    assert len(json.loads(out.with_suffix(".json").read_text())["provenance"]["inputs"]) == 1


@pytest.mark.parametrize("name", ["d.json", "d.tokenizer", "d.tokenizer/a.jsonl", "."])
def test_what_is_named_or_not_of_prepare_data_is_refused(tmp_path, capsys, name):
    """As by a shell that writes the names in a folder; and what a user has put into a folder of ours."""
    source = written(tmp_path / "a.jsonl", ONE)
    assert prepared("--input", source, "--out", tmp_path / "d") == 0
    inner = written(tmp_path / "d.tokenizer" / "a.jsonl", ONE)
    told = refused(capsys, tmp_path, "--input", source, tmp_path / name, "--out", tmp_path / "d")
    assert f"would replace the input {tmp_path / 'd.json' if name == 'd.json' else inner}" in told
