"""Every error that svod raises on purpose. A message names the request, the problem, and the remedy."""


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
    """A program with more instructions than the limit."""


class LaunchError(SvodError):
    """A program that could not be launched with the given buffers and variables."""


class ScheduleError(SvodError):
    """A graph that cannot be cut into kernels or ordered."""


class SharedMemoryError(ScheduleError):
    """Memory that a plan writes overlaps another buffer of the plan."""


class DeviceError(SvodError):
    """A device or target that is missing or lacks the requested ability."""


class DeviceLost(DeviceError):
    """A device that this process cannot use any more because of a fault in a kernel."""


class TuneError(SvodError):
    """A search that could not be started or carried on."""


class FormatError(SvodError, ValueError):
    """Data from a file, a database or another process that does not have the form svod writes."""


class FileError(SvodError, OSError):
    """A file that cannot be read or written. `errno` is the number of the system's error."""


class StateError(SvodError, KeyError):
    """Parameters that do not fit the module that they are loaded into."""

    __str__ = SvodError.__str__     # KeyError would show the message in quotes


class DatabaseError(SvodError):
    """A tuning database that cannot be read or written."""


class UnsupportedError(SvodError, NotImplementedError):
    """A known feature that svod does not implement. `node`: in an ONNX model, the first output of the node concerned."""

    node = ""


class StageMissing(UnsupportedError):
    """A stage, such as assembly, that a device's compiler lacks on every machine."""
