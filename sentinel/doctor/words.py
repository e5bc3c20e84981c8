"""Numbers and lists as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def count(n: int, word: str, many: str = "") -> str:
    """1 GPU, 16 GPUs."""
    return f"{n} {word}" if n == 1 else f"{n:,} {many or word + 's'}".replace(",", " ")


def some(names: Iterable[str], most: int = 3) -> str:
    """a, b, c and 4 more."""
    listed = list(names)
    text = ", ".join(listed[:most])
    return f"{text} and {len(listed) - most} more" if len(listed) > most else text


def size(n: float) -> str:
    """61 kB, 5.0 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f} B"


def span(seconds: float) -> str:
    """0.35 s, 48 s, 12 min, 5.2 h, 15 d."""
    seconds = abs(seconds)
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 86_400:.3g} d"


def joined(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
