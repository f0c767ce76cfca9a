"""The experts that routers choose, recorded into a run folder (log.routing_every) and replayed from one
(train.replay_routing), after Megatron-LM's router replay and R3 (arXiv 2510.11370).

    routing/routing.json            {"experts": 8, "top_k": 2, "layers": [0, 1]}
    routing/step_N/layer_L.npy      unsigned integers [sequences of the step, seq_len, top_k]

Step N counts from 1. Sequences are in the order of the global batch and tokens in that of the sequence, so a
file does not depend on the layout: a record of one replays under another. A layer's file is written by the
first rank of its pipeline stage, which gathers the choices of the stage. Modules of multi-token prediction
are the layers after the last one.

A replayed choice replaces the router's, in training alone. Scores, weights, losses and their gradients are
those of the present logits; capacity, statistics and the bias of aux-loss-free balancing follow from the
choice. The part of the forward that recomputation repeats takes the same one.

Both stand outside of the step: functions are replaced during the gradients and put back. The host waits for
the device in a step that is recorded or replayed.
"""
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config import Config, ConfigError, ModelConfig, is_due, modules_ahead
from model.context import ForwardContext
from model.router import RouterChoice, RouterInputs, has_experts, mixture
from model.transformer import PipelineStage
from model.watching import ForwardWatch, replace_until
from parallel.extras import StepExtra
from parallel.microbatch import Microbatch
from parallel.tensor.regions import local_chunk
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from runtime.run import TrainingRun

FOLDER, ABOUT = "routing", "routing.json"
KEY = "train.replay_routing"


# ---- the files ---------------------------------------------------------------------------------------------


def layer_file(run_dir: Path, step: int, layer: int) -> Path:
    """Return the file of the choices of a layer in a step (from 1)."""
    return run_dir / FOLDER / f"step_{step}" / f"layer_{layer}.npy"


def describe_routers(model: ModelConfig) -> dict[str, Any]:
    """Return what routing.json holds. The model has experts."""
    experts = mixture(model)
    layers = [layer for layer in range(model.layers + modules_ahead(model)) if has_experts(model, layer)]
    return {"experts": experts.experts, "top_k": experts.top_k, "layers": layers}


def write_whole(path: Path, write: Callable[[Any], object]) -> None:
    """Replace a file by what `write` puts into an open one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as out:
        write(out)
    os.replace(temporary, path)


def check_record(cfg: Config, steps: range, batch_at: Callable[[int], int]) -> None:
    """Raise ConfigError unless the record of train.replay_routing is of this model and has these steps.

    batch_at(step): the sequences of a step. Reads the head of a file for each step.
    """
    where = Path(cfg.train.replay_routing)
    try:
        about = json.loads((where / FOLDER / ABOUT).read_text())
        theirs = {name: about[name] for name in ("experts", "top_k", "layers")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{KEY}: {where / FOLDER / ABOUT} cannot be read ({type(error).__name__}); give the folder of a "
            "run that has recorded its routers (log.routing_every 1)"
        ) from None
    ours = describe_routers(cfg.model)
    for name, value in ours.items():
        if theirs[name] != value:
            key = "mixture layers" if name == "layers" else f"model.mlp.{name}"
            raise ConfigError(
                f"{KEY}: {where} was recorded with {key} {as_text(theirs[name])}, and this run has "
                f"{as_text(value)}; replay it with the same mixture"
            )

    names = {layer_file(where, 1, layer).name for layer in ours["layers"]}
    for step in steps:
        folder = where / FOLDER / f"step_{step}"
        if not folder.is_dir() or not names <= set(os.listdir(folder)):
            raise ConfigError(
                f"{KEY}: {where} has no record of step {step:,}, and this run has steps up to "
                f"{steps[-1]:,}; record every one (log.routing_every 1), or train fewer"
            )
        open_layer(cfg, step, ours["layers"][0], batch_at(step))


def as_text(value: Any) -> str:
    """Format a number or a list of layers, or whatever else a file has in its place."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) < 60 else f"{text[:50]}..."


def open_layer(cfg: Config, step: int, layer: int, batch: int) -> np.ndarray:
    """Return the choices of a layer and step, which stay in the file until they are read.

    Raises ConfigError if they are not those of `batch` sequences of this run.
    """
    path = layer_file(Path(cfg.train.replay_routing), step, layer)
    wanted = (batch, cfg.train.seq_len, mixture(cfg.model).top_k)
    try:
        choices = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{KEY}: {path} cannot be read ({type(error).__name__}); record it again") from None
    if choices.dtype.kind != "u" or choices.shape != wanted:
        raise ConfigError(
            f"{KEY}: {path} has {choices.dtype} {list(choices.shape)}, and step {step:,} of this run has "
            f"{list(wanted)} (sequences, train.seq_len, model.mlp.top_k); use the same train.global_batch "
            "and train.seq_len"
        )
    return choices


# ---- the tokens of a rank ----------------------------------------------------------------------------------


def routed_positions(microbatch: Microbatch, mesh: Mesh) -> Tensor:
    """Return the places in their sequence of the tokens that this rank routes: int64 [s/cp/tp]."""
    positions = microbatch.sequence_positions
    if positions is None:
        tokens = microbatch.tokens
        positions = torch.arange(tokens.shape[1], device=tokens.device)
    return local_chunk(positions[None], mesh.tp)[0]


# ---- recording ---------------------------------------------------------------------------------------------


class RoutingRecord(StepExtra):
    """Record the choices of every n-th step (log.routing_every). Collective in these steps."""

    def __init__(self, run: TrainingRun, run_dir: Path) -> None:
        self.every = run.cfg.log.routing_every
        self.seq_len = run.cfg.train.seq_len
        self.run_dir = run_dir
        self.mesh = run.mesh
        self.about = describe_routers(run.cfg.model)
        self.stages = list(run.stages.values())
        self.forward = ForwardWatch(self.stages)
        self.routers = [router for stage in self.stages for router in stage.routers()]
        self.wire = torch.uint8 if self.about["experts"] <= 256 else torch.int32
        self.stored = np.min_scalar_type(self.about["experts"] - 1)
        self.is_recorded = False  # the present step
        self.lines: list[str] = []
        self.start()

    def start(self) -> None:
        """Forget what the forward has shown."""
        self.sequences: Tensor | None = None  # of the pass that is under way
        self.positions: Tensor | None = None  # of every pass
        self.chosen: dict[int, list[Tensor]] = {router.layer: [] for router in self.routers}  # [b, s, k] each
        self.rows: dict[int, list[Tensor]] = {router.layer: [] for router in self.routers}  # [b] each

    def on_resume(self, run: Any, step: int) -> None:
        if self.mesh.world.index == 0:
            text = json.dumps(self.about).encode()
            write_whole(self.run_dir / FOLDER / ABOUT, lambda out: out.write(text))

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        self.is_recorded = is_due(self.every, step)
        self.start()

    def around_gradients(self, run: Any, step: int, compute: Callable[[], Tensor]) -> Tensor:
        if not self.is_recorded:
            return compute()
        with self.watching():
            return compute()

    def weights_updated(self, run: Any, step: int, good: Tensor) -> None:
        if self.is_recorded:
            self.write(step)
        self.start()  # frees what it holds

    def pop_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward passes inside, not what recomputation repeats."""
        with self.forward.watching(), contextlib.ExitStack() as undo:
            for stage in self.stages:
                replace_until(undo, stage, "context_of", partial(self.begin, stage.context_of))
            for router in self.routers:
                replace_until(undo, router, "choose", partial(self.note, router.layer, router.choose))
            yield

    def begin(
        self, function: Callable[..., ForwardContext], microbatch: Microbatch, scale: Any
    ) -> ForwardContext:
        """Note which tokens the pass of a stage has."""
        assert microbatch.sequence_ids is not None  # the loader numbers them
        self.sequences = microbatch.sequence_ids
        self.positions = routed_positions(microbatch, self.mesh)
        return function(microbatch, scale)

    def note(
        self, layer: int, function: Callable[..., RouterChoice], logits: Tensor, inputs: RouterInputs | None
    ) -> RouterChoice:
        """Choose, and keep the choice."""
        choice = function(logits, inputs)
        if self.forward.is_on:
            self.chosen[layer].append(choice.index.to(self.wire))
            self.rows[layer].append(self.sequences)
        return choice

    def write(self, step: int) -> None:
        """Write the layers of this rank's stages: one gather a layer over the ranks of the stage."""
        group = self.mesh.pipeline_stage
        for router in self.routers:
            layer = router.layer
            rows = comm.all_gather(torch.cat(self.rows[layer])[None], group)  # [ranks, n]
            positions = comm.all_gather(self.positions[None], group)  # [ranks, s/cp/tp]
            chosen = comm.all_gather(torch.cat(self.chosen[layer])[None], group)  # [ranks, n, s/cp/tp, k]
            if group.index > 0:
                continue
            rows, positions, chosen = (part.cpu().numpy() for part in (rows, positions, chosen))
            whole = np.empty((rows.max() + 1, self.seq_len, chosen.shape[-1]), self.stored)
            whole[rows[:, :, None], positions[:, None]] = chosen
            try:
                write_whole(layer_file(self.run_dir, step, layer), partial(np.save, arr=whole))
            except OSError as error:  # a full disk must not end the run
                self.lines.append(f"routing: layer {layer} of step {step:,} is not recorded: {error}")


# ---- replaying ---------------------------------------------------------------------------------------------


class RoutingReplay(StepExtra):
    """Route the tokens of every step as a record says (train.replay_routing)."""

    def __init__(self, run: TrainingRun) -> None:
        self.cfg = run.cfg
        self.mesh = run.mesh
        self.stages = list(run.stages.values())
        self.num_experts = mixture(run.cfg.model).experts
        self.layers: dict[int, np.ndarray] = {}  # of the present step

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        batch = self.mesh.dp.size * sum(len(each.tokens) for each in batches)
        layers = [router.layer for stage in self.stages for router in stage.routers()]
        self.layers = {layer: open_layer(self.cfg, step, layer, batch) for layer in layers}

    def around_gradients(self, run: Any, step: int, compute: Callable[[], Tensor]) -> Tensor:
        with contextlib.ExitStack() as undo:
            for stage in self.stages:
                replace_until(undo, stage, "context_of", partial(self.context_of, stage, stage.context_of))
            return compute()

    def context_of(
        self,
        stage: PipelineStage,
        function: Callable[..., ForwardContext],
        microbatch: Microbatch,
        scale: Any,
    ) -> ForwardContext:
        """Return the context of a microbatch, with the choices of the stage's layers."""
        context = function(microbatch, scale)
        assert microbatch.sequence_ids is not None and context.router_inputs is not None
        rows = microbatch.sequence_ids.cpu().numpy()[:, None]  # [b, 1]
        positions = routed_positions(microbatch, self.mesh).cpu().numpy()[None]  # [1, s/cp/tp]
        device = microbatch.tokens.device
        chosen: dict[int, Tensor] = {}
        for router in stage.routers():
            choices = self.layers[router.layer][rows, positions].astype(np.int64)  # [b, s/cp/tp, k]
            self.check_choices(choices, router.layer)
            chosen[router.layer] = torch.from_numpy(choices).to(device)
        return replace(context, router_inputs=replace(context.router_inputs, chosen=chosen))

    def check_choices(self, choices: np.ndarray, layer: int) -> None:
        """Raise ConfigError unless these are different experts of the model."""
        ordered = np.sort(choices, -1)
        if ordered[..., -1].max() >= self.num_experts or (ordered[..., 1:] == ordered[..., :-1]).any():
            raise ConfigError(
                f"{KEY}: layer {layer} of {self.cfg.train.replay_routing} has a token whose experts are not "
                f"different numbers below {self.num_experts}; record it again"
            )
