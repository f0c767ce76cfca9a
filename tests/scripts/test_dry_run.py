"""train.py --dry-run, as a user types it."""

import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torch.cuda import _memory_viz

ROOT = Path(__file__).resolve().parents[2]
SIZE = (
    "--model.vocab 64 --model.layers 4 --model.hidden 16 --model.mixer.heads 2 --model.mixer.kv_heads none "
    "--model.mlp.width 16 --train.seq_len 8 --train.micro_batch 1 --train.global_batch 8"
).split()


def dry_run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "train.py", "llama3-tiny", "--dry-run", *SIZE, *words], cwd=ROOT,
        capture_output=True, text=True, timeout=200,
    )


def test_it_says_what_each_place_computes_holds_and_exchanges_and_when(tmp_path):
    files = {name: tmp_path / f"f.{name}" for name in ("json", "png", "json.gz", "pickle")}
    done = dry_run(
        *"--world 8 --parallel.pp 2 --parallel.tp 2 --parallel.zero 1".split(),
        *("--json", str(files["json"]), "--picture", str(files["png"])),
        *("--trace", str(files["json.gz"]), "--memory", str(files["pickle"])),
    )
    assert done.returncode == 0, done.stderr
    assert "llama3-tiny on 8 ranks (dp2 tp2 pp2) of h100-ib (NVIDIA H100 80GB HBM3)" in done.stdout
    assert "the exchanges of these ranks meet, under the rules of nccl" in done.stdout
    assert files["png"].stat().st_size > 5000
    tree = json.loads(files["json"].read_text())
    first, last = tree["roles"]
    assert (first["rank"], last["rank"]) == (0, 4) and tree["findings"] == []
    assert first["flops"] > 0 and last["flops"] > 0
    for role in tree["roles"]:
        assert role["peak"] == sum(held["nbytes"] for held in role["held"]) > role["state"] > 0
        assert max(point[1] for point in role["curve"]) == role["peak"]
        assert not role["unknown"] and not role["waits"]

    modelled = tree["modelled"]
    assert 0 < modelled["mfu"] < 1 and "modelled, not measured" in done.stdout
    for parts in modelled["ranks"].values():
        assert sum(parts.values()) == pytest.approx(modelled["seconds"])
        assert {"compute", "tp", "pp", "host"} <= set(parts)
    with gzip.open(files["json.gz"], "rt") as file:
        check_trace(json.load(file), tree)
    check_memory(pickle.loads(files["pickle"].read_bytes()), tree)


# ---- a trace -----------------------------------------------------------------------------------------------

# docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: Trace Event Format
KEYS = {
    "M": {"name": str, "args": dict},
    "X": {"name": str, "cat": str, "ts": float, "dur": float, "args": dict},
    "s": {"name": str, "cat": str, "id": str, "ts": float},
    "f": {"name": str, "cat": str, "id": str, "ts": float, "bp": str},
    "C": {"name": str, "ts": float, "args": dict},
}
ROUNDING = 1e-6  # microseconds: of sums of floats


def check_trace(trace: dict, tree: dict) -> None:
    """Every event has what its kind needs, and what it says agrees with the results."""
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in events:
        assert set(event) == {"ph", "pid", "tid", *KEYS[event["ph"]]}
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        for key, kind in KEYS[event["ph"]].items():
            assert isinstance(event[key], kind), event
        assert event.get("ts", 0.0) >= 0.0 and event.get("dur", 0.0) >= 0.0

    names = {(event["pid"], event["tid"]): event["args"]["name"]
             for event in events if event["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
    assert set(slices) <= set(names)
    for own in slices.values():  # in order, one after the other
        for before, after in zip(own, own[1:]):
            assert before["ts"] + before["dur"] <= after["ts"] + ROUNDING
    computed = [event for own in slices.values() for event in own if event["cat"] != "exchange"]
    last = max(event["ts"] + event["dur"] for event in computed)  # gathers run on in the next step
    assert last == pytest.approx(1e6 * tree["modelled"]["seconds"], abs=0.01)

    # what each thread shows
    for role in tree["roles"]:
        of_rank = {names[key]: own for key, own in slices.items() if key[0] == role["rank"]}
        assert sum(e["args"]["kernels"] for e in of_rank["compute"]) == role["launches"]
        flops = sum(e["args"]["FLOPs"] for e in of_rank["compute"])
        assert flops == pytest.approx(role["flops"], rel=1e-6)
        assert {e["name"].split()[0] for e in of_rank["ops of the pipeline"]} == {"F", "B", "optimizer"}
        exchanges = [e for name, own in of_rank.items() if "ranks" in name for e in own]
        sent = sum(e["args"]["bytes"] for e in exchanges if e["name"] != "receive")
        assert sent == sum(one["nbytes"] for one in role["exchanges"])
        levels = [e for e in events if e["ph"] == "C" and e["pid"] == role["rank"]]
        assert [e["ts"] for e in levels] == sorted(e["ts"] for e in levels)
        assert max(e["args"]["GiB"] for e in levels) == pytest.approx(role["peak"] / 2**30, abs=1e-6)

    # an arrow from each send to its receive, which have a slice at that time
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    sends = [e for own in slices.values() for e in own if e["name"] == "send"]
    assert starts.keys() == ends.keys() and len(starts) == len(sends) > 0
    for name, verb in ((starts, "send"), (ends, "receive")):
        for arrow in name.values():
            (found,) = [e for e in slices[arrow["pid"], arrow["tid"]] if e["ts"] == arrow["ts"]]
            assert found["name"] == verb
    for key, start in starts.items():
        assert ends[key]["ts"] >= start["ts"] and ends[key]["pid"] != start["pid"] and ends[key]["bp"] == "e"


# ---- the format of torch's allocator -----------------------------------------------------------------------


def check_memory(snapshot: dict, tree: dict) -> None:
    """torch's own functions read it; allocations do not overlap, and their peak is that of the results."""
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        page = plot(snapshot)
        assert "snapshot.pickle" in page and "MemoryViz" in page
    assert "Device 1" in _memory_viz.trace(snapshot)  # reads every entry
    assert len(_memory_viz.segsum(snapshot)) > 100
    assert len(snapshot["device_traces"]) == len(snapshot["segments"]) == len(tree["roles"])
    for role, segment, entries in zip(tree["roles"], snapshot["segments"], snapshot["device_traces"]):
        begin, *changes = entries
        assert (begin["action"], begin["addr"], begin["size"]) == (
            "segment_alloc", segment["address"], segment["total_size"]
        )  # fmt: skip
        alive: dict[int, int] = {}
        now = peak = blocks = most_blocks = 0
        for change in changes:
            address, size = change["addr"], change["size"]
            in_blocks = -(-size // 512)
            if change["action"] == "alloc":
                assert segment["address"] <= address <= address + size <= begin["addr"] + begin["size"]
                assert all(address + size <= other or other + alive[other] <= address for other in alive)
                alive[address] = size
                now, blocks = now + size, blocks + in_blocks
                peak, most_blocks = max(peak, now), max(most_blocks, blocks)
            elif change["action"] == "free_completed":
                assert alive.pop(address) == size
                now, blocks = now - size, blocks - in_blocks
        assert peak == role["peak"]
        assert 512 * most_blocks <= segment["total_size"] < 1.3 * 512 * most_blocks
        left = {one["address"]: one["requested_size"] for one in segment["blocks"]
                if one["state"] == "active_allocated"}
        assert left == alive
        assert sum(one["size"] for one in segment["blocks"]) == segment["total_size"]
        places = {frame["filename"] for change in changes for frame in change["frames"]}
        assert "kernels/linear.py" in places


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("words, named", [
    ("", "--world"),
    ("--world 0", "--world"),
    ("--world 3 --parallel.tp 2", "parallel"),
    ("--world 2 --cluster nowhere", "nowhere"),
    ("--world 2 --model.vocab none", "model.vocab"),
    ("--world 2 --model.vocab none --data.tokenizer bpe-512", "model.vocab"),
    ("--world 2 --phase 2", "--phase"),
    ("--world 2 --ranks 0,2", "--ranks"),
    ("--world 2 --cluster v100-ib", "v100"),
    ("--world 2 --cluster a100-ib --train.dtype fp8 --train.seq_len 16", "train.dtype"),
    ("--world 2 --picture x.jpg", "--picture"),
    ("--world 512 --train.global_batch 512 --optim.name muon", "optim.name"),
    ("--world 2 --trace x.txt", "--trace"),
    ("--world 2 --cluster cpu --trace x.json", "--trace"),
    ("--world 2 --json /dev/null/x.json", "--json: /dev/null/x.json cannot be written"),
    ("--world 2 --model.mlp experts --model.mlp.experts 4 --model.mlp.width 16 "
    "--model.mlp.capacity.factor 0.5", "model.mlp.capacity.factor"),
])
def test_what_cannot_be_is_refused_in_one_line(words, named):
    done = dry_run(*words.split())
    assert done.returncode == 2 and done.stdout == ""
    assert named in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_phase_is_recorded_with_its_keys():
    phases = '[{"after_steps": 3, "train.seq_len": 16, "train.global_batch": 4}]'
    for number, shape in ((1, "global batch 8 x 8"), (2, "global batch 4 x 16")):
        done = dry_run("--world", "1", "--train.phases", phases, "--phase", str(number))
        assert done.returncode == 0 and f"recorded: phase {number} of 2" in done.stdout
        assert shape in done.stdout


@pytest.mark.slow
def test_a_vocabulary_is_that_of_the_tokenizer():
    done = dry_run(*"--world 1 --model.vocab none --data.tokenizer bytes --cluster cpu".split())
    named = dry_run(*"--world 1 --model.vocab 257 --cluster cpu".split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2:] == named.stdout.splitlines()[2:]


@pytest.mark.slow
def test_ranks_that_are_alike_share_a_row():
    done = dry_run(*"--world 4 --ranks all --parallel.pp 2 --cluster cpu --parallel.zero 0".split())
    assert done.returncode == 0, done.stderr
    assert "4 of 4 ranks recorded" in done.stdout and "0-1" in done.stdout and "2-3" in done.stdout


@pytest.mark.slow
def test_a_job_that_is_too_large_is_said_to_be_so():
    done = dry_run(*"--world 1 --model.hidden 32768 --model.mlp.width 65536".split())
    assert done.returncode == 1 and "at its peak: too much" in done.stdout
