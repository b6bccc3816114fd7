-- Move the branches of a batch to their target and write their witness, in one step.
--
-- A script that fails half-way is not undone. So it checks everything that can fail before it changes
-- anything, and it does the same checks before the decision and after it. If the first change fails in
-- spite of that, nothing is changed. If a later change fails, the witness stays `moving`, and the rows
-- are not moved a second time.
--
-- KEYS  witness, open, target (the witness again where each row has a key of its own), then staged
--       of each branch
-- ARGV  'check' or 'move', the shape as JSON, then of each branch: name, batch, the witness's identity,
--       chunks, rows
--
-- Returns an answer for each branch: committed, aborted, moving, no witness, prepared, or what is
-- wrong.

local witness, open, target = KEYS[1], KEYS[2], KEYS[3]
local moving = ARGV[1] == 'move'
local shape = cjson.decode(ARGV[2])
local width, kind = shape.width, shape.kind
local GROUP = 4000 -- arguments of one command; Lua allows fewer than 8000

local answers, ready = {}, {}
local born = redis.call('HGET', witness, 'born')
local floor = tonumber(redis.call('HGET', witness, 'floor') or '0')

-- The state of each branch.

local function drop(branch, staged)
  -- From now on nobody can move it. That proves that it is lost.
  redis.call('HSET', witness, branch, 'aborted')
  redis.call('UNLINK', staged)
  redis.call('SREM', open, branch)
end

local function whole(staged, chunks, rows)
  -- A chunk is named NUMBER:ROWS, or NUMBER?:ROWS if a value in it may be nil.
  local names, found = redis.call('HKEYS', staged), 0
  for _, name in ipairs(names) do
    found = found + tonumber(string.match(name, ':(%d+)$') or '0')
  end
  table.sort(names, function(a, b) -- in the order in which they were written
    return tonumber(string.match(a, '^%d+') or '0') < tonumber(string.match(b, '^%d+') or '0')
  end)
  if #names == chunks and found == rows then
    return names
  end
  return nil, #names .. ' chunks with ' .. found .. ' rows are staged, but ' .. chunks .. ' with '
    .. rows .. ' were prepared'
end

for i = 4, #KEYS do
  local at = 3 + (i - 4) * 5
  local branch, batch, name = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
  local answer = redis.call('HGET', witness, branch)
  local names, problem
  if not answer and (born ~= name or batch < floor) then
    answer = 'no witness' -- it was deleted, or was pruned of this batch
  elseif not answer then
    if redis.call('EXISTS', KEYS[i]) == 0 then
      problem = 'its staged rows are gone'
    else
      names, problem = whole(KEYS[i], tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]))
    end
    if names then
      ready[#ready + 1] = {slot = i - 3, branch = branch, staged = KEYS[i], names = names}
    elseif moving then
      drop(branch, KEYS[i])
      answer = 'aborted'
    else
      answer = problem
    end
  end
  answers[i - 3] = answer or 'prepared'
end

-- If a batch lost a branch, all of the batch is lost, as long as nothing of it can be at the target.
-- Otherwise readers would see a part of the batch, and the replayed branch would come later and overwrite
-- rows with a greater order.

local lost, untouched = false, true
for _, answer in ipairs(answers) do
  lost = lost or answer == 'aborted'
  untouched = untouched and (answer == 'aborted' or answer == 'prepared')
end
if moving and lost and untouched then
  for _, it in ipairs(ready) do
    drop(it.branch, it.staged)
    answers[it.slot] = 'aborted'
  end
  ready = {}
end

local function finished()
  -- A committed branch leaves nothing behind, also if an operator set it to committed.
  for i = 4, #KEYS do
    if answers[i - 3] == 'committed' then
      redis.call('UNLINK', KEYS[i])
      redis.call('SREM', open, ARGV[3 + (i - 4) * 5])
    end
  end
  -- Every answer needs a write. A replica, which may not have the witness yet, refuses the write.
  redis.call('SREM', open, '')
  return answers
end

if #ready == 0 then
  return moving and finished() or answers
end

-- Iterate over the rows of all branches that are ready.

local function each_chunk(take)
  local serial = 0
  for _, it in ipairs(ready) do
    for _, name in ipairs(it.names) do
      local items = cmsgpack.unpack(redis.call('HGET', it.staged, name))
      local rows = tonumber(string.match(name, ':(%d+)$'))
      take(items, rows, serial, string.find(name, '?', 1, true))
      serial = serial + rows
    end
  end
end

local winner
if shape.order and moving then
  -- Of several rows for one key the greatest wins, whatever its branch.
  winner = {}
  local best = {}
  each_chunk(function(items, rows, serial)
    for row = 1, rows do
      local base = (row - 1) * width
      local key, order = items[base + 1], items[base + width]
      if not best[key] or order > best[key] then
        best[key], winner[key] = order, serial + row
      end
    end
  end)
end

local function each_row(take)
  each_chunk(function(items, rows, serial, with_nil)
    for row = 1, rows do
      local base = (row - 1) * width
      if not winner or winner[items[base + 1]] == serial + row then
        take(items, base, with_nil)
      end
    end
  end)
end

-- What would make the move fail: first of all, what is at the target already.

local TYPES = {
  hash_set = 'hash', hash_add = 'hash', list = 'list', stream = 'stream', counter = 'string',
  key_hash = 'hash', key_add = 'string',
}
local ADDS = {hash_add = true, key_add = true, counter = true}

local problem -- the first one

local function shown(key) -- in a message
  return #key > 100 and string.sub(key, 1, 100) .. '...' or key
end

local function need_type(key)
  if problem then
    return
  end
  local is = redis.call('TYPE', key)['ok']
  if is ~= 'none' and is ~= TYPES[kind] then
    problem = 'key ' .. shown(key) .. ' is of type ' .. is .. ', but the sink needs ' .. TYPES[kind]
  end
end

local function need_right(command, key, ...)
  if problem or not redis.acl_check_cmd then -- servers before 7 cannot tell
    return
  end
  local known, allowed = pcall(redis.acl_check_cmd, command, key, ...)
  if not (known and allowed) then
    problem = 'the server does not let the user run ' .. command .. ' with key ' .. shown(key)
  end
end

local function need_here(keys)
  -- While a slot moves to another node of a cluster, some of its keys are here and some there. Both nodes
  -- then refuse a command that names several keys and misses one. They accept one that names a single key.
  if not problem and #keys > 0 then
    redis.call('EXISTS', witness, unpack(keys))
  end
end

local function need_ids()
  -- Each entry's id must be above the last one, and there is a greatest id.
  local info = redis.pcall('XINFO', 'STREAM', target)
  for at = 1, #info, 2 do -- empty if it failed: there is no stream yet, or no permission
    local time, number = string.match(info[at] == 'last-generated-id' and info[at + 1] or '', '(%d+)-(%d+)')
    if time == '18446744073709551615' and tonumber(number) >= 2 ^ 64 - 2 ^ 32 then
      problem = 'stream ' .. shown(target) .. ' has no id left that is above its last one'
    end
  end
end

-- Sums. Lua's numbers are exact only up to 2^53, so an integer is two of them: HIGH * 10^9 + LOW.

local BASE = 1e9

local function split(text)
  if #text <= 9 then
    return 0, tonumber(text)
  end
  local sign = string.byte(text) == 45 and -1 or 1 -- a minus
  local digits = sign < 0 and string.sub(text, 2) or text
  return sign * (tonumber(string.sub(digits, 1, -10)) or 0), sign * tonumber(string.sub(digits, -9))
end

local function settled(high, low) -- so that 0 <= low < BASE
  local rest = math.fmod(low, BASE)
  if rest < 0 then
    rest = rest + BASE
  end
  return high + (low - rest) / BASE, rest
end

local function overflows(high, low) -- 64 bits
  if math.abs(high) < 9e9 and math.abs(low) < 1e17 then -- as nearly always
    return false
  end
  high, low = settled(high, low)
  return high > 9223372036 or (high == 9223372036 and low > 854775807)
    or high < -9223372037 or (high == -9223372037 and low < 145224192)
end

local function spelled(high, low)
  high, low = settled(high, low)
  local sign = ''
  if high < 0 then
    sign = '-'
    high, low = settled(-high, 0 - low) -- never -0, which '%09.0f' would write with its sign
  end
  if high == 0 then
    return sign .. string.format('%.0f', low)
  end
  return sign .. string.format('%.0f%09.0f', high, low)
end

local sums = {} -- by field, or by key

local function sum_up()
  each_row(function(items, base)
    local id, amount = kind == 'counter' and target or items[base + 1], items[base + width]
    local sum = sums[id]
    if not sum then
      sum = {high = 0, low = 0}
      sums[id] = sum
    end
    if shape.float then
      sum.low = sum.low + math.abs(tonumber(amount)) -- the maximum, in whatever order
    else
      local high, low = split(amount)
      sum.high, sum.low = sum.high + high, sum.low + low
      if math.abs(sum.low) >= 1e15 then -- before a Lua number cannot hold it
        sum.high, sum.low = settled(sum.high, sum.low)
      end
    end
  end)
end

local function place(id)
  return kind == 'counter' and target or shape.prefix .. id
end

local function need_sum(id, sum)
  local old
  if kind == 'hash_add' then old = redis.call('HGET', target, id) else old = redis.call('GET', place(id)) end
  old = old or '0'
  local number, overflow
  if shape.float then
    -- Lua accepts more texts as numbers than the server does.
    number = #old < 1000 and string.match(old, '^[-+.%deE]+$') and tonumber(old)
    overflow = number and math.abs(number) + sum.low == math.huge
  elseif #old <= 20 and (old == '0' or string.match(old, '^-?[1-9]%d*$')) then
    local high, low = split(old)
    number = not overflows(high, low)
    overflow = overflows(sum.high, sum.low) or overflows(high + sum.high, low + sum.low)
  end
  if number and not overflow then
    return
  end
  local where = 'key ' .. shown(place(id))
  if kind == 'hash_add' then
    where = 'field ' .. shown(id) .. ' of ' .. shown(target)
  end
  if number then
    problem = 'adding to ' .. where .. ' would overflow' .. (shape.float and '' or ' 64 bits')
  else
    problem = where .. ' holds what is not a' .. (shape.float and ' number' or 'n integer of 64 bits')
  end
end

local INT, HINT = 'INCRBY', 'HINCRBY'
if shape.float then
  INT, HINT = 'INCRBYFLOAT', 'HINCRBYFLOAT'
end

local function look_at_keys()
  local keys = {}
  each_row(function(items, base, with_nil)
    local key = shape.prefix .. items[base + 1]
    keys[#keys + 1] = key
    if #keys >= GROUP then
      need_here(keys)
      keys = {}
    end
    if kind == 'key_add' then
      need_right(INT, key, '1')
    elseif kind == 'key_hash' then
      need_right('HSET', key, '', '')
      if with_nil then need_right('HDEL', key, '') end
      if shape.expire_ms then need_right('PEXPIRE', key, '1') end
    elseif items[base + 2] then
      need_right('SET', key, '')
    else
      need_right('DEL', key)
    end
    if kind ~= 'key_set' then need_type(key) end
  end)
  need_here(keys)
end

local function look_at_target()
  need_type(target)
  if kind == 'hash_set' then
    need_right('HSET', target, '', '')
    for _, it in ipairs(ready) do
      if string.find(table.concat(it.names), '?', 1, true) then need_right('HDEL', target, '') end
    end
  elseif kind == 'hash_add' then
    need_right(HINT, target, '', '1')
  elseif kind == 'counter' then
    need_right(INT, target, '1')
  elseif kind == 'list' then
    need_right('RPUSH', target, '')
  elseif kind == 'stream' then
    need_right('XADD', target, '*', '', '')
    if not problem then need_ids() end
  end
end

need_right('UNLINK', ready[1].staged)
need_right('SREM', open, '')
need_right('HDEL', witness, '')
if shape.target == '' then
  look_at_keys()
else
  look_at_target()
end
if ADDS[kind] and not problem then
  sum_up()
  for id, sum in pairs(sums) do
    need_sum(id, sum)
    if problem then break end
  end
end

if problem and moving then
  return redis.error_reply('POUNDLOCK ' .. problem)
end
if not moving then
  for _, it in ipairs(ready) do
    answers[it.slot] = problem or 'prepared'
  end
  return answers
end

-- The move.

local changed = false

local function write(...)
  redis.call(...)
  changed = true
end

local pending = {}

local function flush()
  if #pending > 0 then
    write('HSET', target, unpack(pending))
    pending = {}
  end
end

local function gather(field, value)
  pending[#pending + 1] = field
  pending[#pending + 1] = value
  if #pending >= GROUP then
    flush()
  end
end

local function add(id, amount)
  if kind == 'hash_add' then
    write(HINT, target, id, amount)
  else
    write(INT, place(id), amount)
  end
end

local MOVES = {
  hash_set = function(items, base)
    local field, value = items[base + 1], items[base + 2]
    if value then
      gather(field, value)
    else
      flush()
      write('HDEL', target, field)
    end
  end,
  key_set = function(items, base)
    local key, value = shape.prefix .. items[base + 1], items[base + 2]
    if not value then
      write('DEL', key)
    elseif shape.expire_ms then
      write('SET', key, value, 'PX', shape.expire_ms)
    else
      write('SET', key, value)
    end
  end,
  key_hash = function(items, base)
    local key, set, gone = shape.prefix .. items[base + 1], {}, {}
    for number, name in ipairs(shape.fields) do
      local value = items[base + 1 + number]
      if value then
        set[#set + 1] = name
        set[#set + 1] = value
      else
        gone[#gone + 1] = name
      end
    end
    if #set > 0 then write('HSET', key, unpack(set)) end
    if #gone > 0 then write('HDEL', key, unpack(gone)) end
    if shape.expire_ms then write('PEXPIRE', key, shape.expire_ms) end
  end,
  stream = function(items, base)
    local entry = {}
    for number, name in ipairs(shape.fields) do
      local value = items[base + number]
      if value then
        entry[#entry + 1] = name
        entry[#entry + 1] = value
      end
    end
    write('XADD', target, '*', unpack(entry))
  end,
}

local function move()
  if ADDS[kind] and shape.float then
    -- Row by row, because the server adds with more digits than Lua.
    each_row(function(items, base)
      add(items[base + 1], items[base + width])
    end)
  elseif ADDS[kind] then
    for id, sum in pairs(sums) do
      add(id, spelled(sum.high, sum.low))
    end
  elseif kind == 'list' or (kind == 'hash_set' and not winner) then
    -- Values are in the order that the command needs: no step per row, unless some are nil.
    local command = kind == 'list' and 'RPUSH' or 'HSET'
    each_chunk(function(items, rows, _, with_nil)
      if with_nil then
        for row = 1, rows do
          MOVES[kind](items, (row - 1) * width)
        end
        flush()
      else
        for first = 1, rows * width, GROUP do
          write(command, target, unpack(items, first, math.min(first + GROUP - 1, rows * width)))
        end
      end
    end)
  else
    each_row(MOVES[kind])
  end
  flush()
end

for _, it in ipairs(ready) do
  redis.call('HSET', witness, it.branch, 'moving')
end
local fine, why = pcall(move)
if not fine and changed then
  error(why, 0)
elseif not fine then
  for _, it in ipairs(ready) do
    redis.call('HDEL', witness, it.branch)
  end
  return redis.error_reply('POUNDLOCK ' .. (type(why) == 'table' and why.err or tostring(why)))
end

for _, it in ipairs(ready) do
  redis.call('HSET', witness, it.branch, 'committed')
  answers[it.slot] = 'committed'
end
return finished()
