"""How far a run is that is about to launch, from the names and small files of its checkpoints.

A launch asks before it joins the ranks: past phases (train.phases) need neither a layout for these ranks nor
data.
"""
from pathlib import Path

from checkpoint import remote, state
from checkpoint.disk import store
from config import Config, ConfigError
from config.reading.run_name import OWN_CHECKPOINTS
from data.remote import RemoteError, RemoteFolder, is_url, open_folder
from durable import mirror


def steps_done(cfg: Config, folder: Path) -> int:
    """Return the step from which this run would resume, if no checkpoint is damaged, or 0 for a new run.

    In-memory checkpoints are never of a later phase: each phase ends on disk. Raises ConfigError.
    """
    mirrored = mirror.open_mirror(cfg)
    own = max(
        mirror.newest_local(folder / remote.CHECKPOINTS),
        -1 if mirrored is None else newest_there(mirrored, "checkpoint.mirror"),
    )
    if own >= 0:
        return own
    checkpoint = cfg.checkpoint
    if checkpoint.branch:
        return int(checkpoint.branch.rpartition("@")[2])
    if checkpoint.resume in OWN_CHECKPOINTS:
        return 0
    if is_url(checkpoint.resume):
        run, step = remote.split_url(checkpoint.resume)
        asker = "checkpoint.resume"
        return newest_there(open_folder(run, asker), asker) if step is None else step
    indexes: state.Indexes = {}
    check = state.kept_in(indexes, store.quick_check)
    return indexes[state.find_checkpoint(checkpoint.resume, [], check=check)].step


def newest_there(run: RemoteFolder, asker: str) -> int:
    """Return the step of the newest checkpoint of a run in a store, or -1. Raises ConfigError."""
    try:
        return max(remote.complete_steps(run.folder(remote.CHECKPOINTS)), default=-1)
    except RemoteError as error:
        raise ConfigError(f"{asker}: {run.url} cannot be read: {error}") from error
