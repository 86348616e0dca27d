"""The sections of a job specification, one file per topic; `troupe.job.fields` joins them."""
