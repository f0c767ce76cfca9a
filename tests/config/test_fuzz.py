"""Any bytes in a config file, and any settings, are taken or refused in one line: never a traceback, and
never for long."""

import dataclasses
import random
import time
import typing

import pytest

import config.reading
from config import ConfigError
from config.reading import recipes
from config.reading.kinds import every_path
from config.reading.schedules import plan_pipeline
from config.tree import field_types, has_path

VALID = """\
# a run
model: {preset: llama3-tiny, layers: 2, mlp: {width: 48}}
train:
  steps: 12
  seq_len: 16
  global_batch: 8
  dtype: bf16
  ramp: null
optim: {name: adamw, lr: 1e-3, warmup: 2}
data: {path: "1 text", doc_mask: true}
parallel: {tp: 2, zero: 1}
log: {name: fuzz}
"""
PIECES = (  # what YAML reads in its own way
    b"!!python/object/apply:os.system [id]", b"&a", b"*a", b"- ", b": ", b"? ", b"|", b">", b"{", b"}", b"[",
    b"]", b"'", b'"', b"%YAML 9", b"---", b"...", b"<<: ", b"0x", b"1e999", b"-.inf", b".nan", b"12:30:45",
    b"2020-99-99", b"no", b"~", b"017", b"\t", b"\n\n", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf",
    b"\xe2\x80\xa8",
    b"9" * 400, b"!!binary ", b"!!set ", b"!<x>", b"#", b",", b"@", b"`",
)
FILES = 600
SETTINGS = 600
SLOW_S = 20.0  # of processor time, of all of them


def damaged(text: bytes, draw: random.Random) -> bytes:
    """One to four changes: a byte, a piece put in, a stretch taken out or repeated."""
    data = bytearray(text)
    for _ in range(draw.randint(1, 4)):
        place, how = draw.randrange(len(data)), draw.randrange(4)
        if how == 0:
            data[place] = draw.randrange(256)
        elif how == 1:
            data[place:place] = draw.choice(PIECES)
        elif how == 2:
            del data[place:place + draw.randint(1, 20)]
        else:
            data[place:place] = data[place:place + draw.randint(1, 40)]
        data = data or bytearray(b"a")
    return bytes(data)


def outcome(resolve):
    """"taken" or "refused". Raises whatever else is raised."""
    try:
        resolve()
        return "taken"
    except ConfigError as error:
        assert str(error) and "\n" not in str(error), repr(str(error))
        return "refused"


def test_any_damage_of_a_file_is_one_line(tmp_path):
    file, draw = tmp_path / "c.yaml", random.Random(4)
    file.write_text(VALID)
    assert outcome(lambda: config.reading.resolve(None, str(file), [])) == "taken"
    began, seen = time.process_time(), []
    for number in range(FILES):
        data = damaged(VALID.encode(), draw)
        file.write_bytes(data)
        try:
            seen.append(outcome(lambda: config.reading.resolve(None, str(file), [])))
        except Exception as error:
            pytest.fail(f"number {number}, {data!r}: {error!r}")
    assert seen.count("taken") > 10 and seen.count("refused") > FILES / 2
    assert time.process_time() - began < SLOW_S


NUMBERS = ("-1", "0", "1", "2", "3", "7", "64", "1000003", "1e400", "-0.5", "0.5", "1e-9", "nan", "inf",
           "9" * 400)
WORDS = ("none", "true", "false", "auto", "", " ", "x", "[1, 2]", "{a: 1}", "1 text", "a/../b", "fp8",
         "bf16")


EVERY_PATH = every_path(config.Config)


def drawn_settings(draw: random.Random, name: str) -> list[str]:
    """One to four keys with values that are theirs, a number's, or a word's. Some are of parts that the
    recipe does not have."""
    cfg = config.reading.resolve(name, None, [])
    words = []
    for _ in range(draw.randint(1, 4)):
        section = draw.choice(dataclasses.fields(config.Config)).name
        paths = [path for path in EVERY_PATH if path.startswith(f"{section}.")]
        path = draw.choice([path for path in paths if has_path(cfg, path)] if draw.random() < 0.9 else paths)
        part, key = EVERY_PATH[path]
        literals = typing.get_args(field_types(part)[key])
        values = [str(value) for value in literals if isinstance(value, (str, int))] or [*NUMBERS]
        pool = draw.choice((values, NUMBERS, WORDS))
        words += [f"--{path}", draw.choice(pool)]
    return words


def test_any_settings_are_taken_or_refused_in_one_line():
    draw = random.Random(7)
    began, seen = time.process_time(), []
    for number in range(SETTINGS):
        name, world = draw.choice(recipes()), draw.choice((1, 2, 8, 48))
        words = drawn_settings(draw, name)
        try:
            seen.append(outcome(lambda: plan_pipeline(config.reading.resolve(name, None, words), world)))
        except Exception as error:
            pytest.fail(f"number {number}, {name} on {world} ranks with {words}: {error!r}")
    assert seen.count("taken") > 20 and seen.count("refused") > SETTINGS / 3
    assert time.process_time() - began < 3 * SLOW_S
