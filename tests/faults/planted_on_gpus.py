"""Faults in lines about streams, lifetimes of memory, devices and generators, which no test on a CPU can notice."""

from __future__ import annotations

from tests.faults.planting import Fault

_TRAINING = "tests/ranks/test_gpu_training.py"

GPU_FAULTS = [
    Fault(
        "a batch is used before it is copied",
        "data/device.py",
        "    current.wait_event(copied)  # the event",
        "    # the event",
        (_TRAINING, "-k", "there_when_they_are_used"),
    ),
    Fault(
        "a batch's memory goes to the next one while it is read",
        "data/device.py",
        "                part.record_stream(current)",
        "                pass",
        (_TRAINING, "-k", "test_training_on_two_gpus and plain or there_when_they_are_used"),
    ),
    Fault(
        "an average is used before it is made",
        "ddp/backward.py",
        '            wait_for(wait, what, name="averaging gradients")',
        "            pass",
        (_TRAINING, "-k", "test_training_on_two_gpus and plain"),
    ),
    Fault(
        "a save in the background writes what is not copied yet",
        "checkpoint/plan.py",
        "            for event in one.ready:\n                event.synchronize()\n",
        "",
        (_TRAINING, "-k", "save_beside"),
    ),
    Fault(
        "a save writes a block that is not copied yet",
        "checkpoint/plan.py",
        "            self.copied.synchronize()\n",
        "            pass\n",
        ("tests/unit/test_chunks.py", "-k", "copied_ahead"),
    ),
    Fault(
        "a GPU's random numbers are not restored",
        "checkpoint/state.py",
        "        accelerator.set_rng_state(_bytes(of_device), device)",
        "        pass",
        (_TRAINING, "-k", "resumed"),
    ),
    Fault(
        "flags of a comparison are read before they are there",
        "accelerator.py",
        "            self._copied.synchronize()",
        "            pass",
        (_TRAINING, "-k", "replicas_that_differ"),
    ),
    Fault(
        "all ranks draw the same on their GPUs",
        "comm/init.py",
        "        accelerator.seed(int(own), device)",
        "        pass",
        (_TRAINING, "-k", "numbers_of_its_own"),
    ),
    Fault(
        "no rank has a current GPU of its own",
        "comm/init.py",
        "    accelerator.use(device)\n",
        "",
        (_TRAINING, "-k", "numbers_of_its_own"),
    ),
    Fault(
        "a slice's random numbers on a GPU depend on its rank",
        "data/steps.py",
        "            accelerator.seed(seed & (2**63 - 1), self._world.device)",
        "            pass",
        (_TRAINING, "-k", "slices_on_gpus"),
    ),
    Fault(
        "a flag is read while a graph is captured",
        "ddp/guard.py",
        "        if self._is_captured():\n            return\n",
        "",
        (_TRAINING, "-k", "in_a_graph"),
    ),
    Fault(
        "an event is asked while a graph is captured",
        "job/device.py",
        "self._steps_seen % EVERY == 0 and self._device.can_record():",
        "self._steps_seen % EVERY == 0:",
        ("tests/unit/test_job_device.py", "-k", "captured_in_any_step"),
    ),
    Fault(
        "a replica computes in another stream than its caller",
        "data_parallel/threads.py",
        "                    stack.enter_context(self._stream)\n",
        "",
        ("tests/unit/test_dp_streams.py",),
    ),
    Fault(
        "a replica's gradients are expected in the stream of its own device",
        "data_parallel/replicas.py",
        "torch.empty(0, device=ctx.devices[0])",
        "torch.empty(0, device=copies[0].device)",
        ("tests/unit/test_dp_streams.py",),
    ),
    Fault(
        "gradients of a replica are packed in a stream that they were not made in",
        "data_parallel/replicas.py",
        "                stack.enter_context(stream)",
        "                pass",
        ("tests/unit/test_dp_streams.py",),
    ),
    Fault(
        "a flag of gradients is read before it is there",
        "accelerator.py",
        "            self._copied.synchronize()",
        "            pass",
        (_TRAINING, "-k", "not_finite_are_told"),
    ),
]
