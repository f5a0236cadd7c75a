-- Writes results, each once. KEYS: queue.
-- ARGV: for each job id, token, result, ms that it is kept, reply stream ('' for none), its last
-- `Try` where it is given up ('' otherwise).
-- Returns 1 for each job whose result was written, 0 where a second finisher was refused.
begin_writing()
local ids = {}
for i = 1, #ARGV, 6 do ids[#ids + 1] = ARGV[i] end
if #ids == 0 then return {} end
-- As `holds` and the look for a result do, but for all of them at once.
local held_by = redis.call('HMGET', holders, unpack(ids))
local owners = redis.call('MGET', unpack(keys_of(IN_PROGRESS_PREFIX, ids)))
local scores = redis.call('ZMSCORE', queue, unpack(ids))
local any_ended = redis.call('EXISTS', unpack(keys_of(RESULT_PREFIX, ids))) > 0
local written, ended, closed = {}, {}, {}
for n, id in ipairs(ids) do
  local i = 6 * n - 5
  local token, last_try = ARGV[i + 1], ARGV[i + 5]
  local open = not closed[id] and is_holder(token, held_by[n], owners[n], scores[n])
    and not (any_ended and redis.call('EXISTS', RESULT_PREFIX .. id) == 1)
  if open then
    closed[id] = true
    if not owners[n] then redis.call('ZREM', suspects, id) end
    if last_try ~= '' and redis.call('EXISTS', JOB_PREFIX .. id) == 1 then
      uncount(id)
      redis.call('RENAME', JOB_PREFIX .. id, DEAD_PREFIX .. id)
      redis.call('PEXPIRE', DEAD_PREFIX .. id, DEAD_TTL_MS)
      redis.call('ZREMRANGEBYSCORE', dead, '-inf', now_ms - DEAD_TTL_MS)
      redis.call('ZADD', dead, now_ms, id)
      remember_try(id, last_try)
      redis.call('RENAME', HISTORY_PREFIX .. id, DEAD_HISTORY_PREFIX .. id)
      redis.call('PEXPIRE', DEAD_HISTORY_PREFIX .. id, DEAD_TTL_MS)
    end
    ended[#ended + 1] =
      { id = id, record = ARGV[i + 2], ttl_ms = ARGV[i + 3], reply = ARGV[i + 4] }
  end
  written[n] = open and 1 or 0
end
end_jobs(ended)
settle_load()
return written
