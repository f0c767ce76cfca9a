"""The pages for people (README, CONTRIBUTING, CHANGELOG, docs/): links, paths, keys and names in them exist,
and every command in them runs, at a tiny size; what cannot run here is parsed by its own program, and is
listed with its reason.
"""

import contextlib
import importlib
import io
import json
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch.distributed.run
from ranks import job

import bevatron.__main__
import config
import lab.benchmarks.command
import lab.proof.mutate.command
import lab.proof.mutate.table
import lab.proof.verify.command
import lab.scaling.command
import scripts.average
import scripts.compare.__main__
import scripts.convert
import scripts.corpus
import scripts.evaluate
import scripts.generate
import scripts.grid
import scripts.launch
import scripts.plan
import scripts.preflight
import scripts.prepare_data
import scripts.reproduce
import scripts.schedule
import scripts.scrub
import scripts.submit
import train
from config import ConfigError
from config.provenance import checkout_files
from config.reading import resolve, sections, split_argv, unused
from config.reading.earlier import NEW_NAMES
from config.reading.grid import grid_cells, parse_grid
from config.reading.kinds import every_path
from config.reading.schedules import plan_pipeline
from lab.proof.verify.overrides import check_free, read_overrides, split_overrides
from lab.proof.verify.tiny_config import tiny_config

ROOT = pathlib.Path(__file__).parent.parent
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "lab" / "docs").glob("*.md")),
)
LANGUAGES = ("bash", "text", "python", "diff", "mermaid")
README_WORDS = 900


# ---- the parts of a page -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its first line, counted from 1. label: what follows the language: in
    docs/editing.md the edit that the commands need.
    """

    line: int
    language: str
    label: str
    text: str


@dataclass(frozen=True)
class Page:
    """prose: the page without its blocks, with as many lines."""

    name: str
    prose: str
    blocks: tuple[Block, ...]

    def spans(self) -> Iterator[str]:
        """The texts between backticks, outside of blocks."""
        yield from re.findall(r"`([^`\n]+)`", self.prose)


def read_page(name: str, text: str) -> Page:
    prose, blocks, opened = [], [], None
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*```(\w*) ?([\w-]*)$", line)
        if fence and opened is None:
            opened = (number + 1, fence[1], fence[2], [])
        elif fence and opened is not None:
            blocks.append(Block(*opened[:3], "\n".join(opened[3])))
            opened = None
        elif opened is not None:
            opened[3].append(line)
            prose.append("")
            continue
        prose.append("" if fence else line)
    assert opened is None, f"{name}: the block of line {opened and opened[0]} does not end"
    return Page(name, "\n".join(prose), tuple(blocks))


@cache
def pages() -> dict[str, Page]:
    return {
        str(path.relative_to(ROOT)): read_page(str(path.relative_to(ROOT)), path.read_text())
        for path in PAGES
    }


def own_column(page: Page) -> Page:
    """The glossary with the first column of its tables alone: the others are words of other programs."""
    lines = [line.split("|")[1] if line.startswith("|") else line for line in page.prose.splitlines()]
    return Page(page.name, "\n".join(lines), page.blocks)


@cache
def files() -> frozenset[str]:
    """The files and folders of the checkout, without what programs made."""
    names = checkout_files(ROOT)
    folders = {f"{folder}/" for name in names for folder in PurePosixPath(name).parents} - {"./"}
    return frozenset([*names, *folders])


@cache
def sources() -> str:
    """The text of all programs and settings."""
    suffixes = (".py", ".sh", ".sbatch", ".yaml", ".toml", ".txt")
    found = [name for name in sorted(files()) if name.endswith(suffixes) and name != "tests/test_docs.py"]
    return "\n".join((ROOT / name).read_text() for name in found)


@cache
def words_of_sources() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", sources()))


# ---- links -------------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def link_problems(page: Page) -> list[str]:
    """Links to files and headings that do not exist."""
    problems = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.prose):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page.name).parent / path if path else ROOT / page.name
        if not file.exists():
            problems.append(f"{page.name}: links to {target}")
        elif anchor and anchor not in {slug(h) for h in re.findall(r"^#+ (.*)$", file.read_text(), re.M)}:
            problems.append(f"{page.name}: links to {target}, which has no such heading")
    return problems


# ---- paths -------------------------------------------------------------------------------------------------

SUFFIXES = (
    ".py", ".sh", ".md", ".yaml", ".yml", ".txt", ".png", ".json", ".jsonl", ".csv", ".toml", ".sbatch",
    ".sha256",
)
USERS = ("runs/", "out/", "corpus/", "data/corpus")  # what a reader has or makes
PLACEHOLDER = re.compile(r"(^|[/.=_-])[A-Z]{1,}([/._-]|$)")  # runs/NAME, PREFIX.bin


def path_problems(page: Page) -> list[str]:
    """Paths that are neither in the checkout nor written by a program of it."""
    made = made_by_diffs(page)
    texts = [
        page.prose,
        *(block.text for block in page.blocks if block.language in ("text", "bash", "mermaid")),
    ]
    problems = []
    for word in re.findall(r"[\w./*{}~-]+", re.sub(r"https?://\S+", "", "\n".join(texts))):
        word = word.rstrip(".").removeprefix("./")
        word = re.sub(r"^(\.\./)+", "", word)
        if not is_path(word) or PLACEHOLDER.search(word) or word.startswith(USERS):
            continue
        if word not in made and not path_exists(word):
            problems.append(f"{page.name}: {word} does not exist")
    return problems


def is_path(word: str) -> bool:
    first, slash, _ = word.partition("/")
    in_the_checkout = bool(slash) and f"{first}/" in files()
    return in_the_checkout or word.endswith(SUFFIXES) or (len(word) > 2 and word.endswith("/"))


def path_exists(word: str) -> bool:
    first, slash, _ = word.partition("/")
    if slash and f"{first}/" in files():
        if "*" in word:
            return any(ROOT.glob(word))
        return word in files() or f"{word}/" in files()
    if "*" in word:
        return True
    # a bare name: of some file or folder of the checkout, or one that a program writes
    if any(name == word or name.endswith(f"/{word}") for name in files()):
        return True
    if word.endswith("/"):
        return f'"{word[:-1]}"' in sources() or f"/{word}" in sources()
    return word in sources()


def made_by_diffs(page: Page) -> set[str]:
    """Files that the page tells to make."""
    made = set()
    for block in page.blocks:
        if block.language == "diff":
            made |= set(re.findall(r"^\+\+\+ b/(\S+)", block.text, re.M))
    return made


# ---- keys and names ----------------------------------------------------------------------------------------

SECTIONS = "|".join(sections())
KEY = re.compile(rf"(?<![\w./-])(?:--)?((?:{SECTIONS})(?:\.[a-z]\w*)+)(?![\w/])")
SETTING = re.compile(rf"^(?:--)?((?:{SECTIONS})(?:\.[a-z]\w*)+) (\S+)$")


EARLIER_KEYS = "lab/docs/earlier-keys.md"  # has them beside those of today
EVERY_KEY = every_path(config.Config)
KEYS_AND_PARTS = {*EVERY_KEY, *(path.rpartition(".")[0] for path in EVERY_KEY)}


def key_problems(page: Page) -> list[str]:
    """Config keys that do not exist, and values that they do not take."""
    new = new_keys(page)
    blocks = [
        block.text
        for block in page.blocks
        if block.language in ("bash", "text") and not block.text.startswith("error: ")
    ]
    problems = []
    for text in [*page.spans(), *blocks]:
        for path in KEY.findall(text):
            path = re.sub(r"^model\.blocks\.\w+\.", "model.", path)  # what a kind of block has
            key = path.rpartition(".")[2]
            is_earlier = page.name == EARLIER_KEYS and path in NEW_NAMES
            is_known = path in KEYS_AND_PARTS or key in new or is_earlier
            if key not in ("py", "yaml") and not is_known:
                problems.append(f"{page.name}: {path} is no key")
    for span in page.spans():
        setting = SETTING.match(span)
        if setting and setting[1].rpartition(".")[2] not in new and not setting[2].isupper():
            refusals = [refusal_of(name, *setting.groups()) for name in ("llama3-tiny", "mixtral-tiny")]
            if all(refusals):
                problems.append(f"{page.name}: {span}: {refusals[0]}")
    return problems


def refusal_of(name: str, key: str, value: str) -> str:
    """The error for a key in a recipe; "" if it is taken."""
    try:
        resolve(name, None, [f"--{key}", value.strip('"')])
    except ConfigError as error:
        return str(error)
    return ""


@cache
def new_keys(page: Page) -> set[str]:
    """Keys that the page's diffs add."""
    return {
        key
        for block in page.blocks
        if block.language == "diff"
        for key in re.findall(r"^\+    (\w+): ", block.text, re.M)
    }


def name_problems(page: Page) -> list[str]:
    """Names of functions, classes and fields that no program has."""
    new = {
        word for block in page.blocks if block.language == "diff" for word in re.findall(r"\w+", block.text)
    }
    problems = []
    for span in page.spans():
        words = [word for word in span.split() if not is_path(word) and not PLACEHOLDER.search(word)]
        for name in re.findall(r"[A-Za-z_]\w*", " ".join(words)):
            is_name = "_" in name.strip("_") or re.search(r"[a-z][A-Z]", name)
            if is_name and name not in words_of_sources() and name not in new:
                problems.append(f"{page.name}: nothing is called {name}")
    return problems


# ---- commands ----------------------------------------------------------------------------------------------

PROGRAMS = ("python", "torchrun", "bash", "sbatch", "pip", "bevatron")
PARSERS = {
    "average": scripts.average.arguments, "bench": lab.benchmarks.command.make_parser,
    "compare": scripts.compare.__main__.arguments, "convert": scripts.convert.arguments,
    "corpus": scripts.corpus.arguments,
    "evaluate": scripts.evaluate.arguments, "generate": scripts.generate.arguments,
    "grid": scripts.grid.arguments,
    "launch": scripts.launch.arguments,
    "mutate": lab.proof.mutate.command.make_parser, "plan": scripts.plan.arguments,
    "preflight": scripts.preflight.arguments, "prepare_data": scripts.prepare_data.arguments,
    "reproduce": scripts.reproduce.arguments,
    "scaling": lab.scaling.command.arguments, "schedule": scripts.schedule.arguments,
    "scrub": scripts.scrub.arguments, "submit": scripts.submit.arguments,
}


@dataclass(frozen=True)
class Command:
    where: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def commands_of(page: Page, label: str = "") -> list[Command]:
    """The commands in the bash blocks with this label. (tests/test_editing.py has those of an edit.)"""
    found = []
    for block in page.blocks:
        if block.language != "bash" or block.label != label:
            continue
        lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
        for offset, line in enumerate(lines):
            if shlex.split(line, comments=True):
                found.append(Command(f"{page.name}:{block.line + offset}", line.strip()))
    return found


PLACEHOLDERS = (("runs/NAME", "runs/quickstart"), ("NAME", "llama3-tiny"), ("RUN", "runs/quickstart"))


def mentioned_commands(page: Page) -> list[Command]:
    """Commands in running text. NAME, RUN and the like stand for something."""
    found = []
    for span in page.spans():
        words = span.split()
        if words[0] in PROGRAMS and len(words) > 1:
            for name, stands_for in PLACEHOLDERS:
                span = span.replace(name, stands_for)
            found.append(Command(page.name, span))
    return found


def command_problems(command: Command) -> list[str]:
    """The errors of the command's own program for its words."""
    try:
        parse(command.words)
    except (ConfigError, ValueError, KeyError, AssertionError) as error:
        return [f"{command.where}: {command.text}: {error}"]
    except SystemExit:
        return [f"{command.where}: {command.text}: not understood by its program"]
    return []


def parse(words: list[str]) -> None:
    """Raises what the program raises for words that it does not take."""
    program, *rest = words
    if program == "torchrun":
        options = torch.distributed.run.get_args_parser().parse_args(rest)
        if options.module:
            parse_script(options.training_script, options.training_script_args)
            return
        parse_train(options.training_script, options.training_script_args, int(options.nproc_per_node))
    elif program == "pip":
        assert rest[0] == "install", rest
        for word in rest[1:]:
            assert word.startswith("-") or (ROOT / word).exists(), f"{word} does not exist"
    elif program == "bevatron":
        module = bevatron.__main__.COMMANDS[rest[0]][0]
        parse(["python", *(["train.py"] if module == "train" else ["-m", module]), *rest[1:]])
    elif program == "sbatch":
        script = next(i for i, word in enumerate(rest) if word.endswith((".sh", ".sbatch")))
        options = dict(zip(rest[:script:2], rest[1:script:2]))
        assert set(options) <= {"--nodes", "--gpus-per-node", "--array"}, rest
        assert (ROOT / rest[script]).exists(), rest
        world = int(options["--nodes"]) * int(options["--gpus-per-node"])
        if rest[script].endswith("preflight.sbatch"):
            scripts.preflight.arguments().parse_args(rest[script + 1 :])
            return
        is_sweep = rest[script].endswith("sweep.sbatch")  # its file comes first
        parse_recipe_or_words(rest[script + 1 + is_sweep :], world)
    elif program == "bash":
        assert (ROOT / rest[0]).exists(), f"{rest[0]} does not exist"
        subprocess.run(["bash", "-n", str(ROOT / rest[0])], check=True)
        if "recipes/" in rest[0]:
            parse_recipe_or_words(rest, 512)
    elif rest[0] == "train.py" and "--dry-run" in rest:
        from scripts import dry_run

        options, settings = dry_run.arguments().parse_known_args(rest[1:])
        resolve(*split_argv([options.name, *settings]))
    elif rest[0] == "train.py":
        parse_train(rest[0], rest[1:], 1)
    elif rest[:2] == ["-m", "pytest"]:
        selected = rest.pop(rest.index("-k") + 1) if "-k" in rest else ""
        files = [ROOT / word.split("::")[0] for word in rest[2:] if not word.startswith("-")]
        for file in files:
            assert file.exists(), f"{file.relative_to(ROOT)} does not exist"
        text = "".join(file.read_text() for file in files if file.is_file())
        for word in set(re.findall(r"\w+", selected)) - {"and", "or", "not"}:
            assert word in text, f"-k {word}: no test of {' '.join(rest[2:])} says it"
    else:
        assert rest[0] == "-m", f"not a command of ours: {rest}"
        parse_script(rest[1], rest[2:])


def parse_train(script: str, words: list[str], world: int) -> None:
    assert script == "train.py", script
    if "--list" in words:
        return
    name, file, rest = split_argv(words)
    asked = rest.index("--help") if "--help" in rest else len(rest)
    cfg = resolve(name, None, rest[:asked])  # a file is one of a run's folder
    if asked < len(rest):
        word = rest[asked + 1] if asked + 1 < len(rest) else ""
        assert word in (*sections(), "") or word in sources(), f"--help {word}: nothing speaks of it"
    elif file is None:
        plan_pipeline(cfg, world)
        unused.check_unused(cfg, world)


def parse_recipe_or_words(words: list[str], world: int) -> None:
    if words[0].endswith(".sh"):
        done = subprocess.run(
            ["bash", *words, "--words"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        words = done.stdout.split("\n")[:-1]
    parse_train("train.py", words, world)


def parse_script(module: str, words: list[str]) -> None:
    place = module.replace(".", "/")
    assert f"{place}.py" in files() or f"{place}/__main__.py" in files(), f"there is no {module}"
    if not words:  # the program as such is meant
        return
    if module == "scripts.verify":
        own, settings = split_overrides(words)
        options = lab.proof.verify.command.parse_options(own)
        overrides = read_overrides(settings, options.name)
        check_free(overrides)
        tiny_config(options.name, options.world, overrides)
        return
    if module == "scripts.launch":
        options = scripts.launch.arguments().parse_args(words)
        parse_train("train.py", options.words, options.nproc.most * options.nnodes)
        return
    options, rest = PARSERS[module.removeprefix("scripts.")]().parse_known_args(words)
    if module == "scripts.submit":
        return  # the rest are words of sbatch
    if module == "scripts.plan" and options.name:
        resolve(options.name, None, rest)
        return
    if module == "scripts.grid":
        for cell in grid_cells(parse_grid(options.over, rest), resolve):
            scripts.grid.check_cell(cell, options.nproc)
        return
    if module == "scripts.scaling" and "recipe" in options:
        resolve(options.recipe, None, rest)
        return
    assert not rest, f"{module} does not know {rest}"
    if module == "scripts.mutate" and options.draw is None:
        bugs = lab.proof.mutate.table.read_table()
        assert lab.proof.mutate.table.choose(bugs, options.only, options.world), (
            f"no planted bug has the words {options.only}"
        )


# ---- commands that are not run, and those that are run smaller ---------------------------------------------

NOT_RUN = {  # start of a command, or a word in it: why
    "models/Qwen2.5-0.5B-Instruct": "needs a model of the hub; tests/data/test_chat.py imports a tiny one",
    "--chat": "needs conversations, and the tokenizer of that model; tests/data/test_chat.py has some",
    "qwen-chats": "needs that model",
    "bash scripts/quickstart.sh": (
        "installs packages; the run and the sample that it makes are the first ones here"
    ),
    "out/ckpt.pt": "needs a file of nanoGPT; tests/checkpoint/test_foreign_nanogpt.py trains from one",
    "s3://": "needs a bucket; tests/test_stores.py has a server of one",
    "bash scripts/test.sh": "installs packages and runs the core of the tests",
    "bash scripts/scaling/": "installs packages and trains for minutes; tests/lab/scaling/ runs its parts",
    "python -m scripts.scaling fit": "needs a ladder; tests/lab/scaling/ fits",
    "python -m scripts.scaling next": "needs a ladder, and trains for minutes",
    "python -m scripts.scaling sweep": "trains for minutes; tests/lab/scaling/test_sweep.py sweeps",
    "python -m scripts.scaling systems": "trains for minutes; tests/lab/scaling/test_systems.py measures",
    "bash scripts/recipes/": "starts ranks on the GPUs of a node",
    "--nnodes": "needs two machines; tests/scripts/test_launcher.py has two nodes on one",
    "pip install": "installs; tests/test_install.py does, into a folder",
    "bevatron ": "needs an installation; tests/test_install.py runs the command",
    "python -m scripts.submit": "names a script of the checkout; tests/test_slurm.py submits to a stand-in",
    "sbatch ": "needs SLURM; tests/test_slurm.py runs the script with stand-ins",
    "python -m pytest": "runs tests, which are run anyway",
    "python -m scripts.bench": "a race of minutes; tests/lab/benchmarks/ runs its parts",
    "python -m scripts.mutate": "copies the checkout; tests/lab/proof/test_mutate.py runs it",
    "--precision": "trains for minutes; tests/lab/proof/test_precision.py runs it",
    "--coord": "trains for 15 CPU-seconds; tests/optim/test_mup.py runs it",
    "--layouts all": "proves hundreds of layouts",
    "--world 4": "4 ranks on two cores; tests/lab/proof/test_verify.py proves mixtures",
    "--world 8": "8 ranks on two cores",
    "--tasks": "needs the package lm-eval",
    "scripts.reproduce": "makes a git worktree of the checkout; tests/test_reproduce.py does, of a copy",
    "runs/tuned runs/soup": "needs longer runs; tests/scripts/test_average.py averages",
    "python -m scripts.grid": "trains several runs; tests/scripts/test_grid.py trains a grid",
    "runs/rates": "needs that grid",
    "python train.py --help": "prints most keys; the narrower forms are run",
}
TRAIN = {
    "--train.steps": "2", "--train.seq_len": "32", "--train.threads": "1", "--eval.batches": "1",
    "--eval.sample": "4", "--log.every": "1", "--data.path": "runs/data/corpus",
}
SMALLER = {  # words in a command: what is changed, so that it takes a moment
    "python train.py": TRAIN,
    "scripts.launch": TRAIN,
    "--train.ramp": {"--train.steps": "2", "--train.ramp": "16,16,64"},
    "--checkpoint.every": {"--checkpoint.every": "1"},
    "--train.steps 400": {"--train.steps": "3"},
    "--train.phases": {"--train.phases": '[{"after_steps": 1, "train.seq_len": 16, "optim.lr": 1e-4}]'},
    "--log.name trunk": {  # which has a branch of step 100, run as it is printed
        "--train.steps": "102",
        "--train.micro_batch": "2",
        "--train.global_batch": "2",
    },
    "scripts.average": {"--last": "2"},
    "0.7 runs": {"--data.path": "0.7 runs/data/corpus 0.3 runs/data/corpus", "--data.split": "60,30,10"},
    "tuned-hf": {"--data.tokenizer": "bytes", "--checkpoint.init_changes": "data.tokenizer"},
    "prepare_data": {"--tokenizer": "bytes", "--workers": "1"},
    "--fim": {"--input": "corpus/a.jsonl", "--tokenizer": "bpe-300"},
    "--data.fim_rate": {"--data.path": "runs/data/code"},
    "scripts.generate": {"--max-new-tokens": "4"},
    "scripts.verify": {"--layouts": "1"},
    "--run llama3-tiny": {"--pp": "2", "--micro": "4"},
    "llama3-8b --gpus": {"--parallel.tp": "8", "--parallel.pp": "1", "--parallel.cp": "1"},
    "llama3.1-405b": {
        "--parallel.tp": "8", "--parallel.pp": "16", "--parallel.cp": "1", "--parallel.schedule": "1f1b",
        "--parallel.zero": "1",
    },
}


def reason_not_to_run(command: Command) -> str | None:
    return next((why for words, why in NOT_RUN.items() if words in command.text), None)


def made_smaller(command: Command) -> list[str]:
    """The words, with those of SMALLER instead of theirs, or after them. Those of a branch, which is as small
    as its source, stay as they are printed.
    """
    words = command.words
    if "--checkpoint.branch" in words:
        return words
    for marker, changes in SMALLER.items():
        if marker not in command.text or "--list" in words or "--help" in words:
            continue
        for option, value in changes.items():
            if option in words:
                words[words.index(option) + 1] = value
            else:
                words += [option, value]
    return words


# ---- running -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A reader's folder: with text, with token files of it, and with the run of the quickstart."""
    return prepare(tmp_path_factory.mktemp("docs"))


def prepare(folder: pathlib.Path) -> pathlib.Path:
    (folder / "corpus").mkdir()
    stream = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrstuvwxyz ")
    documents = ["".join(stream.choice(letters, 200)) for _ in range(80)]
    (folder / "corpus" / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents)
    )
    (folder / "runs").mkdir()
    (folder / "configs").symlink_to(ROOT / "configs")
    for text in (
        "python -m scripts.prepare_data --input corpus/*.jsonl --tokenizer bytes --out runs/data/corpus",
        "python train.py quickstart",
    ):
        code, output = run(Command("the quickstart", text), folder)
        assert code == 0, output
    return folder


def run(command: Command, folder: pathlib.Path) -> tuple[int, str]:
    """(exit code, output) of a command in this folder."""
    words = made_smaller(command)
    if words[1:3] == ["-m", "scripts.launch"]:
        options = scripts.launch.arguments().parse_args(words[3:])
        place = ("--log.dir", str(folder / "runs"), "--data.path", str(folder / "runs/data/corpus"))
        end = job(folder, options.nproc.most, [*options.words, *place])
        return max(map(abs, end.codes)), "\n".join(end.logs)
    if words[0] == "torchrun":
        options = torch.distributed.run.get_args_parser().parse_args(words[1:])
        main = importlib.import_module(options.training_script).main
        end = job(
            folder / "job",
            int(options.nproc_per_node),
            options.training_script_args,
            before=lambda rank: os.chdir(folder),
            main=main,
        )
        return max(map(abs, end.codes)), "\n".join(end.logs)
    main = WITH_RANKS.get(words[2]) if len(words) > 2 else None
    return run_in_fork(words, folder) if main is None else run_here(main, words[3:], folder)


# Programs that start ranks run in this process, whose server of ranks is warm (durable/pool.py).
WITH_RANKS = {"scripts.verify": lab.proof.verify.command.main, "scripts.schedule": scripts.schedule.main}


def run_here(main: Callable[[list[str]], int], words: list[str], folder: pathlib.Path) -> tuple[int, str]:
    out, before = io.StringIO(), pathlib.Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out):
            code = main(words)
    finally:
        os.chdir(before)
    return code, out.getvalue()


def run_in_fork(words: list[str], folder: pathlib.Path) -> tuple[int, str]:
    """The program in a fork of this process, in which torch is loaded."""
    log = folder / "output.txt"
    pid = os.fork()
    if pid == 0:
        code = 1
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            os.chdir(folder)
            sys.path.insert(0, str(ROOT))
            sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
            code = run_as_main(words[1:])
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, log.read_text()


def run_as_main(words: list[str]) -> int:
    """`train.py ...` or `-m MODULE ...`, as the interpreter would run it, globs expanded as a shell does."""
    expanded: list[str] = []
    for word in words:
        names = sorted(pathlib.Path().glob(word)) if "*" in word else []
        expanded += map(str, names or [word])
    try:
        if expanded[0] == "-m":
            sys.argv = expanded[1:]
            runpy.run_module(expanded[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = expanded
            runpy.run_path(str(ROOT / expanded[0]), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    return 0


# ---- the tests ---------------------------------------------------------------------------------------------


def every(find: Callable[[Page], list[str]]) -> list[str]:
    """The problems of all pages."""
    problems = []
    for page in pages().values():
        problems += find(own_column(page) if page.name == "docs/glossary.md" else page)
    return problems


def test_links_lead_to_files_and_headings_and_every_page_is_linked():
    assert not every(link_problems)
    reached = {"README.md"}
    for _ in pages():  # pages that reached pages link to
        for name in tuple(reached):
            targets = re.findall(r"\]\(([\w./-]+\.md)", pages()[name].prose)
            reached |= {
                str((ROOT / name).parent.joinpath(target).resolve().relative_to(ROOT)) for target in targets
            }
    assert reached == set(pages())


@pytest.mark.slow
def test_every_path_exists_or_is_written_by_a_program():
    assert not every(path_problems)


def test_every_key_exists_and_takes_its_value():
    assert not every(key_problems)


def test_every_name_is_one_of_the_code():
    assert not every(name_problems)


def test_errors_are_quoted_as_they_are():
    quoted = [
        block.text
        for page in pages().values()
        for block in page.blocks
        if block.text.startswith("error: ") and page.name != "docs/editing.md"
    ]
    assert quoted
    for text in quoted:
        with pytest.raises(ConfigError) as error:
            resolve("llama3-tiny", None, [f"--{text.split(':')[1].strip()}", "2"])
        assert f"error: {error.value}" == text


def test_blocks_have_a_language():
    for page in pages().values():
        for block in page.blocks:
            assert block.language in LANGUAGES, f"{page.name}:{block.line}: {block.language!r}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


def test_the_tree_of_the_readme_has_every_folder():
    tree = next(block.text for block in pages()["README.md"].blocks if block.text.startswith("train.py "))
    named = {line.split()[0] for line in tree.splitlines()}
    folders = {
        name for name in files() if name.count("/") == 1 and name.endswith("/") and not name.startswith(".")
    }
    assert named == folders | {"train.py", "start.py", "phases.py", "services.py", "build.py"}


def test_a_name_that_a_page_places_in_a_file_is_defined_there():
    """`train_step` in `train.py`; `accumulate_grad`, `write_grad`, `kernels/grad.py`"""
    placed = re.compile(r"((?:`[A-Za-z_][\w.]*`(?:, | in | \())+)`([\w/]+\.py)`")
    for names, file in placed.findall((ROOT / "docs" / "architecture.md").read_text()):
        source = (ROOT / file).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                assert re.search(rf"\b(def|class) {part}\b", source), f"{file} defines no {name}"


def test_commands_are_understood():
    problems = []
    for page in pages().values():
        for command in (*commands_of(page), *mentioned_commands(page)):
            problems += command_problems(command)
    assert not problems


def all_commands() -> list[Command]:
    """Each once, in the order of the pages."""
    return list(
        {command.text: command for page in pages().values() for command in commands_of(page)}.values()
    )


def test_every_exemption_is_used():
    texts = [command.text for command in all_commands()]
    for words in (*NOT_RUN, *SMALLER):
        assert any(words in text for text in texts), f"no command has {words!r}"


COMMANDS_TO_RUN = [command for command in all_commands() if reason_not_to_run(command) is None]


def run_what_it_needs(command: Command, folder: pathlib.Path) -> None:
    """Runs the commands above it that make the folders which it names and which are not there: of the pages,
    a test run may take this one alone.
    """
    before = COMMANDS_TO_RUN[:COMMANDS_TO_RUN.index(command)]
    for place in dict.fromkeys(re.findall(r"\b(?:runs|out)/[\w-]+", command.text)):
        if (folder / place).exists():
            continue
        name = place.partition("/")[2]
        for earlier in before:
            if place in earlier.text or f"--log.name {name} " in f"{earlier.text} ":
                run_what_it_needs(earlier, folder)
                run(earlier, folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS_TO_RUN, ids=lambda command: command.text[:70])
def test_a_command_of_the_pages_runs(home, command):
    run_what_it_needs(command, home)
    code, output = run(command, home)
    assert code == 0, f"{command.where}: {command.text}\n{output[-3000:]}"


# ---- do these tests see a mistake? -------------------------------------------------------------------------

MISTAKES = {
    "[x](docs/archtecture.md)": link_problems,
    "[x](docs/architecture.md#the-life-of-a-stepp)": link_problems,
    "`parallel/wire/com.py` is the mouth": path_problems,
    "see parallel/wires/ for it": path_problems,
    "the file `schemas.py` has them": path_problems,
    "```text\nmodells/  the decoder\n```": path_problems,
    "`optim.learning_rate` is the peak": key_problems,
    "`--parallel.zero 4`": key_problems,
    "`train.dtype bf61`": key_problems,
    "```bash\npython train.py --parallel.tpp 2\n```": key_problems,
    "`finish_grad_reduction` waits": name_problems,
    "`ZeroHookss` does": name_problems,
}
WRONG_COMMANDS = (
    "python train.py lama3-tiny",
    "python train.py llama3-tiny --train.step 5",
    "python train.py llama3-tiny --help recomputation-of-parts",
    "python trains.py",
    "python -m scripts.launch --nprocs 4 -- llama3-tiny",
    "python -m scripts.launch --nproc 4 -- llama3-tiny --parallel.tp 3",
    "python -m scripts.launch --nproc 4 -- lama3-tiny",
    "bevatron trian llama3-tiny",
    "bevatron train lama3-tiny",
    "pip install -r requirement.txt",
    "torchrun --nproc-per-nodes 4 train.py llama3-tiny",
    "torchrun --nproc-per-node 4 train.py llama3-tiny --parallel.tp 3",
    "torchrun --nproc-per-node 4 -m scripts.generates runs/quickstart",
    "python -m scripts.plan llama3-8b --gpu-count 64 --cluster h100-ib",
    "python -m scripts.verify llama3-tiny --world 2 --layouts 3 --model.qk_norms true",
    "python -m scripts.verify llama3-tiny --world 2 --layouts 3 --parallel.tp 2",
    "python -m scripts.verify llama3-tiny --world 2 --layouts three",
    "python -m scripts.verify llama3-tiny --world 2 --layers 3",
    "python -m scripts.converts to-hf runs/quickstart out",
    "python -m scripts.convert to-hff runs/quickstart out",
    "python -m scripts.mutate --only 'a bug that nobody planted'",
    "python -m pytest tests/oracles",
    "bash scripts/quickstarts.sh",
    "sbatch --nodes 64 --gpus-per-node 8 scripts/slurm/train.sbatch scripts/recipes/llama3-9b.sh",
    "sbatch --node 64 --gpus-per-node 8 scripts/slurm/train.sbatch llama3-8b",
)


@pytest.mark.parametrize("text", MISTAKES)
def test_a_planted_mistake_is_found(text):
    assert MISTAKES[text](read_page("README.md", text))


@pytest.mark.parametrize("text", WRONG_COMMANDS)
def test_a_wrong_command_is_found(text):
    try:
        assert command_problems(Command("here", text))
    except (subprocess.CalledProcessError, StopIteration, IndexError) as error:
        assert error


@pytest.mark.slow
def test_a_command_that_fails_is_found(home):
    assert run(Command("here", "python -m scripts.generate runs/none"), home)[0] == 2
    mended = "python train.py llama3-tiny --data.path runs/data/none --log.name wrong"
    assert run(Command("here", mended), home)[0] == 0  # SMALLER gives it data
    assert run_in_fork(["python", "train.py", "llama3-tiny", "--data.path", "runs/data/none"], home)[0] == 2


def test_train_is_the_program_that_is_run():
    assert pathlib.Path(train.__file__).parent == ROOT
