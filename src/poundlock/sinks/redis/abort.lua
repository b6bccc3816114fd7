-- Drop branches, and leave the witness that they will never be moved.
--
-- KEYS  witness, open, staged of each branch
-- ARGV  a fresh name for the witness, then each branch

local answers = {}
for i = 3, #KEYS do
  local branch = ARGV[i - 1]
  if redis.call('HGET', KEYS[1], branch) ~= 'moving' then -- a person will want to see what it was
    -- Also of a committed branch: what stands there now is over, or it would be `moving`.
    -- First of all, for a server without memory refuses the first write of a script if it could take
    -- some, and what was staged may be what fills it.
    redis.call('UNLINK', KEYS[i])
    redis.call('SREM', KEYS[2], branch)
  end
  redis.call('HSETNX', KEYS[1], 'born', ARGV[1])
  redis.call('HSETNX', KEYS[1], branch, 'aborted')
  answers[i - 2] = redis.call('HGET', KEYS[1], branch)
end
return answers
