"""The twin (`troupe.twin`) with the mechanisms that only published tables need.

workload   environments that stall and break, queries of several kinds
actions    pools in which turns' calls run: elastic cores, or reserved pods
faults     failures of rollout and trainer workers, gangs that are built again
cluster    a job with these, device classes, barriers and whole batches
"""
