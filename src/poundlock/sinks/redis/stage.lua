-- Stage one chunk of a branch.
--
-- The branch enters the set of open branches in the same step as its rows, every time. So whatever is
-- staged can be found and swept. A branch that has ended is not opened again, neither by a zombie nor by
-- a command that arrives twice.
--
-- No sweep looks for a branch that is moved without a decision. It has a witness of its own, is in no
-- set, and both its keys expire.
--
-- KEYS  witness, open, staged
-- ARGV  branch, a new identity for the witness, name of the chunk, chunk, milliseconds to live or ''
-- Returns the identity of the witness, which a commit checks, and how the branch ended, if it has.

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
