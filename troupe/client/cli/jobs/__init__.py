"""Commands on jobs, their results, samples, conversations and populations."""
