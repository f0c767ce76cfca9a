"""A stand-in on a CPU for a CUDA graph of a step: the operations on the device, with the addresses of their
tensors, and nothing that the host computed in between.

A recording runs the step once and keeps every operation of torch and every launch of a kernel with its
arguments. A replay runs them again over the same tensors. So a number that the host read while it recorded
stays what it was, as in a graph, and with another batch the results differ from those of the step.
"""
import contextlib
import importlib
import pkgutil

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import kernels

ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class Recording(TorchDispatchMode):
    """Records while it is entered."""

    def __init__(self):
        super().__init__()
        self.calls = []  # each repeats an operation, into the tensors of the first time

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        assert name not in ("_local_scalar_dense", "nonzero", "item"), f"{name} cannot be recorded"
        result = function(*args, **kwargs)
        aliases = [r.alias_info for r in function._schema.returns if r.alias_info is not None]
        if any(alias.is_write for alias in aliases):
            self.calls.append(lambda: function(*args, **kwargs))
        elif not aliases and name not in ALLOCATIONS:  # a view has the recorded tensor's memory
            self.calls.append(lambda: copy_into(result, function(*args, **kwargs)))
        return result

    def replay(self):
        with torch.no_grad():
            for call in self.calls:
                call()


def copy_into(old, new):
    """Where an operation wrote when it was recorded."""
    if isinstance(old, torch.Tensor):
        assert old.shape == new.shape, "a recording has fixed shapes"
        old.copy_(new)
    elif isinstance(old, (list, tuple)):
        for a, b in zip(old, new):
            copy_into(a, b)


class RecordedKernel:
    """A kernel whose launches an entered recording keeps."""

    def __init__(self, kernel, recordings):
        self.kernel, self.recordings = kernel, recordings

    def __getitem__(self, grid):
        def launch(*args, **meta):
            def run():
                with _disable_current_modes():
                    self.kernel[grid](*args, **meta)
            run()
            for recording in self.recordings:
                recording.calls.append(run)
        return launch


@contextlib.contextmanager
def recorded(recordings):
    """Inside, `recordings` lists the recordings under way; this makes one."""
    recording = Recording()
    recordings.append(recording)
    try:
        with recording:
            yield recording
    finally:
        recordings.remove(recording)


def watch_kernels(monkeypatch):
    """Every kernel's launches are kept by the recordings in the list that this returns."""
    recordings = []
    for name in [f"kernels.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]:
        module = importlib.import_module(name)
        for kernel in [n for n in vars(module) if n.endswith("_kernel") and n != "sdpa_kernel"]:
            monkeypatch.setattr(module, kernel, RecordedKernel(getattr(module, kernel), recordings))
    return recordings
