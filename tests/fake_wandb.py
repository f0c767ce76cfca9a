"""W&B as it behaves, on bad days too: a wandb.py that the child process finds first.

As with the real one, a step that is smaller than the last one that was logged is dropped, and a run that is
resumed online begins at the step after its last.
"""

import json
import pathlib

FAKE = """
import json, os, sys, time
out = open({out!r}, "a")
def tell(*words):
    out.write(json.dumps(words) + "\\n"); out.flush()
class Settings:
    def __init__(self, **k): tell("settings", k)
class Config:
    def update(self, values, allow_val_change):
        tell("config", values)
class Run:
    name, id, config, step = "name", "abc", Config(), {step}
    def define_metric(self, names, step_metric):
        tell("axis", names, step_metric)
    def alert(self, title, text, level):
        tell("alert", title, text, level)
    def log(self, values, step):
        {log}
        if step < self.step:
            tell("dropped", step, values)
            return
        self.step = step
        tell("log", step, values)
    def log_artifact(self, artifact):
        tell("artifact", *artifact.parts)
    def finish(self, exit_code):
        {finish}
        tell("finish", exit_code)
def Html(text):
    return ["html", text]
def Table(columns, data):
    return ["table", columns, data]
def Image(path):
    return ["image", path]
class Artifact:
    def __init__(self, name, type, metadata):
        self.parts = [name, type, metadata]
    def add_reference(self, uri, checksum, max_objects):
        self.parts.append([uri, checksum])
    def add_file(self, path):
        self.parts.append(path)
def init(**k):
    print("noise"); print("noise", file=sys.stderr)
    {init}
    k.pop("settings")
    tell("init", k)
    return Run()
"""


def install(folder: pathlib.Path, monkeypatch, top="", init="pass", log="pass", finish="pass", step=0):
    """Lets the children of this process import it -> told(): what it was told so far.

    top, init, log, finish: code that goes there. step: where a resumed run begins.
    """
    out = folder / "told"
    out.touch()
    code = FAKE.format(out=str(out), init=init, log=log, finish=finish, step=step)
    (folder / "wandb.py").write_text(top + code)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return lambda: [json.loads(line) for line in out.read_text().splitlines()]
