"""The tile tuner's choices: what it tries, how it edits a spec, and how it ranks. No GPU and no compiler."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import perf_flash
import problems
from tile_candidates import KERNELS, Group, Tile, best_first, candidates, parse_tile, tile_of, with_tile

from flashattn.jit.spec import KernelSpec

SPEC = KernelSpec(
    module="flashattn.kernels.flash_fwd",
    kernel="attn_fwd",
    signature=(("q_ptr", "*bf16"), ("BLOCK_M", "constexpr"), ("BLOCK_N", "constexpr"), ("MASK", "constexpr")),
    constants=(("MASK", 1), ("BLOCK_M", 128), ("BLOCK_N", 64)),
    alignment=(("q_ptr", 16),),
    options=(("enable_fp_fusion", True), ("num_stages", 3), ("num_warps", 8)),
    target="sm_90",
)


def test_a_tile_changes_the_blocks_warps_and_stages_of_a_spec_and_nothing_else():
    assert tile_of(SPEC) == Tile(128, 64, 8, 3)
    other = with_tile(SPEC, Tile(64, 32, 4, 2))
    assert tile_of(other) == Tile(64, 32, 4, 2)
    assert other.key != SPEC.key
    assert with_tile(other, tile_of(SPEC)) == SPEC


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
def test_there_are_candidates_for_every_kernel_and_a_small_gpu(kernel, head_dim):
    large, small = (candidates(kernel, head_dim, limit * 1024) for limit in (227, 99))
    assert 4 <= len(small) <= len(large) <= 45
    assert set(small) <= set(large)
    assert len(set(large)) == len(large)


def test_a_bound_on_registers_comes_and_goes_with_a_tile():
    bound = with_tile(SPEC, Tile(128, 64, 8, 3, 128))
    assert dict(bound.options)["maxnreg"] == 128 and tile_of(bound) == Tile(128, 64, 8, 3, 128)
    assert with_tile(bound, Tile(128, 64, 8, 3)) == SPEC


@pytest.mark.parametrize("text", ["128x64 w8 s3", "128x64 w8 s3 r128", str(Tile(32, 128, 4, 1))])
def test_a_tile_is_read_back_as_it_is_written(text):
    assert str(parse_tile(text)) == text


def test_the_best_tile_is_the_one_with_the_least_slowdown_over_all_lengths():
    times = {
        1024: {"a": 1.0, "b": 1.2, "c": 0.9},
        4096: {"a": 10.0, "b": 9.0, "c": 14.0},
        16384: {"a": 100.0, "b": 99.0},
    }
    ranking = best_first(times)
    assert [name for name, _ in ranking] == ["a", "b"], "c has no time at 16384"
    assert ranking[0][1] == pytest.approx(((1.0 / 0.9) * (10 / 9) * (100 / 99)) ** (1 / 3))


def test_the_winner_is_printed_as_python_with_its_gain():
    group = Group(kernel="attn_fwd", dtype="bf16", head_dim=64, mask="causal")
    line = perf_flash.winner_line(
        group, {"ranking": [["64x32 w4 s2", 1.0], ["table", 1.1]]}, Tile(128, 64, 8, 3), "sm_90"
    )
    assert line == '("sm_90", "attn_fwd", "bf16", 64, "causal"): Tile(64, 32, 4, 2),  # 1.100 of the table\'s speed'


def test_a_contender_switches_the_tiles_only_when_another_was_used_before(monkeypatch, tmp_path):
    used = []
    monkeypatch.setattr(perf_flash, "use_tiles", used.append)
    monkeypatch.setattr(perf_flash.Contender, "_active", None)
    table = perf_flash.Contender("attn_fwd", None, lambda: "out", tmp_path)
    tile = perf_flash.Contender("attn_fwd", Tile(64, 32, 4, 2), lambda: "out", tmp_path)
    for contender in (tile, tile, table, tile):
        assert contender() == "out"
    assert [path and path.name for path in used] == ["attn_fwd-64x32-w4-s2.json", None, "attn_fwd-64x32-w4-s2.json"]
    override = json.loads(used[0].read_text())
    assert override == {"attn_fwd": Tile(64, 32, 4, 2)._asdict()}


class FakeRun:
    """Says that every contender took the time that `times` has for it."""

    def __init__(self, times):
        from harness import Plan

        self.plan, self._times, self.measured = Plan(rounds=4), times, []

    def compare(self, label, contenders, **options):
        from harness import Row

        self.measured.append((self.plan.rounds, sorted(contenders)))
        return [
            Row(name=name, ms=self._times.get(name), status="ok" if name in self._times else "wrong")
            for name in contenders
        ]


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_a_group_is_compiled_with_the_kernels_of_its_own_mask_and_no_other(mask):
    chosen = perf_flash.parse_arguments(["--kernels", "bwd_dq", "--head-dims", "64", "--masks", mask])
    (group,) = perf_flash.groups_of(chosen)
    tile = Tile(64, 32, 4, 2)
    wanted, every = perf_flash.plan_compiles([group], "sm_90", [tile])
    _, tried = wanted[group]
    assert [spec.kernel for spec in tried[tile]] == ["bwd_dq"]
    kernels = {spec.kernel for spec in every} - {"hopper_attn_fwd"}
    assert kernels == {"attn_fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq"}
    found = {perf_flash.mask_number(spec) for spec in every if spec.kernel != "bwd_preprocess"}
    assert found == {["full", "causal", "window"].index(mask)}


def test_a_group_of_windows_is_measured_on_one_that_ends_at_the_query(monkeypatch, tmp_path):
    monkeypatch.setattr(problems, "DEVICE", "cpu")
    monkeypatch.setattr(problems, "TOKENS", 32)
    monkeypatch.setattr(problems, "HIDDEN", 32)
    monkeypatch.setattr(perf_flash, "WINDOW", (3, 0))
    monkeypatch.setattr(perf_flash, "use_tiles", lambda path: None)
    group = Group(kernel="bwd_dkdv", dtype="bf16", head_dim=16, mask="window")
    found = perf_flash.case(group, 16, [None], tmp_path)
    assert (found["case"]["window"], found["case"]["causal"]) == ((3, 0), True)
    assert found["check"].fault(found["contenders"]["table"]()) is None


def test_all_are_screened_once_and_the_best_few_and_the_tables_are_measured_at_every_length(monkeypatch, tmp_path):
    tiles = [Tile(64, 32, 4, stages) for stages in range(1, 8)]
    times = {str(tile): 8.0 - i for i, tile in enumerate(tiles)} | {"table": 9.0}
    del times[str(tiles[6])]
    monkeypatch.setattr(
        perf_flash,
        "case",
        lambda group, seqlen, chosen, folder: {
            "label": "",
            "contenders": {str(tile or "table"): None for tile in chosen},
        },
    )
    run, group = FakeRun(times), Group(kernel="bwd_dq", dtype="bf16", head_dim=64, mask="full")
    record = perf_flash.tune(run, group, [4096, 1024], tiles, tmp_path)
    best_four = [str(tile) for tile in tiles[2:6]]
    everything = sorted([*map(str, tiles), "table"])
    assert run.measured == [(1, everything), (4, sorted([*best_four, "table"])), (4, sorted([*best_four, "table"]))]
    assert record["ranking"][0] == (best_four[-1], 1.0)
