"""Provenance of a run, for its checkpoints and its folder: code, packages, weights and data."""
from dataclasses import replace
from pathlib import Path

from checkpoint import state
from checkpoint.disk.folder import StoredIndex
from checkpoint.origin import FINGERPRINT_DIGITS, TEACHER
from checkpoint.systems.foreign import ForeignIndex
from checkpoint.systems.foreign_systems import seal_hf_weights
from config import Config, ConfigError, Tree, provenance
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
        weights = {**weight_inputs(run.cfg, start, root), **teacher_so_far(run.cfg, start)}
        inputs = {**weights, "data": data_inputs(run, valid_data)}
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
    return {f"checkpoint.{key}": own_checkpoint(index.path)}


def own_checkpoint(path: Path) -> Tree:
    """Describe a checkpoint of ours: path, and the hash of its index, which has those of all its files."""
    sealed = (path / "index.sha256").read_text().split()[0]
    return {"path": str(path.absolute()), "index_sha256": sealed}


def teacher_so_far(cfg: Config, start: state.StartingPoint) -> Tree:
    """Return {distill.teacher: its files when the checkpoint was saved}; {} unless the run resumes
    with it."""
    if start.resumed is None or cfg.distill.teacher is None:
        return {}
    meta = start.resumed.meta
    inputs = (meta.get("provenance") or {}).get("inputs", {})
    is_same = meta["config"].get("distill", {}).get("teacher") == cfg.distill.teacher
    return {TEACHER: inputs[TEACHER]} if is_same and TEACHER in inputs else {}


def with_teacher_input(run: TrainingRun, index: StoredIndex) -> TrainingRun:
    """Return the run with the teacher's files in its provenance, if it has one. Reads little of them.

    index: the teacher's checkpoint. Raises ConfigError if the run resumes and these are not the files that
    taught it so far.
    """
    if not run.provenance:
        return run
    if isinstance(index, ForeignIndex):
        found = {"path": str(index.path.absolute()), "weights_sha256": seal_hf_weights(index.path)}
    else:
        found = own_checkpoint(index.path)
    inputs = run.provenance["inputs"]
    before = inputs.get(TEACHER, found)
    old, new = (next(value for key, value in one.items() if key != "path") for one in (before, found))
    if old != new:
        log = run.cfg.log
        raise ConfigError(
            f"{TEACHER}: {found['path']} has fingerprint {new[:FINGERPRINT_DIGITS]}, and the run was taught "
            f"by {before['path']} with {old[:FINGERPRINT_DIGITS]}; give that teacher, or start a new run: "
            f"--log.name OTHER --checkpoint.init_from {Path(log.dir) / (log.name or 'RUN')}"
        )
    return replace(run, provenance={**run.provenance, "inputs": {**inputs, TEACHER: found}})


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
