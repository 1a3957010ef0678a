"""Make one sample end the worker that computes it: Python loads this file if its folder is in ``PYTHONPATH``.

``POISON=task-17:kill`` sends SIGKILL as soon as a batch with that sample is started, as the kernel does if memory runs
out; ``segv`` reads a null pointer, ``hang`` waits for ever, ``memory`` reports that the device has no room.
"""

import ctypes
import importlib.abc
import importlib.util
import os
import signal
import sys
import threading
import time

_TARGETS = ("spile.compute.device", "spile.compute.progress")


def _end(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "segv":
        ctypes.string_at(0)
    elif how == "hang":
        threading.Event().wait()
    elif how == "memory":
        from spile.compute.producer import OutOfDeviceMemory

        raise OutOfDeviceMemory("the device's memory ran out")
    time.sleep(60)


def _poison(module):
    name, _, how = os.environ["POISON"].rpartition(":")
    if module.__name__ == "spile.compute.progress":
        module._HANG_TICK, module._HANG_LEAST, module._HANG_FIRST = 0.2, 3.0, 10.0
        return
    start = module.DeviceProducer.start

    def poisoned(self, batch):
        if any(sample.task_id == name for sample in batch.samples):
            _end(how)
        return start(self, batch)

    module.DeviceProducer.start = poisoned


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in _TARGETS or "POISON" not in os.environ:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def run(module):
            execute(module)
            _poison(module)

        spec.loader.exec_module = run
        return spec


sys.meta_path.insert(0, _Finder())
