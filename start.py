"""Before the first step: ranks that agree, data and folder looked at, a run built and continued.

train.py calls what is here from the top to the bottom, and what a function calls stands below it. Whatever
can be refused is refused here.
"""
import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

import config
from build import build_run, extras_of_loop, total_steps, with_vocab
from checkpoint import mirror, state
from checkpoint.continue_from import (
    choose_start,
    drop_rows,
    is_evaluation_missing,
    open_memory,
    rate_notes,
    repair_from_store,
)
from checkpoint.disk import locks, store
from checkpoint.disk.saver import CheckpointSaver
from checkpoint.disk.together import do_nothing
from checkpoint.disk_saves import DiskSaves
from checkpoint.made_by import describe_phase, describe_start, keep_provenance, other_code
from checkpoint.progress import steps_done
from checkpoint.run_folder import RunFolder, describe_template, keep_tokenizer, probe_run_folder
from checkpoint.sizes import check_size
from config import Config, ConfigError, Tree
from config.optimizers import EMA
from config.reading import Phase, dump, phases_of, unused
from config.reading.phases import change_text, named, with_next_layout
from config.reading.schedules import make_schedules, plan_pipeline
from config.terminal import output_width, wrapped
from data.blend import source_names, validation_key
from data.contract import check_same_tokenizer
from data.download import download_sources
from data.loader import BatchLoader, check_dtype, check_paths, open_loader
from model.precision import DTYPES
from model.sharding import parallel_dims
from parallel.extras import Extra
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.world import World
from plan.count import flops_per_token, parameters
from runtime import failure, lines, setup
from runtime.advice import advised_on_memory
from runtime.closing import trained_flops_per_token
from runtime.describe import describe_passes, describe_targets, describe_valid, warmup_notes
from runtime.evaluate import open_tasks, validated_paths
from runtime.goodput import GoodputClock
from runtime.guard import NonFiniteGuard
from runtime.metrics import MetricsLogger
from runtime.peers import PeerWatch
from runtime.probes import probe
from runtime.run import TrainingRun
from runtime.start_layout import auto_layout, elastic_layout
from runtime.stop import StopRequest

if TYPE_CHECKING:  # a run that asks for none of them loads none of them
    from checkpoint.lease import Lease
    from checkpoint.memory import MemoryCheckpoints
    from checkpoint.uploader import CheckpointUploader
    from data.task_files import ScoredTask
    from data.task_scores import EncodedTasks
    from runtime.faults import FaultHook


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
    """What this start runs with.

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
            done = peers.told_by_first("steps_done", lambda: steps_done(cfg, folder))
        cfg, about_layout = auto_layout(cfg, env, folder, done, stated, peers.told_by_first)
        cfg = elastic_layout(cfg, env, done)
        plan_pipeline(cfg, env.world, after=done)
        open_tasks(cfg)
        for phase in phases_of(cfg).from_step(done):
            with named(phase):
                check_paths(phase.cfg)
        notes = [unused.check_unused(cfg, env.world), unused.kept_sizes(cfg, argv)]
    for note in filter(None, notes if env.rank == 0 else []):
        print("\n".join(wrapped(note, output_width())), flush=True)
    return ChosenConfig(cfg, env, done, about_layout)


def note_other_name(usual: str | None, name: str | None) -> None:
    """Prints under which name a run goes, where its usual one is taken."""
    note = f"{usual} is finished, with other settings: this run is {name} (--log.name chooses another)"
    print("\n".join(wrapped(note, output_width())), flush=True)


# Where faults are injected and proofs look on (runtime/faults.py).
FAULT_POINTS = (
    *store.FAULT_POINTS,
    "run.built",
    "step.begin",
    "step.load",
    "step.read",
    "step.compute",
    "step.backward",
    "step.end",
    "step.logged",
    "eval.end",
)


def fault_hook(env: setup.LaunchEnv) -> "FaultHook":
    """The injector of the faults that FAULT names; setup.no_fault without any. Raises ConfigError."""
    if not setup.asks_for_faults():
        return setup.no_fault
    from checkpoint import memory

    return setup.fault_injector(env, (*FAULT_POINTS, *memory.FAULT_POINTS))


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
                f"rank {rank} was started with another {what} than the others ({detail[:200]}); "
                "start every rank with the same command, from the same checkout"
            )


class Beginning(NamedTuple):
    """A run that is built and loaded, before its first step.

    start: what it goes on from. notes: lines of the header. in_memory, uploads: None where there are none.
    owes_evaluation: whether the step before has no validation yet, which was due.
    """
    run: TrainingRun
    valid_data: BatchLoader
    start: state.StartingPoint
    notes: list[str]
    tasks: "list[ScoredTask]"
    in_memory: "MemoryCheckpoints | None"
    uploads: "CheckpointUploader | None"
    owes_evaluation: bool

    @property
    def is_finished(self) -> bool:
        return self.start.step == self.run.steps and not self.owes_evaluation


def begin_run(
    cfg: Config,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    *,
    observe: "FaultHook",
    done: int,
    stated: Collection[str],
) -> Beginning:
    """Data, model, and the checkpoint to continue from; the folder looked at. See train.train. Collective."""
    tasks = open_tasks(cfg)

    # data, model, and the checkpoint to continue from
    everyone, timeout_s = world.all_ranks(), cfg.checkpoint.timeout_s
    restored = state.first_rank_does(lambda: mirror.prepare(cfg, folder), everyone, timeout_s)
    cfg = check_data(cfg, world, done)
    in_memory = open_memory(cfg, env, world, folder)
    run, valid_data, start, notes = start_run(cfg, env, world, folder, in_memory)
    notes = [*setup.launcher_notes(), *restored, *notes, *warmup_notes(run, stated, start.step)]
    observe("run.built", start.step, run=run, data=run.data, valid=valid_data)

    # what would else end the run later
    probe_run_folder(run, folder, in_memory)
    uploads = None
    if cfg.checkpoint.mirror is not None:
        from checkpoint.uploader import open_uploader

        uploads = open_uploader(cfg, folder, is_first_rank=env.rank == 0)
    is_end = start.step == run.steps
    is_of_phase = run.phase.number == run.phases.of_step(start.step).number  # else it was left out
    owes_evaluation = is_of_phase and is_evaluation_missing(cfg, start.step, folder, everyone, is_end=is_end)
    if not is_end or owes_evaluation:
        notes += probe(run.mesh, env.device, DTYPES[cfg.train.dtype], env.host)
    return Beginning(
        run=run,
        valid_data=valid_data,
        start=start,
        notes=notes,
        tasks=tasks,
        in_memory=in_memory,
        uploads=uploads,
        owes_evaluation=owes_evaluation,
    )


def end_finished_run(begun: Beginning, env: setup.LaunchEnv, folder: Path) -> str:
    """Ends a start that has nothing to do, and returns why. Collective."""
    run = begun.run
    run.data.close()
    if begun.uploads is not None:
        from checkpoint.uploader import finish_uploads

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
    copies = state.first_rank_does(lambda: download_sources(cfg, after=done), everyone, timeout_s)
    state.all_ranks_do(lambda: download_sources(cfg, copies, done), everyone, timeout_s)  # on each node

    def open_once() -> int:
        tokenizer = None
        phases = phases_of(cfg)
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
                data.count_targets(phases.last_step(phase, steps))
                if phase.number > 1 or phase.cfg.data.valid is not None:
                    valid_data = open_loader(cfg, "valid", 0, 1, phase=phase.number)
                    both = [(each.datasets[0].name, each.required_tokenizer.contract)
                            for each in (valid_data, data)]
                    check_same_tokenizer(both, validation_key(phase.cfg.data))
        assert tokenizer is not None  # there is a phase
        return tokenizer.vocab

    return with_vocab(cfg, state.first_rank_does(open_once, everyone, timeout_s))


def check_source_names(cfg: Config) -> None:
    """Raises ConfigError if the losses of a source and of the averaged weights would have one name."""
    paths = validated_paths(cfg)
    is_validated_apart = len(paths) > 1 and cfg.eval.source_batches != 0
    if is_validated_apart and cfg.train.ema is not None and EMA in source_names(paths):
        key = validation_key(cfg.data)
        raise ConfigError(f"{key}: a source named {EMA} would share val/{EMA}/loss with train.ema")


def start_run(
    cfg: Config,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    in_memory: "MemoryCheckpoints | None" = None,
) -> tuple[TrainingRun, BatchLoader, state.StartingPoint, list[str]]:
    """The run of the phase that comes next, with what it continues.

    Returns (run, its valid split, what it has loaded, notes for the log). Collective.
    """
    root = folder / "checkpoints"
    phases = phases_of(cfg)
    everyone = world.all_ranks()
    left_out: list[str] = []  # validations

    def begins_elsewhere(start: state.StartingPoint) -> bool:
        """Whether no run of this folder has made the steps before the start."""
        if start.resumed is None or start.memory:
            return False
        return start.resumed.path.parent.resolve() != root.resolve()

    def phase_after(start: state.StartingPoint) -> tuple[int, Config]:
        """(its number, the config). Where an evaluation is missing, the phase before a boundary: it has its
        own validation, if it still can."""
        left_out.clear()
        here, following = phases.of_step(start.step), phases.of_step(start.step + 1)
        made_here = None if begins_elsewhere(start) else folder
        if here == following or not is_evaluation_missing(cfg, start.step, made_here, everyone):
            return following.number, cfg
        try:
            return here.number, config_to_validate(cfg, here, world)
        except ConfigError as error:
            left_out.append(f"the validation of step {start.step:,} is left out: {error}")
            return following.number, cfg

    repaired: dict[Path, str] = {}  # {checkpoint: a line that says so}

    def choose(bad: dict[Path, str]) -> state.StartingPoint:
        """choose_start, after a try to bring a damaged checkpoint from a store: one for each."""
        for path in [path for path in bad if path not in repaired]:
            is_good, repaired[path] = state.first_rank_does(
                lambda: repair_from_store(cfg, path, root), everyone, cfg.checkpoint.timeout_s
            )
            if is_good:
                del bad[path]
        start = choose_start(cfg, world, root, in_memory, bad)
        return replace(start, notes=[*filter(None, repaired.values()), *start.notes])

    start = choose({})
    may_be_large = bool(cfg.checkpoint.branch) and not start.memory
    if start.resumed is not None and may_be_large:  # its model is as large as the source says
        check_size(cfg.model, start.resumed.pieces, str(start.resumed.path))
    while True:
        number, whole = phase_after(start)
        with named(phases.all[number - 1]):
            run, valid_data = build_phase(whole, env, world, number)
        start, notes = state.resume(run, root, start, choose)
        if len(phases.all) == 1 or phase_after(start)[0] == number:
            if begins_elsewhere(start):
                state.first_rank_does(lambda: drop_rows(folder), everyone)
            if in_memory is not None:
                in_memory.drop_after(start.step)  # what this run goes on from is its only past
                if cfg.checkpoint.memory_every is None and not start.memory:
                    in_memory.clear()  # nothing will be saved there any more
            notes = [*other_code(start, env, folder), *notes, *rate_notes(run, start), *left_out]
            return describe_start(run, valid_data, env, start, root), valid_data, start, notes
        run.data.close()  # the newest checkpoint is damaged, and the one before it is of an earlier phase


def config_to_validate(cfg: Config, phase: Phase, world: World) -> Config:
    """The config with which a phase that is over is validated: in its own layout, or that of the next one
    where these ranks cannot have it. Collective. Raises ConfigError if they have neither, or data is gone.
    """
    trouble: ConfigError | None = None
    for whole in (cfg, with_next_layout(cfg, phase.number)):
        try:
            make_schedules(phases_of(whole).all[phase.number - 1].cfg, world.size, advise=False)
        except ConfigError as error:
            trouble = trouble or error
            continue

        def open_once() -> None:
            for split in ("train", "valid"):
                open_loader(whole, split, 0, 1, phase=phase.number).close()

        state.first_rank_does(open_once, world.all_ranks(), cfg.checkpoint.timeout_s)
        return whole
    assert trouble is not None
    raise trouble


def build_phase(
    cfg: Config, env: setup.LaunchEnv, world: World, number: int
) -> tuple[TrainingRun, BatchLoader]:
    """The run of a phase with initial weights, and its valid split. Collective."""
    setup.seed_everything(cfg)
    phase = phases_of(cfg).all[number - 1]
    steps = total_steps(cfg, flops_per_token(cfg.model, cfg.train.seq_len))
    mesh = connect(phase.cfg, world)
    train_data, valid_data = open_data(cfg, mesh, env.device, number)
    with advised_on_memory(phase.cfg, world):
        run = build_run(cfg, mesh, env.device, data=train_data, steps=steps, phase=number)
    return run, valid_data


def connect(cfg: Config, world: World) -> Mesh:
    """The groups of this rank. Collective: every rank calls it."""
    return Mesh.bind(parallel_dims(cfg, world.size), world)


def open_data(
    cfg: Config, mesh: Mesh, device: torch.device, phase: int = 1
) -> tuple[BatchLoader, BatchLoader]:
    """This rank's part of the train and the valid split of a phase."""
    train_data = open_loader(cfg, "train", mesh.dp.index, mesh.dp.size, device=device, phase=phase)
    valid_data = open_loader(cfg, "valid", mesh.dp.index, mesh.dp.size, device=device, phase=phase)
    return train_data, valid_data


# ---- what the loop begins with -----------------------------------------------------------------------------

# Skipped steps in a row that end a run. In fp16 the loss scale must first come down: a halving a step.
SKIPPED_STEPS = 5
SKIPPED_STEPS_FP16 = 20


@dataclass(frozen=True)
class Services:
    """What outlives a phase. cfg: of the whole run. extras: what the loop has beside the plain one."""
    cfg: Config
    env: setup.LaunchEnv
    world: World
    folder: Path
    log: MetricsLogger
    goodput: GoodputClock
    saving: DiskSaves
    guard: NonFiniteGuard
    stop: StopRequest
    observe: "FaultHook"
    extras: Sequence[Extra]


def open_services(
    begun: Beginning,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    *,
    goodput: GoodputClock,
    observe: "FaultHook",
    lease: "Lease | None",
) -> Services:
    """Opens the log, the saver and what stands beside the loop. Collective under checkpoint.async_save."""
    run, cfg = begun.run, begun.run.cfg
    is_first_rank = env.rank == 0
    if is_first_rank:  # nothing is refused any more
        keep_tokenizer(cfg, run.data, folder / "tokenizer")
    stop = StopRequest(folder, cfg.train.max_minutes, watches_file=is_first_rank)
    saver_group = world.separate_group("saver") if cfg.checkpoint.async_save else None
    committed = do_nothing if begun.uploads is None else begun.uploads.request
    saver = CheckpointSaver(cfg.checkpoint.async_save, saver_group, committed=committed)
    with store.storage_errors(folder / lines.NAME, 0):
        log = MetricsLogger(
            folder,
            run.phases.whole,
            env,
            steps=run.steps,
            flops_per_token=trained_flops_per_token(run),
            start_step=begun.start.step,
            goodput=goodput,
        )
    guard = NonFiniteGuard(SKIPPED_STEPS_FP16 if run.scaler.dynamic else SKIPPED_STEPS)
    run_folder = RunFolder(folder, log, is_first_rank)
    saving = DiskSaves(
        cfg.checkpoint,
        run_folder,
        saver,
        log=log,
        goodput=goodput,
        guard=guard,
        uploads=begun.uploads,
        observe=observe,
    )
    extras = extras_of_loop(
        run,
        env,
        saving,
        lease=lease,
        in_memory=begun.in_memory,
        observe=None if observe is setup.no_fault else observe,
    )
    return Services(
        cfg=run.phases.whole,
        env=env,
        world=world,
        folder=folder,
        log=log,
        goodput=goodput,
        saving=saving,
        guard=guard,
        stop=stop,
        observe=observe,
        extras=extras,
    )


def log_header(
    services: Services, begun: Beginning, tasks: "dict[int, EncodedTasks]", about_layout: Sequence[str]
) -> None:
    """Prints what is about to run. tasks: of each model.context. about_layout: lines about the layout."""
    run, is_first_rank = begun.run, services.env.rank == 0
    notes = [*begun.notes, *keep_provenance(run, services.env, services.folder)]
    if tasks:
        notes = [*notes, f"{'tasks':<9}{tasks[run.cfg.model.context].describe()}"]
    first = {
        "valid": describe_valid(run.data, begun.valid_data) if services.cfg.data.valid is not None else None,
        "template": describe_template(services.cfg, run.data) if is_first_rank else None,
        "epochs": describe_passes(run) if is_first_rank else None,
        "targets": describe_targets(run, begun.valid_data) if is_first_rank else None,
    }
    shown = [f"{name:<9}{text}" for name, text in first.items() if text]
    counts = parameters(services.cfg.model)
    sizes = counts["total"], counts["total"] - counts["embedding"]
    services.log.header(sizes, run.data.describe(), [*about_layout, *shown, *notes], run.provenance)


def build_next_phase(
    services: Services, step: int, start: state.StartingPoint, provenance: Tree
) -> tuple[TrainingRun, BatchLoader]:
    """(the run of the phase after `step`, which is saved; its valid split). Collective.

    start: what this process has begun with. provenance: that of the phase that ended.
    """
    root = services.folder / "checkpoints"
    phases = phases_of(services.cfg)
    before, phase = phases.of_step(step), phases.of_step(step + 1)
    run, valid_data = build_phase(services.cfg, services.env, services.world, phase.number)
    run = describe_phase(run, valid_data, provenance, step)
    if step == start.step:  # it has only validated: the step may be another run's, or in memory
        state.load_start(run, root, start)
    else:
        state.resume_after(run, root, step)
    services.observe("run.built", step, run=run, data=run.data, valid=valid_data)
    services.log.begin_phase(phase, trained_flops_per_token(run), change_text(before, phase))
    if services.env.rank == 0:
        for name, text in (("targets", describe_targets(run, valid_data)), ("epochs", describe_passes(run))):
            if text:
                services.log.log_line(f"{name}: {text}")
    for warning in keep_provenance(run, services.env, services.folder):
        services.log.log_line(warning)
    return run, valid_data


