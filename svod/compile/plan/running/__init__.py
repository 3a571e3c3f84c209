"""The parts of a plan that runs: its devices and their memory, the values of its variables, what is bound to it, and its runs.

    PlanDevices ← PlanValues      queues that are told a variable's value
    PlanDevices ← Bindings        queues that are told an address
    all three   ← Runs            launches of the kernels that the values choose, over what is bound

`ExecutionPlan` owns one of each, and the lock under which they are used.
"""
