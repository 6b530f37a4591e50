"""Values from YAML as typed values: `typed` fills a dataclass, and its annotations say what it accepts.

A field's type may carry a `Bound`, for example `Annotated[int, Bound("1 or more", ...)]`. Every refusal is a
ConfigError of one line that names the key, the value and the remedy.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from math import inf
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A value in params.yaml that cannot work. The message is one line: key, value, remedy."""


@dataclass(frozen=True)
class Bound:
    """Which values of a type a field accepts, beside how to say it after "use"."""

    words: str
    holds: Callable[[Any], bool]


def one_of(*names: str) -> Bound:
    return Bound(f"one of {', '.join(names)}", names.__contains__)


SOME = Bound("one item or more", bool)  # of a list
Count = Annotated[int, Bound("1 or more", lambda n: n >= 1)]
Natural = Annotated[int, Bound("0 or more", lambda n: n >= 0)]
Positive = Annotated[float, Bound("a number above 0, for example 3e-4", lambda x: 0 < x < inf)]
Share = Annotated[float, Bound("a number from 0 to 1", lambda x: 0 <= x <= 1)]

NAMES = {int: "a whole number", float: "a number such as 3e-4", bool: "true or false", str: "text"}


def typed(kind: Any, raw: Any, key: str) -> Any:
    """`raw`, as YAML gives it, as a value of the type `kind`: dataclasses, dicts and lists by recursion, the
    rest with the conversions of OmegaConf's typed nodes. (Its structured configs refuse frozen dataclasses
    inside containers.)

    Raises:
        ConfigError: one line naming key, value and remedy.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return None if raw is None else typed(arguments[0], raw, key)
    if origin is Annotated:
        value, bound = typed(arguments[0], raw, key), arguments[1]
        if not bound.holds(value):
            raise ConfigError(f"{key}: {value!r} cannot work; use {bound.words}")
        return value
    if kind is Any:
        return raw
    if is_dataclass(kind):
        return _dataclass(kind, raw, key)
    if origin is dict:
        if not isinstance(raw, dict):
            raise ConfigError(
                f"{key}: {_said(raw)} is not a mapping; write `name: value` lines, or {{}} for none"
            )
        return {str(name): typed(arguments[1], value, f"{key}.{name}") for name, value in raw.items()}
    if origin is list:
        if not isinstance(raw, list):
            raise ConfigError(f"{key}: {_said(raw)} is not a list; write - items, or [] for none")
        return [typed(arguments[0], value, f"{key}[{n}]") for n, value in enumerate(raw)]
    return _scalar(kind, raw, key)


def _scalar(kind: type, raw: Any, key: str) -> Any:
    from omegaconf import BooleanNode, FloatNode, IntegerNode, StringNode

    nodes: dict[type, type] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}
    if isinstance(raw, str) and "${" in raw:
        raise ConfigError(f"{key}: {raw!r} refers to another value, which DVC would not follow; write it out")
    try:
        if (
            raw is None
            or (kind is str and isinstance(raw, dict | list))
            or (kind is bool and not isinstance(raw, bool))
        ):
            raise ValueError
        return nodes[kind](raw)._value()
    except ValueError:  # OmegaConf's ValidationError is one
        raise ConfigError(f"{key}: {_said(raw)} is not {NAMES[kind]}; correct the value") from None


def _dataclass(kind: Any, raw: Any, key: str) -> Any:
    if not isinstance(raw, dict):
        raise ConfigError(f"{key or 'the file'}: {_said(raw)} is not a mapping; write `name: value` lines")
    hints, inside = get_type_hints(kind, include_extras=True), f"{key}." if key else ""
    for name in raw:
        if name not in hints:
            near = get_close_matches(str(name), hints, n=1) or [", ".join(hints)]
            raise ConfigError(f"{inside}{name}: unknown key; remove it, or did you mean {near[0]}?")
    for item in fields(kind):
        if item.name not in raw and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{inside}{item.name}: missing; add it")
    values = {name: typed(hints[name], value, f"{inside}{name}") for name, value in raw.items()}
    try:
        return kind(**values)
    except ValueError as error:  # a dataclass's own check
        raise ConfigError(f"{inside}{error}") from None


def _said(raw: Any) -> str:
    return "nothing" if raw is None else repr(raw)
