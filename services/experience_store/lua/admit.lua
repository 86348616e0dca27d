-- Makes one policy's table ready for a step that the job has opened. Repeatable.
-- ARGV: step, group_size, expected
if redis.call('EXISTS', STEP) == 0 then
  redis.call('HSET', STEP, 'group_size', ARGV[2], 'expected', ARGV[3], 'ended', 0)
  changes('counts')
end
return finish({'admitted'})
