"""What a reader may have meant: the known names that are near one that is not known."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_NEAR, MOST_OUTERMOST = 3, 20
"""How many names an error has."""


def near(name: str, known: Iterable[str]) -> str:
    """Return the end of an error's sentence: nothing where no name is near.

    Args:
        name: What is not known.
        known: Names, such as the paths of modules; a path that ends with the name is nearest.

    Example:
        >>> near("decodr", ["encoder", "decoder"]), near("conv1", ["layer1.conv1", "head"]), near("x", ["head"])
        ('; near it are decoder, encoder', '; near it is layer1.conv1', '')
    """
    return _said(_nearest(name, known))


def near_modules(name: str, paths: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return the end of an error's sentence: what is near, or the outermost modules where nothing is.

    Args:
        name: A path, or a pattern of paths, that no module has.
        paths: Of modules; those around them count, too.
        others: Further names that are known.

    Example:
        >>> near_modules("decodr.*", ["encoder.0", "decoder.0"]), near_modules("x", ["encoder.0", "decoder.0"])
        ('; near it are decoder, encoder', '; the outermost modules are encoder, decoder')
    """
    parts = [path.split(".") for path in paths if path]
    known = [".".join(path[:depth]) for path in parts for depth in range(1, len(path) + 1)]
    found = _nearest(name.rstrip("*.") or name, [*known, *others])
    outermost = list(dict.fromkeys(path[0] for path in parts))
    more = ", ..." if len(outermost) > MOST_OUTERMOST else ""
    modules = f"; the outermost modules are {', '.join(outermost[:MOST_OUTERMOST]) or 'none'}{more}"
    return _said([path for path in found if not any(path.startswith(f"{outer}.") for outer in found)]) or modules


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(known))
    inside = [path for path in names if path.endswith(f".{name}")]
    return list(dict.fromkeys([*inside, *difflib.get_close_matches(name, names, n=MOST_NEAR)]))[:MOST_NEAR]


def _said(names: Sequence[str]) -> str:
    return f"; near it {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if names else ""
