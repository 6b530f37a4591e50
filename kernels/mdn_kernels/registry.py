"""Every version of every operator: what it runs on, what it is limited to, and which one is used by default.

A version is registered when its operator's package is imported; its own module is imported by `load` only, so
that a machine without Triton can list the Triton versions.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

DECODING = "recurrent"  # every operator has it; it takes one token where no version is made for that


@dataclass(frozen=True)
class KernelVersion:
    """One implementation of an operator. `module` has a function `forward` with the operator's arguments."""

    op: str
    name: str
    module: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # of q, k and v
    max_key: int | None = None  # largest K, None: any
    max_value: int | None = None  # largest V, None: any
    keys: tuple[int, ...] = ()  # the only K there are, (): any
    value_step: int = 1  # V is a multiple of it
    capability: tuple[int, int] | None = None  # the only CUDA compute capability, None: any
    automatic: bool = True  # may `choose` take it?
    decodes: bool = False  # made for one token, T = 1, and takes no more
    note: str = ""  # what changed from the version before; known failures

    def load(self) -> Callable:
        """The version's `forward`; imports its module.

        torch.compile cannot trace an import: with fullgraph=True, call this or the operator once before.
        """
        if self.module not in sys.modules:
            import_module(self.module)
        return sys.modules[self.module].forward

    def misfit(
        self, device: str | torch.device, dtype: torch.dtype, K: int, V: int, T: int | None = None
    ) -> str | None:
        """Why this version cannot run such a call (T None: of some length), or None if it can."""
        kind = torch.device(device).type
        if kind not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {kind}"
        if dtype not in self.dtypes:
            return f"takes {', '.join(map(str, self.dtypes))}, not {dtype}"
        if self.max_key is not None and self.max_key < K:
            return f"takes keys of at most {self.max_key} channels, not K={K}"
        if self.max_value is not None and self.max_value < V:
            return f"takes values of at most {self.max_value} channels, not V={V}"
        if self.keys and K not in self.keys:
            return f"takes keys of {', '.join(map(str, self.keys))} channels, not K={K}"
        if V % self.value_step:
            return f"takes values of a multiple of {self.value_step} channels, not V={V}"
        if self.capability is not None and torch.cuda.is_available():
            found = torch.cuda.get_device_capability(device)
            if found != self.capability:
                wanted, has = (".".join(map(str, version)) for version in (self.capability, found))
                return f"needs a device of compute capability {wanted}, not {has}"
        if self.decodes and T is not None and T != 1:
            return f"decodes one token a call, not T={T}"
        return None


_versions: dict[str, dict[str, KernelVersion]] = {}


def register(version: KernelVersion) -> None:
    """Adds a version, newer than all of its operator's so far. ValueError if the name is taken."""
    of_op = _versions.setdefault(version.op, {})
    if version.name in of_op:
        raise ValueError(
            f"{version.op} already has a version {version.name!r}; give the new one another name"
        )
    of_op[version.name] = version


def register_torch(op: str, package: str, name: str, note: str, automatic: bool = True) -> None:
    """Registers `package`.`name`, a version in plain torch: any size, on CPU and CUDA, up to float64."""
    register(
        KernelVersion(
            op=op,
            name=name,
            module=f"{package}.{name}",
            devices=("cpu", "cuda"),
            dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
            automatic=automatic,
            note=note,
        )
    )


def versions(op: str) -> list[KernelVersion]:
    """All versions of an operator, oldest first. ValueError for an operator that nobody registered."""
    if op not in _versions:
        known = ", ".join(sorted(_versions)) or "none"
        raise ValueError(
            f"no operator {op!r} is registered (registered: {known}); import mdn_kernels.{op} first"
        )
    return list(_versions[op].values())


def get(op: str, name: str) -> KernelVersion:
    """One version by name. ValueError, which lists the names there are, if it does not exist."""
    for version in versions(op):
        if version.name == name:
            return version
    raise ValueError(f"{op} has no version {name!r}; use one of {', '.join(v.name for v in versions(op))}")


def loaded() -> list[KernelVersion]:
    """The versions whose module has been imported: what the models built so far have run on."""
    return [v for of_op in _versions.values() for v in of_op.values() if v.module in sys.modules]


def choose(op: str, device: str | torch.device, dtype: torch.dtype, T: int, K: int, V: int) -> KernelVersion:
    """The newest automatic version that fits the call; for one token one that decodes, or the recurrent one.

    ValueError, with each version's reason, if none fits.
    """
    candidates = [v for v in reversed(versions(op)) if v.automatic and v.decodes == (T == 1)]
    if T == 1:
        candidates.append(get(op, DECODING))
    misfits = [(v.name, v.misfit(device, dtype, K, V, T)) for v in candidates]
    for version, (_, misfit) in zip(candidates, misfits, strict=True):
        if misfit is None:
            return version
    reasons = "; ".join(f"{name} {misfit}" for name, misfit in misfits) or "none is automatic"
    raise ValueError(f"no version of {op} fits: {reasons}")


def select(
    op: str, name: str | None, device: str | torch.device, dtype: torch.dtype, T: int, K: int, V: int
) -> KernelVersion:
    """The version called `name` if it fits the call (ValueError if not); without a name, `choose`'s."""
    if name is None:
        return choose(op, device, dtype, T, K, V)
    version = get(op, name)
    misfit = version.misfit(device, dtype, K, V, T)
    if misfit is not None:
        others = ", ".join(v.name for v in versions(op) if v.misfit(device, dtype, K, V, T) is None) or "none"
        raise ValueError(f"{op} version {name!r} {misfit}; versions that fit: {others}")
    return version
