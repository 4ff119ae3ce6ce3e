"""Train a small network on scikit-learn's handwritten digits, on any number of workers, and survive the loss of one.

    reknit run --standalone --nproc-per-node=2 --max-restarts=2 examples/train_digits.py --fail-at-epoch=3

It is an ordinary DDP script (torchrun runs it as well) and shows what an elastic one needs:

- The process group comes from the environment alone: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
- All progress is in a checkpoint. Rank 0 writes it after every epoch, to a temporary file that then takes the place of
  the old one, so a worker killed while writing leaves the last good one behind.
- Rank 0 alone reads it and hands it to the others: they agree on where to go on even if they cannot see its disk. On
  several nodes, put the checkpoint where any of them could be rank 0 next time.
- What an epoch does is a function of the seed, the epoch and the size of the world, not of what happened before: the
  same batches in the same order, dealt out to however many workers this round has.

`--fail-at-epoch` makes one worker die in the middle of that epoch, before the first restart only.
"""

import argparse
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

SEED = 1797
BATCH = 64  # of the whole group: the learning curve does not depend on the number of workers


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train on handwritten digits, elastically.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoint", type=Path, help="default: a file of this job in the folder for temporary files")
    parser.add_argument("--require-accuracy", type=float, default=90.0, metavar="PERCENT", help="default: %(default)s")
    parser.add_argument("--fail-at-epoch", type=int, metavar="N", help="a worker dies amid epoch N (from 1)")
    parser.add_argument("--fail-rank", type=int, metavar="R", help="which one; default: the last")
    parser.add_argument("--fail-how", choices=["exit", "kill", "raise"], default="kill", help="default: %(default)s")
    return parser.parse_args()


def load_data(device):
    """Training images, their labels, test images, their labels: every fifth image is for the test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64, device=device)
    test = torch.arange(len(labels), device=device) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


def build_model():
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def my_batches(epoch, samples, rank, world_size):
    """This worker's share of every batch of the epoch. All workers get as many samples: some occur twice if need be."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(SEED + epoch))
    for batch in order.split(BATCH):
        share = -(-len(batch) // world_size)
        yield batch[torch.arange(share * world_size) % len(batch)][rank::world_size]


def save(path, model, optimizer, epoch):
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
    os.replace(part, path)


def resume(path, model, optimizer, rank, device):
    """The epochs already trained, according to the checkpoint that rank 0 sees."""
    saved = [None]
    if rank == 0 and path.exists():
        saved = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(saved, src=0, device=device)
    if saved[0] is None:
        return 0
    model.load_state_dict(saved[0]["model"])
    optimizer.load_state_dict(saved[0]["optimizer"])
    return saved[0]["epoch"]


def die(how):
    print(f"rank {os.environ['RANK']} dies on purpose ({how})", file=sys.stderr, flush=True)
    if how == "raise":
        raise RuntimeError("a failure on purpose")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(17)


def train(model, optimizer, images, labels, batches, doomed_by=None):
    """One epoch. The mean loss over this worker's batches."""
    total = torch.zeros((), device=labels.device)
    batches = list(batches)
    for number, batch in enumerate(batches):
        if doomed_by and number == len(batches) // 2:
            die(doomed_by)
        batch = batch.to(labels.device)
        loss = cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / len(batches)


def main():
    arguments = parse_arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    path = arguments.checkpoint or Path(tempfile.gettempdir(), f"train_digits-{os.getuid()}-{job}.pt")
    doomed = rank == (world_size - 1 if arguments.fail_rank is None else arguments.fail_rank) and restart == 0

    torch.set_num_threads(1)
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))

    images, labels, test_images, test_labels = load_data(device)
    model = build_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trained = resume(path, model, optimizer, rank, device)
    if rank == 0 and trained:
        print(f"resuming after epoch {trained} from {path}", flush=True)
    ddp = DistributedDataParallel(model)

    for epoch in range(trained + 1, arguments.epochs + 1):
        batches = my_batches(epoch, len(labels), rank, world_size)
        doomed_by = arguments.fail_how if doomed and epoch == arguments.fail_at_epoch else None
        loss = train(ddp, optimizer, images, labels, batches, doomed_by)
        dist.all_reduce(loss)
        if rank == 0:
            save(path, model, optimizer, epoch)
            mean = loss.item() / world_size
            print(f"epoch {epoch} loss {mean:.2f} ({world_size} workers, restart {restart})", flush=True)

    with torch.no_grad():
        accuracy = 100 * (model(test_images).argmax(1) == test_labels).float().mean().item()
    dist.destroy_process_group()
    if rank == 0:
        print(f"test accuracy {accuracy:.1f} %", flush=True)
        if arguments.checkpoint is None:
            path.unlink(missing_ok=True)  # nobody asked for it
    if accuracy < arguments.require_accuracy:
        sys.exit(f"test accuracy below {arguments.require_accuracy:g} %")


if __name__ == "__main__":
    main()
