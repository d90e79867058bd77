"""``lockstep port``: what becomes of typical scripts, what is left with a remark, and what is refused."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.tools.port.port import Port, port_text
from lockstep.tools.port.remarks import CannotPort, PortVerdict, RemarkKind
from tests.port_forms import ACCELERATE, DATA_PARALLEL, FABRIC, FORMS, HOROVOD, ONE_DEVICE, TORCHRUN
from tests.schemas import holds

#: Form -> lines that the port has, and the verdict.
_PORTED: dict[str, tuple[PortVerdict, list[str]]] = {
    "torchrun": (
        PortVerdict.FULLY,
        [
            'world = lockstep.init("gloo")',
            "local_rank = world.local_rank",
            "loader = lockstep.shard(DataLoader(",
            "    batch_size=8 * world.world_size,  # of each rank",
            "model = lockstep.replicate(Net())",
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world.world_size)",
            "if world.rank == 0:",
            '    print("sum", sum(p.abs().sum().item() for p in model.parameters()))',
        ],
    ),
    "spawn": (
        PortVerdict.FULLY,
        [
            "    world = lockstep.init()",
            "    world_size = world.world_size",
            "    main(world.rank, world_size, args.epochs, 8)",
            "        self.model = lockstep.replicate(model.to(world.device))",
            "                x, y = x.to(world.device), y.to(world.device, non_blocking=True)",
            '                torch.save(self.model.state_dict(), "model.pt")',
            # torch's sampler shuffles by default, whatever the loader says
            "    return lockstep.shard(DataLoader(data, batch_size=batch_size * world.world_size, shuffle=True))",
        ],
    ),
    "launch": (
        PortVerdict.FULLY,
        [
            "device = world.device",
            "loader = lockstep.shard(DataLoader(data, 8 * world.world_size, shuffle=True, drop_last=True), seed=5)",
            "model = lockstep.DistributedDataParallel(Net().to(device), "
            'device_ids=None if world.device.type == "cpu" else [world.device])',
            "if world.local_rank == 0:",
        ],
    ),
    "sometimes": (
        PortVerdict.PARTLY,
        [
            '    lockstep.init("gloo")',
            "sampler = DistributedSampler(data) if distributed else None",
            "    model = lockstep.DistributedDataParallel(model)",
        ],
    ),
    "horovod": (
        PortVerdict.FULLY,
        [
            "loader = lockstep.shard(DataLoader(data, batch_size=8 * world.world_size, shuffle=True))",
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * world.world_size)",
            "lockstep.replicate(model)",
            "        # averaged already",
            "        optimizer.step()",
            '    mean = world.all_reduce(loss.detach(), "mean")',
            "    total = world.all_reduce(torch.ones(1))",
        ],
    ),
    "accelerate": (
        PortVerdict.FULLY,
        [
            "def make_loaders(world: lockstep.World, batch_size):",
            "    with world.main_first():",
            "        outputs, y = (torch.cat(world.gather(each)) for each in (outputs, y))",
            "    model = lockstep.replicate(model.to(world.device))",
            "    train_loader = lockstep.shard(train_loader)",
            "            loss.backward()",
            "            for _ in range(world.world_size):",
            "                scheduler.step()",
            "    if world.is_main:",
            '        torch.save(model.state_dict(), "model.pt")',
        ],
    ),
    "fabric": (
        PortVerdict.FULLY,
        [
            "    world = lockstep.init(seed=11)",
            "import contextlib",
            "        with lockstep.no_sync(model) if number % 2 == 0 else contextlib.nullcontext():",
            "            (loss / 2).backward()",
            "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            '        world.all_reduce(loss.detach(), "mean").item(),',
        ],
    ),
    "one_device": (
        PortVerdict.FULLY,
        [
            "    world = lockstep.init(seed=args.seed)",
            "    train_loader = lockstep.shard(DataLoader(make_data(100), batch_size=16, shuffle=True))",
            "    test_loader = DataLoader(make_data(50), batch_size=25)",
            "    model = lockstep.replicate(Net().to(device))",
            "        total += lockstep.world().mean(loss) * lockstep.world().all_reduce(len(x))",
            "        seen += lockstep.world().all_reduce(x.size(0))",
            "    if world.is_main:",
        ],
    ),
    "data_parallel": (
        PortVerdict.PARTLY,
        [
            "lockstep.replicate(lockstep.convert_sync_batchnorm(model.to(world.device)))",
            "    outputs = model(x.to(world.device))",
            "    losses.append(world.mean(loss))",
        ],
    ),
}
#: Form -> the lines of the remarks on what was left.
_LEFT = {
    "sometimes": ["loader = DataLoader(data, batch_size=8, shuffle=sampler is None, sampler=sampler)"],
    "data_parallel": ['    print("largest", outputs.max().item())'],
}
#: What a script must not do to be ported: a form, a text in it, what stands there instead, and a word of the reason.
_REFUSED = {
    "accumulates": (ACCELERATE, "Accelerator()", "Accelerator(gradient_accumulation_steps=4)", "no rule"),
    "its own states": (ACCELERATE, "accelerator.wait_for_everyone()", 'accelerator.save_state("x")', "no rule"),
    "half precision": (ACCELERATE, "Accelerator()", 'Accelerator(mixed_precision="bf16")', "precision"),
    "a name that is taken": (ACCELERATE, "right = count = 0", "world = right = count = 0", "something else"),
    "parts unknown": (ACCELERATE, "model = Net()", "model, other = Net(), accelerator.prepare(object())", "no rule"),
    "another strategy": (FABRIC, 'strategy="ddp"', 'strategy="fsdp"', "no rule"),
    "a dict that is saved": (FABRIC, "model.state_dict()", '{"model": model}', "no rule"),
    "Adasum": (HOROVOD, "hvd.Average", "hvd.Adasum", "no rule"),
    "states of rank 0": (HOROVOD, "hvd.broadcast_opt", "optimizer.load_state_dict({})\nhvd.broadcast_opt", "no rule"),
    "an optimizer alone": (HOROVOD, "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n", "", "which model"),
    "a sum": (ONE_DEVICE, "mse_loss(model(x), y)\n", 'mse_loss(model(x), y, reduction="sum")\n', "sum over the batch"),
    "one loader for both": (
        ONE_DEVICE,
        "test(model, device, test_loader)",
        "test(model, device, train_loader)",
        "part",
    ),
    "FSDP": (
        TORCHRUN,
        "import os\n",
        "import os\nfrom torch.distributed.fsdp import FullyShardedDataParallel\n",
        "not",
    ),
    "no process group": (TORCHRUN, 'dist.init_process_group("gloo")\n', "", "another file"),
}


def ported(text: str, *, ranks: int | None = None) -> Port:
    return port_text(text, Path("train.py"), ranks=ranks)


def changed(text: str, old: str, new: str) -> str:
    """A form with another text in one place."""
    assert old in text
    return text.replace(old, new)


def told(found: Port, kind: RemarkKind) -> list[str]:
    """The lines that remarks of one kind are about."""
    lines = found.before.splitlines()
    return [lines[each.line - 1] for each in found.remarks if each.kind is kind]


def comments(text: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {each.string for each in tokens if each.type == tokenize.COMMENT}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_becomes_what_a_person_would_write(name: str) -> None:
    verdict, lines = _PORTED[name]
    found = ported(FORMS[name])
    assert found.verdict is verdict, found.remarks
    after = found.after.splitlines()
    assert [line for line in lines if line not in after] == [], found.diff
    assert told(found, RemarkKind.LEFT) == _LEFT.get(name, [])
    for gone in ("accelerate", "accelerator", "fabric", "hvd", "horovod", "mp.spawn", "set_epoch", "MASTER_"):
        assert name == "sometimes" or not re.search(rf"\b{gone}", found.after), gone


@pytest.mark.parametrize("name", FORMS)
def test_a_port_compiles_keeps_every_comment_and_is_not_ported_again(name: str) -> None:
    found = ported(FORMS[name])
    ast.parse(found.after)
    assert comments(found.after) == comments(found.before)
    again = ported(found.after)
    assert again.verdict is PortVerdict.ALREADY
    assert again.after == found.after
    untouched = [line for line in found.before.splitlines() if "Linear" in line or "def forward" in line]
    assert set(untouched) <= set(found.after.splitlines()) or name == "data_parallel"


@pytest.mark.parametrize("name", FORMS)
def test_every_change_of_a_port_has_a_remark(name: str) -> None:
    """Each hunk of the diff holds a line that a remark is about, but for imports."""
    found = ported(FORMS[name])
    about = {each.line for each in found.remarks}
    before = found.before.splitlines()
    removed = [
        number
        for number, line in enumerate(before, 1)
        if line.strip() and line not in found.after.splitlines() and "import" not in line
    ]
    alone = [number for number in removed if not about & {*range(number - 6, number + 7)}]
    assert alone == [], [before[number - 1] for number in alone]


@pytest.mark.parametrize("case", _REFUSED)
def test_a_script_of_which_something_would_be_lost_is_refused_with_the_reason(case: str) -> None:
    text, old, new, why = _REFUSED[case]
    found = ported(changed(text, old, new))
    assert found.verdict is PortVerdict.REFUSED, found.diff
    assert found.after == found.before
    assert found.diff == ""
    assert any(why in each.why for each in found.remarks), found.remarks
    assert all(each.advice for each in found.remarks)


def test_the_number_of_ranks_that_a_script_ran_on_is_written_where_it_is_given() -> None:
    after = ported(HOROVOD, ranks=4).after
    assert "batch_size=8 * 4" in after
    assert "lr=0.01 * 4" in after
    after = ported(ACCELERATE, ranks=4).after
    assert "batch_size=8 * 4" not in after, "the size is a variable there"
    assert "batch_size=batch_size * 4" in after
    assert "for _ in range(4):" in after


def test_a_loader_whose_sampler_is_asked_for_more_stays() -> None:
    text = changed(TORCHRUN, "dist.barrier()", "dist.barrier()\nprint(len(sampler))")
    found = ported(text)
    assert found.verdict is PortVerdict.PARTLY
    assert "    sampler=sampler,\n" in found.after
    assert "    batch_size=8,  # of each rank\n" in found.after, "of each rank as before"
    assert "    sampler.set_epoch(epoch)\n" in found.after
    (why,) = [each.why for each in found.remarks if each.kind is RemarkKind.LEFT]
    assert "asks the sampler for more" in why


def test_a_process_group_with_a_rank_of_its_own_stays() -> None:
    text = changed(TORCHRUN, '("gloo")', '("gloo", rank=local_rank + 4 * node, world_size=8)')
    found = ported(text)
    assert found.verdict is PortVerdict.PARTLY
    lines = found.after.splitlines()
    at = lines.index('dist.init_process_group("gloo", rank=local_rank + 4 * node, world_size=8)')
    assert lines[at + 1].startswith("world = lockstep.init(") or lines[at + 1] == "lockstep.init()"


def test_a_seed_before_the_process_group_becomes_that_of_lockstep() -> None:
    early = changed(TORCHRUN, "# the process group", "torch.manual_seed(9)\n# the process group")
    assert 'lockstep.init("gloo", seed=9)' in ported(early).after
    own = changed(TORCHRUN, "# the process group", 'torch.manual_seed(int(os.environ["RANK"]))\n# the process group')
    assert 'lockstep.init("gloo", seed=False)' in ported(own).after


def test_a_rank_that_is_read_before_the_process_group_stays() -> None:
    text = changed(TORCHRUN, "# the process group", 'print(int(os.environ["RANK"]))')
    assert 'print(int(os.environ["RANK"]))\n' in ported(text).after


def _launched(call: str) -> str:
    """The form for Fabric with its loop in a function that ``launch`` is given."""
    text = changed(FABRIC, "def main():\n", "def main(fabric, batch_size):\n")
    text = changed(
        text, '    fabric = Fabric(accelerator="auto", devices=2, strategy="ddp")\n    fabric.launch()\n', ""
    )
    text = changed(text, "    fabric.seed_everything(11)\n", "").replace("batch_size=8", "batch_size=batch_size")
    return changed(text, "\nmain()\n", f'\nfabric = Fabric(devices=2, strategy="ddp")\n{call}\n')


def test_a_function_that_fabric_launches_is_called() -> None:
    found = ported(_launched("fabric.launch(main, batch_size=8)"))
    assert found.verdict is PortVerdict.FULLY, found.remarks
    assert "\nworld = lockstep.init()\nmain(world, batch_size=8)\n" in found.after
    assert "def main(world, batch_size):\n" in found.after
    assert "batch_size=batch_size * world.world_size" in found.after
    found = ported(_launched("fabric.launch(lambda fabric: main(fabric, 8))"))
    assert found.verdict is PortVerdict.REFUSED, found.diff


def test_a_scheduler_steps_once_where_accelerate_splits_batches() -> None:
    after = ported(changed(ACCELERATE, "Accelerator()", "Accelerator(split_batches=True)")).after
    assert "for _ in range" not in after
    assert "            scheduler.step()\n" in after


_DEVICE = '    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n'
_TEXT = '    device = "cuda" if torch.cuda.is_available() else "cpu"\n'


def test_a_device_that_was_text_is_no_text_any_more() -> None:
    text = changed(ONE_DEVICE, _DEVICE, _TEXT)
    text = changed(
        text, "        optimizer.zero_grad()\n", '        pin = device == "cuda"\n        optimizer.zero_grad()\n'
    )
    text = changed(
        text,
        "        loss = nn.functional.mse_loss(model(x), y)\n",
        "        with torch.autocast(device_type=device):\n            loss = nn.functional.mse_loss(model(x), y)\n",
    )
    text = changed(
        text,
        "    model.eval()\n",
        '    model.eval()\n    if device.startswith("cuda") or device is None:\n        pass\n',
    )
    found = ported(text)
    assert found.verdict is PortVerdict.FULLY, found.remarks
    for line in (
        'pin = device.type == "cuda"',
        "with torch.autocast(device_type=device.type):",
        'device.type.startswith("cuda")',
    ):
        assert line in found.after, found.diff
    assert "device is None" in found.after
    assert "x.to(device)" in found.after
    found = ported(changed(text, 'device == "cuda"', 'device == "cuda:1"'))
    assert found.verdict is PortVerdict.REFUSED, found.diff
    assert any("equal to no text" in each.why for each in found.remarks)


@pytest.mark.parametrize(
    "loss",
    [
        "nn.functional.cross_entropy(model(x), y, ignore_index=0)",
        "nn.functional.cross_entropy(model(x), y, weights)",
        "nn.CrossEntropyLoss(weight=weights)(model(x), y)",
        "((model(x) - y) * (y > 0)).sum() / (y > 0).sum()",
        "(model(x) - y)[y > 0].mean()",
    ],
)
def test_a_loss_that_is_no_mean_over_samples_is_told(loss: str) -> None:
    found = ported(changed(ONE_DEVICE, "loss = nn.functional.mse_loss(model(x), y)\n", f"loss = {loss}\n"))
    assert told(found, RemarkKind.LEFT) == [f"        loss = {loss}"]
    assert any("docs/weights.md" in each.advice for each in found.remarks)


@pytest.mark.parametrize("loss", ["nn.functional.cross_entropy(model(x), y, weight=None)", "(model(x) - y)[0].mean()"])
def test_a_mean_over_samples_is_not_told(loss: str) -> None:
    found = ported(changed(ONE_DEVICE, "loss = nn.functional.mse_loss(model(x), y)\n", f"loss = {loss}\n"))
    assert told(found, RemarkKind.LEFT) == []


def test_lockstep_is_imported_before_it_is_initialised() -> None:
    text = changed(DATA_PARALLEL, "from torch import nn\n", "torch.manual_seed(3)\nfrom torch import nn\n")
    for start in ("", '"""Train."""\n'):
        after = ported(start + text).after
        assert after.index("import lockstep\n") < after.index("lockstep.init("), after
        assert ast.get_docstring(ast.parse(after)) == ast.get_docstring(ast.parse(start))


@pytest.mark.parametrize(
    "line",
    ['    if args.seed: torch.save(model.state_dict(), "model.pt")', '    args = 0; torch.save(args, "model.pt")'],
)
def test_a_save_that_is_not_alone_on_its_line_is_told(line: str) -> None:
    text = changed(ONE_DEVICE, '    torch.save(model.state_dict(), "model.pt")', line)
    assert told(ported(text), RemarkKind.LEFT) == [line]


def test_half_precision_that_an_option_may_ask_for_is_refused_when_it_does() -> None:
    text = changed(ACCELERATE, "Accelerator()", "Accelerator(mixed_precision=PRECISION)")
    found = ported(text)
    assert found.verdict is PortVerdict.PARTLY
    assert '    if PRECISION not in (None, "no"):\n        raise ValueError(' in found.after


def test_what_one_process_does_once_is_done_by_rank_0() -> None:
    text = changed(ONE_DEVICE, "DataLoader(make_data(50), batch_size=25)", "DataLoader(Digits(download=True))")
    after = ported(text).after
    assert "    with world.main_first():\n        Digits(download=True)\n    test_loader = DataLoader(" in after
    text = changed(ONE_DEVICE, "    model = Net()", '    file = open("log", "w")\n    model = Net()')
    assert told(ported(text), RemarkKind.LEFT) == ['    file = open("log", "w")']


def test_figures_of_a_share_are_told() -> None:
    text = changed(ONE_DEVICE, "        seen += x.size(0)", "        seen += x.max().item()")
    assert told(ported(text), RemarkKind.LEFT) == ["        seen += x.max().item()"]
    text = changed(ONE_DEVICE, "        seen += x.size(0)", "        n = x.size(0)\n        z = torch.zeros(n)")
    assert "        n = x.size(0)\n" in ported(text).after, "what tensors of this rank are made of stays its own"


def test_no_file_is_run_and_torch_is_not_imported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(9)\n" + TORCHRUN)
    code = (
        "import sys\nfrom pathlib import Path\nfrom lockstep.tools.port.port import port\n"
        f"port(Path({str(script)!r}))\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_command_prints_a_diff_and_changes_the_file_only_when_it_is_told_to(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN)
    script.chmod(0o750)
    done = CliRunner().invoke(main, ["port", str(script)])
    assert done.exit_code == 0, done.output
    assert "+model = lockstep.replicate(Net())" in done.stdout.splitlines()
    assert "Not the same as before, by design:" in done.stdout
    assert script.read_text() == TORCHRUN
    done = CliRunner().invoke(main, ["port", "--write", str(script)])
    assert done.exit_code == 0, done.output
    assert script.read_text() == ported(TORCHRUN).after
    assert script.stat().st_mode & 0o777 == 0o750
    done = CliRunner().invoke(main, ["port", str(script)])
    assert (done.exit_code, "uses lockstep already" in done.stdout) == (0, True)


def test_the_command_says_why_it_refuses(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(changed(FABRIC, 'strategy="ddp"', 'strategy="fsdp"'))
    done = CliRunner().invoke(main, ["port", "--write", str(script)])
    assert done.exit_code == 1
    assert 'strategy="fsdp"' in done.stdout
    assert "Not ported, because of:" in done.stdout
    assert "lightning" in script.read_text()


def test_json_has_the_keys_of_the_page(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FORMS["sometimes"])
    done = CliRunner().invoke(main, ["port", "--json", str(script)])
    found = holds(done.stdout, "lockstep.port/1")
    assert found["code"] == "ported-partly"
    assert "line-left" in {each["code"] for each in found["remarks"]}
    script.write_text("def broken(:\n")
    done = CliRunner().invoke(main, ["port", "--json", str(script)])
    assert done.exit_code == 2
    assert json.loads(done.stdout)["code"] == "cannot-port"


@pytest.mark.parametrize("text", ["def broken(:\n", "x = (\n"])
def test_what_is_no_python_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(CannotPort, match=r"^line \d+: not valid Python"):
        ported(text)


def test_a_file_that_trains_nothing_is_refused() -> None:
    found = ported("import torch\n\nprint(torch.ones(3))\n")
    assert found.verdict is PortVerdict.REFUSED
    assert "no backward()" in found.remarks[0].why


def test_numbers_that_are_drawn_in_the_loop_are_told() -> None:
    text = changed(
        ONE_DEVICE, "        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        x += torch.randn(1)\n"
    )
    assert "        x += torch.randn(1)" in told(ported(text), RemarkKind.DIFFERS)
