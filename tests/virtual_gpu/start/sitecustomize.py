"""With this folder in PYTHONPATH, every Python process that imports torch has a virtual GPU.

Python imports a module of this name at its start.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # tests/, the folder of the package virtual_gpu


class TorchFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads torch as usual, between the compiled part of the virtual GPU and the rest of it."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)  # one may ask for it without loading it
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        sys.meta_path.remove(self)
        from virtual_gpu import library

        self.library = library.load()
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        from virtual_gpu import cuda

        cuda.install(self.library)


sys.meta_path.insert(0, TorchFinder())
