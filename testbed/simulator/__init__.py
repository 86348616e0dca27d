"""Traces of agents' actions, and model services, in simulated time.

Trajectories play a trace against the pools of `testbed.twin.actions`, which decide as the services
do (`troupe.scheduling.elastic`); simpy holds the clock and the queue of events.

    models     model services on GPUs: dedicated, or evicted and restored in a shared pool
    trace      seeded workloads: what trajectories do, and how long it takes
    rollout    trajectories that play a trace against a pool, calls that play one against services
"""
