"""Folders in CORE's format."""

import json
import random
from pathlib import Path

FACTS = {  # label: type, few-shot examples, accuracy of guessing in percent, delimiter
    "which": ("multiple_choice", 2, 33.0, "\nAnswer: "),
    "who": ("schema", 1, 50.0, None),
    "ends": ("language_modeling", 3, 0.0, " "),
}


def write_core(folder: Path, rows: dict[str, list[dict]], facts=FACTS) -> Path:
    """Write a folder of tasks. rows: {label: the lines of its file}; facts: as FACTS, in that order."""
    (folder / "eval_data" / "of").mkdir(parents=True, exist_ok=True)
    entries, baselines = [], ["Eval Task,Task Category,Random baseline"]
    for label, (kind, shots, baseline, delimiter) in facts.items():
        entry = {"label": label, "dataset_uri": f"of/{label}.jsonl", "num_fewshot": [shots]}
        entry["icl_task_type"] = kind
        entries.append(entry if delimiter is None else entry | {"continuation_delimiter": delimiter})
        baselines.append(f"{label},reading,{baseline}")
        lines = "".join(json.dumps(row) + "\n" for row in rows[label])
        (folder / "eval_data" / "of" / f"{label}.jsonl").write_text(lines)
    listed = ",\n".join(json.dumps(entry) for entry in entries)
    (folder / "core.yaml").write_text(f'{{"icl_tasks": [\n{listed}\n]}}\n')
    (folder / "eval_meta_data.csv").write_text("\n".join([*baselines, ""]))
    return folder


def made_up_rows(count: int) -> dict[str, list[dict]]:
    """Rows of all three types. Choices share beginnings, and one may begin the other; contexts share ends."""
    draw = random.Random(0)
    words = ["cat", "rat", "mat", "rat sat", "cat sat on the mat", "mat, and the"]
    which, who, ends = [], [], []
    for number in range(count):
        endings = [f"the {word}" for word in draw.sample(words, 3)]
        if number % 4 == 0:
            endings = draw.sample(["the mat", "the mat, and the rat"], 2)
        which.append({
            "query": f"{number}: the {draw.choice(words)} sat on",
            "choices": endings,
            "gold": draw.randrange(len(endings)),
        })
        names = draw.sample(["cat", "mat"] if number % 2 else ["the cat", "a rat and the cat"], 2)
        who.append({
            "context_options": [f"on the mat {name}" for name in names],
            "continuation": draw.choice(["sat on the mat", "and the rat sat"]),
            "gold": draw.randrange(2),
        })
        ends.append({
            "context": f" {number} the cat sat on {draw.choice(['the', 'the mat,', 'a'])} ",
            "continuation": draw.choice(["mat", "and", "and the", "rat"]),
        })
    return {"which": which, "who": who, "ends": ends}
