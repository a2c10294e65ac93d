"""A thread for each group of gloo, because torch's gloo corrupts memory with two.

When a work of a group has ended, its thread stores the work's name in a string that all threads of the group share
(`ProcessGroupGloo::pgStatus_` of torch 2.13 and 2.15), without a lock. Names of 16 letters and more, such as that of an
all-gather by `DTensor.full_tensor()`, have memory of their own. If two works end at about the same time, one thread
frees that memory, and the other one frees it again or writes a name to it. Programs then end somewhere else by
"malloc(): unaligned tcache chunk detected" or a segmentation fault.
"""

import os
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

_DEFAULT_TIMEOUT = timedelta(minutes=30)


def use_one_thread_a_group() -> None:
    """Gives process groups of gloo that this process makes from now on one thread instead of two."""
    gloo: Any = c10d.ProcessGroupGloo
    create = gloo.__init__

    def create_with_one_thread(
        self: Any, store: c10d.Store, rank: int, size: int, timeout: timedelta = _DEFAULT_TIMEOUT, **settings: Any
    ) -> None:
        options = gloo._Options()
        names = os.environ.get("GLOO_SOCKET_IFNAME")
        devices = [gloo.create_device(interface=name) for name in names.split(",")] if names else []
        options._devices = devices or [gloo.create_default_device()]
        options._timeout = timeout
        options._threads = 1
        for name, value in settings.items():  # of torch 2.15: enable_reconfigure
            setattr(options, name, value)
        create(self, store, rank, size, options)

    gloo.__init__ = create_with_one_thread
