"""Meaning of token ids, for all code that writes or reads them: prepare_data, runs, evaluation, generation.

    TokenizerContract   describes a tokenizer: fingerprint, number of ids, end-of-document token and the files
                        that name it, ids that text never produces
    FileContract        describes token files: dtype, documents, and the tokenizer that made them

A published tokenizer names its end token in several files: tokenizer_config.json and special_tokens_map.json
by its text, config.json and generation_config.json by its id, or by a list of all ids that stop generation
(Llama 3, Qwen, Gemma, Phi). Files agree if they all name a common id; otherwise the user chooses
(prepare_data --eod, data.eod).
"""
import json
import pathlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from config import ConfigError, Tree

TOKENIZER_CONFIG = "tokenizer_config.json"
# files that name special tokens; if several agree, the first one is cited
SETTINGS = (TOKENIZER_CONFIG, "special_tokens_map.json", "config.json", "generation_config.json")
EOD_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")  # of a tokenizer.json without such a file
CHOOSE = "choose with --eod TOKEN_OR_ID (of a run: data.eod)"
DIGEST_SHOWN = 12  # fingerprint characters shown in messages
WIDEST_U16 = 1 << 16  # number of ids that fit in two bytes
# written in angle or square brackets, as in <|user|>, <think>, [INST], "▁<PRE>"
MARKUP = re.compile(r"[\s▁]*(<\S.*>|\[\S.*\])[\s▁]*", re.DOTALL)
# which Gemma's tokenizers have as words
HTML = re.compile(r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|[bisu]|su[bp]"
                  r"|code|p|ul|ol|li|a|div|span|br|hr|img|pre)>")


@dataclass(frozen=True)
class SpecialToken:
    """A token with a special meaning, and the files that name it."""
    id: int
    text: str
    named_by: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.text!r} (id {self.id})"


@dataclass(frozen=True)
class TokenizerContract:
    """The meaning of a tokenizer's ids.

    vocab: ids are below it. end: ends a document. start, pad: as named in the files; informative only.
    unknown: the id for text without another id, or None if all text has ids. control: ids text never
    produces.
    model_vocab: vocab_size of a config.json next to the tokenizer, which describes a model and is ignored.
    """
    name: str
    fingerprint: str
    vocab: int
    end: SpecialToken
    start: SpecialToken | None = None
    pad: SpecialToken | None = None
    unknown: int | None = None
    control: frozenset[int] = frozenset()
    model_vocab: int | None = None

    @property
    def label(self) -> str:
        """Name and shortened fingerprint, for messages."""
        return f"{self.name} ({self.fingerprint[:DIGEST_SHOWN]})"

    def record(self) -> Tree:
        """Return the fields stored in PREFIX.json."""
        found: Tree = {"name": self.name, "fingerprint": self.fingerprint, "vocab": self.vocab}
        for kind, token in (("eod", self.end), ("bos", self.start), ("pad", self.pad)):
            if token is not None:
                found[kind] = token.id
                found[f"{kind}_text"] = token.text
                found[f"{kind}_named_by"] = list(token.named_by)
        return found

    def lines(self) -> dict[str, str]:
        """Return the lines that prepare_data prints, by label."""
        grown = ""
        if self.model_vocab is not None and self.model_vocab > self.vocab:
            grown = (f"; config.json's vocab_size of {self.model_vocab:,} is a model's, and model.vocab asks "
                     "for it")
        found = {
            "tokenizer": f"{self.label}, {self.vocab:,} ids in {np.dtype(get_dtype(self.vocab)).name}{grown}",
            "end": f"{self.end} ends a document, as {' and '.join(self.end.named_by)} say"
                   f"{'s' if len(self.end.named_by) == 1 else ''}",
        }
        if self.start is not None:
            found["start"] = (f"{self.start}, as {' and '.join(self.start.named_by)} says; it is not in the "
                              "files: a run puts it before documents where the tokenizer or data.bos says so")
        if self.pad is not None:
            found["pad"] = f"{self.pad}, as {' and '.join(self.pad.named_by)} says; it is not in the files"
        return found


@dataclass(frozen=True)
class FileContract:
    """The ids in a file, as it declares them. `made_with` is the tokenizer's record in PREFIX.json."""
    path: str
    dtype: np.dtype
    documents: int
    made_with: Tree | None = None

    def check(self, tok: TokenizerContract | None) -> None:
        """Raise ConfigError if the tokenizer cannot have made the file."""
        if tok is None:
            return
        if self.made_with and self.made_with["fingerprint"] != tok.fingerprint:
            label = f"{self.made_with['name']} ({self.made_with['fingerprint'][:DIGEST_SHOWN]})"
            prefix = self.path.removesuffix(".bin").removesuffix(".idx")
            raise ConfigError(f"data.tokenizer: {tok.label} is not {label}, with which {self.path} was made; "
                              f"put it into {prefix}.tokenizer, or prepare the data again")
        if self.dtype.itemsize == 2 and tok.vocab > WIDEST_U16:
            raise ConfigError(f"{self.path}: holds ids of 16 bits, and the tokenizer {tok.label} makes ids "
                              f"up to {tok.vocab - 1:,}: larger ones have wrapped, or the width is another; "
                              "make the file again with 32 bits, or name its tokenizer in data.tokenizer")


def get_dtype(vocab: int) -> str:
    """Return the dtype for ids below `vocab` by Megatron's rule, which uses i4 and never u4."""
    return "<u2" if vocab < 65500 else "<i4"


def check_same_tokenizer(known: Iterable[tuple[str, TokenizerContract]], key: str = "data.path") -> None:
    """Raise ConfigError naming `key` if two of the (data set name, tokenizer) pairs differ."""
    first_name, first = "", None
    for name, tok in known:
        first_name, first = (first_name, first) if first else (name, tok)
        if tok.fingerprint != first.fingerprint:
            raise ConfigError(f"{key}: {first_name} was made with tokenizer {first.label}, "
                              f"{name} with {tok.label}; prepare them with the same one")


def check_stored(path: str, stored: TokenizerContract, wanted: TokenizerContract, *, requested: str,
                 eod: str | None, folder: str) -> None:
    """Raise ConfigError if `wanted`, selected by data.tokenizer and data.eod, differs from the tokenizer
    stored with the data, in `folder`."""
    if wanted.fingerprint == stored.fingerprint:
        return
    if eod is not None and wanted.end.id != stored.end.id:
        raise ConfigError(f"data.eod: {wanted.end} is requested, but documents of {path} end with "
                          f"{stored.end}; leave data.eod out, or prepare the data again with --eod")
    raise ConfigError(f"data.tokenizer: {requested} is {wanted.label}, but {path} was made with "
                      f"{stored.label}; prepare the data again with --tokenizer {requested}, or set "
                      f"data.tokenizer {folder}")


# ---- special tokens ----------------------------------------------------------------------------------------

class Vocabulary(NamedTuple):
    """The tokens in a tokenizer's native file."""
    path: pathlib.Path
    size: int  # ids are below it
    get_id: Callable[[str], int | None]
    get_text: Callable[[int], str | None]  # None if no token has this id

    def token(self, token_id: int, named_by: Iterable[str]) -> SpecialToken:
        return SpecialToken(token_id, self.get_text(token_id) or "", tuple(named_by))


class Named(NamedTuple):
    """The ids that one file names for a special token."""
    file: str
    said: str  # quoted from the file
    ids: tuple[int, ...]  # those that the tokenizer has


def read_settings(folder: pathlib.Path, files: dict[str, bytes]) -> dict[str, Tree]:
    """Return {name: content} for the SETTINGS files that are present. Raises ConfigError naming a file that
    is not a JSON object."""
    settings: dict[str, Tree] = {}
    for name in SETTINGS:
        if name not in files:
            continue
        try:
            content = json.loads(files[name])
        except ValueError as error:
            raise ConfigError(f"{folder / name}: not JSON ({error})") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{folder / name}: holds no object of JSON; restore it, or remove it")
        settings[name] = content
    return settings


def get_parts(content: Tree) -> list[Tree]:
    """Return the parts of a file that may name special tokens; a vision model has a text_config."""
    inner = content.get("text_config")
    return [content, inner] if isinstance(inner, dict) else [content]


def named_tokens(kind: str, settings: dict[str, Tree], vocabulary: Vocabulary) -> list[Named]:
    """Return the tokens that each file names as special, for the kind "eos", "bos" or "pad"."""
    results: list[Named] = []
    for file, content in settings.items():
        for part in get_parts(content):
            text = part.get(f"{kind}_token")
            text = text.get("content") if isinstance(text, dict) else text
            if isinstance(text, str):
                token_id = vocabulary.get_id(text)
                ids = () if token_id is None else (token_id,)
                results.append(Named(file, f"{kind}_token {text!r}", ids))
            said = part.get(f"{kind}_token_id")
            several = said if isinstance(said, list) else [said]
            numbers = [number for number in several if isinstance(number, int)]
            if numbers:
                ids = tuple(number for number in numbers if vocabulary.get_text(number) is not None)
                results.append(Named(file, f"{kind}_token_id {said}", ids))
    return results


def first_named(kind: str, settings: dict[str, Tree], vocabulary: Vocabulary) -> SpecialToken | None:
    """Return the special token named by the first file that names one, or None."""
    for named in named_tokens(kind, settings, vocabulary):
        if named.ids:
            return vocabulary.token(named.ids[0], [named.file])
    return None


def end_token(vocabulary: Vocabulary, settings: dict[str, Tree], own: int | None,
              chosen: str | None) -> SpecialToken:
    """Return the end-of-document token.

    `own` is the one in a sentencepiece model, `chosen` the value of --eod or data.eod. Raises ConfigError if
    the files contradict each other, name a token that the tokenizer lacks, or name none.
    """
    path = vocabulary.path
    named = named_tokens("eos", settings, vocabulary)
    if own is not None:
        named.insert(0, Named(path.name, f"its end of sentence {vocabulary.get_text(own)!r}", (own,)))
    if chosen is not None:
        token = vocabulary.token(chosen_id(vocabulary, chosen), ["--eod"])
        if own is not None and token.id != own:
            raise ConfigError(f"--eod: {path.name} itself ends documents with {vocabulary.token(own, ())}, "
                              f"not with {token}; choose that one, or make a tokenizer.json of it")
        return token

    for file, said, ids in named:
        if not ids:
            raise ConfigError(f"{path.parent / file}: {said} is not a token of {path.name}, which has "
                              f"the ids 0 to {vocabulary.size - 1}; correct it, or {CHOOSE}")
    if not named:
        return usual_end(vocabulary)

    common = [token_id for token_id in named[0].ids if all(token_id in other.ids for other in named)]
    if common:
        return vocabulary.token(common[0], dict.fromkeys(one.file for one in named))
    views = [f"{file} ({said}: {', '.join(str(vocabulary.token(each, ())) for each in ids)})"
             for file, said, ids in named]
    raise ConfigError(f"{path.parent}: its files name different tokens as the end of a document: "
                      f"{'; '.join(views)}; {CHOOSE}, or correct the files")


def usual_end(vocabulary: Vocabulary) -> SpecialToken:
    """Return the only token of EOD_NAMES in a tokenizer. Raises ConfigError if it has none or several."""
    path = vocabulary.path
    ids = [vocabulary.get_id(name) for name in EOD_NAMES]
    known = [vocabulary.token(token_id, [path.name]) for token_id in ids if token_id is not None]
    if not known:
        raise ConfigError(f"{path}: no end-of-document token; put {TOKENIZER_CONFIG} with eos_token beside "
                          f"it, or {CHOOSE}")
    if len(known) > 1:
        raise ConfigError(f"{path}: has several tokens that may end a document "
                          f"({', '.join(map(str, known))}), and no file beside it says which; {CHOOSE}")
    return known[0]


def chosen_id(vocabulary: Vocabulary, chosen: str) -> int:
    """Return the id of a token given by its text or its id. Raises ConfigError."""
    token_id = int(chosen) if chosen.isdecimal() else vocabulary.get_id(chosen)
    if token_id is None or vocabulary.get_text(token_id) is None:
        raise ConfigError(f"--eod: {chosen!r} is not a token of {vocabulary.path}, which has the ids "
                          f"0 to {vocabulary.size - 1}; give the text or the id of one")
    return token_id


def set_end_token(files: dict[str, bytes], end: SpecialToken) -> dict[str, bytes]:
    """Write the user's choice into each file that names an end token, so that copies agree. A list that
    already contains it stays."""
    settings = read_settings(pathlib.Path(), files)
    settings.setdefault(TOKENIZER_CONFIG, {})
    changed = dict(files)
    for name, content in settings.items():
        if name == TOKENIZER_CONFIG:
            content["eos_token"] = end.text
        for part in get_parts(content):
            if "eos_token" in part:
                part["eos_token"] = end.text
            said = part.get("eos_token_id")
            if said is not None and not (isinstance(said, list) and end.id in said):
                part["eos_token_id"] = end.id
        changed[name] = json.dumps(content, ensure_ascii=False, indent=2).encode()
    return changed


# ---- control tokens ----------------------------------------------------------------------------------------

def is_markup(text: str) -> bool:
    """Return whether an added token looks like markup that directs the model, rather than text. Many files do
    not flag such tokens as special: <think>, <｜User｜>, <tool_call>."""
    return MARKUP.fullmatch(text) is not None and HTML.fullmatch(text) is None


def spelled_tokens(
    control: dict[int, str], encode_batch: Callable[[list[str]], list[np.ndarray]]
) -> list[int]:
    """Return the control tokens of {id: text} that ordinary text produces by spelling them."""
    encoded = encode_batch(list(control.values()))
    return [token_id for token_id, ids in zip(control, encoded) if token_id in ids]


def check_words(place: pathlib.Path | str, words: Iterable[int], control: dict[int, str]) -> None:
    """Raise ConfigError naming `place` if any of the control tokens {id: text} are plain words."""
    for token_id in sorted(words):
        raise ConfigError(f"{place}: text that spells {control[token_id]!r} makes its id {token_id}, like "
                          "any word, so that it cannot mark the end of a document or a turn; use another "
                          "token, or add it to tokenizer.json as a special one")
