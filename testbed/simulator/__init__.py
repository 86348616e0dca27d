"""A discrete-event twin of a cluster: the decisions of `troupe.scheduling`, in simulated time.

What decides here is what decides in the services; what is modelled is the world around it: hosts,
tools, model services, trajectories. simpy holds the clock and the queue of events.

    actions    the elastic pool: hosts that actions run on, as `troupe.scheduling.elastic` says
    pods       what it is measured against: a reservation for every trajectory's life
    models     model services on GPUs: dedicated, or evicted and restored in a shared pool
    trace      seeded workloads: what trajectories do, and how long it takes
    rollout    trajectories that play a trace against any of these

Whatever can be waited for is a simpy process or event, so that engines and trainers can be added
beside these and meet them in one environment.
"""
