"""The `bevatron` command and `python -m bevatron`: makes the package importable and runs a script."""
import os
import runpy
import sys

import bevatron

COMMANDS = {  # the module to run, and its help text
    "train": ("train", "train a model; train --list has the recipes"),
    "launch": ("scripts.launch", "train with several ranks, on one machine or on several"),
    "generate": ("scripts.generate", "text from a run"),
    "evaluate": ("scripts.evaluate", "loss, perplexity and bits per byte of a run"),
    "convert": ("scripts.convert", "to and from a Hugging Face folder"),
    "prepare_data": ("scripts.prepare_data", "text files to token files"),
    "corpus": ("scripts.corpus", "public corpora to token files"),
    "plan": ("scripts.plan", "the fastest layouts on a cluster"),
    "verify": ("scripts.verify", "prove that every layout trains like one process"),
    "schedule": ("scripts.schedule", "check, simulate and draw a pipeline schedule"),
    "grid": ("scripts.grid", "runs at every combination of some keys' values"),
    "compare": ("scripts.compare", "runs side by side"),
    "scaling": ("scripts.scaling", "ladders of models and the laws of their losses"),
}


def usage() -> str:
    lines = ["usage: bevatron COMMAND ...        each has --help", ""]
    lines += [f"  {name:14}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(lines)


def main() -> int:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(f"Bevatron {bevatron.__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"error: {words[0]}: no such command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2

    bevatron.use()
    share_path_with_children()
    module = COMMANDS[words[0]][0]
    sys.argv = [module, *words[1:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)  # exits with its own code
    return 0


def share_path_with_children() -> None:
    """Let ranks and workers, which are new interpreters, find the package's folders.

    They do not search the current folder, which may contain a package `data` of the user's. Python 3.10 has
    no such switch: there, run `verify` and `schedule` from another folder.
    """
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(bevatron.FOLDER), *filter(None, [inherited])])
    os.environ["PYTHONSAFEPATH"] = "1"


if __name__ == "__main__":
    sys.exit(main())
