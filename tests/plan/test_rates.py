"""Times of launches and exchanges: other GPUs by their data sheets, exchanges by the ranks that take part."""

import pytest
import torch

from parallel.topology.dims import GROUP_AXES, ParallelDims
from parallel.wire.lanes import PostedExchange
from plan.cost import Efficiency, Links, cluster, exchange_seconds
from plan.record.links import ClusterLinks, seconds_of_exchange
from plan.record.rates import ASSUMED, ASSUMED_RATES, RATES, SHEETS, Sheet, get_rates, ratios
from scripts.dry_run import get_sheet


def exchange(verb: str, ranks, nbytes: int, peer=None) -> PostedExchange:
    return PostedExchange(0, 0, ("", tuple(ranks)), "g", verb, nbytes, torch.float32, peer, 0)


@pytest.mark.parametrize("verb", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("group", ["tp", "fsdp", "cp", "world"])
def test_a_collective_takes_what_the_planner_says(group, verb):
    dims = ParallelDims(64, tp=4, cp=4, pp=2)
    for name in ("h100-ib", "gb200-nvl72"):
        where = cluster(name)
        own = exchange(verb, dims.group(0, *GROUP_AXES[group]), 10**8)
        links = Links(dims, where, Efficiency())
        expected = exchange_seconds(links, group, verb, calls=1, nbytes=10**8)
        assert seconds_of_exchange(ClusterLinks(where), 0, own) == pytest.approx(expected)


def test_a_transfer_takes_the_links_of_its_two_ranks():
    where = cluster("h100-ib")
    near, far = (seconds_of_exchange(ClusterLinks(where), 6, exchange("send", range(16), 10**9, peer))
                 for peer in (7, 8))  # fmt: skip
    of = Efficiency()
    assert near == pytest.approx(of.hop + 1e9 / (450e9 * of.inside))
    assert far == pytest.approx(of.hop + 1e9 / (50e9 * of.between))


def test_rates_of_another_gpu_are_those_of_the_assumed_one_by_the_data_sheets():
    assert get_rates(SHEETS["h200"]) == ASSUMED and ratios(SHEETS["h200"]) == ""
    a100 = Sheet("a100", bf16=312e12, fp8=0.0, fp32=19.5e12, hbm=2039e9)
    rates = get_rates(a100)
    assert rates.products["own"].middle == pytest.approx(RATES["own"].middle * 312 / 989)
    assert rates.products["fp32"].low == pytest.approx(RATES["fp32"].low * 19.5 / 67)
    assert rates.products["own fp8"].high == 0.0  # it has none
    assert rates.bandwidth.middle == pytest.approx(ASSUMED.bandwidth.middle * 2039 / 4800)
    assert rates.shortest == ASSUMED.shortest and rates.host == ASSUMED.host
    assert ratios(a100) == "products x 0.32, memory x 0.42"


@pytest.mark.parametrize("gpu", ASSUMED_RATES)
def test_a_cluster_has_the_rates_assumed_of_its_gpu(gpu):
    """Not those of an H200 by the data sheet: an H100's memory was measured."""
    sheet = get_sheet(cluster(f"{gpu}-ib"))
    assert sheet == SHEETS[gpu] and ratios(sheet) == ""
    assert get_rates(sheet) == ASSUMED_RATES[gpu]


def test_gpus_of_a_kind_have_its_rates():
    """Blackwell's own kernels are not Hopper's by the data sheet, and an H800 has the memory of an H100."""
    h800, gb200 = (get_sheet(cluster(name)) for name in ("h800-ib", "gb200-nvl72"))
    assert get_rates(h800) == ASSUMED_RATES["h100"] and ratios(h800) == ""
    own = ASSUMED_RATES["b200"].products["own"].middle
    assert get_rates(gb200).products["own"].middle == pytest.approx(own * 2500 / 2250)
    assert ratios(gb200) == "products x 1.11, memory x 1.04"
