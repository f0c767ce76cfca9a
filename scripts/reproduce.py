"""Reproduces a run: its code, its inputs, its command.

    python -m scripts.reproduce RUN [--out FOLDER]       the tree in FOLDER/code, and the command
    python -m scripts.reproduce RUN --run                also runs it, and compares the losses bit for bit

The tree is a git worktree at the run's commit, with the patch of uncommitted changes. Its hash must match the
code that ran, and the data, tokenizers and checkpoints that the run started from must exist with the same
fingerprints; otherwise one line names the mismatch, and nothing is created. The new run goes into FOLDER/run,
sends nothing to W&B or a store, and is launched in the same working folder as the first. On the same machine
with the same packages, it is bitwise equal where train.deterministic holds.
"""
import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from checkpoint.systems.foreign_systems import compute_seal, seal_hf_weights
from config import CheckpointConfig, ConfigError, Tree, code_hash, provenance
from config.command_line import CommandParser
from config.exit_codes import FINISHED, STOPPED_EARLY
from config.provenance import GitError, git
from config.reading.run_name import IDLE
from config.terminal import output_width, wrapped
from data.indexed import IndexedDataset
from data.raw import ENDS, RawShards
from data.tokenizer import load_tokenizer
from runtime.failure import fail_cleanly
from runtime.lines import ALL_STEPS, read_metrics

DIGITS = 12  # of a fingerprint in a message
RESUME = "checkpoint.resume"  # each start may resume from another checkpoint of the run
DIFFERENT = 1  # exit code: the losses differ


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.reproduce",
        description=__doc__,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder (default: RUN-again)")
    parser.add_argument("--run", action="store_true", dest="starts", help="start the command, too")
    return parser


def main(argv: list[str]) -> int:
    args = arguments().parse_args(argv)
    run = args.run.absolute()
    out = (args.out or Path(f"{run}-again")).absolute()

    # check everything before creating anything
    records = read_run(args.run)
    record = records[0]
    if out.exists():
        raise ConfigError(f"--out: {out} exists; give a folder that does not, or remove it "
                          f"(git worktree remove --force {shlex.quote(str(out / 'code'))})")
    check_single_history(args.run, records)
    patch = provenance.read_patch(run, record["code"])
    check_commit(args.run, record)
    notes = check_inputs(records)
    notes += environment_differences(record)
    if not Path(record["folder"]).is_dir():
        raise ConfigError(f"{record['folder']}: the run was started there, and it is gone; make that folder")

    # the tree, and the command
    tree = make_tree(record, patch, out)
    shutil.copy(run / "config.yaml", out / "config.yaml")
    words = command_words(record, tree, out)
    width = output_width()
    for line in (f"tree: {tree}, {provenance.label(record['code'])}", f"typed: {record['command']}", *notes):
        print("\n".join(wrapped(line, width)))
    print(f"cd {shlex.quote(record['folder'])} && {shlex.join(words)}", flush=True)
    if not args.starts:
        return 0
    code = subprocess.run(words, cwd=record["folder"], check=False).returncode
    has_run = code in (FINISHED, STOPPED_EARLY)  # train.max_minutes may end it earlier than the first
    return compare_losses(run, out / "run") if has_run else code


# ---- the record of the run ---------------------------------------------------------------------------------


def read_run(run: Path) -> list[Tree]:
    """Return the records of a run: one per start, and per phase that began in it. Raises ConfigError."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: holds no run (no config.yaml); give a folder that train.py has written")
    records = provenance.read_records(run)
    if not records:
        raise ConfigError(f"{run}: does not say what made it (no {provenance.RECORDS_FILE}); it is of an "
                          "earlier version, or was copied without that file")
    return records


def check_single_history(run: Path, records: list[Tree]) -> None:
    """Raise ConfigError if a later start used other code, settings or ranks than the first."""
    first = records[0]
    for index, record in enumerate(records[1:], 1):
        number = len({one["date"] for one in records[:index + 1]})
        who = f"{run}: start {number}, from step {record['step']:,} on,"
        end = (f"so no one command makes it again; {provenance.RECORDS_FILE} has commit and patch of each "
               "start")
        if record["code"]["hash"] != first["code"]["hash"]:
            labels = " -> ".join(provenance.label(one["code"]) for one in (first, record))
            raise ConfigError(f"{who} ran other code ({labels}), {end}")
        old, new = first["settings"], record["settings"]
        for key in {**old, **new}:
            if old.get(key) != new.get(key) and not key.startswith((*IDLE, RESUME)):
                raise ConfigError(f"{who} had another {key} ({old.get(key)} -> {new.get(key)}), {end}")
        ranks = [one["hardware"]["ranks"] for one in (first, record)]
        if ranks[0] != ranks[1]:
            raise ConfigError(f"{who} ran on {ranks[1]} ranks, not {ranks[0]}, {end}")


def check_commit(run: Path, record: Tree) -> None:
    """Raise ConfigError if this clone lacks the commit, or the run has none and used other code."""
    code = record["code"]
    commit, root = code.get("commit"), provenance.ROOT
    if commit is None:
        if code_hash() != code["hash"]:
            raise ConfigError(
                f"{run}: was made without a commit ({code['why']}), by {provenance.label(code)}, and {root} "
                f"is other code; call this script in the checkout that made it (on {record['host']})"
            )
        return
    try:
        git(root, "cat-file", "-e", f"{commit}^{{commit}}")
    except GitError as error:
        raise ConfigError(
            f"{run}: its commit {commit} is not in this clone, {root} ({error}); git fetch the branch that "
            f"has it, or call this script in the clone that made it (on {record['host']})"
        ) from None


def check_inputs(records: list[Tree]) -> list[str]:
    """Check the run's inputs and return notes. Raises ConfigError for a missing or changed file."""
    notes: list[str] = []
    data = {item["path"]: item for record in records for item in record["inputs"]["data"]}
    for path, item in data.items():
        if item["name"] == "stdlib" and not Path(f"{path}.idx").exists():
            notes.append(f"note: {path} is gone; the run makes the corpus again, of this Python")
            continue
        check_data(path, item)
    for key, weights in records[0]["inputs"].items():
        if key == "data":
            continue
        kind = next(name for name in SEALS if name in weights)
        now = SEALS[kind](Path(weights["path"]))
        if now is None or now != weights[kind]:
            what = "is gone" if now is None else "is another checkpoint now"
            raise ConfigError(f"{key}: {weights['path']} {what}; restore the one with which the run began")
    return notes


def run_seal(path: Path) -> str | None:
    """Return the sha256 of a checkpoint's index, None if it is gone."""
    sealed = path / "index.sha256"
    return sealed.read_text().split()[0] if sealed.is_file() else None


SEALS = {  # {what a record has of weights: what it is today, or None if they are gone}
    "index_sha256": run_seal,
    "config_sha256": compute_seal,  # from another system
    "weights_sha256": seal_hf_weights,  # of a teacher
}


def check_data(path: str, item: Tree) -> None:
    """Raise ConfigError if a data set differs from what the run read."""
    advice = "restore the data that the run has read"
    try:
        is_raw = path.endswith(ENDS)  # for data with an index, the prefix is recorded
        dataset = RawShards(path, stated=item.get("dtype")) if is_raw else IndexedDataset(path)
        folder = Path(f"{os.path.splitext(path)[0] if is_raw else path}.tokenizer")
        tokenizer = load_tokenizer(folder).fingerprint if folder.is_dir() else item["tokenizer_fingerprint"]
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{str(error).partition(';')[0]}; {advice}") from None
    found = {"identity": (dataset.bin, dataset.identity), "tokenizer_fingerprint": (folder, tokenizer)}
    for key, (file, now) in found.items():
        if now != item[key]:
            raise ConfigError(f"{file}: is not what it was (fingerprint {now[:DIGITS]}, the run read "
                              f"{item[key][:DIGITS]}); {advice}")


def environment_differences(record: Tree) -> list[str]:
    """Return notes on differences that may change the bits."""
    found = provenance.other_versions(record["versions"], provenance.versions())
    processor = provenance.processor()
    if processor != record["hardware"]["processor"]:
        found.append(f"processor {record['hardware']['processor']} -> {processor}")
    return [f"note: not as it was, so bits may differ: {', '.join(found)}"] if found else []


# ---- the tree and the command ------------------------------------------------------------------------------


def make_tree(record: Tree, patch: bytes, out: Path) -> Path:
    """Create OUT with the code in it, and return the folder of train.py. Raises ConfigError, leaving nothing.

    A run without a commit used the code of this checkout, which then serves as the tree.
    """
    code, root = record["code"], provenance.ROOT
    if code["commit"] is None:
        out.mkdir(parents=True)
        return root
    worktree = out / "code"
    try:
        words = ("worktree", "add", "--detach", str(worktree), code["commit"])
        git(root, *words, seconds=provenance.TREE_SECONDS)
        if patch:
            git(worktree, "apply", "--whitespace=nowarn", "-", content=patch)
        tree = worktree / code["prefix"]
        if code_hash(tree) != code["hash"]:
            raise GitError("the tree of its commit and patch is not the code that ran; its run folder, or "
                           "what git does to files here (core.autocrlf, filters), has changed")
    except (GitError, OSError) as error:
        subprocess.run(["git", "worktree", "remove", "--force", str(worktree)], cwd=root, capture_output=True)
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run(["git", "worktree", "prune"], cwd=root, capture_output=True)
        raise ConfigError(f"{worktree}: {error}") from None
    return tree


def command_words(record: Tree, tree: Path, out: Path) -> list[str]:
    """Return the command that repeats the run, in its original working folder."""
    hardware = record["hardware"]
    launcher: list[str] = []
    if hardware["ranks"] > 1:
        nodes = -(-hardware["ranks"] // hardware["ranks_of_node"])
        where = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes), "--rdzv-endpoint", "HOST:PORT"]
        launcher = ["-m", "torch.distributed.run", *where, "--nproc-per-node", str(hardware["ranks_of_node"])]
    # the original starting point, and no output to the destinations of the first run
    pinned = {key: weights["path"] for key, weights in record["inputs"].items() if key != "data"}
    pinned.pop("checkpoint.branch", None)  # it names the step
    pinned |= {"log.dir": str(out), "log.name": "run", "log.wandb": "off", "checkpoint.mirror": "none"}
    pinned |= {"log.mlflow": "none", "log.comet": "off", "log.alert_command": "none"}
    pinned["checkpoint.mirror_failures"] = str(CheckpointConfig.mirror_failures)  # idle without a mirror
    pinned["train.threads"] = str(hardware["threads"])  # determines the order of sums
    words = ["--config", str(out / "config.yaml")]
    words += [word for key, value in pinned.items() for word in (f"--{key}", value)]
    return [sys.executable, *launcher, str(tree / "train.py"), *words]


def compare_losses(first: Path, again: Path) -> int:
    """Print whether the losses of two runs are bitwise equal, and return the exit code."""
    old, new = (
        {row["step"]: row["loss"] for row in read_metrics(folder, ALL_STEPS)[0]} for folder in (first, again)
    )
    steps = sorted(old.keys() & new.keys())
    if not steps:
        print("no step was made by both runs: nothing is compared")
        return DIFFERENT
    for step in steps:
        if old[step] != new[step]:
            print(f"losses differ from step {step:,} on: {old[step]!r}, now {new[step]!r}")
            return DIFFERENT
    print(f"the same {len(steps):,} losses, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
