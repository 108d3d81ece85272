"""Environments: one interface for Atari and for any other gymnasium environment. It imports nothing from `a3c_mp`."""

from wrappers.actions import ActionScaling, MaskedDiscrete, action_mask, mask_in
from wrappers.atari import FRAME_SKIP, is_atari
from wrappers.contract import UNWATCHED, BrokenContract, Heartbeats, check_contract
from wrappers.identity import EVALUATOR, OUTSIDE, RECORDER, Identity
from wrappers.ids import UnsupportedEnv, find_spec, split_id, with_kwargs
from wrappers.observations import layout
from wrappers.rebuild import GameLog, obs_hashes, seeding_of
from wrappers.vector import make_env, make_vec_env, spaces, trace

__all__ = [
    "EVALUATOR", "FRAME_SKIP", "OUTSIDE", "RECORDER", "UNWATCHED", "ActionScaling", "BrokenContract", "GameLog",
    "Heartbeats", "Identity", "MaskedDiscrete", "UnsupportedEnv", "action_mask", "check_contract", "find_spec",
    "is_atari", "layout", "make_env", "make_vec_env", "mask_in", "obs_hashes", "seeding_of", "spaces", "split_id",
    "trace", "with_kwargs",
]  # fmt: skip
