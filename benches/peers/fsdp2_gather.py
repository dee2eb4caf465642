"""All-gathers of PyTorch's FSDP2 in bf16, of the weights that `lowp bench --ranks` gathers.

    torchrun --nproc-per-node 2 benches/peers/fsdp2_gather.py
"""

import os
import statistics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

LAYERS, WIDTH, RUNS, WARM_UP = 20, 2048, 20, 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        make = lambda shape: nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="cuda"))
        self.weights = nn.ParameterList(map(make, shapes))


def timed(call):
    times = []
    for run in range(WARM_UP + RUNS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if run >= WARM_UP:
            times.append(begin.elapsed_time(end))
    median = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return median.item()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    blocks = [Block(WIDTH) for _ in range(LAYERS)]
    elements = sum(p.numel() for block in blocks for p in block.parameters())
    for block in blocks:
        fully_shard(block, reshard_after_forward=True)

    def gather():
        for block in blocks:
            block.unshard()
        for block in blocks:
            block.reshard()

    fsdp = timed(gather)
    piece = torch.empty(2 * elements // world, dtype=torch.uint8, device="cuda")
    whole = torch.empty(2 * elements // world * world, dtype=torch.uint8, device="cuda")
    raw = timed(lambda: dist.all_gather_into_tensor(whole, piece))
    if dist.get_rank() == 0:
        arrive = 2 * elements * (world - 1) / world
        for name, ms in (("FSDP2, block by block", fsdp), ("one all-gather", raw)):
            print(f"{name}, bf16: {ms:.3f} ms, {arrive / ms / 1e6:.0f} GB/s arrive")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
