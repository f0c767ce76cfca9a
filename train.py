"""Train a language model: one step, and the loop around it.

    python train.py [NAME] [--config FILE] [--section.field VALUE ...]    NAME is a recipe; without one: quickstart
    python train.py --list                                                every recipe with its size and shape
    python train.py NAME --help                                           every key with its type, meaning and default
"""
import os
import sys
import time
from pathlib import Path

import runtime  # before torch (see there)
import config
from build import Run, build, horizon, with_vocab
from checkpoint import state, store
from config import Config, ConfigError
from data.loader import open_data
from model.generate import generate
from optim.clip import clip_factor, grad_norm
from parallel import comm
from parallel.mesh import Mesh
from plan.count import flops_per_token, parameters, table
from runtime import failure, setup
from runtime.console import params as short
from runtime.evaluate import mean_loss, report
from runtime.guard import Guard
from runtime.metrics import Metrics
from runtime.plot import loss_png
from runtime.stop import Stop

POINTS = (*store.POINTS, "step.begin", "step.backward", "step.end", "step.logged")


def train_step(run: Run, step: int, batches: list, guard: Guard, at):
    """One optimizer step over this rank's microbatches -> loss, gradient norm, ok: scalars still on the device."""
    tokens = comm.sum_(sum(b.counted() for b in batches), run.mesh.loss)  # global count first: exact under masks and packing
    for b in run.buckets:
        b.zero_grad()
    loss = run.pipeline.run(run.ops, batches, 1 / tokens)
    for b in run.buckets:
        b.sum_tied()
    if at("step.backward", step) == "nan":
        run.buckets[0].shard[0] = float("nan")
    norm = grad_norm(run.buckets, run.mesh)
    ok = guard.judge(loss, norm)
    run.optim.step(step, run.lr(step), clip_factor(norm, run.cfg.optim.clip), ok)
    for b in run.buckets:
        b.publish()
    return loss, norm, ok


def train(cfg: Config, env, folder: Path) -> int:
    """Train to the horizon; returns the exit code. Whatever can be refused is refused before the first step."""
    at = setup.faults(env, POINTS)
    setup.seed(cfg)
    data, valid = (open_data(cfg, split, env.rank, env.world) for split in ("train", "valid"))
    cfg = with_vocab(cfg, data.tokenizer.vocab)
    flops = flops_per_token(cfg.model, cfg.train.seq_len)
    run = build(cfg, Mesh.single(), env.device, data, horizon(cfg, flops))
    root = folder / "checkpoints"
    start, notes = resume(run, root)
    os.makedirs(folder / "tokenizer", exist_ok=True)
    data.tokenizer.save(folder / "tokenizer")
    (folder / "config.yaml").write_text(config.dump(cfg))
    log = Metrics(folder, cfg, env, steps=run.steps, flops_per_token=flops, start_step=start)
    count = parameters(cfg.model)
    log.header((count["total"], count["total"] - count["embedding"]), data.describe(), notes)
    guard, stop = Guard(), Stop(folder, cfg.train.max_minutes)
    checks = [b.to(env.device) for i in range(cfg.eval.batches) for b in valid.microbatches(i)]

    def evaluate(step: int) -> None:
        log.eval(step, **report(mean_loss(run.pipeline.evaluate, checks, run.mesh.loss), valid.bytes_per_token), sample=sample(run))

    step, reason = start, None
    if start == 0:
        evaluate(0)
    for step in range(start + 1, run.steps + 1):
        at("step.begin", step)
        begun = time.perf_counter()
        batches = [b.to(env.device) for b in data.microbatches(step - 1)]
        waited = time.perf_counter() - begun
        loss, norm, ok = train_step(run, step, batches, guard, at)
        at("step.end", step)
        guard.observe(log.step(step, loss=loss, grad_norm=norm, ok=ok, lr=run.lr(step), data_seconds=waited,
                               seconds=time.perf_counter() - begun))
        at("step.logged", step)
        reason = stop.check()
        last = step == run.steps or reason is not None
        if last or due(cfg.eval.every, step):
            evaluate(step)
        if last or due(cfg.checkpoint.every, step):
            guard.observe(log.flush())
            begun = time.perf_counter()
            path = state.save(run, root, step, at)
            log.saved(path, sum(f.stat().st_size for f in path.iterdir()), time.perf_counter() - begun)
        if last:
            break
    data.close()
    loss_png(folder, short(count["total"]))
    done = step == run.steps
    log.close(None if done else reason, code=0 if done else 75, hints=[
        f'python -m scripts.generate {folder} --prompt "class "', f"python -m scripts.evaluate {folder}", "python train.py --list"])
    return 0 if done else 75


def due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def resume(run: Run, root: Path) -> tuple[int, list[str]]:
    """Take up what checkpoint.resume and checkpoint.init_from name -> (steps done, notes for the log)."""
    c, notes = run.cfg.checkpoint, []
    if root.is_dir():
        store.clean(root)  # what a killed writer left; the run's lock is ours
    own = store.newest(root, notes) if root.is_dir() and c.resume != "none" else None
    if c.resume == "none" and root.is_dir() and store.committed(root):
        raise ConfigError(f"checkpoint.resume: none, but {root} holds checkpoints; choose another --log.name, or move them away")
    path = own if c.resume in ("auto", "none") else own or state.find(c.resume, notes)
    if path is not None:
        notes += state.load(run, path)
        step = store.meta(path)["step"]
        return step, [*notes, f"resumed from {path} at step {step}"]
    if c.init_from:
        path = state.find(c.init_from, notes)
        state.load_weights(run.buckets, path)
        notes.append(f"weights from {path}")
    return 0, notes


def sample(run: Run) -> str:
    """A piece of text as the model writes it now; '' where eval.sample is 0."""
    e, tok = run.cfg.eval, run.data.tokenizer
    start = tok.encode(e.prompt) or [tok.eod]
    return e.prompt + tok.decode(list(generate(run.stages[0], start, e.sample, temperature=e.temperature, eod=tok.eod))) if e.sample else ""


def main(argv: list[str]) -> int:
    if "--list" in argv:
        print(table({name: config.from_tree(config.recipe(name), name) for name in config.recipes()}))
        return 0
    name = argv.pop(0) if argv and not argv[0].startswith("-") else None
    file = None
    if "--config" in argv:
        at = argv.index("--config")
        if at + 1 == len(argv):
            raise ConfigError("--config: needs a file")
        file = argv[at + 1]
        del argv[at:at + 2]
    if "--help" in argv or "-h" in argv:
        config.show_help(config.resolve(name, file, []))
        return 0
    cfg = config.resolve(name, file, argv)
    env = setup.start(cfg)
    config.validate(cfg, env.world)
    folder = Path(cfg.log.dir) / cfg.log.name
    code, reason = 1, "unknown"
    with store.lock(folder):
        try:
            code = train(cfg, env, folder)
            reason = "finished" if code == 0 else "stopped early, everything saved: start me again"
        except BaseException as error:
            code, reason = failure.code_of(error), failure.explain(error, env.rank)
            raise
        finally:
            setup.exit_reason(folder, env.rank, code, reason)
            comm.close()
    return code


if __name__ == "__main__":
    sys.exit(failure.fail_cleanly(main, sys.argv[1:]))
