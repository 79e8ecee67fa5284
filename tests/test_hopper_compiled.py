"""The Hopper forward as its assembler leaves it: nothing spilled, no product serialised, a hot loop as it should be."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import triton
from test_hopper_emulated import DIMS, spec_of

from flashattn.jit.compile import compile_spec

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(head_dim, head_dim_v, causal, dtype) -> (what ptxas says, the instructions of the machine code)."""
    made = {}

    def build(*which):
        if which not in made:
            folder = tmp_path_factory.mktemp("ir")
            code = compile_spec(spec_of(*which), source_digest="0" * 64, keep_ir=folder).code
            (ptx,) = folder.glob("*.ptx")
            assembler = [TOOLS / "ptxas", "-v", "--fmad=false", "--gpu-name=sm_90a", ptx, "-o", folder / "again"]
            said = subprocess.run(assembler, capture_output=True, text=True, check=True)
            (folder / "code").write_bytes(code)
            listing = subprocess.run([TOOLS / "nvdisasm", "-c", folder / "code"], capture_output=True, text=True)
            made[which] = said.stdout + said.stderr, listing.stdout
        return made[which]

    return build


def loops(listing: str) -> list[list[str]]:
    """The instructions of each innermost loop with matrix products: between a label and the jump back to it."""
    lines, labels, found = [], {}, []
    for line in listing.splitlines():
        label = re.match(r"(\.L_x_\d+):", line)
        instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([\w.]+)(.*)", line)
        if label:
            labels[label.group(1)] = len(lines)
        elif instruction:
            target = re.search(r"`\((\.L_x_\d+)\)", instruction.group(2))
            if instruction.group(1).startswith("BRA") and target and target.group(1) in labels:
                found.append((labels[target.group(1)], len(lines)))
            lines.append(instruction.group(1))
    inner = [(a, b) for a, b in found if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in found)]
    return [lines[a : b + 1] for a, b in inner if any(line.startswith("HGMMA") for line in lines[a : b + 1])]


def counts(loop: list[str]) -> Counter:
    return Counter(line.split(".")[0] for line in loop)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_nothing_is_spilled_and_no_product_is_serialised(built, dims, causal, dtype):
    said, _ = built(*dims, causal, dtype)
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said) == [("0", "0")]
    assert not re.search(r"C75\d\d|serializ", said), said


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_the_hot_loop_holds_products_and_exponentials_and_no_local_memory(built, dims, causal):
    constants = dict(spec_of(*dims, causal).constants)
    _, listing = built(*dims, causal, "bf16")
    hot = [counts(loop) for loop in loops(listing)]
    warpgroups = constants["BLOCK_M"] // 64
    assert len(hot) == warpgroups
    # A product takes 16 columns of K or 16 keys of V at a time; a thread has a quarter of the weights of two rows.
    products = dims[0] // 16 + constants["BLOCK_N"] // 16
    exponentials = 64 * constants["BLOCK_N"] // 128 + 2
    for each in hot:
        assert each["HGMMA"] == products
        assert each["MUFU"] == exponentials
        assert not each["LDL"] and not each["STL"]


def test_a_loop_is_found_in_a_listing():
    listing = "\n".join(
        f"        /*{i:04x}*/                   {text} ;"
        for i, text in enumerate(["HGMMA.64x64x16.F32.BF16 R24", "MUFU.EX2 R1, R2", "@P0 BRA `(.L_x_1)", "EXIT"])
    )
    assert loops(".L_x_1:\n" + listing) == [["HGMMA.64x64x16.F32.BF16", "MUFU.EX2", "BRA"]]
