"""What every server shares: settings, serving, health, drain, idempotency, telemetry."""
