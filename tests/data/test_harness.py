"""Tasks of lm-eval: the scores of answers against their definition, and one task of our own through the
harness.
"""

import importlib.util
import json
import sys
import types

import pytest
import torch

from config import ConfigError
from data import harness
from data.harness import EvaluationModel, run_tasks
from data.task_scores import score_rows
from kernels.cross_entropy import IGNORE_INDEX

VOCAB, CONTEXT, EOD = 128, 16, 0


def causal(tokens):
    """[b, s] -> [b, s, vocab]: what follows depends on all that came, as in a language model."""
    assert tokens.shape[1] <= CONTEXT
    sums = (tokens * torch.arange(1, tokens.shape[1] + 1)).cumsum(1)
    return torch.sin(sums[..., None] * torch.arange(1, VOCAB + 1) * 0.37).double() * 3


def write(ids, most):
    for _ in range(most):
        ids = [*ids, int(causal(torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax())]
        yield ids[-1]


def speaker(batch=1):
    def forward(tokens, targets):
        counted = targets != IGNORE_INDEX
        predicted, wanted = causal(tokens)[counted].log_softmax(-1), targets[counted]
        hits = (predicted.argmax(-1) == wanted).double()
        return torch.stack((predicted.gather(1, wanted[:, None])[:, 0], hits))

    return EvaluationModel(
        lambda rows: score_rows(
            rows, forward, batch_tokens=batch * CONTEXT, device=torch.device("cpu")),
        write,
        lambda text: list(text.encode()),
        lambda text: list(text.encode()),
        lambda ids: bytes(ids).decode("ascii", "replace"),
        EOD,
        CONTEXT,
    )


PAIRS = [
    ([3, 4, 5], [6, 7]),
    ([], [9]),
    ([1] * 30, [2, 3, 4]),
    ([5], list(range(10, 10 + CONTEXT))),
    ([8, 9], []),
    ([3], [4] * (CONTEXT - 1)),
]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_scores_are_those_of_their_definition(batch):
    for (before, after), (logp, likeliest) in zip(PAIRS, speaker(batch).scores(PAIRS)):
        ids, want, greedy = list(before or [EOD]), 0.0, True
        whole = ([*ids, *after])[-(CONTEXT + 1) :]
        for i in range(len(whole) - len(after), len(whole)):
            row = causal(torch.tensor([whole[:i]]))[0, -1]
            want, greedy = (
                want + float(row.log_softmax(-1)[whole[i]]),
                greedy and int(row.argmax()) == whole[i],
            )
        assert logp == pytest.approx(want, abs=1e-9) and likeliest == greedy
    liked = list(write([3, 4], 3))
    assert speaker().scores([([3, 4], liked)])[0][1]


def test_texts_that_are_cut_are_counted(capsys):
    fitting = ([1] * (CONTEXT - 1), [2] * 2)
    speaker().scores([fitting])
    assert capsys.readouterr().err == ""
    speaker().scores([fitting, ([1] * CONTEXT, [2] * 2), ([1], [2])])
    assert capsys.readouterr().err == "--tasks: of 3 texts, 1 cut at their beginning to model.context\n"
    prompts = [("b" * count, "", CONTEXT - 12) for count in (12, 12, 13)]
    texts = speaker().texts_until(prompts[:2])
    assert capsys.readouterr().err == ""
    assert speaker().texts_until(prompts) == [*texts, texts[0]]
    assert capsys.readouterr().err == "--tasks: of 3 texts, 1 cut at their beginning to model.context\n"


def test_an_answer_beyond_the_context_is_refused():
    with pytest.raises(ConfigError, match="17 tokens is longer than the model's context of 16"):
        speaker().scores([([1], [2] * 17)])


def test_text_ends_at_the_first_stop():
    s = speaker()
    (whole,) = s.texts_until([("ab", [], 8)])
    (stopped,) = s.texts_until([("ab", [whole[3], whole[2]], 8)])
    assert stopped == whole[: min(whole.find(whole[3]), whole.find(whole[2]))]
    assert s.decode(list(write(list(b"ab"), 8))) == whole


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_the_harness_one_line_says_what_to_install():
    with pytest.raises(ConfigError, match="needs the package lm-eval .*; pip install lm-eval"):
        run_tasks(["arc_easy"], speaker())


def test_a_machine_without_a_network_is_told_in_one_line(monkeypatch):
    """The error of the package datasets."""
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'allenai/ai2_arc' on the Hub (LocalEntryNotFoundError)\nmore")

    package, of_tasks = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.tasks")
    package.simple_evaluate = unreachable
    of_tasks.TaskManager = lambda include_path: types.SimpleNamespace(match_tasks=list)
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", of_tasks)
    monkeypatch.setattr(harness, "harness_model", lambda speaker: None)
    with pytest.raises(ConfigError, match="^--tasks: lm-eval cannot read the data of arc_easy .Couldn't"):
        run_tasks(["arc_easy"], None)


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval, an optional package, is not installed"
)
def test_a_task_of_ones_own(tmp_path):
    docs = [{"q": f"say {i}", "a": [chr(65 + i), chr(75 + i)], "gold": i % 2} for i in range(6)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(d) + "\n" for d in docs))
    (tmp_path / "own.yaml").write_text(f"""
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/docs.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{a}}}}"
doc_to_target: "{{{{gold}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
""")
    s = speaker(2)
    scores = [[s.scores([(s.encode(d["q"]), s.encode(c))])[0][0] for c in d["a"]] for d in docs]
    want = sum((a < b) == d["gold"] for d, (a, b) in zip(docs, scores)) / len(docs)
    found = run_tasks(["own"], s, folder=str(tmp_path))
    assert found["own"]["acc"] == pytest.approx(want)
    with pytest.raises(ConfigError, match="no task 'nowhere'"):
        run_tasks(["nowhere"], s)
