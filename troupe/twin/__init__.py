"""A discrete-event twin of a cluster: engines, trainers and steps of a job in simulated time.

The decisions come from the same functions as in the services, `troupe.scheduling`, called with the
same records. The twin models the world around them: computing times of devices and transfer times
of bytes. simpy provides the clock and the queue of events. `testbed.twin` adds the mechanisms that
only published tables need.

    costs      device classes and models: seconds of prefill, decoding, training, loading
    workload   trajectories: their turns, lengths and waits
    engines    engines by batch, the router in front of them, moves between policies
    trainers   the store's tables of rows, gangs on trainer workers, micro-batches and steps
    job        a job and its cluster: policies, mode, bounds, mechanisms
    cluster    the job's steps in simulated time: the pipeline modes and their measurements
    profile    the measured profile of a job, for planners
    planner    the best split of a cluster's devices for a job
"""
