-- Put one chunk of a branch aside.
--
-- The branch enters the list of open ones in the same step as its rows, every time: whatever is
-- staged can be found and swept, also what a zombie stages again after its branch was dropped.
--
-- KEYS  witness, open, staged
-- ARGV  branch, a fresh name for the witness, name of the chunk, chunk
-- Returns the witness's own name: a commit asks for the same one.

redis.call('HSETNX', KEYS[1], 'born', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
return redis.call('HGET', KEYS[1], 'born')
