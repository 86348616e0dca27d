"""Students that learn from frozen policies (`algorithm.distillation`): job.yaml."""
