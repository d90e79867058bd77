"""Checkpoints in an object store: complete or absent, whatever request fails, and owned by one job."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import knobs
from lockstep._files import NoLocalPath, StorePath, run_path
from lockstep.checkpoint import blocks, inspect, lease, locks, object_store, plan, stored
from lockstep.checkpoint.blocks import TensorPart
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.lease import Lease, Sign
from lockstep.checkpoint.locks import Owner
from lockstep.checkpoint.object_store import ObjectStore, StoreFailed
from lockstep.checkpoint.read import copy_to_disk, find_damage, read, read_manifest
from lockstep.checkpoint.run_folder import run_folder
from lockstep.checkpoint.state import Moment
from lockstep.checkpoint.store_folder import StoreFolder
from lockstep.checkpoint.stored import Stored
from lockstep.errors import CheckpointCorrupt
from tests.checkpoints import State, save, some_tensors
from tests.stores import Clock, FragileFileSystem, in_memory

_WORLD_SIZE = 2


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of kilobytes take as many objects and reads as those of gigabytes; nothing waits for long."""
    monkeypatch.setattr(plan, "PIECE", 1024)
    monkeypatch.setattr(blocks, "BLOCK", 2048)
    monkeypatch.setattr(stored, "OBJECT", 3000)
    monkeypatch.setattr(object_store, "time", Clock())
    monkeypatch.setenv(knobs.TIMES, "0.002,lease=0.3")


@pytest.fixture
def root() -> Iterator[StorePath]:
    with in_memory() as path:
        yield path


@pytest.fixture
def fragile() -> Iterator[StorePath]:
    with in_memory("fragile") as path:
        yield path


def _state(step: int) -> State:
    """What all ranks hold alike, what rank 0 holds alone, and a tree."""
    weights = {name.replace(".", "_"): value for name, value in some_tensors(step, (500, 3, 1400)).items()}
    model = {**weights, "running": torch.full((300,), float(step))}
    parameters = frozenset(name for name in model if name != "running")
    return State(model, parameters, {"optimizer": {"m": [torch.ones(700) * step]}})


def _save(root: StorePath | Path, step: int, *, ranks: int = _WORLD_SIZE, keep: int | None = 2) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an old checkpoint that could not be removed is one
        return save(root, [_state(step)] * ranks, place=Moment(step, 0, False), keep=keep, in_turn=ranks > 1)


def _model() -> nn.ParameterDict:
    return nn.ParameterDict({name: torch.zeros_like(value) for name, value in _state(0).model.items()})


def _holds(model: nn.ParameterDict, step: int) -> bool:
    return all(torch.equal(model[name], value) for name, value in _state(step).model.items())


def _names(root: StorePath) -> list[str]:
    return [folder.name for folder in run_folder(root).checkpoints()]


# What is an address.


def test_an_address_keeps_its_slashes_and_is_no_path_of_the_disk() -> None:
    for given in ("s3://bucket/run", Path("s3://bucket/run"), "S3://bucket/run/"):
        path = run_path(given, "folder")
        assert isinstance(path, StorePath)
        assert not isinstance(path, Path)
        assert str(path) == "s3://bucket/run"
        assert (path.scheme, path.key) == ("s3", "bucket/run")
        assert str(path / "step-00000001") == "s3://bucket/run/step-00000001"
        assert str((path / "x").parent) == str(path)
        assert isinstance(path.parent, StorePath)
    assert run_path("runs/1", "folder") == Path("runs/1")


@pytest.mark.parametrize("given", ["s3://", "s3:///", "gs://bucket/../other", "file:///data/run", "C:\\runs"])
def test_what_names_no_place_in_a_store_is_refused(given: str) -> None:
    with pytest.raises(NoLocalPath, match=r"^folder="):
        run_path(given, "folder")


# Saving and reading.


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_save_to_a_store_reads_back_as_from_a_disk(root: StorePath, tmp_path: Path, ranks: int) -> None:
    (made, *others), (there, *_) = _save(root, 3, ranks=ranks), _save(tmp_path, 3, ranks=ranks)
    assert str(made) == "memory://bucket/run/step-00000003"
    assert all(other == made for other in others)
    stored_one, disk = read(made), read(there)
    assert stored_one.model.keys() == disk.model.keys()
    assert all(torch.equal(value, disk.model[name]) for name, value in stored_one.model.items())
    assert torch.equal(stored_one.parts["optimizer"]["m"][0], disk.parts["optimizer"]["m"][0])
    assert find_damage(made) == []
    assert replace(stored_one.manifest, stored=None, written="") == replace(disk.manifest, written=""), (
        "the same digests"
    )
    assert disk.manifest.stored is None
    model = _model()
    assert lockstep.load_weights(str(root), model).source == made
    assert _holds(model, 3)


def test_every_rank_writes_objects_of_its_own(root: StorePath) -> None:
    made = _save(root, 1, ranks=3)[0]
    objects = ObjectStore.opened("memory").sizes(made.key)
    manifest = read_manifest(made)
    assert manifest.stored is not None
    expected = manifest.stored.objects(manifest.parts)
    assert {name: size for name, size in objects.items() if name != MANIFEST} == expected
    wrote = {rank: sum(size for name, size in expected.items() if f"-{rank:05d}-" in name) for rank in range(3)}
    assert all(wrote.values())
    assert max(objects[name] for name in expected) == stored.OBJECT


def test_a_file_is_read_in_one_request_a_rank_though_their_blocks_alternate(root: StorePath) -> None:
    model = {f"layer{n:02}.{kind}": torch.full((200,), float(n)) for n in range(20) for kind in ("weight", "buffer")}
    state = State(model, frozenset(name for name in model if "weight" in name))
    made = save(root, [state] * 2, in_turn=True)[0]
    calls: list[str] = []
    store = ObjectStore.opened("memory")
    ranges = store.get_range
    store.get_range = lambda key, start, stop: calls.append(key) or ranges(key, start, stop)  # type: ignore[method-assign,func-returns-value]
    assert all(torch.equal(value, model[name]) for name, value in read(made).model.items())
    manifest = read_manifest(made)
    assert manifest.stored is not None
    alternating = len(manifest.stored.extents(manifest.parts)["model.safetensors"])
    assert alternating > 20 > len(calls)


def test_older_ones_are_pruned_and_a_second_save_of_a_step_has_another_name(root: StorePath) -> None:
    for step in (1, 2, 3, 3):
        _save(root, step)
    assert _names(root) == ["step-00000003-r2", "step-00000002"]
    left = {name.split("/")[0] for name in ObjectStore.opened("memory").sizes(root.key)}
    assert left == {"step-00000003-r2", "step-00000002"}, "removed with all their objects"


def test_damage_is_found_and_an_older_one_is_taken(root: StorePath) -> None:
    old, new = _save(root, 1)[0], _save(root, 2)[0]
    store = ObjectStore.opened("memory")
    victim = next(name for name in sorted(store.sizes(new.key)) if name != MANIFEST)
    whole = store.get(f"{new.key}/{victim}")
    store.put(f"{new.key}/{victim}", whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "its content has changed" in find_damage(new)[0]
    store.put(f"{new.key}/{victim}", whole[:-1])
    assert f"{victim}: {len(whole) - 1} bytes found, {len(whole)} expected" in find_damage(new)[0]
    store.remove([f"{new.key}/{victim}"])
    assert f"{victim}: it is missing" in find_damage(new)[0]
    model = _model()
    with pytest.warns(RuntimeWarning, match="step-00000001 is loaded; skipped: .*it is missing"):
        assert lockstep.load_weights(str(root), model).source == old
    assert _holds(model, 1)


def test_a_copy_on_a_disk_is_a_checkpoint_there_or_absent(root: StorePath, tmp_path: Path) -> None:
    _save(root, 1)
    _save(root, 2)
    for step in (1, 2):
        name = f"step-{step:08d}"
        copy_to_disk(root / name, tmp_path / name)
        assert find_damage(tmp_path / name) == []
        ours, theirs = read(tmp_path / name), read(root / name)
        assert ours.model.keys() == theirs.model.keys()
        assert all(torch.equal(value, theirs.model[key]) for key, value in ours.model.items())
        assert {file.stat().st_mode & 0o777 for file in (tmp_path / name).iterdir()} == {0o600}
    store = ObjectStore.opened("memory")
    damaged = next(key for key in store.sizes(root.key) if key.startswith("step-00000002/") and MANIFEST not in key)
    content = store.get(f"{root.key}/{damaged}")
    store.put(f"{root.key}/{damaged}", bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CheckpointCorrupt, match="its content has changed"):
        copy_to_disk(root / "step-00000002", tmp_path / "other")
    with pytest.raises(locks.CheckpointGone):
        copy_to_disk(root / "step-00000003", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_one_that_is_removed_while_it_is_read_makes_room_for_a_newer_one(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(root, 1)
    store, seen = ObjectStore.opened("memory"), []

    def prune_first(key: str, start: int, stop: int) -> bytes:
        monkeypatch.undo()
        seen.append(key)
        _save(root, 2, keep=1)
        return store.get_range(key, start, stop)

    reader = store.get_range

    def after_the_manifest(key: str, start: int, stop: int) -> bytes:
        return reader(key, start, stop) if key.endswith(MANIFEST) else prune_first(key, start, stop)

    monkeypatch.setattr(store, "get_range", after_the_manifest)
    model = _model()
    lockstep.load_weights(str(root), model)
    assert seen
    assert _holds(model, 2)


def test_ranks_that_have_written_elsewhere_are_found_before_the_commit(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(root, 1)
    put = ObjectStore.put

    def lose(self: ObjectStore, key: str, content: bytes) -> None:
        if "-00001-" not in key:
            put(self, key, content)

    monkeypatch.setattr(ObjectStore, "put", lose)
    made = _save(root, 2)
    assert all("objects that rank 1 has to have written are not where rank 0 looks" in str(error) for error in made)
    assert all(isinstance(error, lockstep.CheckpointError) for error in made)
    monkeypatch.undo()
    assert _names(root) == ["step-00000001"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefix", "../../../other/0"), ("prefix", 3), ("size", 0), ("size", "x"), ("term", None), ("files", []),
        ("files", [["model.safetensors", [[0, 1]]]]), ("files", 7),
    ],
)  # fmt: skip
def test_a_manifest_that_names_other_places_is_damaged(field: str, value: object) -> None:
    files = {"a.json": (TensorPart("", 0, 3, ("0" * 32,), (0,)),)}
    body = Stored.of(files, prefix="0" * 16, term=1).to_json()
    assert Stored.from_json(json.loads(json.dumps(body)), files=files, world_size=1).to_json() == body
    with pytest.raises(ValueError, match=r"places|beginning"):
        Stored.from_json({**body, field: value}, files=files, world_size=1)


def test_a_rank_beyond_the_world_is_no_place() -> None:
    files = {"a.json": (TensorPart("", 0, 3, ("0" * 32,), (0,)),)}
    body = Stored.of(files, prefix="0" * 16, term=1).to_json()
    for runs in ([[1, 1]], [[0, 2]], [[0, -1]], [[0]], [["0", 1]]):
        with pytest.raises(ValueError, match="places"):
            Stored.from_json({**body, "files": [["a.json", runs]]}, files=files, world_size=1)


# Requests that fail.


def _operations(root: StorePath) -> int:
    for step in (1, 2):
        _save(root, step)
    FragileFileSystem.mend()
    _save(root, 3)
    return len(FragileFileSystem.calls)


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done and not answered"])
def test_a_store_that_goes_away_at_any_request_loses_nothing(fragile: StorePath, *, after: bool) -> None:
    count = _operations(fragile)
    assert count > 20
    newest = {"step-00000002": 0, "step-00000003": 0}
    for number in range(count):
        with in_memory("fragile") as root:
            for step in (1, 2):
                _save(root, step)
            FragileFileSystem.mend()
            FragileFileSystem.fails_at, FragileFileSystem.after, FragileFileSystem.lasting = number, after, True
            made = _save(root, 3)
            failed = [isinstance(outcome, lockstep.CheckpointError) for outcome in made]
            assert all(failed) or not any(failed), f"the ranks do not agree: {made}"
            FragileFileSystem.mend()
            assert all(find_damage(folder) == [] for folder in run_folder(root).checkpoints()), number
            model = _model()
            source = lockstep.load_weights(str(root), model).source
            newest[source.name] += 1
            assert _holds(model, int(source.name[-1])), number
            assert source.name == "step-00000003" or all(failed), "a save that succeeded is there"
            assert not isinstance(_save(root, 4)[0], BaseException)
            assert find_damage(root / "step-00000004") == []
            assert inspect.leftovers(root) == [], number
    assert all(newest.values()), newest


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done and not answered"])
def test_a_request_that_fails_once_is_sent_again(fragile: StorePath, *, after: bool) -> None:
    for number in range(_operations(fragile)):
        with in_memory("fragile") as root:
            for step in (1, 2):
                _save(root, step)
            FragileFileSystem.mend()
            FragileFileSystem.fails_at, FragileFileSystem.after = number, after
            made = _save(root, 3)
            assert not isinstance(made[0], BaseException), (number, made)
            assert _names(root) == ["step-00000003", "step-00000002"]
            assert all(find_damage(folder) == [] for folder in run_folder(root).checkpoints())


def test_the_words_say_how_often_it_was_tried(fragile: StorePath) -> None:
    FragileFileSystem.fails_at, FragileFileSystem.lasting = 0, True
    with pytest.raises(StoreFailed, match=r"listing fragile://bucket/run: the store did not do it, 17 attempts in 56"):
        run_folder(fragile).checkpoints()


def test_a_commit_of_unknown_outcome_is_said_to_be_so(fragile: StorePath) -> None:
    _save(fragile, 1)
    FragileFileSystem.mend()
    _save(fragile, 2)
    commit = next(n for n, call in enumerate(FragileFileSystem.calls) if call.startswith("pipe") and MANIFEST in call)
    FragileFileSystem.mend()
    FragileFileSystem.fails_at, FragileFileSystem.after, FragileFileSystem.lasting = commit, True, True
    made = _save(fragile, 3)
    assert "It is not known whether the checkpoint step-00000003 is complete" in str(made[1])
    FragileFileSystem.mend()
    assert _names(fragile)[0] == "step-00000003"
    assert find_damage(fragile / "step-00000003") == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nothing://bucket/run", "fsspec knows no store of this kind"),
        ("sftp://host/run", r"(needs the package of fsspec|can't be given a limit)"),
        ("github://a:b@c/run", "can't be given a limit"),
    ],
)
def test_what_is_no_object_store_is_refused_in_words(url: str, words: str) -> None:
    with pytest.raises(StoreFailed, match=words):
        lockstep.load_weights(url, nn.Linear(1, 1))


def test_a_store_that_replaces_what_is_there_is_refused(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore.opened("memory")
    sound = store._fs.pipe_file
    monkeypatch.setattr(store._fs, "pipe_file", lambda path, value, **_: sound(path, value))
    with pytest.raises(StoreFailed, match="does not refuse to create an object that is there already"):
        StoreFolder(root).prepare()
    monkeypatch.undo()
    StoreFolder(root).prepare()
    assert store.sizes(root.key) == {}


def test_what_else_is_in_a_store_is_not_loaded(root: StorePath) -> None:
    ObjectStore.opened("memory").put(f"{root.key}/model.safetensors", b"x")
    with pytest.raises(lockstep.CheckpointError, match="copy other files to a disk first"):
        lockstep.load_weights(str(root / "model.safetensors"), nn.Linear(1, 1))


# The owner.


def test_one_job_owns_a_folder_and_the_next_one_has_the_next_term(root: StorePath) -> None:
    first = StoreFolder(root).hold()
    second = Lease(root)
    assert (first.term, second.term) == (1, 1), "two Checkpointers of one process"
    assert inspect.owner(root) == replace(Owner.this_process(), since=inspect.owner(root).since)  # type: ignore[union-attr]
    made = _save(root, 1)[0]
    manifest = read_manifest(made)
    assert manifest.stored is not None
    assert manifest.stored.term == 1
    first.release()
    assert inspect.owner(root) is not None
    second.release()
    assert inspect.owner(root) is None
    third = Lease(root)
    assert third.term == 2
    assert lease.terms(ObjectStore.opened("memory"), root) == [2], "earlier ones are removed"
    third.release()


def _elsewhere(root: StorePath, **changes: Any) -> Sign:
    """The sign of an owner on another machine, of the term 7."""
    owner = replace(Owner.this_process(), host="elsewhere", pid=17, **changes)
    sign = Sign(owner, "f" * 16)
    ObjectStore.opened("memory").put(f"{root.key}/owner-00000007.json", sign.to_json())
    return sign


def test_an_owner_that_gives_signs_of_life_is_named(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    sign, store, over = _elsewhere(root), ObjectStore.opened("memory"), threading.Event()

    monkeypatch.setenv(knobs.TIMES, "0.002,lease=600")

    def live() -> None:
        beat = 0
        while not over.wait(0.005):
            beat += 1
            store.put(f"{root.key}/owner-00000007.json", replace(sign, beat=beat).to_json())

    owner = threading.Thread(target=live)
    owner.start()
    try:
        with pytest.raises(lockstep.CheckpointError, match="belongs to another job, process 17 on elsewhere"):
            Lease(root)
    finally:
        over.set()
        owner.join()
    assert lease.terms(store, root) == [7]


@pytest.mark.parametrize("look", ["before the first look", "after a look"])
def test_an_observer_that_stood_still_itself_takes_nobody_for_silent(
    root: StorePath, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    sign, clock, get = _elsewhere(root), Clock(), ObjectStore.get
    looks, beats = count(1), count(1)
    monkeypatch.setattr(lease, "time", clock)

    def live(self: ObjectStore) -> None:
        clock.sleep(1.0)  # longer than a lease
        self.put(f"{root.key}/owner-00000007.json", replace(sign, beat=next(beats)).to_json())

    def read(self: ObjectStore, key: str) -> bytes:
        number = next(looks)
        if number > 2 or (number == 1 and look == "before the first look"):
            live(self)
        content = get(self, key)
        if number == 2 and look == "after a look":
            live(self)
        return content

    monkeypatch.setattr(ObjectStore, "get", read)
    with pytest.raises(lockstep.CheckpointError, match="belongs to another job, process 17 on elsewhere"):
        Lease(root)


@pytest.mark.parametrize("how", ["silent", "released", "gone", "superseded"])
def test_a_folder_without_a_living_owner_is_taken(root: StorePath, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    sign = _elsewhere(root, job="one", round=3)
    store = ObjectStore.opened("memory")
    if how == "released":
        store.put(f"{root.key}/owner-00000007.json", replace(sign, released=True).to_json())
    elif how == "gone":
        gone = replace(Owner.this_process(), start=1)
        store.put(f"{root.key}/owner-00000007.json", replace(sign, owner=gone).to_json())
    elif how == "superseded":
        monkeypatch.setenv(knobs.ROUND, "one 4")
        monkeypatch.setattr(locks, "SUCCESSION", 0.05)
    if how != "silent":
        monkeypatch.setenv(knobs.TIMES, "0.002,lease=600")
    held = Lease(root)
    assert held.term == 8
    held.check()
    held.release()


def test_an_owner_that_was_only_slow_is_fenced(root: StorePath) -> None:
    held = StoreFolder(root).hold()
    folder = StoreFolder(root)
    draft = folder.draft(5, [])
    folder.write(draft.token, 0, [plan.Block("a", 0, memoryview(b"abc"))])
    held.check()
    # The next owner comes now, from elsewhere.
    store = ObjectStore.opened("memory")
    store.create(f"{root.key}/owner-00000002.json", _elsewhere(root).to_json())
    store.remove([f"{root.key}/owner-00000007.json"])
    type(draft)._alive.clear()
    folder._sweep()
    with pytest.raises(lockstep.CheckpointError, match="has another owner by now, process 17 on elsewhere"):
        held.check()
    manifest = read_manifest(_save(root / "other", 5, ranks=1)[0])
    with pytest.raises(lockstep.CheckpointError, match=r"not where rank 0 looks|has ended this save"):
        draft.commit(manifest)
    assert folder.checkpoints() == []
    assert folder.leftovers() == []
    assert _save(root, 5)[0].name == "step-00000005-r2", "the name is taken"
    held.release()


def test_a_commit_whose_draft_was_ended_fails(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    create = ObjectStore.create

    def be_late(self: ObjectStore, key: str, content: bytes) -> bool:
        if key.endswith(MANIFEST) and content:
            monkeypatch.undo()
            create(self, key, b"")
        return create(self, key, content)

    monkeypatch.setattr(ObjectStore, "create", be_late)
    made = _save(root, 1)
    assert all(
        "another owner of memory://bucket/run has ended this save before its commit" in str(each) for each in made
    )
    assert _names(root) == []


def test_of_many_that_want_a_term_one_gets_it(root: StorePath) -> None:
    store, own = ObjectStore.opened("memory"), Owner.this_process()
    for number in range(20):
        barrier = threading.Barrier(4)
        made: list[bool] = []

        def race(who: int, number: int = number, barrier: Any = barrier, made: list[bool] = made) -> None:
            barrier.wait()
            made.append(store.create(f"{root.key}/owner-{number:08d}.json", Sign(own, str(who)).to_json()))

        threads = [threading.Thread(target=race, args=(who,)) for who in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sorted(made) == [False, False, False, True]


def test_a_late_creator_of_an_old_term_withdraws(root: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore.opened("memory")
    listing = lease.terms
    first: list[bool] = []

    def out_of_date(store: ObjectStore, root: StorePath) -> list[int]:
        if not first:
            first.append(True)
            return []
        return listing(store, root)

    sign = _elsewhere(root)
    store.put(f"{root.key}/owner-00000007.json", replace(sign, released=True).to_json())
    monkeypatch.setattr(lease, "terms", out_of_date)
    held = Lease(root)
    assert held.term == 8
    assert listing(store, root) == [8]
    held.release()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"owner": {}, "nonce": "x"}', b"\xff", b"7"])
def test_an_owner_that_can_not_be_read_counts_until_it_is_silent(root: StorePath, content: bytes) -> None:
    assert Sign.from_json(content) is None
    ObjectStore.opened("memory").put(f"{root.key}/owner-00000001.json", content)
    held = Lease(root)
    assert held.term == 2
    held.release()
