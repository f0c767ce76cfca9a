"""Scores of tasks: which tokens are scored, metrics by hand on log-probabilities that are given, and rows
divided over ranks.
"""

import math
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
from tokenizer_families import write_one_word

from config import ConfigError
from data import tokenizer
from data.prompts import Prompts
from data.task_files import Example, Option, ScoredTask
from data.task_scores import (
    EncodedTasks,
    Score,
    TaskReport,
    TextRow,
    divide_rows,
    encode,
    encode_tasks,
    score_rows,
    score_tasks,
)
from kernels.cross_entropy import IGNORE_INDEX

BYTES = tokenizer.load_tokenizer("bytes")


def scored(before, continuation, tok=BYTES):
    row = encode(before, continuation, Prompts(tok))
    ids = row.ids.tolist()
    return ids[: -row.num_scored], ids[-row.num_scored :]


@pytest.mark.parametrize("count, names", [
    (1, "t0"), (4, "t0, t1, t2, t3"), (5, "t0, t1, t2, t3 and 1 more"), (7, "t0, t1, t2, t3 and 3 more"),
])
def test_the_header_names_four_tasks_and_counts_the_rest(count, names):
    tasks = [SimpleNamespace(name=f"t{number}", examples=[None] * 300) for number in range(count)]
    rows = [TextRow(torch.zeros(4, dtype=torch.int32), 1, 1)] * 2000
    told = EncodedTasks(tasks, rows).describe()
    assert told == f"{names}: {300 * count:,} examples, 2,000 texts, 8,000 tokens"


def test_the_report_has_a_line_for_each_task():
    metrics = {"sums": {"acc": 0.25, "bpb": 1.5}, "a task": {"acc": 0.12345}}
    lines = TaskReport(metrics, core=None, examples=1234, seconds=5.67).lines()
    assert lines == ["sums    acc 0.250  bpb 1.500", "a task  acc 0.123", "1,234 examples in 5.7 s"]


def test_the_answer_and_the_space_before_it_are_scored():
    assert scored("ab", " c") == (list(b"ab"), list(b" c"))
    assert scored("ab ", "c") == (list(b"ab"), list(b" c"))  # the space belongs to the answer, either way
    assert scored("ab\n", "c") == (list(b"ab"), list(b"\nc"))
    assert scored("", "c") == ([BYTES.eod], list(b"c"))  # the start of a document
    assert scored("a", "é") == (list(b"a"), list("é".encode()))


class Pairs:
    """A tokenizer of two letters a token: a context of odd length shares its last token with the answer."""

    eod = 0

    def encode(self, text):
        pairs = [text[start : start + 2] for start in range(0, len(text), 2)]
        return [1 + int.from_bytes(pair.encode(), "big") for pair in pairs]


def test_a_token_of_context_and_answer_is_scored_whole():
    tok = Pairs()
    assert scored("abc", "de", tok) == (tok.encode("ab"), tok.encode("cde"))
    assert scored("abcd", "ef", tok) == (tok.encode("abcd"), tok.encode("ef"))
    assert scored("a", "bc", tok) == ([0], tok.encode("abc"))  # nothing of the context is left: a document


def test_the_scored_pieces_of_a_trained_tokenizer_are_the_answer(tmp_path):
    """The scored pieces, decoded, are the answer with the space before it."""
    (tmp_path / "text").write_text("the cat sat on the mat\nthe dog sat on the log\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "pieces"), vocab_size=60, model_type="bpe",
        minloglevel=2, hard_vocab_limit=False,
    )
    tok = tokenizer.load_tokenizer(tmp_path / "pieces.model")
    for before, continuation in (("the cat sat on", " the mat"), ("the cat sat on ", "the mat")):
        known, answer = scored(before, continuation, tok)
        assert tok.decode(known) == "the cat sat on" and tok.decode(answer).strip() == "the mat"
        assert known + answer == tok.encode("the cat sat on the mat")


def task(examples, shots=0, baseline=0.25, in_core=False, name="t"):
    return ScoredTask(name, tuple(examples), shots, "", baseline, in_core)


def given(log_probs):
    """A model whose rows have these scores: (of the answer, of what is compared), or one for both."""
    pairs = [value if isinstance(value, tuple) else (value, value) for value in log_probs]
    return lambda rows: [Score(whole, False, compared) for whole, compared in pairs]


def test_answers_are_chosen_by_sum_by_byte_and_by_token():
    """Three ways to choose, three answers: by sums the first, per byte the second, per token the third."""
    endings = ["a", "bbbbbbbb", "  cé"]  # 1, 8 and 3 bytes
    example = Example(tuple(Option("x", ending) for ending in endings), 0, "f:1")
    nats = [-2.0, -4.0, -6.0]
    rows = [TextRow(torch.zeros(9, dtype=torch.int32), 1, count) for count in (1, 2, 3)]

    for right in range(3):
        one = Example(example.options, right, "f:1")
        encoded = encode_tasks("k", [task([one])], Prompts(BYTES), 100)
        encoded = type(encoded)(encoded.tasks, rows)
        report = score_tasks(encoded, given([(-2.0, -2.0), (-4.0, -4.0), (-6.0, -3.0)]))
        found = report.metrics["t"]
        assert found["acc"] == (right == 0)  # -2 is the largest
        assert found["acc_norm"] == (right == 1)  # -2, -0.5, -2
        assert found["acc_token"] == (right == 2)  # -2, -2, -1
        assert found["bpb"] == pytest.approx(-nats[right] / math.log(2) / (1, 8, 3)[right], rel=1e-12)
        assert found["centered"] == pytest.approx(((right == 2) - 0.25) / 0.75, rel=1e-12)
        assert report.core is None and set(report.flat()) == {f"tasks/t/{name}" for name in found}


def test_the_first_of_equal_answers_is_chosen():
    examples = [Example((Option("x", "a"), Option("x", "b")), answer, "f:1") for answer in (0, 1)]
    encoded = encode_tasks("k", [task(examples)], Prompts(BYTES), 100)
    found = score_tasks(encoded, given([-1.0] * 4)).metrics["t"]
    assert found["acc"] == found["acc_norm"] == found["acc_token"] == 0.5


def test_core_is_the_mean_of_centered_accuracies():
    texts = [Example((Option("x", ending),), 0, "f:1") for ending in ("ab", "abcd")]
    chosen = [Example((Option("x", "a"), Option("x", "b")), 0, "f:1")]
    tasks = [
        task(texts, baseline=0.0, in_core=True, name="texts"),
        task(chosen, baseline=0.5, in_core=True, name="chosen"),
        task(chosen, baseline=0.5, name="apart"),
    ]
    encoded = encode_tasks("k", tasks, Prompts(BYTES), 100)
    ends = [Score(-math.log(2), True, 0.0), Score(-math.log(16), False, 0.0)]
    report = score_tasks(encoded, lambda rows: [*ends, *given([-1.0, -2.0, -2.0, -1.0])(rows)])
    assert report.metrics["texts"] == pytest.approx({"acc": 0.5, "bpb": (1 / 2 + 4 / 4) / 2, "centered": 0.5})
    assert report.metrics["chosen"]["centered"] == 1 and report.metrics["apart"]["centered"] == -1
    assert report.core == 0.75 and report.flat()["tasks/core"] == 0.75
    assert report.lines()[-1].startswith("CORE 0.7500 over its tasks, 4 examples in ")


def test_an_answer_longer_than_the_context_is_refused_with_its_place():
    example = Example((Option("x", "a" * 9),), 0, "tasks.jsonl:7")
    with pytest.raises(ConfigError, match=r"^eval.tasks: tasks.jsonl:7: an answer of 9 tokens; .* 1 to 8"):
        encode_tasks("eval.tasks", [task([example])], Prompts(BYTES), 8)
    (row,) = encode_tasks("eval.tasks", [task([example])], Prompts(BYTES), 9).rows
    assert len(row.ids) == 10


def test_a_long_context_is_dropped_from_the_left():
    example = Example((Option("abcdefgh", "xy"),), 0, "f:1")
    (row,) = encode_tasks("k", [task([example])], Prompts(BYTES), 5).rows
    assert bytes(row.ids.tolist()) == b"efghxy" and row.num_scored == 2


def test_what_the_model_does_not_see_is_counted(tmp_path):
    """A context that is cut, and words that the tokenizer does not have."""
    prompts = Prompts(tokenizer.load_tokenizer(write_one_word(tmp_path)))
    options = [Option(before, " a") for before in ("b a", "a a a a", "a a a a b b", "a")]
    encoded = encode_tasks("k", [task([Example((option,), 0, "f:1") for option in options])], prompts, 4)
    assert encoded.lost == "1 cut at their beginning to model.context, 3 tokens unknown to the tokenizer"
    assert encoded.describe().endswith(f" tokens, {encoded.lost}")
    assert encode_tasks("k", [task([Example(options[3:], 0, "f:1")])], prompts, 4).lost == ""


def compared(*texts):
    """What is compared of each (context, continuation)."""
    example = Example(tuple(Option(*text) for text in texts), 0, "f:1")
    rows = encode_tasks("k", [task([example])], Prompts(BYTES), 100).rows
    return [bytes(row.ids.tolist()[len(row.ids) - row.num_compared:]) for row in rows]


def test_choices_are_compared_where_they_begin_to_differ():
    assert compared(("on", " the mat"), ("on", " the rats")) == [b"mat", b"rats"]
    assert compared(("on", " a mat"), ("on", " the mat"), ("on", " ale")) == [b"a mat", b"the mat", b"ale"]
    assert compared(("on", " me"), ("on", " men")) == [b"", b"n"]
    assert compared(("on", " me")) == [b" me"]


def test_contexts_are_compared_in_the_end_that_they_share():
    assert compared(("the rat", " sat"), ("a cat", " sat")) == [b"at sat"] * 2
    assert compared(("a rat", " sat"), ("a dog", " sat")) == [b" sat"] * 2
    assert compared(("at", " sat"), ("cat", " sat")) == [b"t sat"] * 2  # nothing predicts a first token


@pytest.mark.parametrize("place", [0, 1])
def test_a_choice_that_begins_all_others_is_chosen_in_the_first_place_alone(place):
    """As the minimum of Python's list of losses is, in nanochat, if one is nan."""
    endings = ["me", "men"] if place == 0 else ["men", "me"]
    example = Example(tuple(Option("x", ending) for ending in endings), place, "f:1")
    encoded = encode_tasks("k", [task([example])], Prompts(BYTES), 100)
    assert [row.num_compared for row in encoded.rows] == ([0, 1] if place == 0 else [1, 0])
    assert score_tasks(encoded, given([-3.0, -3.0])).metrics["t"]["acc_token"] == (place == 0)


def test_a_text_of_core_has_the_tokens_of_the_context():
    """Another task has one more, which the last token needs not."""
    example = Example((Option("abcdefgh", "xy"), Option("bcdefgh", "xz")), 0, "f:1")
    rows = encode_tasks("k", [task([example], in_core=True)], Prompts(BYTES), 5).rows
    assert [bytes(row.ids.tolist()) for row in rows] == [b"fghxy", b"fghxz"]
    with pytest.raises(ConfigError, match=r"f:1: an answer of 2 tokens; the model takes 1 to 1 "):
        encode_tasks("k", [task([example], in_core=True)], Prompts(BYTES), 2)
    contexts = Example((Option("Z23456", "x"), Option("Y23456", "x")), 0, "f:1")
    for row in encode_tasks("k", [task([contexts], in_core=True)], Prompts(BYTES), 5).rows:
        assert row.num_scored == 1 and row.num_compared == 4  # of the 6 that they share


def random_rows(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 90, (count,), generator=rng).tolist()
    return [
        TextRow(
            torch.randint(0, 50, (n,), generator=rng, dtype=torch.int32), 1 + index % (n - 1), index * 7 % n
        )
        for index, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("multiple", [1, 6])
def test_rounds_have_every_row_once_and_one_shape(ranks, multiple):
    rows = random_rows(41)
    rounds = divide_rows(rows, ranks, 128, multiple)
    assert sorted(index for one in rounds for index in one.indices) == list(range(41))
    for one in rounds:
        assert one.length % multiple == 0 and one.length % 16 == 0
        assert one.rows * one.length <= 128 or one.rows == 1
        for rank in range(ranks):
            assert len(one.indices[rank::ranks]) <= one.rows
        assert all(len(rows[index].ids) - 1 <= one.length for index in one.indices)


@pytest.mark.parametrize("batch_tokens", [1, 200, 10_000])
def test_rows_have_the_scores_of_a_bigram_model(batch_tokens):
    """A model of bigrams: the log-probability of a token depends on the one before it."""
    rng = torch.Generator().manual_seed(1)
    table = torch.randn(50, 50, generator=rng, dtype=torch.float64).log_softmax(-1)

    def forward(tokens, targets):
        assert tokens.shape == targets.shape
        counted = targets != IGNORE_INDEX
        chosen = table[tokens[counted]]
        ids = targets[counted]
        log_probs = chosen.gather(1, ids[:, None])[:, 0]
        return torch.stack((log_probs, (chosen.argmax(1) == ids).double()))

    rows = random_rows(30)
    liked = [3]
    for _ in range(5):
        liked.append(int(table[liked[-1]].argmax()))
    rows.append(TextRow(torch.tensor(liked, dtype=torch.int32), 5, 0))
    found = score_rows(rows, forward, batch_tokens=batch_tokens, device=torch.device("cpu"))
    for row, score in zip(rows, found):
        ids = row.ids.tolist()
        pairs = list(zip(ids, ids[1:]))
        last = pairs[len(pairs) - row.num_compared :]
        assert score.compared == pytest.approx(sum(float(table[a, b]) for a, b in last), abs=1e-12)
        pairs = pairs[-row.num_scored :]
        assert score.log_prob == pytest.approx(sum(float(table[a, b]) for a, b in pairs), abs=1e-12)
        assert score.is_likeliest == all(int(table[a].argmax()) == b for a, b in pairs)
    assert found[-1].is_likeliest and not all(score.is_likeliest for score in found)
