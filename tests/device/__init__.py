"""A simulated device, for tests on machines without a GPU: CUDA's, or a plugin's.

torch's build for the CPU leaves the dispatch key CUDA free. The C++ files here register kernels, a guard, hooks, an
allocator and generators for it (``device.cpp``), and a backend of torch.distributed with NCCL's manners
(``collectives.hpp``), so that ``cuda:0`` and ``cuda:1`` are there and programs for GPUs run unchanged. Order and
lifetime are simulated, and nothing else: streams are threads that run torch's own CPU kernels, as unevenly as a test
wants; memory can't be read by the host, and is poisoned and handed out again as soon as it is freed. How fast a GPU
is, what cuDNN and cuBLAS compute, how NCCL hangs and what a driver refuses can't be
seen here. A collective whose time is up ends its process as the watchdog of torch's process group does, in its words.

``build.py`` compiles it once for each version of torch. A process has it if it imports ``tests`` before torch and
``SIMULATED_DEVICES`` is in its environment (``start.py``); ``simulation.py`` is what tests use.

With ``SIMULATED_AS=plugin`` the same device has the key that torch leaves to plugins, PrivateUse1, and comes as they
do: of a kind "sim" with a backend "simccl", without a word of CUDA (``plugin.py``).
"""
