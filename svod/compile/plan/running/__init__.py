"""The parts of a running plan: its devices and their memory, the values of its variables, its bound arrays, and its runs.

    PlanDevices ← PlanValues      sets variables in the queues
    PlanDevices ← Bindings        sets addresses in the queues
    all three   ← Runs            launches the kernels that the values choose, over the bound memory

`ExecutionPlan` owns one of each, and the lock under which they are used.
"""
