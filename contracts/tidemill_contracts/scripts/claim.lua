-- Takes up to `limit` due jobs and leases them to one worker.
--
-- KEYS  queue
-- ARGV  limit, lease_ms, token (32 characters), the worker's instance and name, how many jobs it
--       holds now, max_tries, most bytes of one job, most bytes of all
-- Returns { now_ms, ms until the next job is due (-1: none), 1 where the worker shall claim no more
--       until it is idle, then for each job: id, score, tries, 1 for a suspect, payload,
--       pieces of progress }
--       payload is false where Redis has lost it, its size where that is over the limit.
--
-- A job whose worker died is suspect: it runs alone, on a worker that has nothing else, so that it
-- takes no neighbour with it the second time. One busy worker at a time empties itself for them.
-- One that has spent its tries is given to anybody, to be given up.
local limit, lease_ms, token, instance, name = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4],
  ARGV[5]
local held, max_tries = tonumber(ARGV[6]), tonumber(ARGV[7])
local max_job_bytes, max_bytes = tonumber(ARGV[8]), tonumber(ARGV[9])
local SWEEP = 128
local MAX_LOOK = 1000
local quarantine = queue .. ':quarantine'
local reply, claimed, bytes = { now_ms, -1, 0 }, 0, 0

-- What is claimed is leased in so many jobs at once.
local MAX_LEASED = 256
local holder = token .. ' ' .. instance .. ' ' .. now_ms .. ' ' .. name
local leased, held_by = {}, {}
-- When leases end, of the jobs last looked at; and which of these a stock arq worker runs.
local lease_ends, run_by_arq = {}, {}

local function lease()
  if #leased == 0 then return end
  redis.call('ZADD', queue, unpack(leased))
  redis.call('ZADD', leases, unpack(leased))
  redis.call('HSET', holders, unpack(held_by))
  leased, held_by = {}, {}
end

local function claim(id, score, suspect)
  redis.call('SET', IN_PROGRESS_PREFIX .. id, token, 'PX', lease_ms)
  leased[#leased + 1], leased[#leased + 2] = now_ms + lease_ms, id
  held_by[#held_by + 1], held_by[#held_by + 2] = id, holder
  lease_ends[id] = now_ms + lease_ms
  if #leased == 2 * MAX_LEASED then lease() end
  local tries = tonumber(redis.call('GET', RETRY_PREFIX .. id) or 0) + 1
  redis.call('SET', RETRY_PREFIX .. id, tries, 'PX', RETRY_TTL_MS)
  bytes = bytes + tell(reply, id, string.format('%.17g', score), tries, suspect, max_job_bytes)
  claimed = claimed + 1
end

local function room() return claimed < limit and bytes < max_bytes end

-- Leases that ran out: their workers are dead, or were away for too long.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now_ms, 'LIMIT', 0, SWEEP)) do
  redis.call('ZREM', leases, id)
  if not redis.call('ZSCORE', queue, id) then
    redis.call('HDEL', holders, id)
  elseif redis.call('GET', IN_PROGRESS_PREFIX .. id) ~= '1' then
    local tries = tonumber(redis.call('GET', RETRY_PREFIX .. id) or 0)
    local holder = redis.call('HGET', holders, id) or ''
    local since, worker = string.match(holder, '^%S+ %S+ (%d+) (.*)$')
    remember_try(id, cmsgpack.pack({
      number = tries, worker = worker or '', started_ms = tonumber(since or 0), ended_ms = now_ms,
      error = 'worker_died',
    }))
    redis.call('DEL', IN_PROGRESS_PREFIX .. id)
    redis.call('ZADD', suspects, tries >= max_tries and 0 or now_ms, id)
    redis.call('ZADD', queue, now_ms + HOLD_MS, id)
  end
end

local function take_suspect(id)
  redis.call('ZREM', suspects, id)
  if redis.call('ZSCORE', queue, id) then claim(id, now_ms, 1) end
end

local waiting = redis.call('ZCARD', suspects)
if waiting > 0 then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', suspects, 0, 0, 'LIMIT', 0, limit)) do
    take_suspect(id)
  end
  local first = redis.call('ZRANGE', suspects, 0, 0)[1]
  if not first then
    redis.call('DEL', quarantine)
  elseif held == 0 and claimed == 0 then
    take_suspect(first)
    lease()
    return reply
  elseif redis.call('SET', quarantine, instance, 'NX', 'PX', 2 * lease_ms)
    or redis.call('GET', quarantine) == instance then
    redis.call('PEXPIRE', quarantine, 2 * lease_ms)
    lease()
    reply[3] = 1
    return reply
  end
end

-- What is due in arq's own set, oldest first.
local due, at, more = {}, 1, true
local moves = SWEEP
local has_later = redis.call('EXISTS', later) == 1
local priorities = redis.call('SMEMBERS', classes)

local function look()
  local most = math.min(limit - claimed, MAX_LOOK)
  due = redis.call('ZRANGEBYSCORE', queue, '-inf', now_ms, 'WITHSCORES', 'LIMIT', 0, most)
  at, more = 1, #due == 2 * most
  lease_ends, run_by_arq = {}, {}
  if #due == 0 then return end
  local ids = {}
  for i = 1, #due, 2 do ids[#ids + 1] = due[i] end
  for n, lease_end in ipairs(redis.call('ZMSCORE', leases, unpack(ids))) do
    lease_ends[ids[n]] = lease_end
  end
  local in_progress = keys_of(IN_PROGRESS_PREFIX, ids)
  if redis.call('EXISTS', unpack(in_progress)) > 0 then
    for n, key in ipairs(in_progress) do run_by_arq[ids[n]] = redis.call('EXISTS', key) == 1 end
  end
end

local function due_head()
  while true do
    if at > #due then
      if not more then return nil end
      lease()
      look()
      if #due == 0 then return nil end
    end
    local id, score = due[at], due[at + 1]
    local leased_until = lease_ends[id]
    local deferred = has_later and moves > 0 and redis.call('HGET', later, id)
    if leased_until then
      -- Somebody moved it, as arq's `Job.abort` does: it runs nevertheless.
      redis.call('ZADD', queue, leased_until, id)
    elseif waiting > 0 and redis.call('ZSCORE', suspects, id) then
      redis.call('ZADD', queue, now_ms + HOLD_MS, id)
    elseif run_by_arq[id] then
      -- A stock arq worker runs it and leaves it at its old score: look again later.
      redis.call('ZADD', queue, now_ms + lease_ms, id)
    elseif deferred then
      -- Its time has come: now it takes its place.
      moves = moves - 1
      redis.call('HDEL', later, id)
      local priority, tenant = string.match(deferred, '^(%S+) (.*)$')
      place(id, tonumber(priority), tenant, tonumber(score), 0)
      priorities = redis.call('SMEMBERS', classes)
      due, at, more = {}, 0, true
    else
      return id, tonumber(score)
    end
    at = at + (#due > 0 and 2 or 1)
  end
end

-- The first job of a lane, its turn, and when it came less its priority; nil for an empty lane,
-- which is forgotten.
local function lane_head(priority)
  local lane = queue .. ':lane:' .. priority
  while true do
    local head = redis.call('ZRANGE', lane, 0, 0, 'WITHSCORES')
    if not head[1] then
      redis.call('SREM', classes, priority)
      redis.call('DEL', queue .. ':turns:' .. priority)
      return nil
    end
    local score = redis.call('ZSCORE', queue, head[1])
    if score and not redis.call('ZSCORE', leases, head[1]) then
      local came = score - HOLD_MS
      return { id = head[1], turn = math.floor(head[2]), came = came, lane = lane,
        rank = came - priority * PRIORITY_STEP_MS, turns = queue .. ':turns:' .. priority }
    end
    redis.call('ZREM', lane, head[1])
  end
end

-- The lane whose head has waited longest, each step of priority counted as a minute.
local function best_lane()
  local best
  for _, priority in ipairs(priorities) do
    local head = lane_head(priority)
    if head and (not best or head.rank < best.rank) then best = head end
  end
  return best
end

local function take_from_lane(head)
  redis.call('ZREM', head.lane, head.id)
  redis.call('HSET', head.turns, 'over', head.turn)
  claim(head.id, head.came, 0)
end

-- Jobs without a tenant are one tenant more in the turns of priority 0.
local function turn_of_due(head)
  local known = redis.call('HMGET', head.turns, 'over', 'due')
  return math.max(tonumber(known[1] or 0), tonumber(known[2] or 0) + 1)
end

while room() do
  local id, score = due_head()
  local head = #priorities > 0 and best_lane()
  if not id and not head then break end
  local plain = head and head.lane == queue .. ':lane:0'
  local turn = id and plain and turn_of_due(head)
  if head and (not id or (plain and head.turn <= turn) or (not plain and head.rank < score)) then
    take_from_lane(head)
  else
    if plain then redis.call('HSET', head.turns, 'due', turn, 'over', turn) end
    if #priorities > 0 then leave_lanes(id) end
    claim(id, score, 0)
    at = at + 2
  end
end

lease()
local first = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
if first[2] then
  reply[2] = math.max(0, first[2] - now_ms)
  -- There is more than this worker took: wake another.
  if claimed > 0 and (reply[2] == 0 or redis.call('EXISTS', classes) == 1) then ring() end
end
return reply
