"""flash-linear-attention's operators, called as this package's: what version `fla` is made of."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from mdn_kernels.common.normalize import l2norm
from mdn_kernels.registry import KernelVersion, register

INSTALL = "pip install flash-linear-attention==0.6.0"


def miscompiles(triton: str) -> bool:
    """Whether this Triton compiles a gated backward kernel of FLA wrongly on Hopper (3.4 to 3.7.0 do)."""
    number = tuple(int(part) for part in triton.split("+")[0].split(".")[:3] if part.isdigit())
    return (3, 4) <= number <= (3, 7, 0)


def trusted() -> bool:
    """FLA is installed, with a Triton that is right on every GPU. Imports neither."""
    try:
        return find_spec("fla") is not None and not miscompiles(version("triton"))
    except PackageNotFoundError:
        return False


def fla_operator(module: str, name: str) -> Callable:
    """`fla.ops.<module>.<name>`. ImportError if FLA is not installed or not to be trusted here."""
    if find_spec("fla") is None:
        raise ImportError(f"version 'fla' needs flash-linear-attention: {INSTALL}")
    triton = import_module("triton").__version__
    if miscompiles(triton) and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        raise ImportError(
            f"version 'fla' is refused: Triton {triton} compiles FLA's gated backward wrongly on this GPU "
            "(right outputs, wrong gradients); use Triton 3.7.1 or later, or another version"
        )
    return getattr(import_module(f"fla.ops.{module}"), name)


def called_as_version(chunk: Callable, normalizes: bool = True) -> Callable:
    """The `forward` of a version. `normalizes`: FLA's function can normalise q and k itself."""

    def forward(
        *tensors: Tensor,
        scale: float,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        normalize_qk: bool,
    ) -> tuple[Tensor, Tensor | None]:
        options = {"use_qk_l2norm_in_kernel": normalize_qk} if normalizes else {}
        if normalize_qk and not normalizes:
            q, k = (l2norm(x.float()).to(x.dtype) for x in tensors[:2])
            tensors = (q, k, *tensors[2:])
        o, state = chunk(
            *tensors,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(tensors[0].device, torch.int64),
            **options,
        )
        return o, state if output_final_state else None

    return forward


def register_fla(op: str, package: str, name: str, automatic: bool) -> None:
    """Registers `package`.fla, which calls FLA's function `name`."""
    register(
        KernelVersion(
            op=op,
            name="fla",
            module=f"{package}.fla",
            devices=("cuda",),
            dtypes=(torch.bfloat16, torch.float16),
            max_key=256,
            automatic=automatic,
            note=f"flash-linear-attention's {name}, if that is installed; torch.compile stops at it",
        )
    )
