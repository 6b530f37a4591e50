"""Enough of Gluon to run a kernel's program on the CPU, in float64, one program after the other.

What a kernel computes is run as written: products, masks, addresses (an address outside its tensor is an
error), what is copied where and when. Layouts are ignored, and so is whatever runs at the same time: copies
arrive at once, which shows a slot that is filled while it is still needed, but no missing barrier.
"""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import torch


class Pointer:
    def __init__(self, tensor, offset=0):
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset):
        return Pointer(self.tensor, self.offset + offset)

    __radd__ = __add__

    def __sub__(self, offset):
        return Pointer(self.tensor, self.offset - offset)


class Shared:
    """A piece of shared memory; NaN until something is written."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.dtype = tensor, list(tensor.shape), tensor.dtype

    def index(self, i):
        return Shared(self.tensor[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.tensor.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.tensor.permute(*order))

    def load(self, layout):
        return self.tensor.clone()

    def store(self, x):
        assert x.shape == self.tensor.shape
        self.tensor.copy_(x)


class Blocks:
    """A tensor descriptor: a matrix in blocks."""

    def __init__(self, matrix, rows, columns):
        self.matrix, self.dtype, self.layout = matrix, matrix.dtype, None
        self.block_type = SimpleNamespace(shape=[rows, columns])

    def block(self, at):
        row, column = (int(x) for x in at)
        assert min(row, column) >= 0
        rows, columns = self.block_type.shape
        return self.matrix[row : row + rows, column : column + columns]


def _copy_in(blocks, at, _, room, pred=True):
    if pred:
        block = blocks.block(at)
        room.tensor.zero_()  # outside of the matrix
        room.tensor[: len(block)] = block


def _copy_out(blocks, at, room):
    blocks.block(at).copy_(room.tensor)


def _offsets(pointer, shape=()):
    offsets = torch.as_tensor(pointer.offset).long()
    return torch.broadcast_to(offsets, shape or offsets.shape)


def _load(pointer):
    offsets = _offsets(pointer)
    assert ((offsets >= 0) & (offsets < pointer.tensor.numel())).all()
    return pointer.tensor.view(-1)[offsets]


def _store(pointer, values, mask=True):
    where = torch.broadcast_to(torch.as_tensor(mask), values.shape)
    pointer.tensor.view(-1)[_offsets(pointer, values.shape)[where]] = values[where]


def _product(a, b, accumulator, use_acc=True, is_async=False):
    product = a @ b.tensor
    assert product.shape == accumulator.shape
    return accumulator + product if use_acc else product


def _allocate(dtype, shape, layout):
    shape = [int(n) for n in shape]
    return Shared(
        torch.full(shape, torch.nan, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape)
    )


def _any(*_, **__):
    return None


class Machine:
    """Loads modules with Gluon kernels and launches them."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.program, self.grid = (0, 0), (1, 1)
        names = "NVMMADistributed DistributedLinear Slice Blocked SwizzledShared DotOperand"
        gl = ModuleType("gluon.language")
        layouts = {f"{name}Layout": _any for name in names.split()}
        gl.__dict__.update(
            layouts,
            constexpr=lambda x: x,
            static_range=range,
            float32=torch.float64,
            int64=torch.int64,
            program_id=lambda axis: torch.tensor(self.program[axis]),
            num_programs=lambda axis: torch.tensor(self.grid[axis]),
            load=_load,
            store=_store,
            arange=lambda start, end, layout=None: torch.arange(start, end),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            where=lambda condition, x, y: torch.where(condition, x, y),
            minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
            maximum=lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)),
            reshape=lambda x, shape: x.reshape(*shape),
            permute=lambda x, order: x.permute(*order),
            split=lambda x: x.unbind(-1),
            join=lambda x, y: torch.stack((x, y), -1),
            convert_layout=lambda x, layout, assert_trivial=False: x,
            allocate_shared_memory=_allocate,
            barrier=_any,
        )
        gluon = ModuleType("gluon")
        gluon.language = gl
        gluon.jit = lambda kernel=None, **_: kernel or (lambda kernel: kernel)
        gluon.constexpr_function = lambda function: function
        hopper = ModuleType("hopper")
        hopper.__dict__.update(
            fence_async_shared=_any,
            mbarrier=SimpleNamespace(init=_any, expect=_any, wait=_any, MBarrierLayout=_any),
            tma=SimpleNamespace(async_load=_copy_in, async_store=_copy_out, store_wait=_any),
            warpgroup_mma=_product,
            warpgroup_mma_wait=lambda pending, deps: deps[0] if len(deps) == 1 else tuple(deps),
        )
        experimental = ModuleType("triton.experimental")
        experimental.gluon = gluon
        for name, module in {
            "triton.experimental": experimental,
            "triton.experimental.gluon": gluon,
            "triton.experimental.gluon.language": gl,
            "triton.experimental.gluon.language.nvidia.hopper": hopper,
        }.items():
            monkeypatch.setitem(sys.modules, name, module)

    def load(self, name):
        """A fresh copy of a module, also for those that are loaded after it."""
        spec = importlib.util.find_spec(name)
        module = importlib.util.module_from_spec(spec)
        self.monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def launch(self, kernel, grid, **arguments):
        self.grid = grid
        for x in range(grid[0]):
            for y in range(grid[1]):
                self.program = (x, y)
                kernel(**arguments)
