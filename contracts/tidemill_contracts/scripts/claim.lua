-- Takes up to `limit` due jobs and leases them to one worker.
-- KEYS: queue, leases, doorbell. ARGV: limit, lease_ms, token, retry_ttl_ms, and the key prefixes
-- job, in-progress, retry.
-- Returns { now_ms, ms until the next job is due (-1: none), id, score, tries, payload, id, … };
-- payload is false where Redis has lost it.
local queue, leases = KEYS[1], KEYS[2]
local limit, lease_ms, token = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local job_prefix, in_progress_prefix, retry_prefix = ARGV[5], ARGV[6], ARGV[7]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local claimed, taken = { now, -1 }, {}

local function claim(id, score)
  if taken[id] then return end
  taken[id] = true
  local owner = redis.call('GET', in_progress_prefix .. id)
  if owner and (owner == '1' or not redis.call('ZSCORE', leases, id)) then
    -- A stock arq worker runs it and leaves it at its old score: look again later.
    redis.call('ZADD', queue, 'XX', now + lease_ms, id)
    redis.call('ZREM', leases, id)
    return
  end
  redis.call('SET', in_progress_prefix .. id, token, 'PX', lease_ms)
  redis.call('ZADD', queue, now + lease_ms, id)
  redis.call('ZADD', leases, now + lease_ms, id)
  local tries = redis.call('INCR', retry_prefix .. id)
  redis.call('PEXPIRE', retry_prefix .. id, ARGV[4])
  local payload = redis.call('GET', job_prefix .. id)
  for _, value in ipairs({ id, score, tries, payload }) do claimed[#claimed + 1] = value end
end

-- Jobs of dead workers first: they have waited longest. Handed back, they go to the front.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, limit)) do
  claim(id, '1')
end
local due = redis.call('ZRANGEBYSCORE', queue, '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
for i = 1, #due, 2 do
  if #claimed >= 2 + 4 * limit then break end
  claim(due[i], due[i + 1])
end
local first = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
if first[2] then
  claimed[2] = math.max(0, first[2] - now)
  -- There is more than this worker took: wake another.
  if claimed[2] == 0 and #claimed > 2 and redis.call('LLEN', KEYS[3]) == 0 then
    redis.call('LPUSH', KEYS[3], '1')
  end
end
return claimed
