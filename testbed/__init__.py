"""What measures and tests Troupe and is no part of it: simulated engines and learners, timelines,
the chaos harness and the discrete-event simulator. Services load its stand-ins by name, where a job
asks for them (`policies.X.simulated`)."""
