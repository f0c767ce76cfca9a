"""Validation: the mean loss of a fixed list of batches, per counted token and in bits per byte of text; a
text that the model writes; and the scores of tasks.
"""
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from config import Config
from config.reading.phases import named
from data.blend import named_paths, source_names, validation_key
from data.loader import BatchLoader, open_loader
from data.prompts import USER
from data.tokenizer import Tokenizer, continuation
from model.generate import generate
from model.rope import rope_switches
from parallel.context.zigzag import shard_batch
from parallel.microbatch import Microbatch
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.comm import Group
from runtime.goodput import GoodputClock
from runtime.metrics import MetricsLogger
from runtime.run import TrainingRun

if TYPE_CHECKING:  # a run without eval.tasks loads none of this
    from data.task_files import ScoredTask
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


class SamplePrompt(NamedTuple):
    """The beginning of the texts that a run samples.

    ids: what the model reads. text: how the log shows them. stops, stop_text: what ends the text.
    hint: arguments of scripts.generate for another.
    """
    ids: list[int]
    text: str
    stops: frozenset[int]
    stop_text: str | None
    hint: str


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


def sample_prompt(cfg: Config, valid_data: BatchLoader) -> SamplePrompt:
    """eval.prompt; without it the first words of the validation data, which suit any corpus.

    Of conversations: eval.prompt as a message of the user, or what stands before an answer of the data.
    Raises ConfigError.
    """
    prompts, given = valid_data.prompts, cfg.eval.prompt
    if valid_data.is_chat:
        messages = [{"role": USER, "content": given or ""}]
        ids = valid_data.opening_chat() if given is None else prompts.chat(messages)
        return SamplePrompt(ids, prompts.shown(ids), prompts.turn_stops, prompts.stop_text, "--chat")

    text = valid_data.opening_words() if given is None else given
    special = cfg.eval.special and given is not None
    hint = f"--prompt {shlex.quote(text)}{' --special' if special else ''}"
    return SamplePrompt(prompts.prompt(text, special), text, prompts.stops, None, hint)


def read_valid_batches(batches: int, valid_data: BatchLoader, mesh: Mesh) -> list[Microbatch]:
    """The microbatches of every evaluation: this rank's tokens [b, s/cp], on the device."""
    results: list[Microbatch] = []
    for index in range(batches):
        for batch in valid_data.microbatches(index):
            results.append(shard_batch(batch, mesh.cp))
    return results


def read_source_batches(cfg: Config, mesh: Mesh, device: torch.device) -> dict[str, list[Microbatch]]:
    """{name of a source: its microbatches of every evaluation}; empty where a single one is validated."""
    paths = validated_paths(cfg)
    batches = cfg.eval.batches if cfg.eval.source_batches is None else cfg.eval.source_batches
    if len(paths) == 1 or batches == 0:
        return {}
    result: dict[str, list[Microbatch]] = {}
    for name, path in zip(source_names(paths), paths):
        key = validation_key(cfg.data).removeprefix("data.")
        alone = replace(cfg, data=replace(cfg.data, **{key: f"1 {shlex.quote(path)}"}))
        data = open_loader(alone, "valid", mesh.dp.index, mesh.dp.size, device=device)
        result[name] = read_valid_batches(batches, data, mesh)
    return result


def validated_paths(cfg: Config) -> list[str]:
    """The paths of the data sets that a validation reads. Raises ConfigError."""
    return [path for key, path in named_paths(cfg.data) if key == validation_key(cfg.data)]


def open_tasks(cfg: Config) -> "list[ScoredTask]":
    """The tasks of eval.tasks. Raises ConfigError, which names the file and the line."""
    if cfg.eval.tasks is None:
        return []
    from data.task_files import read_tasks

    return read_tasks("eval.tasks", cfg.eval.tasks, cfg.eval.tasks_limit)


def encode_for_phases(
    tasks: "list[ScoredTask]", run: TrainingRun
) -> "dict[int, EncodedTasks]":
    """{model.context: the tasks that fit into it}, of this phase and later ones; {} without tasks.

    Raises ConfigError for an answer that does not fit into the context of a phase.
    """
    result: dict[int, EncodedTasks] = {}
    if not tasks:
        return result
    from data.task_scores import encode_tasks

    prompts = run.data.prompts
    for phase in run.phases.all[run.phase.number - 1:]:
        context = phase.cfg.model.context
        if context not in result:
            with named(phase):
                special = phase.cfg.eval.special
                result[context] = encode_tasks("eval.tasks", tasks, prompts, context, special)
    return result
