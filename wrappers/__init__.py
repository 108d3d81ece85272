"""Environments: one interface for Atari and for any other gymnasium environment.

Actors step `make_vec_env`; `make_env` is the same as a single environment, for evaluation and video.
This package imports nothing from `a3c_mp`.
"""

from wrappers.atari import FRAME_SKIP, is_atari, make_env
from wrappers.contract import BrokenContract, check_contract
from wrappers.rebuild import GameLog, Rebuildable, obs_hashes, seeding_of
from wrappers.vector import make_vec_env

__all__ = [
    "FRAME_SKIP",
    "BrokenContract",
    "GameLog",
    "Rebuildable",
    "check_contract",
    "is_atari",
    "make_env",
    "make_vec_env",
    "obs_hashes",
    "seeding_of",
]
