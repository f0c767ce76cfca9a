"""What makes a run, for its checkpoints and its folder: code, packages, weights and data."""
from dataclasses import replace
from pathlib import Path

from checkpoint import state
from checkpoint.systems.foreign import ForeignIndex
from config import Config, Tree, provenance
from config.reading.kinds import stated_leaves
from config.tree import plain_data, value_at
from data.loader import BatchLoader, BlendedDataset
from data.raw import RawShards
from data.start_tokens import files_of
from runtime import setup
from runtime.run import TrainingRun


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
