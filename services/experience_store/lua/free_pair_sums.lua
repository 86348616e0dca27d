-- Frees a policy's sums of joint pairs, once no policy can ask for them. Idempotent.
-- ARGV: step
drains()
free_sums()
return finish({'freed'})
