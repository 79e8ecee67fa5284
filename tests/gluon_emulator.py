"""Runs the source of Gluon kernels for Hopper on the CPU, with torch tensors.

Partitions are threads. What the hardware does later happens later here: copies land from another thread after a random
while, products read their operands in shared memory at any time between issue and wait, stores leave in their own time.
So a missing wait, an early release or a wrong phase shows as a wrong result, NaN (fresh shared memory), or a time-out.
Layouts and fences are not looked at: the compiler checks the first, nothing here the second.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
import types
from importlib import import_module

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language.core import constexpr

TIMEOUT_S = 20.0
_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)


class EmulationError(Exception):
    """What a kernel did that hardware does not define, or a wait that never ended."""


def _plain(value):
    return value.value if isinstance(value, (Registers, constexpr)) else value


def _tensor(value):
    value = _plain(value)
    return value if torch.is_tensor(value) else torch.tensor(value)


class Registers:
    """A tensor or scalar in registers."""

    def __init__(self, value):
        if isinstance(value, Product):
            raise EmulationError("a product was read before it was waited for")
        self.value = _tensor(value)
        self.type = types.SimpleNamespace(layout=None, shape=list(self.value.shape))

    shape = property(lambda self: list(self.value.shape))
    dtype = property(lambda self: self.value.dtype)

    def __getitem__(self, key):
        return Registers(self.value[key])

    def reshape(self, shape):
        return Registers(self.value.reshape([int(n) for n in shape]))

    def permute(self, order):
        return Registers(self.value.permute(order))

    def to(self, dtype, bitcast=False):
        return Registers(self.value.view(dtype) if bitcast else self.value.to(dtype))

    def __neg__(self):
        return Registers(-self.value)

    def __bool__(self):
        return bool(self.value)

    def __index__(self):
        return int(self.value)

    __int__ = __index__
    __hash__ = None


def _binary(name):
    def operator(self, other):
        if isinstance(other, (Product, Pointer)):
            return NotImplemented
        value = getattr(torch.Tensor, f"__{name}__")(self.value, _plain(other))
        return NotImplemented if value is NotImplemented else Registers(value)

    return operator


def _reflected(name):
    return lambda self, other: getattr(Registers(other), f"__{name}__")(self)


for _name in _BINARY:
    setattr(Registers, f"__{_name}__", _binary(_name))
    setattr(Registers, f"__r{_name}__", _reflected(_name))


class Pointer:
    """An address in global memory: a flat tensor and offsets."""

    def __init__(self, tensor, offsets=0):
        self.flat, self.offsets = tensor.view(-1) if torch.is_tensor(tensor) else tensor, offsets

    def __add__(self, other):
        return Pointer(self.flat, self.offsets + other)


class Shared:
    """A view of shared memory."""

    def __init__(self, value):
        self.value = value
        self.type = types.SimpleNamespace(layout=None, shape=list(value.shape))

    shape = property(lambda self: list(self.value.shape))
    dtype = property(lambda self: self.value.dtype)

    def index(self, i):
        return Shared(self.value[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.value.narrow(int(dim), int(start), int(length)))

    def permute(self, order):
        return Shared(self.value.permute(order))

    def reshape(self, shape):
        return Shared(self.value.view([int(n) for n in shape]))

    def load(self, layout=None):
        return Registers(self.value.clone())

    def store(self, registers):
        self.value.copy_(registers.value)


class Barrier:
    """An mbarrier."""

    def __init__(self):
        self.changed = threading.Condition()
        self.phase, self.count, self.pending, self.bytes = 0, None, None, 0

    def index(self, i):
        return self

    def init(self, count):
        self.count = self.pending = int(count)

    def arrive(self, count=1, expected=0):
        with self.changed:
            if self.pending is None or self.pending < count:
                raise EmulationError("more arrivals at a barrier than it was made for")
            self.pending -= int(count)
            self.bytes += expected
            self._complete()

    def landed(self, nbytes):
        with self.changed:
            self.bytes -= nbytes
            self._complete()

    def _complete(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            self.changed.notify_all()

    def wait(self, phase, deadline):
        phase = int(phase)
        if phase not in (0, 1):
            raise EmulationError(f"a barrier was waited for with phase {phase}")
        with self.changed:
            while self.phase == phase:
                if not self.changed.wait(max(0.0, deadline() - time.monotonic())) and time.monotonic() > deadline():
                    raise EmulationError("a wait for a barrier never ended")


class Barriers:
    """mbarriers in a ring."""

    def __init__(self, shape):
        self.shape, self.items = shape, [Barrier() for _ in range(shape[0])]

    def index(self, i):
        i = int(i)
        if not 0 <= i < len(self.items):
            raise EmulationError(f"barrier {i} of {len(self.items)}")
        return self.items[i]


class NamedBarrier:
    """One of the hardware's barriers, for two warpgroups."""

    def __init__(self):
        self.changed, self.arrived, self.generation = threading.Condition(), 0, 0

    def meet(self, waits, deadline):
        with self.changed:
            mine = self.generation
            self.arrived += 1
            if self.arrived == 2:
                self.arrived, self.generation = 0, self.generation + 1
                self.changed.notify_all()
            while waits and self.generation == mine:
                if not self.changed.wait(max(0.0, deadline() - time.monotonic())) and time.monotonic() > deadline():
                    raise EmulationError("a wait for a named barrier never ended")


class Descriptor:
    """A tensor map of a tensor of 4 dimensions, and the tile that a copy moves."""

    def __init__(self, tensor, block_shape):
        self.tensor, self.dtype, self.layout = tensor, tensor.dtype, None
        nbytes = torch.Size(block_shape).numel() * tensor.element_size()
        self.block_type = types.SimpleNamespace(shape=list(block_shape), nbytes=nbytes)

    def window(self, corner):
        """(slices of the tensor, slices of the tile) that overlap."""
        inside, within = [], []
        for start, size, extent in zip(corner, self.block_type.shape, self.tensor.shape, strict=True):
            start = int(start)
            low, high = max(start, 0), min(start + size, extent)
            inside.append(slice(low, max(low, high)))
            within.append(slice(low - start, max(low, high) - start))
        return tuple(inside), tuple(within)


class Product:
    """The result of an asynchronous product."""

    def __init__(self, compute, shape, dtype=torch.float32):
        self.compute, self.value = compute, None
        self.shape, self.dtype = shape, dtype
        self.type = types.SimpleNamespace(layout=None, shape=shape)

    def finish(self):
        if self.value is None:
            self.value = self.compute()
        return self.value


class Emulator:
    """`launch(kernel, grid, *args, **constants)` runs a kernel. `seed` decides how long everything takes."""

    def __init__(self, seed: int = 0, timeout_s: float = TIMEOUT_S, replace: dict | None = None):
        self.random, self.local, self.timeout_s = random.Random(seed), threading.local(), timeout_s
        self.lock, self.errors, self.replace = threading.Lock(), [], replace or {}
        self.language = self._language()

    def _deadline(self):
        # A partition that failed lets the others go.
        return 0.0 if self.errors else self.started + self.timeout_s

    def _pause(self, longest=1e-3):
        time.sleep(self.random.random() * longest)

    def _language(self):
        """What stands for `gluon.language` and its Hopper module."""
        gl = types.SimpleNamespace(constexpr=None, static_range=range)
        for name in ("bfloat16", "float16", "float32", "int32", "int64"):
            setattr(gl, name, getattr(torch, name))
        for name in [
            "NVMMADistributedLayout",
            "BlockedLayout",
            "SliceLayout",
            "DotOperandLayout",
            "SwizzledSharedLayout",
        ]:
            setattr(gl, name, lambda *a, **k: None)
        for function in (torch.exp2, torch.log2, torch.abs):
            setattr(gl, function.__name__, lambda x, f=function: Registers(f(_tensor(x))))
        gl.program_id = lambda axis: Registers(self.local.cta.program)
        gl.num_programs = lambda axis: Registers(self.local.cta.programs)
        gl.arange = lambda start, stop, layout=None: Registers(torch.arange(int(start), int(stop), dtype=torch.int32))
        gl.full = lambda shape, value, dtype, layout=None: Registers(torch.full(shape, _plain(value), dtype=dtype))
        gl.zeros = lambda shape, dtype, layout=None: Registers(torch.zeros(shape, dtype=dtype))
        gl.to_tensor = lambda x: Registers(x)
        gl.convert_layout = lambda x, layout, assert_trivial=False: x
        gl.where = lambda c, a, b: Registers(torch.where(_tensor(c), _tensor(a), _tensor(b)))
        gl.maximum = lambda a, b: Registers(torch.fmax(_tensor(a), _tensor(b)))
        gl.minimum = lambda a, b: Registers(torch.fmin(_tensor(a), _tensor(b)))
        gl.cdiv = lambda a, b: (a + (b - 1)) // b
        gl.fma = lambda a, b, c: Registers((_tensor(a).double() * _tensor(b).double() + _tensor(c).double()).float())
        gl.max = lambda x, axis: Registers(x.value.nan_to_num(-float("inf"), float("inf"), -float("inf")).amax(axis))
        gl.sum = lambda x, axis: Registers(x.value.sum(axis))
        gl.split = lambda x: (Registers(x.value[..., 0]), Registers(x.value[..., 1]))
        gl.allocate_shared_memory = self._allocate
        gl.store, gl.atomic_add = self._store, self._atomic_add
        gl.inline_asm_elementwise = self._assembly
        gl.warp_specialize = self._specialize
        return gl

    def namespace(self):
        barrier = types.SimpleNamespace(
            MBarrierLayout=lambda: "mbarrier",
            init=lambda b, count: b.init(count),
            expect=lambda b, nbytes: b.arrive(1, nbytes),
            arrive=lambda b, *, count=1: b.arrive(count),
            wait=lambda b, phase: b.wait(phase, self._deadline),
        )
        return {
            "gl": self.language,
            "mbarrier": barrier,
            "tma": types.SimpleNamespace(store_wait=self._store_wait),
            "copy_in": self._copy_in,
            "copy_out": self._copy_out,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self._product,
            "warpgroup_mma_wait": self._wait,
        }

    # memory
    def _allocate(self, dtype, shape, layout=None):
        if layout == "mbarrier":
            return Barriers(shape)
        fill = float("nan") if dtype.is_floating_point else -(2**30)
        return Shared(torch.full([int(n) for n in shape], fill, dtype=dtype))

    def _store(self, pointer, value, mask=None):
        offsets = torch.as_tensor(_plain(pointer.offsets)).reshape(-1).long()
        value = _tensor(value).to(pointer.flat.dtype).expand(offsets.shape).reshape(-1)
        keep = slice(None) if mask is None else _tensor(mask).reshape(-1)
        pointer.flat[offsets[keep]] = value[keep]

    def _atomic_add(self, pointer, value, mask, sem=None):
        self._pause()
        before = torch.zeros_like(_tensor(value))
        with self.lock:
            for i in torch.nonzero(_tensor(mask)).flatten().tolist():
                at = int(_tensor(pointer.offsets).expand(before.shape)[i])
                before[i] = pointer.flat[at]
                pointer.flat[at] += _tensor(value)[i]
        return Registers(before)

    def _later(self, work, longest=2e-3):
        pause = self.random.random() * longest

        def run():
            time.sleep(pause)
            try:
                work()
            except BaseException as error:
                self.errors.append(("copy", error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _copy_in(self, desc, corner, barrier, tile):
        inside, within = desc.window(corner)
        if tile.shape != desc.block_type.shape:
            raise EmulationError(f"a copy of {desc.block_type.shape} to a tile of {tile.shape}")

        def land():
            tile.value.zero_()
            tile.value[within] = desc.tensor[inside]
            barrier.landed(desc.block_type.nbytes)

        self._later(land)

    def _copy_out(self, desc, corner, tile):
        inside, within = desc.window(corner)
        if tile.shape != desc.block_type.shape:
            raise EmulationError(f"a copy of {tile.shape} by a descriptor of {desc.block_type.shape}")

        def leave():
            desc.tensor[inside] = tile.value[within]

        self.local.stores.append(self._later(leave))

    def _store_wait(self, pending):
        while len(self.local.stores) > pending:
            self.local.stores.pop(0).join()

    # products
    def _product(self, a, b, acc, *, use_acc=True, is_async=False):
        def compute():
            left = a.value.float() if isinstance(a, (Shared, Registers)) else a
            value = left @ b.value.float()
            if use_acc:
                before = acc.finish() if isinstance(acc, Product) else acc.value
                value = value + before
            return value

        product = Product(compute, acc.shape)
        if not is_async:
            return Registers(product.finish())
        self.local.products.append(product)
        if self.random.random() < 0.5:
            self._in_order(product)
        return product

    def _in_order(self, last):
        for product in self.local.products:
            product.finish()
            if product is last:
                return

    def _wait(self, pending, deps):
        queue = self.local.products
        while len(queue) > pending:
            self._pause()
            queue.pop(0).finish()
        known = [Registers(d.value) if isinstance(d, Product) and d not in queue else d for d in deps]
        return known[0] if len(known) == 1 else tuple(known)

    # threads
    def _assembly(self, text, constraints, args, **options):
        if args:
            # Accumulators times a factor a row, which may be left out where it is 1.
            return args[0] * args[1]
        operation, number, threads = re.match(r"bar\.(sync|arrive) (\d+), (\d+);", text).groups()
        if threads != "256" or int(number) < 7:
            raise EmulationError(f"unexpected assembly {text}")
        with self.lock:
            barrier = self.local.cta.barriers.setdefault(number, NamedBarrier())
        barrier.meet(operation == "sync", self._deadline)
        return None

    def _enter(self, cta):
        self.local.cta, self.local.products, self.local.stores = cta, [], []

    def _run(self, cta, function, args):
        self._enter(cta)
        try:
            function(*args)
            if self.local.products:
                raise EmulationError("a product was never waited for")
            self._store_wait(0)
        except BaseException as error:
            self.errors.append((function.__name__, error))

    def _together(self, jobs):
        threads = [threading.Thread(target=self._run, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _specialize(self, roles, warps, registers):
        if len(roles) != len(warps) + 1 or len(warps) != len(registers):
            raise EmulationError("roles, warps and registers do not match")
        self._together([(self.local.cta, function, args) for function, args in roles])

    def launch(self, kernel, grid, *args, **constants):
        """Run `grid` programs at once. Raises EmulationError for the first thing that went wrong."""
        self.started, self.errors = time.monotonic(), []
        entry = _rebound(kernel.fn.__module__, self)[kernel.fn.__name__]

        def program(number):
            entry(*args, **constants)

        program.__name__ = kernel.fn.__name__
        ctas = [types.SimpleNamespace(program=i, programs=grid, barriers={}) for i in range(grid)]
        self._together([(cta, program, (cta.program,)) for cta in ctas])
        if self.errors:
            where, error = self.errors[0]
            raise EmulationError(f"{where}: {type(error).__name__}: {error}") from error


def _rebound(module: str, emulator: Emulator) -> dict:
    """The functions of a kernel's module and of those it takes functions from, as plain Python on the emulator."""
    space = dict(vars(import_module(module)))
    functions = {n: f.fn for n, f in space.items() if isinstance(f, GluonJITFunction)}
    for name, value in space.items():
        if isinstance(value, constexpr):
            space[name] = value.value
    space.update(emulator.namespace())
    found = {}
    for name, function in functions.items():
        if function.__module__ == module:
            found[name] = types.FunctionType(
                function.__code__, space, name, function.__defaults__, function.__closure__
            )
        else:
            found[name] = _rebound(function.__module__, emulator)[name]
    space.update(found)
    space.update(emulator.replace)
    return space


@contextlib.contextmanager
def quiet_threads():
    """Errors in threads are collected, not printed."""
    before, threading.excepthook = threading.excepthook, lambda args: None
    try:
        yield
    finally:
        threading.excepthook = before
