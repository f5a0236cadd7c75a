-- The jobs of a claim whose answer was lost: returns what that answer said of those that it
-- leased and that nobody has taken since. No try is spent on them again.
-- KEYS: queue. ARGV: lease_ms, the claim's token.
-- Returns as a claim does. Handed back, the jobs go to the front; one that was tried before counts
-- as a suspect.
begin_writing()
local lease_ms, token = tonumber(ARGV[1]), ARGV[2]
local reply = { now_ms, -1, 0 }
for _, id in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
  if redis.call('GET', IN_PROGRESS_PREFIX .. id) == token then
    redis.call('SET', IN_PROGRESS_PREFIX .. id, token, 'PX', lease_ms)
    redis.call('ZADD', queue, now_ms + lease_ms, id)
    redis.call('ZADD', leases, now_ms + lease_ms, id)
    local tries = tonumber(redis.call('GET', RETRY_PREFIX .. id) or 1)
    local progress = redis.pcall('LRANGE', PROGRESS_PREFIX .. id, 0, -1)
    if progress.err then progress = {} end
    local suspect, payload = tries > 1 and 1 or 0, redis.call('GET', JOB_PREFIX .. id)
    for _, value in ipairs({ id, '1', tries, suspect, payload, progress }) do
      reply[#reply + 1] = value
    end
  end
end
return reply
