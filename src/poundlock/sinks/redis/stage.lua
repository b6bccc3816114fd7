-- Put one chunk of a branch aside.
--
-- The branch enters the list of open ones in the same step as its rows, every time: whatever is
-- staged can be found and swept. A branch that is over is not opened again, by a zombie or by a command
-- that comes twice.
--
-- What is moved without a decision has nobody to sweep it: it has a witness of its own, enters no list,
-- and both its keys end by themselves.
--
-- KEYS  witness, open, staged
-- ARGV  branch, a fresh name for the witness, name of the chunk, chunk, milliseconds to live or ''
-- Returns the witness's own name, for which a commit asks, and what has become of the branch, if it is
-- over.

local over = redis.call('HGET', KEYS[1], ARGV[1])
if over then
  return {'', over}
end
redis.call('HSETNX', KEYS[1], 'born', ARGV[2])
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
if ARGV[5] == '' then
  redis.call('SADD', KEYS[2], ARGV[1])
else
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
  redis.call('PEXPIRE', KEYS[3], ARGV[5])
end
return {redis.call('HGET', KEYS[1], 'born')}
