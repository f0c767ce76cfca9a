"""Log a run during training: metrics.jsonl (the authoritative record), the console and W&B.

Only rank 0 writes.

Guarantees
- No host sync per step: loss, gradient norm and verdict stay on the device and are read together every
  log.every steps.
- metrics.jsonl has each step once: a resumed run first removes what a killed run wrote after its checkpoint
  (lines.py).
- A full disk, a closed stdout or a failure of W&B does not stop training. Lost records are counted and
  reported at the end.
- Times are monotonic. On a GPU they are measured on the device (CUDA events), because the host runs ahead.
"""
import contextlib
import math
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from config import Config, Tree
from config.numbers import byte_count, duration, parameter_count, short_number, sparkline
from config.reading import Phase, get_phases
from config.reading.phases import change_lines
from config.terminal import visible
from config.tree import plain_data
from config.version import VERSION
from model.router import mixture
from parallel.extras import StepResult
from parallel.wire import clock
from plan.count import batch_line, data_parallel_size, layout_line, model_line
from runtime.console import Console
from runtime.experts import ExpertLoadMap, flatten_row, router_metrics
from runtime.failure import get_exit_code
from runtime.goodput import GoodputClock
from runtime.lines import ALL_STEPS, MetricsFile, read_metrics, skipped_seconds, steps_without_targets
from runtime.plot import LivePicture
from runtime.setup import LaunchEnv, WandbSettings, peak_flops
from runtime.sinks import Sink, asked_trackers, ending
from runtime.summary import SUMMARY_FILE, best_validation

if TYPE_CHECKING:  # imported only under log.inside_every and log.noise_scale
    from optim.noise import SmoothedNoise
    from runtime.inside import InsideLog

DeviceEvent = torch.cuda.Event | torch.mps.Event

GOODPUT_MINUTES = 10  # from here on the closing lines of a first start have its goodput
ESCAPE_LENGTH = 10  # maximum length of an escaped character
LOSS_TERMS = ("ce", "kl")  # of a run with distill.teacher, in nats per target (model/distill.py)
ETA_WINDOW = 64  # the ETA uses the median time of this many steps


@dataclass(frozen=True)
class PendingStep:
    """A step whose numbers are still on the device."""

    step: int
    learning_rate: float
    host_ms: float  # the whole step, by the host's clock
    data_ms: float  # the part of host_ms spent waiting for data
    scalars: Tensor  # [4 to 8]: loss, norm, verdict, targets; two terms of the loss, two of the noise scale
    start: DeviceEvent | None  # None on a CPU
    end: DeviceEvent | None
    router_stats: Tensor | None  # [mixture layers, experts + 4], see runtime/experts.py
    inside: Tensor | None  # statistics of layers (model/inside.py)
    comm: clock.StepTimes | None

    def step_ms(self) -> float:
        """Return the step time, by the device's clock if it has one. The device must have finished it."""
        if self.start is None or self.end is None:
            return self.host_ms
        return self.start.elapsed_time(self.end)  # pyright: ignore[reportArgumentType]  same device


Observer = Callable[[dict[str, Any], PendingStep], object]


class MetricsLogger:
    """Log a run: call header() once, log_step() after each step, and close() at the end.

    log_evaluation(), log_save() and log_line() report events between steps.

    cfg: the config of the whole run, with all phases. steps: the last step of the run. flops_per_token: model
    FLOPs, forward and backward, in the first phase to train. start_step: the step that the run resumes from.
    goodput: the clock of this launch, if any, which is reported in the closing lines.
    """

    def __init__(self, run_dir: Path, cfg: Config, env: LaunchEnv, *, steps: int, flops_per_token: float,
                 start_step: int = 0, goodput: GoodputClock | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.name = cfg.log.name or self.run_dir.name
        self.cfg = cfg
        self.phases = get_phases(cfg)
        self.phase = self.phases.of_step(min(start_step + 1, steps))
        self.env = env
        self.steps = steps
        self.start_step = start_step
        self.goodput = goodput if env.rank == 0 else None
        self.flops_per_token = flops_per_token
        # measure fp8 against the bf16 peak, so that the two are comparable
        dtype = "bf16" if cfg.train.dtype == "fp8" else cfg.train.dtype
        self.peak_flops = peak_flops(env.device, dtype)
        self.open_outputs()

        # steps not yet written, and flags not yet returned
        self.pending: list[PendingStep] = []
        self.unreturned: list[int] = []
        self.rows_since_shown: list[dict[str, Any]] = []
        self.observers: list[Observer] = []  # called with each step that is read, and its row
        self.next_fields: dict[str, float] = {}  # of the next row
        self.last_sample = (self.start_step, "")  # (step, generated text)
        self.last_step = self.start_step  # the last step read
        self.closed = False

        # timing
        self.recent_ms: deque[float] = deque(maxlen=ETA_WINDOW)
        self.seconds_in_steps = 0.0  # the rest of the time is evaluation and saving
        self.created = time.perf_counter()
        self.first_step_began: float | None = None
        self.last_event = self.record_event()

    def open_outputs(self) -> None:
        """Open metrics.jsonl, the console, the sinks and the expert load map, on rank 0 only."""
        is_writer = self.env.rank == 0
        cfg = self.cfg
        self.console = Console(sys.stdout if is_writer else None, self.env.color)
        self.file = MetricsFile(self.run_dir, self.start_step) if is_writer else None

        self.sinks: list[Sink] = []
        tree = plain_data(cfg)
        if is_writer and (self.env.wandb.mode != "off" or asked_trackers(cfg.log)):
            from runtime.tracker_sinks import open_trackers

            made = self.env.provenance
            command = made.record["command"] if made else ""
            self.sinks += open_trackers(self.env.wandb, cfg.log, self.run_dir, self.name, tree, command)
        if is_writer and cfg.log.tensorboard:
            from runtime.tensorboard_sink import TensorboardSink

            self.sinks.append(TensorboardSink(self.run_dir, tree, self.start_step))
        self.picture: LivePicture | None = None

        self.experts: ExpertLoadMap | None = None
        if is_writer and mixture(cfg.model):
            self.experts = ExpertLoadMap(self.run_dir, cfg.model, self.start_step)
            if self.experts.trouble:
                self.console.write(f"warning: {self.experts.trouble}")

        self.inside: "InsideLog | None" = None
        if is_writer and cfg.log.inside_every is not None:
            from runtime.inside import InsideLog

            self.inside = InsideLog(self.run_dir, cfg.model, self.start_step)

        self.smoothed_noise = self.smooth_noise() if cfg.log.noise_scale else None

    def smooth_noise(self) -> "SmoothedNoise":
        """Return the noise scale of the rows so far."""
        from optim.noise import SmoothedNoise

        return SmoothedNoise(read_metrics(self.run_dir, ALL_STEPS)[0] if self.file else [])

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """After an error, write what is pending and close W&B with the error's exit code."""
        if error is not None:
            self.close(f"{type(error).__name__}: {error}", code=get_exit_code(error))

    # ---- each step -----------------------------------------------------------------------------------------

    def log_step(
        self,
        step: int,
        result: StepResult,
        *,
        learning_rate: float,
        seconds: float,
        data_seconds: float,
        router_stats: Tensor | None = None,
        loss_terms: Tensor | None = None,
        noise_scale_parts: Tensor | None = None,
        inside: Tensor | None = None,
        comm: clock.StepTimes | None = None,
    ) -> list[int]:
        """Record one step without waiting for the device.

        Returns the flags (1 if not finite) of the steps with targets that this call has read, oldest first;
        often empty.

        result: scalars [] on any device; they are copied.
        seconds: time of the whole step on the host. data_seconds: the part of it spent waiting for data.
        router_stats: RouterStates.stats (model/router_states.py), not copied.
        loss_terms: [2], cross entropy and divergence, summed over the targets; with distill.teacher.
        noise_scale_parts: [2], the two parts of the noise scale (optim/noise.py).
        inside: statistics of layers (model/inside.py), not copied.
        comm: times of this rank's collectives (parallel/wire/clock.py), read together with the scalars.
        """
        more = [values for values in (loss_terms, noise_scale_parts) if values is not None]
        parts = [*result, *(part for values in more for part in values)]
        dtype = torch.float32 if self.env.device.type == "mps" else torch.float64  # MPS has no fp64
        scalars = torch.stack([part.detach().to(dtype) for part in parts])  # a copy, not a reference
        end = self.record_event()
        if self.first_step_began is None:
            self.first_step_began = time.perf_counter() - seconds
        self.pending.append(PendingStep(
            step=step,
            learning_rate=learning_rate,
            host_ms=1000 * seconds,
            data_ms=1000 * data_seconds,
            scalars=scalars,
            start=self.last_event,
            end=end,
            router_stats=router_stats,
            inside=inside,
            comm=comm,
        ))
        self.last_event = end

        if step % self.cfg.log.every == 0 or step in (self.start_step + 1, self.steps):
            self.read_pending()
            self.show()
        elif self.cfg.optim.spike_rewind is not None:
            self.read_pending()  # a run that may be rewound reads each step when it ends
        return self.pop_flags()

    def flush(self) -> list[int]:
        """Read and write all pending steps. Returns the flags not yet returned.

        Call it before a checkpoint is committed, so that metrics.jsonl is never behind a checkpoint.
        """
        self.read_pending()
        if self.experts:
            try:
                self.experts.save()
            except OSError as error:  # a failed plot does not end a run
                self.log_line(f"warning: {self.experts.file} was not written: {error.strerror}")
        return self.pop_flags()

    def pop_flags(self) -> list[int]:
        flags = self.unreturned
        self.unreturned = []
        return flags

    def rewind(self, step: int) -> None:
        """Remove what was written about the steps after this one, which are retrained. Raises OSError."""
        self.read_pending()
        self.rows_since_shown = []
        self.unreturned = []
        if self.file:
            self.file.rewind(step)
        if self.inside:
            self.inside.file.rewind(step)
        for sink in self.sinks:
            sink.rewind(step)
        if self.experts:
            with contextlib.suppress(OSError):
                self.experts.save()
            self.experts = ExpertLoadMap(self.run_dir, self.cfg.model, step)
        if self.smoothed_noise:
            self.smoothed_noise = self.smooth_noise()

    def add_fields(self, step: int, fields: dict[str, float]) -> None:
        """Add fields to the next row, and send them to the sinks."""
        if fields:
            self.next_fields = fields
            self.put(step, {f"train/{name}": value for name, value in fields.items()})

    def record_event(self) -> DeviceEvent | None:
        """Record an event on the device's stream; None on a CPU, where the host clock is accurate."""
        if self.env.device.type == "cpu":
            return None
        event_class = torch.mps.Event if self.env.device.type == "mps" else torch.cuda.Event
        event = event_class(enable_timing=True)
        event.record()
        return event

    def read_pending(self) -> None:
        """Read the pending steps and write their rows. The only host sync of logging."""
        if not self.pending:
            return
        scalars: list[float] = torch.cat([pending.scalars for pending in self.pending]).tolist()
        memory_gib = self.peak_memory_gib()
        rows: list[dict[str, Any]] = []
        inside: dict[int, dict[str, float]] = {}
        for pending in self.pending:
            count = len(pending.scalars)
            rows.append(self.make_row(pending, scalars[:count], memory_gib))
            scalars = scalars[count:]
            if self.inside and pending.inside is not None:
                inside[pending.step] = self.inside.add(pending.step, pending.inside.tolist())
        read, self.pending = self.pending, []

        for row, pending in zip(rows, read):
            if row["targets"]:
                self.unreturned.append(row["skipped"] - row.get("spike", 0))
            for observe in self.observers:
                observe(row, pending)
            self.recent_ms.append(row["step_ms"])
            self.seconds_in_steps += row["step_ms"] / 1000
            values = {f"train/{name}": value for name, value in flatten_row(row).items()}
            self.put(row["step"], values | inside.get(row["step"], {}))
            self.last_step = row["step"]
        self.rows_since_shown += rows
        self.write(rows)

    def put(self, step: int, values: dict[str, Any]) -> None:
        """Send values to the sinks, with tokens as an axis to compare runs, and FLOPs if all tokens cost the
        same."""
        tokens = self.phases.tokens_seen(step)
        axes: dict[str, float] = {"tokens": tokens}
        if len(self.phases.all) == 1:
            axes["flops"] = tokens * self.flops_per_token
        for sink in self.sinks:
            sink.put(step, values | axes)

    def make_row(self, pending: PendingStep, scalars: list[float], memory_gib: float) -> dict[str, Any]:
        """Return the metrics.jsonl row of one step, with its fields in order."""
        loss, grad_norm, is_good, num_targets, *more = scalars
        has_targets = num_targets > 0
        terms: dict[str, float | None] = {}
        if self.cfg.distill.teacher is not None:
            means = [total / num_targets if has_targets else None for total in more[:len(LOSS_TERMS)]]
            terms = dict(zip(LOSS_TERMS, means))
            more = more[len(LOSS_TERMS):]
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        step = pending.step
        step_ms = pending.step_ms()
        exposed_ms, hidden_ms = pending.comm.read() if pending.comm else (0.0, 0.0)
        phase = self.phases.of_step(step)
        tokens = phase.tokens_seen(step) - phase.tokens_seen(step - 1)
        tokens_per_s = 1000 * tokens / max(step_ms, 1e-6)
        tokens_per_s_per_gpu = tokens_per_s / self.env.world
        flops = tokens_per_s_per_gpu * self.flops_per_token
        row: dict[str, Any] = {
            "step": step,
            "loss": loss if has_targets else None,  # otherwise a mean over nothing
            **terms,
            "grad_norm": grad_norm if has_targets else None,
            "lr": pending.learning_rate,
            "tokens": phase.tokens_seen(step),
            "targets": int(num_targets),
            "step_ms": step_ms,
            "data_ms": pending.data_ms,
            "comm_exposed_ms": exposed_ms,
            "comm_hidden_ms": hidden_ms,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": tokens_per_s_per_gpu,
            "tflops_per_gpu": flops / 1e12,
            "mfu": self.utilization(flops),
            "mem_gib": memory_gib,
            "skipped": int(not is_good),
        }
        if self.cfg.optim.spike_sigma is not None:
            row["spike"] = int(not is_good and is_finite and has_targets)
        row |= self.next_fields
        self.next_fields = {}
        if len(self.phases.all) > 1:
            row["phase"] = phase.number
        if self.smoothed_noise:
            row |= self.smoothed_noise.update(more, bool(is_good))
        if self.experts and pending.router_stats is not None:
            stats = pending.router_stats.cpu().numpy()
            row |= router_metrics(stats, mixture(self.cfg.model))
            self.experts.add(step, stats[:, :self.experts.experts])
        return row

    def utilization(self, flops: float) -> float | None:
        """Return the MFU at `flops` per second and GPU, or None if the device's peak is unknown."""
        return flops / self.peak_flops if self.peak_flops else None

    def peak_memory_gib(self) -> float:
        """Return the peak memory of the allocator on a GPU, or of the process on a CPU."""
        if self.env.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.env.device) / 2**30
        if self.env.device.type == "mps":  # held by the allocator, which never shrinks
            return torch.mps.driver_allocated_memory() / 2**30
        return peak_process_bytes() / 2**30

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append rows to metrics.jsonl, and print the warnings of the file and the sinks, each once."""
        if not self.file:
            return
        self.file.add(rows)
        files = [self.file, self.inside.file] if self.inside else [self.file]
        for warning in (*(file.warning() for file in files), *(sink.warning() for sink in self.sinks)):
            if warning:
                self.log_line(f"warning: {warning}")

    # ---- the console ---------------------------------------------------------------------------------------

    def header(
        self,
        parameters: tuple[int, int],
        data: str,
        notes: Sequence[str] = (),
        provenance: Tree | None = None,
    ) -> None:
        """Print the header.

        parameters: (total, without embeddings). notes: one line each, such as the resume. provenance: code,
        weights and data of the run, for W&B and TensorBoard.
        """
        console = self.console
        console.write_wrapped(f"Bevatron {VERSION} · {self.env} · run {self.run_dir}")
        console.label("model", model_line(self.phase.cfg, parameters))
        console.label("layout", layout_line(self.phase.cfg, self.env.world))
        batch = batch_line(self.phase.cfg, self.env.world)
        console.label("batch", f"{batch}{'':10}{self.length_text(parameters[0])}")
        console.label("data", data)
        if self.env.device.type == "cuda":
            console.label("kernels", determinism_text(self.env.deterministic))
        for text in change_lines(self.phases):
            console.label("then", text)
        places = [f"{self.run_dir}/metrics.jsonl", wandb_text(self.env.wandb)]
        if self.cfg.log.tensorboard:
            places.append(f"tensorboard --logdir {self.cfg.log.dir}")
        places += [f"{tracker} {value}" for tracker, value in asked_trackers(self.cfg.log).items()]
        console.label("log", " · ".join(places))
        for note in [*(sink.note for sink in self.sinks if sink.note), *notes]:
            console.write_wrapped(note)
        console.columns(self.steps)
        if self.file:
            self.picture = LivePicture(self.run_dir, parameter_count(parameters[0]))
        self.describe_to_sinks(parameters, data, provenance)

    def describe_to_sinks(self, parameters: tuple[int, int], data: str, provenance: Tree | None) -> None:
        """Send the facts that config.yaml lacks to the sinks: sizes, ranks, device, FLOPs, code."""
        total, without_embeddings = parameters
        facts = {
            "parameters": total,
            "parameters_without_embeddings": without_embeddings,
            "flops_per_token": self.flops_per_token,
            "steps": self.steps,
            "tokens": self.phases.tokens_seen(self.steps),
            "world": self.env.world,
            "dp": data_parallel_size(self.cfg, self.env.world),
            "layout": layout_line(self.cfg, self.env.world),
            "device": str(self.env),
            "host": self.env.host,
            "data": data,
        }
        if provenance:
            facts["provenance"] = provenance
        for sink in self.sinks:
            sink.describe(facts)

    def length_text(self, parameters: int) -> str:
        """Format as "600 steps = 1.23M tokens (1.4 tok/param)"."""
        tokens = self.phases.tokens_seen(self.steps)
        ratio = tokens / max(parameters, 1)
        digits = f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}"
        return f"{self.steps:,} steps = {short_number(tokens)} tokens ({digits} tok/param)"

    def show(self) -> None:
        """Print the line of the newest step, with the rates since the previous line."""
        rows = self.rows_since_shown
        first, last = rows[0], rows[-1]
        seconds = max(sum(row["step_ms"] for row in rows) / 1000, 1e-9)
        tokens = self.phases.tokens_seen(last["step"]) - self.phases.tokens_seen(first["step"] - 1)
        tokens_per_s = tokens / seconds
        flops = tokens_per_s / self.env.world * self.flops_per_token
        rates = {
            "tokens_per_s": tokens_per_s,
            "tflops": flops / 1e12,
            "mfu": self.utilization(flops),
            "data": sum(row["data_ms"] for row in rows) / 1000 / seconds,
            "skipped": sum(row["skipped"] for row in rows if row["targets"]),
            "without_targets": sum(not row["targets"] for row in rows),
        }
        step = last["step"]
        self.console.show_step(step, self.steps, row=last, rates=rates, eta=self.eta(step))
        self.rows_since_shown = []

    def eta(self, step: int) -> float:
        """Return the seconds left, at most until train.max_minutes.

        A step counts with the median step time, which is robust to single slow steps, plus its share of the
        time spent in evaluation and saving so far.
        """
        if self.first_step_began is None:
            return math.inf
        now = time.perf_counter()
        between_steps = max(now - self.first_step_began - self.seconds_in_steps, 0.0)
        between_steps /= max(step - self.start_step, 1)
        left = (self.steps - step) * (statistics.median(self.recent_ms) / 1000 + between_steps)
        limit = self.cfg.train.max_minutes
        if limit is None:
            return left
        return min(left, max(0.0, 60 * limit - (now - self.created)))

    def log_evaluation(
        self,
        step: int,
        *,
        val_loss: float | None,
        val_ppl: float | None,
        val_bpb: float | None,
        ema_loss: float | None = None,
        source_losses: Mapping[str, float | None] | None = None,
        sample: str = "",
        tasks: Mapping[str, float] | None = None,
        task_lines: Sequence[str] = (),
    ) -> None:
        """Record a validation: loss in nats per token, perplexity, bits per byte, and a generated sample.

        A loss is None if no target counts; it is null in the file and absent in W&B.

        ema_loss: loss of the moving average of the weights (train.ema), logged as val/ema/loss.
        source_losses: {source of a blend: loss}, logged as val/NAME/loss.
        tasks: {metric name in the file and in W&B: value}; task_lines: the same for the console.
        """
        self.read_pending()
        values = {"val_loss": val_loss, "val_ppl": val_ppl, "val_bpb": val_bpb}
        more: dict[str, float | None] = {}
        for name, loss in (source_losses or {}).items():
            more[f"val/{name}/loss"] = loss
        if self.cfg.train.ema is not None:
            more["val/ema/loss"] = ema_loss
        more |= tasks or {}
        self.write([{"step": step} | values | more])
        shown = {name.replace("_", "/", 1): value for name, value in values.items()}
        self.put(step, flatten_row(shown | more))
        if sample:
            # the raw text, without terminal control characters
            text = "\n".join(visible(line, len(line) * ESCAPE_LENGTH) for line in sample.split("\n"))
            for sink in self.sinks:
                sink.text(step, "sample", text)
        if self.picture:
            self.picture.draw_soon()
        if sample:
            self.last_sample = (step, sample)
        self.console.show_evaluation(
            step,
            loss=val_loss,
            perplexity=val_ppl,
            bits_per_byte=val_bpb,
            ema_loss=ema_loss,
            sample=sample,
        )
        if source_losses:
            self.console.show_sources(step, source_losses)
        if val_loss is None:
            self.console.write_wrapped(f"no target of the validation at step {step:,} counts, so it has no "
                                       "loss; raise eval.batches or train.seq_len")
        for line in task_lines:
            self.console.show_task(step, line)
        self.last_event = self.record_event()  # the next step starts here

    def begin_phase(self, phase: Phase, flops_per_token: float, text: str) -> None:
        """Report that a phase begins, with `text` on the console. The ETA restarts with its steps."""
        self.write_final_rows()
        self.phase = phase
        self.flops_per_token = flops_per_token
        self.recent_ms.clear()
        self.log_line(text)

    def log_save(self, path: Path, size_bytes: int, seconds: float, linked_bytes: int = 0) -> None:
        """Report a save. linked_bytes: the part of size_bytes in unchanged files that were hard-linked."""
        size = byte_count(size_bytes)
        if linked_bytes:
            size = f"wrote {byte_count(size_bytes - linked_bytes)}, linked {byte_count(linked_bytes)}"
        self.log_line(f"saved {path} ({size}, {seconds:.1f} s)")

    def reopen(self) -> None:
        """Start a new metrics.jsonl after the file was removed."""
        for file in (self.file, self.inside and self.inside.file):
            if file:
                file.close()

    def log_line(self, text: str) -> None:
        """Print a line. The time up to now is not counted in any step."""
        self.console.write_wrapped(text)
        self.last_event = self.record_event()

    # ---- the end -------------------------------------------------------------------------------------------

    def close(self, reason: str | None = None, *, code: int = 0, hints: Sequence[str] = ()) -> None:
        """Write what is pending, close W&B and print the summary; a second call does nothing.

        reason: why the run stopped early, or None if it finished. code: the exit code, for W&B.
        hints: suggested next commands.
        Never raises, since a failed report must not fail a finished run.
        """
        if self.closed:
            return
        self.closed = True
        parts = (
            self.write_final_rows,
            self.report_goodput,
            self.report_best,
            lambda: self.close_sinks(code, reason),
            lambda: self.summary(reason, [*(sink.hint for sink in self.sinks if sink.hint), *hints]),
        )
        for part in parts:
            try:
                part()
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                self.console.write(f"warning: the end of the run was not reported in full: {cause}")

    def send_picture(self, name: str, path: Path | None) -> None:
        """Send a picture to the sinks unless `path` is None."""
        if path is None:
            return
        for sink in self.sinks:
            sink.picture(self.last_step, name, path)

    def send_checkpoint(self, step: int, folder: Path) -> None:
        """Send the location of a checkpoint to the sinks."""
        told = [self.run_dir / name for name in ("config.yaml", SUMMARY_FILE)]
        for sink in self.sinks:
            sink.checkpoint(step, folder, [file for file in told if file.exists()])

    def close_sinks(self, code: int, reason: str | None) -> None:
        if self.picture:
            self.picture.stop()
        elapsed = duration(time.perf_counter() - self.created)
        closing_line = f"{elapsed}: {reason or f'{self.steps:,} steps'}"
        for sink in self.sinks:
            sink.close(code, closing_line)
        title, level = ending(code)
        if self.file and level == "ERROR" and self.cfg.log.alert_command is not None:
            from runtime.alert import run_alert

            trouble = run_alert(self.cfg.log.alert_command, f"{self.name}: {title} after {closing_line}")
            if trouble:
                self.log_line(f"warning: {trouble}")

    def report_goodput(self) -> None:
        """Send the goodput of the run, over all its launches, to the sinks; print it unless the run is short
        and was started once."""
        if self.goodput is None:
            return
        report = self.goodput.report(skipped_seconds(self.run_dir))
        if self.goodput.trouble:
            self.log_line(f"warning: {self.goodput.trouble}")
        if report.starts > 1 or report.minutes >= GOODPUT_MINUTES:
            self.log_line(report.line())
        values = {"goodput": report.goodput, "ettr": report.ettr, "starts": report.starts}
        step = self.goodput.record.last_step or self.start_step
        self.put(step, {f"run/{name}": value for name, value in values.items()})

    def report_best(self) -> None:
        """Send the best validation of the run, over all its launches, to the sinks."""
        best = best_validation(read_metrics(self.run_dir)[1]) if self.file else None
        if best is not None:
            self.put(self.last_step, {"run/best_val_loss": best["val_loss"], "run/best_step": best["step"]})

    def write_final_rows(self) -> None:
        self.read_pending()
        if self.rows_since_shown:  # the run stopped between two console lines
            self.show()

    def summary(self, reason: str | None, hints: Sequence[str]) -> None:
        """Print the closing lines: what was lost, how the run ended, the loss curve, and the hints."""
        self.write([])  # prints warnings that came after the last row
        dropped = self.file.close() if self.file else 0
        if dropped:
            self.log_line(f"warning: {dropped} records dropped from {self.run_dir}/metrics.jsonl")
        if self.console.lost:
            self.log_line(f"warning: {self.console.lost} lines dropped from this output")

        elapsed = duration(time.perf_counter() - self.created)
        outcome = f"stopped after {elapsed}: {reason}" if reason else f"done in {elapsed}"
        losses = self.read_losses()
        if losses:
            outcome += f"   loss {losses[0]:.2f} -> {losses[-1]:.2f}  {sparkline(losses)}"
        without = steps_without_targets(self.run_dir) if self.file else 0
        if without:
            outcome += f"   {without:,} of {self.last_step:,} steps had no target, and changed nothing"
        step, sample = self.last_sample
        if step == 0 < self.last_step:  # a sample of the untrained model
            sample = ""
        name = "sample" if step == self.last_step else f"sample of step {step:,}"
        self.console.show_outcome(outcome, sample, name)
        self.console.hints("next", hints)

    def read_losses(self) -> list[float]:
        """Return the finite losses of metrics.jsonl and warn of damaged lines; [] on ranks other than 0."""
        if not self.file:
            return []
        damaged: list[int] = []
        rows, _ = read_metrics(self.run_dir, damaged_lines=damaged)
        if damaged:
            numbers = ", ".join(map(str, damaged[:8]))
            if len(damaged) > 8:
                numbers += ", ..."
            path = f"{self.run_dir}/metrics.jsonl"
            self.log_line(f"warning: {path}: {len(damaged)} damaged lines were left out (line {numbers})")
        return [row["loss"] for row in rows if row["loss"] is not None]


def peak_process_bytes() -> int:
    """Return the peak memory of this process."""
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    except OSError:  # not on Linux. On Linux this maximum is inherited from the parent process
        in_bytes = sys.platform == "darwin"  # in KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if in_bytes else 1024)


def determinism_text(deterministic: bool) -> str:
    """Describe the effect and the cost of train.deterministic on a GPU (docs/training.md)."""
    if deterministic:
        return "deterministic: the run repeats bit for bit; attention's backward and scatters are slower"
    return "the fastest: the run does not repeat bit for bit (--train.deterministic true: it does, slower)"


def wandb_text(settings: WandbSettings) -> str:
    text = f"wandb {settings.mode}"
    if settings.mode == "off":
        return text + " (--log.wandb to enable)"
    return text + (f" ({settings.note})" if settings.note else "")
