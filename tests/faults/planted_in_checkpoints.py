"""Faults that somebody might make in the writing and reading of checkpoints."""

from __future__ import annotations

from tests.faults.planting import Fault

_CRASHES = ("tests/faults/test_crash_states.py",)
_DAMAGE = ("tests/faults/test_damage.py",)
_HOSTILE = ("tests/unit/test_hostile_checkpoints.py",)
_SHARING = ("tests/unit/test_sharing.py",)
_STORES = ("tests/unit/test_stores.py",)

CHECKPOINT_FAULTS = [
    Fault(
        "a file is not fsynced",
        "checkpoint/disk_folder.py",
        "        on.sync(file)\n        on.close(file)\n    return -1\n",
        "        on.close(file)\n    return -1\n",
        _CRASHES,
    ),
    Fault(
        "a draft's folder is not fsynced",
        "checkpoint/disk_folder.py",
        "            self._on.sync(self._folder)\n",
        "            pass\n",
        _CRASHES,
    ),
    Fault(
        "the run's folder is not fsynced",
        "checkpoint/disk_folder.py",
        "                folders.sync_folder(self._root, on=self._on)\n",
        "                pass\n",
        _CRASHES,
    ),
    Fault(
        "a draft is renamed before its manifest is written",
        "checkpoint/disk_folder.py",
        "        self._write_manifest(manifest_bytes(manifest, where=str(self.path)))\n"
        "        with named(self.path):\n            self._on.sync(self._folder)\n"
        "        whole = self._root / self._name\n        self._on.rename(self.path, whole)\n",
        "        whole = self._root / self._name\n        self._on.rename(self.path, whole)\n"
        "        self._write_manifest(manifest_bytes(manifest, where=str(whole)))\n"
        "        self._on.sync(self._folder)\n",
        _CRASHES,
    ),
    Fault(
        "files of an old checkpoint go before its name has gone",
        "checkpoint/folders.py",
        "        sync_folder(folder.parent, on=on)\n        yield leftover\n",
        "        yield leftover\n",
        _CRASHES,
    ),
    Fault(
        "a digest is not compared",
        "checkpoint/read.py",
        "        if digest.hexdigest() != expected:\n",
        "        if not digest.hexdigest():\n",
        _DAMAGE,
    ),
    Fault(
        "the wrong ranks' digests are taken",
        "checkpoint/plan.py",
        "theirs = [iter(own) for own in digests]\n",
        "theirs = [iter(own) for own in digests[::-1]]\n",
        _SHARING,
    ),
    Fault(
        "buffers are taken from all ranks",
        "checkpoint/safetensors.py",
        "written if alike is None else alike",
        "written",
        _SHARING,
    ),
    Fault(
        "replicas that have drifted apart are mixed",
        "checkpoint/plan.py",
        "if not all(theirs.fits(name, main) for theirs in outlines)}\n",
        "if not all(name in theirs.layouts for theirs in outlines)}\n",
        _SHARING,
    ),
    Fault(
        "links are followed",
        "checkpoint/storage.py",
        "access | os.O_NOFOLLOW | os.O_NONBLOCK",
        "access | os.O_NONBLOCK",
        _HOSTILE,
    ),
    Fault(
        "a key may occur twice",
        "checkpoint/encoding.py",
        "    if len(found) != len(pairs):\n",
        "    if len(found) > len(pairs):\n",
        _HOSTILE,
    ),
    Fault(
        "anybody's checkpoint is taken",
        "checkpoint/restore.py",
        "owners=owners, ",
        "",
        _HOSTILE,
    ),
    Fault(
        "a failed write is not noticed by the other ranks",
        "checkpoint/save.py",
        "            draft.discard()\n        peers.gather(None)\n        raise\n",
        "            draft.discard()\n        return root\n",
        ("tests/faults/test_failing_operations.py", "-k", "some_operations"),
    ),
    Fault(
        "older checkpoints go before the new one is there",
        "checkpoint/save.py",
        "        path = draft.commit(",
        "        from lockstep.checkpoint import folders\n"
        "        for old in folders.checkpoints(root, on=on):\n"
        "            with folders.renamed(old, on=on) as gone:\n"
        "                folders.remove_tree(gone, on=on)\n"
        "        path = draft.commit(",
        _CRASHES,
    ),
    Fault(
        "blocks are written where others belong",
        "checkpoint/plan.py",
        "yield block.start + start, piece",
        "yield start, piece",
        ("tests/ranks/test_checkpointer.py",),
    ),
    Fault(
        "a commit in a store replaces what is there",
        "checkpoint/object_store.py",
        'self._do("pipe_file", key, content, mode="create")',
        'self._do("pipe_file", key, content)',
        _STORES,
    ),
    Fault(
        "a creation whose answer was lost counts as another's",
        "checkpoint/object_store.py",
        "                return there == content\n",
        "                return False\n",
        _STORES,
    ),
    Fault(
        "the objects of an old checkpoint in a store go before its manifest",
        "checkpoint/store_folder.py",
        '        self._store.remove([f"{self._key(name)}/{MANIFEST}"])\n'
        '        self._store.remove(f"{self._key(name)}/{other}" for other in objects if other != MANIFEST)\n',
        '        self._store.remove(f"{self._key(name)}/{other}" for other in objects if other != MANIFEST)\n'
        '        self._store.remove([f"{self._key(name)}/{MANIFEST}"])\n',
        _STORES,
    ),
    Fault(
        "the drafts of a displaced owner are not ended",
        "checkpoint/store_folder.py",
        'not self._store.create(f"{self._key(name)}/{MANIFEST}", b"")',
        "not objects",
        _STORES,
    ),
    Fault(
        "an owner does not see that its term is over",
        "checkpoint/lease.py",
        "        if number == [self.term]:\n",
        "        if number:\n",
        _STORES,
    ),
    Fault(
        "a silent owner keeps a folder in a store for ever",
        "checkpoint/lease.py",
        "        elif waited > times.lease:\n            return\n",
        "        elif waited > times.lease:\n            raise CheckpointError(f'{root} belongs to another job')\n",
        _STORES,
    ),
    Fault(
        "a checkpoint in a store is taken though objects are missing",
        "checkpoint/store_folder.py",
        "        self._refuse_missing(manifest)\n",
        "",
        _STORES,
    ),
    Fault(
        "a checkpoint that is removed while it is read counts as damaged",
        "checkpoint/read.py",
        "            if isinstance(error, CheckpointError):  # damage",
        "            if isinstance(error, CheckpointCorrupt):  # damage",
        _STORES,
    ),
]
