"""What it costs a policy to leave its device and to come back; what it gains to share devices."""
