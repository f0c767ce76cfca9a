"""The systems whose checkpoints a new run can start from (checkpoint.init_from): how their files are
recognized and opened."""
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from checkpoint.hf.peft import find_peft
from checkpoint.systems.dcp import METADATA
from checkpoint.systems.foreign import ForeignIndex, is_hf_folder, open_hf_folder
from checkpoint.systems.megatron import find_megatron, open_megatron, seal_megatron
from checkpoint.systems.nanogpt import find_nanogpt, open_nanogpt
from checkpoint.systems.peft import open_peft, seal_peft
from checkpoint.systems.system_rules import sealed_zip
from checkpoint.systems.torchtitan import find_torchtitan, open_torchtitan
from config import ConfigError, ModelConfig

LENGTH_BYTES = 8  # of a header in safetensors, at the beginning of a file
SAMPLES, SAMPLE_BYTES = 64, 4096  # of a file of weights, for a seal


class ForeignSystem(NamedTuple):
    """A system whose checkpoints can be read.

    `looked_for` describes the files that identify it. `find` returns what to open at a path, if anything, and
    `open` opens it for the run's model. `seal` returns a sha256 that changes with the checkpoint.
    """
    name: str
    looked_for: str
    find: Callable[[Path], Path | None]
    open: Callable[[Path, ModelConfig], ForeignIndex]
    seal: Callable[[Path], str]


def seal_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def seal_hf_weights(folder: Path) -> str | None:
    """Return a sha256 that changes with the weights of a Hugging Face folder; None for others.

    Covers config.json, and of each *.safetensors the name, the size, the header and SAMPLES blocks of
    SAMPLE_BYTES at equal distances, so that a large folder takes no longer than a small one.
    """
    if not is_hf_folder(folder):
        return None
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            length = file.read(LENGTH_BYTES)
            header = int.from_bytes(length, "little")
            digest.update(length + file.read(header))
            first = LENGTH_BYTES + header
            for place in range(first, size, max(SAMPLE_BYTES, (size - first) // SAMPLES)):
                file.seek(place)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


SYSTEMS = (  # the first that finds its files wins
    ForeignSystem("PEFT", "adapter_config.json", find_peft, open_peft, seal=seal_peft),
    ForeignSystem(
        "Hugging Face",
        "config.json",
        find=lambda path: path if is_hf_folder(path) else None,
        open=lambda folder, _: open_hf_folder(folder),
        seal=lambda folder: seal_file(folder / "config.json"),
    ),
    ForeignSystem("nanoGPT", "ckpt.pt", find_nanogpt, open_nanogpt, seal=sealed_zip),
    ForeignSystem(
        "Megatron-LM",
        "latest_checkpointed_iteration.txt, metadata.json, common.pt or mp_rank_*",
        find_megatron,
        open_megatron,
        seal=seal_megatron,
    ),
    ForeignSystem(
        "torchtitan",
        ".metadata or step-N/.metadata",
        find_torchtitan,
        open_torchtitan,
        seal=lambda folder: seal_file(folder / METADATA),
    ),
)


def is_ours(path: Path) -> bool:
    """Return whether a path is our checkpoint, run folder or folder of checkpoints."""
    return (
        (path / "index.json").exists() or (path / "checkpoints").is_dir() or any(path.glob("step_*"))
    )


def open_foreign(path: Path, run: ModelConfig) -> ForeignIndex:
    """Open a checkpoint of another system. `run` is the model of the run.

    Raises ConfigError if no known system matches, listing what was looked for, and as the readers do.
    """
    for system in SYSTEMS:
        found = system.find(path)
        if found is not None:
            return replace(system.open(found, run), sealed=system.seal(found))
    looked_for = ", ".join(f"{system.looked_for} ({system.name})" for system in SYSTEMS)
    missing = "" if path.exists() else "is not there; it "
    raise ConfigError(
        f"checkpoint.init_from: {path} {missing}holds no checkpoint: looked for index.json and checkpoints/ "
        f"(a run), {looked_for}; give such a folder, or convert the weights to a Hugging Face folder"
    )


def compute_seal(path: Path) -> str | None:
    """Return ForeignIndex.sealed for the current files, or None if they are not a checkpoint of a known
    system."""
    for system in SYSTEMS:
        found = system.find(path)
        if found is not None:
            return system.seal(found)
    return None
