-- Drop branches, and leave the witness that they will never be moved.
--
-- KEYS  witness, open, staged of each branch
-- ARGV  a new identity for the witness, then each branch

local answers = {}
for i = 3, #KEYS do
  local branch = ARGV[i - 1]
  if redis.call('HGET', KEYS[1], branch) ~= 'moving' then -- kept: an operator needs the rows
    -- The rows of a committed branch are dropped too: their move has ended, or it would be `moving`.
    -- This comes first, because a server without memory refuses a script's first write if that could
    -- need some, and the staged rows may be what fills it.
    redis.call('UNLINK', KEYS[i])
    redis.call('SREM', KEYS[2], branch)
  end
  redis.call('HSETNX', KEYS[1], 'born', ARGV[1])
  redis.call('HSETNX', KEYS[1], branch, 'aborted')
  answers[i - 2] = redis.call('HGET', KEYS[1], branch)
end
return answers
