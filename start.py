"""Before the first step: ranks that agree, data and folder looked at, a run built and continued.

train.py calls what is here from the top to the bottom, and what a function calls stands below it. Whatever
can be refused is refused here. The last two are called after the first step, and at the end.
"""
import contextlib
import math
import pickle
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import config
from build import TrainingRun, build_run, check_size, total_steps, with_vocab
from checkpoint import mirror, state
from checkpoint.disk import locks, store
from checkpoint.systems.foreign import ForeignIndex
from checkpoint.memory import MemoryCheckpoints, has_record
from config import Config, ConfigError, Tree, is_due, provenance
from config.optimizers import EMA
from config.reading import Phase, dump, from_tree, phases_of, saved_config
from config.reading.earlier import current_tree
from config.reading.kinds import stated_leaves
from config.reading.phases import named, with_next_layout
from config.reading.schedules import make_schedules
from config.terminal import output_width, wrapped
from config.tree import plain_data, value_at, with_values
from data import tokenizer_files
from data.blend import named_paths, source_names, validation_key
from data.contract import check_same_tokenizer
from data.download import download_sources, local_path
from data.loader import BatchLoader, BlendedDataset, check_dtype, open_loader
from data.prompts import USER
from data.raw import RawShards
from data.start_tokens import files_of
from data.task_files import ScoredTask, read_tasks
from data.tokenizer import Tokenizer, load_tokenizer
from model.sharding import parallel_dims
from optim.lr import learning_rate_of_run, schedules_of, warmup_steps
from parallel.context.zigzag import shard_batch
from parallel.microbatch import Microbatch
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.world import World
from plan.count import flops_per_token
from plan.job import RankDevice
from remote.files import RemoteError
from runtime import failure, lines, setup
from runtime import folder as run_folders
from runtime.goodput import read_starts

WARMUP = "optim.warmup"
ADVICE_TIMEOUT_S = 120  # of a process that plans


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


def auto_layout(
    cfg: Config,
    env: setup.LaunchEnv,
    folder: Path,
    done: int,
    stated: Collection[str],
    told_by_first: Callable[[str, Callable[[], list[Any]]], list[Any]],
) -> tuple[Config, list[str]]:
    """The config, under parallel.auto with the planner's layout, and a line of the header about it.

    done: steps of the run. stated: keys (section.key) that stay. told_by_first(key, work): what work() is on
    rank 0, which alone searches. Raises ConfigError.
    """
    if cfg.parallel.auto is None:
        return cfg, []
    from plan import auto  # a run that does not ask has nothing to load

    def choose() -> list[Any]:
        device = rank_device(env.device)
        saved = trained_layout(folder)
        layout = auto.layout_of_run(cfg, env.world, device, stated, after=done, saved=saved)
        return [layout.values, layout.text]

    values, text = told_by_first("auto_layout", choose)
    return with_values(cfg, values), [f"{'auto':<9}{text}"]


def trained_layout(folder: Path) -> tuple[Config, int] | None:
    """The config with which the last start of a run has trained, and its number of ranks.

    None if no start has trained, or the config cannot be read.
    """
    try:
        ranks = [start.world for start in read_starts(folder) if start.first_step is not None]
        cfg = from_tree(current_tree(config.read_yaml(folder / "config.yaml")))
    except (OSError, ConfigError):  # of another version, or damaged
        return None
    return (cfg, ranks[-1]) if ranks else None


def elastic_layout(cfg: Config, env: setup.LaunchEnv, done: int) -> Config:
    """The config; under parallel.elastic with a layout for the ranks that there are. done: steps of the run.

    Raises ConfigError.
    """
    if not cfg.parallel.elastic:
        return cfg
    from plan import elastic  # a run that does not ask has nothing to load

    layout = elastic.layout_for(cfg, env.world, rank_device(env.device), done)
    note = elastic.describe(layout, env.world)
    if note and env.rank == 0:
        print("\n".join(wrapped(note, output_width())), flush=True)
    return layout.cfg


def rank_device(device: torch.device) -> RankDevice:
    """A rank's device as the planner knows it: of a GPU its name and memory."""
    if device.type != "cuda":
        return RankDevice()
    properties = torch.cuda.get_device_properties(device)
    return RankDevice(properties.name, properties.total_memory)


def open_tasks(cfg: Config) -> list[ScoredTask]:
    """The tasks of eval.tasks. Raises ConfigError, which names the file and the line."""
    if cfg.eval.tasks is None:
        return []
    return read_tasks("eval.tasks", cfg.eval.tasks, cfg.eval.tasks_limit)


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


def validated_paths(cfg: Config) -> list[str]:
    """The paths of the data sets that a validation reads. Raises ConfigError."""
    return [path for key, path in named_paths(cfg.data) if key == validation_key(cfg.data)]


def check_source_names(cfg: Config) -> None:
    """Raises ConfigError if the losses of a source and of the averaged weights would have one name."""
    paths = validated_paths(cfg)
    is_validated_apart = len(paths) > 1 and cfg.eval.source_batches != 0
    if is_validated_apart and cfg.train.ema is not None and EMA in source_names(paths):
        key = validation_key(cfg.data)
        raise ConfigError(f"{key}: a source named {EMA} would share val/{EMA}/loss with train.ema")


def open_memory(cfg: Config, env: setup.LaunchEnv, world: World, folder: Path) -> MemoryCheckpoints | None:
    """The checkpoints in memory: of checkpoint.memory_every, and of a run that had it until this start, which
    may be newer than those on the disk. None where there are neither. Collective. Raises ConfigError.
    """
    everyone = world.all_ranks()
    if cfg.checkpoint.memory_every is None:
        has_some = state.first_rank_does(lambda: has_record(folder), everyone, cfg.checkpoint.timeout_s)
        if not has_some:
            return None
    return MemoryCheckpoints(cfg, folder, env.host, everyone)


def choose_start(
    cfg: Config,
    world: World,
    root: Path,
    in_memory: MemoryCheckpoints | None,
    bad: dict[Path, str],
) -> state.StartingPoint:
    """The newest checkpoint, in memory or on the disk, that is not known to be damaged. Collective.

    bad: {checkpoint: why} of those that a rank found damaged. Raises ConfigError; IntegrityError.
    """
    everyone = world.all_ranks()
    if in_memory is None:
        return state.newest_start(cfg, root, everyone, bad)

    # one in memory that is newer than all on the disk
    start, _ = in_memory.newest_start(cfg, bad=bad)
    if start is not None:
        return start

    # the newest good one on the disk
    on_disk, trouble = None, None
    try:
        on_disk = state.newest_start(cfg, root, everyone, bad)
    except store.IntegrityError as error:  # on all ranks: there are some, and none is good
        trouble = error

    # one in memory that is newer than that: those on the disk that are newer still are damaged
    start, notes = in_memory.newest_start(cfg, after=-1 if on_disk is None else on_disk.step, bad=bad)
    if start is not None:
        of_disk = [str(trouble)] if on_disk is None else on_disk.notes
        return replace(start, notes=[*of_disk, *start.notes])
    if on_disk is None:
        assert trouble is not None
        raise trouble
    return replace(on_disk, notes=[*notes, *on_disk.notes])


def start_run(
    cfg: Config,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    in_memory: MemoryCheckpoints | None = None,
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


def repair_from_store(cfg: Config, path: Path, root: Path) -> tuple[bool, str]:
    """(whether what is damaged of a checkpoint was brought from a store that has it too, a line for the log;
    "" without a store). root: of the run's checkpoints."""
    try:
        source = mirror.copied_from(cfg, path, root)
        return (False, "") if source is None else (True, mirror.repair(source, path))
    except (store.IntegrityError, store.StorageError, RemoteError) as error:
        return False, f"warning: {path} cannot be repaired from its store: {failure.one_line(error)}"


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


def rate_notes(run: TrainingRun, start: state.StartingPoint) -> list[str]:
    """[a line that compares learning rates], where a run goes on with another one than it had."""
    if start.resumed is None:
        return []
    meta, step = start.resumed.meta, start.step
    try:
        before, horizon = phases_of(saved_config(meta["config"])), state.horizon_in(meta)
    except ConfigError:  # of another version, whose keys are not those of today
        return []
    if horizon is None:
        return []
    old = learning_rate_of_run(schedules_of(before, horizon), step)
    if math.isclose(old, run.learning_rate(step), rel_tol=1e-9):
        return []
    after = run.learning_rate(min(step + 1, run.steps))
    return [f"the learning rate jumps from {old:.2e} to {after:.2e}: these settings have another schedule"]


def warmup_notes(run: TrainingRun, stated: Collection[str], done: int) -> list[str]:
    """A line for each schedule of learning rates to come whose warmup is stated, and longer than it may be.

    stated: keys (section.key) of the command line and its file; a recipe's warmup is for long runs. done:
    steps.
    """
    found: list[str] = []
    beginning = [phase for phase in run.phases.all if phase.begins_schedule]
    for phase, schedule in zip(beginning, schedules_of(run.phases, run.steps)):
        steps = schedule.end - schedule.first
        longest = warmup_steps(schedule.cfg, steps)
        is_stated = WARMUP in (stated if phase.number == 1 else phase.changes)
        if is_stated and schedule.last > done and longest < schedule.cfg.warmup:
            place = "" if phase.number == 1 else f"phase {phase.number}: "
            found.append(f"{'warmup':<9}{place}{WARMUP}: {schedule.cfg.warmup:,} steps are cut to "
                         f"{longest:,}, a tenth of the {steps:,} of the schedule")
    return found


def drop_rows(folder: Path) -> None:
    """Removes the rows of a run that was in the folder before, and has left no checkpoint: they are not of
    this one's past. Raises StorageError."""
    with store.storage_errors(folder / lines.NAME, 0):
        lines.truncate_after(folder / lines.NAME, -1)


def is_evaluation_missing(
    cfg: Config, step: int, folder: Path | None, everyone: comm.Group, is_end: bool = False
) -> bool:
    """Whether an evaluation was due after this step, and is not in the folder: the run was asked to stop, or
    another run made the step (then there is no folder).

    is_end: the run ends with this step. Collective.
    """
    was_due = is_end or is_due(cfg.eval.every, step)
    if step == 0 or not was_due:
        return False
    return folder is None or state.first_rank_does(lambda: step not in evaluated_steps(folder), everyone)


def evaluated_steps(folder: Path) -> set[int]:
    """The steps with a validation in metrics.jsonl."""
    _, validations = lines.read_metrics(folder)
    return {row["step"] for row in validations}


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


def other_code(start: state.StartingPoint, env: setup.LaunchEnv, folder: Path) -> list[str]:
    """A line each where the run goes on with other code, and other packages, than made the checkpoint."""
    if start.resumed is None or env.provenance is None:
        return []
    folder = folder if start.memory else start.resumed.path.parent.parent
    old = start.resumed.meta.get("provenance") or {}
    if not provenance.is_code(old.get("code")):  # of another version
        return []
    try:
        change = provenance.code_change(old["code"], env.provenance.code, folder)
        packages = provenance.other_versions(old["versions"], env.provenance.record["versions"])
    except (KeyError, TypeError, AttributeError):
        return []
    found = [f"resumed with other code ({change})"] if change else []
    packages = [line for line in packages if not line.startswith("torch ")]  # checkpoint/state.py says that
    return [*found, f"resumed with other packages ({', '.join(packages)})"] if packages else found


def describe_start(
    run: TrainingRun,
    valid_data: BatchLoader,
    env: setup.LaunchEnv,
    start: state.StartingPoint,
    root: Path,
) -> TrainingRun:
    """The run, with what makes it. root: the folder of its checkpoints. Collective."""
    def describe() -> Tree:
        if env.provenance is None:
            return {}
        inputs = {**weight_inputs(run.cfg, start, root), "data": data_inputs(run, valid_data)}
        return {**env.provenance.record, "step": start.step, "inputs": inputs}

    return replace(run, provenance=state.first_rank_does(describe, run.mesh.world))


def describe_phase(run: TrainingRun, valid_data: BatchLoader, before: Tree, step: int) -> TrainingRun:
    """The run of a phase that begins after `step`, with what makes it. before: that of the phase before."""
    if not before:
        return run
    inputs = {**before["inputs"], "data": data_inputs(run, valid_data)}
    return replace(run, provenance={**before, "step": step, "inputs": inputs})


def weight_inputs(cfg: Config, start: state.StartingPoint, root: Path) -> Tree:
    """{key of checkpoint.*: the checkpoint that it has named}; {} where a run begins or goes on by itself."""
    index = start.weights or start.resumed
    if index is None or start.memory or index.path.parent == root:
        return {}
    key = "init_from" if start.weights else "branch" if cfg.checkpoint.branch else "resume"
    if isinstance(index, ForeignIndex):
        return {f"checkpoint.{key}": {"path": str(index.path.absolute()), "config_sha256": index.sealed}}
    sealed = (index.path / "index.sha256").read_text().split()[0]
    return {f"checkpoint.{key}": {"path": str(index.path.absolute()), "index_sha256": sealed}}


def data_inputs(run: TrainingRun, valid_data: BatchLoader) -> list[Tree]:
    """The data of a phase: for each data set its name, its prefix or file, and the fingerprints of it and of
    its tokenizer. Those of data.valid come last, with a split of their own."""
    read: list[tuple[BlendedDataset, Tree]] = [(dataset, {}) for dataset in run.data.datasets]
    if run.cfg.data.valid is not None:
        read += [(dataset, {"split": valid_data.split}) for dataset in valid_data.datasets]

    found: list[Tree] = []
    for dataset, of_split in read:
        index, tokenizer = files_of(dataset.index), run.data.required_tokenizer
        path = str(index.bin.absolute())
        found.append({
            **of_split,
            "name": dataset.name,
            "path": path if isinstance(index, RawShards) else path.removesuffix(".bin"),
            "identity": index.identity,
            **({"dtype": run.cfg.data.dtype} if isinstance(index, RawShards) else {}),
            "tokenizer": tokenizer.name,
            "tokenizer_fingerprint": tokenizer.fingerprint,
        })
    return found


def keep_provenance(run: TrainingRun, env: setup.LaunchEnv, folder: Path) -> list[str]:
    """Writes down, on rank 0, what makes the run. Returns a warning where the folder does not take it."""
    if env.provenance is None:
        return []
    whole = run.phases.whole
    chosen = {path: plain_data(value_at(whole, path)) for path in stated_leaves(whole)}
    try:
        provenance.keep(folder, {**run.provenance, "settings": chosen}, env.provenance.code.patch)
    except OSError as error:
        return [f"warning: {error.filename or folder}: {error.strerror}; the run does not say what made it"]
    return []


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


@contextlib.contextmanager
def advised_on_memory(cfg: Config, world: World) -> Iterator[None]:
    """Raises OutOfMemory where memory runs out inside, with what the planner says of it."""
    try:
        yield
    except failure.OutOfMemory:  # of a phase that begins inside, which has said so
        raise
    except (MemoryError, RuntimeError) as error:
        if not failure.is_out_of_memory(error):
            raise
        advice = ask_for_advice(cfg, world)
        cause = failure.one_line(error).partition(" Exception raised from ")[0]  # the C++ stack
        raise failure.OutOfMemory(f"out of memory: {cause}; {advice}") from error


def ask_for_advice(cfg: Config, world: World) -> str:
    """Asks another process what the planner says of a rank without memory: this one has none left."""
    device = rank_device(world.device)
    capacity = device.memory if device.gpu else None
    question = pickle.dumps((cfg, world.size, capacity, device.gpu.lower()))
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "plan.advice"],
            cwd=Path(__file__).parent,
            input=question,
            capture_output=True,
            check=True,
            timeout=ADVICE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"the planner has no advice ({failure.one_line(error)})"
    return answer.stdout.decode().strip()


def probe_run_folder(run: TrainingRun, folder: Path, in_memory: MemoryCheckpoints | None = None) -> None:
    """Finds before the first step what would else end the run at its first save. Collective.

    Raises ConfigError if a rank sees another folder than rank 0, or a node has no room for checkpoints in
    memory; StorageError (82) if rank 0 cannot write there, or a checkpoint does not fit on the disk.
    """
    everyone, timeout_s = run.mesh.world, run.cfg.checkpoint.timeout_s
    with store.storage_errors(folder, 0):
        token = state.first_rank_does(lambda: run_folders.write_token(folder), everyone, timeout_s)
    try:
        state.all_ranks_do(lambda: run_folders.check_token(folder, token), everyone, timeout_s)
    finally:
        if everyone.index == 0:
            run_folders.remove_token(folder, token)
    state.check_space(run, folder / "checkpoints")
    if in_memory is not None and run.cfg.checkpoint.memory_every is not None:
        boxes = state.boxes_to_read(run, state.moments_of(run))
        in_memory.check_room(sum(part.numel() * part.element_size() for _, part in boxes))


def keep_tokenizer(cfg: Config, data: BatchLoader, folder: Path) -> None:
    """Saves the tokenizer of the data that a run reads, with the files that belong to it (chat template,
    generation settings). Conversations are written as their own tokenizer says, and in no other template.

    They are looked for at data.tokenizer, beside the data, and in the run whose weights are taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data.required_tokenizer.save(folder)
    for place in same_tokenizers(cfg, data.required_tokenizer):
        with contextlib.suppress(OSError):
            tokenizer_files.copy_files(place, folder, with_templates=not data.is_chat)


def describe_template(cfg: Config, data: BatchLoader) -> str | None:
    """Which chat template conversations have, where another folder of the run has another; else None."""
    tokenizer = data.required_tokenizer
    if not data.is_chat:
        return None
    own = getattr(tokenizer, "files", {})
    others = [str(place) for place in same_tokenizers(cfg, tokenizer)
              if tokenizer_files.has_template(files := tokenizer_files.read_files(place))
              and tokenizer_files.templates_of(files) != tokenizer_files.templates_of(own)]
    if not others:
        return None
    kept = "that with which the data were prepared" if tokenizer_files.has_template(own) else "none"
    return f"{kept}, not that of {' or of '.join(dict.fromkeys(others))}"


def same_tokenizers(cfg: Config, tokenizer: Tokenizer) -> Iterator[Path]:
    """The folders of tokenizer_places that hold this tokenizer: the files of others are not its own."""
    for place in tokenizer_places(cfg):
        if any((place / name).is_file() for name in tokenizer_files.OWN_FILES):
            with contextlib.suppress(ConfigError, OSError):
                if load_tokenizer(place, cfg.data.eod).fingerprint == tokenizer.fingerprint:
                    yield place


def tokenizer_places(cfg: Config) -> list[Path]:
    """Folders that may hold the files of the run's tokenizer."""
    given = Path(cfg.data.tokenizer or "bytes")
    places = [given.parent if given.is_file() else given]
    for _, path in named_paths(cfg.data):
        prefix = local_path(path, cfg.data.cache).removesuffix(".bin").removesuffix(".idx")
        places.append(Path(f"{prefix}.tokenizer"))
    for source in (cfg.checkpoint.resume, cfg.checkpoint.init_from, cfg.checkpoint.branch):
        if source not in (None, "auto", "none"):
            checkpoint = mirror.local_place(source.rpartition("@")[0] or source, state.downloads_of(cfg))
            for folder in (checkpoint, *list(checkpoint.parents)[:2]):
                places.append(folder / "tokenizer")
    return places


def read_valid_batches(batches: int, valid_data: BatchLoader, mesh: Mesh) -> list[Microbatch]:
    """The microbatches of every evaluation: this rank's tokens [b, s/cp], on the device."""
    found: list[Microbatch] = []
    for index in range(batches):
        for batch in valid_data.microbatches(index):
            found.append(shard_batch(batch, mesh.cp))
    return found


def describe_valid(data: BatchLoader, valid_data: BatchLoader) -> str:
    """The data sets of data.valid, and which of them are trained on."""
    trained = {dataset.index.identity for dataset in data.datasets}
    seen = [dataset.name for dataset in valid_data.datasets if dataset.index.identity in trained]
    note = f"   {' and '.join(seen)}: trained on, too, so its loss is not of unseen text" if seen else ""
    return f"{valid_data.describe_datasets()}{note}"


def describe_targets(run: TrainingRun, valid_data: BatchLoader) -> str | None:
    """How much counts of what the run reads in its phase, and whether anything of a validation does. None
    where everything does."""
    counts = run.data.count_targets(run.last_step)
    parts = [counts.describe()] if counts else []
    validated = valid_data.sample_targets(run.cfg.eval.batches)
    if validated and not validated.targets:
        parts.append(f"none of a validation ({validated.looked_at:,} sequences looked at), which has no loss "
                     "then; raise eval.batches or train.seq_len")
    return "; ".join(parts) or None


def describe_passes(run: TrainingRun) -> str | None:
    """The epochs of each data set in a phase; None where it reads none more than once."""
    paths, epochs = zip(*run.data.passes(run.last_step))
    if max(epochs) <= 1:
        return None
    return ", ".join(f"{count:.3g} of {name}" for name, count in zip(source_names(list(paths)), epochs))


def trained_flops_per_token(run: TrainingRun) -> float:
    """Model FLOPs, forward and backward: attention within documents alone is cheaper."""
    lengths = tuple(run.data.document_lengths) if run.cfg.data.doc_mask else ()
    return flops_per_token(run.cfg.model, run.cfg.train.seq_len, lengths)


def read_source_batches(cfg: Config, mesh: Mesh, device: torch.device) -> dict[str, list[Microbatch]]:
    """{name of a source: its microbatches of every evaluation}; empty where a single one is validated."""
    paths = validated_paths(cfg)
    batches = cfg.eval.batches if cfg.eval.source_batches is None else cfg.eval.source_batches
    if len(paths) == 1 or batches == 0:
        return {}
    found: dict[str, list[Microbatch]] = {}
    for name, path in zip(source_names(paths), paths):
        key = validation_key(cfg.data).removeprefix("data.")
        alone = replace(cfg, data=replace(cfg.data, **{key: f"1 {shlex.quote(path)}"}))
        data = open_loader(alone, "valid", mesh.dp.index, mesh.dp.size, device=device)
        found[name] = read_valid_batches(batches, data, mesh)
    return found


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


def write_config(cfg: Config, folder: Path) -> None:
    """Writes config.yaml: a reader sees the old file or the new one."""
    temp = folder / "config.yaml.tmp"
    temp.write_text(dump(cfg))
    temp.replace(folder / "config.yaml")


def flops_so_far(run: TrainingRun, steps: int) -> float:
    """Model FLOPs of the first steps of a run; of earlier phases, with attention over whole sequences."""
    total = 0.0
    for phase in run.phases.all:
        last = run.phases.last_step(phase, steps)
        if last <= phase.steps_before:
            continue
        tokens = phase.tokens_seen(last) - phase.tokens_before
        is_present = phase == run.phase
        of_token = flops_per_token(phase.cfg.model, phase.cfg.train.seq_len)
        total += tokens * (trained_flops_per_token(run) if is_present else of_token)
    return total
