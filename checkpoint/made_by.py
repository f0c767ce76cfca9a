"""Provenance of a run, for its checkpoints and its folder: code, packages, weights and data."""
from dataclasses import replace
from pathlib import Path

from checkpoint import state
from checkpoint.systems.foreign import ForeignIndex
from config import Config, Tree, provenance
from config.reading.kinds import stated_leaves
from config.tree import plain_data, value_at
from data.loader import BatchLoader, BlendedDataset
from data.raw import RawShards
from data.start_tokens import underlying_files
from runtime import setup
from runtime.run import TrainingRun


def other_code(start: state.StartingPoint, env: setup.LaunchEnv, folder: Path) -> list[str]:
    """Return log lines if the run resumes with other code or packages than those of the checkpoint."""
    if start.resumed is None or env.provenance is None:
        return []
    folder = folder if start.memory else start.resumed.path.parent.parent
    old = start.resumed.meta.get("provenance") or {}
    if not provenance.is_code(old.get("code")):  # written by another version
        return []
    try:
        change = provenance.code_change(old["code"], env.provenance.code, folder)
        packages = provenance.other_versions(old["versions"], env.provenance.record["versions"])
    except (KeyError, TypeError, AttributeError):
        return []
    found = [f"resumed with different code ({change})"] if change else []
    packages = [line for line in packages if not line.startswith("torch ")]  # checkpoint/state.py reports it
    return [*found, f"resumed with different packages ({', '.join(packages)})"] if packages else found


def describe_start(
    run: TrainingRun,
    valid_data: BatchLoader,
    env: setup.LaunchEnv,
    start: state.StartingPoint,
    root: Path,
) -> TrainingRun:
    """Return the run with its provenance. root: the folder of its checkpoints. Collective."""
    def describe() -> Tree:
        if env.provenance is None:
            return {}
        inputs = {**weight_inputs(run.cfg, start, root), "data": data_inputs(run, valid_data)}
        return {**env.provenance.record, "step": start.step, "inputs": inputs}

    return replace(run, provenance=state.run_on_first_rank(describe, run.mesh.world))


def describe_phase(run: TrainingRun, valid_data: BatchLoader, before: Tree, step: int) -> TrainingRun:
    """Return the run of the phase after `step` with its provenance, given that of the previous phase."""
    if not before:
        return run
    inputs = {**before["inputs"], "data": data_inputs(run, valid_data)}
    return replace(run, provenance={**before, "step": step, "inputs": inputs})


def weight_inputs(cfg: Config, start: state.StartingPoint, root: Path) -> Tree:
    """Return {checkpoint.* key: the checkpoint it names}; {} if the run starts fresh or resumes itself."""
    index = start.weights or start.resumed
    if index is None or start.memory or index.path.parent == root:
        return {}
    key = "init_from" if start.weights else "branch" if cfg.checkpoint.branch else "resume"
    if isinstance(index, ForeignIndex):
        return {f"checkpoint.{key}": {"path": str(index.path.absolute()), "config_sha256": index.sealed}}
    sealed = (index.path / "index.sha256").read_text().split()[0]
    return {f"checkpoint.{key}": {"path": str(index.path.absolute()), "index_sha256": sealed}}


def data_inputs(run: TrainingRun, valid_data: BatchLoader) -> list[Tree]:
    """Describe the data of a phase: name, prefix or file, and fingerprints of each dataset and its tokenizer.

    The datasets of data.valid come last and also name their split.
    """
    read: list[tuple[BlendedDataset, Tree]] = [(dataset, {}) for dataset in run.data.datasets]
    if run.cfg.data.valid is not None:
        read += [(dataset, {"split": valid_data.split}) for dataset in valid_data.datasets]

    results: list[Tree] = []
    for dataset, of_split in read:
        index, tokenizer = underlying_files(dataset.index), run.data.required_tokenizer
        path = str(index.bin.absolute())
        results.append({
            **of_split,
            "name": dataset.name,
            "path": path if isinstance(index, RawShards) else path.removesuffix(".bin"),
            "identity": index.identity,
            **({"dtype": run.cfg.data.dtype} if isinstance(index, RawShards) else {}),
            "tokenizer": tokenizer.name,
            "tokenizer_fingerprint": tokenizer.fingerprint,
        })
    return results


def keep_provenance(run: TrainingRun, env: setup.LaunchEnv, folder: Path) -> list[str]:
    """Write the provenance to the run folder on rank 0. Returns a warning if that fails."""
    if env.provenance is None:
        return []
    whole = run.phases.whole
    chosen = {path: plain_data(value_at(whole, path)) for path in stated_leaves(whole)}
    try:
        provenance.keep(folder, {**run.provenance, "settings": chosen}, env.provenance.code.patch)
    except OSError as error:
        return [f"warning: {error.filename or folder}: {error.strerror}; the run does not record its "
                "provenance"]
    return []
