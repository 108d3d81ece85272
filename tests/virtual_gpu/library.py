"""The compiled part: builds `device.cpp` with g++ once for each version of it and of torch, and loads it."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def missing() -> str:
    """Why it cannot be built or used here; empty where it can."""
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "the virtual GPU stands in for CUDA in builds of torch for the CPU"
    return "" if shutil.which("g++") else "the virtual GPU needs g++"


def built() -> Path:
    """The shared library, in `VIRTUAL_GPU_CACHE` or ~/.cache; the first call takes ten seconds."""
    torch = torch_folder()
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("VIRTUAL_GPU_CACHE") or Path.home() / ".cache" / "virtual_gpu")
    if not (library := folder / f"device-{key}.so").exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        options = ["-O1", "-w", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
        subprocess.run(["g++", *options, SOURCE, "-o", unfinished, "-lc10", "-ltorch_cpu"], check=True)
        unfinished.replace(library)
    return library


def load() -> ctypes.CDLL:
    """Load it before torch is imported, which asks only once whether there is CUDA."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(built()))
    library.virtual_gpu_pin.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.virtual_gpu_is_pinned.argtypes = [ctypes.c_size_t]
    library.virtual_gpu_start()
    return library


def torch_folder() -> Path:
    return Path(importlib.util.find_spec("torch").origin).parent
