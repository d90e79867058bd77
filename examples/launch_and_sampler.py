"""The form "launcher + DistributedSampler + DistributedDataParallel", as written for torch, with lockstep's imports.

    python -m lockstep.launch --nproc_per_node=2 examples/launch_and_sampler.py
    CUDA_VISIBLE_DEVICES=0,1 lockstep run -n 2 --all-output examples/launch_and_sampler.py

No process group to name, no device to choose, no threads to divide: ``lockstep.init()`` takes NCCL and a GPU
for each rank where there are GPUs; where there are none, shared memory (gloo between machines) and a part of the cores.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep import DistributedDataParallel as DDP
from lockstep import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument(
    "--local_rank", default=-1, type=int, help="passed by the launcher; lockstep needs no one to read it"
)
args = parser.parse_args()

input_size, output_size = 5, 2
batch_size, data_size = 30, 90


class RandomDataset(Dataset[torch.Tensor]):
    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class Model(nn.Module):
    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc(batch)
        return output


world = lockstep.init()
print(f"rank {world.rank}: {torch.get_num_threads()} CPU thread(s), device {world.device}")

dataset = RandomDataset(input_size, data_size)
loader = DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset))
on_gpu = world.device.type == "cuda"
model = DDP(
    Model(input_size, output_size).to(world.device),
    device_ids=[world.local_rank] if on_gpu else None,
    output_device=world.local_rank if on_gpu else None,
)

for data in loader:
    output = model(data.to(world.device))
    print(f"Model {world.rank}, input size: {data.size()}, output size: {output.size()}")
