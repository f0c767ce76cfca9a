"""Run tasks of lm-evaluation-harness (optional package lm-eval) on a trained model: scripts.evaluate --tasks.

The harness provides prompts, answers and metrics. It needs three things from a model: the likelihood of a
continuation given a context, the likelihood of a whole text, and greedy text. Likelihoods are those of
task_scores.py.
"""
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from config import ConfigError
from data.task_scores import Score, TextRow

Pair = tuple[Sequence[int], Sequence[int]]  # ids of (context, continuation)
TextRequest = tuple[str, Sequence[str], int]  # (prompt, stops, maximum new tokens)
MAX_NEW_TOKENS = 256  # if a task sets no limit
EMPTY = Score(0.0, True, 0.0)  # of no continuation
BOOTSTRAP_SAMPLES = 2000  # for standard errors with an error of 1.6 %


@dataclass(frozen=True)
class EvaluationModel:
    """The parts of a model that the harness needs.

    score: rows with an answer -> their scores. write: (prompt ids, count) -> greedy new ids, one by one.
    encode: text -> ids, with the model's start token if it has one. encode_bare: the same without it.
    before_text: the id that stands for an empty context. context: the maximum sequence length.
    """

    score: Callable[[Sequence[TextRow]], list[Score]]
    write: Callable[[list[int], int], Iterator[int]]
    encode: Callable[[str], list[int]]
    encode_bare: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    before_text: int
    context: int

    def scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return for each pair the continuation's log-likelihood in nats, and whether it is the greedy one.

        Tokens beyond the model's context are dropped from the left. An empty context means the start of a
        document. Raises ConfigError if a continuation is longer than the context.
        """
        longest = max((len(continuation) for _, continuation in pairs), default=0)
        if longest > self.context:
            raise ConfigError(f"--tasks: an answer of {longest} tokens is longer than the model's context of "
                              f"{self.context}; choose another task")
        warn_cut(len(pairs), sum(len(before) + len(after) > self.context + 1 for before, after in pairs))
        rows = [self.join(pair) for pair in pairs]
        scores = iter(self.score([row for row in rows if row.num_scored]))
        results: list[tuple[float, bool]] = []
        for row in rows:
            log_prob, is_likeliest, _ = next(scores) if row.num_scored else EMPTY
            results.append((log_prob, is_likeliest))
        return results

    def join(self, pair: Pair) -> TextRow:
        """Return the last `context` + 1 ids of a context and its continuation, which is scored."""
        before, after = pair
        ids = [*(before or [self.before_text]), *after]
        return TextRow(torch.tensor(ids[-(self.context + 1):]), len(after), len(after))

    def texts_until(self, requests: Sequence[TextRequest]) -> list[str]:
        """Generate greedily after each prompt, dropping its first tokens to make room for the new ones."""
        rows = [(self.encode(prompt) or [self.before_text], max(1, self.context - most))
                for prompt, _, most in requests]
        warn_cut(len(rows), sum(len(ids) > room for ids, room in rows))
        return [self.text_until(ids[-room:], stops, most)
                for (ids, room), (_, stops, most) in zip(rows, requests)]

    def text_until(self, prompt_ids: list[int], stops: Sequence[str], max_new_tokens: int) -> str:
        """Generate greedily after a prompt, up to the first of `stops` or `max_new_tokens`."""
        ids: list[int] = []
        text = ""
        for token in self.write(prompt_ids, max_new_tokens):
            ids.append(token)
            text = self.decode(ids)
            if any(stop in text for stop in stops):
                break
        ends = [text.find(stop) for stop in stops if stop in text]
        return text[:min(ends, default=len(text))]


def warn_cut(num_texts: int, num_cut: int) -> None:
    if num_cut:
        print(f"--tasks: of {num_texts:,} texts, {num_cut:,} cut at their beginning to model.context",
              file=sys.stderr)


def run_tasks(names: list[str], speaker: EvaluationModel, shots: int | None = None, limit: int | None = None,
              folder: str | None = None) -> dict[str, dict[str, float]]:
    """Run the tasks and return {task: {metric: value, metric_stderr: value}}.

    All ranks make the same requests to the model in the same order; only the first returns results.
    shots: few-shot examples, by default as many as the task defines. limit: documents per task, by default
    all. folder: custom task files.
    Raises ConfigError if lm-eval is not installed, lacks a task or cannot read its data, or if a task needs
    an unsupported feature.
    """
    try:
        from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]  optional
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
        model = harness_model(speaker)
    except ImportError as error:
        raise ConfigError(f"--tasks: needs the package lm-eval ({error}); pip install lm-eval") from None

    manager = TaskManager(include_path=folder)
    for name in names:
        if not manager.match_tasks([name]):
            raise ConfigError(f"--tasks: lm-eval has no task {name!r}; lm-eval ls tasks shows what it has, "
                              f"and --task-folder adds your own")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # its progress output is not a result
            found = simple_evaluate(
                model,
                tasks=names,
                num_fewshot=shots,
                limit=limit,
                task_manager=manager,
                bootstrap_iters=BOOTSTRAP_SAMPLES,
                log_samples=False,
            )
    except OSError as error:  # from the datasets package: no network, no such dataset, no room
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"--tasks: lm-eval cannot read the data of {', '.join(names)} ({reason}); fetch it "
                          "where there is a network, or give files of tasks") from error
    if found is None:  # lm-eval under torchrun, on all ranks but the first of a node
        return {}
    return {task: get_numbers(values) for task, values in found["results"].items()}


def get_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return a task's numeric results, with ",none" (no filter) removed from their names."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, (int, float)):
            numbers[name.replace(",none", "")] = value
    return numbers


def harness_model(speaker: EvaluationModel) -> Any:
    """Wrap the model in the harness's interface. Raises ImportError without lm-eval."""
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )

    class HarnessModel(TemplateLM):
        eot_token_id = speaker.before_text

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
            return speaker.encode_bare(string) if add_special_tokens is False else speaker.encode(string)

        def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]],
                                  **_: object) -> list[tuple[float, bool]]:
            pairs = [(before, after) for _, before, after in requests]
            return speaker.scores(pairs)

        def loglikelihood_rolling(self, requests: list[Any], **_: object) -> list[float]:
            return [self.text_log_likelihood(request.args[0]) for request in requests]

        def text_log_likelihood(self, text: str) -> float:
            ids = speaker.encode_bare(text)
            windows = get_rolling_token_windows(ids, speaker.before_text, speaker.context, 1)
            scores = speaker.scores([make_disjoint_window(window) for window in windows])
            return sum(log_likelihood for log_likelihood, _ in scores)

        def generate_until(self, requests: list[Any], **_: object) -> list[str]:
            return speaker.texts_until([self.text_request(*request.args) for request in requests])

        def text_request(self, prompt: str, settings: dict[str, Any]) -> TextRequest:
            is_sampled = settings.get("do_sample") and settings.get("temperature", 1.0) > 0
            if is_sampled:
                raise ConfigError("--tasks: a task needs sampled text; only greedy decoding is supported")
            stops = settings.get("until") or []
            if isinstance(stops, str):
                stops = [stops]
            return prompt, stops, settings.get("max_gen_toks", MAX_NEW_TOKENS)

    return HarnessModel()
