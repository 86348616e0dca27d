"""Tools that measure and test Troupe but are not part of it.

Simulated engines and learners, timelines, the chaos harness, a discrete-event simulator, and the
twin's mechanisms for published tables. Services load simulated engines and learners by name if a
job requests them (`policies.X.simulated`).
"""
