"""Public calls ask for exactly the kernels that are declared: seen with a recording resolver, for GPUs not here.

A call with small tensors of the CPU goes the way of a call on a GPU (checks, facts, plan, specs, resolve, arguments);
the test names the target. Of the driver there is only a record of what would have been launched.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import flashattn
from flashattn import declared, hopper, launch, specs
from flashattn.jit import driver, tensormap
from flashattn.jit.compile import parameters
from flashattn.jit.targets import SUPPORTED

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 96, 128, 192, 256)
FORMS = ("plain", "kvpacked", "qkvpacked", "heads before lengths", "padded", "varlen")
MASKS = {
    "full": {},
    "top left": {"causal_alignment": "top_left"},
    "causal": {"causal": True},
    "ahead": {"window_size": (-1, 2)},
    "window": {"window_size": (3, -1)},
    "causal window": {"window_size": (2, 1), "causal": True, "causal_alignment": "top_left"},
}
USES = ("inference", "with lse", "training", "training through lse", "gradient of one")


class Recorder:
    """Resolver and driver: spec key -> label of what was resolved, and of what was launched."""

    def __init__(self):
        self.resolved: dict[str, str] = {}
        self.launched: dict[str, str] = {}
        self.calls: list[tuple] = []

    def resolve_all(self, wanted):
        self.resolved |= {spec.key: spec.label() for spec in wanted}
        return list(wanted)

    def load(self, spec, index):
        return SimpleNamespace(launch=functools.partial(self._launch, spec))

    def _launch(self, spec, grid, stream, args):
        assert grid > 0
        # The two scratch pointers are the driver's.
        assert len(args) == len(list(parameters(spec))) - 2
        self.launched[spec.key] = spec.label()
        pointers, values = args[:5], args[5:]
        if spec.kernel == "hopper_attn_fwd":
            # The maps hold the addresses.
            pointers = (*(maps.address for maps in args if isinstance(maps, Encoded)), args[-11])
            values = tuple(
                bytes(value) if isinstance(value, Encoded) else value
                for i, value in enumerate(args)
                if i != len(args) - 11
            )
        self.calls.append((spec.key, grid, pointers, values))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """target -> a Recorder of all calls from now on, as if tensors of the CPU were on a GPU of that kind."""
    kernels = launch._kernels

    def pretend(target: str) -> Recorder:
        recorder = Recorder()
        launch.reset()
        monkeypatch.setattr(launch, "_resolver", recorder)
        monkeypatch.setattr(driver, "load", recorder.load)
        monkeypatch.setattr(launch, "target_name", lambda index: target)
        return recorder

    monkeypatch.setattr(launch, "interpreting", lambda: True)
    monkeypatch.setattr(launch, "_kernels", lambda facts, device: kernels(facts, torch.device("cuda", 0)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(hopper, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(hopper, "counter", lambda index: 16)
    monkeypatch.setattr(tensormap, "encode", lambda address, *about: encoded(address, about))
    yield pretend
    monkeypatch.undo()
    launch.reset()


class Encoded(bytes):
    """A tensor map that tells what it is of."""

    address = 0


def encoded(address: int, about: tuple) -> bytes:
    """In place of a tensor map, after the checks that a driver would make."""
    shape, strides, dtype, box, swizzle, _ = about
    tensormap._check(address, shape, strides, tensormap.DTYPES[dtype][1], box, swizzle)
    made = Encoded(tensormap.TENSOR_MAP_BYTES)
    made.address = address
    return made


def call(form: str, use: str, dtype, head_dim: int, mask: str) -> None:
    """One call of a public function, and of its backward where it is used so. Lengths are no multiples of a tile."""
    make = functools.partial(torch.zeros, dtype=dtype, requires_grad=use.startswith(("training", "gradient")))
    if form == "qkvpacked":
        inputs, function = [make(2, 5, 3, 2, head_dim)], flashattn.flash_attn_qkvpacked_func
    elif form == "kvpacked":
        inputs, function = [make(1, 3, 4, head_dim), make(1, 5, 2, 2, head_dim)], flashattn.flash_attn_kvpacked_func
    elif form == "plain":
        inputs, function = (
            [make(2, 3, 4, head_dim), *(make(2, 7, 1, head_dim) for _ in "kv")],
            flashattn.flash_attn_func,
        )
    elif form == "padded":
        inputs = [make(2, 3, 4, head_dim), *(make(2, 7, 1, head_dim) for _ in "kv")]
        function = functools.partial(flashattn.flash_attn_func, seqused_k=torch.tensor([7, 2]))
    elif form == "varlen":
        inputs = [make(9, 4, head_dim), *(make(6, 2, head_dim) for _ in "kv")]
        ends = torch.tensor([[0, 2, 9], [0, 6, 6]])
        function = functools.partial(flashattn.flash_attn_varlen_func, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
    else:
        inputs = [make(1, 2, 9, head_dim) for _ in "qkv"]

        def function(*tensors, **options):
            return flashattn.flash_attn_func(*(tensor.transpose(1, 2) for tensor in tensors), **options)

    if use == "gradient of one":
        for tensor in inputs[1:]:
            tensor.requires_grad_(False)
    result = function(*inputs, **MASKS[mask], return_lse=use.endswith("lse"))
    if use == "training through lse":
        result[1].sum().backward()
    elif inputs[0].requires_grad:
        result.sum().backward()


def call_everything() -> None:
    for scenario in itertools.product(FORMS, USES, DTYPES, HEAD_DIMS, MASKS):
        call(*scenario)


def labels_of_the_wheel(target: str) -> dict[str, str]:
    """What build_aot.py compiles for `target`."""
    variants = declared.declared("core", target)
    return {spec.key: spec.label() for variant in variants for spec in specs.specs_of(variant, target)}


def differences(recorder: Recorder, target: str) -> list[str]:
    """What calls ask for and no wheel has, and what wheels have and no call launches."""
    wheel = labels_of_the_wheel(target)
    asked = {**recorder.resolved, **recorder.launched}
    return [
        *(f"asked for, not declared: {label}" for key, label in asked.items() if key not in wheel),
        *(f"declared, never launched: {label}" for key, label in wheel.items() if key not in recorder.launched),
    ]


@pytest.mark.parametrize("target", SUPPORTED)
def test_calls_ask_for_all_that_is_declared_and_for_nothing_else(on_a_gpu, target):
    recorder = on_a_gpu(target)
    call_everything()
    assert differences(recorder, target) == []
    assert len(recorder.launched) == len(labels_of_the_wheel(target))


def _declare_more(monkeypatch):
    monkeypatch.setattr(declared, "_HEAD_DIMS", (32, *declared._HEAD_DIMS))
    return {"declared, never launched: attn_fwd[gfx942 bf16 aligned HEAD_DIM=32"}


def _declare_less(monkeypatch):
    monkeypatch.setattr(declared, "_HEAD_DIMS", declared._HEAD_DIMS[:-1])
    return {"asked for, not declared: bwd_dq[gfx942 fp16 aligned HEAD_DIM=256"}


def _misread_a_fact(monkeypatch):
    plan = launch.plan
    monkeypatch.setattr(launch, "plan", lambda facts, target: plan((*facts[:5], False, *facts[6:]), target))
    return {
        "asked for, not declared: attn_fwd[gfx942 bf16 generic HEAD_DIM=64",
        "declared, never launched: attn_fwd[gfx942 bf16 aligned HEAD_DIM=64",
    }


def _call_with_specs_of_its_own(monkeypatch):
    plan = launch.plan

    def altered(facts, target):
        variant, wanted = plan(facts, target)
        return variant, tuple(replace(spec, options=(*spec.options, ("maxnreg", 128))) for spec in wanted)

    monkeypatch.setattr(launch, "plan", altered)
    return {"asked for, not declared: bwd_dkdv[gfx942", "declared, never launched: bwd_dkdv[gfx942"}


def _never_launch(monkeypatch):
    backward = launch.backward

    def without_dkdv(dout, q, k, v, *rest):
        out, lse, dlse, want_dq, _, *call = rest
        backward(dout, q, k, v, out, lse, dlse, want_dq, False, *call)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    monkeypatch.setattr(launch, "backward", without_dkdv)
    return {"declared, never launched: bwd_dkdv[gfx942"}


@pytest.mark.parametrize(
    "plant", [_declare_more, _declare_less, _misread_a_fact, _call_with_specs_of_its_own, _never_launch]
)
def test_a_difference_between_calls_and_declaration_is_told(on_a_gpu, monkeypatch, plant):
    recorder = on_a_gpu("gfx942")
    expected = plant(monkeypatch)
    call_everything()
    found = differences(recorder, "gfx942")
    for start in expected:
        assert any(line.startswith(start) for line in found), found
    assert {line.split(":")[0] for line in found} == {line.split(":")[0] for line in expected}


def _odd_start(q, k, v):
    flat = q.new_zeros(q.numel() + 1)
    return flat[1:].view(q.shape), k, v


def _odd_stride(q, k, v):
    return q.new_zeros(*q.shape[:3], q.shape[3] + 1)[..., :-1], k, v


@pytest.mark.parametrize(
    "inputs",
    [
        lambda q, k, v: (q.float(), k.float(), v.float()),
        lambda q, k, v: (q[..., :40].contiguous(), k[..., :40].contiguous(), v[..., :40].contiguous()),
        lambda q, k, v: (q, k, v[..., :32].contiguous()),
        _odd_start,
        _odd_stride,
    ],
    ids=["float32", "another head_dim", "another head_dim of v", "odd start", "odd stride"],
)
def test_a_call_outside_the_declared_list_does_not_take_a_declared_kernel(on_a_gpu, inputs):
    recorder = on_a_gpu("sm_90")
    flashattn.flash_attn_func(*inputs(*(torch.zeros(1, 3, 2, 64, dtype=torch.bfloat16) for _ in "qkv")))
    assert len(recorder.launched) == 1
    assert not recorder.launched.keys() & labels_of_the_wheel("sm_90").keys()


def test_all_shapes_of_one_feature_set_ask_for_the_same_kernels(on_a_gpu):
    asked = []
    for seqlen, heads, batch in itertools.product((1, 100, 1025), (1, 7, 8), (1, 2)):
        recorder = on_a_gpu("sm_90")
        q = torch.zeros(batch, seqlen, heads, 64, dtype=torch.bfloat16, requires_grad=True)
        k = torch.zeros(batch, 2 * seqlen + 1, heads, 64, dtype=torch.bfloat16)
        flashattn.flash_attn_func(q, k, k, softmax_scale=1 / seqlen).sum().backward()
        asked.append(recorder.resolved)
    assert len(asked) == 18
    assert all(found == asked[0] for found in asked)
    assert [label.split("[")[0] for label in asked[0].values()] == [
        *("hopper_attn_fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq"),
    ]


def test_a_repeated_call_resolves_nothing(on_a_gpu):
    recorder = on_a_gpu("sm_90")
    call("plain", "training", torch.bfloat16, 64, "causal")
    recorder.resolved.clear()
    call("plain", "training", torch.bfloat16, 64, "causal")
    assert recorder.resolved == {}


def unlike_calls():
    """Dense forwards of which no two launch the same, by what is unlike the first."""
    q, k, v = (torch.zeros(2, length, 4, 64, dtype=torch.bfloat16) for length in (3, 7, 7))
    odd, wide = q.new_zeros(q.numel() + 1)[1:].view(q.shape), q.new_zeros(2, 3, 4, 72)[..., :64]
    return {
        "the first": (q, k, v),
        "lengths of keys": (q, k[:, :5], v[:, :5]),
        "heads of keys": (q, k[:, :, :2], v[:, :, :2]),
        "batch": (q[:1], k[:1], v[:1]),
        "head_dim of v": (q, k, v[..., :32]),
        "strides of q": (wide, k, v),
        "strides of k": (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
        "address of q": (odd, k, v),
        "dtype": (q.half(), k.half(), v.half()),
        "scale": (q, k, v, 0.5),
        "causal": (q, k, v, None, True),
        "window": (q, k, v, None, True, 2),
        "right of the window": (q, k, v, None, False, 2, 1),
        "corner": (q, k, v, None, True, -1, -1, True),
    }


def test_a_call_like_an_earlier_one_launches_what_that_did_and_no_other_call_does(on_a_gpu, monkeypatch):
    recorder, calls = on_a_gpu("sm_90"), unlike_calls()
    forward, slow = launch.forward, []
    monkeypatch.setattr(launch, "forward", lambda *call: slow.append(call) or forward(*call))
    for call in (*calls.values(), *calls.values()):
        torch.ops.flashattn.attn_fwd.inference(*call)
        torch.ops.flashattn.attn_fwd(*call)
    half = len(recorder.calls) // 2
    assert half == 2 * len(calls)
    assert [(key, grid, values) for key, grid, _, values in recorder.calls[:half]] == [
        (key, grid, values) for key, grid, _, values in recorder.calls[half:]
    ]
    assert len({(key, grid, values) for key, grid, _, values in recorder.calls}) == half
    for (_, _, first, _), (_, _, again, _) in zip(recorder.calls[:half], recorder.calls[half:], strict=True):
        assert first[:3] == again[:3]
        assert [pointer == 0 for pointer in first] == [pointer == 0 for pointer in again]
    # All but the call at an odd address, which has the strides of an aligned one, went the short way.
    assert len(slow) == half + 2


def test_a_repeated_call_with_other_addresses_is_looked_at_again(on_a_gpu):
    recorder, (q, k, v) = on_a_gpu("sm_90"), unlike_calls()["the first"]
    odd = unlike_calls()["address of q"][0]
    for first in (q, q, odd, q):
        flashattn.flash_attn_func(first, k, v)
    keys = [key for key, *_ in recorder.calls]
    assert keys[0] == keys[1] == keys[3] != keys[2]


def test_what_is_remembered_of_calls_does_not_grow_for_ever(on_a_gpu, monkeypatch):
    on_a_gpu("sm_90")
    monkeypatch.setattr(launch, "_MOST_CALLS", 8)
    for seqlen in range(1, 30):
        q = torch.zeros(1, seqlen, 1, 64, dtype=torch.bfloat16)
        flashattn.flash_attn_func(q, q, q)
    assert 1 <= len(launch._calls) <= 8
