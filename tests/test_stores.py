"""Data and checkpoints in an object store: train.py against a server in a process of its own
(store_server.py), which is down, dies, is slow, or refuses.

webhdfs is fsspec's own client, and needs nothing more. s3 needs the package s3fs (requirements-test.txt).
"""

import importlib.util
import os
import pathlib
import re
import shutil
import signal
import time
from multiprocessing import get_context

import numpy as np
import pytest
import ranks
import run_folder
from ranks import MODEL, corpus
from store_server import Server
from waiting import wait_until

from checkpoint.disk import store
from checkpoint.remote import complete_steps, fetch
from config import ConfigError
from data import remote as files
from data.blocks import ChecksumError
from data.download import local_data
from data.indexed import IndexedDataset
from data.remote import open_folder

HAS_S3 = importlib.util.find_spec("s3fs") is not None
S3 = pytest.param(
    "s3", marks=pytest.mark.skipif(not HAS_S3, reason="the package s3fs is missing (requirements-test.txt)")
)
STEPS = 6
SETTINGS = "--checkpoint.every 2 --model.dropout 0.1 --optim.decay constant"
ARGS = ("llama3-tiny", *MODEL, *SETTINGS.split())


@pytest.fixture(params=["webhdfs", S3])
def kind(request):
    return request.param


@pytest.fixture
def server(kind, tmp_path, monkeypatch):
    server = Server(tmp_path / "server").start()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{server.address}", "AWS_ACCESS_KEY_ID": "not-a-real-key",
        "AWS_SECRET_ACCESS_KEY": "not-a-real-secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    impatient(0)
    yield server
    server.stop()


def impatient(rank):
    """A store that is down is found soon: its package waits for half a minute in all."""
    files.FIRST_WAIT = 0.05
    if HAS_S3:
        import s3fs

        s3fs.S3FileSystem.retries = 1
        s3fs.S3FileSystem.clear_instance_cache()  # one that was made here has the address of another test


def job(*args, **more):
    """ranks.job, with a store that is soon found to be down."""
    return ranks.job(*args, before=impatient, limit=180, **more)


def url_of(server, kind):
    return "s3://bucket" if kind == "s3" else f"webhdfs://{server.address}/bucket"


def put_corpus(server, tmp_path) -> pathlib.Path:
    """The corpus, also at corpora/text in the bucket -> its prefix here."""
    prefix = pathlib.Path(corpus(tmp_path))
    place = server.root / "bucket" / "corpora"
    place.mkdir(exist_ok=True)
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        if path.is_dir():
            shutil.copytree(path, place / path.name)
        else:
            shutil.copy(path, place / path.name)
    more = place / f"{prefix.name}.tokenizer" / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("with tools")
    return prefix


def words(home, url, *more, steps=STEPS, data=None):
    """The arguments of a run named r, whose disk is `home`."""
    return [
        *ARGS, "--data.path", str(data or f"{url}/corpora/text"),
        *(() if data else ("--data.cache", str(home / "cache"))), "--checkpoint.mirror", f"{url}/runs",
        "--train.steps", str(steps), "--log.dir", str(home), "--log.name", "r", *more,
    ]


def losses(folder):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in run_folder.steps(folder)]


def pieces(checkpoint):
    return {
        (piece["key"], *piece["start"], *piece["size"]): piece["checksum"]
        for piece in store.read_index(checkpoint)["pieces"]
    }


def steps_there(url):
    return list(complete_steps(open_folder(f"{url}/runs/r/checkpoints", "test")))


def fetched(url, step, folder):
    """The checkpoint of a step in the store, verified."""
    checkpoints = open_folder(f"{url}/runs/r/checkpoints", "test")
    return fetch(checkpoints, step, complete_steps(checkpoints)[step], folder)


@pytest.mark.slow(core=["s3-1"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_fresh_machine_continues_as_if_nothing_had_happened(server, kind, world, tmp_path):
    """Killed after a save was sent; the machine is lost, with the run folder and the data. Another one trains
    the rest: the same losses and the same weights and moments, bit for bit, as one run on a disk."""
    url = url_of(server, kind)
    prefix = put_corpus(server, tmp_path)
    layout = ("--parallel.zero", "1") if world > 1 else ()
    plain = [*ARGS, *layout, "--data.path", str(prefix), "--train.steps", str(STEPS)]
    end = job(tmp_path / "plain", world, [*plain, "--log.dir", str(tmp_path / "plain"), "--log.name", "r"])
    assert end.codes == [0] * world, end.logs

    def kill_when_sent(pids):
        wait_until(lambda: server.requests("step_00000004/index.sha256", "PUT"))
        time.sleep(0.3)  # the body, after its request
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)

    first = tmp_path / "first"
    fault = "step.begin:step=5:act=sleep=60"
    end = job(first, world, words(first, url, *layout), fault=fault, meanwhile=kill_when_sent)
    assert end.codes == [-9] * world, end.logs
    shutil.rmtree(first)

    second = tmp_path / "second"
    end = job(second, world, words(second, url, *layout))
    assert end.codes == [0] * world, end.logs
    assert "restored step_00000004 from" in end.logs[0] and "step_00000004 at step 4" in end.logs[0]
    assert losses(second / "r") == losses(tmp_path / "plain" / "r")
    assert [step for step, *_ in losses(second / "r")] == list(range(1, STEPS + 1))
    expected = pieces(tmp_path / "plain" / "r" / "checkpoints" / "step_00000006")
    assert pieces(second / "r" / "checkpoints" / "step_00000006") == expected
    assert pieces(fetched(url, STEPS, tmp_path / "back")) == expected
    assert steps_there(url) == [6, 4]
    # one process of the node has downloaded the data, on each of the two machines
    opened = server.requests("text.bin", "OPEN" if kind == "webhdfs" else "GET")
    assert len([line for line in opened if not line.startswith("HEAD")]) == 2, opened


def test_a_store_that_is_down_is_named_before_any_work(server, kind, tmp_path):
    url = url_of(server, kind)
    prefix = put_corpus(server, tmp_path)
    server.stop()
    for name, args in {
        "data": ["--data.path", f"{url}/corpora/text"],
        "mirror": ["--data.path", str(prefix), "--checkpoint.mirror", f"{url}/runs"],
    }.items():
        home = tmp_path / name
        more = ["--train.steps", "2", "--log.dir", str(home), "--log.name", "r"]
        end = job(home, 1, [*ARGS, *args, *more])
        assert end.codes == [2], end.logs
        (line,) = end.errors()
        key = {"data": "data.path", "mirror": "checkpoint.mirror"}[name]
        assert line.startswith(f"error: {key}: {url}") and "check the address, the network" in line
        assert end.logs[0].strip() == line
        assert not (home / "r" / "checkpoints").exists() and not (home / "r" / "metrics.jsonl").exists()

    server.start()
    end = job(home, 1, [*ARGS, "--data.path", f"{url}/corpora/none", *more])
    assert end.codes == [2] and "corpora/none.idx: no such file in the store" in end.logs[0]


@pytest.mark.slow
def test_a_store_that_dies_in_an_upload_loses_nothing_and_the_next_start_heals_it(server, kind, tmp_path):
    """It dies within the files of step 4, and stays dead: the run trains on and ends with code 82. What was
    sent before is whole. The same command, when the store is back, sends the rest and trains nothing."""
    url = url_of(server, kind)
    prefix = put_corpus(server, tmp_path)
    home = tmp_path / "home"
    end = job(home, 1, words(home, url, steps=2, data=prefix))
    assert end.codes == [0], end.logs
    before = pieces(home / "r" / "checkpoints" / "step_00000002")
    sent = server.requests("step_00000002")

    # writes: a probe, config, metrics, tokenizer, then the files of the checkpoint
    server.start("--die-at-write", "6")
    end = job(home, 1, words(home, url, "--checkpoint.keep", "9", data=prefix))
    assert end.codes == [82], end.logs
    assert not server.is_alive()
    assert f"{url}/runs/r: the last upload has failed" in end.errors()[0]
    assert "has every checkpoint, and the same command resumes" in end.errors()[0]
    assert [step for step, *_ in losses(home / "r")] == list(range(1, STEPS + 1))
    assert run_folder.saved_steps(home / "r") == [6, 4, 2]
    assert run_folder.exit_reason(home / "r")["requeue"]

    server.start()
    assert steps_there(url) == [2]
    assert pieces(fetched(url, 2, tmp_path / "back")) == before
    end = job(home, 1, words(home, url, "--checkpoint.keep", "2", data=prefix))
    assert end.codes == [0] and "nothing was left to do" in end.logs[0], end.logs
    assert steps_there(url) == [6, 2]
    assert pieces(fetched(url, 6, tmp_path / "back")) == pieces(home / "r/checkpoints/step_00000006")
    names = open_folder(f"{url}/runs/r/checkpoints", "test").names()
    assert names == ["step_00000002", "step_00000006"]  # the half of step 4 is gone
    assert sent  # step 2 was not sent again
    assert len(server.requests("PUT", "step_00000002")) == len([s for s in sent if s.startswith("PUT")])


@pytest.mark.slow
def test_a_save_after_the_store_is_back_heals_it_in_the_same_run(server, kind, tmp_path):
    url = url_of(server, kind)
    prefix = put_corpus(server, tmp_path)
    server.start("--die-at-write", "6")

    def bring_back(pids):
        wait_until(lambda: not server.is_alive())
        time.sleep(2.5)  # until the upload of step 2 has given up
        server.start()

    home = tmp_path / "home"
    fault = "step.begin:step=4:act=sleep=5"
    end = job(home, 1, words(home, url, data=prefix), fault=fault, meanwhile=bring_back)
    assert end.codes == [0], end.logs
    assert "(1 of 5 in a row)" in end.logs[0] and "works again, after 1 that failed" in end.logs[0]
    assert steps_there(url)[0] == 6
    assert pieces(fetched(url, 6, tmp_path / "back")) == pieces(home / "r/checkpoints/step_00000006")
    assert "step_00000002" not in open_folder(f"{url}/runs/r/checkpoints", "test").names()


@pytest.mark.slow
def test_failures_in_a_row_end_a_run_of_two_ranks(server, kind, tmp_path):
    url = url_of(server, kind)
    prefix = put_corpus(server, tmp_path)
    server.start("--fail-from-write", "2")
    home = tmp_path / "home"
    more = "--checkpoint.every 1 --checkpoint.mirror_failures 2".split()
    args = words(home, url, *more, steps=200, data=prefix)
    end = job(home, 2, args, fault="step.begin:act=sleep=0.3")
    assert set(end.codes) <= {82, -15} and 82 in end.codes, end.logs
    text = "".join(end.logs)
    assert "2 uploads in a row have failed" in text and "(1 of 2 in a row)" in text
    steps = [step for step, *_ in losses(home / "r")]
    assert steps and steps[-1] < 200
    # at the step at which the ranks agreed, nothing is lost
    newest = store.committed_checkpoints(home / "r" / "checkpoints")[0][0]
    assert newest >= steps[-1] - 1


@pytest.mark.slow
def test_a_slow_store_does_not_hold_up_the_steps_and_is_waited_for_at_the_end(server, kind, tmp_path):
    """Uploads that take longer than the time between saves: fewer are sent than saved, and the last is."""
    url = url_of(server, kind)
    prefix = put_corpus(server, tmp_path)
    server.start("--delay", "0.25")
    home = tmp_path / "home"
    steps = 20
    args = words(home, url, "--checkpoint.every", "1", steps=steps, data=prefix)
    end = job(home, 1, args)
    assert end.codes == [0], end.logs
    sent = {line.split("step_")[1][:8] for line in server.requests("PUT", "index.sha256")}
    assert f"{steps:08d}" in sent and len(sent) < steps, sent
    assert steps_there(url)[0] == steps
    # an upload is more than a dozen requests of 0.25 s, one after the other, and no save waits for one
    saves = [float(seconds) for seconds in re.findall(r"^saved .*, ([\d.]+) s\)$", end.logs[0], re.MULTILINE)]
    assert len(saves) == steps and sum(saves) < steps * 1.0, saves


@pytest.mark.slow
def test_another_layout_continues_from_the_store(server, kind, tmp_path):
    url = url_of(server, kind)
    put_corpus(server, tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    end = job(first, 2, words(first, url, "--parallel.tp", "2", steps=2))
    assert end.codes == [0, 0], end.logs
    shutil.rmtree(first / "r")
    end = job(second, 1, words(second, url, steps=4))
    assert end.codes == [0] and "step_00000002 at step 2" in end.logs[0], end.logs
    # and new runs begin with its weights, or go on in a folder of their own
    for key in ("init_from", "resume"):
        more = ["--train.steps", "5", "--log.dir", str(tmp_path / key), "--log.name", "n"]
        given = [f"--checkpoint.{key}", f"{url}/runs/r", "--data.path", str(tmp_path / "text")]
        end = job(tmp_path / key, 1, [*ARGS, *given, *more])
        assert end.codes == [0], end.logs
        assert f"{tmp_path / key}/remote/" in end.logs[0]

    end = job(tmp_path, 1, words(tmp_path, url, "--checkpoint.resume", "none"))
    assert end.codes == [2] and f"{url}/runs/r holds checkpoints" in end.errors()[0], end.logs


# ---- data --------------------------------------------------------------------------------------------------


def download_in_child(url, cache, answers):
    try:
        answers.put((os.getpid(), local_data(url, cache)))
    except Exception as error:
        answers.put((os.getpid(), f"{type(error).__name__}: {error}"))


@pytest.mark.slow(core=["s3"])
def test_of_many_processes_one_downloads_and_none_sees_a_part(server, kind, tmp_path):
    url = f"{url_of(server, kind)}/corpora/text"
    prefix = put_corpus(server, tmp_path)
    server.start("--delay", "0.1")
    cache = tmp_path / "cache"

    # one that is killed halfway leaves nothing that is taken for a copy
    context = get_context("fork")
    answers = context.Queue()
    killed = context.Process(target=download_in_child, args=(url, str(cache), answers))
    killed.start()
    wait_until(lambda: list(cache.rglob("text.idx")), 30)
    killed.kill(), killed.join()
    assert not list(cache.rglob("text.copy"))

    before = len(server.requests("text.bin"))
    children = [context.Process(target=download_in_child, args=(url, str(cache), answers)) for _ in range(4)]
    for child in children:
        child.start()
    places = {answers.get(timeout=60)[1] for _ in children}
    for child in children:
        child.join()
    (place,) = places
    theirs, ours = IndexedDataset(place), IndexedDataset(prefix)
    assert theirs.identity == ours.identity and (theirs.read(0, 999) == ours.read(0, 999)).all()
    assert not list(cache.rglob("*.tmp-*"))
    opened = server.requests("text.bin", "OPEN" if kind == "webhdfs" else "GET")[before:]
    assert len([line for line in opened if not line.startswith("HEAD")]) <= 1


def test_damage_on_the_way_and_a_change_in_the_store_are_named(server, kind, tmp_path):
    url = url_of(server, kind)
    put_corpus(server, tmp_path)
    stored = server.root / "bucket" / "corpora" / "text.bin"
    good = stored.read_bytes()
    stored.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    with pytest.raises(ChecksumError, match=rf"{url}/corpora/text was downloaded, but is damaged.*crc32"):
        local_data(f"{url}/corpora/text", str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("text*"))

    stored.write_bytes(good)
    copied = pathlib.Path(local_data(f"{url}/corpora/text", str(tmp_path / "cache")))
    more = copied.with_name("text.tokenizer") / "additional_chat_templates"
    assert (more / "tool_use.jinja").read_text() == "with tools"
    stored.write_bytes(good[:-2] + b"zz")
    home = tmp_path / "home"
    end = job(home, 1, words(home, url, "--data.cache", str(tmp_path / "cache"), steps=2))
    assert end.codes == [2] and "text has changed in the store since" in end.errors()[0], end.logs
    assert "(text.bin); remove that folder" in end.errors()[0]

    stored.write_bytes(good)
    more = ("--data.cache", str(home / "cache"), "--data.valid", f"{url}/corpora/valid")
    end = job(home, 1, words(home, url, *more))
    assert end.codes == [2], end.logs
    assert end.errors()[0].startswith(f"error: data.valid: {url}/corpora/valid."), end.errors()

    # without the checksums, a size that is not that of the index is found
    with pytest.raises(ConfigError, match="no such file in the store"):
        local_data(f"{url}/corpora/nothing", str(tmp_path / "cache"))


@pytest.mark.slow(core=["s3"])
def test_an_array_of_ids_in_a_store_is_a_data_set(server, kind, tmp_path):
    """The losses are those of the same file on the disk."""
    url = url_of(server, kind)
    put_corpus(server, tmp_path)
    ids = np.random.default_rng(0).integers(97, 123, 3000)
    ids[39::40] = 256
    np.save(tmp_path / "ids.npy", ids)
    shutil.copy(tmp_path / "ids.npy", server.root / "bucket" / "corpora")
    found = {}
    for name, path in (("disk", tmp_path / "ids.npy"), ("store", f"{url}/corpora/ids.npy")):
        more = ("--log.name", name, "--data.cache", str(tmp_path / "cache"), "--data.tokenizer", "bytes")
        end = job(tmp_path, 1, words(tmp_path, url, *more, steps=2, data=path))
        assert end.codes == [0], end.logs
        found[name] = losses(tmp_path / name)
    assert len(found["disk"]) == 2 and found["store"] == found["disk"]
