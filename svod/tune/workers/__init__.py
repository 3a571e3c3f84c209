"""Worker processes, in which candidates are compiled and timed, as a candidate may crash its process."""
