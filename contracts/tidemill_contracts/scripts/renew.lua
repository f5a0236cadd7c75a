-- Renews leases. KEYS: queue, leases. ARGV: lease_ms, in-progress prefix, then id, token, …
-- Returns the ids that now belong to somebody else or have ended.
local queue, leases = KEYS[1], KEYS[2]
local lease_ms, in_progress_prefix = tonumber(ARGV[1]), ARGV[2]
local time = redis.call('TIME')
local expires = time[1] * 1000 + math.floor(time[2] / 1000) + lease_ms
local lost = {}
for i = 3, #ARGV, 2 do
  local id, token = ARGV[i], ARGV[i + 1]
  local owner = redis.call('GET', in_progress_prefix .. id)
  -- A lease that ran out while nobody else was there to claim the job is taken up again.
  if (owner == token or not owner) and redis.call('ZSCORE', queue, id) then
    redis.call('SET', in_progress_prefix .. id, token, 'PX', lease_ms)
    redis.call('ZADD', queue, expires, id)
    redis.call('ZADD', leases, expires, id)
  else
    lost[#lost + 1] = id
  end
end
return lost
