"""The size of a checkout to copy to a machine with a GPU, and which peers are installed there."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = "peers"  # the ignored folder that is copied along with the tracked files
MADE = (PEERS, "runs", "out", "wandb", "__pycache__")  # folders that git ignores
MAX_TRAVEL_BYTES = 64 << 20  # upper limit of a machine that can only be reached by copying
PEER_PACKAGES = ("torchtitan", "megatron-core", "transformer-engine", "liger-kernel")
MISSING = "they are rows without a number; lab/docs/benchmarks.md says how to bring them (--site)"


def tracked_files(root: Path = ROOT) -> list[Path]:
    """Return the files that git tracks, and those that it neither tracks nor ignores.

    Without a repository: all files except those in MADE and in hidden folders.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return [path for path in files_below(root) if not is_made(path.relative_to(root))]
    paths = [root / name for name in found.split("\0") if name]
    return [path for path in paths if path.is_file()]


def is_made(path: Path) -> bool:
    """Return whether a file is generated or a peer's. `path` is relative to the root."""
    return any(part in MADE or part.startswith(".") for part in path.parts[:-1])


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def travel_bytes(root: Path = ROOT) -> tuple[int, int]:
    """Return the bytes of the tracked files, and of the peers."""
    tracked = sum(path.stat().st_size for path in tracked_files(root))
    return tracked, sum(path.stat().st_size for path in files_below(root / PEERS))


def travel_line(root: Path = ROOT) -> str:
    tracked, peers = travel_bytes(root)
    total = tracked + peers
    verdict = "fits" if total < MAX_TRAVEL_BYTES else "DOES NOT FIT"
    parts = f"{tracked / 2**20:.1f} MiB of files and {peers / 2**20:.1f} MiB of {PEERS}/"
    return f"travels: {parts}; {verdict} {MAX_TRAVEL_BYTES / 2**20:.0f} MiB"


def describe_peers(site: str) -> str:
    """Return one line that lists the installed peers. `site` is the folder given by --site, or ""."""
    paths = [os.path.abspath(site)] if site else []
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions(path=[*paths, *sys.path]):
        found.setdefault((one.metadata["Name"] or "").lower(), one.version)
    there = [f"{name} {found[name]}" for name in PEER_PACKAGES if name in found]
    missing = [name for name in PEER_PACKAGES if name not in found]
    line = "peers: " + (", ".join(there) or "none")
    return line + (f"; not there: {', '.join(missing)}: {MISSING}" if missing else "")
