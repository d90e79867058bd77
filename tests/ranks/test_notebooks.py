"""``%%ranks`` in a real kernel, and the notebooks of the examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep import knobs
from tests.kernel import Shown, Step, execute, execute_notebook
from tests.launching import gone_within

pytest.importorskip("jupyter_client", reason="not in the environments of other versions of torch")

_PIDS = "%ranks"
_NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def _pids(shown: Shown) -> list[int]:
    return [int(pid) for pid in re.findall(r"\d+", shown.stdout.partition("(")[2])]


def test_cells_run_on_ranks_that_live_on(tmp_path: Path) -> None:
    (
        _,
        first,
        second,
        failed,
        other_size,
        pids,
        interrupted,
        after,
        _,
        dead,
        fresh,
        wrong,
        closed,
    ) = execute(
        [
            "%load_ext lockstep",
            "%%ranks -n 2\nimport os\nrank = int(os.environ['RANK'])\nprint('here is', rank)\nx = 40\nx + rank",
            "%%ranks\nimport sys\nprint('error <b>', rank, file=sys.stderr)\nx += 1;",
            "%%ranks\ndef f():\n    raise ValueError(f'on {rank}')\nif rank == 1:\n    f()",
            "%%ranks -n 3\nrank",
            _PIDS,
            Step("%%ranks\nimport time\nprint('now', flush=True); time.sleep(1000)", interrupt_at="now"),
            "%%ranks\nx, rank",
            "def of_the_kernel(): pass",
            "%%ranks\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(1000)",
            "%%ranks\n'x' in globals()",
            "%%ranks -m 3\n1",
            "%ranks --close",
        ],
        cwd=tmp_path,
        **{knobs.PRELOAD: ""},
    )
    assert (first.stdout, first.value) == ("here is 0\n", "40")
    assert [each["text/plain"] for each in first.displayed] == ["rank 1: 1 line\nhere is 1\n"]
    assert first.displayed[0]["text/html"].startswith("<details><summary>rank 1: 1 line</summary>")
    assert (second.stderr, second.value) == ("error <b> 0\n", None)
    assert "error &lt;b&gt; 1" in second.displayed[0]["text/html"]

    assert failed.error.splitlines() == [
        "CellFailed: rank 1 failed: ValueError: on 1",
        "Traceback (most recent call last):",
        '  File "<cell 3>", line 4, in <module>',
        "    f()",
        '  File "<cell 3>", line 2, in f',
        "    raise ValueError(f'on {rank}')",
        "ValueError: on 1",
    ]
    assert not other_size.ok
    assert "2 ranks live, and a world keeps its size. Add --new" in other_size.stderr
    assert not interrupted.ok
    assert re.search(r"time\.sleep\(1000\)\n( +\^+\n)?KeyboardInterrupt", interrupted.error), interrupted
    assert after.value == "(41, 0)"
    assert dead.error.startswith("RankFailed: rank 1 of 2 failed: killed by signal 9 (SIGKILL)")
    assert fresh.value == "False"
    assert "these are new ranks, without the variables of the last ones: rank 1 of 2 failed" in fresh.stderr
    assert not wrong.ok
    assert "-m" in wrong.stderr
    assert closed.ok
    assert gone_within(_pids(pids), 0.0) == []


def test_a_hundred_cells_leave_nothing_in_the_kernel(tmp_path: Path) -> None:
    held = "import os, threading\nlen(os.listdir('/proc/self/fd')) + threading.active_count()"
    run = "get_ipython().run_cell_magic('ranks', '', 'print(1)\\n[2]')"
    found = execute(
        [
            "%load_ext lockstep",
            "%%ranks -n 2\nx = 1",
            f"for _ in range(5): assert {run} == [2]",  # what the first cells open stays open
            held,
            f"for _ in range(100): assert {run} == [2]",
            held,
        ],
        cwd=tmp_path,
        **{knobs.PRELOAD: ""},
    )
    assert all(each.ok for each in found)
    # A kernel opens and closes files of its own all the time; a hundred cells that left one each would be a hundred.
    assert int(found[5].value or "") < int(found[3].value or "") + 10


@pytest.mark.parametrize("how", ["kill", "restart", "shutdown"])
def test_a_kernel_that_ends_leaves_no_rank_behind(how: str, tmp_path: Path) -> None:
    start = "%%ranks -n 2\nimport time"
    load = "%load_ext lockstep"
    found = execute([load, start, _PIDS, how], cwd=tmp_path, **{knobs.PRELOAD: ""})
    assert all(each.ok for each in found)
    pids = _pids(found[2])
    assert len(pids) == 2
    assert gone_within(pids, 10.0) == []


def test_spawn_calls_a_function_that_was_typed_in_a_cell(tmp_path: Path) -> None:
    define, called, kept = execute(
        [
            "import lockstep\nscale = 3\nclass Point:\n    moves = 0\n    def __init__(self, x): self.x = x\n"
            "    def scaled(self): return scale * self.x\n"
            "def move(rank, point):\n    Point.moves += 1\n    return Point(point.scaled() + rank)",
            "moved = lockstep.spawn(move, (Point(5),), nprocs=2)\n"
            "[each.x for each in moved], all(type(each) is Point for each in moved)",
            "scale = 10\nmoved[0].scaled(), Point.moves",  # the class is the notebook's as ever
        ],
        cwd=tmp_path,
        **{knobs.PRELOAD: ""},
    )
    assert (define.ok, called.error, called.value) == (True, "", "([15, 16], True)")
    assert (kept.error, kept.value) == ("", "(150, 0)")


def _texts(notebook: Any) -> list[str]:
    """What each cell of code shows, as text."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            parts = []
            for output in cell.outputs:
                if output.output_type == "stream":
                    parts.append(output.text)
                elif output.output_type == "error":
                    parts += output.traceback
                else:
                    parts.append(output.data["text/plain"])
            found.append("\n".join(parts))
    return found


def test_the_notebook_on_training(tmp_path: Path) -> None:
    _, first, _, trained, figure, value, here, same, closed = _texts(
        execute_notebook(_NOTEBOOKS / "train.md", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    )
    assert first.splitlines()[0].startswith("rank 0 of 2, on cpu; threads: ")
    assert "rank 1: 1 line\nrank 1 of 2, on cpu; threads: " in first
    losses = [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", trained.partition("rank 1:")[0])]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    assert figure == "<Figure>"
    assert "'weight': tensor(" in value
    assert here.endswith("torch.Size([64, 2]))")
    assert same == "True"
    assert closed.startswith("no ranks;")


def test_the_notebook_on_trouble(tmp_path: Path) -> None:
    _, _, error, after, left_out, late, dead, fresh, other, more = _texts(
        execute_notebook(_NOTEBOOKS / "trouble.md", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    )
    assert error.startswith("CellFailed: rank 1 failed: ValueError: 2.0 is too large\n")
    assert after == "tensor([3.])"
    assert left_out.startswith("rank 0 saves")
    assert "rank 1 has come to the end of the cell without that call" in left_out
    assert "rank 1 of 2 has held up the others" in late
    assert "RankFailed: rank 1 of 2 failed: killed by signal 9" in dead  # (that the late rank moved on may come first)
    assert fresh.endswith("False")
    assert "Add --new to end them" in other
    assert more == "3"


def test_the_cells_of_the_page(tmp_path: Path) -> None:
    page = (_NOTEBOOKS.parents[1] / "docs" / "notebooks.md").read_text()
    cells: list[Step | str] = re.findall(r"```ipython\n(.*?)```", page, re.DOTALL)
    found = execute(cells, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert [each.error for each in found] == [""] * 4
    assert found[1].stdout == "rank 0 on cpu\n"
    assert float(found[2].value or "") > 0
    assert found[3].value == "[30, 31]"
