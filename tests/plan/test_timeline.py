"""One clock for the recorded ranks of a job."""

import random
from array import array

import pytest
import torch

from parallel.pipeline.schedule import END_OF_SEND, Schedule, goes_down, make_schedule
from parallel.wire.lanes import PostedExchange, Wait
from plan.record.events import HostRead, StreamWait
from plan.record.rates import Work
from plan.record.streams import COMPUTE, HOST
from plan.record.summary import LaunchKind, RankSteps
from plan.record.timeline import BUBBLE, BY_HOST, COPIES, Costs, timeline
from plan.simulate import closed_form, share, simulate

KERNEL = Work("products", "mm", None, flops=0.0, nbytes=0.0, launches=1, ends=0)


def kind(seconds: float, stream: str = COMPUTE) -> LaunchKind:
    return LaunchKind(KERNEL._replace(flops=seconds), "file:function", "forward", "operation", stream)


class Rank:
    """Writes down the steps of a rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.kinds: dict[LaunchKind, int] = {}
        self.order = array("l")
        self.events: list = []
        self.count = 0

    def launch(self, seconds: float, stream: str = COMPUTE) -> None:
        self.order.append(self.kinds.setdefault(kind(seconds, stream), len(self.kinds)))

    def post(self, verb: str, ranks, nbytes: int = 1, peer=None, channel="", batch=None) -> int:
        number = self.count
        self.count += 1
        batch = number if batch is None else batch
        lane = (channel, tuple(ranks))
        group = "dp" if peer is None else "pp"
        time = len(self.order)
        self.events.append(
            PostedExchange(number, batch, lane, group, verb, nbytes, torch.float32, peer, time)
        )
        return number

    def wait(self, number: int) -> None:
        self.events.append(Wait(number, len(self.order)))

    @property
    def steps(self) -> RankSteps:
        return RankSteps(list(self.kinds), self.order, self.events)


def costs(host: float = 0.0, post: float = 0.0, read: float = 0.0, of_byte: float = 0.0) -> Costs:
    return Costs(
        launch=lambda kind: kind.work.flops,
        host=lambda kind: host,
        exchange=lambda rank, exchange: of_byte * exchange.nbytes,
        post=post,
        read=read,
    )


def run(*ranks: Rank, **seconds):
    found = timeline({one.rank: one.steps for one in ranks}, costs(**seconds))
    for one in found.ranks.values():  # what a rank does and waits for is the step
        assert one.busy + sum(one.waits.values()) == pytest.approx(found.step)
    return found


# ---- the rules, one by one ---------------------------------------------------------------------------------


def test_the_computation_waits_for_the_host_that_starts_it():
    one = Rank(0)
    for _ in range(3):
        one.launch(1.0)
    assert run(one).step == 3.0
    found = run(one, host=2.0)
    assert found.step == 7.0 and found.ranks[0].waits == {BY_HOST: 4.0}


def test_a_value_that_the_host_reads_ends_its_lead():
    one = Rank(0)
    one.launch(10.0)
    one.events.append(HostRead(("train.py", "f"), 1))
    one.launch(1.0)
    found = run(one, host=1.0, read=3.0)
    assert list(found.ranks[0].starts) == [1.0, 15.0]  # 1 + 10 + 3, and its own start


def test_an_exchange_hides_behind_what_is_computed_until_its_wait():
    one = Rank(0)
    one.launch(5.0)
    number = one.post("all_reduce", (0, 1), nbytes=8)
    one.launch(6.0)
    one.wait(number)
    one.launch(1.0)
    found = run(one, of_byte=1.0)
    assert found.step == 14.0 and found.ranks[0].waits == {"dp": 2.0}
    assert found.ranks[0].exchanges[0][1:3] == (5.0, 13.0)  # after what was computed before it


def gathered_after_the_step(counts_targets: bool, seconds: int) -> Rank:
    """Two parts, whose weights are gathered after the update, for the forward of the next step."""
    one = Rank(0)
    one.count = 3 + counts_targets  # of the step before, which was like this one
    if counts_targets:
        one.wait(one.post("all_reduce", (0, 1), nbytes=0))
    for part in (1, 2):
        one.wait(one.count - counts_targets - 3 + part)
        one.launch(5.0)
    one.wait(one.post("reduce_scatter", (0, 1), nbytes=3))
    one.launch(1.0)
    for _ in range(2):
        one.post("all_gather", (0, 1), nbytes=seconds)
    return one


def test_what_a_step_leaves_in_flight_hides_behind_the_next():
    found = run(gathered_after_the_step(counts_targets=False, seconds=4), of_byte=1.0)
    assert found.ranks[0].waits == {"dp": 4.0 + 3.0}  # the first part's gather, and the reduction
    assert found.step == 4.0 + 5.0 + 5.0 + 3.0 + 1.0


def test_an_exchange_at_the_first_line_of_a_step_waits_for_what_the_last_one_left_in_its_lane():
    found = run(gathered_after_the_step(counts_targets=True, seconds=4), of_byte=1.0)
    assert found.ranks[0].waits == {"dp": 4.0 + 4.0 + 3.0}
    assert found.step == 8.0 + 5.0 + 5.0 + 3.0 + 1.0


def test_a_lane_runs_one_batch_after_the_other_and_lanes_run_beside_each_other():
    one = Rank(0)
    numbers = [one.post("all_reduce", (0, 1), 4), one.post("all_reduce", (0, 1), 4)]
    numbers += [one.post("all_reduce", (0, 2), 5)]
    together = one.post("send", (0, 1), 3, peer=1, channel="x")
    numbers += [together, one.post("receive", (0, 1), 2, peer=1, channel="x", batch=together)]
    numbers += [one.post("receive", (0, 1), 4, peer=2, channel="x", batch=together)]
    numbers += [one.post("send", (0, 1), 1, peer=1, channel="x")]
    for number in numbers:
        one.wait(number)
    spans = [span[1:3] for span in run(one, of_byte=1.0).ranks[0].exchanges]
    assert spans == [(0, 4), (4, 8), (0, 5), (0, 3), (0, 2), (2, 6), (6, 7)]


def test_a_collective_starts_with_its_last_rank():
    early, late = Rank(0), Rank(1)
    early.launch(1.0)
    late.launch(7.0)
    for one in (early, late):
        one.wait(one.post("all_reduce", (0, 1, 2), 2))
    found = run(early, late, of_byte=1.0)
    assert found.step == 9.0
    assert found.ranks[0].waits == {BUBBLE: 6.0, "dp": 2.0} and found.ranks[1].waits == {"dp": 2.0}


def test_a_send_ends_with_its_receive():
    sender, receiver = Rank(0), Rank(1)
    sender.wait(sender.post("send", (0, 1), 2, peer=1))
    receiver.launch(4.0)
    receiver.wait(receiver.post("receive", (0, 1), 2, peer=0))
    found = run(sender, receiver, of_byte=1.0)
    assert found.step == 6.0 and found.ranks[0].waits == {BUBBLE: 4.0, "pp": 2.0}


def test_streams_wait_for_what_was_launched_before_an_event():
    one = Rank(0)
    one.launch(2.0)
    one.events.append(StreamWait("copies", COMPUTE, 1, 1))
    one.launch(10.0, "copies")  # 2 to 12
    until = len(one.order)
    one.launch(10.0, "copies")  # 12 to 22
    one.launch(1.0)
    one.events.append(StreamWait(COMPUTE, "copies", until, len(one.order)))
    one.launch(1.0)
    one.events.append(StreamWait(HOST, "copies", len(one.order), len(one.order)))
    one.launch(1.0)
    found = run(one)
    assert list(found.ranks[0].starts) == [0.0, 2.0, 12.0, 2.0, 12.0, 22.0]
    assert found.ranks[0].waits == {COPIES: 9.0, BY_HOST: 9.0}


def test_ranks_that_wait_for_ever_are_an_error():
    one, other = Rank(0), Rank(1)
    one.wait(one.post("receive", (0, 1), peer=1))
    other.launch(1.0)
    with pytest.raises(ValueError, match="do not meet"):
        run(one, other)


# ---- pipelines ---------------------------------------------------------------------------------------------


def pipeline(schedule: Schedule, times: dict[str, float], is_of_pairs: bool = False) -> list[Rank]:
    """The ranks of a schedule as parallel/pipeline/executor.py runs it: a receive is awaited by the op that
    needs it, a send where its end stands, or last of all. is_of_pairs: each pair of ranks has a communicator
    for each direction."""
    p = len(schedule.order)
    ranks = [Rank(rank) for rank in range(p)]
    for one in ranks:
        arrivals, sends = {}, {}
        for op in schedule.with_transfers[one.rank]:
            if op in sends:
                one.wait(sends.pop(op))
                continue
            if op.kind in times:
                for key in {"F": ["RF"], "B": ["RB"], "I": ["RB"]}.get(op.kind, []):
                    if (key, op.stage, op.microbatch) in arrivals:
                        one.wait(arrivals.pop((key, op.stage, op.microbatch)))
                one.launch(times[op.kind])
                continue
            is_send = op.kind in ("SF", "SB")
            peer = schedule.rank_of_stage[op.stage + (1 if op.kind in ("SF", "RB") else -1)]
            channel = "" if goes_down(op, schedule.rank_of_stage) else "up"
            members = range(p)
            if is_of_pairs:
                members = (one.rank, peer) if is_send else (peer, one.rank)
            number = one.post("send" if is_send else "receive", members, 1, peer, channel)
            if is_send:
                sends[op._replace(kind=END_OF_SEND[op.kind])] = number
            else:
                arrivals[op.kind, op.stage, op.microbatch] = number
        for number in sends.values():
            one.wait(number)
    return ranks


@pytest.mark.parametrize("name, p, m, v, is_of_pairs", [
    ("gpipe", 4, 6, 1, False),
    ("1f1b", 2, 2, 1, False),
    ("1f1b", 4, 8, 1, False),
    ("1f1b", 7, 9, 1, False),
    ("interleaved", 4, 8, 2, True),
])
def test_the_bubble_of_equal_stages_is_the_closed_form(name, p, m, v, is_of_pairs):
    schedule = make_schedule(name, p, m, v)
    found = run(*pipeline(schedule, share(schedule, 3.0, 4.0, 2.0), is_of_pairs))
    form = closed_form(name, p, m, v, 3.0, 4.0, 2.0)
    assert form is not None
    assert found.step == pytest.approx(m * 9.0 + form[1])
    for one in found.ranks.values():
        assert one.waits == {BUBBLE: pytest.approx(form[1])}


@pytest.mark.parametrize(
    "name, v", [("gpipe", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved", 2), ("dualpipe-v", 2)]
)
def test_two_communicators_of_the_pipeline_cost_no_time(name, v):
    """A step takes what the simulation of its schedule says, as with one for each pair and direction."""
    schedule = make_schedule(name, 4, 8, v)
    times = share(schedule, 3.0, 4.0, 2.0)
    free = simulate(schedule.order, schedule.n_stages, times).makespan
    assert run(*pipeline(schedule, times, is_of_pairs=True)).step == pytest.approx(free)
    assert run(*pipeline(schedule, times)).step == pytest.approx(free)


def test_a_receive_whose_sender_is_late_holds_back_the_send_behind_it():
    """Rank 1 posts the receive of the second microbatch before it sends the first one on."""
    sender, middle, last = ranks = [Rank(rank) for rank in range(3)]
    sender.launch(1.0)
    sends = [sender.post("send", range(3), 1, 1)]
    sender.launch(9.0)
    sends.append(sender.post("send", range(3), 1, 1))
    middle.wait(middle.post("receive", range(3), 1, 0))
    second = middle.post("receive", range(3), 1, 0)
    middle.launch(1.0)
    passed_on = middle.post("send", range(3), 1, 2)
    arrived = last.post("receive", range(3), 1, 1)
    for one, numbers in ((sender, sends), (middle, [second, passed_on]), (last, [arrived])):
        for number in numbers:
            one.wait(number)
    found = run(*ranks)
    assert found.ranks[2].exchanges[0].start == pytest.approx(10.0, rel=0.1)


# ---- any job -----------------------------------------------------------------------------------------------


def random_job(draw: random.Random) -> list[Rank]:
    """Ranks that launch what they like between collectives that all post in one order, and transfers."""
    size = draw.randint(1, 4)
    ranks = [Rank(rank) for rank in range(size)]
    pending: list[list[int]] = [[] for _ in ranks]
    for _ in range(draw.randint(1, 12)):
        members = range(size)
        channel = draw.choice(["", "other"])
        sends = size > 1 and draw.random() < 0.4
        pair = draw.sample(list(members), 2) if sends else []
        nbytes = draw.randint(0, 5)
        for one in ranks:
            for _ in range(draw.randint(0, 3)):
                one.launch(draw.randint(0, 4), draw.choice([COMPUTE, COMPUTE, "copies"]))
            if draw.random() < 0.3 and pending[one.rank]:
                one.wait(pending[one.rank].pop(0))
            if not sends:
                pending[one.rank].append(one.post("all_reduce", range(8), nbytes, channel=channel))
            elif one.rank in pair:
                peer = pair[1 - pair.index(one.rank)]
                verb = "send" if one.rank == pair[0] else "receive"
                pending[one.rank].append(one.post(verb, range(8), nbytes, peer, channel=channel))
            if draw.random() < 0.1:
                until = draw.randint(0, len(one.order))
                one.events.append(StreamWait(COMPUTE, "copies", until, len(one.order)))
    for one in ranks:
        for number in pending[one.rank]:
            one.wait(number)
    return ranks


@pytest.mark.parametrize("seed", range(4))
def test_a_step_is_between_its_busiest_stream_and_the_sum_of_all(seed):
    draw = random.Random(seed)
    for _ in range(60):
        ranks = random_job(draw)
        host, post, of_byte = draw.choice([0, 1]), draw.choice([0, 2]), draw.choice([0, 1, 3])
        seconds = {"host": host, "post": post, "of_byte": of_byte}
        found = run(*ranks, **seconds)
        streams, together = [], 0.0
        for one in ranks:
            of_streams = {COMPUTE: 0.0, "copies": 0.0}
            for index in one.order:
                launched = list(one.kinds)[index]
                of_streams[launched.stream] += launched.work.flops
            posted = [event for event in one.events if isinstance(event, PostedExchange)]
            lanes: dict = {}
            for exchange in posted:
                lanes[exchange.lane] = lanes.get(exchange.lane, 0) + seconds["of_byte"] * exchange.nbytes
            host = seconds["host"] * len(one.order) + seconds["post"] * len(posted)
            streams += [*of_streams.values(), *lanes.values()]
            together += sum(of_streams.values()) + sum(lanes.values()) + host
        assert max(streams) <= found.step <= together
        for one in found.ranks.values():  # and nothing of a stream overlaps
            check_order(one)


def check_order(one) -> None:
    free: dict[str, float] = {}
    for index, start in zip(one.steps.order, one.starts):
        stream = one.steps.kinds[index].stream
        assert start >= free.get(stream, 0.0)
        free[stream] = start + one.seconds[index]
    lanes: dict = {}
    for span in one.exchanges:
        assert span.start >= lanes.get(span.exchange.lane, 0.0)
        lanes[span.exchange.lane] = span.end
