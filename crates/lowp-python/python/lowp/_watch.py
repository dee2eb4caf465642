"""Ranks that wait in a collective of GPUs for one that failed between gathers of FSDP2.

Such a collective takes no message, and without a launcher nobody ends the processes that wait. A thread asks the store for failures of the groups that
this rank gathers over. Where the rank makes no progress after one, the thread raises the cause in the thread that gathered first, and ends the
collectives of the group: what waited returns, and raises. A rank that fails itself, or that heard of a failure otherwise, is watched no more.
"""

import atexit
import ctypes
import sys
import threading
import time

from . import _torch_compat as compat
from ._errors import LowpError

#: Seconds between two questions to the store, seconds without a gather after which a rank waits, and those after which a failure is forgotten.
EVERY, STUCK, FORGOTTEN = 2.0, 10.0, 120.0


class Watch:
    """The watch of one process: what its store says of the groups it gathers over, and whether it makes progress."""

    def __init__(self, store, abort, every=EVERY, stuck=STUCK, forgotten=FORGOTTEN):
        self.store, self.abort = store, abort
        self.every, self.stuck, self.forgotten = every, stuck, forgotten
        #: Hooks of gathers that this rank has passed.
        self.passed = 0
        #: What the store had of each group when it was heard of last: by its name, with the group.
        self.groups = {}
        self.told = None
        self.over = threading.Event()
        self.ident = threading.get_ident()
        self.thread = threading.Thread(target=self._run, name="lowp watch", daemon=True)

    def start(self):
        """Asks from here on, on a thread of its own."""
        self.thread.start()
        return self

    def add(self, name, group):
        """Watches a group, too. Failures from before are none of this watch's."""
        if name not in self.groups:
            self.groups[name] = (group, self._ask(name))

    def tell(self, name, rank, message):
        """Has the others hear of a failure of this rank, if they heard of no other one."""
        self.over.set()
        known = self.groups.get(name, (None, b""))[1] or b""
        own = f"{rank}:{time.time_ns()}:{message}".encode(errors="replace")
        self.store.compare_set(_key(name), known.decode(errors="replace"), own.decode(errors="replace"))
        self.told = time.monotonic()

    def end(self):
        """Ends the thread, which may not be in the store when the process ends. A rank that has the store stays until the others have asked."""
        self.over.set()
        if self.thread.is_alive():
            self.thread.join(5)
        if self.told is not None:
            time.sleep(max(0.0, self.told + 1.5 * self.every - time.monotonic()))

    def _ask(self, name):
        return self.store.get(_key(name)) if self.store.check([_key(name)]) else None

    def _run(self):
        while not self.over.wait(self.every):
            for name, (group, heard) in list(self.groups.items()):
                try:
                    found = self._ask(name)
                except Exception:
                    return  # the store is gone
                if found != heard:
                    self.groups[name] = (group, found)
                    if self._waits():
                        return self._raise(found, group)

    def _waits(self):
        """Whether this rank makes no progress."""
        start = since = time.monotonic()
        passed = self.passed
        while time.monotonic() - start < self.forgotten:
            if self.passed != passed:
                passed, since = self.passed, time.monotonic()
            elif time.monotonic() - since >= self.stuck:
                return True
            if self.over.wait(self.every / 4):
                return False
        return False

    def _raise(self, found, group):
        rank, _, message = found.decode(errors="replace").split(":", 2)
        text = f"rank {rank} failed between gathers: {message}; this rank waited for it in a collective, which was ended: start all ranks again"
        print(f"lowp: {text}", file=sys.stderr, flush=True)
        self.over.set()
        of = {"__init__": lambda self: LowpError.__init__(self, text), "__reduce__": lambda self: (LowpError, (text,)), "_lowp_heard": True}
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(type("LowpError", (LowpError,), of)))
        try:
            self.abort(group)
        except Exception as error:
            print(f"lowp: its collectives did not end: {error}", file=sys.stderr, flush=True)


def _key(name):
    return f"lowp/gathers/{name}"


#: That of this process, once it gathers on GPUs.
current = None


def begin(group, device):
    """Has this process watch a group: gathers on a GPU begin."""
    global current
    if device.type != "cuda":
        return
    store = compat.default_store()
    if current is None or current.store is not store:
        settle()
        current = Watch(store, compat.abort).start()
        atexit.register(current.end)
    current.add(group.group_name, group)


def passed():
    """Notes progress."""
    if current is not None:
        current.passed += 1


def tell(group, rank, message):
    """Has the others hear of a failure of this rank between gathers."""
    if current is not None:
        current.tell(group.group_name, rank, message)


def settle():
    """This rank knows of a failure: it waits for nobody."""
    if current is not None:
        current.over.set()
