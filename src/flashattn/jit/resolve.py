"""Resolver: from a spec to its artifact. Memory, wheel, user's cache, compile: the first that has it wins."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from . import log, record
from .artifact import Artifact, ArtifactError, artifact_key, dump_meta
from .decision import CACHE, COMPILED, MISSING, WHEEL, Decision, KernelMissing, Rejected, missing
from .log import logger
from .spec import KernelSpec, source_digest
from .store import UserStore, verified
from .wheel import Miss, Wheel

__all__ = ["Decision", "KernelMissing", "Rejected", "Resolver"]

# A manifest that is damaged may have listed any kernel, so it is warned of whatever is asked for.
_DAMAGE = ("corrupt", "schema", "unreadable", "arch")
_UNREAD = "unread"
_resolvers: weakref.WeakSet[Resolver] = weakref.WeakSet()


class Resolver:
    """Finds or makes the machine code of specs, and remembers how it did.

    settings: an object with force_jit, disable_jit, on_aot_miss ("warn" or "error"), cache_dir, aot_dir, record,
        keep_ir and log_level.
    kernels_dir: the kernels' sources. Where they cannot be read, a wheel of the same `version` is believed.
    aot_dir: the wheel's folder, unless settings.aot_dir names another.
    declared: target -> the spec keys that the wheel should hold; a miss of one of them is warned of.
    compile: compile_spec, or what stands in for it.

    A variable that changes machine code (TRITON_..., DISABLE_LLVM_OPT, ...) does not keep the wheel from being used,
    since its kernels were compiled without; it is part of the key in the user's cache, and of what is compiled.

    Threads may share a resolver: each spec is resolved once, different ones at the same time. No file is touched
    before the first call.
    """

    def __init__(
        self,
        *,
        settings,
        kernels_dir: Path,
        version: str,
        aot_dir: Path,
        declared: Callable[[str], Collection[str]] | None = None,
        compile: Callable[..., Artifact] | None = None,
    ):
        self._settings = settings
        self._kernels_dir = kernels_dir
        self._version = version
        self._aot_dir = settings.aot_dir or aot_dir
        self._declared = functools.cache(declared or (lambda target: frozenset()))
        self._compiler = compile
        self._frozen = False
        self._memory: dict[str, Artifact] = {}
        self._decisions: dict[str, Decision] = {}
        self._recorded: set[str] = set()
        self._wheels: dict[str, Wheel] = {}
        self._notices = log.Notices()
        self._store: UserStore | None = None
        self._digest: str | None = _UNREAD
        self.counts: Counter[str] = Counter()
        self._renew_locks()
        _resolvers.add(self)

    def resolve(self, spec: KernelSpec) -> Artifact:
        """The verified artifact of `spec`. KernelMissing if there is none and it may not be compiled."""
        artifact = self._memory.get(spec.key)
        return self._resolve_once(spec) if artifact is None else artifact

    def resolve_all(self, specs: Iterable[KernelSpec]) -> list[Artifact]:
        """The artifacts of specs that are needed together: what must be compiled is compiled at the same time."""
        first, *others = specs
        found, failed = {}, {}

        def resolve(spec: KernelSpec) -> None:
            try:
                found[spec.key] = self.resolve(spec)
            except BaseException as error:
                failed[spec.key] = error

        threads = [threading.Thread(target=resolve, args=(spec,)) for spec in others]
        for thread in threads:
            thread.start()
        resolve(first)
        for thread in threads:
            thread.join()
        for spec in (first, *others):
            if spec.key in failed:
                raise failed[spec.key]
        return [found[spec.key] for spec in (first, *others)]

    def decision(self, spec_key: str) -> Decision | None:
        """How a spec was resolved in this process; None if it was not asked for."""
        return self._decisions.get(spec_key)

    def decisions(self) -> tuple[Decision, ...]:
        """All of them, in the order of the first calls."""
        return tuple(self._decisions.values())

    def freeze(self) -> None:
        """From now on a spec that would have to be compiled raises KernelMissing."""
        self._frozen = True

    @property
    def compiles(self) -> int:
        """Kernels that this process compiled."""
        return self.counts[COMPILED]

    def wheel(self, target: str) -> Wheel:
        return self._wheels.setdefault(target, Wheel(self._aot_dir, target, self._version))

    @property
    def store(self) -> UserStore:
        """The user's cache, opened when it is first needed: a hit in the wheel needs no disk to write to."""
        with self._guard:
            if self._store is None:
                self._store = UserStore.open(self._settings.cache_dir)
            return self._store

    @property
    def digest(self) -> str | None:
        """That of the kernels' sources; None where they cannot be read."""
        with self._guard:
            if self._digest is _UNREAD:
                self._digest = source_digest(self._kernels_dir)
            return self._digest

    # ---- One spec

    def _resolve_once(self, spec: KernelSpec) -> Artifact:
        with self._lock_of(spec.key):
            artifact = self._memory.get(spec.key)
            if artifact is None:
                log.configure(getattr(self._settings, "log_level", None))
                self._record(spec)
                artifact = self._memory[spec.key] = _Search(self, spec).run()
        return artifact

    def _record(self, spec: KernelSpec) -> None:
        path = self._settings.record
        if path is None or spec.key in self._recorded:
            return
        self._recorded.add(spec.key)
        try:
            record.append(path, spec)
        except OSError as error:
            self._notices.warn("record", f"FLASHATTN_RECORD={path} cannot be written ({error.strerror})")

    def _lock_of(self, spec_key: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(spec_key, threading.Lock())

    def _renew_locks(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}


class _Search:
    """One spec on its way through the sources."""

    def __init__(self, resolver: Resolver, spec: KernelSpec):
        self.resolver = resolver
        self.settings = resolver._settings
        self.spec = spec
        self.label = spec.label()
        self.rejected: list[Rejected] = []
        self.note = ""
        self.environment: dict[str, str] = {}

    def run(self) -> Artifact:
        began = time.perf_counter()
        source, artifact = MISSING, None
        try:
            source, artifact = self._find()
            return artifact
        finally:
            key = artifact.key if artifact else ""
            seconds = time.perf_counter() - began
            decision = Decision(source, self.spec.key, key, tuple(self.rejected), seconds, self.label, self.note)
            with self.resolver._guard:
                self.resolver._decisions[self.spec.key] = decision
                self.resolver.counts[source] += 1

    def _find(self) -> tuple[str, Artifact]:
        if self.settings.force_jit:
            text = "FLASHATTN_FORCE_JIT is on"
            self.rejected += [Rejected(WHEEL, "forced", text), Rejected(CACHE, "forced", text)]
            return COMPILED, self._compile(self._digest())
        artifact = self._from_wheel()
        if artifact:
            return WHEEL, artifact
        digest = self._digest()
        key = self._cache_key(digest)
        artifact = key and self._from_cache(key)
        if artifact:
            return CACHE, artifact
        self._check_allowed()
        with self.resolver.store.lock(key) if key else contextlib.nullcontext(False) as locked:
            # Whoever held the lock before may have compiled this very kernel.
            artifact = self._load(key) if locked else None
            return (CACHE, artifact) if artifact else (COMPILED, self._compile(digest))

    # ---- The wheel

    def _from_wheel(self) -> Artifact | None:
        wheel = self.resolver.wheel(self.spec.target)
        found = wheel.find(self.spec.key, self.resolver.digest)
        if isinstance(found, Artifact):
            if self.resolver.digest is None:
                self.note = "the kernels' sources cannot be read; the wheel is believed, being of the same version"
            return found
        declared = found.listed or self.spec.key in self.resolver._declared(self.spec.target)
        reason, text = found.reason, found.text
        if reason == "not declared" and declared:
            reason, text = "not built", f"it is declared for {self.spec.target}, and this wheel was built without it"
        self.rejected.append(Rejected(WHEEL, reason, text))
        if declared or (found.of_folder and reason in _DAMAGE):
            self._warn_wheel(found, reason, text)
        return None

    def _warn_wheel(self, miss: Miss, reason: str, text: str) -> None:
        what, key = f"{self.label}: the wheel's kernel is", self.spec.key
        if miss.of_folder:
            what, key = f"the wheel's kernels for {self.spec.target} are", self.spec.target
        instead = "the user's cache is tried, then the compiler"
        if self._forbidden():
            instead = "the user's cache is tried; compiling is off"
        self.resolver._notices.warn((WHEEL, key, reason), f"{what} not used ({reason}: {text}); {instead}")

    # ---- The user's cache

    def _digest(self) -> str | None:
        """The digest of the sources, as far as it can be known."""
        if self.resolver.digest is not None:
            return self.resolver.digest
        found = self.resolver.wheel(self.spec.target).source_digest(None)
        return None if isinstance(found, Miss) else found

    def _cache_key(self, digest: str | None) -> str | None:
        if digest is None:
            text = "the kernels' sources cannot be read, so nothing tells which entries were compiled from them"
            self.rejected.append(Rejected(CACHE, "unreadable", text))
            return None
        # Imported here, since a kernel of the wheel does not need it.
        from .compile import toolchain

        tools = toolchain()
        self.environment = tools["env"]
        return artifact_key(self.spec.key, digest, tools)

    def _load(self, key: str) -> Artifact | None:
        with contextlib.suppress(ArtifactError):
            return self.resolver.store.load(key)

    def _from_cache(self, key: str) -> Artifact | None:
        store = self.resolver.store
        try:
            artifact = store.load(key)
        except ArtifactError as error:
            self.rejected.append(Rejected(CACHE, error.reason, error.text))
            text = f"{self.label}: the entry {key[:12]} in {store.root} is not used ({error.reason}: {error.text})"
            self.resolver._notices.warn((CACHE, key, error.reason), text)
            if error.reason != "unreadable":
                store.quarantine(key)
            return None
        if artifact is None:
            where = f"no entry {key[:12]} in {store.root}" if store.root else "there is no folder to keep kernels in"
            self.rejected.append(Rejected(CACHE, "absent", where))
            if self.environment:
                text = f"{', '.join(self.environment)} is set and changes machine code, so only kernels made so fit"
                self.rejected.append(Rejected(CACHE, "environment taint", text))
        return artifact

    # ---- Compiling

    def _forbidden(self) -> Rejected | None:
        if self.resolver._frozen:
            return Rejected("compile", "frozen", "freeze() was called")
        if self.settings.disable_jit:
            return Rejected("compile", "disabled", "FLASHATTN_DISABLE_JIT is on")
        if self.settings.on_aot_miss == "error" and not self.settings.force_jit:
            return Rejected("compile", "disabled", "FLASHATTN_ON_AOT_MISS is error")
        return None

    def _check_allowed(self) -> None:
        forbidden = self._forbidden()
        if forbidden:
            self.rejected.append(forbidden)
            raise missing(self.label, self.spec.key, tuple(self.rejected))

    def _compile(self, digest: str | None) -> Artifact:
        self._check_allowed()
        if digest is None:
            text = "the kernels' sources cannot be read"
            self.rejected.append(Rejected("compile", "unreadable", text))
            raise missing(self.label, self.spec.key, tuple(self.rejected))
        compiler = self.resolver._compiler
        if compiler is None:
            from .compile import compile_spec as compiler
        options = {"keep_ir": self.settings.keep_ir} if self.settings.keep_ir else {}
        logger.info("compiling %s ...", self.label)
        began = time.perf_counter()
        made = compiler(self.spec, source_digest=digest, **options)
        # As it will be read from a disk, so that a kernel is the same object whatever it came from.
        artifact = verified(dump_meta(made.meta), made.code)
        logger.info("compiled %s in %.1f s", self.label, time.perf_counter() - began)
        if self.resolver.digest not in (None, source_digest(self.resolver._kernels_dir)):
            # Python runs what it imported; under the old or the new key it might be wrong for the next process.
            text = "the kernels' sources changed while this process ran: what it compiles is not kept"
            self.resolver._notices.warn("changed", text)
        else:
            self.resolver.store.publish(artifact, replace=self.settings.force_jit)
        return artifact


def _after_fork_in_child() -> None:
    # A thread of the parent may have held a lock, and it does not exist in the child.
    for resolver in list(_resolvers):
        resolver._renew_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
