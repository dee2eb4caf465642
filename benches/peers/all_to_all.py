"""What NCCL gives an exchange of gradients in bf16: all-to-all of 1.007 billion elements at once and in buckets, beside one all-gather.

    torchrun --nproc-per-node 2 benches/peers/all_to_all.py

A bucket has one piece for each rank, and nothing is added up, so the rates are upper bounds for `lowp bench --ranks 2 --filter gradients`.
"""

import os

import torch
import torch.distributed as dist

from fsdp2_gather import LAYERS, WIDTH, timed

ELEMENTS = 12 * WIDTH**2 * LAYERS


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    sent, received = (torch.zeros(ELEMENTS, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    gather = timed(lambda: dist.all_gather_into_tensor(received, sent[: ELEMENTS // dist.get_world_size()]))

    def exchange(elements):
        for to, of in zip(received.split(elements), sent.split(elements)):
            dist.all_to_all_single(to, of)

    rows = [("one all-gather", gather), ("one exchange", timed(lambda: exchange(ELEMENTS)))]
    rows += [(f"buckets of {mib} MiB", timed(lambda: exchange(mib << 19))) for mib in (64, 128, 256, 512)]
    if dist.get_rank() == 0:
        for name, ms in rows:
            print(f"{name:18} {ms:6.2f} ms  {gather / ms:.3f} of one all-gather")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
