"""compile_spec: the only caller of `triton.compile`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import tempfile
import threading
from pathlib import Path

from .artifact import SCHEMA, Artifact, artifact_key
from .spec import KernelSpec, sha256
from .targets import Target, target_of

# What Triton and its assembler read: these names, and all that start so unless known to be harmless. Names as common as
# DISABLE_ and ENABLE_ are no family: other programs have theirs, and a cache would be missed for nothing.
_CODE_FAMILIES = ("TRITON_", "AMDGCN_")
_CODE_NAMES = frozenset(
    """DISABLE_LLVM_OPT DISABLE_MMA_V3 DISABLE_MMA_V5 DISABLE_PTXAS_OPT PTXAS_OPTIONS LLVM_PASS_PLUGIN_PATH USE_IR_LOC
    ALLOW_LHS_TMEM_LAYOUT_CONVERSION STORE_TMEM_TO_GLOBAL_BYPASS_SMEM""".split()
)
# Here 0 is not the same as unset.
_ON_BY_DEFAULT = ("AMDGCN_", "TRITON_HIP_")
_HARMLESS = frozenset(
    """TRITON_CACHE_DIR TRITON_HOME TRITON_DUMP_DIR TRITON_OVERRIDE_DIR TRITON_CACHE_MANAGER TRITON_CACHE_AUTOTUNING
    TRITON_REMOTE_CACHE_BACKEND TRITON_REDIS_HOST TRITON_REDIS_PORT TRITON_REDIS_KEY_FORMAT TRITON_INTERPRET
    TRITON_ALWAYS_COMPILE TRITON_STORE_BINARY_ONLY TRITON_DISABLE_LINE_INFO TRITON_DEFAULT_FP_FUSION
    TRITON_PRINT_AUTOTUNING TRITON_KERNEL_DUMP TRITON_LIBCUDA_PATH TRITON_LIBHIP_PATH TRITON_CUOBJDUMP_PATH
    TRITON_NVDISASM_PATH TRITON_DUMP_PTXAS_LOG TRITON_BUILD_DIR TRITON_DISABLE_PYTHON_STACKTRACE
    TRITON_REPRODUCER_PATH AMDGCN_ENABLE_DUMP""".split()
)
_OFF = ("0", "false", "off", "no")


class _Knobs:
    """Triton's knobs are process-wide: compiles that run at once share one setting of them."""

    def __init__(self):
        self.lock = threading.Lock()
        self.users = 0
        self.undo = contextlib.ExitStack()


_knobs = _Knobs()
os.register_at_fork(after_in_child=lambda: globals().__setitem__("_knobs", _Knobs()))


class CompileError(RuntimeError):
    """A spec that the compiler refused, or whose kernel does not fit its target."""


def code_environment(environ=None) -> dict[str, str]:
    """Variables of the user's that may change the machine code. A tool named by path counts by its contents."""
    environ = os.environ if environ is None else environ
    found = {}
    for name, value in environ.items():
        if name not in _CODE_NAMES and (not name.startswith(_CODE_FAMILIES) or name in _HARMLESS):
            continue
        if not value or (value.lower() in _OFF and not name.startswith(_ON_BY_DEFAULT)):
            continue
        path = Path(value)
        with contextlib.suppress(OSError):
            value = f"sha256:{_file_digest(path)}" if path.is_absolute() and path.is_file() else value
        found[name] = value
    return found


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return sha256(file.read())


def toolchain() -> dict:
    """What compiles here: Triton's version, which brings its own assembler, and the environment. Imports no Triton."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return {"triton": version, "env": code_environment()}


@contextlib.contextmanager
def _private_triton():
    """Triton without its own cache, and without paths in what it makes."""
    from triton import knobs

    shared = _knobs
    with shared.lock:
        if not shared.users:
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flashattn-"))
                stack.enter_context(knobs.cache.scope())
                stack.enter_context(knobs.compilation.scope())
                knobs.cache.dir = folder
                knobs.compilation.always_compile = True
                # With line info the source's path is inside the binary, which is then 3 to 4 times larger.
                knobs.compilation.disable_line_info = True
                shared.undo = stack.pop_all()
        shared.users += 1
    try:
        yield
    finally:
        with shared.lock:
            shared.users -= 1
            if not shared.users:
                shared.undo.close()


def _source(spec: KernelSpec):
    """The kernel's source as Triton wants it, with the types, constants and promises of the spec."""
    kernel = getattr(importlib.import_module(spec.module), spec.kernel)
    types = dict(spec.signature)
    if list(types) != list(kernel.arg_names):
        raise CompileError(
            f"{spec.label()}: the spec's parameters {list(types)} are not the kernel's {kernel.arg_names}"
        )
    index = {name: i for i, name in enumerate(types)}
    promises = {}
    for path, divisor in spec.alignment:
        name, _, element = path.partition(".")
        promises[(index[name], int(element)) if element else (index[name],)] = [["tt.divisibility", divisor]]
    if type(kernel).__name__ == "GluonJITFunction":
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    return Source(kernel, types, constexprs=dict(spec.constants), attrs=promises)


def compile_spec(spec: KernelSpec, *, source_digest: str, keep_ir: Path | None = None) -> Artifact:
    """Machine code for `spec`. Needs no GPU. `source_digest` is that of the kernels' sources, which it is kept with.

    Raises CompileError naming the spec if the compiler fails or the kernel wants more shared memory than there is.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    target = target_of(spec.target)
    try:
        with _private_triton():
            gpu = GPUTarget(target.backend, target.arch, target.warp_size)
            compiled = triton.compile(_source(spec), target=gpu, options=dict(spec.options))
            if keep_ir is not None:
                _keep(Path(keep_ir), spec, compiled.asm)
            kind = "cubin" if target.backend == "cuda" else "hsaco"
            return _artifact(spec, target, source_digest, compiled.metadata, kind, compiled.asm[kind])
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"{spec.label()}: {type(error).__name__}: {error}") from error


def _keep(folder: Path, spec: KernelSpec, stages: dict) -> None:
    """Write the intermediate code of every stage that is text."""
    folder.mkdir(parents=True, exist_ok=True)
    for stage, text in stages.items():
        if isinstance(text, str):
            (folder / f"{spec.kernel}-{spec.key[:16]}.{stage}").write_text(text)


def _artifact(spec: KernelSpec, target: Target, digest: str, made, kind: str, code: bytes) -> Artifact:
    if not code:
        raise CompileError(f"{spec.label()}: the compiler returned an empty {kind}")
    if made.shared > target.shared_limit:
        raise CompileError(
            f"{spec.label()}: it wants {made.shared} bytes of shared memory, {target.name} has {target.shared_limit}; "
            "smaller tiles or fewer stages are needed"
        )
    tools = toolchain()
    meta = {
        "schema": SCHEMA,
        "artifact_key": artifact_key(spec.key, digest, tools),
        "spec_key": spec.key,
        "source_digest": digest,
        "toolchain": tools,
        "spec": spec.to_json(),
        "name": made.name,
        "kind": kind,
        "code_sha256": sha256(code),
        "code_bytes": len(code),
        "target": target.name,
        "params": [list(param) for param in parameters(spec)],
        "num_warps": made.num_warps,
        "warp_size": target.warp_size,
        "shared": made.shared,
        "num_ctas": made.num_ctas,
        "cluster": [made.num_ctas, 1, 1],
        "pdl": bool(getattr(made, "launch_pdl", False)),
        "cooperative": bool(getattr(made, "launch_cooperative_grid", False)),
        "global_scratch": [getattr(made, "global_scratch_size", 0), getattr(made, "global_scratch_align", 1)],
        "profile_scratch": [getattr(made, "profile_scratch_size", 0), getattr(made, "profile_scratch_align", 1)],
        "tensor_maps": [dict(entry) for entry in getattr(made, "tensordesc_meta", None) or [] if entry],
    }
    return Artifact(code, meta)


def parameters(spec: KernelSpec):
    """(name, type) of each value the launched kernel reads, in order: tuples flattened, constexprs absent."""
    for name, kind in spec.signature:
        yield from _flattened(name, kind)
    yield "global_scratch", "*u8"
    yield "profile_scratch", "*u8"


def _flattened(name: str, kind):
    if isinstance(kind, tuple):
        for i, item in enumerate(kind):
            yield from _flattened(f"{name}.{i}", item)
    elif kind.startswith("tensordesc"):
        # By value: the map itself, then the shape (i32) and the strides (i64) of each dimension.
        rank = kind[kind.index("[") + 1 : kind.index("]")].count(",") + 1
        yield f"{name}.map", "tensormap"
        yield from ((f"{name}.shape.{i}", "i32") for i in range(rank))
        yield from ((f"{name}.stride.{i}", "i64") for i in range(rank))
    elif kind != "constexpr":
        yield name, kind
