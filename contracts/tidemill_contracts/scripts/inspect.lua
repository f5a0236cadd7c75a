-- Where jobs are. KEYS: queue. ARGV: ids.
-- Returns { now_ms, then for each: result or false, score or false, lease's end or false, holder or
-- false, tries, 1 for a suspect, 1 where it waits in a lane or was deferred into one, head and tail
-- of its record }
local reply = { now_ms }
for _, id in ipairs(ARGV) do
  local in_lane = 0
  for _, priority in ipairs(redis.call('SMEMBERS', classes)) do
    if redis.call('ZSCORE', queue .. ':lane:' .. priority, id) then in_lane = 1 end
  end
  local lease = redis.call('ZSCORE', leases, id)
  if not lease and redis.call('EXISTS', IN_PROGRESS_PREFIX .. id) == 1 then lease = tostring(now_ms) end
  for _, value in ipairs({
    redis.call('GET', RESULT_PREFIX .. id),
    redis.call('ZSCORE', queue, id),
    lease,
    redis.call('HGET', holders, id),
    tonumber(redis.call('GET', RETRY_PREFIX .. id) or 0),
    redis.call('ZSCORE', suspects, id) and 1 or 0,
    in_lane,
    redis.call('GETRANGE', JOB_PREFIX .. id, 0, 15),
    redis.call('GETRANGE', JOB_PREFIX .. id, -12, -1),
  }) do
    reply[#reply + 1] = value
  end
end
return reply
