"""Throughput as people count it, from made-up counts; and the FLOPs of operations against torch's own counter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import lockstep
from lockstep import _torch
from lockstep.errors import EnvironmentMismatch
from lockstep.job import flight
from lockstep.job.account import Progress
from lockstep.job.flight import Flight
from lockstep.job.page import PAGE, Cell, Phase
from lockstep.job.peaks import peak_of
from lockstep.job.summary import RunSummary, Summary
from lockstep.job.throughput import StepFlops, Throughput
from lockstep.knobs import flops, parse_peak, peak_flops
from lockstep.step.flops import BEFORE, OperationCounter, StepCount
from lockstep.text import as_amount


def _summary(ranks: list[Progress], *, seconds: float = 10.0, start: int = 0) -> Summary:
    return Summary(
        seconds,
        1000,
        dict(enumerate(ranks)),
        here=[0, 1],
        taken=ranks[0].steps,
        world_size=len(ranks),
        starts=(start,),
    )


def _rank(*, samples: int = 0, tokens: int = 0, flops: StepFlops | None = None, steps: int = 100) -> Progress:
    seconds = tuple(10.0 if phase is Phase.FORWARD else 0.0 for phase in Phase)
    return Progress(steps, seconds, samples, tokens=tokens, flops=flops)


# The reckoning -------------------------------------------------------------------------------------------------------


def test_what_is_not_known_is_not_told() -> None:
    summary = RunSummary((_summary([_rank(), _rank()]),))
    assert summary.headline() == "100 steps, 100 ms each on 2 ranks"
    assert "FLOP" not in summary.describe({})
    told = summary.to_json({})
    assert [told[key] for key in ("samples_per_second", "tokens_per_second", "flops", "flops_per_second", "mfu")] == (
        [None] * 5
    )


def test_samples_tokens_and_flops_are_those_of_all_ranks_together() -> None:
    each = StepFlops(3 * 10**12, 8, 3 * 10**12 / 1e15)
    summary = RunSummary((_summary([_rank(samples=800, tokens=64_000, flops=each)] * 2),))
    assert summary.headline() == "100 steps, 100 ms each, 160 samples/s, 12,800 tokens/s on 2 ranks"
    assert "FLOPs: 6 TFLOP a step; 30 TFLOP/s a device, 3% of its peak (MFU)\n" in summary.describe({})
    told = summary.to_json({})
    assert (told["samples_per_second"], told["tokens_per_second"], told["flops"]) == (160, 12_800, 6 * 10**12)
    assert (told["flops_per_second"], told["mfu"]) == (pytest.approx(3e13), pytest.approx(0.03))


def test_a_step_with_fewer_samples_counts_for_less() -> None:
    """The step that was counted had a quarter of a usual batch: a step has four times its FLOPs."""
    rate = Throughput.of(10.0, [(StepFlops(10**9, 2), 800, 0), (StepFlops(10**9, 2), 800, 0)], steps=100)
    assert rate.flops_per_second == pytest.approx(400 * 10**9 / 10)
    uncounted = Throughput.of(10.0, [(StepFlops(10**9), 0, 0)] * 2, steps=100)
    assert uncounted.flops_per_second == pytest.approx(100 * 10**9 / 10)


def test_what_one_rank_has_not_counted_is_not_known_of_all() -> None:
    assert Throughput.of(10.0, [(StepFlops(10**9), 0, 0), (None, 0, 0)], steps=100).flops_per_second is None
    one_peak = Throughput.of(10.0, [(StepFlops(10**9, 0, 1e-3), 0, 0), (StepFlops(10**9), 0, 0)], steps=100)
    assert one_peak.flops_per_second == pytest.approx(1e10)
    assert one_peak.mfu is None
    assert one_peak.describe_flops() == "10 GFLOP/s a device"


def test_parts_of_a_run_are_added_up() -> None:
    """4 ranks for 10 s at twice the rate, then 2 ranks for 30 s."""
    first = _summary([_rank(tokens=4000, flops=StepFlops(2 * 10**9, 0, 2e-3))] * 4)
    then = _summary([_rank(tokens=4000, flops=StepFlops(10**9, 0, 1e-3))] * 2, seconds=30.0, start=1)
    whole = RunSummary((first, then)).throughput
    assert whole.tokens_per_second == pytest.approx(24_000 / 40)
    assert whole.flops_per_second == pytest.approx((100 * 8e9 + 100 * 2e9) / (4 * 10 + 2 * 30))
    assert whole.mfu == pytest.approx((100 * 8e-3 + 100 * 2e-3) / 100)
    blind = RunSummary((first, _summary([_rank(tokens=1)] * 2, start=1))).throughput
    assert (blind.flops_per_second, blind.mfu) == (None, None)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5e12),
        ("NVIDIA H200", "tf32", 494.5e12),
        ("NVIDIA H200 NVL", "float32", 60e12),
        ("NVIDIA A100-SXM4-80GB", "float16", 312e12),
        ("NVIDIA A100 80GB PCIe", "float64", 19.5e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "float16", None),
        ("NVIDIA A10G", "float16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "float16", None),
        ("a device that nobody has heard of", "float16", None),
    ],
)
def test_the_peak_of_a_device_in_a_dtype(device: str, dtype: str, peak: float | None) -> None:
    assert peak_of(device, dtype) == peak


@pytest.mark.parametrize(
    ("text", "peak"),
    [("989T", 989e12), ("1.5p", 1.5e15), ("312e12", 312e12), ("2.2 PFLOP/s", 2.2e15), ("40 GFLOPS", 40e9), ("5", 5.0)],
)
def test_a_peak_that_a_user_says(text: str, peak: float) -> None:
    assert parse_peak(text) == pytest.approx(peak)
    assert peak_flops({"LOCKSTEP_PEAK_FLOPS": text}) == pytest.approx(peak)
    assert flops({"LOCKSTEP_PEAK_FLOPS": text}), "a peak asks for the FLOPs"


@pytest.mark.parametrize("text", ["T", "fast", "0", "0T", "-1T", "1..5T", "989X"])
def test_what_is_no_peak_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 989T"):
        parse_peak(text)
    with pytest.raises(EnvironmentMismatch, match=r"LOCKSTEP_PEAK_FLOPS=.*such as 989T"):
        peak_flops({"LOCKSTEP_PEAK_FLOPS": text})


def test_flops_are_asked_for_by_a_variable() -> None:
    assert [flops({}), flops({"LOCKSTEP_FLOPS": "0"}), flops({"LOCKSTEP_FLOPS": "1"})] == [False, False, True]
    with pytest.raises(EnvironmentMismatch, match="LOCKSTEP_FLOPS='yes': expected 0 or 1"):
        flops({"LOCKSTEP_FLOPS": "yes"})


def test_amounts_have_decimal_units() -> None:
    assert [as_amount(count, "FLOP") for count in (12, 999_400, 720_896, 1.5e15)] == [
        "12 FLOP", "999 kFLOP", "721 kFLOP", "1.5 PFLOP",
    ]  # fmt: skip


# The counting --------------------------------------------------------------------------------------------------------


@pytest.fixture
def page() -> Iterator[Flight]:
    """This process's page, as a launched rank has one that has compiled nothing."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:
        compiler.counters["stats"].pop("unique_graphs", None)  # other tests may have run here before
    before = flight.current
    yield flight.use(Flight(memoryview(bytearray(PAGE))))
    flight.use(before)
    assert _torch.innermost_mode() is None


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.view(*each.shape[:2], 2, 4).transpose(1, 2) for each in self.project(x).chunk(3, dim=-1))
        y: torch.Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


def _models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    return {
        "linear": (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(5, 6)),
        "convolution": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten()), torch.randn(2, 3, 8, 8)),
        "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1), torch.randn(2, 7, 8)),
    }


def _train(model: nn.Module, x: torch.Tensor, *, autocast: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["linear", "convolution", "encoder"])
def test_operations_count_as_in_torch_and_keep_their_bits(page: Flight, name: str, autocast: bool) -> None:
    page.enter(Phase.FORWARD)
    plain = _train(*_models()[name], autocast=autocast)
    with FlopCounterMode(display=False) as theirs:
        _train(*_models()[name], autocast=autocast)
    counter = OperationCounter()
    with counter.mode:
        counted = _train(*_models()[name], autocast=autocast)
    assert sum(counter.flops.values()) == theirs.get_total_flops() > 0
    assert "bfloat16" in counter.flops if autocast else set(counter.flops) == {"float32"}
    assert not counter.unknown
    assert all(torch.equal(one, other) for one, other in zip(plain, counted, strict=True))


def test_attention_on_the_cpu_counts_its_products(page: Flight) -> None:
    """Forward: two products. Backward: the scores again, and two products for each of the two."""
    page.enter(Phase.FORWARD)
    model, x = _Attention(), torch.randn(3, 5, 8)
    counter = OperationCounter()
    with counter.mode:
        model(x).sum().backward()
    product = 2 * 3 * 2 * 5 * 5 * 4
    linear = 2 * 15 * (8 * 24 + 8 * 8)
    assert sum(counter.flops.values()) == 7 * product + 2 * linear + 2 * 15 * 8 * 8


def test_what_is_no_training_is_left_out_and_what_has_no_formula_is_named(page: Flight) -> None:
    counter = OperationCounter()
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with counter.mode:
        for phase in (Phase.EVALUATE, Phase.OPTIMIZER, Phase.SAVE):
            page.enter(phase)
            a @ b
        assert not counter.flops
        page.enter(Phase.OWN)
        with torch.inference_mode():
            F.linear(a, b)
        nn.LSTM(4, 4)(torch.randn(2, 1, 4))
    assert counter.flops["float32"] == 2 * 4**3, "linear comes whole in inference mode, and is taken apart"
    assert counter.unknown == {"aten.mkldnn_rnn_layer"}


def _step(model: nn.Module) -> None:
    """Take a step, by the page's count: of 360 FLOPs, since the inputs get no gradients."""
    flight.current.batch += 5
    model(torch.ones(5, 6)).sum().backward()
    flight.current.took_step()


def _until_it_counts(peak: float | None = None) -> nn.Module:
    model = nn.Linear(6, 3)
    flight.after_each_step(StepCount(device=torch.device("cpu"), peak=peak).after_step)
    for _ in range(BEFORE):
        _step(model)
    return model


def _counts() -> bool:
    return "took_step" in vars(flight.current)


def _cells(page: Flight) -> list[int]:
    return [page._cells[cell] for cell in (Cell.FLOPS, Cell.FLOPS_SAMPLES, Cell.FLOPS_AT_PEAK)]


def test_one_step_is_counted_and_nothing_of_it_is_left(page: Flight) -> None:
    model = _until_it_counts(peak=1e6)
    assert _torch.innermost_mode() is not None
    _step(model)
    assert _cells(page) == [360, 5, 360 * 10**6]  # picoseconds
    assert not _counts()
    _step(model)
    assert _cells(page)[0] == 360


def test_what_others_do_after_each_step_goes_on_beside_it(page: Flight) -> None:
    """As an interrupt of a cell, which is asked for by the last step at the latest."""
    seen: list[int] = []

    def act() -> bool:
        seen.append(flight.current.step)
        return len(seen) > BEFORE + 2

    flight.after_each_step(act)
    model = _until_it_counts(peak=1e6)
    for _ in range(4):
        _step(model)
    assert _cells(page)[0] == 360
    assert len(seen) == BEFORE + 3
    assert not _counts()


def test_no_peak_is_known_of_a_cpu(page: Flight) -> None:
    _step(_until_it_counts())
    assert _cells(page) == [360, 5, 0]


def test_a_mode_of_the_programs_is_not_ended(page: Flight, said: list[str]) -> None:
    """One that is there before is left alone; one that begins meanwhile ends before ours does."""
    with FlopCounterMode(display=False):
        _until_it_counts()
        assert not _counts()
    model = _until_it_counts()
    with FlopCounterMode(display=False) as theirs:
        _step(model)
        assert _torch.innermost_mode() is theirs.mode
    assert theirs.get_total_flops() == 360
    _step(model)
    assert not _counts()
    assert said == ["not counted: a dispatch mode of the program's is active at the end of a step"] * 2
    assert _cells(page) == [0, 0, 0]


def test_a_step_without_operations_is_none_of_no_flops(page: Flight, said: list[str]) -> None:
    _until_it_counts()
    flight.current.took_step()
    assert "no operation was seen that has any" in said[0]
    assert _cells(page) == [0, 0, 0]


def test_replicas_in_threads_are_not_counted(page: Flight, said: list[str]) -> None:
    model = lockstep.DataParallel(_until_it_counts(), device_ids=["cpu", "cpu"])
    _step(model)
    assert said == ["not counted: lockstep.DataParallel has replicas in threads, and one thread alone is seen"]
    assert _cells(page) == [0, 0, 0]


def test_a_process_that_is_forked_meanwhile_counts_nothing(page: Flight) -> None:
    model = _until_it_counts()
    child = os.fork()
    if not child:
        os._exit(0 if _torch.innermost_mode() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _torch.innermost_mode() is not None
    _step(model)
    assert _cells(page)[0] == 360


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the counting tells the launcher."""
    found: list[str] = []
    monkeypatch.setattr("lockstep.job.notes.tell", lambda _kind, why: found.append(why))
    return found
