"""scripts.generate, scripts.evaluate and the export of scripts.convert on ranks that hold a model together:
what one process says of it, whatever layout trained it.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import signal
import sys
import time

import pytest
import torch
from ranks import MODEL, SIZES, corpus, job
from waiting import wait_until

from checkpoint import trained
from checkpoint.disk.files import StorageError
from checkpoint.hf import export as hf_ranks
from checkpoint.hf import tensors as hf
from checkpoint.hf.families.family import Arrangement
from scripts import convert, evaluate, generate

# latents, biases of routers, a module that predicts further ahead
MIXTURE = (*SIZES, "--model.mlp", "experts", "--model.mlp.experts", "8", "--model.mlp.width", "16")
RUNS = {  # recipe, its model, what trains it
    "dense": ("llama2-tiny", MODEL, "--parallel.tp 2 --parallel.pp 2"),
    "tied": ("gpt2-tiny", (*MODEL, "--model.mixer.kv_heads", "none"), "--parallel.zero 3"),
    "constants": ("apertus-tiny", MODEL, "--parallel.tp 2 --parallel.zero 3"),
    "mixture": ("deepseek-v3-tiny", MIXTURE, "--parallel.ep 4 --parallel.zero 1"),
}
LIMIT = 120.0  # seconds of a job


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the runs, each trained by four ranks at a rate that leaves no token likely everywhere."""
    home = tmp_path_factory.mktemp("ranks")
    data = corpus(home)
    for name, (recipe, model, layout) in RUNS.items():
        words = [recipe, *model, "--train.steps", "6", "--optim.lr", "0.03", "--train.ema", "0.5"]
        words += ["--train.dtype", "fp32", "--checkpoint.every", "3", "--checkpoint.keep", "2"]
        words += [*layout.split(), "--data.path", data, "--log.dir", str(home), "--log.name", name]
        end = job(home / "jobs" / name, 4, words)
        assert end.codes == [0] * 4, end.logs
    return home


def alone(main, *words: str) -> str:
    """Run it in one process and return what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(list(words)) == 0
    return said.getvalue()


def together(home, main, *words: str, world: int = 2, **more):
    return job(home, world, words, main=main, limit=LIMIT, **more)


def printed(end) -> str:
    """The output of the first rank; the others must print nothing."""
    assert end.codes == [0] * len(end.codes), end.logs
    assert not any(end.logs[1:])
    return end.logs[0]


LAYOUTS = ("", "--parallel.pp 2", "--parallel.tp 2 --parallel.pp 1")


@pytest.mark.slow(core=["mixture"])
@pytest.mark.parametrize("name", RUNS)
def test_ranks_generate_the_tokens_of_one_process(home, tmp_path, name):
    greedy = (str(home / name), "--prompt", "abc", "--max-new-tokens", "12", "--temperature", "0")
    sampled = (str(home / name), "--prompt", "abc", "--max-new-tokens", "12", "--samples", "2", "--seed", "3")
    for number, layout in enumerate(LAYOUTS):
        for words in (greedy, (*sampled, "--top-p", "0.9", "--weights", "ema")):
            want = alone(generate.main, *words)
            end = together(tmp_path / str(number), generate.main, *words, *layout.split())
            assert printed(end) == want
    assert len(set(want)) > 5  # not a constant


@pytest.mark.slow(core=["mixture"])
@pytest.mark.parametrize("name", RUNS)
def test_ranks_give_the_loss_of_one_process(home, tmp_path, name):
    words = (str(home / name), "--data", str(home / "text"), "--micro-batch", "3", "--json")
    want = json.loads(alone(evaluate.main, *words))
    for number, layout in enumerate(LAYOUTS):
        found = json.loads(printed(together(tmp_path / str(number), evaluate.main, *words, *layout.split())))
        check_alike(found, want)


def check_alike(found: dict, want: dict) -> None:
    """Numbers within 1e-6, but for seconds; all else equal."""
    assert list(found) == list(want)
    for key in found:
        if key != "seconds":
            is_number = isinstance(want[key], float)
            assert found[key] == (pytest.approx(want[key], abs=1e-6, rel=1e-6) if is_number else want[key])


OWN_TASK = """
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/docs.json}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{q}}}} "
doc_to_choice: "{{{{a}}}}"
doc_to_target: gold
metric_list: {metrics}
generation_kwargs: {{until: ["z"], max_gen_toks: 4}}
"""
KINDS = {  # what lm-eval asks for, and the metrics
    "multiple_choice": "[{metric: acc}, {metric: brier_score}]",
    "generate_until": "[{metric: exact_match}]",
}


def test_ranks_score_tasks_as_one_process(home, tmp_path):
    for number, (context, continuation) in enumerate([("abcd", " efgh"), ("", "start"), ("x" * 60, "y")]):
        line = json.dumps({"context": context, "continuation": continuation})
        (tmp_path / f"text{number}.jsonl").write_text(line + "\n")
    check_tasks(home, tmp_path, ["--tasks", str(tmp_path)], 3)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_score_tasks_of_lm_eval_as_one_process(home, tmp_path, kind):
    docs = [{"q": f"say {i}", "a": [chr(97 + i), chr(107 + i)], "gold": i % 2} for i in range(5)]
    (tmp_path / "docs.json").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tmp_path / "own.yaml").write_text(OWN_TASK.format(folder=tmp_path, kind=kind, metrics=KINDS[kind]))
    check_tasks(home, tmp_path, ["--tasks", "own", "--task-folder", str(tmp_path)], 1)


def check_tasks(home, tmp_path, words: list[str], count: int) -> None:
    words = [str(home / "mixture"), *words, "--json"]
    want = json.loads(alone(evaluate.main, *words))["tasks"]
    for number, layout in enumerate(LAYOUTS[:2]):
        said = printed(together(tmp_path / str(number), evaluate.main, *words, *layout.split()))
        found, _ = json.JSONDecoder().raw_decode(said, said.index('{"run"'))  # amid lines of progress
        found = found["tasks"]
        assert list(found) == list(want) and len(want) == count
        for name in want:
            assert found[name] == pytest.approx(want[name], abs=1e-6)


# ---- export ------------------------------------------------------------------------------------------------


def underlying_files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


EXPORTS = {  # run, words, ranks
    "one file": ("dense", "", 2),
    "files of fewer ranks": ("dense", "--shard-size 20KB --weights ema", 3),
    "bf16": ("mixture", "--shard-size 30KB --dtype bf16", 2),
    "constants": ("constants", "--shard-size 20KB", 2),
    "transposed": ("tied", "--shard-size 0.02MB", 2),
}


@pytest.mark.slow(core=["bf16"])
@pytest.mark.parametrize("name", EXPORTS)
def test_ranks_export_the_folder_of_one_process(home, tmp_path, name):
    run, words, world = EXPORTS[name]
    alone(convert.main, "to-hf", str(home / run), str(tmp_path / "alone"), *words.split())
    words = ["to-hf", str(home / run), str(tmp_path / "ranks"), *words.split()]
    said = printed(together(tmp_path / "job", convert.main, *words, world=world))
    want, found = underlying_files(tmp_path / "alone"), underlying_files(tmp_path / "ranks")
    assert list(found) == list(want) and all(found[file] == want[file] for file in want)
    shards = [file for file in found if file.endswith(".safetensors")]
    assert (len(shards) == 1) == (name == "one file")
    assert f"note: {world} ranks wrote {len(shards)} file" in said and "no logits were compared" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "job", "ranks"]
    if name == "bf16":
        transformers = pytest.importorskip("transformers")
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ranks", local_files_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_export_of_ranks_that_is_imported_again_says_the_same(home, tmp_path, name):
    """Trained by four ranks, exported by two, imported by one, generated by two: as one process generates."""
    words = ("--prompt", "abc", "--max-new-tokens", "12", "--temperature", "0")
    want = alone(generate.main, str(home / name), *words)
    printed(together(tmp_path / "export", convert.main, "to-hf", str(home / name), str(tmp_path / "hf")))
    alone(convert.main, "from-hf", str(tmp_path / "hf"), str(tmp_path / "back"))
    for number, layout in enumerate(LAYOUTS):
        end = together(tmp_path / str(number), generate.main, str(tmp_path / "back"), *words, *layout.split())
        assert printed(end) == want


def test_a_rank_that_cannot_write_leaves_no_folder(home, tmp_path):
    def full(*_: object, **__: object) -> None:
        raise StorageError("file", 100, "No space left on device (ENOSPC)")

    def before(rank: int) -> None:
        if rank == 1:
            hf_ranks.check_file = full

    words = ("to-hf", str(home / "dense"), str(tmp_path / "out"), "--shard-size", "20KB")
    end = together(tmp_path / "job", convert.main, *words, before=before)
    assert 82 in end.codes and end.seconds < 30
    assert "file: cannot read or write 100 bytes: No space left" in end.errors()[0]
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_what_is_on_the_disk_is_read_back(tmp_path):
    tensor = hf.HFTensor("a", [torch.arange(8.0)], Arrangement())
    seen = {}
    hf.write_tensors(
        tmp_path / "file", [tensor], torch.float32, note=lambda name, data: seen.update({name: bytes(data)})
    )
    checksums = {"a": f"sha256:{hashlib.sha256(seen['a']).hexdigest()}"}
    hf_ranks.check_file(tmp_path / "file", checksums)
    data = bytearray((tmp_path / "file").read_bytes())
    data[-1] ^= 1
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(StorageError, match="reads back differently: .*file: a is not what was written"):
        hf_ranks.check_file(tmp_path / "file", checksums)


def test_nobody_writes_into_a_folder_that_is_being_removed(tmp_path, monkeypatch):
    """Another rank, which has not heard of the error yet: a folder that gains a file cannot be removed."""
    rmdir, late = os.rmdir, []

    def beside_a_writer(*args, **how):
        with contextlib.suppress(FileNotFoundError):
            late[0].write_text("of another rank")
        rmdir(*args, **how)

    monkeypatch.setattr(os, "rmdir", beside_a_writer)
    with pytest.raises(KeyboardInterrupt), convert.new_folder(tmp_path / "out") as temp:
        (temp / "first").write_text("of this rank")
        late.append(temp / "late")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_an_end_from_outside_leaves_no_folder(home, tmp_path):
    """As torchrun ends the first rank where another one is lost."""
    def before(rank: int) -> None:
        hf_ranks.check_file = lambda *_: time.sleep(60)

    def meanwhile(pids: dict[int, int]) -> None:
        wait_until(lambda: list(tmp_path.glob(".out.tmp-*/*.safetensors")), LIMIT)
        os.kill(pids[0], signal.SIGTERM)

    words = ("to-hf", str(home / "dense"), str(tmp_path / "out"), "--shard-size", "20KB")
    end = together(tmp_path / "job", convert.main, *words, before=before, meanwhile=meanwhile)
    assert all(end.codes) and end.seconds < 30
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_what_an_export_refuses_is_one_line(home, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, says in (
        (("to-hf", str(home / "dense"), str(tmp_path / "full")), f"{tmp_path}/full: exists already; choose"),
        (("from-hf", str(home), str(tmp_path / "run")), "from-hf: one process imports, and here are 2 ranks"),
        (
            ("to-hf", "a", "b", "--shard-size", "5"),
            "--shard-size: expected a size such as 5GB or 200MB, got '5'",
        ),
    ):
        end = together(tmp_path / "job", convert.main, *words)
        assert 2 in end.codes
        (line,) = [line for log in end.logs for line in log.splitlines()]
        assert line.startswith(f"error: {says}")


# ---- what is refused, and failures -------------------------------------------------------------------------

REFUSED = [  # script, words, ranks, what is said
    ("generate", "--parallel.tp 3", 3, "parallel.tp: 3 does not divide model.mixer.heads=4"),
    ("generate", "--parallel.pp 4", 4, "parallel.pp: 4 stages, and model.layers is 2; lower it, or raise"),
    ("evaluate", "--parallel.tp 2", 3, "parallel.tp*pp = 2*1 = 2 on 3 ranks: each rank holds a"),
    ("evaluate", "", 3, "parallel.tp: no degree divides a node's ranks and the model so that the rest of 3 "),
    ("generate", "--parallel.cp 2", 2, "unrecognized arguments: --parallel.cp 2; see python -m scripts"),
    ("evaluate", "--parallel.pp 0", 2, "--parallel.pp: 0 must be above 0"),
    ("generate", "--parallel.tp 2", 1, "parallel.tp*pp = 2*1 = 2 on 1 rank: each rank holds a"),
]
MAIN = {"generate": generate.main, "evaluate": evaluate.main}


@pytest.mark.parametrize("script, words, world, says", REFUSED)
def test_a_layout_that_cannot_be_is_one_line(home, tmp_path, script, words, world, says):
    end = together(tmp_path, MAIN[script], str(home / "dense"), *words.split(), world=world)
    assert 2 in end.codes and end.seconds < 30
    (line,) = [line for log in end.logs for line in log.splitlines()]
    assert line.startswith(f"error: {says}")


def test_other_words_and_a_failure_of_one_rank(home, tmp_path):
    words = (str(home / "dense"), "--max-new-tokens", "3")
    end = together(tmp_path / "words", generate.main, *words, rank_args={1: ["--seed", "1"]})
    assert 2 in end.codes
    assert end.errors() == [
        "error: rank 1 was started with a different command than rank 0; start every rank with the same "
        "command, "
        "from the same checkout"
    ]

    def fails(*_: object) -> None:
        raise OSError(5, "the disk of rank 1 is gone")

    def before(rank: int) -> None:
        if rank == 1:
            trained.tokenizer_of_run = fails

    end = together(tmp_path / "failure", generate.main, *words, before=before)
    assert all(end.codes) and end.seconds < 30
    assert any("rank 1 on" in line and "the disk of rank 1 is gone" in line for line in end.errors())


def test_a_damaged_checkpoint_gives_way_to_the_one_before(home, tmp_path):
    """Whichever rank finds it."""
    shutil.copytree(home / "dense", tmp_path / "run")
    first, last = ((tmp_path / "run" / "checkpoints" / f"step_0000000{step}") for step in (3, 6))
    words = ("--prompt", "a", "--max-new-tokens", "8", "--temperature", "0")
    want = alone(generate.main, str(first), *words)
    assert want != alone(generate.main, str(last), *words)
    invert_values(last)
    assert printed(together(tmp_path / "one", generate.main, str(tmp_path / "run"), *words)) == want
    invert_values(first)
    end = together(tmp_path / "none", generate.main, str(tmp_path / "run"), *words)
    assert 79 in end.codes and str(first) in end.errors()[0]


def invert_values(checkpoint) -> None:
    """Changes every bit of the tensors in the shards that rank 1 has written."""
    for file in checkpoint.glob("rank_00001*.safetensors"):
        data = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        file.write_bytes(data[:start] + bytes(255 - byte for byte in data[start:]))


def test_the_first_rank_reads_the_terminal(home, tmp_path, monkeypatch):
    """Each line is a message; empty ones are none."""
    lines = "abc\n\nb c d\n"

    def before(rank: int) -> None:
        sys.stdin = io.StringIO(lines if rank == 0 else "of another rank\n")

    words = (str(home / "dense"), "--chat", "--max-new-tokens", "6", "--temperature", "0")
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    want = alone(generate.main, *words)
    end = together(tmp_path, generate.main, *words, before=before)
    assert end.codes == [0, 0] and not end.logs[1]
    assert [line for line in end.logs[0].splitlines() if not line.startswith("note: ")] == want.splitlines()


def test_help_is_printed_once(tmp_path):
    def helped(words: list[str]) -> int:
        with pytest.raises(SystemExit) as end:
            generate.main(words)
        return end.value.code

    end = together(tmp_path, helped, "--help")
    assert end.logs[0].startswith("usage: ") and "--parallel.tp" in end.logs[0]
    assert end.codes == [0, 0] and not end.logs[1]
