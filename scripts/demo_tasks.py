"""Writes the tasks of configs/tasks, which demonstrate eval.tasks; they measure nothing that matters.

    python -m scripts.demo_tasks [FOLDER]

python.jsonl: completions of a line of Python, which the quickstart's model learns. arithmetic.jsonl: sums and
differences, which it does not. Both are generated from the templates below with a seed.
"""
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

SEED = 7
EXAMPLES = 100
NAMES = ("size", "name", "value", "path", "line", "count", "result", "key", "data", "index")
WORDS = (  # answers of equal length: an untrained model would prefer short ones
    ("None", "True", "self", "else", "with", "from", "pass", "elif"),
    ("range", "raise", "class", "while", "break", "yield", "False"),
    ("import", "return", "except", "lambda", "global", "assert"),
)
# (text, the word that follows); N is a name
TEMPLATES = (
    ("for N in ", "range"),
    ("[N for N in ", "range"),
    ("if N is ", "None"),
    ("if N is not ", "None"),
    ("while ", "True"),
    ("N if N ", "else"),
    ("from os ", "import"),
    ("import os\n", "import"),
    ("N.sort(key=", "lambda"),
    ("sorted(N, key=", "lambda"),
    ("    def N(", "self"),
    ("    def get_N(", "self"),
)


def python_example(rng: random.Random) -> dict[str, Any]:
    start, right = rng.choice(TEMPLATES)
    text = re.sub(r"\bN\b|(?<=_)N\b", rng.choice(NAMES), start)
    same_length = next(words for words in WORDS if right in words)
    wrong = rng.sample([word for word in same_length if word != right], 3)
    return choices(text, right, wrong, rng)


def arithmetic_example(rng: random.Random) -> dict[str, Any]:
    first, second = rng.randint(30, 49), rng.randint(2, 18)
    sign = rng.choice("+-")
    right = first + second if sign == "+" else first - second
    others = [right + offset for offset in (-10, -2, -1, 1, 2, 10)]
    wrong = rng.sample([number for number in others if len(str(number)) == len(str(right))], 3)
    return choices(f"{first} {sign} {second} =", f" {right}", [f" {number}" for number in wrong], rng)


def choices(context: str, right: str, wrong: list[str], rng: random.Random) -> dict[str, Any]:
    answers = [right, *wrong]
    rng.shuffle(answers)
    return {"context": context, "choices": answers, "answer": answers.index(right)}


def write_tasks(folder: Path) -> None:
    """Write both files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in (("python", python_example), ("arithmetic", arithmetic_example)):
        rng = random.Random(SEED)
        lines = [json.dumps(make(rng)) for _ in range(EXAMPLES)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1] if len(sys.argv) > 1 else "configs/tasks"))
