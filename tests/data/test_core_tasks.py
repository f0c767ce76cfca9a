"""CORE: a run's accuracies and scores beside a definition on the exported folder, in torch and transformers
alone.
"""

import csv
import json
import os.path
import random

import pytest
import run_folder
import torch
import yaml
from core_bundle import made_up_rows, write_core
from prepared_data import prepare_rows
from ranks import MODEL, corpus
from tokenizer_families import make_tokenizer

import train
from checkpoint.trained import load_run
from data.task_files import read_tasks
from data.task_scores import encode_tasks
from runtime.failure import fail_cleanly
from scripts import convert, evaluate

TEXT = "the cat sat on the mat, and the rat sat on the cat"
CONTEXT = 40  # tokens: some prompts are longer


def core_by_hand(folder, model, tokenizer):
    """CORE's definition (arXiv 2406.11794, as nanochat computes it): {label: accuracy}, the score, and for
    each text the mean log-probability of its compared tokens.
    """
    with open(folder / "eval_meta_data.csv") as file:
        chance = {row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in csv.DictReader(file)}
    accuracies, centered, all_means = {}, [], []
    for task in yaml.safe_load((folder / "core.yaml").read_text())["icl_tasks"]:
        kind, between = task["icl_task_type"], task.get("continuation_delimiter", " ")
        rows = [json.loads(line) for line in open(folder / "eval_data" / task["dataset_uri"])]
        random.Random(1337).shuffle(rows)

        def pairs(row, kind=kind):
            if kind == "multiple_choice":
                return [(row["query"], choice) for choice in row["choices"]]
            if kind == "schema":
                return [(context, row["continuation"]) for context in row["context_options"]]
            return [(row["context"].strip(), row["continuation"])]

        num_right = 0
        for index, row in enumerate(rows):
            others = rows[:index] + rows[index + 1:]
            shown = random.Random(1234 + index).sample(others, task["num_fewshot"][0])
            prompt = "".join(between.join(pairs(each)[each.get("gold", 0)]) + "\n\n" for each in shown)
            texts = [tokenizer(prompt + between.join(pair)).input_ids for pair in pairs(row)]
            if kind == "multiple_choice":
                ends = [len(ids) - len(os.path.commonprefix(texts)) for ids in texts]
            elif kind == "schema":
                ends = [len(os.path.commonprefix([ids[::-1] for ids in texts]))] * 2
            else:
                bare = tokenizer((prompt + pairs(row)[0][0] + between).strip()).input_ids
                ends = [len(texts[0]) - len(bare)]
            means, hits = [], []
            for ids, end in zip(texts, ends):
                ids = torch.tensor(ids[-CONTEXT:])
                with torch.no_grad():
                    told = model(ids[None, :-1]).logits[0].double().log_softmax(-1)[len(ids) - 1 - end:]
                scored = ids[len(ids) - end:]
                means.append(told.gather(1, scored[:, None]).mean().item())  # nan of none
                hits.append(told.argmax(1).equal(scored))
            best = max(range(len(means)), key=lambda option: means[option])
            num_right += hits[0] if kind == "language_modeling" else best == row["gold"]
            all_means += means
        accuracies[task["label"]] = accuracy = num_right / len(rows)
        centered.append((accuracy - chance[task["label"]]) / (1 - chance[task["label"]]))
    return accuracies, sum(centered) / len(centered), all_means


def test_core_of_a_run_is_core_by_hand(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    folder = write_core(tmp_path / "core", made_up_rows(24))
    data = [{"text": f"{TEXT} {number}. {TEXT}"} for number in range(60)]
    assert prepare_rows(data, make_tokenizer("llama3", tmp_path / "tokenizer"), tmp_path / "data") == 0
    words = ["--data.path", tmp_path / "data", "--log.dir", tmp_path, "--log.name", "run", "--model.context"]
    words += [CONTEXT, "--train.dtype", "fp32", "--train.steps", 40, "--optim.lr", 0.01]
    assert train.main(["llama3-tiny", *MODEL, *map(str, words), "--eval.tasks", str(folder)]) == 0
    said = capsys.readouterr().out
    assert evaluate.main([str(tmp_path / "run"), "--tasks", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])

    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    accuracies, core, means = core_by_hand(folder, model, tokenizer)
    assert all(0 < accuracy < 1 for accuracy in accuracies.values())

    # scripts.evaluate
    names = {"which": "acc_token", "who": "acc_token", "ends": "acc"}
    assert {label: found["tasks"][label][name] for label, name in names.items()} == accuracies
    assert found["core"] == pytest.approx(core, abs=1e-12)

    # the loop: metrics.jsonl, and the console
    *_, last = run_folder.validations(tmp_path / "run")
    assert {label: last[f"tasks/{label}/{name}"] for label, name in names.items()} == accuracies
    assert last["tasks/core"] == found["core"] and last["step"] == 40
    assert f" task 40  CORE {core:.4f} over its tasks, 72 examples in " in said

    # each text
    run = load_run(str(tmp_path / "run"), torch.device("cpu"))
    encoded = encode_tasks("--tasks", read_tasks("--tasks", str(folder)), run.prompts, CONTEXT)
    assert encoded.num_cut > 0 and any(row.num_compared != row.num_scored for row in encoded.rows)
    compared = [
        score.compared / row.num_compared if row.num_compared else float("nan")
        for row, score in zip(encoded.rows, run.score(encoded.rows))
    ]
    assert compared == pytest.approx(means, abs=1e-4, nan_ok=True)
    assert any(value != value for value in means)


def test_an_error_in_a_bundle_ends_a_run_before_any_work(tmp_path, capsys):
    folder = write_core(tmp_path / "core", made_up_rows(8))
    (folder / "eval_data" / "of" / "who.jsonl").unlink()
    words = ["--log.dir", tmp_path, "--log.name", "run", "--data.path", corpus(tmp_path)]
    says = f"{folder}/core.yaml:3: who: there is no file {folder}/eval_data/of/who.jsonl; add it, or take "
    for key, main, *more in (
        ("eval.tasks", train.main, "llama3-tiny", *MODEL, *words, "--eval.tasks", folder),
        ("--tasks", evaluate.main, "nowhere", "--tasks", folder),  # before the run is looked for
    ):
        assert fail_cleanly(main, [*map(str, more)]) == 2
        assert f"error: {key}: {says}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
