"""Artifact: machine code, and a JSON that says how to launch it. It needs nothing but a GPU driver to run."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .spec import KernelSpec, canonical_json, sha256

SCHEMA = 1

_FIELDS = {
    "schema": int,
    "artifact_key": str,
    "spec_key": str,
    "source_digest": str,
    "toolchain": dict,
    "spec": dict,
    "name": str,
    "kind": str,
    "code_sha256": str,
    "code_bytes": int,
    "target": str,
    "params": list,
    "num_warps": int,
    "warp_size": int,
    "shared": int,
    "num_ctas": int,
    "cluster": list,
    "pdl": bool,
    "cooperative": bool,
    "global_scratch": list,
    "profile_scratch": list,
    "tensor_maps": list,
}


class ArtifactError(Exception):
    """An artifact that must not be loaded. `reason` is "schema" or "corrupt"."""

    def __init__(self, reason: str, text: str):
        super().__init__(f"{reason}: {text}")
        self.reason = reason
        self.text = text


@dataclass(frozen=True)
class Artifact:
    """`code` is a cubin or hsaco; `meta` holds the fields of `_FIELDS`."""

    code: bytes
    meta: dict

    @property
    def key(self) -> str:
        return self.meta["artifact_key"]

    @property
    def spec_key(self) -> str:
        return self.meta["spec_key"]

    @property
    def label(self) -> str:
        return KernelSpec.from_json(self.meta["spec"]).label()


def artifact_key(spec_key: str, digest: str, toolchain: dict) -> str:
    """The name of an artifact: its spec, the kernels' sources, and what compiled them."""
    return sha256(canonical_json([SCHEMA, spec_key, digest, toolchain]))


def dump_meta(meta: dict) -> bytes:
    """The JSON of an artifact, with its own digest inside."""
    body = {name: value for name, value in meta.items() if name != "self_sha256"}
    return canonical_json({**body, "self_sha256": sha256(canonical_json(body))})


def parse(meta_bytes: bytes, code: bytes) -> Artifact:
    """The artifact that `dump_meta` and `code` describe. Raises ArtifactError unless every digest is right."""
    try:
        meta = json.loads(meta_bytes)
        digest = meta.pop("self_sha256")
        schema = meta["schema"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError("corrupt", f"its description cannot be read ({type(error).__name__})") from None
    if sha256(canonical_json(meta)) != digest:
        raise ArtifactError("corrupt", "its description does not have the digest it names")
    if schema != SCHEMA:
        raise ArtifactError("schema", f"it has schema {schema!r}, this version reads {SCHEMA}")
    for name, kind in _FIELDS.items():
        if type(meta.get(name)) is not kind:
            raise ArtifactError("schema", f"its field {name!r} is {meta.get(name)!r}, not {kind.__name__}")
    if len(code) != meta["code_bytes"] or sha256(code) != meta["code_sha256"]:
        raise ArtifactError("corrupt", "its machine code does not have the size and digest its description names")
    if KernelSpec.from_json(meta["spec"]).key != meta["spec_key"]:
        raise ArtifactError("corrupt", "its spec does not have the key it names")
    if artifact_key(meta["spec_key"], meta["source_digest"], meta["toolchain"]) != meta["artifact_key"]:
        raise ArtifactError("corrupt", "its key does not follow from its spec, sources and toolchain")
    return Artifact(code, meta)
