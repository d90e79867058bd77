"""``lockstep checkpoint``: what it says, what it removes and what it writes, without any world."""

from __future__ import annotations

import json
import math
import os
import shlex
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load

from lockstep.checkpoint.encoding import encode
from lockstep.checkpoint.export import SafetensorsShards
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.locks import LOCK_FILE, RunLock, reading
from lockstep.checkpoint.manifest import MODEL
from lockstep.checkpoint.plan import text
from lockstep.checkpoint.state import Moment
from lockstep.cli import main
from tests.checkpoints import State, save
from tests.schemas import holds


def _model(step: int) -> dict[str, torch.Tensor]:
    weight = torch.arange(6.0).reshape(2, 3) + step
    return {"body.weight": weight, "tied.weight": weight, "steps": torch.tensor(step), "half": torch.ones(3).bfloat16()}


def _save(root: Path, step: int, metric: float | None = None, **changes: Any) -> Path:
    root.mkdir(exist_ok=True)
    average = {"n": torch.tensor(step), "weight": torch.full((4,), float(step))}
    parts = {"optimizer": {"state": {0: {"momentum": torch.ones(5)}}}, "extra": {"ema": average, "odd": [1, 2]}}
    state = State({**_model(step), **changes.pop("model", {})}, parts=changes.pop("parts", parts), **changes)
    (made,) = save(root, [state], place=Moment(step, step // 2, bool(step % 2), metric))
    assert isinstance(made, Path), made
    return made


def _run(*arguments: object) -> Result:
    done = CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def _flip(file: Path, position: int = -3) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 16
    file.write_bytes(content)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four checkpoints, the third with the best metric."""
    for step, metric in enumerate([0.5, 0.75, 0.125, None]):
        _save(tmp_path / "run", step, metric)
    return tmp_path / "run"


def test_ls_shows_what_there_is_newest_first(run: Path) -> None:
    (run / "step-00000001" / MANIFEST).write_text("{")
    (run / f"step-00000009.tmp-{'a' * 16}").mkdir()
    held = RunLock(run)
    lines = _run("ls", run).output.splitlines()
    held.release()
    assert lines[0].split() == ["step", "epoch", "metric", "ranks", "size", "saved", "folder"]
    assert lines[1].split()[:3] == ["3", "in", "1"], "in mid-epoch, without a metric"
    assert lines[2].split()[:4] == ["2", "1", "0.125", "1"]
    assert [line.split()[-1] for line in lines[1:5]] == [f"step-0000000{step}" for step in (3, 2, 1, 0)]
    assert "damaged" in lines[3]
    assert lines[5].startswith("damaged: ")
    assert "step-00000001/manifest.json: not a valid manifest" in lines[5]
    assert lines[6] == f"unfinished: step-00000009.tmp-{'a' * 16}"
    assert lines[7].startswith(f"the folder belongs to process {os.getpid()} on ")


def test_show_tells_a_checkpoints_place_files_and_tensors(run: Path) -> None:
    for arguments in ((run,), (run / "step-00000003",), (run, "--step", 3)):
        said = _run("show", *arguments).output
        assert "1, some of it done" in said
        assert [line.split() for line in said.splitlines() if line.startswith("body.weight")] == [
            ["body.weight", "float32", "2", "×", "3", "24", "bytes"]
        ]
        assert "half" in said
        assert "bfloat16" in said
        assert "optimizer.safetensors" in said
    _save(run.parent / "run[lr=0.1]", 1, model={"body[a].weight": torch.ones(3)})
    said = _run("show", run.parent / "run[lr=0.1]").output
    assert "run[lr=0.1]/step-00000001" in said
    assert "body[a].weight" in said
    _flip(run / "step-00000003" / MANIFEST)
    failed = _run("show", run)
    assert failed.exit_code == 2
    assert "not a valid manifest" in failed.output


def test_verify_reads_every_byte_and_names_the_tensor(run: Path) -> None:
    done = _run("verify", run)
    assert (done.exit_code, done.output.count("complete")) == (0, 4)
    _flip(run / "step-00000002" / "optimizer.safetensors")
    (run / "step-00000000" / MODEL).unlink()
    done = _run("verify", run)
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert lines[:2] == ["step-00000003: complete", "step-00000002: damaged"]
    assert "tensor optimizer.state.0.momentum: its content has changed" in lines[2]
    assert lines[3:5] == ["step-00000001: complete", "step-00000000: damaged"]
    assert "model.safetensors: No such file" in lines[5]
    assert _run("verify", run, "--step", 3).exit_code == 0
    assert _run("verify", run / "step-00000002").exit_code == 1


def test_programs_get_the_same_as_json(run: Path) -> None:
    (run / "step-00000001" / MANIFEST).write_text("{")
    (run / f"step-00000009.tmp-{'a' * 16}").mkdir()
    _flip(run / "step-00000002" / "optimizer.safetensors")
    told = holds(_run("ls", run, "--json").stdout, "lockstep.checkpoint.ls/1")
    assert [each["step"] for each in told["checkpoints"]] == [3, 2, 1, 0]
    assert [each["metric"] for each in told["checkpoints"]] == [None, 0.125, None, 0.5]
    assert [each["damage"] is None for each in told["checkpoints"]] == [True, True, False, True]
    assert told["unfinished"] == [f"step-00000009.tmp-{'a' * 16}"]
    assert told["owner"] is None
    told = holds(_run("show", run, "--json").stdout, "lockstep.checkpoint.show/1")
    assert (told["step"], told["epoch"], told["in_epoch"], told["ranks"]) == (3, 1, True, 1)
    assert {"name": "body.weight", "dtype": "float32", "shape": [2, 3], "bytes": 24} in told["tensors"]
    failed = _run("show", run, "--step", 1, "--json")
    assert holds(failed.stdout, "lockstep.error/1")["code"] == "checkpoint-corrupt"
    done = _run("verify", run, "--json")
    told = holds(done.stdout, "lockstep.checkpoint.verify/1")
    assert (done.exit_code, told["damaged"]) == (1, 2)
    assert [each["complete"] for each in told["checkpoints"]] == [True, False, False, True]
    assert "tensor optimizer.state.0.momentum" in told["checkpoints"][1]["damage"][0]


def test_programs_are_told_what_a_pruning_removes(run: Path) -> None:
    arguments = ("prune", run, "--last", 1, "--every", 3, "--best", 1, "--json")
    told = holds(_run(*arguments, "--dry-run").stdout, "lockstep.checkpoint.prune/1")
    assert (told["removed"], told["dry_run"], _left(run)) == (["step-00000001"], True, [0, 1, 2, 3])
    told = holds(_run(*arguments).stdout, "lockstep.checkpoint.prune/1")
    assert (told["removed"], told["dry_run"], _left(run)) == (["step-00000001"], False, [0, 2, 3])
    assert told["kept"] == ["step-00000003", "step-00000002", "step-00000000"]


def _left(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_prune_keeps_what_is_asked_for(run: Path) -> None:
    arguments = ("prune", run, "--last", 1, "--every", 3, "--best", 1)
    said = _run(*arguments, "--dry-run").output
    assert said == "would remove step-00000001\nkept: step-00000003, step-00000002, step-00000000\n"
    assert _left(run) == [0, 1, 2, 3]
    with reading(run / "step-00000001"):
        assert "left, being read: step-00000001" in _run(*arguments).output
    assert _run(*arguments).output.splitlines()[0] == "removed step-00000001"
    assert _left(run) == [0, 2, 3]
    assert _run("prune", run, "--last", 0, "--best", 1, "--mode", "max").exit_code == 0
    assert _left(run) == [0, 3], "the newest is kept besides the best"


def test_prune_never_removes_the_last_good_one(run: Path) -> None:
    for step in (3, 2):
        _flip(run / f"step-0000000{step}" / MODEL)
    said = _run("prune", run, "--last", 0).output
    assert said.count("damaged, kept: ") == 2
    assert "tensor half: its content has changed" in said
    assert _left(run) == [1, 2, 3]
    _flip(run / "step-00000001" / MODEL)
    failed = _run("prune", run, "--last", 0)
    assert (failed.exit_code, _left(run)) == (2, [1, 2, 3])
    assert "no checkpoint there is complete, so nothing is removed" in failed.output


def test_prune_works_beside_a_job_and_needs_to_be_told_what_to_keep(run: Path) -> None:
    held = RunLock(run)
    assert _run("prune", run, "--last", 2).exit_code == 0
    held.release()
    assert _left(run) == [2, 3]
    assert "Missing option '--last'" in _run("prune", run).output


def _same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return set(found) == set(expected) and all(
        torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in expected
    )


def test_export_writes_one_file_for_torch_or_safetensors(run: Path, tmp_path: Path) -> None:
    done = _run("export", run, tmp_path / "model.safetensors")
    assert done.exit_code == 0, done.output
    assert "4 tensors of step-00000003" in done.output
    assert _same(load_file(tmp_path / "model.safetensors"), _model(3)), "tied tensors under both names"
    assert _run("export", run, tmp_path / "model.pt", "--step", 1).exit_code == 0
    assert _same(torch.load(tmp_path / "model.pt", weights_only=True), _model(1))
    assert stat.S_IMODE((tmp_path / "model.pt").stat().st_mode) == 0o600
    _run("export", run, tmp_path / "average.bin", "--extra", "ema", "--format", "safetensors")
    average = load_file(tmp_path / "average.bin")
    assert (average["n"].item(), average["weight"].tolist()) == (3, [3.0] * 4)
    names = {"run", "model.safetensors", "model.pt", "average.bin"}
    assert {path.name for path in tmp_path.iterdir()} == names, "nothing else is left"


def test_export_skips_damaged_ones_unless_one_is_named(run: Path, tmp_path: Path) -> None:
    _flip(run / "step-00000003" / MODEL)
    done = _run("export", run, tmp_path / "model.pt")
    assert done.exit_code == 0
    assert "skipped, damaged: " in done.output
    assert _same(torch.load(tmp_path / "model.pt", weights_only=True), _model(2))
    refused = _run("export", run, tmp_path / "other.pt", "--step", 3)
    assert (refused.exit_code, (tmp_path / "other.pt").exists()) == (2, False)
    assert "its content has changed" in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model.xyz",), "which format? Name the file .safetensors or .pt, or give --format"),
        (("there.pt",), "already exists"),
        (("a.pt", "--step", "7"), "no checkpoint there of step 7; there are checkpoints of the steps 3, 2, 1, 0"),
        (("a.pt", "--extra", "nothing"), "no extra object 'nothing' was saved; it has 'ema', 'odd'"),
        (("a.pt", "--extra", "odd"), "extra 'odd' is a list, not a dict of tensors"),
        (("nowhere/a.pt",), "No such file or directory"),
    ],
)
def test_exports_that_make_no_sense_are_refused(run: Path, arguments: tuple[str, ...], message: str) -> None:
    (run.parent / "there.pt").write_text("mine")
    refused = _run("export", run, run.parent / arguments[0], *arguments[1:])
    assert refused.exit_code == 2
    assert message in refused.output
    assert refused.output.startswith("lockstep checkpoint export: ")
    assert {path.name for path in run.parent.iterdir()} == {"run", "there.pt"}
    assert (run.parent / "there.pt").read_text() == "mine"
    assert _run("export", run, run.parent / "there.pt", "--force").exit_code == 0


def test_export_refuses_what_a_format_cannot_hold(tmp_path: Path) -> None:
    folder = _save(tmp_path / "run", 1, model={"names": ["a", "b"], "threshold": 0.5})
    refused = _run("export", folder, tmp_path / "a.safetensors")
    assert "names, threshold: not tensors, and safetensors holds nothing else" in refused.output
    assert _run("export", folder, tmp_path / "a.pt").exit_code == 0
    assert torch.load(tmp_path / "a.pt", weights_only=True)["names"] == ["a", "b"]
    counted = {"rng.json": b"[]", "extra.json": text(encode({"seen": {"by class": Counter(a=2)}}, None, where="extra"))}
    folder = _save(tmp_path / "other", 1, parts={}, texts=counted)
    refused = _run("export", folder, tmp_path / "b.pt", "--extra", "seen")
    assert "extra 'seen', by class: a collections.Counter, which torch.load(weights_only=True) would ref" in str(
        refused.output
    )
    assert not (tmp_path / "b.pt").exists()


def test_a_model_in_shards_is_that_of_hugging_faces_form(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    assert _run("export", run, output, "--shards").exit_code == 0
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]
    assert _same(load_file(output / "model.safetensors"), _model(3))
    assert stat.S_IMODE(output.stat().st_mode) == 0o700
    others = {"config.json", "model_ema.safetensors", "model-00001-of-00002.fp16.safetensors"}
    for name in others:
        (output / name).write_text("mine")
    refused = _run("export", run, output, "--shards", "--shard-size", 1e-9)
    assert (refused.exit_code, "model.safetensors already exists" in refused.output) == (2, True)

    done = _run("export", run, output, "--shards", "--shard-size", 1e-9, "--step", 2, "--force")
    model = _model(2)
    count = len(model)
    assert f"{count} tensors of step-00000002" in done.output
    assert f"in {count + 1} files, for Hugging Face" in done.output
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model)
    assert sorted(index["weight_map"].values()) == files
    assert index["metadata"]["total_size"] == sum(each.numel() * each.element_size() for each in model.values())
    assert {path.name for path in output.iterdir()} == {*others, "model.safetensors.index.json", *files}
    assert all(stat.S_IMODE((output / name).stat().st_mode) == 0o600 for name in files)
    assert _same({name: load_file(output / file)[name] for name, file in index["weight_map"].items()}, model)

    whole = _run("export", run, output, "--shards", "--force")
    assert whole.exit_code == 0
    assert {path.name for path in output.iterdir()} == {*others, "model.safetensors"}
    assert {(output / name).read_text() for name in others} == {"mine"}, "what is none of the model's files stays"


def test_tensors_fill_a_shard_up_to_its_size() -> None:
    state = {str(number): torch.zeros(size) for number, size in enumerate([10, 10, 5, 30, 1, 1])}  # of 4 bytes each
    names = [list(shard) for shard in SafetensorsShards(100)._shards(state)]
    assert names == [["0", "1", "2"], ["3"], ["4", "5"]]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_model_is_read_by_torchs_distributed_checkpoint(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    for step, options in ((3, []), (1, ["--step", 1, "--force"])):
        done = _run("export", run, output, "--dcp", *options)
        assert "for torch.distributed.checkpoint" in done.output
        state = {name: torch.full_like(value, -1.0) for name, value in _model(3).items()}
        load(state, checkpoint_id=output, no_dist=True)
        assert _same(state, _model(step))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in output.iterdir())
    refused = _run("export", run, output, "--dcp")
    assert (refused.exit_code, ".metadata already exists" in refused.output) == (2, True)


def test_one_form_at_a_time_and_a_folder_for_what_needs_one(run: Path, tmp_path: Path) -> None:
    refused = _run("export", run, tmp_path / "out", "--dcp", "--shards")
    assert "give one of them" in refused.output
    (tmp_path / "file").write_text("mine")
    for form in ("--dcp", "--shards"):
        refused = _run("export", run, tmp_path / "file", form, "--force")
        assert "is a file, and the model is written to a folder" in refused.output
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune", "export"])
def test_a_folder_without_checkpoints_is_one_line(tmp_path: Path, command: str) -> None:
    others: dict[str, list[object]] = {"prune": ["--last", 1], "export": [tmp_path / "a.pt"]}
    more = others.get(command, [])
    for folder, message in ((tmp_path, "no checkpoint there"), (tmp_path / "none", "no such folder")):
        done = _run(command, folder, *more)
        assert done.exit_code == 2
        assert done.output == f"lockstep checkpoint {command}: {folder}: {message}\n"


def test_a_manifest_that_lies_outside_is_not_followed(run: Path, tmp_path: Path) -> None:
    manifest = run / "step-00000003" / MANIFEST
    (tmp_path / "elsewhere").write_bytes(manifest.read_bytes())
    manifest.unlink()
    manifest.symlink_to(tmp_path / "elsewhere")
    assert "a link" in _run("verify", run, "--step", 3).output
    assert json.loads((tmp_path / "elsewhere").read_text())["step"] == 3


# Going back ----------------------------------------------------------------------------------------------------------


def test_rewind_sets_newer_ones_aside_and_loses_none(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 3}\n')
    before = {path.name: (path / MANIFEST).read_bytes() for path in run.glob("step-*")}
    told = holds(_run("rewind", run, "--to", 1, "--json").stdout, "lockstep.checkpoint.rewind/1")
    assert (told["target"], told["moved"]) == ("step-00000001", ["step-00000003", "step-00000002"])
    aside = run / "set-aside-1"
    assert told["aside"] == str(aside)
    assert aside.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000000", "step-00000001"]
    there = {path.name: (path / MANIFEST).read_bytes() for path in [*run.glob("step-*"), *aside.glob("step-*")]}
    assert there == before
    assert (aside / "metrics.jsonl").read_text() == '{"step": 3}\n', "a run that resumes drops its later lines"
    assert not (run / LOCK_FILE).exists()
    assert _run("verify", aside).exit_code == 0, "it has the form of a run's folder"
    _save(run, 2)
    again = _run("rewind", run, "--to", 0)
    assert "they are in " + str(run / "set-aside-2") in again.stdout
    undo = shlex.split(again.stdout.split("to undo it: ")[1])
    subprocess.run(undo, check=True)
    assert sorted(path.name for path in run.glob("step-*")) == [f"step-{step:08d}" for step in range(3)]


def test_rewind_changes_nothing_where_it_makes_no_sense(run: Path) -> None:
    def there() -> list[str]:
        return sorted(str(path.relative_to(run)) for path in run.rglob("*"))

    before = there()
    assert _run("rewind", run, "--to", 1, "--dry-run").stdout.startswith("would set aside step-00000003\n")
    assert "step-00000003 is the newest already" in _run("rewind", run, "--to", 3).stdout
    refused = _run("rewind", run, "--to", 7)
    assert (refused.exit_code, "no checkpoint there of step 7; there are" in refused.stderr) == (2, True)
    with reading(run / "step-00000003"):
        refused = _run("rewind", run, "--to", 1)
        assert (refused.exit_code, "step-00000003 is being read" in refused.stderr) == (2, True), refused.output
    assert there() == before
    _flip(run / "step-00000001" / MODEL)
    refused = _run("rewind", run, "--to", 1)
    assert "no run would resume from step 1, so nothing was set aside: " in refused.stderr
    assert there() == before


def test_rewind_leaves_a_folder_alone_in_which_a_job_trains(run: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom lockstep.checkpoint.locks import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "held\n"
        refused = _run("rewind", run, "--to", 1)
        job.communicate()
    assert (refused.exit_code, f"process {job.pid} on" in refused.stderr) == (2, True), refused.output
    assert len([*run.glob("step-*")]) == 4
    assert _run("rewind", run, "--to", 1).exit_code == 0


@pytest.mark.filterwarnings("ignore:the checkpoint step-.* holds values that are NaN:RuntimeWarning")
def test_rewind_refuses_values_that_are_not_finite(tmp_path: Path) -> None:
    _save(tmp_path / "run", 1)
    _save(tmp_path / "run", 2, model={"body.weight": torch.full((2, 3), math.nan)})
    _save(tmp_path / "run", 3)
    refused = _run("rewind", tmp_path / "run", "--to", 2)
    assert (refused.exit_code, "no run would resume from step 2" in refused.stderr) == (2, True), refused.output
