"""Wheel: the kernels compiled ahead of time, one folder for each target, read-only for ever."""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .artifact import SCHEMA, Artifact, ArtifactError, dump_meta
from .spec import sha256
from .store import KINDS, is_key, verified

if TYPE_CHECKING:
    from importlib.abc import Traversable

MANIFEST = "MANIFEST.json"
_TEXTS = ("version", "source_digest", "target", "profile")
_CODE = re.compile(rf"([0-9a-f]{{64}})\.({'|'.join(KINDS)})\Z")


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the wheel has no kernel to give.

    reason: "not built", "not declared", "source", "arch", "environment taint", "schema", "corrupt" or "unreadable".
    listed: the manifest names the kernel. of_folder: the reason concerns the target's whole folder, not this kernel.
    """

    reason: str
    text: str
    listed: bool = False
    of_folder: bool = False


class Wheel:
    """The folder `aot_dir`/`target`. `version` is that of the package that reads it.

    `aot_dir` is a path, or what importlib.resources gives for a package in a zip.
    What a binary was compiled with is recorded in the manifest and not compared: artifacts stand alone.
    """

    def __init__(self, aot_dir: Traversable, target: str, version: str):
        self.aot_dir = Path(aot_dir) if isinstance(aot_dir, str) else aot_dir
        self.target = target
        self.version = version
        self._manifest: dict | Miss | None = None

    def manifest(self) -> dict | Miss:
        """The checked manifest, read once, or why there is none."""
        if self._manifest is None:
            self._manifest = _read_manifest(self.aot_dir, self.target)
        return self._manifest

    def source_digest(self, digest: str | None) -> str | Miss:
        """The digest of the sources that the wheel's kernels must come from.

        `digest` is that of the sources here; it is None where they cannot be read, and then the manifest is believed
        if it was made by the same version of the package. What follows a "+" in a version does not count.
        """
        found = self.manifest()
        if isinstance(found, Miss):
            return found
        built = found["source_digest"]
        if digest is not None and digest != built:
            text = f"it was compiled from other sources of the kernels ({built[:12]}, here they are {digest[:12]})"
            return Miss("source", text, of_folder=True)
        if digest is None and found["version"].partition("+")[0] != self.version.partition("+")[0]:
            text = f"it was compiled by version {found['version']}, and the sources of {self.version} cannot be read"
            return Miss("source", text, of_folder=True)
        return built

    def find(self, spec_key: str, source_digest: str | None) -> Artifact | Miss:
        """The verified artifact for a spec, or why there is none."""
        found = self.manifest()
        if isinstance(found, Miss):
            return found
        entry = found["entries"].get(spec_key)
        if entry is None:
            return Miss("not declared", f"its {MANIFEST} for {self.target} does not list it")
        digest = self.source_digest(source_digest)
        if isinstance(digest, Miss):
            return Miss(digest.reason, digest.text, listed=True, of_folder=True)
        try:
            artifact = _read_entry(self.aot_dir / self.target, entry)
            _check_entry(artifact, spec_key, self.target, digest)
            return artifact
        except ArtifactError as error:
            return Miss(error.reason, error.text, listed=True)


def _read_manifest(aot_dir: Traversable, target: str) -> dict | Miss:
    try:
        folder = aot_dir / target
        if not folder.is_dir():
            return _not_built(aot_dir, target)
        manifest = json.loads(_read_file(folder / MANIFEST))
        schema = manifest["schema"]
        well_formed = all(isinstance(manifest[name], str) for name in _TEXTS) and isinstance(
            manifest["toolchain"], dict
        )
        well_formed = well_formed and all(isinstance(entry, dict) for entry in manifest["entries"].values())
    except ArtifactError as error:
        return Miss(error.reason, error.text, of_folder=True)
    except OSError as error:
        return Miss("unreadable", f"its folder for {target} cannot be read ({error.strerror})", of_folder=True)
    except Exception as error:
        # Bytes of any kind may be there, and json has more ways to fail than ValueError.
        return Miss("corrupt", f"its {MANIFEST} cannot be understood ({type(error).__name__})", of_folder=True)
    if schema != SCHEMA:
        return Miss("schema", f"its {MANIFEST} has schema {schema!r}, this version reads {SCHEMA}", of_folder=True)
    if not well_formed:
        return Miss("corrupt", f"its {MANIFEST} has fields of the wrong type", of_folder=True)
    if manifest["target"] != target:
        text = f"its folder {target} holds kernels for {manifest['target']}, and a target is matched exactly"
        return Miss("arch", text, of_folder=True)
    return manifest


def _not_built(aot_dir: Traversable, target: str) -> Miss:
    others = sorted(path.name for path in aot_dir.iterdir() if path.is_dir()) if aot_dir.is_dir() else ()
    text = f"it holds kernels for {', '.join(others)} and none for {target}" if others else "it holds no kernels at all"
    return Miss("not built", text, of_folder=True)


def _read_entry(folder: Traversable, entry: dict) -> Artifact:
    """The artifact that an entry of a manifest names. ArtifactError if any digest is wrong."""
    name = _CODE.match(str(entry.get("code")))
    # Only names made of the key are opened, so no entry can point outside its folder.
    if name is None or name[1] != entry.get("artifact_key"):
        raise ArtifactError("corrupt", f"{MANIFEST} names the file {entry.get('code')!r}, which is not a kernel's name")
    meta = _read_file(folder / f"{name[1]}.json")
    code = _read_file(folder / name[0])
    if (len(code), sha256(code)) != (entry.get("code_bytes"), entry.get("code_sha256")):
        raise ArtifactError("corrupt", f"{name[0][:12]}...{name[2]} does not have the size and digest in {MANIFEST}")
    artifact = verified(meta, code)
    if sha256(meta) != entry.get("meta_sha256") or artifact.key != name[1] or artifact.meta["kind"] != name[2]:
        raise ArtifactError("corrupt", f"{name[0][:12]}...json is not the one that {MANIFEST} names")
    return artifact


def _check_entry(artifact: Artifact, spec_key: str, target: str, source_digest: str) -> None:
    meta = artifact.meta
    if artifact.spec_key != spec_key:
        raise ArtifactError("corrupt", f"{MANIFEST} lists {artifact.label} under the key of another kernel")
    if meta["target"] != target or meta["spec"]["target"] != target:
        raise ArtifactError("arch", f"its machine code is for {meta['target']}, and a target is matched exactly")
    if meta["source_digest"] != source_digest:
        raise ArtifactError("source", "it was compiled from other sources of the kernels than the rest of its folder")
    tainted = meta["toolchain"].get("env")
    if tainted:
        raise ArtifactError("environment taint", f"it was compiled with {', '.join(tainted)} set, which changes code")


def _read_file(path: Traversable) -> bytes:
    for pause in (0.01, 0.1, None):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise ArtifactError("corrupt", f"its file {_short(path)} is missing") from None
        except OSError as error:
            if pause is None or error.errno != errno.ESTALE:
                raise ArtifactError("unreadable", f"{_short(path)} cannot be read ({error.strerror})") from None
        time.sleep(pause)
    raise ArtifactError("unreadable", f"{_short(path)} cannot be read")


def _short(path: Traversable) -> str:
    stem, _, suffix = path.name.partition(".")
    return f"{stem[:12]}...{suffix}" if is_key(stem) else path.name


def write_manifest(
    folder: Path, artifacts: Iterable[Artifact], *, version: str, source_digest: str, toolchain: dict, profile: str
) -> None:
    """Write MANIFEST.json for `artifacts`, all of one target, whose files are in `folder` already."""
    entries, targets = {}, set()
    for artifact in artifacts:
        entries[artifact.spec_key] = manifest_entry(artifact)
        targets.add(artifact.meta["target"])
    if len(targets) != 1:
        raise ValueError(f"a folder holds kernels for one target, got {sorted(targets)}")
    manifest = {
        "schema": SCHEMA,
        "version": version,
        "source_digest": source_digest,
        "toolchain": toolchain,
        "target": targets.pop(),
        "profile": profile,
        "entries": entries,
    }
    (Path(folder) / MANIFEST).write_text(json.dumps(manifest, sort_keys=True, indent=1) + "\n")


def manifest_entry(artifact: Artifact) -> dict:
    """What a manifest says of one artifact."""
    return {
        "artifact_key": artifact.key,
        "code": f"{artifact.key}.{artifact.meta['kind']}",
        "code_sha256": artifact.meta["code_sha256"],
        "code_bytes": len(artifact.code),
        "meta_sha256": sha256(dump_meta(artifact.meta)),
        "label": artifact.label,
    }


def verify_folder(folder: Path) -> list[str]:
    """What is wrong with the folder of one target: a sentence for each problem, none if all is sound."""
    folder = Path(folder).absolute()
    manifest = _read_manifest(folder.parent, folder.name)
    if isinstance(manifest, Miss):
        return [f"{manifest.reason}: {manifest.text}"]
    problems, named = [], {MANIFEST}
    for spec_key, entry in manifest["entries"].items():
        named |= {str(entry.get("code")), f"{entry.get('artifact_key')}.json"}
        try:
            _check_entry(_read_entry(folder, entry), spec_key, folder.name, manifest["source_digest"])
        except ArtifactError as error:
            problems.append(f"{entry.get('label', spec_key[:12])}: {error.reason}: {error.text}")
    strays = sorted(path.name for path in folder.iterdir() if path.name not in named)
    return problems + [f"{MANIFEST} does not name the file {name}" for name in strays]
