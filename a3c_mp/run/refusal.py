"""Why an environment cannot be used, and how to fix it; imported where that is so."""

import difflib
import sys
import traceback
from contextlib import suppress

from gymnasium.envs import registration

from a3c_mp import wrappers
from a3c_mp.errors import ConfigError, describe, is_missing, one_line


def refusal_of(error: BaseException, env_id: str) -> ConfigError:
    """What is wrong with an environment, and how to fix it where that is certain."""
    text = ""
    with suppress(Exception):  # an error may have none
        text = " ".join(str(error).split()).rstrip(".")
    module, _, name = wrappers.split_id(env_id)[0].rpartition(":")
    is_imported = not module or module in sys.modules
    why, fix = describe(error), ""
    if isinstance(error, wrappers.BrokenContract):
        why, fix = text, "fix the environment, or choose another"
    elif isinstance(error, wrappers.UnsupportedEnv):
        return ConfigError(error.flag, env_id if error.value is None else error.value, text, error.fix)
    elif not isinstance(error, Exception):  # SystemExit: an environment must not end the process
        why, fix = f"it raises {why}", "fix the environment, or choose another"
    elif is_missing(error, module):
        why, fix = text, "the module must be installed or lie in the current folder"
    elif "Box2D is not installed" in text:  # which `make train` does not need
        fix = "pip install box2d==2.3.10 (Python 3.14: docs/platforms.md)"
    elif is_imported and name not in registration.registry and not callable(getattr(sys.modules.get(module), name, 0)):
        why = text.split(" Did you mean:")[0].rstrip(".")  # that guess lacks the version
        fix = _similar_id(module, name)
    elif is_imported and isinstance(cause := error.__cause__, TypeError) and "the environment creator" in text:
        why = describe(cause)  # gymnasium has only added all keyword arguments
        if len(traceback.extract_tb(cause.__traceback__)) == 1:  # its call of the constructor
            why, fix = one_line(cause), "choose another, or other --env-kwargs"
    return ConfigError("env-id", env_id, why, fix)


def _similar_id(module: str, name: str) -> str:
    """How to correct an id that is not registered: a similar one, if there is one."""
    known, wanted = {name.casefold(): name for name in registration.registry}, name.casefold()
    alike = [other for other in known if other == f"ale/{wanted}" or other.startswith(f"{wanted}-v")]
    alike = [other for other in known if other == f"{wanted}noframeskip-v4"] or alike
    if alike := alike or difflib.get_close_matches(wanted, known, n=1, cutoff=0.8):
        meant = known[alike[-1]]  # the newest version
        return f"perhaps you meant {f'{module}:{meant}' if module else f'{meant}, or module:{name}'}"
    if module:
        return f"{module} was imported and registers no {name}: call gymnasium.register in it, or check the spelling"
    return f"if a module registers it, name that too (module:{name}), or see gymnasium.pprint_registry()"
