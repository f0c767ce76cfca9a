"""The search for layouts in two processes, each with a share of the choices.

They share the step times of their best layouts, so both skip slower ones, and find the same as one process.
"""
import math
import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from config import Config
from config.machine import usable_cores
from config.values import Values
from plan.search import (
    Best,
    SearchResult,
    SearchShare,
    Target,
    compute_axes,
    search,
    settled,
    with_fixed,
)

PROCESSES = 2
MANY = 400  # choices of the compute axes that justify starting a second process


def best_layouts(
    cfg: Config, target: Target, fixed: Values, top: int, *, near: float = 0.0
) -> tuple[SearchResult, Target]:
    """Search for layouts that leave the margin, or if there are none, for all that fit. Return (the result,
    and its target)."""
    with_margin = replace(target, leaves_margin=True)
    for each in (with_margin, target):
        result = search_on_cores(cfg, each, fixed, top, near=near)
        if result.found:
            return result, each
    return result, target


def search_on_cores(cfg: Config, target: Target, fixed: Values, top: int, *, near: float) -> SearchResult:
    """Run plan.search.search, in two processes if it is long and there are enough cores."""
    axes = with_fixed(compute_axes(cfg, target.world, target.cluster), fixed)
    choices = math.prod(map(len, axes.values()))
    if choices < MANY or usable_cores() < PROCESSES:
        return search(cfg, target, fixed, top, near=near)
    return search_in_processes(cfg, target, fixed, top, near=near)


def search_in_processes(cfg: Config, target: Target, fixed: Values, top: int, *, near: float) -> SearchResult:
    """Run plan.search.search in PROCESSES processes."""
    context = multiprocessing.get_context("spawn")
    seconds = context.RawArray("d", [math.inf] * 2 * PROCESSES)
    others: list[tuple[BaseProcess, Connection]] = []
    for index in range(1, PROCESSES):
        receiving, sending = context.Pipe(duplex=False)
        share = SearchShare(index, PROCESSES, seconds)
        other = context.Process(
            target=send_found, args=(sending, cfg, target, fixed, top, near, share), daemon=True
        )
        other.start()
        sending.close()  # our copy, so that the pipe closes if the process fails
        others.append((other, receiving))

    results = [search(cfg, target, fixed, top, near=near, share=SearchShare(0, PROCESSES, seconds))]
    for other, receiving in others:
        results.append(receive_result(receiving))
        other.join()
    return merged(results, target, top, near)


def receive_result(receiving: Connection) -> SearchResult:
    """Receive the result of another process.
    Raises RuntimeError if it has failed; its traceback is on stderr."""
    try:
        return receiving.recv()
    except EOFError:
        raise RuntimeError("a process of the search for layouts has ended without a result") from None


def send_found(
    sending: Connection, cfg: Config, target: Target, fixed: Values, top: int, near: float, share: SearchShare
) -> None:
    """Search a share in a child process, and send the result."""
    sending.send(search(cfg, target, fixed, top, near=near, share=share))


def merged(results: list[SearchResult], target: Target, top: int, near: float) -> SearchResult:
    """Merge the results of all shares."""
    best = Best(top, near)
    for result in results:
        for name, count in result.counts.items():
            best.result.counts[name] += count
        best.result.smallest = min(best.result.smallest, result.smallest)
        best.result.passed_over += result.passed_over
        for found in result.found:
            best.add(found)
    return settled(best, target)
