-- Drop branches, and leave the witness that they will never be moved.
--
-- KEYS  witness, open, staged of each branch
-- ARGV  a fresh name for the witness, then each branch

redis.call('HSETNX', KEYS[1], 'born', ARGV[1])
local answers = {}
for i = 3, #KEYS do
  local branch = ARGV[i - 1]
  redis.call('HSETNX', KEYS[1], branch, 'aborted')
  answers[i - 2] = redis.call('HGET', KEYS[1], branch)
  if answers[i - 2] ~= 'moving' then -- a person will want to see what it was
    -- Also of a committed branch: what stands there now was staged by a zombie afterwards.
    redis.call('UNLINK', KEYS[i])
    redis.call('SREM', KEYS[2], branch)
  end
end
return answers
