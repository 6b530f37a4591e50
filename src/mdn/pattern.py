"""Layer patterns: "mdn:3,attention:1" repeats three MDN layers and one attention layer down the stack."""


def parse(pattern: str) -> tuple[str, ...]:
    """One repetition of the pattern, a mixer's name a layer.

    Raises:
        ValueError: on a count that is not a positive number.
    """
    layers: list[str] = []
    for item in pattern.split(","):
        mixer, colon, count = item.strip().partition(":")
        if colon and not (count.isdigit() and int(count) > 0):
            raise ValueError(f"pattern {pattern!r}: {item.strip()!r} has no count; write {mixer}:N")
        layers += [mixer] * int(count or 1)
    return tuple(layers)


def expand(pattern: str, layers: int) -> tuple[str, ...]:
    """The mixer of each of `layers` layers.

    Raises:
        ValueError: if the pattern does not fit a whole number of times.
    """
    once = parse(pattern)
    if layers % len(once):
        down = layers // len(once) * len(once)
        near = [str(n) for n in (down, down + len(once)) if n > 0]
        raise ValueError(
            f"layers={layers} is not divisible by pattern length {len(once)} of {pattern!r}; "
            f"use {' or '.join(near)}"
        )
    return once * (layers // len(once))
