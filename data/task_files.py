"""Task files, which score a model by the likelihood of given answers (eval.tasks, scripts.evaluate).

    file.jsonl    one example per line, in any of the LAYOUTS
    folder        all its .jsonl files; with a core.yaml, the tasks listed there (CORE's format)

A multiple-choice task asks which of several answers the model finds most likely. A continuation task asks
whether the model would write the answer.

CORE (arXiv 2406.11794) is a set of such tasks. Its folder contains core.yaml (icl_tasks: label,
dataset_uri, num_fewshot, icl_task_type, continuation_delimiter), the files in eval_data/, and
eval_meta_data.csv with the accuracy of guessing in percent. The order of the examples, and the few-shot
examples in a prompt, are drawn with nanochat's seeds.
"""
import csv
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from config import ConfigError, read_yaml
from config.optimizers import to_text
from config.strict import list_lines

ORDER_SEED = 1337  # for the order of a task's examples
SHOTS_SEED = 1234  # + example index: selects the few-shot examples in its prompt
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Option(NamedTuple):
    """A text in two parts. The second part is scored."""
    context: str
    continuation: str


@dataclass(frozen=True)
class Example:
    """An example: options[answer] is correct, or a single option is the text that the model should write."""
    options: tuple[Option, ...]
    answer: int
    place: str  # file:line
    delimiter: str | None = None  # between context and continuation; defaults to the task's


@dataclass(frozen=True)
class ScoredTask:
    """Examples of one kind.

    delimiter: between context and continuation; defaults to a space, unless one of the two already has one.
    shots: few-shot examples in each prompt. baseline: the accuracy of guessing.
    in_core: whether its centered accuracy is part of CORE.
    """
    name: str
    examples: tuple[Example, ...]
    shots: int
    delimiter: str | None
    baseline: float
    in_core: bool

    @property
    def has_choices(self) -> bool:
        return len(self.examples[0].options) > 1

    def prompt(self, index: int) -> str:
        """Return the few-shot text before an example's context: `shots` others of the task, with answers."""
        if not self.shots:
            return ""
        others = [other for other in range(len(self.examples)) if other != index]
        shown = random.Random(SHOTS_SEED + index).sample(others, self.shots)
        texts: list[str] = []
        for other in shown:
            example = self.examples[other]
            option = example.options[example.answer]
            texts.append(self.before(example, option) + option.continuation)
        return "".join(f"{text}\n\n" for text in texts)

    def before(self, example: Example, option: Option) -> str:
        """Return the context of an option, and the delimiter."""
        delimiter = self.delimiter if example.delimiter is None else example.delimiter
        if delimiter is not None:
            return option.context + delimiter
        meets_space = option.context[-1:].isspace() or option.continuation[:1].isspace()
        return option.context + (" " if option.context and not meets_space else "")


# ---- layouts of a line -------------------------------------------------------------------------------------
# Each function reads an item that has the required keys. ValueError says what is wrong, after "FILE:LINE: ".

Item = dict[str, Any]


class Content(NamedTuple):
    """The parts of an example."""
    options: list[Option]
    answer: int


def get_text(item: Item, key: str) -> str:
    if not isinstance(item[key], str):
        raise ValueError(f"{key} must be a text, and is {type(item[key]).__name__}")
    return item[key]


def get_texts(item: Item, key: str) -> list[str]:
    """Return a list of at least two texts."""
    value = item[key]
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{key} must be a list of two texts or more")
    return value


def get_index(item: Item, key: str, count: int) -> int:
    """Return an index into `count` choices, given as a number or its digits."""
    value = item[key]
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"{key} must be a number from 0 to {count - 1}, and is {value!r}")
    return value


def choices(context: str, continuations: list[str], answer: int) -> Content:
    return Content([Option(context, continuation) for continuation in continuations], answer)


def read_choices(item: Item) -> Content:
    endings = get_texts(item, "choices")
    return choices(get_text(item, "context"), endings, get_index(item, "answer", len(endings)))


def read_core_choices(item: Item) -> Content:
    endings = get_texts(item, "choices")
    return choices(get_text(item, "query"), endings, get_index(item, "gold", len(endings)))


def read_schema(item: Item) -> Content:
    contexts = get_texts(item, "context_options")
    ending = get_text(item, "continuation")
    answer = get_index(item, "gold", len(contexts))
    return Content([Option(context, ending) for context in contexts], answer)


def read_continuation(item: Item) -> Content:
    return Content([Option(get_text(item, "context").strip(), get_text(item, "continuation"))], 0)


def read_hellaswag(item: Item) -> Content:
    endings = [plain_wikihow(text) for text in get_texts(item, "endings")]
    context = get_text(item, "ctx")
    if "activity_label" in item:
        context = f"{get_text(item, 'activity_label')}: {context}"
    return choices(plain_wikihow(context), endings, get_index(item, "label", len(endings)))


def plain_wikihow(text: str) -> str:
    """Remove the WikiHow markup that HellaSwag keeps."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def read_piqa(item: Item) -> Content:
    endings = [get_text(item, "sol1"), get_text(item, "sol2")]
    return choices(question(get_text(item, "goal")), endings, get_index(item, "label", 2))


def read_winogrande(item: Item) -> Content:
    """Partial evaluation (arXiv 1806.02847): score the text after the gap, with each name in the gap."""
    start, gap, end = get_text(item, "sentence").partition("_")
    if not gap:
        raise ValueError("sentence has no _ for the option")
    if item["answer"] not in ("1", "2", 1, 2):
        raise ValueError(f"answer must be 1 or 2, and is {item['answer']!r}")
    names = [get_text(item, "option1"), get_text(item, "option2")]
    return Content([Option(start + name, end) for name in names], int(item["answer"]) - 1)


def read_boolq(item: Item) -> Content:
    if not isinstance(item["answer"], bool):
        raise ValueError(f"answer must be true or false, and is {item['answer']!r}")
    asked = get_text(item, "question").removesuffix("?")
    context = f"{get_text(item, 'passage')}\n{question(f'{asked}?')}"
    return choices(context, ["no", "yes"], int(item["answer"]))


def read_arc(item: Item) -> Content:
    """ARC and OpenBookQA, as published or as exported by the datasets package."""
    found, asked = item.get("choices"), item["question"]
    if isinstance(asked, dict):
        found, asked = asked.get("choices"), asked.get("stem")
    if isinstance(found, list):
        found = {key: [one.get(key) for one in found if isinstance(one, dict)] for key in ("text", "label")}
    if not isinstance(asked, str) or not isinstance(found, dict):
        raise ValueError("question and choices are not as in ARC")
    endings, labels = get_texts(found, "text"), get_texts(found, "label")
    if item["answerKey"] not in labels or len(labels) != len(endings):
        raise ValueError(f"answerKey {item['answerKey']!r} is not one of the labels {', '.join(labels)}")
    return choices(question(asked), endings, labels.index(item["answerKey"]))


def read_mmlu(item: Item) -> Content:
    """Put the answers in the prompt, and score their letters."""
    endings = get_texts(item, "choices")
    letters = list(LETTERS[:len(endings)])
    answer = letters.index(item["answer"]) if item["answer"] in letters else None
    if answer is None:
        answer = get_index(item, "answer", len(endings))
    listed = "".join(f"\n{letter}. {ending}" for letter, ending in zip(letters, endings))
    return choices(f"{get_text(item, 'question').strip()}{listed}\nAnswer:", letters, answer)


def read_lambada(item: Item) -> Content:
    """Score the last word (arXiv 1606.06031)."""
    start, _, word = get_text(item, "text").strip().rpartition(" ")
    if not start:
        raise ValueError("text has one word, and nothing before it")
    return Content([Option(start, word)], 0)


def question(text: str) -> str:
    return f"Question: {text}\nAnswer:"


class Layout(NamedTuple):
    """Items that have all of `keys` are parsed with `read`."""
    keys: str
    read: Callable[[Item], Content]


CORE_LAYOUTS = {  # of each icl_task_type
    "multiple_choice": Layout("query choices gold", read_core_choices),
    "schema": Layout("context_options continuation gold", read_schema),
    "language_modeling": Layout("context continuation", read_continuation),
}
LAYOUTS = (  # the first match is used
    Layout("context choices answer", read_choices),
    *CORE_LAYOUTS.values(),
    Layout("ctx endings label", read_hellaswag),
    Layout("goal sol1 sol2 label", read_piqa),
    Layout("sentence option1 option2 answer", read_winogrande),
    Layout("question passage answer", read_boolq),
    Layout("question answerKey", read_arc),
    Layout("question choices answer", read_mmlu),
    Layout("text", read_lambada),
)


# ---- files -------------------------------------------------------------------------------------------------


def read_tasks(
    key: str, paths: str, limit: int | None = None, shots: int | None = None
) -> list[ScoredTask]:
    """Read the tasks of files and folders, PATH[,PATH...].

    `key` names the user's option in messages. `limit` caps the examples of a task. `shots` is the number of
    few-shot examples, which defaults to the one in core.yaml, and to none elsewhere.
    Raises ConfigError naming the file and the line.
    """
    tasks: list[ScoredTask] = []
    for word in paths.split(","):
        path = Path(word.strip())
        try:
            tasks += read_path(path, limit, shots)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
        except OSError as error:
            raise ConfigError(f"{key}: {error.filename or path}: {error.strerror}") from None
    names = [task.name for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{key}: two tasks are named {twice[0]}; rename a file, or leave one out")
    return tasks


def read_path(path: Path, limit: int | None, shots: int | None) -> Iterator[ScoredTask]:
    if not path.is_dir():
        yield read_file(path, limit, shots)
        return
    if (path / "core.yaml").is_file():
        yield from read_core(path, limit, shots)
        return
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"{path}: a folder without .jsonl files and without core.yaml")
    for file in files:
        yield read_file(file, limit, shots)


def read_file(path: Path, limit: int | None, shots: int | None) -> ScoredTask:
    """Read a task named after its file. Guessing picks among equal choices."""
    examples = read_examples(path)
    counts = [len(example.options) for example in examples]
    guessed = sum(1 / count for count in counts) / len(counts) if counts[0] > 1 else 0.0
    return make_task(path.stem, examples, limit=limit, shots=shots or 0, baseline=guessed)


def make_task(
    name: str,
    examples: list[Example],
    *,
    limit: int | None,
    shots: int,
    baseline: float,
    delimiter: str | None = None,
    in_core: bool = False,
) -> ScoredTask:
    """Make a task with at most `limit` of the examples, in an order that only depends on their number."""
    random.Random(ORDER_SEED).shuffle(examples)
    kept = examples[:limit]
    if shots >= len(kept):
        raise ConfigError(f"{name}: a prompt shows {shots} other examples, and there are {len(kept)} with "
                          "this limit; raise the limit")
    return ScoredTask(name, tuple(kept), shots, delimiter, baseline, in_core)


def read_examples(path: Path, layouts: Sequence[Layout] = LAYOUTS) -> list[Example]:
    """Read the examples of a file in order, in any of the layouts: all with choices, or all without.

    Raises ConfigError, OSError.
    """
    examples: list[Example] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                example = read_example(line, place, layouts)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{place}: {error}") from None
            has_choices = len(example.options) > 1
            if examples and has_choices != (len(examples[0].options) > 1):
                raise ConfigError(f"{place}: choices and continuations in one file; split it")
            examples.append(example)
    if not examples:
        raise ConfigError(f"{path}: has no examples")
    return examples


def read_example(line: bytes, place: str, layouts: Sequence[Layout]) -> Example:
    """Parse one line of a file. Raises ValueError."""
    try:
        item = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, column {error.colno}") from None
    if not isinstance(item, dict):
        raise ValueError(f"expected an object of JSON, got {type(item).__name__}")

    layout = next((one for one in layouts if all(key in item for key in one.keys.split())), None)
    if layout is None:
        has = ", ".join(sorted(item)) or "none"
        raise ValueError(f"no known layout has the keys {has}; write {to_text(layouts[0].keys.split())}")
    content = layout.read(item)
    if any(not option.continuation.strip() for option in content.options):
        raise ValueError("an answer without text")
    try:
        "".join(text for option in content.options for text in option).encode()
    except UnicodeEncodeError:
        raise ValueError("half a character (a lone surrogate)") from None
    delimiter = get_text(item, "delimiter") if "delimiter" in item else None
    return Example(tuple(content.options), content.answer, place, delimiter)


# ---- CORE --------------------------------------------------------------------------------------------------


class ListedTask(NamedTuple):
    """An entry of core.yaml: the path in eval_data/, and the number of few-shot examples."""
    label: str
    file: str
    kind: str
    shots: int
    delimiter: str


def read_core(folder: Path, limit: int | None, shots: int | None) -> Iterator[ScoredTask]:
    """Read the tasks of a folder in CORE's format."""
    listing, baselines_file = folder / "core.yaml", folder / "eval_meta_data.csv"
    entries = read_yaml(listing).get("icl_tasks")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{listing}: icl_tasks must be a list of tasks")
    baselines = read_baselines(baselines_file)
    for line, entry in zip(list_lines(listing, "icl_tasks"), entries):
        place = f"{listing}:{line}"
        task = read_listed(entry, place)
        if task.label not in baselines:
            raise ConfigError(f"{place}: {task.label} has no Random baseline in {baselines_file}; add it, or "
                              "take the task out")
        path = folder / "eval_data" / task.file
        try:
            examples = read_examples(path, [CORE_LAYOUTS[task.kind]])
        except FileNotFoundError:
            raise ConfigError(f"{place}: {task.label}: there is no file {path}; add it, or take the task out"
                              ) from None
        yield make_task(
            task.label,
            examples,
            limit=limit,
            shots=task.shots if shots is None else shots,
            baseline=baselines[task.label],
            delimiter=task.delimiter,
            in_core=True,
        )


def read_listed(entry: Any, place: str) -> ListedTask:
    """Parse an entry of core.yaml, which may list several numbers of shots: the first counts.

    Raises ConfigError.
    """
    try:
        texts = [entry[key] for key in ("label", "dataset_uri", "icl_task_type")]
        shots = entry["num_fewshot"][0]
        texts.append(entry.get("continuation_delimiter", " "))
        if type(shots) is not int or shots < 0 or not all(isinstance(text, str) for text in texts):
            raise ValueError
    except (KeyError, TypeError, IndexError, ValueError):
        raise ConfigError(f"{place}: a task needs label, dataset_uri, icl_task_type and num_fewshot [N], and "
                          f"there is {entry!r}") from None
    label, file, kind, delimiter = texts
    if kind not in CORE_LAYOUTS:
        raise ConfigError(f"{place}: {label}: icl_task_type {kind!r} is unknown; CORE has "
                          f"{to_text(CORE_LAYOUTS)}")
    return ListedTask(label, file, kind, shots, delimiter)


def read_baselines(path: Path) -> dict[str, float]:
    """Return {task: accuracy of guessing, from 0 to 1}; the file has percent."""
    baselines: dict[str, float] = {}
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        try:
            for row in rows:
                task, share = read_baseline(row, f"{path}:{rows.line_num}")
                baselines[task] = share
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path}: not a table in UTF-8: {error}") from None
    return baselines


def read_baseline(row: dict[str, str], place: str) -> tuple[str, float]:
    """Return (task, accuracy of guessing) of a row. Raises ConfigError."""
    try:
        task, share = row["Eval Task"], float(row["Random baseline"]) / 100
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{place}: needs the columns Eval Task and Random baseline (percent)") from None
    if not 0 <= share < 1:
        raise ConfigError(f"{place}: a Random baseline of {100 * share:g} percent")
    return task, share
