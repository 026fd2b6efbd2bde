"""The boundary around code of the user's own: a task, an environment, and all that they call.

What goes wrong behind it is the user's to mend: one sentence names the function, and the traceback
begins in the user's file.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shoal.node.exit_code import ExitCode
from shoal.swarm.errors import ShoalError

SMALLER = "make the model or its batches smaller, or end other programs"
"""The remedy where memory ran out."""
_OF_DEVICE = re.compile(
    r"\b(?:CUDA|HIP|XPU|MPS|NCCL) (?:driver |internal )?error\b|\bUR_RESULT_ERROR_|\bcommand "
    r"buffer (?:exited|execution)",
    re.IGNORECASE,
)
"""What torch says of failures of a GPU: NVIDIA's, AMD's, Intel's, Apple's."""
_NO_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "_status_alloc_failed",
    "_out_of_device_memory",
    "_out_of_host_memory",
    "_out_of_resources",
)
_SERIAL = {"HIP": "AMD_SERIALIZE_KERNEL=3", "CUDA": "CUDA_LAUNCH_BLOCKING=1"}
"""What has a device report an error where it arises, by the word that begins it."""
_folders: set[str] = set()
"""In which files of the user's lie."""
_modules: set[str] = set()
"""Top-level modules of the user's."""
MAX_DEVICE_CHARS = 200
MAX_REASON_CHARS = 300
"""Of an error inside a sentence of ours."""


class UserCodeError(ShoalError):
    """Failure of the user's own code.

    ``trace``: its traceback from the user's first frame on; empty where a value is wrong.
    """

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace


class DeviceError(ShoalError):
    """Failure that the device reported, most often some operations after the one that failed, and
    from then on at each.
    """

    exit_code = ExitCode.DEVICE_FAILED

    def __init__(self, error: BaseException) -> None:
        first = next(iter(str(error).splitlines()), "")
        said = first[:MAX_DEVICE_CHARS].rstrip(" .:") or type(error).__name__
        which = ""
        for kind, variable in _SERIAL.items():
            if f"{kind} " in said:
                which = f"; {variable} shows which one it was"
                break
        super().__init__(
            f"An operation on the device failed ({said}), often because an index is too large, and "
            f"this came up only now{which}: mend that, or the driver, and go on from the last "
            "checkpoint with --resume."
        )
        self.trace = user_trace(error) if _users_frames(error) else ""


def belongs_to_user(*, folder: Path | None = None, module: str = "") -> None:
    """Note that the files of ``folder``, or the module of this name with all in it, are the user's
    own.
    """
    if folder is not None:
        _folders.add(str(folder) + os.sep)
    if module and module.partition(".")[0] != "shoal":
        _modules.add(module.partition(".")[0])


def import_beside(folder: Path) -> None:
    """Let code import what lies in ``folder``, after all that is installed: no file there may hide
    a module that others import.
    """
    belongs_to_user(folder=folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@contextmanager
def calling(owner: object, function: str, through: object = None) -> Iterator[None]:
    """Return the context in which Shoal calls ``function`` of the user's object, or torch on its
    behalf.

    A failure becomes a UserCodeError; ShoalError passes unchanged, for it is a sentence for the
    user already.

    Args:
        owner: has a ``user_subject``, which begins sentences about it, if it is the user's; else
            the context does nothing.
        function: what is called, for people.
        through: what ``function`` returned, if Shoal's own code runs in the context: then only what
            came through one of its methods is taken for the user's.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        subject = getattr(owner, "user_subject", None)
        if subject is None or isinstance(error, ShoalError):
            raise
        if through is not None and not blamed(error, through):
            raise
        raise failed(subject, function, error) from error


def failed(subject: str, function: str, error: BaseException) -> ShoalError:
    """Return what ``error`` in the user's ``function`` means to the user: UserCodeError, or
    DeviceError.
    """
    if device_failed(error):
        return DeviceError(error)
    said = f"{subject} failed in {function}: {summary(error)}"
    remedy = SMALLER if out_of_memory(error) else "mend it"
    return UserCodeError(f"{said}: {remedy}.", user_trace(error))


def summary(error: BaseException) -> str:
    """Return ``error`` in a few words, with the last line of the user's that it came from."""
    said = str(error).splitlines() or [""]
    # torch wraps an error of a DataLoader's worker, whose own words come last.
    is_wrapped = said[0].startswith("Caught ")
    first = said[-1 if is_wrapped else 0][:MAX_REASON_CHARS].rstrip(" .:")
    where = ""
    frames = _users_frames(error)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        first = error.msg
        where = f" ({Path(error.filename).name}, line {error.lineno})"
    elif frames:
        frame, line = frames[-1]
        where = f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return f"{type(error).__name__}{': ' if first else ''}{first}{where}"


def _users_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of the user's code that ``error`` came through, with their lines."""
    return [found for found in traceback.walk_tb(error.__traceback__) if _is_users(found[0])]


def user_trace(error: BaseException) -> str:
    """Format the traceback of ``error`` from the first frame of the user's on; without any, from
    the first that is not Shoal's.
    """
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    begins = next((tb for tb in frames if _is_users(tb.tb_frame)), None)
    begins = begins or next((tb for tb in frames if not _is_shoals(tb.tb_frame)), None)
    return "".join(traceback.format_exception(type(error), error, begins))


def blamed(error: BaseException, owner: object) -> bool:
    """Return whether ``error`` came through a method of ``owner``, or through a file of the
    user's.
    """
    return any(
        _is_users(frame) or frame.f_locals.get("self") is owner
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def explained(error: Exception) -> ShoalError | None:
    """Return what an error that nobody foresaw means if it is the user's to mend; None if it is
    Shoal's own.

    It is the user's if his code is on the way to it, such as a hook of a module, or if memory ran
    out. What a device reports is nobody's, wherever it came up.
    """
    if device_failed(error):
        return DeviceError(error)
    frames = _users_frames(error)
    if frames:
        last, _ = frames[-1]
        return failed("Your code", f"{last.f_code.co_name}()", error)
    if out_of_memory(error):
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        return ShoalError(
            f"There is not enough memory ({why[:MAX_REASON_CHARS]}): train a smaller model or "
            "batch, or end other programs."
        )
    return None


def out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on whatever device, as ``error`` says or what caused it.

    Torch is not imported for it.
    """
    text = str(error).lower()
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if named or (isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)):
        return True
    return error.__cause__ is not None and out_of_memory(error.__cause__)


def device_failed(error: BaseException) -> bool:
    """Return whether a device reports that it failed, other than for want of memory.

    Torch is not imported for it.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, ShoalError) or out_of_memory(error):
        return False
    return type(error).__name__ == "AcceleratorError" or _OF_DEVICE.search(str(error)) is not None


def _is_users(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    file = frame.f_code.co_filename
    if _is_shoals(frame) or "site-packages" in file:
        return False
    return name.partition(".")[0] in _modules or file.startswith(tuple(_folders))


def _is_shoals(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "shoal"
