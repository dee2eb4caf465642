"""Ranks that wait in a collective of GPUs for one that failed between gathers of FSDP2.

Such a collective takes no message, and without a launcher nobody ends the processes that wait. A thread asks the store for failures. Where the rank
makes no progress after one, the thread ends its collectives and raises the cause in the thread that trains.
"""

import ctypes
import sys
import threading
import time

from . import _torch_compat as compat
from ._errors import LowpError

#: Seconds between two questions to the store, seconds without a gather after which a rank waits, and those after which a failure is forgotten.
EVERY, STUCK, FORGOTTEN = 2.0, 10.0, 120.0
_KEY = "lowp/gathers/failed"


class Watch:
    """The watch of one process: what its store says, and what the thread that trains has done."""

    def __init__(self, store, abort, every=EVERY, stuck=STUCK, forgotten=FORGOTTEN):
        self.store, self.abort = store, abort
        self.every, self.stuck, self.forgotten = every, stuck, forgotten
        #: Hooks of gathers that this rank has passed, and failures of its own.
        self.passed = self.failed = 0
        self.thread = threading.get_ident()
        # A failure from before is none of this watch's.
        self.heard = self._ask()

    def start(self):
        """Asks from here on, on a thread of its own, for as long as there is a store."""
        threading.Thread(target=self._run, name="lowp watch", daemon=True).start()
        return self

    def tell(self, rank, message):
        """Has the others hear of a failure of this rank."""
        self.failed += 1
        self.heard = f"{rank}:{time.time_ns()}:{message}".encode()
        self.store.set(_KEY, self.heard)

    def _ask(self):
        return self.store.get(_KEY) if self.store.check([_KEY]) else None

    def _run(self):
        try:
            while True:
                time.sleep(self.every)
                own, found = self.failed, self._ask()
                if found != self.heard and found is not None:
                    self.heard = found
                    if self._waits(own):
                        return self._end(found)
        except Exception:
            return  # the store is gone, and with it the job

    def _waits(self, own):
        """Whether this rank makes no progress. One that failed, too, waits for nobody."""
        start = since = time.monotonic()
        passed = self.passed
        while self.failed == own and time.monotonic() - start < self.forgotten:
            if self.passed != passed:
                passed, since = self.passed, time.monotonic()
            elif time.monotonic() - since >= self.stuck:
                return True
            time.sleep(self.every / 4)
        return False

    def _end(self, found):
        rank, _, message = found.decode(errors="replace").split(":", 2)
        text = f"rank {rank} failed between gathers: {message}; this rank waited for it in a collective, which was ended: start all ranks again"
        print(f"lowp: {text}", file=sys.stderr, flush=True)
        error = type("LowpError", (LowpError,), {"__init__": lambda self: LowpError.__init__(self, text), "_lowp_told": True})
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(error))
        self.abort()


#: That of this process, once it gathers on GPUs.
current = None


def begin(device):
    """Has this process watch: gathers on a GPU begin."""
    global current
    if current is None and device.type == "cuda":
        current = Watch(compat.default_store(), compat.abort_all).start()


def passed():
    """Notes progress."""
    if current is not None:
        current.passed += 1


def tell(rank, message):
    """Has the others hear of a failure of this rank between gathers."""
    if current is not None:
        current.tell(rank, message)
