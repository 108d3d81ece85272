"""Which environment of a run this is, for simulators that need a port, a display or a folder of their own.

The environment variables `A3C_ACTOR` and `A3C_ENV` have the numbers of actor and environment, both from 0, while an
environment is made and whenever it is reset. Keyword arguments have them in braces: `port={9000+100*actor+env}`.
"""

import os
import re

ACTOR, ENV = "A3C_ACTOR", "A3C_ENV"
EVALUATOR, OUTSIDE, RECORDER = -1, -2, -3  # in place of an actor's number: the evaluator; trials and `play.py`; videos

os.environ.setdefault(ACTOR, str(OUTSIDE))  # a simulator may import this, too: it keeps what it was started with
os.environ.setdefault(ENV, "0")


def assume_identity(actor: int, env: int = 0) -> tuple[int, int]:
    """Put the numbers of an actor, unique in its run, and of one of its environments into this process's variables;
    returns those before."""
    before = int(os.environ[ACTOR]), int(os.environ[ENV])
    os.environ.update({ACTOR: str(actor), ENV: str(env)})
    return before


EXPRESSION = re.compile(r"\{([\w\s+*/%()-]*\b(?:actor|env)\b[\w\s+*/%()-]*)\}")


def with_numbers(text: str) -> str:
    """A text with the value in place of each expression of `actor` and `env` in braces.

    `sim-{actor}` is "sim-3" for actor 3; braces without these names stay. Raises ValueError for an expression of more
    than these names, whole numbers and + - * // % ( ).
    """
    return EXPRESSION.sub(_value, text)


def _value(match: re.Match[str]) -> str:
    expression = match[1].strip()
    names = {"actor": int(os.environ[ACTOR]), "env": int(os.environ[ENV])}
    try:
        if set(re.findall(r"\b[^\W\d]\w*|\*\*", expression)) - names.keys():  # a power could be too large to compute
            raise ValueError("it has other names, or a power")
        return str(eval(expression, {"__builtins__": {}}, names))
    except Exception as error:
        allowed = "must be of actor, env, whole numbers and + - * // % ( )"
        raise ValueError(f"{match[0]} {allowed} ({error})") from error
