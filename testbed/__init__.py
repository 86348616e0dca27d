"""Tools that measure and test Troupe and are no part of it.

Simulated engines and learners, timelines, the chaos harness, a discrete-event simulator, the twin's
mechanisms of published tables. Services
load simulated engines and learners by name, where a job asks for them (`policies.X.simulated`).
"""
