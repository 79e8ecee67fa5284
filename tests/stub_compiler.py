"""A compiler of a few bytes, and wheels and caches made with it: what the JIT does with artifacts, without Triton."""

from __future__ import annotations

import json
from pathlib import Path

from flashattn.jit.artifact import SCHEMA, Artifact, artifact_key, dump_meta
from flashattn.jit.compile import parameters, toolchain
from flashattn.jit.spec import KernelSpec, sha256, source_digest
from flashattn.jit.wheel import write_manifest

TOOLS = {"triton": "3.6.0", "env": {}}
VERSION = "1.2.3"


def spec(factor: int = 2, target: str = "sm_90") -> KernelSpec:
    return KernelSpec(
        module="flashattn.kernels.scale",
        kernel="scale",
        signature=(("x_ptr", "*fp32"), ("n", "i32"), ("FACTOR", "constexpr")),
        constants=(("FACTOR", factor),),
        alignment=(("x_ptr", 16),),
        options=(("num_warps", 4),),
        target=target,
    )


def artifact_of(spec: KernelSpec, digest: str, tools: dict | None = None, **changes) -> Artifact:
    """What a compiler would give for `spec`; `changes` are put into its description as they are."""
    tools = toolchain() if tools is None else tools
    code = f"machine code of {spec.label()}".encode() * 20
    meta = {
        "schema": SCHEMA,
        "artifact_key": artifact_key(spec.key, digest, tools),
        "spec_key": spec.key,
        "source_digest": digest,
        "toolchain": tools,
        "spec": spec.to_json(),
        "name": spec.kernel,
        "kind": "hsaco" if spec.target.startswith("gfx") else "cubin",
        "code_sha256": sha256(code),
        "code_bytes": len(code),
        "target": spec.target,
        "params": [list(param) for param in parameters(spec)],
        "num_warps": 4,
        "warp_size": 32,
        "shared": 0,
        "num_ctas": 1,
        "cluster": [1, 1, 1],
        "pdl": False,
        "cooperative": False,
        "global_scratch": [0, 1],
        "profile_scratch": [0, 1],
        "tensor_maps": [],
    }
    # Lists in place of tuples, as in an artifact that was read.
    return Artifact(code, json.loads(json.dumps({**meta, **changes})))


class StubCompiler:
    """Stands in for compile_spec, and remembers what it compiled. `during` is called in each compile."""

    def __init__(self, during=lambda spec: None):
        self.compiled: list[str] = []
        self.during = during

    def __call__(self, spec: KernelSpec, *, source_digest: str) -> Artifact:
        self.compiled.append(spec.key)
        self.during(spec)
        return artifact_of(spec, source_digest)


def write_sources(kernels_dir: Path) -> Path:
    """A folder of kernel sources."""
    kernels_dir.mkdir(parents=True, exist_ok=True)
    (kernels_dir / "scale.py").write_text("def scale(x_ptr, n, FACTOR): ...\n")
    return kernels_dir


def write_wheel(aot_dir: Path, specs, digest: str | None = None, version: str = VERSION, **changes) -> Path:
    """The folder of one target in a wheel, holding `specs`. `changes` go into each artifact's description."""
    folder = aot_dir / next(iter(specs)).target
    folder.mkdir(parents=True, exist_ok=True)
    digest = digest or source_digest(aot_dir.parent / "kernels")
    tools = changes.pop("toolchain", TOOLS)
    artifacts = [artifact_of(each, digest, tools, **changes) for each in specs]
    for artifact in artifacts:
        (folder / f"{artifact.key}.{artifact.meta['kind']}").write_bytes(artifact.code)
        (folder / f"{artifact.key}.json").write_bytes(dump_meta(artifact.meta))
    write_manifest(folder, artifacts, version=version, source_digest=digest, toolchain=tools, profile="core")
    return folder
