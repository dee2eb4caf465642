"""Runs a function as processes that gloo joins."""

import faulthandler
import os
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(world, function, *args, backend="gloo"):
    """``function(rank, world, *args)`` on ``world`` processes, and what each returned, in rank order. The first failure is raised with its text."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        processes = [
            context.Process(target=_rank, args=(rank, world, folder, backend, results, function, args)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        found = [None] * world
        failures = []
        for _ in processes:
            rank, failed, value = results.get()
            if failed:
                failures.append(f"rank {rank}: {value}")
            found[rank] = value
        for process in processes:
            process.join()
        if failures:
            raise AssertionError("\n".join(failures))
        return found


def _rank(rank, world, folder, backend, results, function, args):
    # Where a rank waits that does not end.
    faulthandler.dump_traceback_later(float(os.environ.get("LOWP_TEST_SECONDS", 300)))
    torch.set_num_threads(1)
    os.environ["RAYON_NUM_THREADS"] = "1"
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        results.put((rank, False, function(rank, world, *args)))
    except BaseException:
        results.put((rank, True, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
