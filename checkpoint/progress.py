"""How far a run is that is about to start, as the names and small files of its checkpoints say.

A start asks before it joins the ranks: of phases (train.phases) that are past, neither a layout for these
ranks nor data is needed any more.
"""
from pathlib import Path

from checkpoint import mirror, state
from checkpoint.disk import store
from config import Config, ConfigError
from config.reading.run_name import OWN_CHECKPOINTS
from remote.files import RemoteError, RemoteFolder, is_url, open_folder


def steps_done(cfg: Config, folder: Path) -> int:
    """The steps after which a start of this run goes on, if no checkpoint turns out to be damaged; 0: it
    begins. What is in memory is never of a later phase: each ends on the disk. Raises ConfigError.
    """
    mirrored = mirror.open_mirror(cfg)
    own = max(
        mirror.newest_local(folder / mirror.CHECKPOINTS),
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
        run, step = mirror.parts_of_url(checkpoint.resume)
        asker = "checkpoint.resume"
        return newest_there(open_folder(run, asker), asker) if step is None else step
    indexes: state.Indexes = {}
    check = state.kept_in(indexes, store.quick_check)
    return indexes[state.find_checkpoint(checkpoint.resume, [], check=check)].step


def newest_there(run: RemoteFolder, asker: str) -> int:
    """The step of the newest checkpoint of a run in a store; -1: there is none. Raises ConfigError."""
    try:
        return max(mirror.complete_steps(run.folder(mirror.CHECKPOINTS)), default=-1)
    except RemoteError as error:
        raise ConfigError(f"{asker}: {run.url} cannot be read: {error}") from error
