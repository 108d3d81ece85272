"""Environments: one interface for Atari and for any other of gymnasium. It imports nothing else of `a3c_mp`."""

# ruff: noqa: F401  (names for others to import from here)
import sys

from a3c_mp.wrappers.actions import ACTIONS, ActionScaling, GuardedEnvs, MaskedDiscrete, mask_in, num_choices
from a3c_mp.wrappers.atari import FRAME_SKIP, frames_of, is_atari
from a3c_mp.wrappers.contract import UNWATCHED, BrokenContract
from a3c_mp.wrappers.identity import EVALUATOR, OUTSIDE, RECORDER, assume_identity
from a3c_mp.wrappers.ids import Extras, UnsupportedEnv, extras_of, find_spec, split_id, with_extras, with_kwargs
from a3c_mp.wrappers.observations import SMALLEST_IMAGE, ImageAndVector, layout
from a3c_mp.wrappers.rebuild import GameLog, obs_hashes, seeding_of
from a3c_mp.wrappers.vector import NOT_MADE, close, make_env, make_vec_env, spaces

# a3c_mp/wrappers is a link to this folder: `import wrappers` finds the same modules, not a second copy of them.
for _name in ("actions", "atari", "contract", "identity", "ids", "observations", "rebuild", "vector"):
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = sys.modules[f"a3c_mp.wrappers.{_name}"]
