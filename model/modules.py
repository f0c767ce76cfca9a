"""nn.ModuleList whose modules have a class that a type checker knows."""
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class ModuleList(nn.ModuleList, Generic[Module]):
    """The same at run time; a type checker knows what it gives."""

    def __init__(self, modules: Iterable[Module]) -> None:
        super().__init__(modules)

    if TYPE_CHECKING:
        def __iter__(self) -> Iterator[Module]: ...

        def __getitem__(self, index: int) -> Module: ...
