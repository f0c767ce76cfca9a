"""data/raw.py: files of ids are read by what they are, or refused where that cannot be known; from a file to
the loss of train.main.
"""

import functools
import json

import numpy as np
import pytest
from prepared_data import metrics
from ranks import MODEL, corpus
from test_contract import make_folder

import train
from config import ConfigError

END = {"tokenizer_config.json": {"eos_token": "</s>"}}
LARGE = 70_000  # ids, more than 16 bits tell apart


def header(magic, version, count):
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, count
    return head.tobytes()


def words(tmp_path, path, spec, *more):
    words = ["llama2-tiny", *MODEL, "--data.path", path, "--train.steps", "2", "--eval.batches", "1"]
    options = ["--data.tokenizer", spec, "--log.dir", tmp_path, "--log.name", "r"]
    return [str(word) for word in [*words, *options, *more]]


def losses(tmp_path, path, spec, *more, name):
    assert train.main(words(tmp_path, path, spec, *more, "--log.name", name)) == 0
    return metrics(tmp_path / name, "loss", "val_loss")


def large_folder(home, vocab=LARGE):
    """A tokenizer whose last added id is vocab - 1: token k is <|k|>."""
    make_folder(home, END)
    spec = json.loads((home / "tokenizer.json").read_text())
    last = {**spec["added_tokens"][-1], "id": vocab - 1, "content": "<|last|>"}
    spec["added_tokens"].append(last)
    spec["model"]["vocab"]["<|last|>"] = vocab - 1
    (home / "tokenizer.json").write_text(json.dumps(spec))
    return home


def letters(count=3000):
    """Ids of bytes, documents of 40 that end with 256."""
    ids = np.random.default_rng(0).integers(97, 123, count)
    ids[39::40] = 256
    return ids


def write(path, kind, ids):
    dtype = {"npy-u2": "<u2", "npy-u4": "<u4", "npy-i8": "<i8", "llm.c-llama3": "<u4", "modded": "<u2",
             "uint32": "<u4", "uint64": "<u8", "int32": "<i4"}.get(kind, "<u2")
    if kind.startswith("npy"):
        np.save(path, ids.astype(dtype))
        return
    head = {"modded": header(20240520, 1, len(ids)), "llm.c-llama3": header(20240801, 7, len(ids))}
    path.write_bytes(head.get(kind, b"") + ids.astype(dtype).tobytes())


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory):
    """plain_losses(more words): the losses of nanoGPT's file of letters(), trained once for these words."""
    folder = tmp_path_factory.mktemp("plain")
    write(folder / "plain.bin", "plain", letters())
    return functools.cache(
        lambda *more: losses(folder, folder / "plain.bin", "bytes", *more, name=f"plain{len(more)}")
    )


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("kind", ["npy-u2", "npy-u4", "npy-i8", "llm.c-llama3", "modded"])
def test_files_that_say_what_they_are_are_read(tmp_path, plain_losses, kind):
    """The losses are those of nanoGPT's file with the same ids."""
    path = tmp_path / ("x.npy" if kind.startswith("npy") else "x.bin")
    write(path, kind, letters())
    more = ["--data.doc_mask", "true"]
    assert losses(tmp_path, path, "bytes", *more, name="kind") == plain_losses(*more)


@pytest.mark.parametrize("kind", ["uint32", "uint64", "int32"])
def test_files_of_other_widths_are_read_where_it_is_stated(tmp_path, plain_losses, kind):
    write(tmp_path / "x.bin", kind, letters())
    told = f"x.bin: .* reads as ids of {64 if '64' in kind else 32} bits.*data.dtype"
    with pytest.raises(ConfigError, match=told):
        train.main(words(tmp_path, tmp_path / "x.bin", "bytes"))
    stated = losses(tmp_path, tmp_path / "x.bin", "bytes", "--data.dtype", kind, name="stated")
    assert stated == plain_losses()


def test_a_large_vocabulary_needs_a_width(tmp_path):
    """Else 32-bit ids are read as twice as many, every second 0 or 1."""
    home = large_folder(tmp_path / "t")
    ids = letters()
    ids[::7] = LARGE - 1
    ids.astype("<u4").tofile(tmp_path / "x.bin")
    with pytest.raises(ConfigError, match="x.bin: .*70,000.*data.dtype uint16, uint32"):
        train.main(words(tmp_path, tmp_path / "x.bin", home))
    assert losses(tmp_path, tmp_path / "x.bin", home, "--data.dtype", "uint32", name="r")[0] > 10
    for kind, told in (("npy-u2", "x.npy"), ("modded", "y.bin")):
        write(tmp_path / told, kind, letters())
        with pytest.raises(ConfigError, match=f"{told}: holds ids of 16 bits.*69,999.*wrapped"):
            train.main(words(tmp_path, tmp_path / told, home))
    with pytest.raises(ConfigError, match="holds ids of 16 bits.*wrapped"):
        train.main(words(tmp_path, tmp_path / "x.bin", home, "--data.dtype", "uint16"))


@pytest.mark.parametrize("content, more, told", [
    ("npy-f", [], "x.npy: .*float32.*ids"),
    ("npy-2d", [], r"x.npy: .*shape .2, 1500"),
    ("npy-be", [], "x.npy: .*>u2"),
    ("npy-cut", [], "x.npy: 6028 bytes are not.*truncated"),
    ("npy-u4", ["--data.dtype", "uint16"], "data.dtype: uint16.*x.npy.*uint32"),
    ("gzip", [], "x.bin: .*gzip"),
    ("zip", [], "x.bin: .*zip"),
    ("index", [], "x.bin: .*Megatron"),
    ("magic", [], "x.bin: .*version 9"),
    ("short", [], "x.bin: .*are not a shard of 3001"),
])
def test_files_that_are_refused_by_what_they_are(tmp_path, content, more, told):
    ids = letters()
    arrays = {"npy-f": ids.astype("f4"), "npy-2d": ids.astype("u2").reshape(2, -1),
              "npy-be": ids.astype(">u2"), "npy-u4": ids.astype("u4"), "npy-cut": ids.astype("u2")}
    starts = {"gzip": b"\x1f\x8b\x08\0", "zip": b"PK\x03\x04", "index": b"MMIDIDX\0\0\0",
              "magic": header(20240801, 9, 3000), "short": header(20240520, 1, 3001)}
    path = tmp_path / ("x.npy" if content in arrays else "x.bin")
    if content in arrays:
        np.save(path, arrays[content])
        if content == "npy-cut":
            path.write_bytes(path.read_bytes()[:-100])
    else:
        path.write_bytes(starts[content] + ids.astype("<u2").tobytes())
    with pytest.raises(ConfigError, match=told):
        train.main(words(tmp_path, path, "bytes", *more))


@pytest.mark.parametrize("content, told", [
    ("A page of text, named .bin, reads as ids below 65,536.\n" * 99, "x.bin: looks like text.*prepare"),
    ("日本語の文章。" * 999, "x.bin: looks like text.*prepare"),
    (header(20260101, 3, 3000),
     r"x.bin: begins with an unknown header .*20260101, 3, 3000, 0.*data.dtype uint16"),
    (header(7, 0, 0), r"x.bin: begins with an unknown header .*7, 0, 0, 0"),
])
def test_text_and_unknown_headers_are_refused_though_they_read_as_ids(tmp_path, content, told):
    """Without a header that is known, and with ids that every text has: both were trained in silence."""
    ids = letters().astype("<u2").tobytes()
    path = tmp_path / "x.bin"
    path.write_bytes(content.encode() * 2 if isinstance(content, str) else content + ids)
    given = words(tmp_path, path, large_folder(tmp_path / "t", 1 << 16), "--train.steps", "1")
    with pytest.raises(ConfigError, match=told):
        train.main(given)
    assert train.main([*given, "--data.dtype", "uint16"]) == 0


def test_another_byte_order_is_not_a_larger_vocabulary(tmp_path):
    letters().astype(">u4").tofile(tmp_path / "x.bin")
    told = r"x.bin: token \d+: id \d{9,} is in no vocabulary: .*width or byte order.*data.dtype"
    with pytest.raises(ConfigError, match=told) as refusal:
        train.main(words(tmp_path, tmp_path / "x.bin", "bytes", "--data.dtype", "uint32"))
    assert "model.vocab" not in str(refusal.value)


def test_a_width_is_refused_for_data_that_says_its_own_and_taken_beside_it(tmp_path):
    """In a blend, whose sources are also read alone, and as training and validation data."""
    indexed = corpus(tmp_path)
    with pytest.raises(ConfigError, match="data.dtype: uint32 .* .idx"):
        train.main(words(tmp_path, indexed, "bytes", "--data.dtype", "uint32"))
    write(tmp_path / "x.bin", "uint32", letters())
    blend = f"0.5 {indexed} 0.5 {tmp_path / 'x.bin'}"
    for number, more in enumerate((["--data.path", blend], ["--data.valid", blend],
                                   ["--data.path", indexed, "--data.valid", str(tmp_path / "x.bin")])):
        given = words(tmp_path, tmp_path / "x.bin", "bytes", "--data.dtype", "uint32", *more)
        assert train.main([*given, "--log.name", f"both{number}"]) == 0


@pytest.mark.parametrize("name", ["x.bin", "x.npy"])
def test_a_mask_of_documents_whose_end_never_occurs_is_refused(tmp_path, name):
    """As of llm.c's shards of Llama 3, which the start token separates: they were one document in silence."""
    ends = {"tokenizer_config.json": {"eos_token": "</s>", "bos_token": "<|endoftext|>"}}
    home = make_folder(tmp_path / "t", ends)
    write(tmp_path / name, "npy-u2" if name == "x.npy" else "uint16", letters())
    given = words(tmp_path, tmp_path / name, home, "--data.doc_mask", "true", "--train.steps", "1")
    told = rf"{name}: .* '</s>' \(id 258\).*data.eod.* '<\|endoftext\|>' \(id 256\), occurs.*doc_mask false"
    with pytest.raises(ConfigError, match=told):
        train.main(given)
    with pytest.raises(ConfigError, match=r"'</s>' \(id 258\).*data.eod, or") as refusal:
        train.main([*given, "--data.eod", "258", "--data.tokenizer", str(make_folder(tmp_path / "s", END))])
    assert "256" not in str(refusal.value)
    if name == "x.bin":
        assert train.main([*given, "--data.eod", "256"]) == 0
