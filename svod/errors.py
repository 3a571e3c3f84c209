"""Every error svod raises on purpose. A message says what was asked, what was found, and what to do."""


class SvodError(Exception):
    """Root of svod's errors."""


class ShapeError(SvodError, ValueError):
    """Operands whose shapes do not fit the operation; the message names the operation and the shapes."""


class DTypeError(SvodError, TypeError):
    """Operands whose element types do not fit the operation, or a value that does not fit its element type."""


class TensorIndexError(SvodError, IndexError):
    """An index that is out of range, or of a kind that cannot index a tensor."""


class ArgumentError(SvodError, TypeError):
    """An argument of a kind that the function does not take."""


class ConfigError(SvodError, ValueError):
    """An option or environment variable with a value svod cannot use."""


class KernelOptError(SvodError):
    """An opt that does not apply to a kernel state; the state is unchanged."""


class CompileError(SvodError):
    """A kernel that could not be lowered or compiled."""


class ProgramTooLong(CompileError):
    """A program that has more instructions than it may have."""


class LaunchError(SvodError):
    """A program that could not be launched with the given buffers and variables."""


class ScheduleError(SvodError):
    """A graph that cannot be cut into kernels or ordered."""


class SharedMemoryError(ScheduleError):
    """Memory that a plan writes lies under another of its buffers."""


class DeviceError(SvodError):
    """A device or target that is missing or cannot do what was asked."""


class DeviceLost(DeviceError):
    """A device that this process cannot use any more, because of what a kernel did."""


class TuneError(SvodError):
    """A search that could not be started or carried on."""


class FormatError(SvodError, ValueError):
    """Data from a file, a database or another process that does not have the form svod writes."""


class StateError(SvodError, KeyError):
    """Parameters that do not fit the module that is to take them."""

    __str__ = SvodError.__str__     # KeyError shows its message quoted


class DatabaseError(SvodError):
    """A tuning database that cannot be read or written."""


class UnsupportedError(SvodError, NotImplementedError):
    """Something svod knows about and does not do. `node`: of a model that is walked, the node that it is about."""

    node = ""


class StageMissing(UnsupportedError):
    """A compiler has no such stage, on any machine."""
