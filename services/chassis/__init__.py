"""Parts that all services share: settings, serving, health, drain, idempotency, telemetry."""
