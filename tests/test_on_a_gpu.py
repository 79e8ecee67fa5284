"""What only a GPU can show: the installed wheel, compiling on first call, streams, threads, and offsets beyond 2^31."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from test_attention import make
from test_installed_wheel import bare_environment, installed  # noqa: F401 - a fixture

import flashattn
from flashattn import launch, reference, settings

pytestmark = pytest.mark.gpu

WHEEL_CHILD = """
import sys
sys.path.insert(0, {site!r})
sys.modules["triton"] = None
import torch, flashattn
from flashattn import declared, launch, reference
dtypes = {{"bf16": torch.bfloat16, "fp16": torch.float16}}
torch.manual_seed(0)
for variant in declared.declared("core", launch.target_name(0)):
    if type(variant).__name__ != "FwdVariant":
        continue
    shape = (1, 130, 2, variant.head_dim)
    q, k, v = (torch.randn(shape, device="cuda").to(dtypes[variant.dtype]).requires_grad_() for _ in range(3))
    mask = {{"causal": variant.mask == "causal", "window_size": (70, 3) if variant.mask == "window" else (-1, -1)}}
    used = torch.tensor([130], device="cuda", dtype=torch.int32) if variant.has_tables else None
    out = flashattn.flash_attn_func(q, k, v, **mask, seqused_q=used)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = flashattn.flash_attn_func(*(x.cpu() for x in exact), **mask).cuda()
    right = torch.autograd.grad(want.square().sum(), exact)
    for a, b in zip((out, *grads), (want, *right)):
        assert (a.double() - b).norm() < 2e-2 * b.norm(), variant
counts = launch.resolver().counts
print(dict(counts), launch.resolver().compiles)
assert launch.resolver().compiles == 0 and sum(counts.values()) == len(launch.resolver().decisions()) == 120
"""


def test_the_installed_wheel_computes_attention_without_compiling(installed, tmp_path):  # noqa: F811
    if launch.target_name(0) != "sm_90":
        pytest.skip(f"the wheel under test is for sm_90, this GPU is {launch.target_name(0)}")
    child = WHEEL_CHILD.format(site=str(installed))
    environment = {**bare_environment(tmp_path), "CUDA_MODULE_LOADING": "LAZY"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    done = subprocess.run([sys.executable, "-c", child], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


UNDECLARED = """
import json, torch, flashattn
from flashattn import launch, reference
torch.manual_seed(0)
for _ in range(2):
    q, k, v = (torch.randn(1, 70, 2, 72, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    out = flashattn.flash_attn_func(q, k, v)
    want = reference.attention(q.double(), k.double(), v.double())[0]
    assert (out.double() - want).norm() < 1e-2 * want.norm()
    out.sum().backward()
print(json.dumps(launch.resolver().compiles))
"""


def run_undeclared(cache, **variables) -> tuple[int, str]:
    environment = {**os.environ, "FLASHATTN_CACHE_DIR": str(cache), **variables}
    done = subprocess.run([sys.executable, "-c", UNDECLARED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_an_undeclared_head_dim_is_compiled_once_and_kept(tmp_path):
    cache = tmp_path / "cache"
    compiles, said = run_undeclared(cache)
    assert compiles == 4
    assert said.count("compiling attn_fwd[") == 1
    assert run_undeclared(cache)[0] == 0
    assert run_undeclared(cache, FLASHATTN_FORCE_JIT="1")[0] == 4
    assert run_undeclared(cache, FLASHATTN_DISABLE_JIT="1")[0] == 0


def test_a_gpu_without_support_is_named(monkeypatch):
    class Old:
        major, minor, gcnArchName = 7, 0, "gfx700"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Old)
    monkeypatch.setattr(launch, "_targets", {})
    monkeypatch.setattr(launch, "_plans", {})
    q, k, v = make(torch.float16, 1, 1, 1, 8, 8, 16, device="cuda")
    with pytest.raises(ValueError, match=r"sm_70.*not supported.*sm_80"):
        flashattn.flash_attn_func(q, k, v)


def test_blocking_our_kernel_is_an_error_and_no_other_attention_runs(monkeypatch, tmp_path):
    from flashattn.jit.decision import KernelMissing

    monkeypatch.setenv("FLASHATTN_DISABLE_JIT", "1")
    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_AOT_DIR", str(tmp_path / "none"))
    settings.reset()
    launch.reset()
    try:
        q, k, v = make(torch.float16, 1, 1, 1, 8, 8, 16, device="cuda")
        with pytest.raises(KernelMissing, match="attn_fwd"):
            flashattn.flash_attn_func(q, k, v)
    finally:
        monkeypatch.undo()
        settings.reset()
        launch.reset()


def test_mixed_devices_are_refused():
    q, k, v = make(torch.float16, 1, 1, 1, 8, 8, 16, device="cuda")
    with pytest.raises(ValueError, match="k is on cpu but q is on cuda"):
        flashattn.flash_attn_func(q, k.cpu(), v)


def test_work_goes_to_the_current_stream():
    q, k, v = make(torch.float16, 2, 4, 4, 300, 300, 64, device="cuda", grad=False)
    want = flashattn.flash_attn_func(q * 2, k, v)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q.mul_(2)
        out = flashattn.flash_attn_func(q, k, v)
    stream.synchronize()
    assert torch.equal(out, want)


def test_fresh_threads_may_call():
    q, k, v = make(torch.bfloat16, 1, 2, 2, 100, 100, 64, device="cuda")
    want = flashattn.flash_attn_func(q, k, v)
    results = [None] * 8

    def work(i):
        out = flashattn.flash_attn_func(q, k, v)
        out.sum().backward()
        results[i] = torch.equal(out, want)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_compiled_by_inductor_with_dynamic_lengths_and_without_a_sync():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: flashattn.flash_attn_func(q * 1.5, k, v, causal=True) * 2, fullgraph=True, dynamic=True
    )
    for seqlen in (64, 96, 257):
        q, k, v = make(torch.bfloat16, 2, 4, 2, seqlen, seqlen, 64, device="cuda")
        q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
        want = flashattn.flash_attn_func(q * 1.5, k, v, causal=True) * 2
        right = torch.autograd.grad(want.sum(), (q, k, v))
        got = compiled(q, k, v)
        grads = torch.autograd.grad(got.sum(), (q, k, v))
        for a, b in zip((got, *grads), (want, *right), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        compiled(q, k, v).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients_are_the_same_bits_on_every_run():
    q, k, v = make(torch.bfloat16, 2, 8, 2, 517, 517, 128, device="cuda")
    dout = torch.randn_like(q)
    first = torch.autograd.grad(flashattn.flash_attn_func(q, k, v, causal=True), (q, k, v), dout)
    for _ in range(20):
        again = torch.autograd.grad(flashattn.flash_attn_func(q, k, v, causal=True), (q, k, v), dout)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_row_stride_of_a_million_elements():
    """Row times stride passes 2^31 in dout; the gradients are those of a contiguous copy."""
    q, k, v = make(torch.float16, 1, 2, 2, 2300, 2300, 64, device="cuda", grad=False)
    out, lse = torch.ops.flashattn.attn_fwd(q, k, v)
    storage = torch.empty(2300 * 2**20, dtype=torch.float16, device="cuda")
    dout = storage.as_strided((1, 2300, 2, 64), (0, 2**20, 64, 1))
    dout.copy_(torch.randn(1, 2300, 2, 64, device="cuda"))
    got = torch.ops.flashattn.attn_bwd(dout, q, k, v, out, lse)
    want = torch.ops.flashattn.attn_bwd(dout.contiguous(), q, k, v, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    wide = storage.as_strided((1, 2300, 2, 64), (0, 2**20, 64, 1))
    wide.copy_(q)
    assert torch.equal(flashattn.flash_attn_func(wide, wide, wide), flashattn.flash_attn_func(q, q, q))


def test_tensors_of_more_than_two_to_the_31_elements():
    shape = (5, 65536, 64, 128)
    q, k, v = (torch.empty(shape, device="cuda", dtype=torch.float16).normal_() for _ in range(3))
    out, lse = flashattn.flash_attn_func(q, k, v, return_lse=True)
    want, want_lse = reference.attention(q[-1:, -64:, -1:], k[-1:, :, -1:], v[-1:, :, -1:])
    assert (out[-1:, -64:, -1:] - want).abs().max() < 2e-3
    torch.testing.assert_close(lse[-1:, -1:, -64:], want_lse, rtol=1e-5, atol=1e-5)


def test_an_aligned_kernel_is_never_used_for_what_is_not_aligned():
    buffer = torch.randn(2 * 65 * 2 * 64 + 1, device="cuda").half()
    q = buffer[:-1].view(2, 65, 2, 64)
    shifted = buffer[1:].view(2, 65, 2, 64)
    first = flashattn.flash_attn_func(q, q, q)
    other = flashattn.flash_attn_func(shifted, shifted, shifted)
    clone = shifted.clone()
    # Not always the same kernel, so not always the same bits.
    torch.testing.assert_close(other, flashattn.flash_attn_func(clone, clone, clone), rtol=2e-3, atol=2e-3)
    assert torch.equal(other, flashattn.flash_attn_func(shifted, shifted, shifted))
    assert torch.equal(first, flashattn.flash_attn_func(q, q, q))
