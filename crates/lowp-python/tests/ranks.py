"""Runs a function as processes that gloo joins."""

import faulthandler
import os
import pickle
import queue
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: Where a rank waits that does not end is printed then, and the others are not waited for.
SECONDS = float(os.environ.get("LOWP_TEST_SECONDS", 300))

#: What the server that ranks are forked from imports once, instead of each rank. It never calls lowp, whose threads a fork would not copy.
IMPORTED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "lowp"]
#: The same, where this process has imported transformers.
OF_TRANSFORMERS = ["transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "peft"]


def run(world, function, *args, backend="gloo"):
    """``function(rank, world, *args)`` on ``world`` processes, and what each returned, in rank order. The first failure is raised with its text."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED + (OF_TRANSFORMERS if "transformers" in sys.modules else []))
        results = context.Queue()
        processes = [
            context.Process(target=_rank, args=(rank, world, folder, backend, results, function, args)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            found = _results(processes, results)
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
        failures = [f"rank {rank}: {value}" for rank, (failed, value) in enumerate(found) if failed]
        if failures:
            raise AssertionError("\n".join(failures))
        return [pickle.loads(value) for _, value in found]


def _results(processes, results):
    """Whether each rank failed, and what it returned."""
    found, until = {}, time.monotonic() + SECONDS + 10
    while len(found) < len(processes):
        ended = [rank for rank, process in enumerate(processes) if process.exitcode is not None]
        try:
            rank, *what = results.get(timeout=1)
            found[rank] = what
        except queue.Empty:
            codes = {rank: processes[rank].exitcode for rank in ended if rank not in found}
            missing = [rank for rank in range(len(processes)) if rank not in found]
            if codes or time.monotonic() > until:
                why = f"exit codes {codes}" if codes else f"none within {SECONDS:.0f} s"
                raise AssertionError(f"no result of ranks {missing}: {why}; the others: {found}") from None
    return [found[rank] for rank in range(len(processes))]


def _rank(rank, world, folder, backend, results, function, args):
    faulthandler.dump_traceback_later(SECONDS)
    torch.set_num_threads(1)
    os.environ["RAYON_NUM_THREADS"] = "1"
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world)
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        # As bytes: tensors would be shared by a process that may have ended when they are fetched.
        results.put((rank, False, pickle.dumps(function(rank, world, *args))))
    except BaseException:
        results.put((rank, True, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
