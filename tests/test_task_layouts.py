"""eval.tasks through train.py: every layout gives the numbers of one process, and scripts.evaluate those of
the loop.
"""

import json
import math

import pytest
import run_folder
import torch
from core_bundle import made_up_rows, write_core
from ranks import MODEL, corpus, job

import train
from data.tokenizer import load_tokenizer
from scripts.convert import main as convert
from scripts.evaluate import main

LAYOUTS = [
    ("llama2-tiny", 1, ""),
    ("llama2-tiny", 2, "--parallel.zero 3"),
    ("llama2-tiny", 2, "--parallel.tp 2"),
    ("llama2-tiny", 2, "--parallel.tp 2 --parallel.sp true --parallel.async_tp true"),
    ("llama2-tiny", 2, "--parallel.pp 2"),
    ("llama2-tiny", 2, "--parallel.pp 2 --parallel.schedule zb-v --model.layers 4"),
    ("llama2-tiny", 2, "--parallel.cp 2 --parallel.zero 1"),
    ("llama2-tiny", 2, "--parallel.cp 2 --parallel.cp_kind ulysses"),
    ("gpt2-tiny", 2, "--parallel.tp 2 --parallel.sp true"),
    ("gpt2-tiny", 2, ""),
    ("mixtral-tiny", 2, "--parallel.ep 2"),
    ("mixtral-tiny", 2, "--parallel.tp 2 --parallel.etp 2"),
    ("mixtral-tiny", 2, "--parallel.cp 2 --parallel.ep 2"),
]
TEXTS = [  # each a task of its own: its bpb is its log-probability
    ("abcd", " efgh"),
    ("", "the start"),
    ("x" * 60, "y"),
    ("one two ", "three"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("tasks")
    for number, (context, continuation) in enumerate(TEXTS):
        line = json.dumps({"context": context, "continuation": continuation})
        (home / f"text{number}.jsonl").write_text(line + "\n")
    write_core(home / "core", made_up_rows(5))
    corpus(home)
    return home


def arguments(home, name, recipe, more=""):
    files = [str(home / f"text{number}.jsonl") for number in range(len(TEXTS))]
    size = [] if recipe != "gpt2-tiny" else ["--model.mixer.kv_heads", "none"]
    return [
        recipe, *MODEL, *size,
        *("--train.dtype", "fp64", "--train.steps", "2", "--optim.lr", "0.01", "--eval.every", "1"),
        *("--data.path", str(home / "text"), "--checkpoint.every", "none"),
        *("--eval.tasks", ",".join(["configs/tasks", *files, str(home / "core")]), "--eval.tasks_limit", "5"),
        *("--eval.tasks_every", "2", "--log.dir", str(home), "--log.name", name),
        *more.split(),
    ]


def validations(folder):
    """{step: the metrics of tasks} of a run's validations."""
    return {
        row["step"]: {name: value for name, value in row.items() if name.startswith("tasks/")}
        for row in run_folder.validations(folder)
    }


def model_keys(words: str) -> str:
    """The words of a layout that one process needs too."""
    pairs = zip(words.split()[::2], words.split()[1::2])
    return " ".join(f"{key} {value}" for key, value in pairs if key.startswith("--model"))


@pytest.fixture(scope="module")
def alone(home):
    """The validations of one process, by recipe and model."""
    known = {}

    def run(recipe, more):
        key = recipe, more
        if key not in known:
            name = f"{recipe}{more}".replace(" ", "")
            assert train.main(arguments(home, name, recipe, more)) == 0
            known[key] = validations(home / name)
        return known[key]

    return run


@pytest.mark.slow(core=["mixtral-tiny-2---parallel.ep 2"])
@pytest.mark.parametrize("recipe, world, layout", LAYOUTS, ids=lambda value: str(value))
def test_a_layout_gives_the_numbers_of_one_process(home, alone, tmp_path, recipe, world, layout):
    end = job(tmp_path, world, arguments(home, f"run-{recipe}-{world}-{layout}", recipe, layout))
    assert end.codes == [0] * world, end.logs
    found = validations(home / f"run-{recipe}-{world}-{layout}")
    want = alone(recipe, model_keys(layout))
    assert list(found) == [0, 1, 2] and not found[1]  # eval.tasks_every 2
    for step in (0, 2):
        assert found[step] == pytest.approx(want[step], abs=1e-9, rel=1e-9)
        assert len(found[step]) == 4 * 5 + (len(TEXTS) + 1) * 3 + 1
    assert found[0] != pytest.approx(found[2], abs=1e-3)
    lines = [line for line in end.logs[0].splitlines() if line.startswith(" task 2  ")]
    core = found[2]["tasks/core"]
    assert len(lines) == 2 + len(TEXTS) + 3 + 1
    assert lines[-1].startswith(f" task 2  CORE {core:.4f} over its tasks, 29 examples in ")
    assert not any(" task " in line for log in end.logs[1:] for line in log.splitlines())


def test_the_script_gives_the_numbers_of_the_loop(home, alone, capsys):
    want = alone("llama2-tiny", "")[2]
    files = [str(home / f"text{number}.jsonl") for number in range(len(TEXTS))]
    capsys.readouterr()
    folder = str(home / "llama2-tiny")
    tasks = ["configs/tasks", *files, str(home / "core")]
    assert main([folder, "--tasks", *tasks, "--limit", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    flat = {f"tasks/{name}/{key}": value for name, of in found["tasks"].items() for key, value in of.items()}
    flat["tasks/core"] = found["core"]
    assert found["step"] == 2 and flat == pytest.approx(want, abs=1e-12, rel=1e-12)


@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_file_ends_the_run_before_it_makes_anything(home, tmp_path, world):
    (tmp_path / "bad.jsonl").write_text('{"context": "a", "continuation": "b"}\n{"context": 1}\n')
    words = arguments(home, "bad", "llama2-tiny")
    words[words.index("--eval.tasks") + 1] = str(tmp_path / "bad.jsonl")
    end = job(tmp_path / "job", world, words)
    assert 2 in end.codes and end.errors()
    assert end.errors()[0].startswith(f"error: eval.tasks: {tmp_path}/bad.jsonl:2: no known layout")
    assert not (home / "bad").exists()


def test_log_probabilities_of_transformers(home, alone, tmp_path, capsys):
    """The exported model on the same ids, in torch's own log_softmax."""
    transformers = pytest.importorskip("transformers")
    want = alone("llama2-tiny", "")[2]
    assert convert(["to-hf", str(home / "llama2-tiny"), str(tmp_path / "hf"), "--dtype", "fp32"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    tok = load_tokenizer("bytes")
    for number, (context, continuation) in enumerate(TEXTS):
        start = list(context.strip().encode()) or [tok.eod]
        answer = list(f" {continuation.strip()}".encode() if context else continuation.encode())
        ids = torch.tensor([[*start, *answer]])
        with torch.no_grad():
            log_probs = model.eval()(ids[:, :-1]).logits.log_softmax(-1)[0]
        nats = log_probs.gather(1, ids[0, 1:, None])[-len(answer) :].sum().item()
        bits = -nats / math.log(2) / len(continuation.strip())
        assert want[f"tasks/text{number}/bpb"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.slow
def test_tasks_are_cut_to_the_context_of_their_phase(home):
    """Whichever phase a process begins in: a run that was stopped in the second reports the same numbers."""
    rows = json.dumps([{"after_steps": 2, "train.seq_len": 48, "model.context": 48}])
    more = f"--model.context 16 --eval.tasks_every 1 --train.steps 4 --train.phases {rows.replace(' ', '')}"
    for name, fault in (("whole", ""), ("stopped", "step.begin:step=3:act=SIGTERM")):
        words = arguments(home, name, "llama2-tiny", more)
        if fault:
            assert job(home / f"{name}-first", 1, words, fault=fault).codes == [75]
        end = job(home / f"{name}-last", 1, words)
        assert end.codes == [0], end.logs
    whole, stopped = (validations(home / name) for name in ("whole", "stopped"))
    assert whole == stopped and list(whole) == [0, 1, 2, 3, 4]

    # an answer that a later phase cannot take is refused before any step
    words = arguments(home, "long", "llama2-tiny", more.replace("48", "8"))
    end = job(home / "long", 1, words)
    assert end.codes == [2] and "train.phases: phase 2: eval.tasks: " in end.errors()[0], end.logs
    assert not (home / "long" / "metrics.jsonl").exists()
