"""Build steps beyond pyproject.toml: which compiled kernels are packed, and that two builds give equal bytes.

`src/flashattn/_aot` is packed if it is there and was made from these sources. With FLASHATTN_AOT_TARGETS=sm_90,...
set, the kernels of those targets are compiled first, and only they are packed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
AOT = ROOT / "src" / "flashattn" / "_aot"
TARGETS = os.environ.get("FLASHATTN_AOT_TARGETS", "").strip()
REBUILD = f"Run build_aot.py again, or remove {AOT.relative_to(ROOT)} for a wheel without compiled kernels"

# Times inside a wheel. 1980 is the earliest that a zip file can say.
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")


def build_aot():
    """The module build_aot, which knows how to read and check a folder of kernels."""
    sys.path.insert(0, str(ROOT))
    try:
        import build_aot
    finally:
        sys.path.remove(str(ROOT))
    return build_aot


def is_wanted(path: Path) -> bool:
    """Whether a path below _aot belongs to a target that is packed."""
    return not TARGETS or path.relative_to(AOT).parts[0] in build_aot().parse_targets(TARGETS)


def manifests() -> list[Path]:
    return [path for path in sorted(AOT.glob("*/MANIFEST.json")) if is_wanted(path)]


def compiled_files() -> list[Path]:
    """The manifests that are packed, and the files that they name."""
    found = manifests()
    for path in manifests():
        for entry in json.loads(path.read_text())["entries"].values():
            found += [path.with_name(entry["code"]), path.with_name(f"{entry['artifact_key']}.json")]
    return found


def check_compiled() -> None:
    """Raise SetupError if _aot holds anything that was not made from these sources or that no manifest names."""
    if not AOT.exists():
        return
    tools = build_aot()
    problems = []
    for path in manifests():
        problems += [f"{path.parent.name}: {problem}" for problem in tools.verify_folder(path.parent)]
        made = json.loads(path.read_text())
        if (made["source_digest"], made["version"]) != (tools.source_digest(tools.KERNELS), tools.__version__):
            problems.append(f"{path.parent.name} was compiled from other sources of the kernels or another version")
    checked = {path.parent for path in manifests()}
    strays = [path for path in sorted(AOT.rglob("*")) if path.is_file() and is_wanted(path)]
    problems += [f"no MANIFEST.json is beside {path.relative_to(AOT)}" for path in strays if path.parent not in checked]
    if problems:
        raise SetupError(f"{AOT.relative_to(ROOT)} cannot be packed: {'; '.join(problems[:10])}. {REBUILD}")


class BuildPy(build_py):
    """Starts from an empty build folder, and takes from _aot exactly what its manifests name."""

    def find_data_files(self, package, src_dir):
        found = super().find_data_files(package, src_dir)
        return found + [os.path.relpath(path) for path in compiled_files()] if package == "flashattn" else found

    def run(self):
        if not self.editable_mode:
            # What an earlier build left there would be packed too.
            shutil.rmtree(self.get_finalized_command("build").build_base, ignore_errors=True)
            if TARGETS:
                compile_targets()
                # egg_info may have listed the files already.
                self.__dict__.pop("data_files", None)
            check_compiled()
        super().run()


def compile_targets() -> None:
    if subprocess.run([sys.executable, str(ROOT / "build_aot.py"), "--targets", TARGETS], check=False).returncode:
        raise SetupError(f"build_aot.py failed for FLASHATTN_AOT_TARGETS={TARGETS}")


class Sdist(sdist):
    """Holds the compiled kernels too, so that a wheel made from it equals one made from the tree."""

    def run(self):
        check_compiled()
        super().run()


class BdistWheel(bdist_wheel):
    """A wheel whose bytes do not depend on the modes of the files in the tree, since those follow from a umask."""

    def write_wheelfile(self, *args, **kwargs):
        super().write_wheelfile(*args, **kwargs)
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)


setup(
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel, "sdist": Sdist},
    # Installed for a build only; pip asks for these through get_requires_for_build_wheel.
    setup_requires=["triton==3.6.0", "ninja>=1.12"] if TARGETS else [],
)
