-- What several scripts do to jobs. Goes before each of them; KEYS[1] is the queue.
local queue = KEYS[1]
local leases, holders, suspects = queue .. ':leases', queue .. ':holders', queue .. ':suspects'
local classes, later = queue .. ':classes', queue .. ':later'
local load, tenants, dead = queue .. ':load', queue .. ':tenants', queue .. ':dead'

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)

-- Changes nothing, but a read-only replica refuses it: what that knows of jobs may be old. And after
-- it a server whose memory is full lets the script go on, as it must where room is made.
local function begin_writing() redis.call('DEL', queue .. ':none') end

local function ring()
  local doorbell = queue .. ':doorbell'
  if redis.call('LLEN', doorbell) == 0 then redis.call('LPUSH', doorbell, '1') end
end

-- Puts a job where it is due by its priority and tenant, having come at `arrival` (ms). `nth`
-- keeps the order of those that come in one call.
-- Jobs of a tenant, and of a priority below 0, wait in the lane of their priority, where tenants
-- take turns: a tenant's job has the turn after its last one, but none that is over.
local function place_of(priority, arrival) return arrival - priority * PRIORITY_STEP_MS end

local function place(id, priority, tenant, arrival, nth)
  if tenant == '' and priority >= 0 then
    redis.call('ZADD', queue, place_of(priority, arrival), id)
    return
  end
  local turns = queue .. ':turns:' .. priority
  local known = redis.call('HMGET', turns, 'over', '=' .. tenant)
  local turn = math.max(tonumber(known[1] or 0), tonumber(known[2] or 0)) + 1
  redis.call('HSET', turns, '=' .. tenant, turn)
  -- Those of one turn go by their time; the fraction of a turn says it to within hours.
  local fraction = now_us % 1e10 / 1e10 * 0.99 + nth * 1e-8
  redis.call('ZADD', queue .. ':lane:' .. priority, turn + fraction, id)
  redis.call('SADD', classes, priority)
  redis.call('ZADD', queue, arrival + HOLD_MS, id)
end

local function leave_lanes(id)
  for _, priority in ipairs(redis.call('SMEMBERS', classes)) do
    redis.call('ZREM', queue .. ':lane:' .. priority, id)
  end
end

-- A record that we wrote ends with the reply stream of whoever enqueued it and, a result's too,
-- with the hash of its content in 32 digits.
local function content_of(key)
  local tail = redis.call('GETRANGE', key, -36, -1)
  return string.sub(tail, 1, 4) == '\161h\217 ' and string.sub(tail, 5) or nil
end

local function reply_of(job_key)
  local tail = redis.call('GETRANGE', job_key, -512, -1)
  local at, found = 0, nil
  repeat
    found, at = at, string.find(tail, '\168reply_to', at + 1, true)
  until not at
  if found == 0 then return '' end
  local head = string.byte(tail, found + 9) or 192
  if head >= 160 and head < 192 then return string.sub(tail, found + 10, found + 9 + head - 160) end
  if head ~= 217 then return '' end
  return string.sub(tail, found + 11, found + 10 + string.byte(tail, found + 10))
end

local function is_holder(token, holder, owner, score)
  return holder and string.sub(holder, 1, #token) == token and (not owner or owner == token)
    and score and true or false
end

-- Whether the caller's claim on a job is the last one, and no stock arq worker has it; then also
-- whether its lease has run out, so that it may be among the suspects.
local function holds(id, token)
  local owner = redis.call('GET', IN_PROGRESS_PREFIX .. id)
  local held = is_holder(token, redis.call('HGET', holders, id), owner, redis.call('ZSCORE', queue, id))
  return held, held and not owner
end

local function renew_lease(id, token, lease_ms)
  redis.call('SET', IN_PROGRESS_PREFIX .. id, token, 'PX', lease_ms)
  redis.call('ZADD', queue, now_ms + lease_ms, id)
  redis.call('ZADD', leases, now_ms + lease_ms, id)
end

-- Adds to `reply` what a claim tells of a job that it has leased. Returns how many bytes that has.
local function tell(reply, id, old_place, tries, suspect, max_job_bytes)
  local payload, bytes = redis.call('STRLEN', JOB_PREFIX .. id), 0
  if payload <= max_job_bytes then payload = redis.call('GET', JOB_PREFIX .. id) end
  if type(payload) == 'string' then bytes = #payload end
  local progress = redis.pcall('LRANGE', PROGRESS_PREFIX .. id, 0, -1)
  if progress.err then progress = {} end
  for _, piece in ipairs(progress) do bytes = bytes + #piece end
  for _, value in ipairs({ id, old_place, tries, suspect, payload, progress }) do
    reply[#reply + 1] = value
  end
  return bytes
end

-- Adds a piece to a job's progress, of which the caller knows so many pieces; 0 begins it anew.
-- False where it has others.
local function add_progress(id, known, piece)
  local progress = PROGRESS_PREFIX .. id
  if tonumber(known) == 0 then
    redis.call('DEL', progress)
  elseif redis.call('LLEN', progress) ~= tonumber(known) then
    return false
  end
  redis.call('RPUSH', progress, piece)
  redis.call('PEXPIRE', progress, PROGRESS_TTL_MS)
  return true
end

local function remember_try(id, entry)
  redis.call('RPUSH', HISTORY_PREFIX .. id, entry)
  redis.call('LTRIM', HISTORY_PREFIX .. id, -MAX_HISTORY, -1)
  redis.call('PEXPIRE', HISTORY_PREFIX .. id, RETRY_TTL_MS)
end

-- What scripts cost is mostly the calls they make: what can be done for many jobs at once is.
local function keys_of(prefix, ids)
  local keys = {}
  for n, id in ipairs(ids) do keys[n] = prefix .. id end
  return keys
end

-- Takes a job out of all that counts jobs; `settle_load` writes down what that comes to.
local freed_bytes, has_tenants = 0, redis.call('EXISTS', tenants) == 1
local function uncount(id)
  freed_bytes = freed_bytes + redis.call('STRLEN', JOB_PREFIX .. id)
  local tenant = has_tenants and redis.call('HGET', tenants, id)
  if tenant then
    redis.call('HDEL', tenants, id)
    if redis.call('HINCRBY', load, '=' .. tenant, -1) <= 0 then
      redis.call('HDEL', load, '=' .. tenant)
    end
  end
end

-- The one end of jobs: writes their results, tells who waits, and leaves nothing else behind.
-- `ended` has id, record, ms that it is kept and reply stream of each, a thousand at most.
local function end_jobs(ended)
  if #ended == 0 then return end
  local ids, told = {}, {}
  for n, job in ipairs(ended) do
    ids[n] = job.id
    uncount(job.id)
    redis.call('SET', RESULT_PREFIX .. job.id, job.record, 'PX', job.ttl_ms)
  end
  redis.call('ZREM', queue, unpack(ids))
  redis.call('ZREM', leases, unpack(ids))
  redis.call('HDEL', holders, unpack(ids))
  local awaited = redis.call('EXISTS', unpack(keys_of(WAITERS_PREFIX, ids))) > 0
  for _, job in ipairs(ended) do
    local streams = awaited and redis.call('SMEMBERS', WAITERS_PREFIX .. job.id) or {}
    if job.reply ~= '' then streams[#streams + 1] = job.reply end
    for _, stream in ipairs(streams) do
      -- A key of another type must not keep the result from being written.
      redis.pcall('XADD', stream, '*', 'id', job.id)
      told[stream] = true
    end
  end
  for stream in pairs(told) do redis.call('PEXPIRE', stream, REPLY_TTL_MS) end
  for _, prefix in ipairs({ IN_PROGRESS_PREFIX, RETRY_PREFIX, JOB_PREFIX, WAITERS_PREFIX,
    HISTORY_PREFIX, PROGRESS_PREFIX }) do
    redis.call('DEL', unpack(keys_of(prefix, ids)))
  end
end

-- Counts drift where a stock arq worker ends jobs: an empty queue sets them right.
local function settle_load()
  if redis.call('EXISTS', queue) == 0 then
    redis.call('DEL', load, tenants)
  elseif freed_bytes > 0 then
    redis.call('HINCRBY', load, 'bytes', -freed_bytes)
  end
end
