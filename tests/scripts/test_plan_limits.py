"""python -m scripts.plan with a limit of days or dollars: the GPUs, or the tokens, that it leaves."""

import json
import re

import pytest

from config import ConfigError
from config.reading import resolve
from plan import run_report
from plan.count import parameters
from plan.efficiency import CLASSES, Class
from plan.run_limits import candidate_gpu_counts
from runtime.failure import fail_cleanly
from scripts import plan

OPEN = ["qwen3-0.6b", "--cluster", "h100-ib", "--top", "1", "--parallel.tp", "1", "--parallel.cp", "1"]
OPEN += ["--parallel.pp", "1", "--parallel.dp_rep", "1", "--parallel.zero", "1", "--train.micro_batch", "4"]
OPEN += ["--train.seq_len", "4096", "--train.global_batch", "256"]
TOKENS_OF_STEP = 256 * 4096


def found_by(argv, capsys) -> dict:
    """The first that --json prints."""
    assert plan.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[0])


def test_the_fewest_gpus_within_days(capsys):
    """Those before them take longer, or have no layout: 24 do not divide the batch."""
    argv = [*OPEN, "--tokens", "1e12", "--days", "6"]
    found = found_by(argv, capsys)
    assert found["gpus"] == 32 and found["run"]["days"] <= 6 < found["run"]["days_interval"][1]
    given = found_by([*OPEN, "--tokens", "1e12", "--gpus", "32"], capsys)
    assert found == given | {"priced": found["priced"]}
    priced = {each["gpus"]: each for each in found["priced"]}
    assert priced[16]["days"] > 6 and "days" not in priced[24]
    assert priced[32]["days"] == found["run"]["days"]

    assert plan.main(argv) == 0
    said = capsys.readouterr()
    (line,) = [line for line in said.out.splitlines() if line.startswith("gpus ")]
    assert line == "gpus     32 GPUs, the fewest within 6 days by the forecast (24 GPUs: no layout fits)"
    assert "· 32 GPUs of h100-ib" in said.out
    lines = said.err.splitlines()
    assert {int(line.split()[1]) for line in lines} == set(priced)
    assert f"priced   16 GPUs: {priced[16]['days']:.1f} days" in lines


def test_the_soonest_within_a_budget_and_what_follows_from_it(capsys, tmp_path):
    """Up to 64 GPUs each has a sequence: more have no layout. The batch file and the questions are of the
    number that was found."""
    file = tmp_path / "job.sbatch"
    argv = [*OPEN, "--tokens", "1e12", "--budget", "10000", "--price", "2"]
    found = found_by([*argv, "--sbatch", str(file), "--what-if", "slow-rank=1.2"], capsys)
    assert found["gpus"] == 64 and found["run"]["dollars"] <= 10_000
    assert found["sbatch"] == {"file": str(file), "nodes": 8, "gpus": 8}
    assert "#SBATCH --nodes=8" in file.read_text()
    assert found["what_if"][0]["step_s"] == pytest.approx(1.2 * found["step_s"], rel=0.01)
    assert found_by([*argv, "--most-gpus", "16"], capsys)["gpus"] == 16


@pytest.mark.parametrize("limit", [["--days", "10"], ["--budget", "3840", "--price", "2"]])
def test_the_most_tokens_are_whole_steps(capsys, limit):
    """240 hours of 8 GPUs at 2 dollars are the budget."""
    argv = [*OPEN, "--gpus", "8"]
    run = found_by([*argv, *limit], capsys)["run"]
    assert run["tokens"] == run["steps"] * TOKENS_OF_STEP
    assert run["days"] <= 10
    longer = found_by([*argv, "--tokens", str(run["tokens"] + 1)], capsys)["run"]
    assert longer["steps"] == run["steps"] + 1 and longer["days"] > 10
    low, high = CLASSES[Class("hopper", "megatron")].range
    for share, bought in zip((high, low), run["tokens_interval"]):
        assert bought == pytest.approx(run["tokens"] / share, rel=1e-3)

    assert plan.main([*argv, *limit]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    size = parameters(resolve("qwen3-0.6b", None, []).model)["total"]
    assert f" · {run['tokens'] / size:,.0f} a parameter" in lines["tokens"]
    assert f"{run['tokens'] / 1e9:,.4g}B (" in lines["tokens"]


def test_recipes_by_what_a_limit_gives_each(capsys, tmp_path, monkeypatch):
    """The largest first; by a law the one with the lowest loss, which is not the largest in so few days."""
    monkeypatch.setattr(plan, "BOOTSTRAPS", 8)
    names = "qwen3-0.6b,qwen3-1.7b"
    argv = [names, *OPEN[1:], "--gpus", "8", "--days", "0.02"]
    assert plan.main(argv) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "recipe" and [row.split()[0] for row in rows] == ["qwen3-1.7b", "qwen3-0.6b"]

    table = ["run,parameters,tokens,flops,loss"]
    for size in (1e6, 3e6, 1e7, 3e7):
        for tokens in (1e8, 3e8, 1e9):
            loss = 1.7 + 400 / size**0.34 + 410 / tokens**0.28
            table.append(f"{size:g}-{tokens:g},{size},{tokens},{6 * size * tokens},{loss}")
    (tmp_path / "runs.csv").write_text("\n".join(table) + "\n")
    argv += ["--law", str(tmp_path / "runs.csv")]
    assert plan.main([*argv, "--json"]) == 0
    reports = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [each["name"] for each in reports] == ["qwen3-0.6b", "qwen3-1.7b"]
    assert reports[0]["run"]["loss"] < reports[1]["run"]["loss"]
    for each in reports:
        alone = found_by([each["name"], *argv[1:]], capsys)
        assert each["run"] == alone["run"] and each["step_s"] == alone["step_s"]
    assert plan.main(argv) == 0
    assert f"{reports[0]['run']['loss']:.3f} (" in capsys.readouterr().out.splitlines()[1]


def test_a_recipe_without_a_layout_or_a_step_is_named_and_left_out(capsys):
    argv = ["qwen3-0.6b,llama3-70b,qwen3-1.7b", *OPEN[1:], "--gpus", "8", "--days", "8e-5"]
    assert plan.main(argv) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["recipe", "qwen3-0.6b"]
    first, second = said.err.splitlines()
    assert first == "llama3-70b: no layout fits on 8 GPUs of h100-ib"
    assert re.match(r"qwen3-1.7b: --days: one step of .* s is not within 8e-05 days; raise it", second)


@pytest.mark.parametrize(
    "words, says",
    [
        ("--tokens 1e12", "--tokens: give --gpus N, or without it --days D or --budget USD --price P"),
        ("--days 3", "--days: give --tokens, such as 1.5e12, for the number of GPUs, or --gpus N"),
        ("--budget 3 --price 1",
         "--budget: give --tokens, such as 1.5e12, for the number of GPUs, or --gpus N"),
        ("--days 3 --gpus 8 --tokens 1e12", "--days: --gpus and --tokens decide it; leave out --gpus"),
        ("--days 3 --budget 9 --gpus 8 --tokens 1e12", "--days and --budget: a run has one limit"),
        ("--budget 9 --gpus 8", "--budget: needs --price"),
        ("--days 3 --gpus 4:8", "--days: is of a run on one number of GPUs"),
        ("--days 0 --gpus 8", "--days: 0 must be above 0"),
        ("--days inf --gpus 8", "--days: inf must be above 0, and finite"),
        ("--most-gpus 8 --gpus 8", "--most-gpus: is of a number of GPUs that is looked for"),
        ("--most-gpus 0 --days 3 --tokens 1e12", "--most-gpus: must be at least 1"),
        ("--days 1 --tokens 1e15", "--days: no number of GPUs up to 16,384 keeps this run within 1 day: it "),
        ("--budget 9 --price 1 --tokens 1e12", "--budget: no number of GPUs up to 16,384 keeps this run"),
        ("--top 0 --days 3 --tokens 1e12", "--top: must be at least 1"),
    ],
)
def test_what_leaves_too_much_open_or_nothing_is_refused_before_a_search(words, says, capsys, monkeypatch):
    monkeypatch.setattr(plan, "best_layouts", None)
    assert fail_cleanly(plan.main, [*OPEN, *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {says}") and said.count("\n") == 1


@pytest.mark.parametrize(
    "words, says",
    [
        (["--gpus", "8", "--tokens", "1e12"], "several recipes are compared by the tokens that"),
        (["--gpus", "8", "--days", "1", "--what-if", "links=0.5"], "--what-if: is of one recipe"),
    ],
)
def test_what_is_of_one_recipe(words, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        plan.main(["qwen3-0.6b,qwen3-1.7b", *OPEN[1:], *words])


def test_no_number_within_the_limit_names_the_nearest(capsys):
    with pytest.raises(ConfigError) as error:
        plan.main([*OPEN, "--tokens", "1e12", "--days", "2", "--most-gpus", "48"])
    nearest = found_by([*OPEN, "--tokens", "1e12", "--gpus", "32"], capsys)["run"]
    assert f"(the nearest is 32 GPUs: {nearest['days']:.1f} days)" in str(error.value)
    assert str(error.value).endswith("; raise --days or --most-gpus")
    with pytest.raises(ConfigError, match="^--days: one step of .* s is not within 1e-05 days; raise it"):
        plan.main([*OPEN, "--gpus", "8", "--days", "1e-5"])


def test_the_page_says_which_numbers_are_tried():
    said = " ".join(plan.arguments().format_help().split())
    assert "1, 2, 4 and so on below a node, and 1, 2, 3, 4, 6, 8, 12 and so on whole nodes" in said
    assert f"without --gpus ({run_report.MAX_GPUS})" in said
    assert candidate_gpu_counts(8, 100) == [1, 2, 4, *(8 * nodes for nodes in (1, 2, 3, 4, 6, 8, 12))]
