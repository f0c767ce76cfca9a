"""Before the first step: ranks that agree, data and folder looked at, a run built and continued.

train.py calls what is here from the top to the bottom, and what a function calls stands below it. Whatever
can be refused is refused here.
"""
import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import config
from build import total_steps, with_vocab
from checkpoint import state
from checkpoint.disk import locks, store
from checkpoint.run_folder import probe_run_folder
from config import Config, ConfigError
from config.optimizers import EMA
from config.reading import dump, get_phases, unused
from config.reading.phases import named
from config.reading.schedules import plan_pipeline
from config.terminal import output_width, wrapped
from data.blend import source_names, validated_paths, validation_key
from data.contract import check_same_tokenizer
from data.download import download_sources
from data.loader import check_dtype, check_paths, open_loader
from data.validation import open_tasks
from durable import mirror
from durable.continue_from import is_evaluation_missing, open_memory
from durable.peers import PeerWatch
from durable.probes import probe
from durable.progress import steps_done
from durable.start_layout import auto_layout, elastic_layout
from model.precision import DTYPES
from optim.lr import batch_rate_notes, warmup_notes
from parallel.extras import FaultHook, no_fault
from parallel.wire import comm
from parallel.wire.world import World
from phases import start_run
from plan.count import flops_per_token
from runtime import failure, setup
from services import PreparedRun


def run_folder(cfg: Config) -> Path:
    """log.dir / log.name. Raises ConfigError without a name; a recipe gives its own."""
    if cfg.log.name is None:
        raise ConfigError("log.name: none; give the run folder's name")
    return Path(cfg.log.dir) / cfg.log.name


@contextlib.contextmanager
def refusal_in(folder: Path, rank: int) -> Iterator[None]:
    """Leaves a ConfigError that is raised inside in exit_reason.json of the run folder: else what an earlier
    start left there would be taken for this one's. Not where no run has been, or one is at work.
    """
    try:
        yield
    except ConfigError as error:
        if rank == 0:
            with locks.idle_folder(folder) as is_idle:
                if is_idle:
                    setup.remove_exit_reasons(folder)
                    setup.write_exit_reason(folder, rank, failure.USER_MISTAKE, failure.explain(error))
        raise


class ChosenConfig(NamedTuple):
    """The config of this start.

    cfg: of the whole run, for the ranks that there are. done: steps of the run. about_layout: lines of the
    header.
    """
    cfg: Config
    env: setup.LaunchEnv
    done: int
    about_layout: list[str]


def choose_config(
    cfg: Config, folder: Path, peers: PeerWatch, *, argv: list[str], stated: Collection[str]
) -> ChosenConfig:
    """Refuse what cannot run, before anything starts; print what the keys say of each other.

    argv: the overrides. stated: the keys (section.key) of the command line and its file. Raises ConfigError.
    """
    with refusal_in(folder, peers.rank):
        env = setup.read_environment(cfg)
        done = 0
        if cfg.train.phases is not None:
            done = peers.broadcast_from_first("steps_done", lambda: steps_done(cfg, folder))
        cfg, about_layout = auto_layout(cfg, env, folder, done, stated, peers.broadcast_from_first)
        cfg = elastic_layout(cfg, env, done)
        notes = [check_config(cfg, env.world, done), unused.kept_sizes(cfg, argv)]
    for note in filter(None, notes if env.rank == 0 else []):
        print("\n".join(wrapped(note, output_width())), flush=True)
    return ChosenConfig(cfg, env, done, about_layout)


def note_other_name(usual: str | None, name: str | None) -> None:
    """Prints under which name a run goes, where its usual one is taken."""
    note = f"{usual} is finished, with other settings: this run is {name} (--log.name chooses another)"
    print("\n".join(wrapped(note, output_width())), flush=True)


def check_config(cfg: Config, world: int, done: int = 0) -> str:
    """Refuse what cannot run on this many ranks. Returns a note on keys without effect, or "".

    done: steps of the run. Raises ConfigError.
    """
    plan_pipeline(cfg, world, after=done)
    open_tasks(cfg)
    for phase in get_phases(cfg).from_step(done):
        with named(phase):
            check_paths(phase.cfg)
    return unused.check_unused(cfg, world)


# Where faults are injected and proofs look on (durable/faults.py).
FAULT_POINTS = (
    *store.FAULT_POINTS,
    "run.built",
    "step.begin",
    "step.load",
    "step.read",
    "step.compute",
    "step.backward",
    "step.end",
    "eval.end",
)


def fault_hook(env: setup.LaunchEnv) -> FaultHook:
    """Return the injector of the faults in the variable FAULT, or no_fault without any.

    Raises ConfigError if FAULT does not parse or names an unknown point.
    """
    named_faults = setup.named_faults()
    if not named_faults:
        return no_fault
    from durable import faults, memory

    return faults.FaultInjector(faults.parse(named_faults), env.rank, (*FAULT_POINTS, *memory.FAULT_POINTS))


def check_same_everywhere(cfg: Config, world: World) -> None:
    """Raises ConfigError, which names the rank, if ranks have different configs, code or versions of torch.

    They would train different models, or wait for each other. Collective: gathers a few KiB from each rank.
    """
    own = {"torch": str(torch.__version__), "code": config.code_hash(), "config": dump(cfg)}
    all_ranks: list[dict[str, str]] = comm.all_gather_objects(own, world.all_ranks())
    for what in own:
        count = Counter(theirs[what] for theirs in all_ranks)
        usual = max(count, key=lambda value: (count[value], value == all_ranks[0][what]))
        for rank, theirs in enumerate(all_ranks):
            if theirs[what] == usual:
                continue
            usual_lines = usual.splitlines()
            other_lines = [line.strip() for line in theirs[what].splitlines() if line not in usual_lines]
            detail = ", ".join(other_lines) or "fewer keys"
            raise ConfigError(
                f"rank {rank} was started with a different {what} than the others ({detail[:200]}); "
                "start every rank with the same command, from the same checkout"
            )


def begin_run(
    cfg: Config,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    *,
    observe: FaultHook,
    done: int,
    stated: Collection[str],
) -> PreparedRun:
    """Data, model, and the checkpoint to continue from; the folder looked at. See train.train. Collective."""
    tasks = open_tasks(cfg)

    # data, model, and the checkpoint to continue from
    everyone, timeout_s = world.all_ranks(), cfg.checkpoint.timeout_s
    restored = state.run_on_first_rank(lambda: mirror.prepare(cfg, folder), everyone, timeout_s)
    cfg = check_data(cfg, world, done)
    in_memory = open_memory(cfg, env, world, folder)
    run, valid_data, start, notes = start_run(cfg, env, world, folder, in_memory)
    notes = [*setup.launcher_notes(), *restored, *notes]
    notes += batch_rate_notes(run.phases, start.step)
    notes += warmup_notes(run.phases, run.steps, stated, start.step)
    observe("run.built", start.step, run=run, data=run.data, valid=valid_data)

    # what would else end the run later
    probe_run_folder(run, folder)
    if in_memory is not None and cfg.checkpoint.memory_every is not None:
        in_memory.check_room(state.bytes_to_read(run))
    uploads = None
    if cfg.checkpoint.mirror is not None:
        from durable.uploader import open_uploader

        uploads = open_uploader(cfg, folder, is_first_rank=env.rank == 0)
    is_end = start.step == run.steps
    is_of_phase = run.phase.number == run.phases.of_step(start.step).number  # else it was left out
    eval_pending = is_of_phase and is_evaluation_missing(cfg, start.step, folder, everyone, is_end=is_end)
    if not is_end or eval_pending:
        notes += probe(run.mesh, env.device, DTYPES[cfg.train.dtype], env.host)
    return PreparedRun(
        run=run,
        valid_data=valid_data,
        start=start,
        notes=notes,
        tasks=tasks,
        in_memory=in_memory,
        uploads=uploads,
        eval_pending=eval_pending,
    )


def end_finished_run(begun: PreparedRun, env: setup.LaunchEnv, folder: Path) -> str:
    """Ends a start that has nothing to do, and returns why. Collective."""
    run = begun.run
    run.data.close()
    if begun.uploads is not None:
        from durable.uploader import finish_uploads

        finish_uploads(begun.uploads, run.mesh.world, run.cfg.checkpoint.timeout_s)
    if begun.in_memory is not None:
        begun.in_memory.clear()
    text = f"already at step {run.steps:,} of {run.steps:,}"
    if env.rank == 0:
        print(f"{folder}: {text}: the run is already finished, nothing was left to do", flush=True)
    return f"finished: {text}"


def check_data(cfg: Config, world: World, done: int = 0) -> Config:
    """The config with the vocabulary of the data. Opens that of every phase once, on rank 0, which also makes
    what is made at the first opening. Data in a store is downloaded before. Collective.

    done: steps of the run; the data of phases that are over then may be gone.

    Raises ConfigError if the data of a phase cannot be read, has another tokenizer, or no target that counts.
    """
    everyone, timeout_s = world.all_ranks(), cfg.checkpoint.timeout_s
    copies = state.run_on_first_rank(lambda: download_sources(cfg, after=done), everyone, timeout_s)
    state.run_on_all_ranks(lambda: download_sources(cfg, copies, done), everyone, timeout_s)  # on each node

    def open_once() -> int:
        tokenizer = None
        phases = get_phases(cfg)
        for phase in phases.from_step(done):
            with named(phase):
                check_source_names(phase.cfg)
                check_dtype(phase.cfg)
                data = open_loader(cfg, "train", 0, 1, phase=phase.number)
                data.close()
                tokenizer = tokenizer or data.required_tokenizer
                if data.required_tokenizer.fingerprint != tokenizer.fingerprint:
                    raise ConfigError(
                        f"data.path: {phase.cfg.data.path} was made with another tokenizer than the data of "
                        "the first phase; prepare it with the same one"
                    )
                known = with_vocab(cfg, tokenizer.vocab)
                steps = total_steps(known, flops_per_token(known.model, known.train.seq_len))
                last = phases.last_step(phase, steps)
                data.count_targets(last)
                if phase.cfg.train.replay_routing is not None:
                    from runtime.routing import check_record

                    first = max(done, phase.steps_before)
                    check_record(phase.cfg, range(first + 1, last + 1), data.sequences_of_step)
                if phase.number > 1 or phase.cfg.data.valid is not None:
                    valid_data = open_loader(cfg, "valid", 0, 1, phase=phase.number)
                    both = [(each.datasets[0].name, each.required_tokenizer.contract)
                            for each in (valid_data, data)]
                    check_same_tokenizer(both, validation_key(phase.cfg.data))
        assert tokenizer is not None  # there is a phase
        return tokenizer.vocab

    return with_vocab(cfg, state.run_on_first_rank(open_once, everyone, timeout_s))


def check_source_names(cfg: Config) -> None:
    """Raises ConfigError if the losses of a source and of the averaged weights would have one name."""
    paths = validated_paths(cfg.data)
    is_validated_apart = len(paths) > 1 and cfg.eval.source_batches != 0
    if is_validated_apart and cfg.train.ema is not None and EMA in source_names(paths):
        key = validation_key(cfg.data)
        raise ConfigError(f"{key}: a source named {EMA} would share val/{EMA}/loss with train.ema")
