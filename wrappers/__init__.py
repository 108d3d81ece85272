"""Environments: one contract for Atari and for anything else gymnasium knows.

`make_vec_env` is what the actors step; `make_env` is the same environment, alone, for evaluation and video.
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
