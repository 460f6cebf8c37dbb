"""Lets torch say that this processor has, or lacks, features: the first folder of PYTHONPATH in tests of other hosts.

``TEST_PROCESSOR`` names them as in ``amx_tile=0 avx512_bf16=1``. Only what vLLM plans is affected; staged runs call no
kernel, so nothing is executed that the processor does not have.
"""

import importlib.abc
import importlib.util
import os
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        del path, target
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for entry in os.environ["TEST_PROCESSOR"].split():
                feature, value = entry.split("=")
                answer = getattr(module, f"_is_{feature}_supported")  # a feature torch does not know fails here
                setattr(module, answer.__name__, lambda value=value: value == "1")

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
