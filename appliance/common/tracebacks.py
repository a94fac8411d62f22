"""Taking the tracebacks from exceptions that were handled, so that what their frames have is freed at once.

A traceback refers to every frame between raise and handler, and a frame to all its variables. Where one of these is the
exception itself, or a task or future that ended with it, all of them are one cycle: what the frames had, a tenant's
text among it, stays until the garbage collector looks at objects as old as these. Without its traceback an exception
refers to no frame, whatever refers to it.
"""

from __future__ import annotations


def forget_frames(error: BaseException) -> None:
    """Take the tracebacks from an exception that was handled, from its causes and from those during which it was
    raised: their frames, and what only these refer to, are freed at once."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
