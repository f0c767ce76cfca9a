"""How we read the tokenizers that packages ship: a table for lab/docs/tokenizers.md.

    PYTHONPATH=.:tests python tests/tokenizer_table.py FILE[@EOD] ...

FILE: what --tokenizer takes. EOD: what --eod chooses, where the files do not say it.
"""

import sys

import numpy as np

from config import ConfigError
from data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer

# code, scripts without spaces, letters of several characters, white space: what tokenizers lose
PROBES = (
    "def f(x):\n    return  x\n", "日本語の文章。", "Привет, мир 👋🏽", "naïve café — “quoted”",
    "tab\tand\r\nlines\n\n", "  two  spaces  ",
)
HEAD = ("tokenizer", "ids", "ends with", "control tokens", "made by text", "texts lost")


def control_tokens(tok: Tokenizer) -> list[int]:
    """Ids that direct a model."""
    return [number for number in tok.contract.control if number != tok.contract.unknown]


def made_by_text(tok: Tokenizer) -> list[int]:
    """Those of them that a text makes which spells one of them."""
    control = control_tokens(tok)
    is_json = isinstance(tok, JsonTokenizer)
    get_name = tok.processor.id_to_token if is_json else tok.processor.id_to_piece
    texts = [f"before {get_name(number)} after" for number in control]
    found = [np.isin(control, ids) for ids in tok.encode_batch(texts)]
    return [] if not found else np.array(control)[np.any(found, axis=0)].tolist()


def lost(tok: Tokenizer) -> list[str]:
    return [text for text in PROBES if tok.decode(tok.encode(text)) != text]


def make_counts_row(file: str, eod: str | None) -> tuple[str, ...]:
    name = "/".join(file.split("/")[-2:])
    try:
        tok = load_tokenizer(file, eod)
    except ConfigError as error:
        return name, str(error).partition(": ")[2].partition("; ")[0]
    counts = len(control_tokens(tok)), len(made_by_text(tok))
    lost_texts = f"{len(lost(tok))} of {len(PROBES)}"
    return name, f"{tok.vocab:,}", f"`{tok.contract.end.text}`", *map(str, counts), lost_texts


def main(words: list[str]) -> None:
    rows = [HEAD, ("---",) * len(HEAD)]
    for word in words:
        file, _, eod = word.partition("@")
        row = make_counts_row(file, eod or None)
        rows.append((*row, *[""] * (len(HEAD) - len(row))))
    print(*(f"| {' | '.join(row)} |" for row in rows), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
