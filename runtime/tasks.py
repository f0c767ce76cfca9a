"""Tasks of lm-evaluation-harness (the package lm-eval, optional) on a trained model: what scripts.evaluate --tasks calls.

The harness brings prompts, answers and metrics; from a model it wants three things: how likely a continuation is after a
context, how likely a whole text is, and greedy text. Each is a function of the logits, here.
"""
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from config import ConfigError


@dataclass(frozen=True)
class Speaker:
    """What the harness needs of a model. logits: tokens [b, s], b up to `batch`, -> [b, s, vocab]; write: (prompt ids, how many) -> new ids,
    the likeliest; eod: id of the end of a document; context: longest sequence."""
    logits: Callable[[Tensor], Tensor]
    write: Callable[[list[int], int], Iterator[int]]
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    eod: int
    context: int
    batch: int = 1

    def scores(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Of each (before, after): the log-likelihood in nats of `after` as it follows `before`, and whether each of its tokens is
        the likeliest. What is beyond the context is dropped on the left; nothing before stands for the start of a document."""
        longest = max((len(after) for _, after in pairs), default=0)
        if longest > self.context:
            raise ConfigError(f"--tasks: an answer of {longest} tokens is longer than the model's context of {self.context}; choose another task")
        rows = [torch.tensor([*(before or [self.eod]), *after][-(self.context + 1):]) for before, after in pairs]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # of like length, and what needs most memory first
        out: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for some in (order[i:i + self.batch] for i in range(0, len(order), self.batch)):
            logits = self.logits(pad_sequence([rows[i][:-1] for i in some], batch_first=True))  # what pads comes after all that is asked
            for i, own in zip(some, logits):
                if wanted := len(pairs[i][1]):
                    end, answer = len(rows[i]) - 1, rows[i][-wanted:]
                    own = own[end - wanted:end].double().cpu()
                    out[i] = (float(own.log_softmax(-1).gather(1, answer[:, None]).sum()), bool((own.argmax(-1) == answer).all()))
        return out

    def until(self, prompt: str, stops: Sequence[str], most: int) -> str:
        """The likeliest text after `prompt`, up to the first of `stops`, at most `most` tokens."""
        ids, text = [], ""
        start = (self.encode(prompt) or [self.eod])[-max(1, self.context - most):]
        for token in self.write(start, most):
            ids.append(token)
            text = self.decode(ids)
            if any(stop in text for stop in stops):
                break
        return text[:min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def run_tasks(names: list[str], speaker: Speaker, shots: int | None = None, limit: int | None = None,
              folder: str | None = None) -> dict[str, dict[str, float]]:
    """{task: {metric: value, metric_stderr: value}}. shots: examples in the prompt, none: as the task says; limit: documents a
    task, none: all; folder: where task files of one's own are. Raises ConfigError."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import TemplateLM
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    except ImportError as e:
        raise ConfigError(f"--tasks: needs the package lm-eval ({e}); pip install lm-eval") from None

    class Model(TemplateLM):
        eot_token_id = speaker.eod

        def tok_encode(self, string: str, **_) -> list[int]:
            return speaker.encode(string)

        def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
            return speaker.scores([(before, after) for _, before, after in requests])

        def loglikelihood_rolling(self, requests, **_) -> list[float]:
            texts = [[make_disjoint_window(w) for w in get_rolling_token_windows(speaker.encode(r.args[0]), speaker.eod, speaker.context, 1)]
                     for r in requests]
            return [sum(logp for logp, _ in speaker.scores(windows)) for windows in texts]

        def generate_until(self, requests, **_) -> list[str]:
            def text(prompt: str, how: dict) -> str:
                if how.get("do_sample") and how.get("temperature", 1.0) > 0:
                    raise ConfigError("--tasks: a task wants sampled text; only the likeliest is made here")
                stops = how.get("until") or []
                return speaker.until(prompt, [stops] if isinstance(stops, str) else stops, how.get("max_gen_toks", 256))
            return [text(*r.args) for r in requests]

    tasks = TaskManager(include_path=folder)
    unknown = [name for name in names if not tasks.match_tasks([name])]
    if unknown:
        raise ConfigError(f"--tasks: lm-eval has no task {unknown[0]!r}; lm-eval ls tasks shows what it has, and --task-folder adds your own")
    found = simple_evaluate(Model(), tasks=names, num_fewshot=shots, limit=limit, task_manager=tasks, log_samples=False)
    return {task: {metric.replace(",none", ""): value for metric, value in values.items() if isinstance(value, (int, float))}
            for task, values in found["results"].items()}
