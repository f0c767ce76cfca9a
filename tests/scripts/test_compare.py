"""Runs side by side: what differs, losses where both have been, a page that stands alone."""
import json
import os
import shutil
import subprocess
import time
import warnings

import numpy as np
import pytest
import run_folder

import scripts.compare.runs
from config import ConfigError
from config.reading import dump, get_phases, resolve
from plan.count import flops_per_token
from runtime.goodput import STARTS_FILE, StartRecord
from scripts.compare import __main__ as command
from scripts.compare.runs import CHART, different_settings, doubts, draw_runs, page, read_run, table_rows


def make_run(folder, losses, *, start=0, finished=True, **keys):
    """A run folder as train.py leaves it: 100 tokens a step."""
    argv = ["--model.vocab", "257", "--log.name", folder.name]
    for key, value in keys.items():
        argv += [f"--{key.replace('__', '.')}", str(value)]
    cfg = resolve("llama3-tiny", None, argv)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(cfg))
    lines = []
    for step, loss in enumerate(losses, start + 1):
        row = {"step": step, "loss": loss, "tokens": 100 * step, "tokens_per_s": 50.0 + step, "mfu": None}
        lines.append(json.dumps(row if loss is not None else row | {"nonfinite": True}))
    last = start + len(losses)
    val_loss = None if losses[-1] is None else losses[-1] + 0.5
    row = {"step": last, "val_loss": val_loss, "val_bpb": 1.25}
    lines.append(json.dumps(row if val_loss is not None else row | {"nonfinite": True}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if finished is not None:
        of_token = flops_per_token(cfg.model, cfg.train.seq_len)
        summary = {"finished": finished, "step": last, "tokens": 100 * last, "flops": 100 * last * of_token}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_folder_that_is_not_a_run_is_left_out_of_a_pattern(tmp_path, capsys):
    """As of runs/*, where data lies, too. A name of nothing is a mistake, and so is a single folder."""
    first = make_run(tmp_path / "a", [5.0, 4.0])
    (tmp_path / "data").mkdir()
    assert command.main([str(first), str(tmp_path / "data"), "--json"]) == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["numbers"]
    assert row["run"] == "a" and row["tokens"] == 200 and row["train_loss"] > 3 and row["mfu"] is None
    (line,) = err.splitlines()
    assert line.startswith(f"left out: {tmp_path}/data: no run that can be read")
    for wrong in ([tmp_path / "data"], [first, tmp_path / "absent"]):
        with pytest.raises(ConfigError, match="no run that can be read"):
            command.main([str(path) for path in wrong])


@pytest.mark.parametrize("second, is_same", [
    ("0.5 web 0.5 code", True), ("5 web 5 code", True), ("0.9 web 0.1 code", False),
])
def test_validation_sets_under_other_weights_are_another_mixture(tmp_path, monkeypatch, second, is_same):
    """The sets are the same by their fingerprints."""
    monkeypatch.setattr(scripts.compare.runs, "read_validation_data", lambda folder: ("w", "c"))
    origins = {"code": (1, ""), "data": (1, "")}
    monkeypatch.setattr(scripts.compare.runs, "read_origins", lambda folder: origins)
    runs = [read_run(make_run(tmp_path / f"r{number}", [5.0, 4.0], data__valid=valid))
            for number, valid in enumerate(("0.5 web 0.5 code", second))]
    assert any("different tokens" in line for line in doubts(runs)) == (not is_same)


def test_each_of_many_curves_has_a_look_of_its_own(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = set()
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, style, **look: (
        drawn.add((style, look["color"])) if "label" in look else None, plot(self, x, y, style, **look)))
    runs = [read_run(make_run(tmp_path / f"r{number}", [5.0, 4.0])) for number in range(12)]
    assert draw_runs(runs) and len(drawn) == 12


def test_a_dollar_in_a_run_s_name_is_drawn(tmp_path):
    assert draw_runs([read_run(make_run(tmp_path / r"a$\b$", [5.0, 4.0]))])


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


@pytest.mark.parametrize("finished", [True, None])
def test_flops_are_counted_phase_by_phase(tmp_path, finished):
    """Longer sequences take more of them a token; a summary's number is of the whole run."""
    phases = '[{"after_tokens": 200, "train.seq_len": 512}]'
    sizes = {"train__seq_len": 128, "train__global_batch": 1, "train__micro_batch": 1, "model__context": 512}
    folder = make_run(tmp_path / "r", [5.0, 4.0, 3.0, 2.0], finished=finished, train__phases=phases, **sizes)
    cfg = resolve(None, str(folder / "config.yaml"), [])
    short, long = (flops_per_token(cfg.model, seq_len) for seq_len in (128, 512))
    begin = get_phases(cfg).all[1].tokens_before  # a whole step's
    want = [short * min(n, begin) + long * max(n - begin, 0) for n in (100, 200, 300, 400)]
    if finished:
        summary = run_folder.summary(folder)
        want = [flops * summary["flops"] / want[-1] for flops in want]
    assert read_run(folder).flops == pytest.approx(want, rel=1e-12) and long > 1.05 * short


def test_a_branch_has_no_loss_before_it_began(tmp_path):
    whole = make_run(tmp_path / "whole", [5.0, 4.0])
    branch = make_run(tmp_path / "branch", [3.0, 2.0], start=5)
    rows = table_rows([read_run(whole), read_run(branch)])
    assert [row["at 200 tokens"] for row in rows] == ["4.0000", "n/a"]


def test_the_page_needs_no_other_file(tmp_path, capsys):
    first = make_run(tmp_path / "a<b", [5.0, 4.0], optim__lr=1e-3)
    second = make_run(tmp_path / "c", [5.0, 3.0], optim__lr=2e-3, finished=None)
    out = tmp_path / "reports" / "report.html"  # in a folder that is not there yet
    assert command.main([str(first), str(second), "--out", str(out)]) == 0
    text = out.read_text()
    namespace = "http://www.w3.org/2000/svg"  # a name, which nothing is fetched from
    assert "data:image/png;base64," in text and "http" not in text.replace(namespace, "")
    assert "a&lt;b" in text and "a<b" not in text
    assert "running" in text and "mean over the last 2% of the tokens before a point" in text
    assert "http-equiv" not in text
    assert "http-equiv" in page([read_run(second)], refresh_s=5)

    shown = capsys.readouterr().out
    assert "optim.lr" in shown and "mean over the last 2% of the tokens before a point" in shown
    assert command.main([str(first), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["run"] == "a<b"


def test_the_page_fits_a_window_and_a_dark_one(tmp_path):
    """A long name breaks, a wide table scrolls in itself, and a single run is called by its name."""
    runs = [read_run(make_run(tmp_path / f"llama3-tiny+optim.lr={rate}", [5.0, 4.0], optim__lr=rate))
            for rate in (1e-3, 2e-3)]
    text = page(runs)
    assert "<meta name=viewport" in text and "color-scheme: light dark" in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert text.count("<table>") == text.count("<div class=wide><table>") == 3
    assert "<h1>2 runs</h1>" in text and "<h1>llama3-tiny+optim.lr=0.001</h1>" in page(runs[:1])


def page_parts(text):
    """(the data of a page's curves, its script)."""
    data = text.split("id=curves>")[1].split("</script>")[0]
    return json.loads(data), text.split("<script>")[1].split("</script>")[0]


def test_the_page_holds_the_curves_of_its_runs(tmp_path):
    """Every point of a short run, its validation where it was, and null for a step that has no loss."""
    first = read_run(make_run(tmp_path / "a<script>", [5.0, 4.0, None]))
    second = read_run(make_run(tmp_path / "b", [5.0, 3.0], model__layers=6))
    data, script = page_parts(page([first, second]))
    one, other = data["runs"]
    assert (one["name"], other["name"]) == ("a<script>", "b") and one["colour"] != other["colour"]
    assert one["x"]["tokens"] == [100, 200, 300] and one["x"]["FLOPs"] == first.flops.tolist()
    assert one["loss"] == [5.0, 4.0, None] and one["validation"]["loss"] == [None]
    assert other["validation"] == {"x": {"tokens": [200], "FLOPs": [second.flops[-1]]}, "loss": [3.5]}
    assert script == CHART.read_text(encoding="utf-8")


# A page without a window: what chart.js asks of one. Prints what is drawn, and what stands beside it.
BROWSER = """
const made = name => ({name, attributes: {}, children: [], style: {}, textContent: "", clientWidth: 800,
  setAttribute(key, value) { this.attributes[key] = value },
  appendChild(child) { this.children.push(child); return child },
  append(...all) { this.children.push(...all) },
  add(child) { this.children.push(child) },
  replaceChildren(...all) { this.children = all },
  getBoundingClientRect: () => ({left: 0})});
const places = {chart: made("div"), curves: {textContent: process.argv[1]}};
global.Option = function (text) { Object.assign(this, made("option"), {text}) };
global.document = {createElement: made, createElementNS: (_, name) => made(name),
  getElementById: id => places[id]};
global.location = {hash: process.argv[2] || ""};
global.history = {replaceState: (_, __, hash) => { location.hash = hash }};
global.window = {addEventListener: () => {}};
const all = (node, name) => (node.children || []).flatMap(one =>
  [...(one.name === name ? [one] : []), ...all(one, name)]);
"""
LOOK = """
const chart = places.chart;
const look = () => ({curves: all(chart, "path").map(one => one.attributes.d),
  dots: all(chart, "circle").length, texts: all(chart, "text").map(one => one.textContent),
  reading: chart.children[3].textContent, hash: location.hash});
const seen = [look()];
const svg = all(chart, "svg")[0];
svg.onpointermove({clientX: 420});
seen.push(look());
const [logX, logY, fromStart] = all(chart, "input");
logY.checked = true; logY.onchange();
seen.push(look());
fromStart.checked = true; fromStart.onchange();
seen.push(look());
all(chart, "button")[0].onclick();
seen.push(look());
console.log(JSON.stringify(seen));
"""
PATHS = "console.log(JSON.stringify([all(places.chart, 'path').map(one => one.attributes.d)]));"


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js, which runs the page's script")
def test_the_page_draws_what_is_asked(tmp_path):
    """Values under the pointer, axes by choice, a run that is hidden; the address keeps what is chosen."""
    runs = [read_run(make_run(tmp_path / name, losses, model__layers=layers))
            for name, losses, layers in (("a", [8.0, 4.0, 2.0], 4), ("b", [9.0, 5.0, 3.0], 6))]
    data, script = page_parts(page(runs))

    def browse(actions, address=""):
        program = BROWSER + script + actions
        command = ["node", "-e", program, json.dumps(data), address]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    first, pointed, logarithmic, whole, alone = browse(LOOK)
    assert len(first["curves"]) == 2 and first["dots"] == 2 and "tokens" in first["texts"]
    assert first["reading"] == "at the end: a 2.0000 · b 3.0000"
    # 420 of 800 columns: (420 - 52) / (800 - 52 - 12) = half of the axis from 0 to 300 tokens
    assert pointed["reading"] == "at 150 tokens: a 6.0000 · b 7.0000"
    assert logarithmic["curves"] != first["curves"] and whole["curves"] != logarithmic["curves"]
    assert len(alone["curves"]) == 1 and alone["reading"] == "at the end: b 3.0000"

    # the address holds the choices, and wrong ones are as none
    (again,) = browse(PATHS, alone["hash"])
    assert again == alone["curves"]
    (plain,) = browse(PATHS, "#{broken")
    assert plain == first["curves"]

    places = browse("console.log(JSON.stringify([ticks(0, 300, false, 6), ticks(1, 1e4, true, 6), "
                    "ticks(2, 2, false, 6), ticks(2.1, 7.3, true, 6), shortNumber(1500000), "
                    "shortNumber(2e18), valueAt([0, 1], [1, null], 0.5), valueAt([1, 2], [3, 4], 5)]));")
    assert places[:3] == [[0, 50, 100, 150, 200, 250, 300], [1, 3, 10, 30, 100, 300, 1000, 3000, 10000], [2]]
    assert places[3:] == [[3, 4, 5, 6, 7], "1.5M", "2e+18", None, None]


def test_equal_sizes_have_one_axis(tmp_path, monkeypatch):
    """At equal FLOPs they have equal tokens: a second picture and column would say the same."""
    from matplotlib.axes import Axes

    drawn = []
    monkeypatch.setattr(Axes, "set_xlabel", lambda axes, label: drawn.append(label))
    same = [read_run(make_run(tmp_path / name, [5.0, 4.0])) for name in "ab"]
    larger = read_run(make_run(tmp_path / "c", [5.0, 4.0], model__layers=6))
    draw_runs(same)
    assert drawn == ["tokens"] and not any("at" in name and "FLOPs" in name for name in table_rows(same)[0])
    draw_runs([*same, larger])
    assert drawn[1:] == ["tokens", "FLOPs"]
    assert any(name.startswith("at ") and "FLOPs" in name for name in table_rows([*same, larger])[0])


def test_a_narrow_table_says_what_is_left_out(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path / "a-run-with-a-name-that-is-long", [5.0, 4.0])
    monkeypatch.setenv("COLUMNS", "80")
    assert command.main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if "too narrow" in line).startswith("too narrow for: MFU, tokens/s, ")
    monkeypatch.setenv("COLUMNS", "200")
    assert command.main([str(folder)]) == 0
    assert "too narrow" not in capsys.readouterr().out


def test_equal_curves_are_equal_at_equal_tokens_however_long_they_are(tmp_path):
    """The window of the smoothing was a share of the whole run: the longer run had a higher loss here."""
    losses = list(np.linspace(6.0, 2.0, 3000))
    short, long = make_run(tmp_path / "short", losses[:1000]), make_run(tmp_path / "long", losses)
    runs = [read_run(short), read_run(long)]
    assert [run.loss_at(100_000) for run in runs] == [runs[0].loss_at(100_000)] * 2
    assert runs[0].loss_at(100_000) == pytest.approx(np.mean(losses[980:1000]))
    at_equal = [row["at 100.0K tokens"] for row in table_rows(runs)]
    assert at_equal[0] == at_equal[1]


def test_a_long_run_keeps_all_its_evaluations(tmp_path):
    """Above 20,000 steps not all rows are read; an evaluation between two that are is still there."""
    folder = make_run(tmp_path / "a", [3.0] * 20_001)
    evaluations = [json.dumps({"step": step, "val_loss": 3.0, "val_bpb": 1.0}) for step in (2, 10_000)]
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines + "\n".join(evaluations) + "\n")
    assert sorted(read_run(folder).validation_tokens) == [200, 1_000_000, 2_000_100]


def test_a_diverged_run_is_called_so(tmp_path, capsys):
    """Its last losses are null; a mean that was put in their place looked like a loss."""
    fine = make_run(tmp_path / "fine", [5.0, 4.0, 3.0])
    diverged = make_run(tmp_path / "diverged", [5.0, 4.0, None], optim__lr=1.0)
    never = make_run(tmp_path / "never", [None, None, None], optim__lr=9.0)
    runs = [read_run(folder) for folder in (fine, diverged, never)]
    rows = table_rows(runs)
    assert [row["train loss"] for row in rows] == ["3.0000", "diverged", "diverged"]
    assert [row["val loss"] for row in rows] == ["3.5000", "diverged", "diverged"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert "diverged" in page(runs) and "diverged" in page([read_run(never)])


def started(folder, exit_code):
    """A line of starts.jsonl, as a start writes it."""
    record = StartRecord(time=1.0, world=1, first_step=1, exit_code=exit_code)
    with open(folder / STARTS_FILE, "ab") as file:
        file.write(record.to_line())


def test_the_summary_of_an_earlier_start_is_not_trusted(tmp_path, monkeypatch):
    """A run that was resumed trains: --watch goes on until it has ended, and then ends."""
    folder = make_run(tmp_path / "a", [5.0, 4.0], finished=False)
    started(folder, 75)
    assert table_rows([read_run(folder)])[0]["state"] == "stopped"

    started(folder, None)  # no step of it yet
    assert table_rows([read_run(folder)])[0]["state"] == "running"
    (folder / STARTS_FILE).unlink()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, "loss": 3.0, "tokens": 300}) + "\n")
    assert table_rows([read_run(folder)])[0]["state"] == "running"

    waits = []

    def end_the_run(seconds):
        waits.append(seconds)
        summary = run_folder.summary(folder)
        (folder / "summary.json").write_text(json.dumps(summary | {"step": 3, "finished": True}))

    monkeypatch.setattr(command.time, "sleep", end_the_run)
    out = tmp_path / "report.html"
    assert command.main([str(folder), "--out", str(out), "--watch", "7"]) == 0
    assert waits == [7] and "finished" in out.read_text() and "http-equiv" not in out.read_text()


def test_a_run_that_was_killed_is_not_called_running_for_ever(tmp_path):
    folder = make_run(tmp_path / "a", [5.0, 4.0], finished=None)
    started(folder, None)
    assert table_rows([read_run(folder)])[0]["state"] == "running"
    for name in ("metrics.jsonl", STARTS_FILE):
        os.utime(folder / name, (time.time() - 45 * 60,) * 2)
    assert table_rows([read_run(folder)])[0]["state"] == "no news for 45 min"


def test_losses_of_other_tokens_are_not_compared_without_a_word(tmp_path, capsys):
    first = make_run(tmp_path / "a", [5.0, 4.0], eval__batches=8, train__global_batch=16)
    same = make_run(tmp_path / "b", [5.0, 4.0], eval__batches=4, train__global_batch=32)
    fewer = make_run(tmp_path / "c", [5.0, 4.0], eval__batches=4, train__global_batch=16)
    other = make_run(tmp_path / "d", [5.0, 4.0], eval__batches=8, train__global_batch=16,
                     data__tokenizer="bpe-300")
    runs = [read_run(folder) for folder in (first, same, fewer, other)]
    assert doubts(runs[:2]) == [], "as many sequences"
    (line,) = doubts([runs[0], runs[2]])
    assert line.startswith("eval.batches x train.global_batch: not the same")
    (line,) = doubts([runs[0], runs[3]])
    assert line.startswith("data.tokenizer: not the same") and "bits/byte" in line
    assert [row["bits/byte"] for row in table_rows(runs)] == ["1.2500"] * 4

    assert line in page([runs[0], runs[3]])
    assert command.main([str(first), str(other)]) == 0
    assert "data.tokenizer: not the same" in capsys.readouterr().out
    assert command.main([str(first), str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["doubts"] == [line]


def test_losses_of_other_tokens_are_seen_in_phases_and_a_span_that_changes_none_is_not(tmp_path):
    """A phase is validated on its own data and lengths; data.span moves no sample of a validation until it is
    longer than a sequence. Only phases that have been validated count.
    """
    def run(name, **keys):
        return read_run(make_run(tmp_path / name, [5.0, 4.0, 3.0], train__seq_len=64, **keys))

    def phases(**changes):
        row = {"after_steps": 2, **{key.replace("__", "."): value for key, value in changes.items()}}
        return {"train__phases": json.dumps([row])}

    plain = run("plain")
    assert doubts([plain, run("rate", **phases(optim__lr=1e-4))]) == []
    assert doubts([plain, run("branch", data__span=64)]) == []
    (line,) = doubts([plain, run("span", data__span=128)])
    assert line.startswith("data.span: not the same; validation losses")
    (line,) = doubts([plain, run("length", data__span=64, **phases(train__seq_len=128))])
    assert line.startswith("data.span, train.seq_len: not the same; validation losses are of different")
    (line,) = doubts([plain, run("data", **phases(data__path="0.5 stdlib 0.5 other"))])
    assert line.startswith("data.path: not the same; validation losses")
    (line,) = doubts([plain, run("batch", **phases(train__global_batch=32))])
    assert line.startswith("eval.batches x train.global_batch: not the same; validation losses")
    later = {"train__phases": json.dumps([{"after_steps": 3, "data.path": "other"}])}
    assert doubts([plain, run("later", **later)]) == []


@pytest.mark.parametrize(
    "argv,message",
    [
        (["nowhere"], "nowhere: no run that can be read"),
        (["a", "--out", "x.pdf"], "--out: x.pdf ends in neither .html nor .png"),
        (["a", "--watch", "3"], "--watch: needs --out"),
        (["a", "b/a"], "two runs are named a"),
    ],
)
def test_what_cannot_be_compared_is_named(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", [5.0])
    with pytest.raises(ConfigError, match=message):
        command.main(argv)


def test_the_page_of_a_group_has_the_runs_that_join_it(tmp_path, monkeypatch, capsys):
    """Beside runs of another group, a folder of data and a config of another program."""
    runs, out = tmp_path / "runs", tmp_path / "page.html"
    make_run(runs / "small", [5.0, 4.0], log__group="sizes", finished=None)
    make_run(runs / "foreign", [5.0, 4.5], log__group="rates")
    for name, text in (("data", "log: none\n"), ("damaged", "log: [\n")):
        (runs / name).mkdir()
        (runs / name / "config.yaml").write_text(text)
    pages = []

    def join(seconds):
        pages.append(out.read_text())
        make_run(runs / "large", [4.0, 3.0], log__group="sizes")
        summary = json.loads((runs / "large" / "summary.json").read_text())
        (runs / "small" / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(command.time, "sleep", join)
    assert command.main([str(runs), "--group", "sizes", "--out", str(out), "--watch", "7"]) == 0
    assert ["small" in text for text in (*pages, out.read_text())] == [True, True]
    assert ["large" in text for text in (*pages, out.read_text())] == [False, True]
    assert "foreign" not in out.read_text() and "large" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=f"^--group: no run in {runs} has log.group nobody; name"):
        command.main([str(runs), "--group", "nobody"])


def test_a_run_without_a_step_is_named(tmp_path):
    folder = make_run(tmp_path / "a", [5.0])
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no step in metrics.jsonl yet"):
        read_run(folder)
