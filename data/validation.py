"""What a validation reads: batches, the prompt of the sampled text, and tasks."""
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from config import Config
from config.reading import Phase
from config.reading.phases import named
from data.blend import source_names, validated_paths, validation_key
from data.loader import BatchLoader, open_loader
from data.prompts import USER, Prompts
from parallel.context.zigzag import shard_batch
from parallel.microbatch import Microbatch
from parallel.topology.mesh import Mesh

if TYPE_CHECKING:  # a run without eval.tasks loads none of this
    from data.task_files import ScoredTask
    from data.task_scores import EncodedTasks


def read_valid_batches(batches: int, valid_data: BatchLoader, mesh: Mesh) -> list[Microbatch]:
    """Read the microbatches of every evaluation: this rank's tokens [b, s/cp], on the device."""
    results: list[Microbatch] = []
    for index in range(batches):
        for batch in valid_data.microbatches(index):
            results.append(shard_batch(batch, mesh.cp))
    return results


def read_source_batches(cfg: Config, mesh: Mesh, device: torch.device) -> dict[str, list[Microbatch]]:
    """{name of a source: its microbatches of every evaluation}; empty where a single one is validated."""
    paths = validated_paths(cfg.data)
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


# ---- tasks -------------------------------------------------------------------------------------------------


def open_tasks(cfg: Config) -> "list[ScoredTask]":
    """Read the tasks of eval.tasks. Raises ConfigError, which names the file and the line."""
    if cfg.eval.tasks is None:
        return []
    from data.task_files import read_tasks

    return read_tasks("eval.tasks", cfg.eval.tasks, cfg.eval.tasks_limit)


def encode_for_phases(
    tasks: "list[ScoredTask]", prompts: Prompts, phases: Sequence[Phase]
) -> "dict[int, EncodedTasks]":
    """{model.context of a phase: the tasks that fit into it}; {} without tasks.

    Raises ConfigError for an answer that does not fit into the context of a phase.
    """
    result: dict[int, EncodedTasks] = {}
    if not tasks:
        return result
    from data.task_scores import encode_tasks

    for phase in phases:
        context = phase.cfg.model.context
        if context not in result:
            with named(phase):
                special = phase.cfg.eval.special
                result[context] = encode_tasks("eval.tasks", tasks, prompts, context, special)
    return result
