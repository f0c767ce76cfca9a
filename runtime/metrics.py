"""What a run tells: metrics.jsonl (the truth), the console, W&B. One writer, rank 0; the others only listen.

Promises
- No host sync in a step: loss, norm and verdict stay on the device and come over together, every log.every steps.
- metrics.jsonl holds each step once: a resumed run first cuts what a killed one wrote past its checkpoint (lines.py).
- Neither a full disk, a closed stdout nor W&B stops training: what is lost is counted, and said at the end.
- Times are monotonic; on a GPU they are the device's own (events), for there the host runs ahead.
"""
import dataclasses
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from config import Config, batch_size, sequences
from runtime.console import Console, duration, params, short, size, sparkline, visible
from runtime.experts import LoadMap, flat, numbers
from runtime.failure import code_of
from runtime.lines import Lines, read
from runtime.setup import Env, peak_flops
from runtime.wandb_sink import Sink

DECAY = 0.95  # of the running means behind the noise scale
WINDOW = 64  # steps whose median is the rate behind the ETA


class Smooth:
    """The gradient noise scale as a ratio of running means: each part alone is unbiased, their ratio in one step is noise and may be
    negative. A resumed run goes on from the lines it kept. rows: of metrics.jsonl."""

    def __init__(self, rows: list[dict]) -> None:
        self.means: list[float] | None = None
        for r in rows:
            self.row([r.get("noise_s"), r.get("noise_g2")], not r.get("skipped"))

    def row(self, noise: list, ok: bool) -> dict:
        """noise: [S, |G|^2] of a step, or nothing -> what its line says: noise_scale in tokens, None where it is not known."""
        s, g2 = noise if len(noise) == 2 and None not in noise and all(map(math.isfinite, noise)) else (None, None)
        if ok and s is not None:
            self.means = [s, g2] if self.means is None else [DECAY * m + (1 - DECAY) * x for m, x in zip(self.means, (s, g2))]
        known = s is not None and min(self.means or [0.0]) > 0
        return {"noise_scale": self.means[0] / self.means[1] if known else None, "noise_s": s, "noise_g2": g2}


class Metrics:
    """Call header() once, step() once a step, eval() and saved() when they happen, close() at the end.

    steps: the horizon; flops_per_token: model FLOPs, forward and backward; start_step: the checkpoint gone on from.
    """

    def __init__(self, run_dir: Path, cfg: Config, env: Env, *, steps: int, flops_per_token: float,
                 start_step: int = 0):
        self.run_dir, self.cfg, self.env = Path(run_dir), cfg, env
        self.steps, self.start = steps, start_step
        self.flops = flops_per_token
        self.peak = peak_flops(env.device, "bf16" if cfg.train.dtype == "fp8" else cfg.train.dtype)  # of bf16, so that the two compare
        self.writes = env.rank == 0
        self.console = Console(sys.stdout if self.writes else None, env.color)
        self.file = Lines(self.run_dir, start_step) if self.writes else None
        self.sink = Sink(env.wandb if self.writes else dataclasses.replace(env.wandb, mode="off"), self.run_dir,
                         cfg.log.name or self.run_dir.name, dataclasses.asdict(cfg))
        self.experts = LoadMap(self.run_dir, cfg.model, start_step) if self.writes and cfg.model.experts else None
        if self.experts and self.experts.trouble:
            self.console.write(f"warning: {self.experts.trouble}")
        self.pending: list[tuple[dict, Tensor, object, Tensor | None, object]] = []  # steps whose numbers are still on the device
        self.unseen: list[int] = []  # skipped flags that no call has handed back yet
        self.noise = Smooth(read(self.run_dir, 1 << 40)[0] if self.writes and cfg.log.noise_scale else [])
        self.span: list[dict] = []  # rows since the last console line
        self.recent: deque[float] = deque(maxlen=WINDOW)  # ms of the last steps
        self.busy = 0.0  # seconds in steps so far; the rest of the wall time is evaluation and saving
        self.began = time.perf_counter()
        self.first: float | None = None  # when the first step began
        self.text = ""  # the last sample
        self.closed = False
        self.mark = self.stamp()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        """A run that ends in an error still writes what it knows, and leaves W&B in order."""
        if error is not None:
            self.close(f"{kind.__name__}: {error}", code=code_of(error))

    # ---- once a step -------------------------------------------------------------------------------------------------

    def step(self, step: int, *, loss: Tensor, grad_norm: Tensor, ok: Tensor, lr: float, seconds: float,
             data_seconds: float, told: Tensor | None = None, noise: Tensor | None = None, comm=None) -> list[int]:
        """Takes in one step. loss, grad_norm, ok: scalars [] on any device, copied, not waited for; seconds: of the
        whole step on the host, data_seconds: of these waiting for data; told: model.moe.Routers.told, kept as it is;
        noise: optim.noise.Noise.told, [2]; comm: parallel.clock.Step, of this rank; read as late as the others.

        Returns the skipped flags (0 or 1) of the steps that became known by this call, oldest first: often none."""
        scalars = (loss, grad_norm, ok, *(() if noise is None else noise))
        values = torch.stack([v.detach().to(torch.float64) for v in scalars])  # a copy, not a reference
        end = self.stamp()
        self.first = time.perf_counter() - seconds if self.first is None else self.first
        host = {"step": step, "lr": lr, "step_ms": 1000 * seconds, "data_ms": 1000 * data_seconds}
        self.pending.append((host, values, (self.mark, end), told, comm))
        self.mark = end
        if step % self.cfg.log.every == 0 or step in (self.start + 1, self.steps):
            self.gather()
            self.show()
        return self.taken()

    def flush(self) -> list[int]:
        """Brings in and writes every pending step; call it before a checkpoint is committed, so that the file is never
        behind one. Returns the skipped flags not yet handed back."""
        self.gather()
        if self.experts:
            try:
                self.experts.save()
            except OSError as error:  # a picture is not worth a run
                self.event(f"warning: {self.experts.file} was not written: {error.strerror}")
        return self.taken()

    def taken(self) -> list[int]:
        flags, self.unseen = self.unseen, []
        return flags

    def stamp(self):
        """A stamp on the device's own time line; None on a CPU, where the host's clock is right."""
        if self.env.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def gather(self) -> None:
        """The one place that waits for the device."""
        if not self.pending:
            return
        scalars = torch.cat([values for _, values, *_ in self.pending]).tolist()
        rows, memory = [], self.memory()
        for host, values, (mark, end), told, comm in self.pending:
            (loss, norm, ok, *noise), scalars = scalars[:len(values)], scalars[len(values):]
            if mark is not None:
                host["step_ms"] = mark.elapsed_time(end)
            host["comm"] = comm.read() if comm else (0.0, 0.0)
            rows.append(self.row(host, loss, norm, ok, memory) | (self.noise.row(noise, bool(ok)) if self.cfg.log.noise_scale else {}))
            if self.experts and told is not None:
                rows[-1] |= numbers(told.cpu().numpy(), self.cfg.model)
                self.experts.add(host["step"], told[:, :self.cfg.model.experts].cpu().numpy())
        self.pending = []
        for row in rows:
            self.unseen.append(row["skipped"])
            self.recent.append(row["step_ms"])
            self.busy += row["step_ms"] / 1000
            self.sink.put(row["step"], {f"train/{k}": v for k, v in flat(row).items()})
        self.span += rows
        self.write(rows)

    def row(self, host: dict, loss: float, norm: float, ok: float, memory: float) -> dict:
        """One line of metrics.jsonl, in its order."""
        ms = max(host["step_ms"], 1e-6)
        train = self.cfg.train
        rate = 1000 * batch_size(train, host["step"] - 1) * train.seq_len / ms
        flops = rate / self.env.world * self.flops
        return {"step": host["step"], "loss": loss, "grad_norm": norm, "lr": host["lr"],
                "tokens": sequences(train, host["step"]) * train.seq_len, "step_ms": host["step_ms"], "data_ms": host["data_ms"],
                "comm_exposed_ms": host["comm"][0], "comm_hidden_ms": host["comm"][1],
                "tokens_per_s": rate, "tokens_per_s_per_gpu": rate / self.env.world,
                "tflops_per_gpu": flops / 1e12, "mfu": flops / self.peak if self.peak else None,
                "mem_gib": memory, "skipped": int(not ok)}

    def memory(self) -> float:
        """Peak GiB: of the allocator on a GPU, of the process on a CPU."""
        if self.env.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.env.device) / 2**30
        # not getrusage: its maximum is inherited from the process that started us
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("VmHWM:")) / 2**20

    def write(self, rows: list[dict]) -> None:
        if self.file:
            self.file.add(rows)
            for warning in (self.file.warning(), self.sink.warning()):
                if warning:
                    self.event(f"warning: {warning}")

    # ---- the console -------------------------------------------------------------------------------------------------

    def header(self, parameters: tuple[int, int], data: str, notes: Sequence[str] = ()) -> None:
        """Says what is about to run. parameters: (all, without embeddings); notes: a line each, such as the resume."""
        c, m, t, show = self.cfg, self.cfg.model, self.cfg.train, self.console
        world, p = self.env.world, c.parallel
        dp = world // (p.tp * p.pp * p.cp)
        accum = t.global_batch // (t.micro_batch * dp)
        total = sequences(t, self.steps) * t.seq_len
        show.write(f"Bevatron 0.1 · {self.env} · run {self.run_dir}")
        mix = f" · {m.experts} experts, {m.top_k} a token" if m.experts else ""
        heads = f"{m.heads} heads" + (f" ({m.kv_heads} kv)" if m.kv_heads not in (None, m.heads) else "")
        show.label("model", f"{m.preset}   {params(parameters[0])} params ({params(parameters[1])} without embeddings)"
                            f" · {m.layers} layers · d {m.hidden} · {heads}{mix} · vocab {m.vocab or 0:,}")
        show.label("layout", f"world {world} = dp {dp} · tp {p.tp} · pp {p.pp} · cp {p.cp}"
                             + (f" · ep {p.ep} · etp {p.etp}" if m.experts else "") + f" · {t.dtype}")
        show.label("batch", f"{t.micro_batch * dp} seq x {t.seq_len} tok x {accum} accum = {t.global_batch * t.seq_len:,} tok/step"
                            + (f" (ramp {t.ramp})" if t.ramp else "") + f"{'':10}{self.steps:,} steps = {short(total)} tokens "
                            f"({total / max(parameters[0], 1):.1f} tok/param)")
        show.label("data", data)
        w = self.env.wandb
        how = " (--log.wandb to enable)" if w.mode == "off" else f" ({w.note})" if w.note else ""
        show.label("log", f"{self.run_dir}/metrics.jsonl · wandb {w.mode}{how}")
        for note in notes:
            show.write(note)
        show.columns(self.steps)

    def show(self) -> None:
        """The console line of the newest step, with the rates since the line before."""
        span, last = self.span, self.span[-1]
        seconds = max(sum(r["step_ms"] for r in span) / 1000, 1e-9)
        t = self.cfg.train
        rate = (sequences(t, last["step"]) - sequences(t, span[0]["step"] - 1)) * t.seq_len / seconds
        flops = rate / self.env.world * self.flops
        rates = {"tokens_per_s": rate, "tflops": flops / 1e12, "mfu": flops / self.peak if self.peak else None,
                 "data": sum(r["data_ms"] for r in span) / 1000 / seconds, "skipped": sum(r["skipped"] for r in span)}
        self.console.step(last["step"], self.steps, last, rates, self.eta(last["step"]))
        self.span = []

    def eta(self, step: int) -> float:
        """Seconds left: the median step (one slow one says nothing), plus what evaluating and saving added so far."""
        aside = max(time.perf_counter() - self.first - self.busy, 0.0) / max(step - self.start, 1)
        left = (self.steps - step) * (statistics.median(self.recent) / 1000 + aside)
        limit = self.cfg.train.max_minutes
        return left if limit is None else min(left, max(0.0, 60 * limit - (time.perf_counter() - self.began)))

    def eval(self, step: int, *, val_loss: float, val_ppl: float, val_bpb: float, sample: str = "") -> None:
        """A validation: nats a token, perplexity, bits a byte, and a text sampled from the model."""
        self.gather()
        row = {"step": step, "val_loss": float(val_loss), "val_ppl": float(val_ppl), "val_bpb": float(val_bpb)}
        self.write([row])
        self.sink.put(step, {k.replace("_", "/", 1): v for k, v in row.items() if k != "step"})
        self.text = sample or self.text
        self.console.eval(step, row["val_loss"], row["val_ppl"], row["val_bpb"], sample)
        self.mark = self.stamp()  # the next step starts here

    def saved(self, path: Path, size_bytes: int, seconds: float) -> None:
        self.event(f"saved {path} ({size(size_bytes)}, {seconds:.1f} s)")

    def event(self, text: str) -> None:
        """A line of its own in the console."""
        self.console.write(text)
        self.mark = self.stamp()

    def close(self, reason: str | None = None, *, code: int = 0, hints: Sequence[str] = ()) -> None:
        """Ends everything, once, and says how it went. reason: why the run stopped early, None when it is
        done; code: the exit code, for W&B; hints: what to type next. Never raises: what is told is not worth
        what was trained."""
        if self.closed:
            return
        self.closed = True
        for part in (self.rest, lambda: self.sink.close(code), lambda: self.summary(reason, hints)):
            try:
                part()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                self.console.write(f"warning: the end of the run was not told in full: {why}")

    def rest(self) -> None:
        """What no line has told yet."""
        self.gather()
        if self.span:  # stopped between two lines
            self.show()

    def summary(self, reason: str | None, hints: Sequence[str]) -> None:
        """The last lines of the console."""
        self.write([])
        lost = self.file.close() if self.file else 0
        if lost:
            self.event(f"warning: {lost} records dropped from {self.run_dir}/metrics.jsonl")
        if self.console.lost:
            self.event(f"warning: {self.console.lost} lines dropped from this output")
        took = duration(time.perf_counter() - self.began)
        bad: list[int] = []
        rows = read(self.run_dir, bad=bad)[0] if self.writes else []
        losses = [r["loss"] for r in rows if r["loss"] is not None]
        if bad:
            few = ", ".join(map(str, bad[:8])) + ", ..." * (len(bad) > 8)
            where = f"{self.run_dir}/metrics.jsonl"
            self.event(f"warning: {where}: {len(bad)} damaged lines were left out (line {few})")
        course = f"   loss {losses[0]:.2f} -> {losses[-1]:.2f}  {sparkline(losses)}" if losses else ""
        text = f"   sample: {visible(self.text, 50)}" if self.text else ""
        self.event((f"stopped after {took}: {reason}" if reason else f"done in {took}") + course + text)
        if hints:
            self.console.label("next", "   ·   ".join(hints))
