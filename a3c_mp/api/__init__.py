"""The library from Python; `a3c_mp.train` etc. are loaded from here when they are used."""

from a3c_mp.api.policy import load_policy
from a3c_mp.api.training import Callback, Result, train

__all__ = ["Callback", "Result", "load_policy", "train"]
