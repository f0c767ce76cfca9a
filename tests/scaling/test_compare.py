"""Runs side by side: what differs, losses where both have been, a page that stands alone."""
import json

import numpy as np
import pytest

import config
from config import ConfigError
from plan.count import flops_per_token
from scaling.compare import different_settings, page, read_run, table_rows
from scripts.compare import main


def make_run(folder, losses, *, start=0, finished=True, **keys):
    """A run folder as train.py leaves it: 100 tokens a step."""
    argv = ["--model.vocab", "257", "--log.name", folder.name]
    for key, value in keys.items():
        argv += [f"--{key.replace('__', '.')}", str(value)]
    cfg = config.resolve("llama3-tiny", None, argv)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config.dump(cfg))
    lines = []
    for step, loss in enumerate(losses, start + 1):
        row = {"step": step, "loss": loss, "tokens": 100 * step, "tokens_per_s": 50.0 + step, "mfu": None}
        lines.append(json.dumps(row))
    last = start + len(losses)
    lines.append(json.dumps({"step": last, "val_loss": losses[-1] + 0.5}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if finished is not None:
        of_token = flops_per_token(cfg.model, cfg.train.seq_len)
        summary = {"finished": finished, "tokens": 100 * last, "flops": 100 * last * of_token}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_losses_are_compared_where_both_have_been(tmp_path):
    short = make_run(tmp_path / "short", [5.0, 4.0, 3.0], optim__lr=1e-3)
    long = make_run(tmp_path / "long", [6.0, 5.0, 4.5, 2.0], optim__lr=2e-3, model__layers=8)
    runs = [read_run(short), read_run(long)]
    assert different_settings(runs) == {"model.layers": [4, 8], "optim.lr": [1e-3, 2e-3]}

    rows = table_rows(runs)
    assert [row["at 300 tokens"] for row in rows] == ["3.0000", "4.5000"]
    assert [row["val loss"] for row in rows] == ["3.5000", "2.5000"]
    assert [row["tokens/s"] for row in rows] == ["52", "53"]  # medians without the first step
    # at equal FLOPs the larger model has seen fewer tokens, between two of its steps
    flops = min(run.flops[-1] for run in runs)
    tokens = flops / runs[1].flops[-1] * 400
    assert tokens < 300
    column = next(name for name in rows[1] if name.endswith("FLOPs") and name.startswith("at "))
    want = np.interp(tokens, [100, 200, 300, 400], [6, 5, 4.5, 2])
    assert float(rows[1][column]) == pytest.approx(want, abs=1e-4)


def test_a_branch_has_no_loss_before_it_began(tmp_path):
    whole = make_run(tmp_path / "whole", [5.0, 4.0])
    branch = make_run(tmp_path / "branch", [3.0, 2.0], start=5)
    rows = table_rows([read_run(whole), read_run(branch)])
    assert [row["at 200 tokens"] for row in rows] == ["4.0000", "n/a"]


def test_the_page_needs_no_other_file(tmp_path, capsys):
    first = make_run(tmp_path / "a<b", [5.0, 4.0], optim__lr=1e-3)
    second = make_run(tmp_path / "c", [5.0, 3.0], optim__lr=2e-3, finished=None)
    out = tmp_path / "reports" / "report.html"  # in a folder that is not there yet
    assert main([str(first), str(second), "--out", str(out)]) == 0
    text = out.read_text()
    assert "data:image/png;base64," in text and "http" not in text.replace("http-equiv", "")
    assert "a&lt;b" in text and "a<b" not in text
    assert "running" in text and "mean of the last 2% of the steps" in text
    assert "http-equiv" not in text
    assert "http-equiv" in page([read_run(second)], refresh_s=5)

    shown = capsys.readouterr().out
    assert "optim.lr" in shown and "mean of the last 2% of the steps" in shown
    assert main([str(first), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["run"] == "a<b"


@pytest.mark.parametrize(
    "argv,message",
    [
        (["nowhere"], "nowhere: no run that can be read"),
        (["a", "--out", "x.pdf"], "--out: x.pdf ends in neither .html nor .png"),
        (["a", "--watch", "3"], "--watch: needs --out"),
        (["a", "b/a"], "two runs are called a"),
    ],
)
def test_what_cannot_be_compared_is_named(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", [5.0])
    with pytest.raises(ConfigError, match=message):
        main(argv)


def test_a_run_without_a_step_is_named(tmp_path):
    folder = make_run(tmp_path / "a", [5.0])
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no step in metrics.jsonl yet"):
        read_run(folder)
