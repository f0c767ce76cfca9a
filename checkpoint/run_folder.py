"""A run folder besides checkpoints and metrics: config.yaml, the tokenizer, and checks before the first step,
instead of failing at the first save hours later."""
import contextlib
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint import remote, state
from checkpoint.disk import store
from config import Config, ConfigError
from config.reading import dump
from data import tokenizer_files
from data.blend import named_paths
from data.download import local_path
from data.loader import BatchLoader
from data.tokenizer import Tokenizer, load_tokenizer
from parallel.extras import Extra
from runtime.metrics import MetricsLogger
from runtime.run import TrainingRun

FOLLOWED = ("STOP",)  # only removed, never written to
# folders in which a run also writes files by name
INNER_FOLDERS = ("tokenizer", "tokenizer/additional_chat_templates", "checkpoints", "patches", "routing")


class RunFolder(Extra):
    """Write config.yaml after the first step of a phase, on rank 0, and restore a folder that was removed."""

    def __init__(self, folder: Path, log: MetricsLogger, is_first_rank: bool) -> None:
        self.folder = folder
        self.log = log
        self.is_first_rank = is_first_rank
        self.first_step = 0  # first step of the phase

    def on_resume(self, run: Any, step: int) -> None:
        self.first_step = step + 1

    def after_step(self, run: Any, step: int) -> None:
        if step == self.first_step and self.is_first_rank:
            write_config(run.phases.whole, self.folder)  # not before a step was trained with this config

    def restore(self, run: Any, step: int) -> None:
        """If the run folder was removed during the run, warn and write its files again."""
        folder = self.folder
        if not self.is_first_rank or (folder / "config.yaml").exists():
            return
        self.log.log_line(
            f"warning: {folder} was removed or emptied before step {step:,}: config.yaml and tokenizer/ are "
            "written again; metrics and checkpoints up to here are lost, and so is the lock against a second "
            "run"
        )
        with store.storage_errors(folder, 0):
            keep_tokenizer(run.cfg, run.data, folder / "tokenizer")
            write_config(run.phases.whole, folder)
        self.log.reopen()


def write_config(cfg: Config, folder: Path) -> None:
    """Write config.yaml atomically."""
    temp = folder / "config.yaml.tmp"
    temp.write_text(dump(cfg))
    temp.replace(folder / "config.yaml")


def keep_tokenizer(cfg: Config, data: BatchLoader, folder: Path) -> None:
    """Save the tokenizer of the training data with its files (chat template, generation settings).

    The files are looked up at data.tokenizer, next to the data, and in the run that supplies the weights. For
    chat data only the template that the data was prepared with is saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data.required_tokenizer.save(folder)
    for place in same_tokenizers(cfg, data.required_tokenizer):
        with contextlib.suppress(OSError):
            tokenizer_files.copy_files(place, folder, with_templates=not data.is_chat)


def describe_template(cfg: Config, data: BatchLoader) -> str | None:
    """Describe the chat template of the data if another folder of the run has a different one; else None."""
    tokenizer = data.required_tokenizer
    if not data.is_chat:
        return None
    own = getattr(tokenizer, "files", {})
    others = [str(place) for place in same_tokenizers(cfg, tokenizer)
              if tokenizer_files.has_template(files := tokenizer_files.read_files(place))
              and tokenizer_files.load_templates(files) != tokenizer_files.load_templates(own)]
    if not others:
        return None
    kept = "the one that the data was prepared with" if tokenizer_files.has_template(own) else "none"
    return f"{kept}, not that of {' or of '.join(dict.fromkeys(others))}"


def same_tokenizers(cfg: Config, tokenizer: Tokenizer) -> Iterator[Path]:
    """Yield the folders of tokenizer_places that contain this very tokenizer."""
    for place in tokenizer_places(cfg):
        if any((place / name).is_file() for name in tokenizer_files.OWN_FILES):
            with contextlib.suppress(ConfigError, OSError):
                if load_tokenizer(place, cfg.data.eod).fingerprint == tokenizer.fingerprint:
                    yield place


def tokenizer_places(cfg: Config) -> list[Path]:
    """Return the folders that may contain the files of the run's tokenizer."""
    given = Path(cfg.data.tokenizer or "bytes")
    places = [given.parent if given.is_file() else given]
    for _, path in named_paths(cfg.data):
        prefix = local_path(path, cfg.data.cache).removesuffix(".bin").removesuffix(".idx")
        places.append(Path(f"{prefix}.tokenizer"))
    for source in (cfg.checkpoint.resume, cfg.checkpoint.init_from, cfg.checkpoint.branch):
        if source not in (None, "auto", "none"):
            checkpoint = remote.local_place(source.rpartition("@")[0] or source, state.downloads_folder(cfg))
            places.append(checkpoint)  # a Hugging Face folder has tokenizer and weights in one place
            for folder in (checkpoint, *list(checkpoint.parents)[:2]):
                places.append(folder / "tokenizer")
    return places


# ---- before the first step ---------------------------------------------------------------------------------


def refuse_links(folder: Path) -> None:
    """Raise ConfigError if a name that a run writes to is a symbolic link.

    The run folder itself may be one. Otherwise a folder from someone else could make a run overwrite your
    files.
    """
    places = [folder, *(folder / name for name in INNER_FOLDERS)]
    for place in places:
        if place != folder and not place.is_dir():
            continue
        for path in sorted(place.iterdir()):
            if path.is_symlink() and path.name not in FOLLOWED:
                raise ConfigError(
                    f"{path}: is a link, and a run does not write through links; replace it by what it "
                    "points to, or choose another --log.name (another disk: --log.dir)"
                )


def probe_run_folder(run: TrainingRun, folder: Path) -> None:
    """Check before the first step that the run can be saved. Collective.

    Raises ConfigError if a rank sees a different folder than rank 0; StorageError (82) if rank 0 cannot write
    there, or a checkpoint does not fit on the disk.
    """
    everyone, timeout_s = run.mesh.world, run.cfg.checkpoint.timeout_s
    with store.storage_errors(folder, 0):
        token = state.run_on_first_rank(lambda: write_token(folder), everyone, timeout_s)
    try:
        state.run_on_all_ranks(lambda: check_token(folder, token), everyone, timeout_s)
    finally:
        if everyone.index == 0:
            remove_token(folder, token)
    state.check_space(run, folder / "checkpoints")


def write_token(folder: Path) -> str:
    """Write a file with a new unique name, on rank 0, and return the name. Raises OSError."""
    name = f".probe-{uuid.uuid4().hex}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(name)
    return name


def check_token(folder: Path, name: str) -> None:
    """Raise ConfigError if this rank does not find the file of write_token."""
    if not (folder / name).is_file():
        raise ConfigError(
            f"log.dir: {folder.absolute()} on {socket.gethostname()} is not the folder rank 0 writes to; "
            "every rank writes its part of a checkpoint there: give a folder that all nodes share"
        )


def remove_token(folder: Path, name: str) -> None:
    with contextlib.suppress(OSError):
        (folder / name).unlink()
