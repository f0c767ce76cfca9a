"""Task scores: texts -> rows of tokens -> log-probabilities of the answers -> accuracy and bits per byte.

Answer tokens. Context and answer are encoded as one text, as in training. The context is also encoded alone,
without trailing space, and the scored tokens are those after the prefix that both encodings share. So a space
between context and answer belongs to the answer, and a token that spans both is scored whole. lm-eval does
the same, except that it then scores the last tokens of the text. A text begins with the start token, if the
model has one (prompts.py); otherwise an empty context is the end-of-document token. Tokens beyond the model's
context length are dropped from the left.

Metrics of a multiple-choice task:

    acc         the correct answer has the largest log-probability; on ties, the first counts
    acc_norm    the same, per byte of the answer (lm-eval divides by characters)
    acc_token   the correct text has the largest log-probability per token, of those that are compared
    bpb         -log2 p(correct answer) per byte of it, averaged over examples: smooth where accuracy is not
    centered    (accuracy - baseline) / (1 - baseline), with acc_token

A continuation task has acc (each token is the most likely one), bpb and centered (from acc). CORE is the mean
of `centered` over its tasks (arXiv 2406.11794). Bytes are the answer's in UTF-8, without leading space.

Compared tokens are those of nanochat's CORE: all behind the beginning that the texts of an example share; in
a schema, where contexts differ and the continuation does not, all of the end that they share. A text with
which all others begin has none, and is chosen only if it stands first.
"""
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from config import ConfigError
from data.prompts import Prompts
from data.task_files import Example, ScoredTask
from kernels.cross_entropy import IGNORE_INDEX
from parallel.wire import comm
from parallel.wire.comm import Group

LENGTH_UNIT = 16  # tokens: rows are padded to a multiple of it (for fp8, and for fewer shapes to compile)

# (tokens [b, s], targets [b, s]) -> [2, n] for the n counted targets, row by row: log-probability in nats,
# and 1 for the most likely token, else 0. None on ranks without the last layers.
Forward = Callable[[Tensor, Tensor], Tensor | None]


class TextRow(NamedTuple):
    """The ids [n] of a text. The last `num_scored` are the answer; the last `num_compared` are compared."""
    ids: Tensor
    num_scored: int
    num_compared: int


class Score(NamedTuple):
    """Sum of log-probabilities (nats) of a row's answer, whether each of its ids is the most likely token,
    and the sum of the ids that are compared."""
    log_prob: float
    is_likeliest: bool
    compared: float


@dataclass(frozen=True)
class Round:
    """The rows that all ranks compute at the same time, in batches of equal shape."""
    indices: list[int]  # of rows; rank r of n takes every n-th, starting at r
    rows: int  # per rank; surplus rows are empty
    length: int  # tokens per row


@dataclass(frozen=True)
class EncodedTasks:
    """Tasks as rows of tokens. The rows of a task are consecutive, and so are those of an example."""
    tasks: list[ScoredTask]
    rows: list[TextRow]
    num_cut: int = 0  # rows with more tokens than the context length
    num_unknown: int = 0  # tokens of text unknown to the tokenizer

    @property
    def num_examples(self) -> int:
        return sum(len(task.examples) for task in self.tasks)

    @property
    def lost(self) -> str:
        """Describes the text that the model does not see, or "" if it sees all."""
        parts = [f"{self.num_cut:,} cut at their beginning to model.context"] if self.num_cut else []
        parts += [f"{self.num_unknown:,} tokens unknown to the tokenizer"] if self.num_unknown else []
        return ", ".join(parts)

    def describe(self) -> str:
        names = ", ".join(task.name for task in self.tasks[:4])
        more = f" and {len(self.tasks) - 4} more" if len(self.tasks) > 4 else ""
        tokens = sum(len(row.ids) for row in self.rows)
        return (f"{names}{more}: {self.num_examples:,} examples, {len(self.rows):,} texts, "
                f"{tokens:,} tokens{self.lost and ', '}{self.lost}")


# ---- texts -> rows -----------------------------------------------------------------------------------------


def encode_tasks(
    key: str, tasks: list[ScoredTask], prompts: Prompts, context: int, special: bool = False
) -> EncodedTasks:
    """Encode tasks. `context` is the model's context length in tokens; `key` names the user's option in
    messages. With `special`, control tokens spelled in a text are parsed.

    Raises ConfigError naming file and line for an answer with more tokens than that, or with none.
    """
    rows: list[TextRow] = []
    num_cut = num_unknown = 0
    for task in tasks:
        most = context if task.in_core else context + 1  # ids; the last is not read, but counts in CORE
        for index, example in enumerate(task.examples):
            prompt = task.prompt(index)
            texts: list[TextRow] = []
            for option in example.options:
                before = prompt + task.before(example, option)
                row = encode(before, option.continuation, prompts, special)
                if not 0 < row.num_scored < most:
                    raise ConfigError(f"{key}: {example.place}: an answer of {row.num_scored} tokens; the "
                                      f"model takes 1 to {most - 1} (model.context)")
                texts.append(row)
                num_cut += len(row.ids) > most
                num_unknown += prompts.count_unknown(row.ids.tolist())
            for row, count in zip(texts, count_compared(example, texts)):
                kept = row.ids[-most:]
                rows.append(TextRow(kept, row.num_scored, min(count, len(kept) - 1)))
    return EncodedTasks(tasks, rows, num_cut, num_unknown)


def encode(before: str, continuation: str, prompts: Prompts, special: bool = False) -> TextRow:
    """Encode a text and score its end, after `before`. `special` is as in encode_tasks."""
    whole = prompts.document(before + continuation, special)
    shared = count_shared([whole, prompts.document(before.rstrip(), special)])
    start = [] if shared else [prompts.before_text]
    ids = torch.tensor([*start, *whole], dtype=torch.int32)
    return TextRow(ids, len(whole) - shared, len(whole) - shared)


def count_compared(example: Example, texts: Sequence[TextRow]) -> list[int]:
    """Return the number of compared ids at the end of each option's text."""
    if len(texts) == 1:
        return [texts[0].num_scored]
    ids = [row.ids.tolist() for row in texts]
    if len({option.continuation for option in example.options}) > 1:
        shared = count_shared(ids)
        return [len(each) - shared for each in ids]
    shared = count_shared([each[::-1] for each in ids])
    return [min(shared, *(len(each) - 1 for each in ids))] * len(ids)  # nothing predicts a first id


def count_shared(lists: Sequence[Sequence[int]]) -> int:
    """Count the leading ids that all lists have."""
    columns = zip(*lists)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


# ---- rows -> scores ----------------------------------------------------------------------------------------


def divide_rows(rows: Sequence[TextRow], ranks: int, batch_tokens: int, multiple: int) -> list[Round]:
    """Group rows of similar length into rounds, the longest first.

    A rank has at most `batch_tokens` tokens including padding, unless a single row is longer. Lengths are
    multiples of `multiple`.
    """
    unit = math.lcm(LENGTH_UNIT, multiple)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].ids))
    rounds: list[Round] = []
    start = 0
    while start < len(order):
        longest = len(rows[order[start]].ids) - 1
        length = -(-longest // unit) * unit
        most = max(1, batch_tokens // length)
        indices = order[start:start + most * ranks]
        rounds.append(Round(indices, -(-len(indices) // ranks), length))
        start += len(indices)
    return rounds


@torch.no_grad()
def score_rows(
    rows: Sequence[TextRow],
    forward: Forward,
    *,
    batch_tokens: int,
    device: torch.device,
    multiple: int = 1,
    replicas: Group | None = None,
    stages: Group | None = None,
) -> list[Score]:
    """Return the score of each row, the same on every rank.

    `replicas` divide the rows, `stages` divide the layers; None means a single rank. Row lengths are
    multiples of `multiple`. Collective: one all-reduce of three numbers per row over each group, besides what
    `forward` sends.
    """
    rank, ranks = (replicas.index, replicas.size) if replicas else (0, 1)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    results = torch.zeros(len(rows), len(Score._fields), dtype=dtype, device=device)
    for round_ in divide_rows(rows, ranks, batch_tokens, multiple):
        own = round_.indices[rank::ranks]
        tokens = torch.zeros(round_.rows, round_.length, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORE_INDEX)
        for place, index in enumerate(own):
            ids, end, count = rows[index].ids, len(rows[index].ids) - 1, num_targets(rows[index])
            tokens[place, :end] = ids[:-1]
            targets[place, end - count:end] = ids[-count:]  # padding comes after them
        found = forward(tokens.to(device), targets.to(device))
        if found is None:
            continue
        counts = [num_targets(rows[index]) for index in own]
        for index, (log_probs, hits) in zip(own, found.to(dtype).split(counts, 1)):
            row = rows[index]
            results[index, 0] = log_probs[-row.num_scored:].sum()
            results[index, 1] = hits[-row.num_scored:].min()
            results[index, 2] = log_probs[len(log_probs) - row.num_compared:].sum()

    for group in (replicas, stages):
        if group is not None:
            results = comm.all_reduce_sum(results, group)
    return [Score(log_prob, likeliest > 0.5, compared) for log_prob, likeliest, compared in results.tolist()]


def num_targets(row: TextRow) -> int:
    """Count the last ids of a text whose log-probabilities are needed."""
    return max(row.num_scored, row.num_compared)


# ---- scores -> metrics -------------------------------------------------------------------------------------


class TaskReport(NamedTuple):
    """metrics: {task: {metric: value}}. core: mean over CORE's tasks, or None. seconds: total time."""
    metrics: dict[str, dict[str, float]]
    core: float | None
    examples: int
    seconds: float

    def flat(self) -> dict[str, float]:
        """Return {tasks/NAME/METRIC: value} and tasks/core, for metrics.jsonl and W&B."""
        values = {
            f"tasks/{name}/{metric}": value
            for name, found in self.metrics.items()
            for metric, value in found.items()
        }
        return values if self.core is None else values | {"tasks/core": self.core}

    def lines(self) -> list[str]:
        """Return a readable line for each task, and one for the total."""
        width = max(len(name) for name in self.metrics)
        lines = [f"{name:<{width}}  {metrics_text(found)}" for name, found in self.metrics.items()]
        core = "" if self.core is None else f"CORE {self.core:.4f} over its tasks, "
        return [*lines, f"{core}{self.examples:,} examples in {self.seconds:.1f} s"]


def metrics_text(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())


def score_tasks(encoded: EncodedTasks, score: Callable[[Sequence[TextRow]], list[Score]]) -> TaskReport:
    """Compute the metrics of all tasks. `score` maps rows to scores."""
    started = time.perf_counter()
    scores = score(encoded.rows)
    metrics: dict[str, dict[str, float]] = {}
    start = 0
    for task in encoded.tasks:
        end = start + sum(len(example.options) for example in task.examples)
        metrics[task.name] = task_metrics(task, encoded.rows[start:end], scores[start:end])
        start = end
    centered = [metrics[task.name]["centered"] for task in encoded.tasks if task.in_core]
    core = sum(centered) / len(centered) if centered else None
    return TaskReport(metrics, core, encoded.num_examples, time.perf_counter() - started)


def task_metrics(task: ScoredTask, rows: Sequence[TextRow], scores: Sequence[Score]) -> dict[str, float]:
    """Average over the examples of a task, given the rows and scores of its options."""
    sums = dict.fromkeys(("acc", "acc_norm", "acc_token", "bpb") if task.has_choices else ("acc", "bpb"), 0.0)
    start = 0
    for example in task.examples:
        end = start + len(example.options)
        log_probs = [score.log_prob for score in scores[start:end]]
        nbytes = [num_bytes(option.continuation) for option in example.options]
        sums["bpb"] -= log_probs[example.answer] / math.log(2) / nbytes[example.answer]
        if task.has_choices:
            tokens = [row.num_compared for row in rows[start:end]]
            compared = [score.compared for score in scores[start:end]]
            sums["acc"] += likeliest(log_probs) == example.answer
            sums["acc_norm"] += likeliest(divided(log_probs, nbytes)) == example.answer
            sums["acc_token"] += likeliest(divided(compared, tokens)) == example.answer
        else:
            sums["acc"] += scores[start].is_likeliest
        start = end
    means = {name: value / len(task.examples) for name, value in sums.items()}
    accuracy = means["acc_token" if task.has_choices else "acc"]
    return means | {"centered": (accuracy - task.baseline) / (1 - task.baseline)}


def num_bytes(continuation: str) -> int:
    """Count the bytes of an answer without leading space."""
    return len(continuation.lstrip().encode())


def divided(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Divide each value by its count. Without a count it is nan, which no value is above or below."""
    return [value / count if count else math.nan for value, count in zip(values, counts)]


def likeliest(log_probs: Sequence[float]) -> int:
    """Return the index of the largest value; on ties the first. A nan counts only in the first place."""
    return max(range(len(log_probs)), key=log_probs.__getitem__)
