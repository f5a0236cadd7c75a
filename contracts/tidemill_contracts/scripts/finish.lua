-- Writes results, each once. KEYS: queue.
-- ARGV: for each job id, token, result, ms that it is kept, reply stream ('' for none), its last
-- `Try` where it is given up ('' otherwise).
-- Returns 1 for each job whose result was written, 0 where a second finisher was refused.
begin_writing()
local written = {}
for i = 1, #ARGV, 6 do
  local id, token, record, ttl_ms, reply, last_try =
    ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
  local mine, late = holds(id, token)
  local open = mine and redis.call('EXISTS', RESULT_PREFIX .. id) == 0
  if open then
    if late then redis.call('ZREM', suspects, id) end
    local letter = last_try ~= '' and redis.call('EXISTS', JOB_PREFIX .. id) == 1
    if letter then
      uncount(id)
      redis.call('RENAME', JOB_PREFIX .. id, DEAD_PREFIX .. id)
      redis.call('PEXPIRE', DEAD_PREFIX .. id, DEAD_TTL_MS)
      redis.call('ZREMRANGEBYSCORE', dead, '-inf', now_ms - DEAD_TTL_MS)
      redis.call('ZADD', dead, now_ms, id)
      remember_try(id, last_try)
      redis.call('RENAME', HISTORY_PREFIX .. id, DEAD_HISTORY_PREFIX .. id)
      redis.call('PEXPIRE', DEAD_HISTORY_PREFIX .. id, DEAD_TTL_MS)
    end
    end_job(id, record, ttl_ms, reply)
  end
  written[#written + 1] = open and 1 or 0
end
settle_load()
return written
