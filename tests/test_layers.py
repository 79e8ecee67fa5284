"""The arrows between the parts of the package, and the rules of kernels, read off the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flashattn
from flashattn import specs
from flashattn.jit.targets import SUPPORTED
from flashattn.tiles import KERNELS
from flashattn.variants import FwdVariant

PACKAGE = Path(flashattn.__file__).parent
MAY_IMPORT = {
    "interface": {"checks", "ops"},
    "ops": {"checks", "launch", "reference"},
    "launch": {"checks", "hopper", "layout", "settings", "specs", "_version", "jit", "variants"},
    "specs": {"declared", "hopper_boxes", "settings", "jit", "tiles", "variants"},
    "checks": {"variants"},
    "declared": {"variants"},
    "tiles": {"variants"},
    "variants": set(),
    "layout": set(),
    "hopper": {"hopper_boxes", "jit"},
    "hopper_boxes": set(),
    "reference": set(),
    "settings": set(),
}


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, by the first name after the dot."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_arrows_point_one_way(module):
    assert imports(PACKAGE / f"{module}.py") <= MAY_IMPORT[module]


def test_jit_knows_nothing_of_attention():
    for path in (PACKAGE / "jit").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1 and (node.module or "").split(".")[0] not in ("flashattn", "torch"), path.name


def kernel_functions():
    for path in sorted((PACKAGE / "kernels").glob("[fh]*_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                yield pytest.param(node, id=f"{path.stem}.{node.name}")


@pytest.mark.parametrize("function", list(kernel_functions()))
def test_upper_case_is_constexpr_and_nothing_else(function):
    assert not function.name.startswith("_")
    for argument in function.args.args:
        kind = argument.annotation and ast.unparse(argument.annotation)
        constexpr = kind in ("tl.constexpr", "gl.constexpr")
        assert constexpr == argument.arg.isupper(), argument.arg
    for node in ast.walk(function):
        assert not (isinstance(node, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops))


def test_kernels_import_triton_and_themselves_alone():
    for path in (PACKAGE / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] == "triton" for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                own = node.level == 1 and (node.module or "").startswith(("flash_", "hopper_"))
                assert own or (node.level == 0 and node.module.split(".")[0] in ("triton", "typing"))


def test_every_declared_variant_has_specs_that_fit_the_kernels():
    import importlib

    for target in SUPPORTED:
        for spec in specs.declared_specs("core", target).values():
            kernel = getattr(importlib.import_module(spec.module), spec.kernel)
            assert [name for name, _ in spec.signature] == list(kernel.arg_names)
            assert spec.kernel in KERNELS


def test_shapes_are_not_in_a_variant():
    names = set(FwdVariant.__dataclass_fields__)
    assert names == {"dtype", "head_dim", "head_dim_v", "mask", "is_aligned", "allow_tf32", "has_tables"}
    with pytest.raises(TypeError, match="head_dim must be int"):
        FwdVariant(
            dtype="bf16",
            head_dim=64.0,
            head_dim_v=64,
            mask="causal",
            is_aligned=True,
            allow_tf32=False,
            has_tables=False,
        )


def test_import_starts_no_triton_and_no_gpu():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import flashattn; "
        "assert before or 'triton' not in sys.modules; assert not torch.cuda.is_initialized(); "
        "assert 'flashattn.jit.driver' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin"}
    )
