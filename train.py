"""Train a language model: one step, and the loop around it.

    python train.py [NAME] [--config FILE] [--section.field VALUE ...]    NAME is a recipe; without one: quickstart
    torchrun --standalone --nproc-per-node 8 train.py NAME --parallel.tp 2 --parallel.pp 2 --parallel.zero 1
    python train.py --list                                                every recipe with its size and shape
    python train.py NAME --help [SECTION | WORD]                          every key with its type, meaning and default
"""
import contextlib
import functools
import sys
import time
from collections import Counter
from pathlib import Path

import runtime  # before torch (see there)
import config
import torch
import unused
import usage
from build import Run, build, horizon, plan_pipeline, with_vocab
from checkpoint import state, store
from checkpoint.hf_tokenizer import CARRIED, carry
from checkpoint.saver import Saver
from config import Config, ConfigError
from data.blend import parse
from data.loader import open_data
from data.tokenizer import load
from model.generate import generate
from optim.clip import clip_factor, grad_norm
from parallel import comm, zigzag
from parallel.layout import Layout
from parallel.mesh import Mesh
from parallel.params import finish
from plan.count import flops_per_token, parameters, table
from runtime import failure, lines, setup
from runtime.console import params as short
from runtime.evaluate import mean_loss, report
from runtime.guard import Guard
from runtime.metrics import Metrics
from runtime.peers import Peers
from runtime.plot import loss_png
from runtime.profile import Trace
from runtime.stop import Stop

POINTS = (*store.POINTS, "run.built", "step.begin", "step.read", "step.backward", "step.end", "step.logged", "eval.end")


def gradients(run: Run, batches: list, scale):
    """The step's gradients, times scale, into the buckets -> loss, the number of tokens that count. No host sync, and what changes
    from step to step is in its arguments: train.cuda_graphs records it."""
    batches = [zigzag.cut(b.look_ahead(run.cfg.model.mtp), run.mesh.cp) for b in batches]  # this rank's tokens of its sequences
    tokens = comm.sum_(sum(b.counted() for b in batches), run.mesh.loss)  # global count first: exact under masks and packing
    for b in run.buckets:
        b.zero_grad()
    run.routers.begin()
    return run.pipeline.run(run.ops[len(batches)], batches, scale / tokens) / scale, tokens


def train_step(run: Run, step: int, batches: list, guard: Guard, at):
    """One optimizer step over this rank's microbatches -> loss, gradient norm, ok: scalars still on the device."""
    scale, work = run.scaler.scale, functools.partial(gradients, run)
    loss, tokens = work(batches, scale) if run.graph is None else run.graph(work, batches, scale)
    finish(run.buckets, run.mesh)  # the sums that were started during the backward
    if at("step.backward", step) == "nan":
        run.buckets[0].shard[0] = float("nan")
    norm = grad_norm(run.buckets, run.mesh, run.cfg.model.experts is not None) / scale
    ok = guard.judge(loss, norm)
    run.noise.settle(batches[0].counted(), len(batches), tokens, scale)
    run.optim.step(step, run.lr(step), clip_factor(norm, run.cfg.optim.clip) / scale, ok)
    run.scaler.update(ok)
    for b in run.buckets:
        b.settle(ok)
        b.publish()
    run.routers.settle(ok, scale)
    return loss, norm, ok


def train(cfg: Config, env, world: comm.World, folder: Path, told=contextlib.nullcontext, watch=None,
          tell=lambda code, reason, again: None) -> int:
    """Train to the horizon; returns the exit code. Whatever can be refused is refused before the first step.

    tell(code, reason, again): called at the end; again: is another start asked for?

    watch(point, step=None, **what there is to see): called at each of POINTS in the place of runtime/faults.py, and may
    answer as a fault does ("nan"); scripts/verify looks on this way, so that it proves this loop and no imitation of it."""
    at = watch or setup.faults(env, POINTS)
    setup.seed(cfg)
    p = cfg.parallel
    mesh = Mesh.bind(Layout(env.world, p.tp, p.cp, p.pp, p.dp_rep, p.ep, p.etp), world)
    # rank 0 makes what is made on the spot
    state.first(lambda: open_data(cfg, "train", 0, 1).close(), mesh.world, cfg.checkpoint.timeout_s)
    data, valid = (open_data(cfg, split, mesh.data.index, mesh.data.size) for split in ("train", "valid"))
    if data.tokenizer is None:
        raise ConfigError(f"data.tokenizer: {cfg.data.path} does not say which tokenizer made it; name it: bytes, a tokenizer.json or an x.model")
    cfg = with_vocab(cfg, data.tokenizer.vocab)
    flops = flops_per_token(cfg.model, cfg.train.seq_len)
    run = build(cfg, mesh, env.device, data, horizon(cfg, flops))
    root = folder / "checkpoints"
    start, notes = state.resume(run, root)
    at("run.built", start, run=run, data=data, valid=valid)
    # a run that was told to stop did not evaluate: what was due comes now
    owed = start > 0 and (start == run.steps or due(cfg.eval.every, start))
    owed = owed and state.first(lambda: start not in evaluated(folder), mesh.world)
    if start == run.steps and not owed:
        data.close()
        text = f"already at step {start:,} of {run.steps:,}"
        if env.rank == 0:
            print(f"{folder}: {text}, nothing was left to do", flush=True)
        tell(0, f"finished: {text}", False)
        return 0
    if env.rank == 0:
        keep_tokenizer(cfg, data.tokenizer, folder / "tokenizer")
    count, guard = parameters(cfg.model), Guard(20 if run.scaler.dynamic else 5)
    stop = Stop(folder, cfg.train.max_minutes, looks=env.rank == 0)
    saver = Saver(cfg.checkpoint.async_save, world.apart("saver") if cfg.checkpoint.async_save else None)
    checks = [zigzag.cut(b.to(env.device), mesh.cp) for i in range(cfg.eval.batches) for b in valid.microbatches(i)]
    step, reason, again = start, None, True
    # under documents attention is cheaper: what the mask leaves
    masked = flops_per_token(cfg.model, cfg.train.seq_len, data.pieces) if cfg.data.doc_mask else flops
    with (Metrics(folder, cfg, env, steps=run.steps, flops_per_token=masked, start_step=start) as log, told(),
          contextlib.closing(Trace(cfg.profile.steps, folder, env.rank)) as trace):
        log.header((count["total"], count["total"] - count["embedding"]), data.describe(), notes)

        def evaluate(step: int) -> None:
            loss, bytes_per_token = mean_loss(run.pipeline.evaluate, checks, mesh.loss, valid.text_bytes)
            ids = sample(run)
            text = cfg.eval.prompt + data.tokenizer.decode(ids) if ids else ""
            log.eval(step, **report(loss, bytes_per_token), sample=text)
            at("eval.end", step, loss=loss, ids=ids)

        if start == 0 or owed:
            evaluate(start)
        for step in range(start + 1, run.steps + 1):
            world.now.step = step
            at("step.begin", step)
            begun = time.perf_counter()
            batches = [b.to(env.device) for b in data.microbatches(step - 1)]
            waited = time.perf_counter() - begun
            at("step.read", step, batches=batches)
            world.now.clock.take()  # what came between the steps
            with trace.around(step):
                loss, norm, ok = train_step(run, step, batches, guard, at)
            if step == start + 1 and env.rank == 0:  # it says what was trained: not before a step was made
                describe(cfg, folder)
            at("step.end", step, loss=loss, norm=norm, ok=ok)
            guard.observe(log.step(step, loss=loss, grad_norm=norm, ok=ok, lr=run.lr(step), data_seconds=waited,
                                   seconds=time.perf_counter() - begun, told=run.routers.told, noise=run.noise.told, comm=world.now.clock.take()))
            at("step.logged", step)
            reason, again = agreed(stop, saver, mesh)
            last = step == run.steps
            if reason is None and (last or due(cfg.eval.every, step)):
                evaluate(step)  # before the save: what is at its horizon is complete
            if last or reason or due(cfg.checkpoint.every, step):
                guard.observe(log.flush())
                data.unchanged()
                begun = time.perf_counter()
                state.save(run, saver, root, step, at)
                if not saver.threaded or last or reason:
                    path = saver.wait()
                    log.saved(path, sum(f.stat().st_size for f in path.iterdir()), time.perf_counter() - begun)
            if last and reason:
                evaluate(step)
            if reason:  # there may be no time left to evaluate: what is owed is made up at the next start
                break
        data.close()
        done = step == run.steps
        if env.rank == 0:
            try:
                loss_png(folder, short(count["total"]))
                if log.experts:
                    log.experts.png(cfg.log.name)
            except Exception as error:  # a picture is not worth a finished run
                log.event(f"warning: a picture was not drawn: {error}")
        log.close(None if done else reason, code=0 if done else 75, hints=[
            f'python -m scripts.generate {folder} --prompt "class "', f"python -m scripts.evaluate {folder}", "python train.py --list"])
    if done:
        tell(0, "finished", False)
        return 0
    wish = "start me again" if again else "for good"
    tell(75, f"stopped early at step {step:,}, everything is saved: {reason}; {wish}", again)
    return 75


def keep_tokenizer(cfg: Config, tok, folder: Path) -> None:
    """The run's tokenizer, with what belongs to it where it comes from (a chat template, generation
    settings): beside the data, in data.tokenizer, or in the run whose weights are taken."""
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(folder)
    named = Path(cfg.data.tokenizer or "bytes")
    places = [named.parent if named.is_file() else named]
    prefixes = [path.removesuffix(".bin").removesuffix(".idx") for path in parse(cfg.data.path)[1]]
    places += [Path(f"{prefix}.tokenizer") for prefix in prefixes]
    for where in (cfg.checkpoint.resume, cfg.checkpoint.init_from):
        if where not in (None, "auto", "none"):
            places += [run / "tokenizer" for run in (Path(where), *list(Path(where).parents)[:2])]
    for place in places:
        if place.is_dir() and any((place / name).is_file() for name in CARRIED):
            with contextlib.suppress(ConfigError, OSError):
                if load(place).fingerprint == tok.fingerprint:  # else the files belong to another one
                    carry(place, folder)


def describe(cfg: Config, folder: Path) -> None:
    """config.yaml, in one step."""
    temp = folder / "config.yaml.tmp"
    temp.write_text(config.dump(cfg))
    temp.replace(folder / "config.yaml")


def evaluated(folder: Path) -> set[int]:
    """The steps whose validation stands in metrics.jsonl."""
    return {row["step"] for row in lines.read(folder)[1]}


def due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def agreed(stop: Stop, saver: Saver, mesh: Mesh) -> tuple[str | None, bool]:
    """One answer for all ranks: (why to stop or None, whether another start is asked for). Any rank that was
    told to stop stops every rank at this step. Raises what a save behind the run's back met, on every rank at
    the same step."""
    reason = stop.check()
    mine = 3 if saver.failed() else 0 if reason is None else 1 if stop.again else 2
    flag = int(comm.max_(torch.tensor(mine, dtype=torch.int32), mesh.world))
    if flag == 3:
        saver.wait()
    return ((reason or "another rank was told to stop") if flag else None), flag != 2


def same_everywhere(cfg: Config, world: comm.World) -> None:
    """Ranks with another config, code or torch would train another model, or wait for each other: refused, naming the odd one."""
    mine = {"torch": torch.__version__, "code": config.code_hash(), "config": config.dump(cfg)}
    every = comm.all_objects(mine, world.everyone())
    for what in mine:
        count = Counter(theirs[what] for theirs in every)
        usual = max(count, key=lambda x: (count[x], x == every[0][what]))
        for rank, theirs in enumerate(every):
            if theirs[what] != usual:
                old, new = usual.splitlines(), theirs[what].splitlines()
                detail = ", ".join(x.strip() for x in new if x not in old) or "fewer keys"
                raise ConfigError(f"rank {rank} was started with another {what} than the others ({detail[:200]}); start every rank with the "
                                  f"same command, from the same checkout")


def sample(run: Run) -> list[int]:
    """The ids of a piece of text as the model writes it now, after eval.prompt; none where eval.sample is 0."""
    e, m, tok = run.cfg.eval, run.cfg.model, run.data.tokenizer
    limit = m.context if m.positions == "learned" else None
    return list(generate(run.pipeline.logits, tok.encode(e.prompt) or [tok.eod], e.sample, temperature=e.temperature, eod=tok.eod,
                         device=run.device, limit=limit, multiple=run.pipeline.cut))


def main(argv: list[str]) -> int:
    if "--list" in argv:
        print(table({name: config.from_tree(config.recipe(name), name) for name in config.recipes()}))
        return 0
    name, file, argv = config.split_argv(argv)
    if asked := next((i for i, word in enumerate(argv, 1) if word in ("--help", "-h")), None):
        print(usage.text(config.resolve(name, file, argv[:asked - 1]), *argv[asked:asked + 1]))
        return 0
    with Peers(*setup.place()[:2], setup.attempt()) as peers:
        cfg = config.resolve(name, file, argv)
        env = setup.start(cfg)
        plan_pipeline(cfg, env.world)
        idle = unused.check(cfg, env.world)
        if idle and env.rank == 0:
            print(idle, flush=True)
        folder = Path(cfg.log.dir) / cfg.log.name
        with store.lock(folder) if env.rank == 0 else contextlib.nullcontext():
            if env.rank == 0:
                setup.forget_reasons(folder)
            world = comm.join(env.device.type, env.rank, env.world, cfg.parallel.timeout_s, store=peers.store, now=peers.now)
            peers.folder = folder  # rank 0 holds its lock
            same_everywhere(cfg, world)
            return train(cfg, env, world, folder, peers.told, tell=peers.reason)


if __name__ == "__main__":
    failure.leave(failure.fail_cleanly(main, sys.argv[1:]))
