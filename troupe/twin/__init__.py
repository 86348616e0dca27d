"""A discrete-event twin of a cluster: engines, trainers and steps of a job in simulated time.

What decides here is what decides in the services: the functions of `troupe.scheduling`, called with
the same records. What is modelled is the world around them: how long devices compute, how long
bytes travel. simpy holds the clock and the queue of events.

    costs      device classes and models: seconds of prefill, decoding, training, loading
    workload   what trajectories do: their turns, lengths and waits
    actions    what turns run in environments: an elastic pool of cores, or reserved pods
    engines    engines by batch, the router in front of them, moves between policies
    trainers   the store's tables of rows, gangs on trainer workers, micro-batches and steps
    faults     failures of rollout and trainer workers
    job        a job and its cluster: policies, mode, bounds, mechanisms
    cluster    the job's steps in simulated time: the pipeline modes, and what was measured
    profile    what a job that ran was measured to do, for planners
    planner    which split of a cluster's devices is best for a job
"""
