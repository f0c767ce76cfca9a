"""nn.ModuleList with a module class that type checkers know."""
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class ModuleList(nn.ModuleList, Generic[Module]):
    """An nn.ModuleList at run time; type checkers know the class of its items."""

    def __init__(self, modules: Iterable[Module]) -> None:
        super().__init__(modules)

    if TYPE_CHECKING:
        def __iter__(self) -> Iterator[Module]: ...

        def __getitem__(self, index: int) -> Module: ...
