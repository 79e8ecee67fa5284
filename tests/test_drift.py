"""The build makes what a call would make: by the same function, to the same bytes. Every kernel: `make drift`."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_project import ROOT

from flashattn.declared import declared
from flashattn.jit import lockfile
from flashattn.specs import specs_of

PACKAGE = ROOT / "src" / "flashattn"
SAMPLE = 20

# ---- The same function

_FOREIGN = ("triton", "torch", "llvmlite", "cuda", "flashattn.kernels")
_CALLS = {"eval", "exec", "compile", "__import__", "import_module", "exec_module", "KernelSpec", "compile_spec"}
_COMPILERS = {"ptxas", "nvcc", "nvrtc", "clang", "gcc", "hipcc", "lld", "cuobjdump"}


def code_generation_in(source: str, kernel_words: set[str]) -> list[str]:
    """What of a compiler, or of a particular kernel, the syntax tree of a build script holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            modules = [f"{node.module}.{name}" for name in modules] if isinstance(node, ast.ImportFrom) else modules
            found += [name for name in modules if re.match(rf"({'|'.join(map(re.escape, _FOREIGN))})\b", name)]
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            # As a method, replace is that of a string or of a path.
            makes = name in _CALLS or ast.unparse(node.func) in ("replace", "dataclasses.replace")
            found += [name] if makes else []
        elif isinstance(node, ast.Attribute) and node.attr == "jit":
            found.append(ast.unparse(node))
        found += sorted(words_in(node) & kernel_words)
    return found


def words_in(node: ast.AST) -> set[str]:
    """Names in one node of a syntax tree, and the words of a text. A docstring's are the reader's."""
    if isinstance(node, ast.Constant):
        return (
            set(re.findall(r"\w+", node.value)) if isinstance(node.value, str) and "\n\n" not in node.value else set()
        )
    return {word for word in (getattr(node, name, None) for name in ("id", "attr", "arg")) if isinstance(word, str)}


def words_of_kernels() -> set[str]:
    """Names of compilers, and of kernels, parameters, constants and options in any spec of the core profile."""
    words = {"num_warps", "num_stages", "enable_fp_fusion", *_COMPILERS}
    for variant in declared("core", "sm_90"):
        for spec in specs_of(variant, "sm_90"):
            words |= {spec.module, spec.kernel, *dict(spec.signature), *dict(spec.constants), *dict(spec.options)}
    return words


def test_build_script_names_no_kernel_and_generates_no_code():
    assert code_generation_in((ROOT / "build_aot.py").read_text(), words_of_kernels()) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import triton",
        "import torch.utils.cpp_extension",
        "from triton.compiler import ASTSource",
        "from flashattn import kernels",
        "from flashattn.kernels.flash_fwd import attn_fwd as fast",
        "__import__('tri' + 'ton')",
        "importlib.import_module(name)",
        "exec(text)",
        "options = dict(num_warps=4)",
        "options = {'num_stages': 2}",
        "spec.constants['BLOCK_M'] = 64",
        "if spec.kernel == 'bwd_dkdv': pass",
        "text = f'attn_fwd on {target}'",
        "KernelSpec(target=target, **fields)",
        "replace(spec, options=())",
        "dataclasses.replace(spec, options=())",
        "compile_spec(spec, source_digest=digest)",
        "subprocess.run(['ptxas', path])",
        "subprocess.run('nvcc -cubin ' + path, shell=True)",
        "@compiler.jit\ndef f(): pass",
    ],
)
def test_code_generation_that_is_planted_in_the_build_script_is_told(planted):
    source, words = (ROOT / "build_aot.py").read_text(), words_of_kernels()
    assert len(code_generation_in(f"{source}\n{planted}\n", words)) > len(code_generation_in(source, words))


def compiles(source: str) -> bool:
    """Whether a module calls Triton's compiler."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(ast.unparse(node.func) == "triton.compile" for node in nodes if isinstance(node, ast.Call)) or any(
        node.module == "triton.compiler" or (node.module == "triton" and "compile" in [a.name for a in node.names])
        for node in imports
    )


def test_one_module_calls_the_compiler():
    found = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if compiles(path.read_text())]
    assert found == ["jit/compile.py"]
    assert compiles("def f(spec):\n    from triton import compile\n")
    assert compiles("made = triton.compile(source)\n")


# ---- The same bytes

_COMPILE = """
import json, sys
import build_aot
from flashattn.jit.compile import compile_spec
wanted = json.load(sys.stdin)
digest = build_aot.source_digest(build_aot.KERNELS)
made = {}
for target in sorted(set(wanted.values())):
    for key, spec in build_aot.declared_specs("core", target).items():
        if key in wanted:
            made[key] = compile_spec(spec, source_digest=digest).meta["code_sha256"]
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def lock() -> lockfile.Lock:
    lock = lockfile.read(ROOT / "aot.lock")
    triton = importlib.metadata.version("triton")
    if triton != lock.triton:
        pytest.skip(f"aot.lock was written with Triton {lock.triton}, here is {triton}")
    return lock


@pytest.fixture
def tree(tmp_path) -> Path:
    """The sources in another folder."""
    tree = tmp_path / "another folder"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "_aot"))
    shutil.copy(ROOT / "build_aot.py", tree)
    return tree


def with_other_bytes(lock: lockfile.Lock, keys: list[str], tree: Path) -> list[str]:
    """Labels of the kernels for which `tree`, in a process with another hash seed, does not make the locked bytes."""
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "1", "HOME": str(tree)},
        input=json.dumps({key: lock.rows[key].target for key in keys}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    return [lock.rows[key].label for key in keys if made.get(key) != lock.rows[key].code_sha256]


def test_a_sample_compiled_elsewhere_has_the_bytes_of_the_lock_file(lock, tree):
    # Another sample for other kernels, the same one for everybody who has these.
    sample = random.Random(lock.source_digest).sample(sorted(lock.rows), min(SAMPLE, len(lock.rows)))
    assert with_other_bytes(lock, sample, tree) == [], "`make lock` writes aot.lock anew"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernels/flash_common.py", "None], other=0.0)", "None], other=1.0)"),
        ("jit/compile.py", "disable_line_info = True", "disable_line_info = False"),
        ("declared.py", "_HEAD_DIMS = (64,", "_HEAD_DIMS = (48,"),
        ("tiles.py", "_PREPROCESS = Tile(32, 16, 4, 1)", "_PREPROCESS = Tile(64, 16, 4, 1)"),
    ],
    ids=["a helper of the kernel", "paths in the binary", "declared no more", "another tile"],
)
def test_other_bytes_are_told(lock, tree, file, old, new):
    quick = sorted(row.label for row in lock.rows.values() if row.label.startswith("bwd_preprocess[sm_80"))
    label = next(label for label in quick if " HEAD_DIM_V=64 " in label)
    (key,) = (key for key, row in lock.rows.items() if row.label == label)
    path = tree / "src" / "flashattn" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert with_other_bytes(lock, [key], tree) == [label]
