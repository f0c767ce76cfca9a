"""Files of tasks: layouts of published data sets, prompts, CORE's folder, and what a bad file is answered."""

import json
import random
import re

import pytest
from core_bundle import write_core

from config import ConfigError
from data.task_files import read_tasks
from scripts.demo_tasks import write_tasks


def written(folder, *items, name="task.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in items))
    return path


def read(path, **more):
    (task,) = read_tasks("eval.tasks", str(path), **more)
    return task


# (a line, its texts with | before what is scored, the right one)
LINES = [
    ({"context": "2 + 3 =", "choices": ["5", "6"], "answer": 0}, ["2 + 3 =| 5", "2 + 3 =| 6"], 0),
    ({"context": "a ", "choices": ["b", " c"], "answer": 1}, ["a |b", "a | c"], 1),
    ({"context": "", "choices": ["b", "c"], "answer": "1"}, ["|b", "|c"], 1),
    ({"context": "x", "choices": ["b", "c"], "answer": 0, "delimiter": "=>"}, ["x=>|b", "x=>|c"], 0),
    ({"query": "q", "choices": ["b", "c"], "gold": 1}, ["q| b", "q| c"], 1),
    ({"context_options": ["Tom", "Ann"], "continuation": "slept", "gold": 1}, ["Tom| slept", "Ann| slept"],
     1),
    ({"context": " to be ", "continuation": "or not"}, ["to be| or not"], 0),
    ({"activity_label": "Baking", "ctx": "He [step] mixes", "endings": ["eggs", "it [title] Done"],
      "label": "1"}, ["Baking: He mixes| eggs", "Baking: He mixes| it. Done"], 1),
    ({"goal": "open a jar", "sol1": "turn", "sol2": "wait", "label": 0},
     ["Question: open a jar\nAnswer:| turn", "Question: open a jar\nAnswer:| wait"], 0),
    ({"sentence": "The cup hit the mat and _ broke.", "option1": "cup", "option2": "mat", "answer": "1"},
     ["The cup hit the mat and cup| broke.", "The cup hit the mat and mat| broke."], 0),
    ({"question": "is it blue", "passage": "Sky.", "answer": True},
     ["Sky.\nQuestion: is it blue?\nAnswer:| no", "Sky.\nQuestion: is it blue?\nAnswer:| yes"], 1),
    ({"question": "Why?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"},
     ["Question: Why?\nAnswer:| x", "Question: Why?\nAnswer:| y"], 1),
    ({"question": {"stem": "Why?", "choices": [{"text": "x", "label": "1"}, {"text": "y", "label": "2"}]},
      "answerKey": "1"}, ["Question: Why?\nAnswer:| x", "Question: Why?\nAnswer:| y"], 0),
    ({"question": "Why? ", "choices": ["x", "y", "z"], "answer": 2, "subject": "s"},
     [f"Why?\nA. x\nB. y\nC. z\nAnswer:| {letter}" for letter in "ABC"], 2),
    ({"question": "Why?", "choices": ["x", "y"], "answer": "B"},
     [f"Why?\nA. x\nB. y\nAnswer:| {letter}" for letter in "AB"], 1),
    ({"text": "the end of it all\n"}, ["the end of it| all"], 0),
]


@pytest.mark.parametrize("item, texts, answer", LINES, ids=lambda value: str(value)[:40])
def test_each_layout_has_these_prompts_and_answers(tmp_path, item, texts, answer):
    (example,) = (task := read(written(tmp_path, item))).examples
    found = []
    for option in example.options:
        before = task.before(example, option)
        bare = before.rstrip() if before.endswith(" ") and not option.context.endswith(" ") else before
        found.append(f"{bare}|{before[len(bare):]}{option.continuation}")
    assert found == texts and example.answer == answer
    assert task.has_choices == (len(texts) > 1)
    assert task.baseline == (1 / len(texts) if len(texts) > 1 else 0)


GOOD = {"context": "a", "choices": ["b", "c"], "answer": 0}
BAD = [
    (["{"], ":1: not JSON: "),
    ([GOOD, "", "[1]"], ":3: expected an object of JSON, got list"),
    ([GOOD, {"context": "a", "choices": ["b", "c"]}], ":2: no known layout has the keys choices, context"),
    ([GOOD | {"answer": 2}], ":1: answer must be a number from 0 to 1, and is 2"),
    ([GOOD | {"answer": True}], ":1: answer must be a number from 0 to 1, and is True"),
    ([GOOD | {"choices": ["b"]}], ":1: choices must be a list of two texts or more"),
    ([GOOD | {"context": 3}], ":1: context must be a text, and is int"),
    ([GOOD | {"choices": ["b", " "]}], ":1: an answer without text"),
    ([GOOD | {"context": "\ud800"}], ":1: half a character"),
    ([GOOD, {"context": "a", "continuation": "b"}], ":2: choices and continuations in one file; split it"),
    ([{"goal": "a", "sol1": "b", "sol2": "c", "label": -1}], ":1: label must be a number from 0 to 1"),
    ([{"sentence": "a", "option1": "b", "option2": "c", "answer": "1"}], ":1: sentence has no _"),
    ([{"sentence": "_ b", "option1": "b", "option2": "c", "answer": ""}], ":1: answer must be 1 or 2"),
    ([{"question": "a", "passage": "b", "answer": "yes"}], ":1: answer must be true or false"),
    ([{"question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answerKey": ""}],
     ":1: answerKey '' is not one of the labels A, B"),
    ([{"question": "a", "choices": "b", "answerKey": "A"}], ":1: question and choices are not as in ARC"),
    ([{"text": "word"}], ":1: text has one word"),
    ([], ": has no examples"),
]


@pytest.mark.parametrize("items, says", BAD, ids=[says for _, says in BAD])
def test_a_bad_line_is_named(tmp_path, items, says):
    path = written(tmp_path, *items)
    with pytest.raises(ConfigError) as refused:
        read(path)
    line = str(refused.value)
    assert line.startswith(f"eval.tasks: {path}{says}") and "\n" not in line


def test_a_path_without_tasks_is_refused(tmp_path):
    written(tmp_path / "one", GOOD)
    (tmp_path / "bytes.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (tmp_path / "empty").mkdir()
    for paths, says in (
        ("nowhere.jsonl", "eval.tasks: nowhere.jsonl: No such file or directory"),
        (f"{tmp_path}/empty", f"eval.tasks: {tmp_path}/empty: a folder without .jsonl files and "),
        (f"{tmp_path}/one,{tmp_path}/one/task.jsonl", "eval.tasks: two tasks are named task; rename"),
        (f"{tmp_path}/bytes.jsonl", f"eval.tasks: {tmp_path}/bytes.jsonl:1: not UTF-8 text"),
    ):
        with pytest.raises(ConfigError) as refused:
            read_tasks("eval.tasks", paths)
        assert str(refused.value).startswith(says)


def test_a_limit_takes_the_same_examples_every_time(tmp_path):
    path = written(tmp_path, *(GOOD | {"context": str(number)} for number in range(50)))
    whole = [example.options[0].context for example in read(path).examples]
    few = [example.options[0].context for example in read(path, limit=7).examples]
    assert sorted(whole, key=int) == [str(number) for number in range(50)] != whole
    assert few == whole[:7]


def core(folder, **changes):
    """A folder in CORE's form, with three tasks. changes: of the entry of the first, in line 2."""
    sums = [{"query": f"{i} + 1 =", "choices": [f"{i + d}" for d in range(4)], "gold": 1} for i in range(9)]
    names = [
        {"context_options": [f"Ann{i}", f"Tom{i}"], "continuation": "came home", "gold": i % 2}
        for i in range(6)
    ]
    texts = [{"context": f"number {i} is followed by", "continuation": f"{i + 1}"} for i in range(6)]
    facts = {
        "sums": ("multiple_choice", 2, 25, "\nAnswer: "),
        "who": ("schema", 0, 50.0, None),
        "words": ("language_modeling", 1, 0.0, None),
    }
    write_core(folder, {"sums": sums, "who": names, "words": texts}, facts)
    first, *others = json.loads((folder / "core.yaml").read_text())["icl_tasks"]
    lines = ",\n".join(json.dumps(entry) for entry in (first | changes, *others))
    (folder / "core.yaml").write_text(f'{{"icl_tasks": [\n{lines}\n]}}')
    return folder


def test_a_folder_of_core_has_the_prompts_of_nanochat(tmp_path):
    sums, who, words = read_tasks("eval.tasks", str(core(tmp_path)))
    assert [task.name for task in (sums, who, words)] == ["sums", "who", "words"]
    assert [task.baseline for task in (sums, who, words)] == [0.25, 0.5, 0]
    assert [task.shots for task in (sums, who, words)] == [2, 0, 1]
    assert all(task.in_core for task in (sums, who, words))

    # the prompt of an example, by the seeds of nanochat: the order by 1337, the shots by 1234 + index
    order = list(range(9))
    random.Random(1337).shuffle(order)
    index = 4
    others = [other for other in range(9) if other != index]
    shown = [order[other] for other in random.Random(1234 + index).sample(others, 2)]
    assert sums.prompt(index) == "".join(f"{i} + 1 =\nAnswer: {i + 1}\n\n" for i in shown)
    example = sums.examples[index]
    assert sums.before(example, example.options[2]) == f"{order[index]} + 1 =\nAnswer: "
    assert who.prompt(0) == "" and words.prompt(0).endswith("\n\n")

    (fewer, *_) = read_tasks("eval.tasks", str(tmp_path), limit=5, shots=4)
    assert len(fewer.examples) == 5 and fewer.prompt(0).count("Answer: ") == 4


NEEDS = "core.yaml:2: a task needs label, dataset_uri, icl_task_type and num_fewshot [N], and there is {"


@pytest.mark.parametrize("changes, says", [
    ({"label": "other"}, "core.yaml:2: other has no Random baseline in {}/eval_meta_data.csv; add it, or "),
    ({"icl_task_type": "schema_"}, "core.yaml:2: sums: icl_task_type 'schema_' is unknown; CORE has multiple_"
     "choice, schema and language_modeling"),
    ({"icl_task_type": "schema"}, "eval_data/of/sums.jsonl:1: no known layout has the keys choices, gold, "
     "query; write context_options, continuation and gold"),
    *((changes, NEEDS) for changes in (
        {"num_fewshot": 2}, {"num_fewshot": []}, {"num_fewshot": ["2"]}, {"num_fewshot": [-1]},
        {"dataset_uri": 3}, {"icl_task_type": ["schema"]}, {"continuation_delimiter": None},
    )),
    ({"dataset_uri": "none.jsonl"}, "core.yaml:2: sums: there is no file {}/eval_data/none.jsonl; add it, "),
    ({"num_fewshot": [9]}, "sums: a prompt shows 9 other examples, and there are 9 "),
])
def test_a_folder_of_core_that_does_not_hang_together_is_refused(tmp_path, changes, says):
    with pytest.raises(ConfigError) as refused:
        read_tasks("eval.tasks", str(core(tmp_path, **changes)))
    line = str(refused.value)
    assert says.replace("{}", str(tmp_path)) in line and line.startswith("eval.tasks: ") and "\n" not in line


NO_LIST = "core.yaml: icl_tasks must be a list of tasks"


@pytest.mark.parametrize("listing, says", [
    ({}, NO_LIST),
    *(({"icl_tasks": value}, NO_LIST) for value in (None, [], "sums", {"a": 1})),
    *(({"icl_tasks": [task]}, "core.yaml:1: a task needs label") for task in (3, "sums", {"label": "sums"})),
])
def test_a_listing_of_core_without_tasks_is_refused(tmp_path, listing, says):
    (core(tmp_path) / "core.yaml").write_text(json.dumps(listing))
    with pytest.raises(ConfigError, match=re.escape(says)):
        read_tasks("eval.tasks", str(tmp_path))


@pytest.mark.parametrize("text, says", [
    ("Eval Task,Random baseline\nwho,50\nsums,100\n", "csv:3: a Random baseline of 100 percent"),
    ("Eval Task,Random baseline\nsums,-1\n", "csv:2: a Random baseline of -1 percent"),
    ("Eval Task,Random baseline\nsums,much\n", "csv:2: needs the columns"),
    ("Eval Task,baseline\nsums,25\n", "csv:2: needs the columns"),
    (b"Eval Task,Random baseline\nsums\xff,25\n", "csv: not a table in UTF-8: "),
])
def test_a_random_baseline_that_is_not_a_share_is_refused(tmp_path, text, says):
    (core(tmp_path) / "eval_meta_data.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=re.escape(says)):
        read_tasks("eval.tasks", str(tmp_path))


def test_the_bundled_tasks_are_what_their_script_writes(tmp_path):
    write_tasks(tmp_path)
    ours = read_tasks("eval.tasks", "configs/tasks")
    assert [task.name for task in ours] == ["arithmetic", "python"]
    for name in ("arithmetic", "python"):
        with open(f"configs/tasks/{name}.jsonl") as file:
            assert file.read() == (tmp_path / f"{name}.jsonl").read_text()
    for task in ours:  # equal lengths: a model that knows nothing is at chance
        for example in task.examples:
            assert len({len(option.continuation) for option in example.options}) == 1
            assert len({option.continuation for option in example.options}) == 4
