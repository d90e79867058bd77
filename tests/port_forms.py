"""Scripts as people write them for torch and for other libraries, which the tests of ``lockstep port`` port."""

from __future__ import annotations

_MODEL = """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))  # small

    def forward(self, x):
        return self.layers(x)


def make_data(count):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))

"""

#: torchrun, everything at the top level; prints what its training comes to.
TORCHRUN = f'''\
"""Train under torchrun."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
{_MODEL}
# the process group
dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
torch.manual_seed(7)
data = make_data(96)

sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(
    data,
    batch_size=8,  # of each rank
    sampler=sampler,
    num_workers=0,
)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * dist.get_world_size())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
dist.barrier()
if dist.get_rank() == 0:
    print("sum", sum(p.abs().sum().item() for p in model.module.parameters()))
dist.destroy_process_group()
'''

#: ``mp.spawn``, classes, a checkpoint of rank 0; what it needs goes through arguments and attributes.
SPAWN = f"""\
import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
{_MODEL}
def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


class Trainer:
    def __init__(self, model, loader, rank):
        self.rank = rank
        self.loader = loader
        self.model = DDP(model.to(rank), device_ids=[rank])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                x, y = x.to(self.rank), y.cuda(self.rank, non_blocking=True)
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
            if self.rank == 0:
                torch.save(self.model.module.state_dict(), "model.pt")


def make_loader(data, batch_size):
    return DataLoader(data, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(data))


def main(rank, world_size, epochs, batch_size):
    setup(rank, world_size)
    trainer = Trainer(Net(), make_loader(make_data(64), batch_size), rank)
    trainer.run(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    world_size = torch.cuda.device_count()
    mp.spawn(main, args=(world_size, args.epochs, 8), nprocs=world_size)
"""

#: ``torch.distributed.launch``: an option --local_rank; the wrapper's own names go to a file.
LAUNCH = f"""\
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
{_MODEL}
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
torch.cuda.set_device(args.local_rank)
dist.init_process_group(backend="nccl", init_method="env://")
device = torch.device("cuda", args.local_rank)
data = make_data(64)
loader = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=True, seed=5), drop_last=True)
model = nn.parallel.DistributedDataParallel(Net().to(device), device_ids=[args.local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
if args.local_rank == 0:
    torch.save(model.state_dict(), "model.pt")
"""

#: Distributed only under a launcher.
SOMETIMES = f"""\
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
{_MODEL}
distributed = int(os.environ.get("RANK", -1)) != -1
if distributed:
    init_process_group("gloo")
data = make_data(64)
sampler = DistributedSampler(data) if distributed else None
loader = DataLoader(data, batch_size=8, shuffle=sampler is None, sampler=sampler)
model = Net()
if distributed:
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    model.require_backward_grad_sync = True
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
if distributed:
    destroy_process_group()
"""

HOROVOD = f"""\
import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
{_MODEL}
hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
data = make_data(64)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = Net()
# scaled by the number of processes
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            # averaged already
            optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss")
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    if hvd.rank() == 0:
        print(epoch, mean.item(), total.item())
"""

ACCELERATE = f"""\
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
{_MODEL}
def make_loaders(accelerator: Accelerator, batch_size):
    with accelerator.main_process_first():
        data = make_data(96)
    return DataLoader(data, batch_size=batch_size, shuffle=True), DataLoader(data, batch_size=2 * batch_size)


def evaluate(accelerator, model, loader):
    right = count = 0
    for x, y in loader:
        with torch.no_grad():
            outputs = model(x)
        outputs, y = accelerator.gather_for_metrics((outputs, y))
        right += ((outputs - y).abs() < 1).sum().item()
        count += len(y)
    return right / count


def main():
    accelerator = Accelerator()
    train_loader, test_loader = make_loaders(accelerator, 8)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    for epoch in range(2):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        accelerator.print(f"epoch {{epoch}}: {{evaluate(accelerator, model, test_loader):.3f}}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
"""

FABRIC = f"""\
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{_MODEL}
def main():
    fabric = Fabric(accelerator="auto", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(11)
    loader = DataLoader(make_data(96), batch_size=8, shuffle=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for number, (x, y) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss / 2)
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    fabric.print(
        "loss",
        fabric.all_reduce(loss.detach(), reduce_op="mean").item(),
    )
    fabric.save("model.pt", model.state_dict())


main()
"""

#: One device; figures of the training loop, an evaluation, a file.
ONE_DEVICE = f"""\
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{_MODEL}
def train(model, device, loader, optimizer, epoch):
    model.train()
    total, seen = 0.0, 0
    for number, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        seen += x.size(0)
        if number % 4 == 0:
            print(f"epoch {{epoch}}: {{number}}/{{len(loader)}} loss {{loss.item():.4f}}")  # now and then
    print("mean", total / seen)


def test(model, device, loader):
    model.eval()
    wrong = 0.0
    with torch.no_grad():
        for x, y in loader:
            wrong += nn.functional.mse_loss(model(x.to(device)), y.to(device), reduction="sum").item()
    print(f"test: {{wrong / len(loader.dataset):.5f}}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(make_data(100), batch_size=16, shuffle=True)
    test_loader = DataLoader(make_data(50), batch_size=25)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        train(model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
"""

#: DataParallel, a batch norm, ``.cuda()``, at the top level.
DATA_PARALLEL = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = DataLoader(data, batch_size=16)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in loader:
    optimizer.zero_grad()
    outputs = model(x.cuda())
    loss = nn.functional.mse_loss(outputs, y.cuda())
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    print("largest", outputs.max().item())
"""

#: Name -> script.
FORMS = {
    "torchrun": TORCHRUN,
    "spawn": SPAWN,
    "launch": LAUNCH,
    "sometimes": SOMETIMES,
    "horovod": HOROVOD,
    "accelerate": ACCELERATE,
    "fabric": FABRIC,
    "one_device": ONE_DEVICE,
    "data_parallel": DATA_PARALLEL,
}
