"""Validation: the mean loss of a fixed list of batches, per counted token and in bits per byte of text; a
text that the model writes; and the scores of tasks.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data.loader import BatchLoader
from data.tokenizer import Tokenizer, continuation
from data.validation import SamplePrompt, read_source_batches, read_valid_batches, sample_prompt
from model.generate import generate
from model.rope import rope_switches
from parallel.microbatch import Microbatch
from parallel.wire import comm
from parallel.wire.comm import Group
from runtime.goodput import GoodputClock
from runtime.metrics import MetricsLogger
from runtime.run import TrainingRun

if TYPE_CHECKING:  # a run without eval.tasks loads none of this
    from data.task_scores import EncodedTasks, TaskReport

MAX_EXPONENT = 700.0  # exp overflows a float soon after
NO_LOSS = {"val_loss": None, "val_ppl": None, "val_bpb": None}  # where no target counts


def mean_loss(
    batches: list[Microbatch],
    *,
    summed_loss: Callable[[list[Microbatch]], Tensor],
    text_bytes: Callable[[Microbatch], Tensor],
    group: Group,
) -> tuple[float | None, float]:
    """Returns (mean loss in nats per counted token, bytes of text per counted token).

    The first is None where no token counts, and the second nan there and without a tokenizer.

    summed_loss: batches -> their summed loss over all ranks.
    group: the ranks whose batches differ.
    text_bytes: a batch -> the bytes of its counted targets, an int64 scalar; below 0: not known.
    """
    own_tokens = torch.stack([batch.num_counted() for batch in batches]).sum()
    own_bytes = torch.stack([text_bytes(batch) for batch in batches]).sum()
    own_counts = torch.stack([own_tokens, own_bytes])
    loss_sum = float(summed_loss(batches))

    counts = comm.all_reduce_sum(own_counts, group)
    num_tokens, num_bytes = counts.tolist()
    if num_tokens == 0:
        return None, math.nan
    return loss_sum / num_tokens, num_bytes / num_tokens if num_bytes >= 0 else math.nan


def loss_report(loss: float, bytes_per_token: float) -> dict[str, float]:
    """Returns val_loss (nats per token), val_ppl (perplexity) and val_bpb (bits per byte of text).

    Loss and bytes are of the same tokens. Under data.doc_mask the first token of each document is in neither,
    because nothing predicts it.
    """
    bits = loss / math.log(2)
    return {
        "val_loss": loss,
        "val_ppl": math.exp(min(loss, MAX_EXPONENT)),
        "val_bpb": bits / bytes_per_token if bytes_per_token else math.inf,
    }


# ---- of a run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """The data, prompt and tasks that validate a phase.

    valid: the batches of every validation; by_source: those of each source of a blend. tasks: of each
    model.context that a phase has; {}: there are none.
    """
    valid: list[Microbatch]
    by_source: dict[str, list[Microbatch]]
    text_bytes: Callable[[Microbatch], Tensor]
    prompt: SamplePrompt
    tokenizer: Tokenizer
    tasks: "dict[int, EncodedTasks]"


def open_evaluation(
    run: TrainingRun, valid_data: BatchLoader, tasks: "dict[int, EncodedTasks]"
) -> Evaluation:
    """Reads the batches of the phase. valid_data: its valid split. Raises ConfigError."""
    cfg = run.cfg
    return Evaluation(
        valid=read_valid_batches(cfg.eval.batches, valid_data, run.mesh),
        by_source=read_source_batches(cfg, run.mesh, run.device),
        text_bytes=valid_data.text_bytes,
        prompt=sample_prompt(cfg, valid_data),
        tokenizer=run.data.required_tokenizer,
        tasks=tasks,
    )


def evaluate(
    evaluation: Evaluation, run: TrainingRun, step: int, *, log: MetricsLogger, goodput: GoodputClock
) -> None:
    """Writes the validation loss, that of each source and of the average of the weights (train.ema), and a
    sample of text into the log. Collective."""
    def mean_batch_loss(batches: list[Microbatch]) -> tuple[float | None, float]:
        return mean_loss(
            batches,
            summed_loss=run.pipeline.evaluate,
            text_bytes=evaluation.text_bytes,
            group=run.mesh.dp_cp,
        )

    with goodput.spending("validation"):
        loss, bytes_per_token = mean_batch_loss(evaluation.valid)
        source_losses = {name: mean_batch_loss(batches)[0] for name, batches in evaluation.by_source.items()}
        ids = sample(run, evaluation.tokenizer, evaluation.prompt)
        ema_loss = None
        if run.ema is not None:
            with run.ema.as_weights():
                ema_loss = mean_batch_loss(evaluation.valid)[0]
        report = score_due_tasks(evaluation, run, step)
        log.log_evaluation(
            step,
            **(NO_LOSS if loss is None else loss_report(loss, bytes_per_token)),
            ema_loss=ema_loss,
            source_losses=source_losses,
            sample=text_of_sample(evaluation.tokenizer, evaluation.prompt, ids),
            tasks=report.flat() if report else None,
            task_lines=report.lines() if report else (),
        )
        run.extras.evaluated(run, step, loss=loss, ids=ids)


def sample(run: TrainingRun, tokenizer: Tokenizer, prompt: SamplePrompt) -> list[int]:
    """The ids of a text that the model writes now, after the prompt; none if eval.sample is 0."""
    options = run.cfg.eval
    model = run.cfg.model
    ids = generate(
        run.logits,
        prompt.ids,
        options.sample,
        temperature=options.temperature,
        stops=prompt.stops,
        device=run.device,
        limit=model.context if model.positions == "learned" else None,
        vocab=tokenizer.vocab,
        multiple=run.pipeline.hidden_shape.sequence_shards,
        switches=rope_switches(model),
    )
    return list(ids)


def text_of_sample(tokenizer: Tokenizer, prompt: SamplePrompt, ids: list[int]) -> str:
    """The prompt and what the model wrote; "" where it wrote nothing."""
    answer = continuation(tokenizer, prompt.ids, ids)
    if prompt.stop_text is not None:
        answer = answer.partition(prompt.stop_text)[0]
    return prompt.text + answer if ids else ""


def score_due_tasks(evaluation: Evaluation, run: TrainingRun, step: int) -> "TaskReport | None":
    """The scores of eval.tasks; None where none are due. At the end they are."""
    every = run.cfg.eval.tasks_every or 1
    if not evaluation.tasks or (step % every and step != run.steps):
        return None
    from data.task_scores import score_tasks

    return score_tasks(evaluation.tasks[run.cfg.model.context], run.score)
