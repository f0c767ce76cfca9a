"""checkpoint.init_from: weights go into a model that computes what their own did, or what changes is stated
by name (checkpoint.init_changes). All from the files on, with train.py as a program.
"""

import importlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import corpus, job, write_documents
from safetensors.torch import load_file, save_file
from tokenizer_families import make_tokenizer

from checkpoint.disk import store
from checkpoint.origin import match_token_ids, parts_by_rows, with_tokenizer
from checkpoint.systems.foreign import open_hf_folder
from config import ConfigError
from data import tokenizer
from parallel.sharding.boxes import Box

ROOT = Path(__file__).parent.parent
SMALL = {
    "model.layers": 3, "model.hidden": 16, "model.mixer.heads": 2, "model.mixer.kv_heads": 2,
    "model.mlp.width": 24, "model.vocab_multiple": 64, "train.steps": 1, "train.seq_len": 16,
    "train.micro_batch": 2, "train.global_batch": 2, "train.threads": 1, "optim.warmup": 0,
    "optim.lr": 1e-30,  # the weights after the step are those before it
    "eval.every": "none", "eval.batches": 1, "eval.sample": 0, "log.every": 1,
}
CHANGES = "--checkpoint.init_changes"


def words(home: Path, name: str, settings: dict) -> list[str]:
    """The arguments of train.py. Keys of `settings` have __ for their dot."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    place = {"data.path": home / "text", "log.dir": home / "runs", "log.name": name}
    every = {**SMALL, **place, **given}
    return ["llama3-tiny", *(word for key, value in every.items() for word in (f"--{key}", str(value)))]


def program(*argv: object) -> tuple[int, str]:
    """(exit code, what it printed)"""
    end = subprocess.run(
        [sys.executable, *map(str, argv)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return end.returncode, end.stdout + end.stderr


def trains(home: Path, name: str, **settings) -> str:
    """Run train.py, which must not fail, and return what it prints."""
    code, told = program("train.py", *words(home, name, settings))
    assert code == 0, told
    return told


def refused(home: Path, **settings) -> str:
    """The line with which it is refused, before a step."""
    code, told = program("train.py", *words(home, "refused", settings))
    last = told.splitlines()[-1]
    began = (home / "runs" / "refused" / "metrics.jsonl").exists()
    shutil.rmtree(home / "runs" / "refused", ignore_errors=True)
    assert code == 2 and last.startswith("error: ") and not began, told
    return last


def checkpoint(run: Path) -> Path:
    found = store.newest_checkpoint(run / "checkpoints", [])
    assert found is not None
    return found


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint, put together from the boxes that ranks have written."""
    path = checkpoint(run)
    shards = {shard.name: load_file(shard) for shard in path.glob("*.safetensors")}
    found: dict[str, torch.Tensor] = {}
    for piece in store.quick_check(path).pieces:
        box = piece.box
        if "@" not in box.key:
            whole = found.setdefault(box.key, torch.full(box.shape, torch.nan))
            place = tuple(slice(start, start + size) for start, size in zip(box.start, box.size))
            whole[place] = shards[piece.file][piece.name]
    return found


def text(home: Path, name: str, spec: str | Path) -> Path:
    """A data set of that tokenizer."""
    tok = tokenizer.load_tokenizer(spec)
    lines = (f"line {number} of some words, and of others " * 2 for number in range(60))
    return Path(write_documents(home / name, map(tok.encode, lines), tok))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """In runs/: `plain`; `text` is its data."""
    home = tmp_path_factory.mktemp("init_from")
    assert corpus(home)
    trains(home, "plain")
    return home


@pytest.fixture(scope="module")
def plain(home):
    return {"checkpoint__init_from": home / "runs" / "plain"}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], keys) -> bool:
    return all(torch.equal(left[key], right[key]) for key in keys)


# ---- the function ------------------------------------------------------------------------------------------


def test_the_same_model_takes_all_and_the_header_says_from_where(home, plain):
    """Dropout, kernel, seed, batch: none of them is the function."""
    settings = {"model__dropout": 0.1, "model__mixer__kernel": "sdpa", "train__seed": 7, "train__seq_len": 8}
    told = trains(home, "same", **plain, **settings)
    found, source = weights(home / "runs" / "same"), weights(home / "runs" / "plain")
    assert found.keys() == source.keys() and same(found, source, source)
    assert f"weights  from {checkpoint(home / 'runs' / 'plain')} (step 1): {len(source)} taken" in told
    assert not any(word in told for word in ("fresh", "dropped", "changed  "))


@pytest.mark.slow(every=3)
@pytest.mark.parametrize(
    "key, here, said",
    [
        ("mixer.window", 4, "model.mixer.window none there and 4 here"),
        ("layers", 2, "model.layers 3 there and 2 here"),
        ("tied", "true", "model.tied false there and true here"),
        ("mixer.heads", 4, "model.mixer.heads 2 there and 4 here"),
        ("mixer.rope.base", 7, "model.mixer.rope.base 500000.0 there and 7.0 here"),
        ("vocab", 300, "model.vocab 257 there and 300 here"),
    ],
)
def test_another_function_is_refused_with_both_values_and_the_way_out(home, plain, key, here, said):
    line = refused(home, **plain, **{f"model__{key}": here})
    assert said in line and f"{CHANGES} model.{key}" in line, line


def test_what_is_refused_of_the_key_itself(home, plain):
    for changes, said in (
        ("model.mixer.window", "model.mixer.window is none there and here"),
        ("model.mixer.kv_rank", "model.mixer.kv_rank is a key that the model here does not have"),
        ("data.tokenizer", "data.tokenizer is the same there and here"),
        ("gate.weight", "gate.weight matches no weight, neither there nor here"),
        ("model.windw", "model.windw: no such key; did you mean model.mixer.window?"),
        ("train.seed", "train.seed does not change what weights compute; leave it out"),
    ):
        line = refused(home, **plain, checkpoint__init_changes=changes)
        assert line.startswith("error: checkpoint.init_changes: ") and said in line, line
    window = {"checkpoint__init_changes": "model.mixer.window"}
    assert "checkpoint.init_from, which is none" in refused(home, **window)
    both = refused(home, **plain, model__mixer__window=4, model__layers=2, **window)
    assert "model.layers 3 there" in both and f"{CHANGES} model.mixer.window,model.layers" in both, both


# ---- what is stated ----------------------------------------------------------------------------------------


def test_a_stated_window_takes_all_weights(home, plain):
    window = {"model__mixer__window": 4, "checkpoint__init_changes": "model.mixer.window"}
    told = trains(home, "window", **plain, **window)
    source = weights(home / "runs" / "plain")
    assert same(weights(home / "runs" / "window"), source, source)
    assert "changed  model.mixer.window none -> 4" in told and "dropped" not in told


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("layers, gone, new", [(2, {2}, set()), (4, set(), {3})])
def test_other_numbers_of_layers_take_the_first_ones(home, plain, layers, gone, new):
    """The first ones are taken; one that the source does not have begins as in a run without it."""
    settings = {"model__layers": layers, "model__tied": "true"}
    trains(home, f"fresh-{layers}", **settings)
    told = trains(
        home, f"of-{layers}", **plain, **settings, checkpoint__init_changes="model.layers,model.tied"
    )
    source, fresh = weights(home / "runs" / "plain"), weights(home / "runs" / f"fresh-{layers}")
    found = weights(home / "runs" / f"of-{layers}")
    added = {key for key in found if key.startswith(tuple(f"layers.{layer}." for layer in new))}
    dropped = {key for key in source if key.startswith(tuple(f"layers.{layer}." for layer in gone))}
    assert found.keys() == fresh.keys() == (source.keys() - dropped - {"head.weight"}) | added
    assert same(found, source, found.keys() - added) and same(found, fresh, added)
    assert f"changed  model.layers 3 -> {layers}, model.tied false -> true" in told
    assert f"{len(found) - len(added)} taken, " in told
    assert f"dropped  {len(dropped) + 1}: head.weight" in told
    assert bool(new) == (f"fresh    {len(added)}: layers.3." in told)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("vocab, rows", [(300, 320), (400, 448)])
def test_a_larger_vocabulary_takes_the_rows_of_the_tokens(home, plain, vocab, rows):
    """Also where the padded tables have one size: rows of padding were never trained."""
    settings = {"model__vocab": vocab, "train__seed": 5}
    trains(home, f"fresh-{vocab}", **settings)
    told = trains(home, f"of-{vocab}", **plain, **settings, checkpoint__init_changes="model.vocab")
    source, fresh = weights(home / "runs" / "plain"), weights(home / "runs" / f"fresh-{vocab}")
    found = weights(home / "runs" / f"of-{vocab}")
    for key in ("embed.weight", "head.weight"):
        assert found[key].shape == (rows, 16)
        assert torch.equal(found[key], torch.cat([source[key][:257], fresh[key][257:]]))
    assert same(found, source, found.keys() - {"embed.weight", "head.weight"})
    assert "in part  2: embed.weight (257 rows), head.weight (257 rows)" in told


@pytest.mark.slow
@pytest.mark.parametrize("context", [8, 40])
def test_another_number_of_learned_positions(home, context):
    learned = {"model__positions": "learned", "model__mixer__rope": "none", "train__seq_len": 8}
    if not (home / "runs" / "learned").exists():
        trains(home, "learned", **learned, model__context=16)
    settings = {**learned, "model__context": context, "train__seed": 9}
    trains(home, f"fresh-context-{context}", **settings)
    of = {"checkpoint__init_from": home / "runs" / "learned"}
    assert "model.context 16 there" in refused(home, **settings, **of)
    trains(home, f"of-context-{context}", **settings, **of, checkpoint__init_changes="model.context")
    source, fresh, found = (
        weights(home / "runs" / name)["positions.weight"]
        for name in ("learned", f"fresh-context-{context}", f"of-context-{context}")
    )
    assert torch.equal(found, torch.cat([source[:context], fresh[16:]]))


@pytest.mark.slow
def test_modules_of_further_tokens_keep_their_place_behind_the_last_block(home):
    """They are numbered after the blocks: layers.3 is a module of three blocks, and a block of four."""
    trains(home, "modules", model__mtp__modules=1)
    of = {"checkpoint__init_from": home / "runs" / "modules", "model__mtp__modules": 1}
    trains(home, "two", **of, model__layers=2, checkpoint__init_changes="model.layers")
    told = trains(home, "four", **of, model__layers=4, checkpoint__init_changes="model.layers")
    source = weights(home / "runs" / "modules")
    for name, place in (("two", "layers.2."), ("four", "layers.4.")):
        found = weights(home / "runs" / name)
        keys = [key for key in source if key.startswith("layers.3.")]
        assert f"{place}join.weight" in found
        assert all(torch.equal(found[key.replace("layers.3.", place)], source[key]) for key in keys)
    assert "fresh    9: layers.3.attn" in told and "dropped" not in told


def first_and_last_loss(run: Path) -> tuple[float, float]:
    """The validation losses before the first step and after the last."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    return losses[0], losses[-1]


def test_experts_begin_as_the_mlp_of_their_layer(home, plain):
    """Sparse upcycling: with shares that sum to 1, a mixture of equal experts computes what the MLP did."""
    mixture = {"model__mlp__kind": "experts", "model__mlp__experts": 4, "model__mlp__top_k": 2}
    changes = {"checkpoint__init_changes": "model.mlp.kind"}
    told = trains(home, "upcycled", **plain, **mixture, **changes)
    source, found = weights(home / "runs" / "plain"), weights(home / "runs" / "upcycled")
    copies = {key for key in found if ".experts." in key}
    assert len(copies) == 3 * 4 * 3  # layers, experts, matrices
    for key in copies:
        layer, matrix = key.split(".")[1], key.split(".")[5]
        assert torch.equal(found[key], source[f"layers.{layer}.mlp.{matrix}.weight"]), key
    routers = {f"layers.{layer}.mlp.router.weight" for layer in range(3)}
    assert same(found, source, found.keys() - copies - routers)
    assert "copied   36: each expert begins as the MLP of its layer" in told
    assert "fresh    3: layers.0.mlp.router.weight" in told and "dropped" not in told
    before, after = (first_and_last_loss(home / "runs" / name) for name in ("plain", "upcycled"))
    assert after[0] == pytest.approx(before[1], rel=1e-6)

    # a rank takes its experts, of the layers that stay
    changes = {"checkpoint__init_changes": "model.mlp.kind,model.layers", "model__layers": 2}
    settings = plain | mixture | changes | {"parallel__ep": 2, "train__micro_batch": 1}
    end = job(home, 2, words(home, "upcycled-ep", settings))
    assert end.codes == [0, 0], end.logs
    of_ranks = weights(home / "runs" / "upcycled-ep")
    assert same(of_ranks, found, of_ranks) and sum(".experts." in key for key in of_ranks) == 2 * 4 * 3


def test_experts_of_another_width_or_named_ones_begin_as_in_a_new_run(home, plain):
    mixture = {"model__mlp__kind": "experts", "model__mlp__experts": 2, "model__mlp__top_k": 1}
    trains(home, "new-mixture", **mixture)
    named = trains(
        home, "named-mixture", **plain, **mixture,
        checkpoint__init_changes="model.mlp.kind,layers.*.mlp.experts.*",
    )
    found, fresh = (weights(home / "runs" / name) for name in ("named-mixture", "new-mixture"))
    assert same(found, fresh, [key for key in found if ".mlp." in key])
    assert "copied" not in named and "dropped  9: layers.0.mlp.down.weight" in named

    narrow = trains(
        home, "narrow-mixture", **plain, **mixture | {"model__mlp__width": 16},
        checkpoint__init_changes="model.mlp.kind",
    )
    assert "copied" not in narrow and "dropped  9: layers.0.mlp.down.weight" in narrow


def test_weights_by_name_and_with_ranks(home, plain):
    """A new head: the source's is not taken. Two stages, and shards of two ranks, begin as one process."""
    changes = {"checkpoint__init_changes": "head.weight,model.layers", "model__layers": 2, "train__seed": 5}
    told = trains(home, "new-head", **plain, **changes)
    trains(home, "fresh-head", model__layers=2, train__seed=5)
    found, source = weights(home / "runs" / "new-head"), weights(home / "runs" / "plain")
    assert torch.equal(found["head.weight"], weights(home / "runs" / "fresh-head")["head.weight"])
    assert same(found, source, found.keys() - {"head.weight"})
    assert "fresh    1: head.weight" in told and "dropped  10: head.weight, layers.2." in told

    for name, layout in (("pp", {"parallel__pp": 2}), ("zero", {"parallel__zero": 2})):
        ranks = words(home, name, {**plain, **changes, **layout, "train__micro_batch": 1})
        end = job(home, 2, ranks)
        assert end.codes == [0, 0], end.logs
        assert same(weights(home / "runs" / name), found, found)
        assert [line for line in end.logs[0].splitlines() if line.startswith("dropped  10: head.weight")]


def damaged(home: Path, name: str, *, without: str, extra: str) -> Path:
    """The run `plain` as a code with another set of weights has saved it."""
    index = store.quick_check(checkpoint(home / "runs" / "plain"))
    kept = {key: tensor for key, tensor in weights(home / "runs" / "plain").items() if without not in key}
    boxes = [(piece.box, kept[piece.box.key]) for piece in index.pieces if piece.box.key in kept]
    whole = store.Box.whole
    boxes += [(whole(f"layers.{layer}.{extra}", (16, 16)), torch.ones(16, 16)) for layer in range(3)]
    store.save(home / "runs" / name / "checkpoints", 1, boxes, index.meta, keep=1)
    return home / "runs" / name


def test_weights_that_one_side_lacks_are_refused_by_name(home):
    """As after an edit of the model: no key differs. A key that leaves the weights as they are is no
    reason."""
    source = damaged(home, "edited", without="mlp.up", extra="attn.gate.weight")
    of = {"checkpoint__init_from": source}
    for more in ({}, {"model__mixer__window": 4, "checkpoint__init_changes": "model.mixer.window"}):
        line = refused(home, **of, **more)
        assert "weights there that are not used here: 3 (layers.0.attn.gate.weight, layers.1.attn" in line
        assert "weights here that are not there: 3 (layers.0.mlp.up.weight, " in line, line
        assert CHANGES in line
    end = job(home, 2, words(home, "refused", {**of, "parallel__pp": 2, "train__micro_batch": 1}))
    assert end.codes == [2, 2] and "that are not used here: 3 (" in end.errors()[0], end.logs
    told = trains(
        home, "consent", **of, checkpoint__init_changes="layers.*.attn.gate.weight,layers.*.mlp.up.weight"
    )
    assert "dropped  3: layers.0.attn.gate.weight" in told and "fresh    3: layers.0.mlp.up.weight" in told


# ---- the tokenizer -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(home):
    """Two sentencepiece models of as many ids, with data of each, `a` and `b`; a run of `a`."""
    for name, words in (("a", "some words and others"), ("b", "line of tokens, lines")):
        tokenizer.train_bpe([words] * 9, 280, home / f"{name}.model")
        text(home, name, home / f"{name}.model")
    trains(home, "of-a", data__path=home / "a")
    return home


def test_weights_go_under_another_tokenizer_only_where_it_is_stated(pieces):
    home, source = pieces, pieces / "runs" / "of-a"
    of_b = {"data__path": home / "b", "checkpoint__init_from": source}
    line = refused(home, **of_b)
    assert "data.tokenizer " in line and "--data.tokenizer none" not in line
    assert f"prepare the data with --tokenizer {source}/tokenizer" in line
    assert f"{CHANGES} data.tokenizer" in line and "model.vocab" not in line, line
    told = trains(home, "b-anyway", **of_b, checkpoint__init_changes="data.tokenizer")
    assert "changed  data.tokenizer " in told
    assert same(weights(home / "runs" / "b-anyway"), weights(source), weights(source))
    assert "taken" in trains(home, "a-again", data__path=home / "a", checkpoint__init_from=source)


def get_text(processor, token_id: int) -> bytes | None:
    """The text of an id of a sentencepiece model, or None for control tokens and the unknown one."""
    if processor.is_control(token_id) or processor.is_unknown(token_id):
        return None
    name = processor.id_to_piece(token_id)
    return bytes([int(name[3:5], 16)]) if processor.is_byte(token_id) else name.replace("▁", " ").encode()


def check_rows(found, fresh, source, same_ids: dict[int, int], size: int) -> int:
    """Each row is that of the same token, or as in a new run. Returns how many are of the same token."""
    for key in ("embed.weight", "head.weight"):
        for token_id in range(size):
            other = same_ids.get(token_id)
            wanted = fresh[key][token_id] if other is None else source[key][other]
            assert torch.equal(found[key][token_id], wanted), (key, token_id, other)
        assert torch.equal(found[key][size:], fresh[key][size:])
    return len(same_ids)


def test_a_rank_takes_of_the_rows_its_own_wherever_they_stand_there():
    """Neighbours in either order, rows that are nowhere, rows that two take, and what one rank holds."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        here, there = draw.integers(1, 30, 2)
        number = np.arange(here)
        rows = draw.choice([number + draw.integers(9), here - number, draw.integers(-2, there, here)])
        rows = np.where((rows < there) & (draw.random(here) < 0.9), rows, -1)
        stored = torch.arange(there * 4).view(there, 4)
        begin, end = sorted(draw.integers(0, here + 1, 2).tolist())
        found = torch.full((end - begin, 2), -1)
        for part, values in parts_by_rows(Box("w", (here, 4), (begin, 1), (end - begin, 2)), found, rows):
            assert part.size == tuple(values.shape) and 0 not in part.size
            (first, column), (count, columns) = part.start, part.size
            values.copy_(stored[first:first + count, column:column + columns])
        for row, number in zip(found.tolist(), rows[begin:end].tolist()):
            assert row == ([-1, -1] if number < 0 else stored[number, 1:3].tolist())


def test_ids_that_the_model_there_has_no_row_of_are_not_taken(tmp_path):
    """A tokenizer may have more ids than its model."""
    (tmp_path / "tokenizer").mkdir()
    index = SimpleNamespace(path=tmp_path / "checkpoints" / "step_1", meta={"tokenizer": "f"})
    ids = np.array([3, 0, -1, 7, 5, 4])
    for vocab, want in ((5, [3, 0, -1, -1, -1, 4]), (6, [3, 0, -1, -1, 5, 4]), (99, ids.tolist())):
        found = match_token_ids(index, SimpleNamespace(vocab=vocab), lambda folder, fingerprint: ids)
        assert found.tolist() == want


@pytest.mark.slow
def test_rows_go_to_the_tokens_of_the_same_text(pieces):
    """Between two sentencepiece models: pieces of one text, bytes, and what begins and ends a document."""
    home, source = pieces, pieces / "runs" / "of-a"
    settings = {"data__path": home / "b", "train__seed": 5}
    trains(home, "fresh-b", **settings)
    of_a = {**settings, "checkpoint__init_from": source, "checkpoint__init_changes": "data.tokenizer=text"}
    told = trains(home, "by-text", **of_a)

    there, here = (tokenizer.load_tokenizer(home / f"{name}.model").processor for name in "ab")
    places = {get_text(there, number): number for number in range(there.vocab_size())}
    same_ids = {here.eos_id(): there.eos_id(), here.bos_id(): there.bos_id()}
    for number in range(here.vocab_size()):
        if get_text(here, number) is not None and get_text(here, number) in places:
            same_ids[number] = places[get_text(here, number)]
    moved = sum(other != number for number, other in same_ids.items())
    assert moved > 5 and len(same_ids) < here.vocab_size()
    found, fresh, taken = (weights(home / "runs" / name) for name in ("by-text", "fresh-b", "of-a"))
    rows = check_rows(found, fresh, taken, same_ids, here.vocab_size())
    assert same(found, taken, found.keys() - {"embed.weight", "head.weight"})
    assert f"in part  2: embed.weight ({rows:,} rows), head.weight ({rows:,} rows)" in told

    for name, layout in (("tp", {"parallel__tp": 2}), ("shards", {"parallel__zero": 3})):
        ranks = words(home, name, {**of_a, **layout, "train__micro_batch": 1})
        end = job(home, 2, ranks)
        assert end.codes == [0, 0], end.logs
        assert same(weights(home / "runs" / name), found, found)


def test_rows_go_to_a_tokenizer_of_another_kind_and_size(pieces, tmp_path):
    """A byte-level BPE, whose vocabulary is another: a space is another letter of its names."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    home = pieces
    other = make_tokenizer("llama3", tmp_path / "llama3")
    text(home, "c", other)
    settings = {"data__path": home / "c", "train__seed": 5, "data__bos": "false"}
    trains(home, "fresh-c", **settings)
    of_a = {**settings, "checkpoint__init_from": home / "runs" / "of-a"}
    line = refused(home, **of_a)
    assert f"{CHANGES} model.vocab,data.tokenizer (data.tokenizer=text: rows go to tokens of" in line, line
    trains(home, "c-by-text", **of_a, checkpoint__init_changes="data.tokenizer=text")

    there = tokenizer.load_tokenizer(home / "a.model").processor
    places = {get_text(there, number): number for number in range(there.vocab_size())}
    here = transformers.AutoTokenizer.from_pretrained(other)
    letters = importlib.import_module("transformers.convert_slow_tokenizer").bytes_to_unicode()
    byte_of = {letter: byte for byte, letter in letters.items()}
    same_ids = {here.eos_token_id: there.eos_id(), here.bos_token_id: there.bos_id()}
    for name, number in here.get_vocab().items():
        written = bytes(byte_of[letter] for letter in name) if number not in here.all_special_ids else None
        if written in places and not name.startswith("<|"):
            same_ids[number] = places[written]
    names = ("c-by-text", "fresh-c", "of-a")
    found, fresh, taken = (weights(home / "runs" / name) for name in names)
    assert check_rows(found, fresh, taken, same_ids, len(here)) > 256

    shutil.move(home / "runs/of-a/tokenizer", home / "moved")
    line = refused(home, **of_a, checkpoint__init_changes="data.tokenizer=text")
    shutil.move(home / "moved", home / "runs/of-a/tokenizer")
    assert "of-a/tokenizer is not there" in line and "rows keep their indices" in line


def test_a_resume_under_another_tokenizer_advises_nothing_that_harms(pieces):
    """The way out that it names is tried: data of the run's tokenizer."""
    home = pieces
    code, told = program("train.py", *words(home, "of-a", {"data__path": home / "b", "train__steps": 2}))
    line = told.splitlines()[-1]
    assert code == 2 and "tokenizer" in line and "checkpoint.init_from" not in line, told
    folder = line.partition("--tokenizer ")[2].split(",")[0].split(";")[0]
    again = text(home, "b-as-a", folder)
    code, told = program(
        "train.py", *words(home, "again", {"data__path": again, "checkpoint__init_from": home / "runs/of-a"})
    )
    assert code == 0, told


@pytest.mark.slow
def test_a_resume_of_another_model_advises_what_works(home, plain):
    """The command that it names, with what it says, trains."""
    settings = {"model__mixer__window": 4, "train__steps": 2}
    code, told = program("train.py", *words(home, "plain", settings))
    line = told.splitlines()[-1]
    assert code == 2 and line.startswith("error: model.mixer.window: "), told
    advice = line.rpartition("--log.name OTHER ")[2].split()
    code, told = program("train.py", *words(home, "advised", settings), *advice)
    assert code == 0 and "changed  model.mixer.window none -> 4" in told, told


def test_documents_that_begin_otherwise_are_refused_until_it_is_stated(pieces):
    """With a start token, which the weights have not seen; each way out is tried."""
    home, source = pieces, {"checkpoint__init_from": pieces / "runs" / "of-a", "data__path": pieces / "a"}
    line = refused(home, **source, data__bos="true")
    assert "data.bos false there and true here; set --data.bos false, or " in line, line
    assert line.endswith(f"{CHANGES} data.bos"), line
    assert "taken" in trains(home, "without", **source, data__bos="false")
    told = trains(home, "with", **source, data__bos="true", checkpoint__init_changes="data.bos")
    assert "changed  data.bos false -> true" in told
    line = refused(home, **source, checkpoint__init_changes="data.bos")
    assert "data.bos is the same there and here" in line and "leave it out" in line


@pytest.mark.slow
def test_a_resume_with_a_start_token_advises_what_works(pieces):
    home, settings = pieces, {"data__path": pieces / "a", "data__bos": "true", "train__steps": 2}
    code, told = program("train.py", *words(home, "of-a", settings))
    assert code == 2, told
    advice = told.splitlines()[-1].partition("--log.name OTHER ")[2].split()
    code, told = program("train.py", *words(home, "advised-start", settings), *advice)
    assert code == 0 and "changed  data.bos false -> true" in told, told


# ---- weights of Hugging Face -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hugging_face_folder_is_taken_in_pieces_by_each_rank(pieces):
    """The same weights as through an import, on one rank and on shards; what is damaged is refused."""
    home, imported, folder = pieces, pieces / "runs" / "of-a-in", pieces / "folder"
    code, told = program("-m", "scripts.convert", "to-hf", home / "runs" / "of-a", folder)
    assert code == 0, told
    code, told = program("-m", "scripts.convert", "from-hf", folder, imported)
    assert code == 0, told
    of = {"data__path": text(home, "folder-text", imported / "tokenizer"), "model__vocab_multiple": 128,
          "checkpoint__init_from": folder}

    told = trains(home, "direct", **of)
    assert f"weights  from {folder} (step 0)" in told and "not known" not in told
    source, found = weights(imported), weights(home / "runs" / "direct")
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    for key, value in source.items():
        kept = slice(0, rows) if key in ("embed.weight", "head.weight") else slice(None)
        assert torch.equal(found[key][kept], value[kept]), key
    end = job(home, 2, words(home, "sharded", {**of, "parallel__zero": 3, "train__micro_batch": 1}))
    assert end.codes == [0, 0], end.logs
    sharded = weights(home / "runs" / "sharded")
    assert all(torch.equal(sharded[key][:rows], found[key][:rows]) for key in source)

    assert "model.norm.eps 1e-05 there and 0.01 here" in refused(home, **of, model__norm__eps=0.01)
    weight_file = folder / "model.safetensors"
    whole = load_file(weight_file)
    save_file({**whole, "model.norm.weight": whole["model.norm.weight"] * torch.nan}, weight_file)
    assert "model.norm.weight holds NaN or Inf" in refused(home, **of)
    save_file({**whole, "model.extra.weight": torch.zeros(2)}, weight_file)
    assert "model.extra.weight is not a weight of" in refused(home, **of)
    save_file({name: value for name, value in whole.items() if name != "model.norm.weight"}, weight_file)
    assert "weights here that are not there: 1 (norm.weight)" in refused(home, **of)
    weight_file.write_bytes(weight_file.read_bytes()[:-8])
    assert f"{weight_file}: truncated" in refused(home, **of)


@pytest.fixture(scope="module")
def hf(pieces):
    """A Hugging Face folder of the run of `a`; it has tokenizer.json, made of tokenizer.model, and both."""
    code, told = program("-m", "scripts.convert", "to-hf", pieces / "runs" / "of-a", pieces / "hf")
    assert code == 0, told
    assert {"tokenizer.json", "tokenizer.model"} <= {path.name for path in (pieces / "hf").iterdir()}
    return pieces / "hf"


def test_data_of_another_tokenizer_than_that_of_a_hugging_face_folder_is_refused(pieces, hf):
    """Data of either form of its tokenizer is taken; other data where it is stated."""
    home, of = pieces, {"checkpoint__init_from": hf, "model__vocab_multiple": 128}
    own = text(home, "hf-text", hf)
    line = refused(home, **of, data__path=home / "b")
    assert "data.tokenizer " in line and f"prepare the data with --tokenizer {hf}" in line, line
    assert f"{CHANGES} data.tokenizer" in line, line
    assert "data.bos false there and true here" in refused(home, **of, data__path=own, data__bos="true")
    end = job(home, 2, words(home, "refused", {**of, "data__path": home / "b", "train__micro_batch": 1}))
    assert end.codes == [2, 2] and "data.tokenizer " in end.errors()[0], end.logs

    for number, data in enumerate((own, home / "a")):
        told = trains(home, f"of-hf-{number}", **of, data__path=data)
        assert "taken" in told and "not known" not in told and "warning" not in told, told
    by_text = {**of, "data__path": home / "b", "checkpoint__init_changes": "data.tokenizer=text"}
    assert "in part  2: embed.weight (" in trains(home, "of-hf-by-text", **by_text)


def test_where_files_of_a_folder_differ_the_end_of_documents_of_the_data_decides(hf, tmp_path):
    """Published folders may name several; the data was prepared with one of them, by --eod."""
    folder = tmp_path / "several"
    shutil.copytree(hf, folder)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "eos_token_id": 1}))
    index = open_hf_folder(folder)
    for end in ("1", "2"):
        tok = tokenizer.load_tokenizer(folder, end)
        assert with_tokenizer(index, tok).meta["tokenizer"] == tok.fingerprint
    other = replace(tok, contract=replace(tok.contract, end=replace(tok.contract.end, id=999)))
    with pytest.raises(ConfigError, match=f"^{folder}: its files name different tokens as the end"):
        with_tokenizer(index, other)


@pytest.mark.slow
def test_a_hugging_face_folder_without_tokenizer_and_data_without_record_are_named(pieces, hf):
    """The tokenizer of unrecorded data is what data.tokenizer says, which is compared all the same."""
    home, bare = pieces, pieces / "bare"
    shutil.copytree(hf, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    of = {"checkpoint__init_from": bare, "model__vocab_multiple": 128}
    assert "their tokenizer is not known" in trains(home, "of-bare", **of, data__path=home / "b")

    for suffix in ("bin", "idx"):
        shutil.copyfile(f"{home / 'b'}.{suffix}", f"{home / 'unnamed'}.{suffix}")
    of = {**of, "checkpoint__init_from": hf, "data__path": home / "unnamed"}
    told = trains(home, "of-unnamed", **of, data__tokenizer=hf)
    (line,) = [line for line in told.splitlines() if "warning" in line]
    assert "unnamed does not record which tokenizer made it" in line and "nothing confirms it" in line
    assert "data.tokenizer " in refused(home, **of, data__tokenizer=home / "b.model")


@pytest.mark.slow
def test_files_beside_the_tokenizer_of_a_hugging_face_folder_go_into_the_export(pieces, hf):
    """Its chat template, though the data was prepared before it was there."""
    home, folder = pieces, pieces / "with-template"
    own = text(home, "own-text", hf)
    shutil.copytree(hf, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    of = {"checkpoint__init_from": folder, "model__vocab_multiple": 128, "data__path": own}
    trains(home, "of-template", **of)
    code, told = program("-m", "scripts.convert", "to-hf", home / "runs" / "of-template", home / "out")
    assert code == 0, told
    assert (home / "out" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    ids = [tokenizer.load_tokenizer(each).fingerprint for each in (folder, home / "out")]
    assert ids[0] == ids[1]


def test_an_imported_model_is_taken_as_a_run_of_ours(pieces, hf):
    """Out and in again: its function and its tokenizer are known, and asked for as those of a run of ours."""
    home, imported = pieces, pieces / "runs" / "imported"
    code, told = program("-m", "scripts.convert", "from-hf", hf, imported)
    assert code == 0, told

    own = text(home, "imported-text", imported / "tokenizer")
    of = {"data__path": own, "checkpoint__init_from": imported, "model__vocab_multiple": 128}
    told = trains(home, "tuned", **of)
    assert f"weights  from {checkpoint(imported)} (step 0)" in told
    source, found = weights(imported), weights(home / "runs" / "tuned")
    assert found.keys() == source.keys() and same(found, source, found)
    assert "model.norm.eps 1e-05 there and 0.01 here" in refused(home, **of, model__norm__eps=0.01)
    assert "data.tokenizer " in refused(home, **{**of, "data__path": home / "b"})

    # data that contradicts the imported config: to leave data.tokenizer out would not help
    config = ("--config", imported / "config.yaml", "--data.path", home / "b", "--train.dtype", "fp32")
    code, told = program("train.py", *config)
    assert code == 2 and "leave data.tokenizer out" not in told, told
    assert f"--tokenizer {imported}/tokenizer" in told.splitlines()[-1], told
    code, told = program("train.py", *config, "--data.tokenizer", "none", "--train.seq_len", "16")
    assert code == 2 and "data.tokenizer " in told.splitlines()[-1], told
