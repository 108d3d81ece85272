"""Environments: one interface for Atari and for any other gymnasium environment.

Actors step `make_vec_env`; `make_env` is the same as a single environment, for evaluation and video.
This package imports nothing from `a3c_mp`.
"""

from wrappers.actions import action_mask, mask_in, random_action
from wrappers.atari import FRAME_SKIP, is_atari, make_env, spaces
from wrappers.contract import BrokenContract, check_contract
from wrappers.ids import find_spec, split_id, with_kwargs
from wrappers.rebuild import GameLog, Rebuildable, obs_hashes, seeding_of
from wrappers.structured import layout
from wrappers.vector import make_vec_env

__all__ = [
    "FRAME_SKIP",
    "BrokenContract",
    "GameLog",
    "Rebuildable",
    "action_mask",
    "check_contract",
    "find_spec",
    "is_atari",
    "layout",
    "make_env",
    "make_vec_env",
    "mask_in",
    "obs_hashes",
    "random_action",
    "seeding_of",
    "spaces",
    "split_id",
    "with_kwargs",
]
