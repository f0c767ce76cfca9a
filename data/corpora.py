"""Public corpora by name (configs/corpora.yaml): which files they have, and whether these are still the same.

The first listing is written to OUT/corpus.json with what was asked for. Later starts compare both with it, so
that data is never made half of one and half of another. Where a store tells no sha256, it is added when a
corpus is finished.
"""
import difflib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from config import ConfigError, Tree
from config.reading import CONFIG_FOLDER
from config.strict import read_yaml
from data.documents import DocumentPiece
from data.fetched import changed, matching_names
from data.indexed import file_sha256
from data.prepare import write_atomically
from data.remote import RemoteError, is_url, open_folder

HUB = "hf://datasets"
LOCAL = "file://"
RECORD = "corpus.json"  # in OUT
TOKENIZER = "tokenizer"  # folder in OUT of one that is trained for it
CORPORA, REVISIONS = "corpora", "revisions"  # options of a request that never change


@dataclass(frozen=True)
class Corpus:
    """A row of configs/corpora.yaml, which describes the fields."""
    name: str
    repo: str
    revision: str
    files: str
    text: str
    license: str
    tokens: float
    source: str
    score: str | None = None
    held_out: str = ""

    def url(self, base: str | None) -> str:
        """Return the folder of its files: at the hub, or below `base`, a folder or a URL."""
        if base is None:
            return f"{HUB}/{self.repo}@{self.revision}"
        root = base.rstrip("/") if is_url(base) else f"{LOCAL}{os.path.abspath(base)}"
        return f"{root}/{self.repo}"


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus as it was listed."""
    path: str  # in the repo
    url: str
    size: int  # bytes
    version: str  # as the store tells it
    sha256: str  # if known

    def piece(self) -> DocumentPiece:
        """Return the file as the input of a shard."""
        return DocumentPiece(
            kind="url", path=self.url, start=0, stop=0, size=self.size,
            version=self.version, sha256=self.sha256,
        )


@dataclass
class CorpusRecord:
    """The content of OUT/corpus.json."""
    request: Tree  # {option: value} that decides the data
    files: dict[str, list[CorpusFile]]  # by corpus, in the order in which they are read
    reports: dict[str, Tree]  # of the corpora that are finished

    def write(self, out: Path) -> None:
        """Replace the file. Raises OSError."""
        write_atomically(out / RECORD, json.dumps(asdict(self), indent=1).encode())


def read_corpora() -> dict[str, Corpus]:
    """Return the corpora of configs/corpora.yaml by name. Raises ConfigError."""
    path = CONFIG_FOLDER / "corpora.yaml"
    corpora: dict[str, Corpus] = {}
    for name, row in read_yaml(path).items():
        try:
            corpora[name] = Corpus(name=name, **row)
        except TypeError as error:
            raise ConfigError(f"{path}: {name}: {str(error).rpartition('__init__() ')[2]}") from None
    return corpora


def chosen_corpora(words: Sequence[str], known: Mapping[str, Corpus]) -> dict[str, float]:
    """Return {name: weight} of words such as dclm:0.3. One corpus needs no weight. Raises ConfigError."""
    weights: dict[str, float] = {}
    for word in words:
        name, colon, text = word.partition(":")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{name}: no such corpus; {hint}")
        if name in weights:
            raise ConfigError(f"{name}: named twice; give it once, with the sum of the weights")
        if not colon and len(words) > 1:
            raise ConfigError(f"{name}: a mixture needs the weight of each corpus, as in {name}:0.5")
        try:
            weights[name] = float(text) if colon else 1.0
        except ValueError:
            raise ConfigError(f"{word}: expected NAME:WEIGHT, such as {name}:0.5") from None
        if not 0 < weights[name] <= 1:
            raise ConfigError(f"{word}: the weight must be above 0 and at most 1, as a share of the tokens")
    total = sum(weights.values())
    if not math.isclose(total, 1, abs_tol=1e-6):
        raise ConfigError(f"{' '.join(words)}: the weights sum to {total:g}, not to 1")
    return weights


# ---- listing -----------------------------------------------------------------------------------------------

def opened_record(
    out: Path, request: Tree, corpora: Sequence[Corpus], base: str | None, *, most: int | None = None
) -> CorpusRecord:
    """Return the record of OUT with its files where they are now: of a new one the first `most` files of each
    corpus. While nothing of OUT is finished, options that say how files are read may still change. Raises
    ConfigError if OUT is something else, or if one of its files has changed."""
    old = read_record(out)
    if old is None:
        old = CorpusRecord({}, {each.name: [] for each in corpora}, {})
    else:
        check_request(out, old, request)
    is_same = old.request == request
    files: dict[str, list[CorpusFile]] = {}
    for corpus in corpora:
        known = {file.path: file for file in old.files[corpus.name]}
        listed = listed_files(corpus, base, most, list(known) if is_same else None)
        if is_same:
            found = {file.path: file for file in listed}
            files[corpus.name] = [same_file(file, found.get(path)) for path, file in known.items()]
        else:
            files[corpus.name] = [
                same_file(known[file.path], file) if file.path in known else file for file in listed
            ]
    record = CorpusRecord(request, files, old.reports)
    if not is_same:
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(out / TOKENIZER, ignore_errors=True)
        record.write(out)
    return record


def check_request(out: Path, old: CorpusRecord, request: Tree) -> None:
    """Raise ConfigError if what is asked for cannot go into OUT."""
    for option in sorted({*old.request, *request}) if old.reports else (CORPORA, REVISIONS):
        before, now = old.request.get(option), request.get(option)
        if before != now:
            raise ConfigError(f"--out: {out} holds a corpus with {option} {shown(before)}, and {shown(now)} "
                              "is asked for; choose another --out, or remove it")


def listed_files(
    corpus: Corpus, base: str | None, most: int | None = None, paths: Sequence[str] | None = None
) -> list[CorpusFile]:
    """Return the files of a corpus: the first `most` of them, or those at `paths`.

    Their order is that of a hash of their names, so any first ones are a fair sample.

    Raises ConfigError if they cannot be listed.
    """
    url = corpus.url(base)
    try:
        folder = open_folder(url, "--from")
        states = matching_names(folder, corpus.files)
        if paths is None:
            paths = [name for name in states if not fnmatchcase(name, corpus.held_out)]
            paths.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        found = {name: states.get(name) or folder.state(name) for name in paths[:most]}
    except RemoteError as error:
        raise ConfigError(f"{corpus.name}: cannot be listed: {error}; check the network, or give a copy with "
                          f"--from FOLDER_OR_URL, which holds {corpus.repo}/{corpus.files}") from None
    if not states or not found:
        raise ConfigError(f"{corpus.name}: {url} has no file {corpus.files}; give a folder or URL with "
                          f"--from that holds {corpus.repo}/{corpus.files}")
    return [
        CorpusFile(name, f"{url}/{name}", state.size, state.version, state.sha256)
        for name, state in found.items() if state is not None
    ]


def shown(value: object) -> str:
    return "none" if value is None else str(value)


def read_record(out: Path) -> CorpusRecord | None:
    """Return the record of a folder, or None if it is empty or new. Raises ConfigError if it holds something
    else."""
    path = out / RECORD
    if not path.exists():
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out: {out} is a file; name a folder")
        others = sorted(os.listdir(out)) if out.is_dir() else []
        if others and others != ["lock"]:
            raise ConfigError(f"--out: {out} holds {others[0]}, but no corpus; choose another folder")
        return None
    try:
        tree = json.loads(path.read_bytes())
        files = {name: [CorpusFile(**row) for row in rows] for name, rows in tree["files"].items()}
        return CorpusRecord(tree["request"], files, tree["reports"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path}: was not written by scripts.corpus; choose another --out") from None


def same_file(old: CorpusFile, new: CorpusFile | None) -> CorpusFile:
    """Return a file where it lies now. Raises ConfigError if it is not the one of the first listing.

    Versions of different stores say nothing. A local file that was only touched is read to see.
    """
    if new is None:
        raise ConfigError(changed(old.url, "it is gone"))
    if new.size != old.size:
        raise ConfigError(changed(new.url, f"{old.size:,} bytes then, {new.size:,} now"))
    digest = new.sha256
    if old.sha256 and not digest and new.version != old.version and new.url.startswith(LOCAL):
        digest = file_sha256(new.url.removeprefix(LOCAL))
    if old.sha256 and digest:
        if digest != old.sha256:
            raise ConfigError(changed(new.url, f"sha256 {old.sha256[:12]} then, {digest[:12]} now"))
    elif new.url == old.url and new.version != old.version:
        raise ConfigError(changed(new.url, f"version {old.version} then, {new.version} now"))
    return replace(new, sha256=digest or old.sha256)


def with_digests(files: list[CorpusFile], fetched: list[Tree]) -> list[CorpusFile]:
    """Return the files with the sha256 of those that were fetched."""
    digests = {row["path"]: row["sha256"] for row in fetched}
    return [replace(file, sha256=digests.get(file.url, file.sha256)) for file in files]
