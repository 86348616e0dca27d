"""An SGLang server as an engine: over HTTP, launched by us or attached to."""
