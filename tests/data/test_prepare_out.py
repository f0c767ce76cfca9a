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


def test_a_sidecar_does_not_replace_the_conversations(tmp_path, capsys):
    chats = written(tmp_path / "chats.json", CHAT + "\n")
    told = refused(capsys, tmp_path, "--chat", "--input", chats, "--out", tmp_path / "chats")
    assert f"--out: {tmp_path}/chats would replace the input {chats}; choose another --out" in told


@pytest.mark.parametrize(
    "name", ["d.bin", "d.idx", "d.crc", "d.mask", "d.mask.crc", "d.parts/a.jsonl", "d.tokenizer/a.jsonl"]
)
def test_no_file_of_out_is_an_input(tmp_path, capsys, name):
    """By another way to it, too: a link to its folder."""
    written(tmp_path / "real" / name, ONE)
    (tmp_path / "link").symlink_to("real")
    where = tmp_path / "link" / name
    told = refused(capsys, tmp_path, "--input", where, "--out", tmp_path / "real" / "d")
    assert f"would replace the input {where}; choose another --out" in told


def test_a_file_that_a_folder_holds_is_an_input_too(tmp_path, capsys):
    chats = written(tmp_path / "in" / "chats.json", ONE)
    told = refused(capsys, tmp_path, "--input", tmp_path / "in", "--out", tmp_path / "in" / "chats")
    assert f"would replace the input {chats}; choose another --out" in told


def test_the_command_that_is_printed_does_not_replace_its_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/data/chats.json", "runs/data/a.parts/a.jsonl", "runs/data/b/b.json"):
        path = written(pathlib.Path(name), ONE)
        with pytest.raises(ConfigError, match="holds no tokens") as error:
            check_path(name, "--data.path", "bytes")
        command = str(error.value).split("make them with ")[1].split(", then ")[0]
        assert prepare_data.main([*shlex.split(command)[3:], "--workers", "1"]) == 0
        assert path.read_text() == ONE


# ---- another file instead of the sidecar -------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", CHAT + "\n" + CHAT, '{"model": "tiny", "tokens": 3}', "[1, 2]"])
def test_another_file_instead_of_the_sidecar_stays(tmp_path, capsys, content):
    """Its content is the user's: it is neither replaced, nor is its deletion advised."""
    source = written(tmp_path / "in.jsonl", ONE)
    other = written(tmp_path / "d.json", content)
    told = refused(capsys, tmp_path, "--input", source, "--out", tmp_path / "d")
    assert f"{other}: was not written by prepare_data" in told and "choose another --out" in told


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


# ---- folders that are not ours -----------------------------------------------------------------------------


def test_a_folder_without_a_plan_is_not_emptied(tmp_path, capsys):
    source = written(tmp_path / "in.jsonl", ONE)
    written(tmp_path / "d.parts" / "000000.json", "{}")
    written(tmp_path / "d.parts" / "sub" / "a.txt", "mine")
    told = refused(capsys, tmp_path, "--input", source, "--out", tmp_path / "d")
    assert f"{tmp_path}/d.parts: is not an unfinished run of prepare_data" in told
    assert "choose another --out, or move it" in told


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


def test_a_folder_of_the_user_instead_of_the_tokenizer_stays(tmp_path, capsys):
    source = written(tmp_path / "in.jsonl", ONE)
    written(tmp_path / "d.tokenizer" / "tokenizer.json", "{}")
    written(tmp_path / "d.tokenizer" / "model.safetensors", "weights")
    told = refused(capsys, tmp_path, "--input", source, "--out", tmp_path / "d")
    assert f"{tmp_path}/d.tokenizer: holds model.safetensors" in told
    assert "choose another --out, or move it" in told


@pytest.mark.parametrize("name", ["d.parts", "d.tokenizer"])
def test_a_file_instead_of_a_folder_stays(tmp_path, capsys, name):
    source = written(tmp_path / "in.jsonl", ONE)
    written(tmp_path / name, "mine")
    told = refused(capsys, tmp_path, "--input", source, "--out", tmp_path / "d")
    assert f"{tmp_path / name}: is not" in told and "choose another --out, or move it" in told


def test_a_file_of_ids_without_an_index_stays(tmp_path, capsys):
    """As nanoGPT's train.bin, beside which --out train is made."""
    source = written(tmp_path / "in.jsonl", ONE)
    written(tmp_path / "train.bin", "ids of the user")
    told = refused(capsys, tmp_path, "--input", source, "--out", tmp_path / "train")
    assert f"{tmp_path}/train.bin: was not written by prepare_data, which would replace it" in told


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
