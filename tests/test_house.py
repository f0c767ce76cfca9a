"""The rules of the house, as tests: who may import whom, one mouth to torch.distributed, sizes, keys that are
read.
"""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest

import config
from config.provenance import checkout_files
from config.reading.kinds import every_path

ROOT = pathlib.Path(__file__).parent.parent
ROOMS = (
    "config", "kernels", "parallel", "model", "data", "optim", "checkpoint", "durable", "runtime", "plan",
    "lab", "scripts",
)
MODULES = ("train.py", "start.py", "phases.py", "services.py", "build.py")
TOOLS = {"lab", "scripts"}  # the top floor: nothing that trains imports them
OUTBUILDINGS = {"lab.proof", "lab.benchmarks", "lab.scaling"}  # none imports another
PROGRAM = {*ROOMS, "reading", "build", "services", "phases", "start"} - TOOLS
MAY = {  # room or file: what it may import of ours
    "config": {"config"},
    "kernels": {"kernels"},
    "parallel": {"parallel", "kernels"},
    "data": {"data", "config", "reading", "kernels", "parallel"},
    "model": {"model", "parallel", "kernels", "config"},
    "reading": {"reading", "model", "parallel", "config"},
    "optim": {"optim", "parallel", "kernels", "config", "reading"},
    "plan": {"plan", "config", "reading", "model", "parallel"},
    "plan.record": {"plan", "config", "reading", "model", "parallel", "kernels"},  # it runs the others
    "runtime": {"runtime", "data", "optim", "plan", "model", "parallel", "config", "reading"},
    "checkpoint": {"checkpoint", "runtime", "data", "optim", "model", "parallel", "config", "reading"},
    "durable": {
        "durable", "checkpoint", "runtime", "plan", "data", "optim", "model", "parallel", "config", "reading",
    },
    "build": {*ROOMS, "reading"} - TOOLS,
    "services": {*ROOMS, "reading", "build"} - TOOLS,
    "phases": {*ROOMS, "reading", "build", "services"} - TOOLS,
    "start": {*ROOMS, "reading", "build", "services", "phases"} - TOOLS,
    "train": PROGRAM,
    "lab.proof": {*PROGRAM, "train", "lab.proof"},
    "lab.benchmarks": {*PROGRAM, "train", "lab.benchmarks"},
    "lab.scaling": {"lab.scaling", "config", "reading", "model", "plan", "durable", "runtime"},
    "lab": {*PROGRAM, "train"},
    "scripts": {*PROGRAM, *TOOLS, "train", *OUTBUILDINGS},
}
# what plan may import of model and parallel: arithmetic and descriptions, nothing that computes or exchanges
PLANNABLE = {
    "parallel.topology.dims", "parallel.pipeline.schedule", "parallel.sharding", "parallel.sharding.bucket",
    "parallel.sharding.packing", "parallel.sharding.powersgd", "parallel.sharding.slots",
    "parallel.sharding.spec", "parallel.wire.compress", "model.describe", "model.flops", "model.precision",
    "model.router", "model.sharding", "model.shared_keys", "model.split",
}
PURE = {
    "parallel/wire/connection.py", "parallel/topology/dims.py", "parallel/pipeline/schedule.py",
    "parallel/sharding/boxes.py", "parallel/sharding/ranges.py", "parallel/sharding/packing.py",
}  # no torch
WIDTH = 110  # columns of a line
TYPE_VARIABLES = ("TypeVar", "ParamSpec")


@functools.cache
def sources():
    """[(path, what it says)] of every file."""
    found = []
    for name in sorted(checkout_files(ROOT)):
        where = pathlib.Path(name)
        if where.suffix == ".py" and where.parts[0] in (*ROOMS, "bevatron", *MODULES, "tests"):
            found.append((where, ast.parse((ROOT / where).read_text())))
    return found


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module if node.module else ""


def room(where):
    if where.parts[:2] == ("plan", "record"):
        return "plan.record"
    if where.parts[:2] == ("config", "reading"):
        return "reading"
    if where.parts[0] == "lab" and len(where.parts) > 2:
        return f"lab.{where.parts[1]}"
    return where.parts[0].removesuffix(".py")


def room_of_import(name):
    if name.split(".")[:2] == ["config", "reading"]:
        return "reading"
    return ".".join(name.split(".")[:2]) if name.startswith("lab.") else name.split(".")[0]


def test_imports_go_downwards():
    for where, tree in sources():
        if room(where) == "tests":
            continue
        for name in imports(tree):
            first = room_of_import(name)
            if first in MAY:
                assert first in MAY[room(where)], f"{where} imports {name}"
            if room(where) == "plan":
                assert first not in ("model", "parallel") or name in PLANNABLE, f"{where} imports {name}"
                is_read = name in ("plan.record.launches", "plan.record.part")
                assert is_read or not name.startswith("plan.record"), f"{where} imports {name}"
            if room(where) == "scripts" and name.startswith("scripts."):
                mine = where.parts[1].removesuffix(".py")
                assert name.split(".")[1] == mine, f"{where} imports {name}: scripts never import each other"


def test_the_picture_of_the_folders_shows_what_is_imported():
    """Its arrows are the imports, without those that a path of other arrows has already."""
    if not (ROOT / "lab").is_dir():
        pytest.skip("the picture has lab/, which this clone does not have")
    imported: dict[str, set[str]] = {}
    for where, tree in sources():
        if room(where) != "tests":
            firsts = {room_of_import(name).split(".")[0] for name in imports(tree)}
            name = room(where).split(".")[0]
            imported.setdefault(name, set()).update((firsts & set(MAY)) - {name})

    def below(one):
        """All that it imports, directly or by way of others."""
        return imported[one].union(*(below(other) for other in imported[one]))

    arrows = set()
    for one, others in imported.items():
        for other in others:
            if not any(other in below(third) for third in others - {other}):
                arrows.add((one, other))
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```mermaid")[1].split("```")[0]
    drawn = re.findall(r"^ *(\w+)(?:\[.*?\])? --> (\w+)", picture, re.MULTILINE)
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == arrows
    assert {name for arrow in drawn for name in arrow} == {name for name in MAY if "." not in name}


def test_pure_parts_need_no_torch():
    for where, tree in sources():
        if str(where) in PURE or room(where) in ("config", "plan"):
            assert "torch" not in {n.split(".")[0] for n in imports(tree)}, f"{where} imports torch"
        if str(where) in PURE:
            ours = [n for n in imports(tree) if n.split(".")[0] == "parallel" and n != "parallel"]
            assert all(n.replace(".", "/") + ".py" in PURE or n == "parallel.sharding" for n in ours), (
                f"{where} imports {ours}, and torch with it"
            )


def test_one_mouth_to_torch_distributed():
    mouth = ("parallel/wire/comm.py", "parallel/wire/world.py")
    for where, tree in sources():
        if room(where) != "tests" and str(where) not in mouth:
            assert not any(n.startswith("torch.distributed") for n in imports(tree)), where
            reached = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "distributed"]
            assert not reached, f"{where} reaches torch.distributed"


def test_one_mouth_to_object_stores():
    for where, tree in sources():
        if room(where) != "tests" and str(where) != "data/remote.py":
            firsts = {name.split(".")[0] for name in imports(tree)}
            assert not firsts & {"fsspec", "s3fs", "gcsfs", "adlfs"}, where


def test_figures_are_made_in_one_place():
    for where, tree in sources():
        if room(where) != "tests" and str(where) != "config/plots.py":
            names = list(imports(tree))
            assert not any(n.startswith(("matplotlib.backends", "matplotlib.pyplot")) for n in names), where


def test_environment_is_read_in_setup_alone():
    for where, _ in sources():
        if str(where) in ("runtime/setup.py", "runtime/__init__.py", "durable/launcher.py"):
            continue
        if room(where).split(".")[0] in ("tests", "bevatron", *TOOLS):
            continue
        assert not re.search(r"os\.(environ|getenv)", (ROOT / where).read_text()), where


def test_no_line_is_too_long_to_read():
    for where, _ in sources():
        for n, line in enumerate((ROOT / where).read_text().splitlines(), 1):
            assert len(line) <= WIDTH, f"{where}:{n} has {len(line)} characters"


def test_every_file_says_what_it_is():
    for where, tree in sources():
        if where.name != "__init__.py" and room(where) != "tests":
            assert ast.get_docstring(tree), where


def test_no_two_classes_have_one_name():
    places = {}
    for where, tree in sources():
        if room(where) == "tests":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                place = f"{where}:{node.lineno}"
                assert node.name not in places, f"{node.name}: {places[node.name]} and {place}"
                places[node.name] = place


def is_type_variable(value):
    """TypeVar("Name"): a type, which nothing can change."""
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in TYPE_VARIABLES
    )


def test_no_module_globals():
    """A name at module level is a constant (CAPS), a definition (of a function, a class, a type or a type
    variable), or dunder.
    """
    for where, tree in sources():
        if room(where) == "tests":
            continue
        for node in tree.body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)):
                continue
            made = (ast.Call, ast.List, ast.Dict, ast.Set)
            is_alias = isinstance(node, ast.Assign) and not isinstance(node.value, made)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)):
                is_constant = name.isupper() or name.startswith("__")
                assert is_constant or is_alias or is_type_variable(node.value), f"{where}: {name}"
        assert not any(isinstance(n, ast.Global) for n in ast.walk(tree)), where


def test_every_config_key_is_read():
    schema = "config/schema.py"  # what stands above "what follows" defines them
    text = "\n".join((ROOT / w).read_text() for w, _ in sources() if room(w) != "tests" and str(w) != schema)
    text += (ROOT / schema).read_text().split("# ---- what follows")[1]
    for path, (_, key) in every_path(config.Config).items():
        assert re.search(rf"\.{key}\b", text), f"{path} is never read"


def test_a_reference_stands_beside_each_kernel():
    """A file with a Triton kernel defines the same thing in plain torch, and tests/kernels has a file for
    it.
    """
    for path in (ROOT / "kernels").glob("*.py"):
        if "@triton.jit" in path.read_text():
            assert (ROOT / "tests" / "kernels" / f"test_{path.name}").exists(), path


UNPROVEN = "kernels.unproven"


def test_one_place_reaches_what_no_gpu_has_confirmed():
    """kernels/unproven/ is reached from model/unproven.py, and that from one function."""
    for where, tree in sources():
        if room(where) == "tests" or where.is_relative_to("kernels/unproven"):
            continue
        found = set(imports(tree))
        if any(name.startswith(UNPROVEN) for name in found):
            assert str(where) == "model/unproven.py"
        if "model.unproven" in found:
            assert str(where) == "model/block.py"


@pytest.mark.parametrize("unproven", [False, True])
def test_a_run_imports_unproven_kernels_only_when_asked(real_starts, unproven):
    code = (
        "import sys, torch; from config.reading import resolve;"
        "from model.block import TransformerBlock; from model.describe import mesh_of_one_stage;"
        f"cfg = resolve('llama3-tiny', None, ['--train.unproven', '{str(unproven).lower()}']);"
        "TransformerBlock(cfg, mesh_of_one_stage(cfg), 1);"
        f"print(any(name.startswith('{UNPROVEN}') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(unproven)


def test_a_start_that_asks_for_no_plan_loads_no_planner(real_starts):
    code = "import sys, train; print(*sorted(name for name in sys.modules if name.startswith('plan.')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["plan.count", "plan.job"]


def test_the_step_and_the_loop_stay_short():
    """A stranger reads train.py from top to bottom. What not every run has stands beside it."""
    text = (ROOT / "train.py").read_text()
    assert len(text.splitlines()) <= 400
    named = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    step = named["train_step"]
    inner = (ast.FunctionDef, ast.Lambda)
    assert len(step.body) - 1 <= 12  # without its docstring
    assert not any(isinstance(node, inner) for node in ast.walk(step) if node is not step)
    assert sum(isinstance(node, ast.AnnAssign) for node in named["Session"].body) <= 8
    for where in MODULES:
        nodes = list(ast.walk(ast.parse((ROOT / where).read_text())))
        assert not any(node.args.kwarg for node in nodes if isinstance(node, inner)), where
