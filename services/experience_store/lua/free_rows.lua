-- Notes that a version of a policy is on disk, and frees the rows kept for it and earlier ones.
-- Idempotent.
-- ARGV: step (not used), version, its checksum
drains()
free_kept(tonumber(ARGV[2]), ARGV[3])
return finish({'freed'})
