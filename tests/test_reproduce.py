"""A run, a checkpoint, a data set and an export say what made them, and a run can be made again from that."""

import json
import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import sys

import fake_wandb
import numpy as np
import pytest
import run_folder
import torch
from ranks import MODEL, corpus, job, write_documents
from safetensors.torch import load_file, save_file
from tokenizer_families import make_tokenizer

import train
from checkpoint.systems.foreign_systems import seal_hf_weights
from config import ConfigError, provenance
from config.provenance import checkout_files
from config.reading import resolve, split_argv, unused
from runtime.failure import fail_cleanly
from scripts import average, convert, prepare_data, reproduce
from scripts.compare import __main__ as compare

pytestmark = pytest.mark.usefixtures("whole_runs")
ROOT = pathlib.Path(__file__).parent.parent
IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
TINY = ("llama3-tiny", *MODEL, "--train.steps", "2", "--checkpoint.every", "1")


def git(folder, *words):
    done = subprocess.run(["git", *IDENTITY, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A small repository that the processes of the test take for their checkout."""
    root = tmp_path / "repo"
    (root / "model").mkdir(parents=True)
    (root / "train.py").write_text("")
    (root / "model/mlp.py").write_text("one\ntwo\nthree\n")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    monkeypatch.setattr(provenance, "ROOT", root)
    return root


@pytest.fixture
def run(tmp_path, capfd):
    """run(more words): train.py in a fork of this process -> (exit code, what it printed)."""
    data = corpus(tmp_path)

    def start(*words):
        words = [*TINY, "--log.dir", str(tmp_path), "--log.name", "r", "--data.path", data, *words]
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = fail_cleanly(train.main, words)
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out, err = capfd.readouterr()
        return code, out + err

    start.words = [*TINY, "--log.dir", str(tmp_path), "--log.name", "r", "--data.path", data]
    return start


def test_a_run_says_what_made_it(run, repo, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "abcdefgh")
    told = fake_wandb.install(tmp_path, monkeypatch)
    (repo / "model/mlp.py").write_text("one\nTWO\nthree\n")
    (repo / "model/mine.py").write_text("mine\n")
    code, out = run("--log.wandb", "offline", "--eval.sample", "1", "--eval.prompt", "say abcdefgh")
    assert code == 0, out
    folder = tmp_path / "r"
    (record,) = provenance.read_records(folder)
    commit = git(repo, "rev-parse", "HEAD")
    assert record["code"]["commit"] == commit
    assert record["code"]["changed"] == {"model/mine.py": [1, 0], "model/mlp.py": [1, 1]}
    typed = [*run.words, "--log.wandb", "offline", "--eval.sample", "1", "--eval.prompt", "say <MY_TOKEN>"]
    assert shlex.split(record["command"]) == ["python", "train.py", *typed]
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["numpy"] == np.__version__
    assert record["host"] == socket.gethostname() and record["folder"] == os.getcwd()
    assert record["hardware"]["device"] == "cpu" and record["hardware"]["ranks"] == 1
    (data,) = record["inputs"]["data"]
    assert data["path"] == str(tmp_path / "text") and data["tokenizer"] == "bytes"
    assert record["settings"]["train.steps"] == 2

    # the patch makes the tree, in git's own hands
    (patch,) = (folder / "patches").iterdir()
    git(repo, "stash", "-q", "-u")
    git(repo, "apply", str(patch))
    assert (repo / "model/mine.py").read_text() == "mine\n"
    assert (repo / "model/mlp.py").read_text() == "one\nTWO\nthree\n"

    # the same in what it leaves
    kept = {key: value for key, value in record.items() if key != "settings"}
    for step in (1, 2):
        meta = json.loads((folder / f"checkpoints/step_0000000{step}/meta.json").read_text())
        assert meta["provenance"] == kept
    assert run_folder.summary(folder)["provenance"] == kept
    (facts,) = (line[1]["run"] for line in told() if line[0] == "config")
    assert facts["provenance"] == kept


def test_wandb_names_the_program_that_the_user_started(run, repo, tmp_path, monkeypatch):
    told = fake_wandb.install(tmp_path, monkeypatch, init="tell('argv', sys.argv)")
    code, out = run("--log.wandb", "offline")
    assert code == 0, out
    (settings,) = (line[1] for line in told() if line[0] == "settings")
    assert settings["program"] == settings["program_relpath"] == "train.py"
    assert settings["program_abspath"] == str(ROOT / "train.py")
    (argv,) = (line[1] for line in told() if line[0] == "argv")
    assert argv[1:] == [*run.words, "--log.wandb", "offline"]

    (line,) = (line for line in out.splitlines() if "wandb sync" in line)
    (name,) = (line[1]["id"] for line in told() if line[0] == "init")
    sync = shlex.split(line[line.index("wandb sync"):])
    assert sync == ["wandb", "sync", f"{tmp_path}/r/wandb/offline-run-*-{name}"]
    assert "wandb sync" not in run("--train.steps", "3")[1]


def test_a_resume_under_other_code_says_so(run, repo, tmp_path):
    (repo / "model/mlp.py").write_text("one\nTWO\nthree\n")
    assert run()[0] == 0
    first = git(repo, "rev-parse", "--short=7", "HEAD")
    code, out = run("--train.steps", "3")
    assert code == 0 and "different code" not in out

    git(repo, "commit", "-q", "-a", "-m", "second")
    (repo / "model/mlp.py").write_text("one\nTWO\nand\nthree\nfour\n")
    second = git(repo, "rev-parse", "--short=7", "HEAD")
    code, out = run("--train.steps", "4")
    assert code == 0, out
    (line,) = (line for line in out.splitlines() if "different code" in line)
    assert line == f"resumed with different code ({first}+ -> {second}+: model/mlp.py +2 -0)"
    assert [record["step"] for record in provenance.read_records(tmp_path / "r")] == [0, 2, 3]


@pytest.mark.slow
def test_a_resume_under_other_packages_says_so(run, repo, monkeypatch):
    monkeypatch.setattr(np, "__version__", "1.0")
    assert run()[0] == 0
    monkeypatch.undo()
    code, out = run("--train.steps", "3")
    assert code == 0
    assert f"resumed with different packages (numpy 1.0 -> {np.__version__})" in out
    assert "different packages" not in run("--train.steps", "4")[1]


@pytest.mark.parametrize("trouble", ["a run folder that refuses", "git does not answer"])
def test_nothing_of_it_ends_a_start(run, repo, tmp_path, monkeypatch, trouble):
    if trouble == "git does not answer":
        (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
        (tmp_path / "git").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(provenance.git, "__kwdefaults__", {"content": b"", "seconds": 0.2})
    else:
        (tmp_path / "r" / provenance.RECORDS_FILE).mkdir(parents=True)
    code, out = run()
    assert code == 0, out
    if trouble == "git does not answer":
        (record,) = provenance.read_records(tmp_path / "r")
        assert record["code"]["commit"] is None and "did not end within" in record["code"]["why"]
    else:
        (line,) = (line for line in out.splitlines() if line.startswith("warning"))
        assert "provenance.jsonl: Is a directory" in line


def test_a_start_that_trains_nothing_leaves_no_record(run, repo, tmp_path):
    assert run()[0] == 0
    assert run()[0] == 0  # it is finished
    assert run("--train.steps", "1")[0] == 2
    assert len(provenance.read_records(tmp_path / "r")) == 1


def test_of_several_ranks_one_writes(repo, tmp_path, capfd):
    data = corpus(tmp_path)
    end = job(tmp_path, 2, [*TINY, "--log.dir", str(tmp_path), "--log.name", "r", "--data.path", data])
    assert end.codes == [0, 0], end.logs
    (record,) = provenance.read_records(tmp_path / "r")
    assert record["hardware"]["ranks"] == 2
    meta = json.loads((tmp_path / "r/checkpoints/step_00000002/meta.json").read_text())
    assert meta["provenance"]["code"]["commit"] == git(repo, "rev-parse", "HEAD")

    out = tmp_path / "again"
    assert reproduce.main([str(tmp_path / "r"), "--out", str(out)]) == 0
    printed = capfd.readouterr().out
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    assert f"{sys.executable} {launcher} {out}/code/train.py --config {out}/config.yaml" in printed


def test_each_phase_names_its_data(run, repo, tmp_path):
    (tmp_path / "b").mkdir()
    other = corpus(tmp_path / "b")
    phases = json.dumps([{"after_steps": 1, "data.path": other}])
    code, out = run("--train.phases", phases)
    assert code == 0, out
    records = provenance.read_records(tmp_path / "r")
    assert [record["step"] for record in records] == [0, 1]
    paths = [[data["path"] for data in record["inputs"]["data"]] for record in records]
    assert paths == [[str(tmp_path / "text")], [other]]
    meta = json.loads((tmp_path / "r/checkpoints/step_00000002/meta.json").read_text())
    assert meta["provenance"]["inputs"] == records[1]["inputs"]


@pytest.mark.slow
def test_a_run_says_where_its_weights_come_from(run, repo, tmp_path, capfd):
    assert run()[0] == 0
    code, out = run("--log.name", "tuned", "--checkpoint.init_from", str(tmp_path / "r"))
    assert code == 0, out
    assert run("--train.steps", "3")[0] == 0  # the source continues
    (record,) = provenance.read_records(tmp_path / "tuned")
    source = tmp_path / "r/checkpoints/step_00000002"
    sealed = (source / "index.sha256").read_text().split()[0]
    assert record["inputs"]["checkpoint.init_from"] == {"path": str(source), "index_sha256": sealed}

    # made again, it begins with the same
    assert reproduce.main([str(tmp_path / "tuned"), "--out", str(tmp_path / "again")]) == 0
    assert f"--checkpoint.init_from {source} " in capfd.readouterr().out
    shutil.rmtree(source)
    assert f"checkpoint.init_from: {source} is gone" in refusal(tmp_path / "tuned")


@pytest.mark.parametrize("kind", ["Hugging Face", "run"])
def test_a_run_names_its_teacher_and_resumes_with_no_other(run, repo, tmp_path, kind):
    source, folder = tmp_path / "teacher", tmp_path / "hf"
    assert run("--log.name", "teacher")[0] == 0
    if kind == "run":
        folder, path = source, source / "checkpoints/step_00000002"
        sealed = {"index_sha256": (path / "index.sha256").read_text().split()[0]}
    else:
        assert convert.main(["to-hf", str(source), str(folder)]) == 0
        for file in folder.glob("tokenizer*"):  # bytes in another form than the run's
            file.unlink()
        path, sealed = folder, {"weights_sha256": seal_hf_weights(folder)}
    words = ("--log.name", "taught", "--distill.teacher", str(folder))
    for steps in ("2", "3"):
        code, out = run(*words, "--train.steps", steps)
        assert code == 0, out
    for record in provenance.read_records(tmp_path / "taught"):
        assert record["inputs"]["distill.teacher"] == {"path": str(path), **sealed}

    # other weights of the same sizes
    if kind == "run":
        assert run("--log.name", "teacher", "--train.steps", "3")[0] == 0
    else:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.down_proj.weight"].mul_(1.01)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code, out = run(*words, "--train.steps", "4")
    assert code == 2
    (line,) = (line for line in out.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: distill.teacher: {folder}") and f"was taught by {path} with" in line
    (before,) = sealed.values()
    assert before[:12] in line and f"--checkpoint.init_from {tmp_path}/taught" in line
    if kind == "run":  # its checkpoint is still there
        assert run(*words[:-1], str(path), "--train.steps", "4")[0] == 0
    else:
        with pytest.raises(ConfigError, match=f"^distill.teacher: {path} is another checkpoint now"):
            reproduce.check_inputs(provenance.read_records(tmp_path / "taught"))


def test_data_that_is_read_with_start_tokens_is_known_by_its_files(run, repo, tmp_path):
    home = make_tokenizer("llama3", tmp_path / "tok")
    lines = [json.dumps({"text": f"the cat {number}" * 9}) for number in range(90)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = ["--input", tmp_path / "in.jsonl", "--tokenizer", home, "--out", tmp_path / "data"]
    assert prepare_data.main([str(word) for word in words]) == 0
    code, out = run("--data.path", str(tmp_path / "data"))
    assert code == 0 and "documents begin with" in out, out
    assert reproduce.main([str(tmp_path / "r"), "--out", str(tmp_path / "again")]) == 0


# ---- data sets, exports ------------------------------------------------------------------------------------


def test_a_data_set_says_what_made_it(repo, tmp_path, capfd):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"body": f"text {n}"}) + "\n" for n in range(9)))
    words = ["--input", str(source), "--tokenizer", "bytes", "--out", str(tmp_path / "o")]
    words += ["--jsonl-key", "body"]
    assert prepare_data.main(words) == 0
    made = json.loads((tmp_path / "o.json").read_text())["provenance"]
    assert shlex.split(made["command"]) == ["python", "-m", "scripts.prepare_data", *words]
    assert made["code"]["commit"] == git(repo, "rev-parse", "HEAD")
    sums = subprocess.run(["sha256sum", str(source)], capture_output=True, text=True, check=True).stdout
    (given,) = made["inputs"]
    assert given == {"path": str(source), "bytes": source.stat().st_size, "sha256": sums.split()[0]}


def test_the_corpus_that_a_run_makes_itself_says_it_too(repo, tmp_path, monkeypatch):
    from data import documents, prepare

    monkeypatch.setattr(documents, "stdlib_files", lambda: [json.__file__])
    prefix, _ = prepare.prepare_stdlib(tmp_path / "cache", "bytes")
    made = json.loads(pathlib.Path(f"{prefix}.json").read_text())["provenance"]
    assert made["code"]["commit"] == git(repo, "rev-parse", "HEAD")


def test_an_export_a_mean_and_an_import_say_what_made_them(run, repo, tmp_path, capfd):
    assert run()[0] == 0
    made = provenance.read_records(tmp_path / "r")[0]
    assert convert.main(["to-hf", str(tmp_path / "r"), str(tmp_path / "hf")]) == 0
    said = json.loads((tmp_path / "hf/provenance.json").read_text())
    assert said["run"] == "r" and said["step"] == 2 and said["tokens"] == 128
    assert said["commit"] == git(repo, "rev-parse", "HEAD")
    assert said["training"]["command"] == made["command"]

    assert average.main([str(tmp_path / "r"), str(tmp_path / "mean"), "--last", "2"]) == 0
    meta = json.loads((tmp_path / "mean/checkpoints/step_00000002/meta.json").read_text())
    assert "scripts.average" in meta["provenance"]["command"]
    assert convert.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    meta = json.loads((tmp_path / "back/checkpoints/step_00000000/meta.json").read_text())
    assert "scripts.convert from-hf" in meta["provenance"]["command"]


@pytest.mark.slow
def test_runs_of_other_code_and_data_are_told_apart(run, repo, tmp_path, capfd):
    assert run()[0] == 0
    assert run("--log.name", "same")[0] == 0
    (repo / "model/mlp.py").write_text("other\n")
    assert run("--log.name", "edited")[0] == 0
    (tmp_path / "new").mkdir()
    for path in tmp_path.glob("text.*"):
        if path.is_file():
            shutil.copy(path, tmp_path / "new")
    shutil.copytree(tmp_path / "text.tokenizer", tmp_path / "new/text.tokenizer")
    assert run("--log.name", "moved", "--data.path", str(tmp_path / "new/text"))[0] == 0
    capfd.readouterr()

    def different(*names):
        assert compare.main([*(str(tmp_path / name) for name in names), "--json"]) == 0
        return json.loads(capfd.readouterr().out)["different"]

    assert different("r", "same") == {}
    commit = git(repo, "rev-parse", "--short=7", "HEAD")
    (patch,) = (tmp_path / "edited/patches").iterdir()
    assert different("r", "edited") == {"code": [commit, f"{commit}+ ({patch.name})"]}
    assert set(different("edited", "moved")) == {"data.path"}
    write_documents(tmp_path / "text", [range(97, 123)] * 40)
    assert run("--log.name", "later")[0] == 0
    capfd.readouterr()
    assert set(different("edited", "later")) == {"data"}
    assert compare.main([str(tmp_path / "edited"), str(tmp_path / "later")]) == 0
    assert "data: not the same; validation losses are of different tokens" in capfd.readouterr().out


# ---- again -------------------------------------------------------------------------------------------------


def refusal(*words):
    with pytest.raises(ConfigError) as caught:
        reproduce.main([str(word) for word in words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_is_made_again_from_its_tree(run, repo, tmp_path, capfd):
    """The tree, the command, and why not; of a small repository, so that nothing is trained again."""
    (repo / "model/mlp.py").write_text("one\nTWO\nthree\n")
    (repo / "model/mine.py").write_text("mine\n")
    mirrored = ("--checkpoint.mirror", f"file://{tmp_path}/store", "--checkpoint.mirror_failures", "10")
    assert run(*mirrored)[0] == 0
    git(repo, "stash", "-q", "-u")
    (repo / "model/mlp.py").write_text("today's\n")
    git(repo, "commit", "-q", "-a", "-m", "later")
    out = tmp_path / "again"
    assert reproduce.main([str(tmp_path / "r"), "--out", str(out)]) == 0
    tree = out / "code"
    assert git(tree, "rev-parse", "HEAD") == git(repo, "rev-parse", "HEAD~")
    assert (tree / "model/mlp.py").read_text() == "one\nTWO\nthree\n"
    assert (tree / "model/mine.py").read_text() == "mine\n"
    printed = capfd.readouterr().out
    (command,) = (line for line in printed.splitlines() if line.strip().startswith("cd "))
    words = shlex.split(command.strip())
    assert words[:3] == ["cd", os.getcwd(), "&&"] and words[4] == str(tree / "train.py")
    assert words[words.index("--config") + 1] == str(out / "config.yaml")
    again = resolve(*split_argv(words[5:]))
    assert again.checkpoint.mirror is None  # nothing goes where the first run has sent it
    unused.check_unused(again, 1)  # train.py takes the command

    assert refusal(tmp_path / "r", "--out", out).startswith(f"--out: {out} exists")
    assert "today" in (repo / "model/mlp.py").read_text()


def later_start(records, code=None, settings=None):
    """Another start of the run, from step 5 on."""
    record = json.loads(json.dumps(records[0])) | {"date": "later", "step": 5}
    record["code"].update(code or {})
    record["settings"].update(settings or {})
    records.append(record)


NO_GIT = {"hash": "5" * 64, "commit": None, "why": "git is not installed", "files": {}}
BROKEN = {  # what happens to a run's folder and records: how it is refused
    "no such commit": (
        lambda folder, records: records[0]["code"].update(commit="1" * 40),
        "commit 1{40} is not in this clone, .*git fetch",
    ),
    "no patch": (
        lambda folder, records: next((folder / "patches").iterdir()).unlink(),
        r"patches/.*\.patch: No such file",
    ),
    "a patch too large to keep": (
        lambda folder, records: records[0]["code"].update(kept=False),
        "were not committed, more than the .*model/mlp.py",
    ),
    "no data": (
        lambda folder, records: (folder.parent / "text.idx").unlink(), r"text.idx: No such file .*restore",
    ),
    "other data": (
        lambda folder, records: records[0]["inputs"]["data"][0].update(identity="2" * 64),
        "text.bin: is not what it was .*222222222222",
    ),
    "a later start of other code": (
        lambda folder, records: later_start(records, code={"hash": "3" * 64}),
        "start 2, from step 5 on, ran other code",
    ),
    "a later start of other settings": (
        lambda folder, records: later_start(records, settings={"optim.lr": 0.5}),
        r"start 2, from step 5 on, had another optim.lr",
    ),
    "another tree": (
        lambda folder, records: records[0]["code"].update(hash="4" * 64),
        "the tree .* is not the code that ran",
    ),
    "no git": (
        lambda folder, records: records[0].update(code=NO_GIT),
        "made without a commit .git is not installed.*, by code 5555555",
    ),
    "no record": (lambda folder, records: records.clear(), "does not say what made it"),
}


def test_what_cannot_be_made_again_is_one_line(run, repo, tmp_path):
    (repo / "model/mlp.py").write_text("one\nTWO\nthree\n")
    assert run()[0] == 0
    good = tmp_path / "good"
    (tmp_path / "r").rename(good)
    texts = {path: path.read_bytes() for path in tmp_path.glob("text.*") if path.is_file()}
    for number, (damage, message) in enumerate(BROKEN.values()):
        folder = tmp_path / "r"
        shutil.copytree(good, folder)
        records = provenance.read_records(folder)
        damage(folder, records)
        (folder / provenance.RECORDS_FILE).write_text("".join(json.dumps(r) + "\n" for r in records))
        out = tmp_path / f"out{number}"
        with pytest.raises(ConfigError, match=message):
            reproduce.main([str(folder), "--out", str(out)])
        assert not out.exists(), message
        assert len(git(repo, "worktree", "list").splitlines()) == 1
        shutil.rmtree(folder)
        for path, content in texts.items():
            path.write_bytes(content)
    assert "no run" in refusal(tmp_path / "nowhere")


@pytest.mark.slow
def test_the_same_bits_from_an_edited_clone(tmp_path):
    """A run of a clone with edits that are not committed; the clone moves on; the run is made again."""
    clone = tmp_path / "clone"
    for name in checkout_files(ROOT):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    git(tmp_path, "init", "-q", str(clone))
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", "first")
    data = corpus(tmp_path)

    def python(*words):
        words = [sys.executable, *words]
        done = subprocess.run(words, cwd=clone, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    words = ["mine", *MODEL, "--train.steps", "2", "--data.path", os.path.relpath(data, clone)]
    mlp = clone / "model/mlp.py"
    recipe = clone / "configs/runs/mine.yaml"
    recipe.write_text("model: {preset: llama3-tiny}\n" + (clone / "configs/runs/tiny.yaml").read_text())
    (clone / "model/scale.py").write_text("SCALE = 1.25\n")
    plain = mlp.read_text()
    edited = plain.replace("return self.down(", "return SCALE * self.down(")
    mlp.write_text(f"{edited}\nfrom model.scale import SCALE\n")
    assert edited != plain
    python("train.py", *words, "--log.name", "first")

    mlp.write_text(plain)
    (clone / "model/scale.py").write_text("SCALE = 3.0\n")
    recipe.unlink()
    out = python("-m", "scripts.reproduce", "runs/first", "--run")
    again = run_folder.losses(clone / "runs/first-again/run")
    assert again == run_folder.losses(clone / "runs/first") and len(again) == 2
    assert "the same 2 losses, bit for bit" in out
