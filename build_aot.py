"""Compile the declared kernels ahead of time into src/flashattn/_aot, which a wheel then packs.

    python build_aot.py --targets sm_80,sm_90 --profile core
    python build_aot.py --list
    python build_aot.py --check --out src/flashattn/_aot

Needs Triton and ninja; no GPU, no network and no torch. Names no kernel and no compiler option: it enumerates what
declared.py declares, turns it into specs as a call does, and gives each to the function a call compiles with.
Exit status: 0 fine, 1 a kernel failed or a check found a difference, 2 usage.

What is compiled is kept in the work folder under a key that follows from spec, sources and toolchain, so a build that
was stopped goes on where it was, and one after a change compiles only what changed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "flashattn"
KERNELS = PACKAGE / "kernels"
LOCK = ROOT / "aot.lock"
SHOWN = 20

# flashattn's __init__ imports torch, which no compile needs: its modules are imported below a package that is not run.
if "flashattn" not in sys.modules:
    _package = types.ModuleType("flashattn")
    _package.__path__ = [str(PACKAGE)]
    sys.modules["flashattn"] = _package

from flashattn import declared, specs  # noqa: E402
from flashattn._version import __version__  # noqa: E402
from flashattn.jit import lockfile  # noqa: E402
from flashattn.jit.artifact import Artifact, ArtifactError, artifact_key, dump_meta, parse  # noqa: E402
from flashattn.jit.batch import compile_all  # noqa: E402
from flashattn.jit.compile import toolchain  # noqa: E402
from flashattn.jit.spec import KernelSpec, source_digest  # noqa: E402
from flashattn.jit.targets import SUPPORTED, parse_targets  # noqa: E402
from flashattn.jit.wheel import verify_folder, write_manifest  # noqa: E402


class Usage(Exception):
    """Told to the user; exit status 2."""


# ---- What is declared


def matches(pattern: str, text: str) -> bool:
    """Whether each word of `pattern` (`*` and `?` are wild) is a word of `text`."""
    words = re.split(r"[\s\[\],()]+", text.lower())
    return all(fnmatch.filter(words, word) for word in pattern.lower().split())


def declared_specs(profile: str, target: str, only: str = "", limit: int | None = None) -> dict[str, KernelSpec]:
    """Spec key -> spec, in the order of declaration."""
    found = {}
    for variant in declared.declared(profile, target):
        for spec in specs.specs_of(variant, target):
            if matches(only, f"{variant} {spec.label()}"):
                found.setdefault(spec.key, spec)
    return dict(list(found.items())[:limit])


def print_list(profile: str, targets: tuple[str, ...]) -> None:
    print(f"profile {profile}\n{'target':10}{'variants':>10}{'kernels':>10}")
    for target in targets:
        variants = declared.declared(profile, target)
        print(f"{target:10}{len(variants):10}{len(declared_specs(profile, target)):10}")
    axes = declared.axes(profile)
    width = max(len(name) for name, _, _ in axes)
    print("\naxes")
    for name, values, reason in axes:
        print(f"  {name:{width}}  {', '.join(str(value) for value in values)}: {reason}")


# ---- The work folder


class Objects:
    """Artifacts by key, one file of machine code and one of JSON each; a JSON that is there is complete."""

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self, key: str) -> Artifact | None:
        """The artifact, or None where there is none. A damaged one is removed."""
        description = self.folder / f"{key}.json"
        try:
            meta = description.read_bytes()
            code = (self.folder / f"{key}.{json.loads(meta)['kind']}").read_bytes()
            artifact = parse(meta, code)
            if artifact.key == key:
                return artifact
        except FileNotFoundError:
            return None
        except (ArtifactError, ValueError, KeyError, TypeError):
            pass
        description.unlink()
        return None

    def publish(self, artifact: Artifact) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_artifact(self.folder, artifact)


def write_artifact(folder: Path, artifact: Artifact) -> None:
    """Both files, each by one rename, the JSON last."""
    for suffix, content in ((artifact.meta["kind"], artifact.code), ("json", dump_meta(artifact.meta))):
        path = folder / f"{artifact.key}.{suffix}"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(content)
        temporary.replace(path)


# ---- The build


def run_edge(path: Path, work: Path, timeout: float) -> int:
    """One edge of the ninja file: compile the specs listed in `path`, and write beside it how each went."""
    digest, *rows = json.loads(path.read_text())
    todo = [KernelSpec.from_json(row) for row in rows]
    outcomes = compile_all(todo, digest, Objects(work / "objects").publish, work / "logs", timeout)
    path.with_suffix(".outcome").write_text(json.dumps(outcomes))
    failed = [outcome for outcome in outcomes.values() if "error" in outcome]
    for outcome in failed:
        print(outcome["error"])
    if not failed:
        path.with_suffix(".done").touch()
    return int(bool(failed))


def ninja_command() -> list[str]:
    """ninja, and how it shows progress. From 1.12 on it knows how long the rest will take."""
    program = shutil.which("ninja")
    try:
        import ninja

        program = str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        if not program:
            raise Usage("ninja is needed for building: pip install ninja") from None
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    knows_eta = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= (1, 12)
    status = "[%f/%t, %w gone, about %W left] " if knows_eta else "[%f/%t, %e s gone] "
    return ["env", f"NINJA_STATUS={status}", program]


def write_ninja(run: Path, args, digest: str, pending: list[KernelSpec]) -> None:
    """build.ninja in `run`, and the list of specs of each edge."""
    size = max(1, min(8, len(pending) // (4 * args.jobs)))
    command = [sys.executable, str(Path(__file__).resolve()), "--work", str(args.work), "--timeout", str(args.timeout)]
    lines = [
        "rule compile",
        f"  command = {shlex.join(command).replace('$', '$$')} --edge $in",
        "  description = $what",
    ]
    for number, start in enumerate(range(0, len(pending), size)):
        chunk = pending[start : start + size]
        (run / f"{number}.specs").write_text(json.dumps([digest, *(spec.to_json() for spec in chunk)]))
        more = f" and {len(chunk) - 1} more" if len(chunk) > 1 else ""
        what = f"{chunk[0].label()}{more}".replace("$", "$$")
        lines += [f"build {number}.done: compile {number}.specs", f"  what = {what}"]
    (run / "build.ninja").write_text("\n".join(lines) + "\n")


def run_ninja(args, digest: str, pending: list[KernelSpec]) -> dict[str, dict]:
    """Compile `pending`. Returns spec key -> {"seconds"} or {"error", "log"} of those that were tried."""
    ninja = ninja_command()
    args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=args.work) as folder:
        run = Path(folder)
        write_ninja(run, args, digest, pending)
        subprocess.run([*ninja, "-k", "0", "-j", str(args.jobs)], cwd=run, check=False)
        outcomes = {}
        for path in run.glob("*.outcome"):
            outcomes.update(json.loads(path.read_text()))
        return outcomes


def build(args) -> int:
    """Compile what is missing, then write the folder of each target anew. Returns the exit status."""
    began = time.monotonic()
    digest, tools, objects = source_digest(KERNELS), toolchain(), Objects(args.work / "objects")
    if tools["env"]:
        raise Usage(f"{', '.join(tools['env'])} would change the machine code of the wheel: unset it")
    wanted = {target: declared_specs(args.profile, target, args.only, args.limit) for target in args.targets}
    empty = [target for target, found in wanted.items() if not found]
    if empty:
        raise Usage(f"nothing is declared for {', '.join(empty)} with --profile {args.profile} --only {args.only!r}")
    every = [spec for found in wanted.values() for spec in found.values()]
    name = {spec.key: artifact_key(spec.key, digest, tools) for spec in every}
    pending = [spec for spec in every if objects.load(name[spec.key]) is None]
    print(f"{len(every)} kernels for {', '.join(args.targets)}: {len(pending)} to compile", flush=True)
    outcomes = run_ninja(args, digest, pending) if pending else {}
    made = {spec.key: objects.load(name[spec.key]) for spec in every}
    failed = [spec for spec in every if made[spec.key] is None]
    if failed:
        for spec in failed:
            print(outcome_text(spec, outcomes.get(spec.key, {})), file=sys.stderr)
        print(f"{len(failed)} of {len(every)} kernels failed; {args.out} is as it was", file=sys.stderr)
        return 1
    print(f"\n{'target':10}{'kernels':>9}{'MB':>9}{'compiled':>10}{'seconds':>9}")
    for target, found in wanted.items():
        artifacts = [made[key] for key in found]
        write_target(args.out / target, artifacts, args.profile, digest, tools)
        size = sum(len(artifact.code) for artifact in artifacts) / 1e6
        taken = [outcomes[key]["seconds"] for key in found if key in outcomes]
        print(f"{target:10}{len(artifacts):9}{size:9.2f}{len(taken):10}{sum(taken):9.1f}")
    total = sum(len(artifact.code) for artifact in made.values()) / 1e6
    print(f"{'all':10}{len(every):9}{total:9.2f}{len(outcomes):10}{time.monotonic() - began:9.1f} in all\n{args.out}")
    if args.lock:
        lockfile.write(LOCK, args.profile, digest, tools["triton"], made.values())
        print(f"wrote {LOCK}")
    return 0


def outcome_text(spec: KernelSpec, outcome: dict) -> str:
    error = outcome.get("error", f"{spec.label()}: not reached, the build was stopped before; run it again to go on")
    return f"failed: {error}" + (f"\n        log: {outcome['log']}" if "log" in outcome else "")


def write_target(folder: Path, artifacts: list[Artifact], profile: str, digest: str, tools: dict) -> None:
    """The folder of one target holds exactly `artifacts` and their MANIFEST.json afterwards."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        fresh = Path(temporary) / "new"
        fresh.mkdir()
        for artifact in artifacts:
            write_artifact(fresh, artifact)
        write_manifest(fresh, artifacts, version=__version__, source_digest=digest, toolchain=tools, profile=profile)
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        fresh.rename(folder)


# ---- Checks


def check(args) -> int:
    """Compare what is declared with the lock file, and with the manifests in --out where it is given."""
    try:
        lock = lockfile.read(LOCK)
    except FileNotFoundError:
        print(f"{LOCK} is missing: write it with --lock", file=sys.stderr)
        return 1
    if lock.profile != args.profile:
        raise Usage(f"{LOCK.name} holds profile {lock.profile}, not {args.profile}")
    problems = []
    if lock.source_digest != source_digest(KERNELS):
        problems.append(f"{LOCK.name} was written from other sources of the kernels: write it with --lock")
    for target in args.targets:
        wanted = {key: spec.label() for key, spec in declared_specs(args.profile, target).items()}
        locked = {key: row.label for key, row in lock.rows.items() if row.target == target}
        problems += differences(wanted, locked, LOCK.name)
        if args.out_given:
            problems += check_folder(args.out / target, wanted, lock)
    for problem in problems[:SHOWN]:
        print(problem, file=sys.stderr)
    if len(problems) > SHOWN:
        print(f"... and {len(problems) - SHOWN} more", file=sys.stderr)
    places = f" and {args.out}" if args.out_given else ""
    print(f"{len(problems)} differences between what is declared, {LOCK.name}{places}")
    return int(bool(problems))


def differences(wanted: dict[str, str], found: dict[str, str], place: str) -> list[str]:
    """What only one of two {spec key: label} has."""
    return [
        *(f"declared, not in {place}: {label} {key[:12]}" for key, label in wanted.items() if key not in found),
        *(f"in {place}, not declared: {label} {key[:12]}" for key, label in found.items() if key not in wanted),
    ]


def check_folder(folder: Path, wanted: dict[str, str], lock: lockfile.Lock) -> list[str]:
    """What is wrong with one target's folder."""
    if not (folder / "MANIFEST.json").exists():
        return [f"{folder} has no MANIFEST.json: build it"]
    problems = [f"{folder}: {problem}" for problem in verify_folder(folder)]
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    if manifest["source_digest"] != source_digest(KERNELS):
        problems.append(f"{folder} was built from other sources of the kernels: build it again")
    entries = manifest["entries"]
    problems += differences(wanted, {key: entry["label"] for key, entry in entries.items()}, str(folder))
    problems += [
        f"{folder} has other machine code than {LOCK.name}: {entry['label']}"
        for key, entry in entries.items()
        if key in lock.rows and lock.rows[key].code_sha256 != entry["code_sha256"]
    ]
    return problems


# ---- The command


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--targets", default=",".join(SUPPORTED), help="comma-separated")
    add("--profile", choices=("core", "full"), default="core", help="which declared list")
    add("--out", type=Path, help=f"folder to write or check (default: {PACKAGE / '_aot'})", default=argparse.SUPPRESS)
    add("--work", type=Path, default=ROOT / ".aot", help="folder for what is compiled, and logs")
    add("--jobs", type=int, default=os.cpu_count(), help="processes")
    add("--only", default="", metavar="PATTERN", help="kernels with all these words in their label; * is wild")
    add("--limit", type=int, default=None, metavar="N", help="the first N kernels of each target")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="for one kernel; longer is a failure")
    add("--list", action="store_true", help="show what is declared and why, compile nothing")
    add("--check", action="store_true", help="compare what is declared with aot.lock (and --out), compile nothing")
    add("--lock", action="store_true", help="write aot.lock after the build; it needs all targets")
    add("--edge", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.out_given = hasattr(args, "out")
    args.out = (args.out if args.out_given else PACKAGE / "_aot").resolve()
    args.work = args.work.resolve()
    try:
        args.targets = parse_targets(args.targets)
    except ValueError as error:
        parser.error(str(error))
    if args.lock and (args.targets != SUPPORTED or args.only or args.limit is not None):
        parser.error("--lock needs a build of all targets, without --only and --limit")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.edge:
            return run_edge(args.edge, args.work, args.timeout)
        if args.list:
            print_list(args.profile, args.targets)
            return 0
        return check(args) if args.check else build(args)
    except Usage as error:
        print(f"build_aot.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was compiled is kept, the same command goes on from there", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
