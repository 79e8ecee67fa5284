"""The benchmark harness: its order, its statistics, its refusals, and the words it uses. No GPU."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_backward  # noqa: E402
import bench_cold_start  # noqa: E402
import bench_forward  # noqa: E402
import bench_host  # noqa: E402
import bench_varlen  # noqa: E402
import bench_window  # noqa: E402
import harness  # noqa: E402
import peers  # noqa: E402
import plot  # noqa: E402
import problems  # noqa: E402
from harness import Burst, CloseTo, Plan, compare  # noqa: E402


class FakeTimer:
    """Times are looked up, a burst at a time; `log` is the order of bursts."""

    def __init__(self, bursts, host_bound=()):
        self._bursts = {name: [list(burst) for burst in given] for name, given in bursts.items()}
        self._host_bound, self.log = host_bound, []

    def estimate(self, call):
        call()
        return self._bursts[call.name][0][0]

    def burst(self, call, launches):
        self.log.append((call.name, launches))
        call()
        times = self._bursts[call.name]
        return Burst(times.pop(0) if len(times) > 1 else times[0], host_bound=call.name in self._host_bound)


class Contender:
    def __init__(self, name, result=None, fail_at=None):
        self.name, self._result, self._fail_at, self.calls = name, result, fail_at, 0

    def __call__(self):
        self.calls += 1
        if self.calls == self._fail_at:
            raise RuntimeError("out of\nmemory")
        return self._result


def measured(bursts, *, contenders=None, timer=None, rests=None, **options):
    contenders = contenders or {name: Contender(name) for name in bursts}
    timer = timer or FakeTimer(bursts)
    rows = compare(contenders, timer=timer, sleep=(rests if rests is not None else []).append, **options)
    return {row.name: row for row in rows}


def test_a_time_is_the_median_of_the_rounds_medians():
    row = measured({"a": [[1, 9, 2], [4, 4, 90], [6, 6, 6]]}, plan=Plan(rounds=3))["a"]
    assert row.ms == 4
    assert row.spread == pytest.approx((6 - 2) / 4)
    assert row.launches == 3 * 15


def test_contenders_alternate_in_a_new_order_each_round_and_rest_before_each_burst():
    names, rests = ["a", "b", "c", "d"], []
    timer = FakeTimer({name: [[1.0]] for name in names})
    measured(dict.fromkeys(names), timer=timer, plan=Plan(rounds=6, rest_s=0.25), rests=rests)
    rounds = [tuple(name for name, _ in timer.log[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(order) == names for order in rounds)
    assert len(set(rounds)) > 2
    assert rests == [0.25] * 24


def test_a_burst_lasts_about_as_long_as_planned():
    plan = Plan(burst_ms=15, min_launches=3, max_launches=100)
    assert [plan.launches(ms) for ms in (0.0, 0.01, 1.0, 5.0, 100.0)] == [100, 100, 15, 3, 3]


def test_rates_count_operations_and_bytes_per_second():
    row = measured({"a": [[2.0]]}, flops=4e12, bytes=6e9)["a"]
    assert row.tflops == pytest.approx(2000)
    assert row.gbps == pytest.approx(3000)


def test_ratios_are_to_the_baseline_and_to_the_fastest_peer_but_not_to_ours():
    rows = measured({"ours": [[1.0]], "fa2": [[3.0]], "cudnn": [[2.0]]}, baseline="fa2")
    assert rows["ours"].vs_baseline == pytest.approx(3)
    assert rows["ours"].vs_best_peer == pytest.approx(2)
    assert rows["fa2"].vs_best_peer == pytest.approx(2 / 3)


def test_contenders_may_have_their_own_checks_and_operations_and_ours_in_another_form_is_no_peer():
    contenders = {"ours": Contender("ours", torch.ones(1)), "ours whole": Contender("ours whole", torch.zeros(2))}
    checks = {"ours": CloseTo(torch.ones(1), 0.1), "ours whole": CloseTo(torch.ones(2), 0.1)}
    timer = FakeTimer({"ours": [[1.0]], "ours whole": [[0.5]], "fa2": [[2.0]]})
    contenders["fa2"] = Contender("fa2", torch.zeros(1))
    rows = measured(None, contenders=contenders, timer=timer, check=checks, flops={"ours": 1e12, "ours whole": 2e12})
    assert [rows[name].status for name in contenders] == ["ok", "wrong", "ok"], "fa2 has no check"
    assert (rows["ours"].tflops, rows["fa2"].tflops) == (pytest.approx(1000), None)
    assert rows["ours"].vs_best_peer == pytest.approx(2)
    rows = measured({"ours": [[1.0]], "ours whole": [[0.5]]})
    assert rows["ours"].vs_best_peer is None


def test_a_wrong_result_is_an_error_row_and_is_never_timed():
    right = torch.ones(4)
    contenders = {"good": Contender("good", right.clone()), "bad": Contender("bad", right * 1.1)}
    timer = FakeTimer({"good": [[1.0]], "bad": [[0.1]]})
    rows = measured(None, contenders=contenders, timer=timer, check=CloseTo(right, 1e-2))
    assert rows["bad"].status == "wrong"
    assert "relative error 1.00e-01 is above 1e-02" in rows["bad"].note
    assert rows["bad"].ms is None
    assert {name for name, _ in timer.log} == {"good"}
    assert rows["good"].vs_best_peer == pytest.approx(1), "a wrong contender must not become the best peer"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.tensor([1.0, float("nan")]), "relative error nan"),
        (torch.ones(3), "shape (3,), expected (2,)"),
        ((torch.ones(2), torch.ones(2)), "returned 2 tensors, expected 1"),
    ],
)
def test_nan_and_other_shapes_never_pass_the_check(result, words):
    assert words in (CloseTo(torch.ones(2), 1e-2).fault(result) or "")


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_contender_that_raises_is_a_row_and_the_others_are_measured(fail_at):
    contenders = {
        "broken": Contender("broken", torch.ones(1), fail_at=fail_at),
        "sound": Contender("sound", torch.ones(1)),
    }
    timer = FakeTimer({"broken": [[1.0]], "sound": [[1.0]]})
    rows = measured(None, contenders=contenders, timer=timer, check=CloseTo(torch.ones(1), 0.1))
    assert (rows["broken"].status, rows["broken"].note) == ("failed", "RuntimeError: out of memory")
    assert rows["sound"].status == "ok"


def test_a_setup_that_raises_is_a_row():
    def setup():
        raise ValueError("no backward")

    rows = measured(
        None, contenders={"a": harness.Deferred(setup)}, timer=FakeTimer({}), check=CloseTo(torch.ones(1), 1)
    )
    assert (rows["a"].status, rows["a"].note) == ("failed", "ValueError: no backward")


def test_a_contender_whose_launches_starve_the_gpu_says_so():
    timer = FakeTimer({"slow": [[1.0]], "quick": [[1.0]]}, host_bound=("slow",))
    rows = measured({"slow": None, "quick": None}, timer=timer)
    assert rows["slow"].note.startswith("host-bound")
    assert rows["quick"].note == ""


def test_a_peer_that_is_not_installed_is_named_with_the_reason():
    def absent():
        raise ModuleNotFoundError("No module named 'fa9'")

    def broken():
        raise OSError("libcudart.so.12: cannot open shared object file")

    listed = {
        "here": peers.Peer(lambda: len, "torch"),
        "fa9": peers.Peer(absent, "FlashAttention-9: pip install fa9"),
        "broken": peers.Peer(broken, "x"),
        "half": peers.Peer(lambda: len, "y", has_backward=False),
    }
    found, missing = peers.load(listed, peers=listed, backward=True)
    assert list(found) == ["here"]
    assert (
        missing["fa9"]
        == "not installed (FlashAttention-9: pip install fa9): ModuleNotFoundError: No module named 'fa9'"
    )
    assert "libcudart" in missing["broken"]
    assert missing["half"] == "has no backward (y)"
    rows = measured({"here": [[1.0]]}, missing=missing)
    assert "missing: not installed (FlashAttention-9" in harness.rows_text(list(rows.values()))


@pytest.mark.parametrize(
    ("kind", "reason"), [("window", "has no sliding window"), ("packed", "takes no packed sequences")]
)
def test_a_peer_that_cannot_do_a_kind_of_problem_is_missing_with_the_reason(kind, reason):
    listed = {
        "all": peers.Peer(lambda: len, "x", kinds=("dense", "window", "packed")),
        "dense": peers.Peer(lambda: pytest.fail("loaded for nothing"), "torch"),
    }
    found, missing = peers.load(listed, peers=listed, kind=kind)
    assert (list(found), missing) == (["all"], {"dense": f"{reason} (torch)"})
    assert set(peers.MASKED) == {name for name, peer in peers.PEERS.items() if kind in peer.kinds}


def test_an_unknown_contender_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"fa7.*ours, sdpa, fa2, cudnn"):
        peers.load(["fa7"])


class FakeGpu:
    def describe(self):
        return {"gpu": "fake"}

    def state(self):
        return {"matmul_tflops": 700.0}


def test_a_run_writes_its_rows_machine_and_states_as_json(tmp_path, capsys):
    path = tmp_path / "new" / "out.json"
    timer = FakeTimer({"ours": [[1.0]], "fa2": [[2.0]]})
    with harness.Run("title", json_path=path, plan=Plan(rounds=2, rest_s=0), timer=timer, gpu=FakeGpu()) as run:
        calls = {name: Contender(name) for name in ("ours", "fa2")}
        run.compare("small", calls, case={"seqlen": 4}, baseline="fa2", flops=1e9)
    report = json.loads(path.read_text())
    assert (report["machine"], report["before"], report["after"]) == ({"gpu": "fake"}, *[{"matmul_tflops": 700.0}] * 2)
    assert report["plan"]["rounds"] == 2
    assert report["cases"][0]["seqlen"] == 4
    assert report["cases"][0]["rows"][0]["vs_baseline"] == 2
    shown = capsys.readouterr().out
    assert "matmul_tflops 700.0" in shown
    assert "small (baseline fa2)" in shown


def test_a_table_aligns_its_columns():
    rows = [{"name": "a", "ms": "1.5", "note": None}, {"name": "longer", "ms": "10.25", "note": "x y"}]
    assert harness.table(rows).splitlines() == ["name       ms  note", "a         1.5  -", "longer  10.25  x y"]


class AnyTimer:
    """Runs what it is given and says that it took a millisecond."""

    def estimate(self, call):
        call()
        return 1.0

    def burst(self, call, launches):
        call()
        return Burst([1.0] * launches)


@pytest.fixture
def small(monkeypatch):
    """Problems are small and on the CPU, and a GPU is neither asked for nor timed."""
    monkeypatch.setattr(problems, "DEVICE", "cpu")
    monkeypatch.setattr(problems, "TOKENS", 64)
    monkeypatch.setattr(problems, "HIDDEN", 32)
    monkeypatch.setattr(bench_forward, "Run", functools.partial(harness.Run, timer=AnyTimer(), gpu=FakeGpu()))
    for module in (bench_forward, bench_backward, bench_varlen, bench_window):
        monkeypatch.setattr(module, "require_gpu", lambda program: None)


def use_peers(monkeypatch, **loaders):
    listed = {name: peers.Peer(load, "", kinds=peers._ALL) for name, load in loaders.items()}
    monkeypatch.setattr(peers, "PEERS", listed)
    monkeypatch.setitem(peers.load.__kwdefaults__, "peers", listed)


@pytest.mark.parametrize("module", [bench_forward, bench_backward])
def test_a_benchmark_checks_contenders_and_fails_for_a_wrong_one(module, small, monkeypatch, tmp_path, capsys):
    def wrong(problem):
        return lambda q, k, v: peers.sdpa(q, k, v, not problem.causal)

    use_peers(monkeypatch, ours=peers._load_sdpa, fa2=lambda: wrong)
    path = tmp_path / "out.json"
    options = ["--head-dims", "16", "--seqlens", "32", "--rounds", "1", "--json", str(path), "--contenders"]
    assert module.main([*options, "ours"]) == 0
    assert module.main([*options, "ours", "fa2"]) == 1
    full, causal = json.loads(path.read_text())["cases"]
    assert (full["causal"], causal["causal"], full["batch"], full["heads"]) == (False, True, 2, 2)
    assert [row["status"] for row in full["rows"]] == [row["status"] for row in causal["rows"]] == ["ok", "wrong"]
    assert "is above" in capsys.readouterr().out


def run_on_the_cpu(module, arguments, path):
    assert module.main([*arguments, "--head-dims", "16", "--rounds", "1", "--json", str(path)]) == 0
    return json.loads(path.read_text())["cases"]


def test_packed_sequences_are_measured_in_both_directions_and_beside_a_dense_batch(small, tmp_path):
    arguments = ["--contenders", "ours", "fa3", "cudnn", "--tokens", "96", "--seqlen", "32", "--masks", "causal"]
    cases = run_on_the_cpu(bench_varlen, [*arguments, "--patterns", "constant", "longtail"], tmp_path / "out.json")
    assert [(case["pattern"], case["direction"]) for case in cases] == [
        (pattern, direction) for pattern in ("constant", "longtail") for direction in ("forward", "backward")
    ]
    for case in cases:
        rows = {row["name"]: row for row in case["rows"]}
        even = case["pattern"] == "constant"
        assert {name for name, row in rows.items() if row["status"] == "ok"} == {"ours", *["ours dense"] * even}
        assert case.get("time over dense time") == (1.0 if even else None)
        assert rows["ours"]["vs_best_peer"] is None, "ours in another form is no peer"
        assert "takes no packed sequences" in rows["cudnn"]["note"]
        assert "lengths" not in case and case["tokens"] == 96


def test_a_window_is_measured_beside_the_whole_and_its_cost_is_over_its_share(small, tmp_path):
    arguments = ["--contenders", "ours", "sdpa", "--seqlen", "300", "--windows", "100,0", "10,20"]
    cases = run_on_the_cpu(bench_window, arguments, tmp_path / "out.json")
    assert [(case["window"], case["causal"], case["direction"]) for case in cases] == [
        ([left, right], right == 0, direction)
        for left, right in ((100, 0), (10, 20))
        for direction in ("forward", "backward")
    ]
    for case in cases:
        rows = {row["name"]: row for row in case["rows"]}
        assert [name for name, row in rows.items() if row["status"] == "ok"] == ["ours", "ours whole"]
        assert "has no sliding window" in rows["sdpa"]["note"]
        # Both took a millisecond: what is left is the ratio of what they count.
        rate = rows["ours whole"]["tflops"] / rows["ours"]["tflops"]
        assert case["time over the pairs' share"] == pytest.approx(rate)
    # Blocks of 128 of the whole: 1 + 2 + 3; those of a window of 100: 1 + 2 + 2.
    assert cases[0]["time over the blocks' share"] == pytest.approx(6 / 5)


@pytest.mark.parametrize("module", [bench_varlen, bench_window])
def test_one_direction_alone_can_be_asked_for(module, small, monkeypatch, tmp_path):
    use_peers(monkeypatch, ours=functools.partial(peers._load_flash, "flashattn"), fa2=peers._load_sdpa)
    own = ["--patterns", "constant", "--tokens", "32"] if module is bench_varlen else ["--windows", "5,0"]
    cases = run_on_the_cpu(
        module, [*own, "--seqlen", "32", "--contenders", "ours", "--backward"], tmp_path / "out.json"
    )
    assert {case["direction"] for case in cases} == {"backward"}


@pytest.mark.parametrize("text", ["1024", "-1,0", "a,b", "1,2,3"])
def test_a_window_that_is_none_is_refused(text):
    with pytest.raises(bench_window.argparse.ArgumentTypeError, match=r"is not like 1024,0"):
        bench_window.window_argument(text)
    assert bench_window.window_argument("128,0") == (128, 0)


def brute_force(problem):
    """[rows, columns] whether a query sees a key, of one head of the whole batch."""
    lengths = problem.lengths if problem.kind == "packed" else [problem.seqlen] * problem.batch
    parts = []
    for length in lengths:
        rows, columns = torch.arange(length)[:, None], torch.arange(length)
        left, right = (problem.kind == "window" and problem.window) or (length, 0 if problem.causal else length)
        parts.append((columns >= rows - left) & (columns <= rows + right))
    return torch.block_diag(*parts).bool()


SIZES = {"heads": 2, "head_dim": 8, "dtype": "float32"}
MASKED = [
    problems.Problem(batch=1, seqlen=77, causal=True, **SIZES),
    problems.Problem(batch=1, seqlen=77, causal=True, window=(20, 0), **SIZES),
    problems.Problem(batch=1, seqlen=77, causal=False, window=(0, 5), **SIZES),
    problems.Problem(batch=1, seqlen=77, causal=False, window=(100, 9), **SIZES),
    problems.Packed(pattern="own", lengths=(5, 1, 1, 30, 30, 7), causal=False, **SIZES),
    problems.Packed(pattern="own", lengths=(5, 1, 1, 30, 30, 7), causal=True, **SIZES),
]
masked = pytest.mark.parametrize("problem", MASKED, ids=lambda problem: problem.label)


@masked
def test_flops_count_the_pairs_that_are_seen(problem):
    pairs = brute_force(problem).sum().item()
    if problem.causal and problem.kind != "window":
        # Half of all: without half of the diagonal.
        pairs -= problem.shape[-3] / 2
    assert problem.forward_flops == 4 * 2 * 8 * pairs
    assert problem.backward_flops == 2.5 * problem.forward_flops


@masked
def test_flex_attention_gets_the_mask_of_the_problem(problem, monkeypatch):
    monkeypatch.setattr(problems, "DEVICE", "cpu")
    expected = brute_force(problem)
    rows, columns = torch.arange(len(expected))[:, None], torch.arange(len(expected))
    assert torch.equal(peers.visible(problem)(0, 0, rows, columns), expected)


@masked
def test_ours_and_the_reference_agree_with_masked_attention(problem, monkeypatch):
    monkeypatch.setattr(problems, "DEVICE", "cpu")
    q, k, v = problem.tensors(3, requires_grad=True)
    (grad,) = problem.tensors(1, seed=1)
    whole = [tensor if tensor.dim() == 4 else tensor[None] for tensor in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(*(tensor.transpose(1, 2) for tensor in whole), attn_mask=brute_force(problem)).transpose(1, 2)
    expected = expected.view(problem.shape)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    assert CloseTo(expected, 1e-5).fault(problem.reference_forward(q, k, v)) is None
    assert CloseTo(gradients, 1e-5).fault(problem.reference_backward(q, k, v, grad)) is None
    ours = peers._load_flash("flashattn")(problem)(q, k, v)
    assert CloseTo(expected, 1e-5).fault(ours) is None
    assert CloseTo(gradients, 1e-5).fault(torch.autograd.grad(ours, (q, k, v), grad)) is None


@pytest.mark.parametrize("block", [1, 16, 50, 128])
@pytest.mark.parametrize("problem", MASKED[:4], ids=lambda problem: problem.label)
def test_visible_blocks_are_those_with_a_pair_in_them(problem, block):
    keep = brute_force(problem).float()
    blocks = torch.nn.functional.max_pool2d(keep[None], block, ceil_mode=True)
    assert problem.visible_blocks(block) == blocks.sum().item()


@pytest.mark.parametrize("pattern", problems.PATTERNS)
def test_lengths_come_to_the_tokens_and_are_the_same_every_time(pattern):
    found = problems.lengths_of(pattern, 32768, 2048)
    assert found == problems.lengths_of(pattern, 32768, 2048)
    assert sum(found) == (65536 if pattern == "tiny" else 32768)
    assert min(found) >= 1 and max(found) <= 2048


def test_patterns_are_what_their_names_say():
    lengths = {pattern: problems.lengths_of(pattern, 1 << 20, 2048) for pattern in problems.PATTERNS}
    assert set(lengths["constant"]) == {2048}
    assert lengths["tiny"] == (16,) * 4096
    assert min(lengths["uniform"][:-1]) >= 1024
    assert set(lengths["bimodal"][:-1]) == {2048, 256}
    long = [length for length in lengths["longtail"] if length == 2048]
    assert len(long) / len(lengths["longtail"]) == pytest.approx(1 / 8, rel=0.2)
    assert {length > 256 or length < 128 for length in lengths["longtail"][:-1] if length != 2048} == {False}


def test_a_packed_problem_says_where_its_sequences_are(monkeypatch):
    monkeypatch.setattr(problems, "DEVICE", "cpu")
    problem = problems.Packed(pattern="own", lengths=(2, 1, 3), causal=True, **SIZES)
    assert problem.cu_seqlens().tolist() == [0, 2, 3, 6]
    assert problem.document().tolist() == [0, 0, 1, 2, 2, 2]
    assert problem.shape == (6, 2, 8)
    assert problem.dense() is None
    assert problems.Packed(pattern="own", lengths=(4, 4), causal=True, **SIZES).dense() == problems.Problem(
        batch=2, seqlen=4, causal=True, **SIZES
    )


def test_a_causal_mask_counts_half_and_a_backward_two_and_a_half_forwards():
    full, causal = problems.problems([128], [4096])
    assert (full.batch, full.heads) == (4, 16)
    assert full.forward_flops == 4 * 4 * 16 * 4096**2 * 128 == 2 * causal.forward_flops
    assert full.backward_flops == 2.5 * full.forward_flops


def test_host_times_are_the_best_of_the_repeats_over_sdpas_best():
    rows = bench_host.rows_of("no grad", {"ours": [30.0, 10.0], "sdpa": [20.0, 25.0]}, {"sdpa fa2": "needs a GPU"})
    assert [(row["best_us"], row["vs_sdpa"]) for row in rows[:2]] == [(10.0, 0.5), (20.0, 1.0)]
    assert rows[2]["note"] == "missing: needs a GPU"


def test_a_cold_start_counts_the_kernels_that_were_compiled_and_reports_medians():
    said = "attn_fwd[...]: compiled here, 1.2 s\n  user cache: absent\nbwd_dq[...]: from the wheel, 0.0 s"
    kernels = bench_cold_start._kernels(lambda q, k, v, causal: said, None, None, None)
    assert kernels == {"wheel": 1, "cache": 0, "compiles": 1}
    reports = [{"import_s": 0.1, "first_call_s": first, "second_call_s": 0.01, **kernels} for first in (3.0, 1.0, 2.0)]
    row = bench_cold_start.row_of("empty cache", reports)
    assert (row["first_call_s"], row["compiles"], row["note"]) == (2.0, 1, None)
    row = bench_cold_start.row_of("empty cache", [*reports, {"note": "failed: no"}])
    assert (row["first_call_s"], row["note"]) == (None, "failed: no")


def test_a_cold_start_without_fa4_says_so_and_is_no_failure(monkeypatch, capsys):
    report = {"note": "missing: No module named 'flash_attn'"}
    assert bench_cold_start.row_of("fa4", [report])["note"] == report["note"]
    monkeypatch.setattr(bench_cold_start, "run_child", lambda name, environment: report)
    assert bench_cold_start.main(["--scenarios", "fa4", "--repeats", "1", "--imports", "0"]) == 0
    assert "No module named 'flash_attn'" in capsys.readouterr().out


def test_a_cold_start_of_both_directions_has_a_cache_of_its_own(tmp_path):
    found = bench_cold_start.scenarios(str(tmp_path))
    folders = [found[name]["FLASHATTN_CACHE_DIR"] for name in ("empty cache", "empty cache, both directions")]
    assert folders[0] != folders[1]
    assert {"fa4", "fa4, both directions"} <= set(found)


def test_imports_take_turns_and_the_difference_is_of_medians():
    times, said = {"import torch": [1.0, 3.0, 2.0], "import torch, flashattn": [2.5, 9.0, 2.25]}, []

    def run(command, **options):
        statement = command[-1].split("; ")[2]
        said.append(statement)
        return subprocess.CompletedProcess(command, 0, f"{times[statement].pop(0)}\n")

    base, ours = bench_cold_start.import_times(3, run=run)
    assert said == ["import torch", "import torch, flashattn"] * 3
    assert (base["median_s"], base["more_s"]) == (2.0, 0.0)
    assert (ours["median_s"], ours["best_s"], ours["more_s"]) == (2.5, 2.25, 0.5)


def test_a_plot_has_a_panel_for_each_head_dim_and_mask():
    rows = [{"name": "ours", "tflops": 400.0}, {"name": "fa3", "tflops": None}]
    cases = [{"head_dim": 64, "causal": True, "seqlen": n, "rows": rows} for n in (4096, 1024)]
    assert plot.series(cases) == {(64, True): {"ours": [(1024, 400.0), (4096, 400.0)]}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, and the test is about having none")
@pytest.mark.parametrize("script", [f"bench_{name}.py" for name in ("forward", "backward", "varlen", "window")])
def test_without_a_gpu_a_benchmark_exits_2_with_one_sentence(script):
    done = subprocess.run([sys.executable, BENCHMARKS / script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().startswith(f"{script} measures a GPU, and torch")
    assert len(done.stderr.strip().splitlines()) == 1
