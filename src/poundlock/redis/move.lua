-- Move the branches of a batch to their target and write their witness, in one step.
--
-- A script is not undone when it fails half-way. So everything that can fail is looked at before
-- anything is changed, and increments, whose overflow cannot be foreseen, are undone by us. Should it
-- fail all the same, the witness says `moving`, and nobody moves the rows a second time.
--
-- KEYS  witness, open, target (the witness again where each row has a key of its own), then staged
--       of each branch
-- ARGV  'check' or 'move', the shape as JSON, then of each branch: name, batch, the witness's name,
--       chunks, rows
--
-- Returns an answer for each branch: committed, aborted, moving, no witness, prepared, or what is
-- wrong.

local witness, open, target = KEYS[1], KEYS[2], KEYS[3]
local moving = ARGV[1] == 'move'
local shape = cjson.decode(ARGV[2])
local width, kind = shape.width, shape.kind
local GROUP = 4000 -- arguments of one command; Lua takes less than 8000

local answers, ready = {}, {}
local born = redis.call('HGET', witness, 'born')
local floor = tonumber(redis.call('HGET', witness, 'floor') or '0')

-- Where each branch stands.

local function drop(branch, staged)
  -- From now on nobody can move it: that proves it lost.
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
  local said = redis.call('HGET', witness, branch)
  local names, problem
  if not said and (born ~= name or batch < floor) then
    said = 'no witness' -- it was deleted, or has forgotten this batch
  elseif not said then
    if redis.call('EXISTS', KEYS[i]) == 0 then
      problem = 'what was staged is gone'
    else
      names, problem = whole(KEYS[i], tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]))
    end
    if names then
      ready[#ready + 1] = {slot = i - 3, branch = branch, staged = KEYS[i], names = names}
    elseif moving then
      drop(branch, KEYS[i])
      said = 'aborted'
    else
      said = problem
    end
  end
  answers[i - 3] = said or 'prepared'
end

-- A batch that lost a part is lost whole, as long as nothing of it can be at the target. Moved by halves
-- it would be seen by halves, and what takes the lost part's place would come later, and overwrite
-- rows of a greater order.

local lost, untouched = false, true
for _, said in ipairs(answers) do
  lost = lost or said == 'aborted'
  untouched = untouched and (said == 'aborted' or said == 'prepared')
end
if moving and lost and untouched then
  for _, it in ipairs(ready) do
    drop(it.branch, it.staged)
    answers[it.slot] = 'aborted'
  end
  ready = {}
end

if #ready == 0 then
  return answers
end

-- Going through the rows of all branches that are ready.

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
  -- Of several rows for one key the greatest wins, in whatever branch it is.
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
  each_chunk(function(items, rows, serial)
    for row = 1, rows do
      local base = (row - 1) * width
      if not winner or winner[items[base + 1]] == serial + row then
        take(items, base)
      end
    end
  end)
end

-- What is at the target already.

local TYPES = {
  hash_set = 'hash', hash_add = 'hash', list = 'list', stream = 'stream', counter = 'string',
  key_hash = 'hash', key_add = 'string',
}

local function shown(key) -- in a message
  return #key > 100 and string.sub(key, 1, 100) .. '...' or key
end

local function misfit(key)
  local is = redis.call('TYPE', key)['ok']
  if is ~= 'none' and is ~= TYPES[kind] then
    return 'key ' .. shown(key) .. ' is of type ' .. is .. ', but the sink needs ' .. TYPES[kind]
  end
end

local function not_a_number(value, where)
  if not value then
    return nil
  end
  local whole = value == '0' or string.match(value, '^-?[1-9]%d*$')
  if (shape.float and tonumber(value)) or (not shape.float and whole) then
    return nil
  end
  return where .. ' holds what is not a' .. (shape.float and ' number' or 'n integer')
end

local function problem_at_target()
  local problem
  if kind == 'key_set' then
    return nil
  elseif kind == 'key_hash' or kind == 'key_add' then
    each_row(function(items, base)
      local key = shape.prefix .. items[base + 1]
      problem = problem or misfit(key)
      if not problem and kind == 'key_add' then
        problem = not_a_number(redis.call('GET', key), 'key ' .. shown(key))
      end
    end)
    return problem
  end
  problem = misfit(target)
  if not problem and kind == 'counter' then
    problem = not_a_number(redis.call('GET', target), 'key ' .. shown(target))
  elseif not problem and kind == 'hash_add' and not moving then
    each_row(function(items, base)
      local field = items[base + 1]
      problem = problem
        or not_a_number(redis.call('HGET', target, field), 'field ' .. shown(field) .. ' of ' .. shown(target))
    end)
  end
  return problem
end

local problem = problem_at_target()
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

local pending = {}

local function flush()
  if #pending > 0 then
    redis.call('HSET', target, unpack(pending))
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

local before, failed = {}, nil

local function add(command, read, write, delete, key, field, amount)
  -- `before` remembers what stood there, to put it back.
  local id = field or key
  if before[id] == nil then
    local old
    if field then old = redis.call(read, key, field) else old = redis.call(read, key) end
    before[id] = {key = key, field = field, old = old, write = write, delete = delete}
  end
  local answer
  if field then
    answer = redis.pcall(command, key, field, amount)
  else
    answer = redis.pcall(command, key, amount)
  end
  if type(answer) == 'table' and answer.err then
    failed = 'adding to key ' .. shown(key) .. (field and (', field ' .. shown(field)) or '') .. ' fails: '
      .. answer.err
  end
end

local function put_back()
  for _, it in pairs(before) do
    if it.old and it.field then
      redis.call(it.write, it.key, it.field, it.old)
    elseif it.old then
      redis.call(it.write, it.key, it.old, 'KEEPTTL')
    elseif it.field then
      redis.call(it.delete, it.key, it.field)
    else
      redis.call(it.delete, it.key)
    end
  end
end

local INT, HINT = 'INCRBY', 'HINCRBY'
if shape.float then
  INT, HINT = 'INCRBYFLOAT', 'HINCRBYFLOAT'
end

local MOVES = {
  hash_set = function(items, base)
    local field, value = items[base + 1], items[base + 2]
    if value then
      gather(field, value)
    else
      flush()
      redis.call('HDEL', target, field)
    end
  end,
  hash_add = function(items, base)
    if not failed then
      add(HINT, 'HGET', 'HSET', 'HDEL', target, items[base + 1], items[base + 2])
    end
  end,
  key_add = function(items, base)
    if not failed then
      add(INT, 'GET', 'SET', 'DEL', shape.prefix .. items[base + 1], nil, items[base + 2])
    end
  end,
  counter = function(items, base)
    if not failed then
      add(INT, 'GET', 'SET', 'DEL', target, nil, items[base + 1])
    end
  end,
  key_set = function(items, base)
    local key, value = shape.prefix .. items[base + 1], items[base + 2]
    if not value then
      redis.call('DEL', key)
    elseif shape.expire_ms then
      redis.call('SET', key, value, 'PX', shape.expire_ms)
    else
      redis.call('SET', key, value)
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
    if #set > 0 then redis.call('HSET', key, unpack(set)) end
    if #gone > 0 then redis.call('HDEL', key, unpack(gone)) end
    if shape.expire_ms then redis.call('PEXPIRE', key, shape.expire_ms) end
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
    redis.call('XADD', target, '*', unpack(entry))
  end,
}

for _, it in ipairs(ready) do
  redis.call('HSET', witness, it.branch, 'moving')
end
if kind == 'list' or (kind == 'hash_set' and not winner) then
  -- Values stand in the order that the command wants: no step per row, unless some are nil.
  local command = kind == 'list' and 'RPUSH' or 'HSET'
  each_chunk(function(items, rows, _, with_nil)
    if with_nil then
      for row = 1, rows do
        MOVES[kind](items, (row - 1) * width)
      end
      flush()
    else
      for first = 1, rows * width, GROUP do
        redis.call(command, target, unpack(items, first, math.min(first + GROUP - 1, rows * width)))
      end
    end
  end)
else
  each_row(MOVES[kind])
end
if failed then
  put_back()
  for _, it in ipairs(ready) do
    redis.call('HDEL', witness, it.branch)
  end
  return redis.error_reply('POUNDLOCK ' .. failed)
end
flush()

for _, it in ipairs(ready) do
  redis.call('UNLINK', it.staged)
  redis.call('HSET', witness, it.branch, 'committed')
  redis.call('SREM', open, it.branch)
  answers[it.slot] = 'committed'
end
return answers
