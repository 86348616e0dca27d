"""Pure decisions, shared by the live services and the simulator: no clock, no I/O, no chance."""
