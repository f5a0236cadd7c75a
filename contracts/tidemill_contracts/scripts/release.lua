-- Hands claimed jobs back. KEYS: queue.
-- ARGV: for each job id, token, score, delay_ms, 1 to give the try back, 1 for a suspect, the `Try`
-- to remember ('' for none), number of pieces of progress that the caller knows of, piece to add ('' for
-- none).
-- With a delay the job is due that much later; without one it takes its old place again, a suspect
-- among the suspects. Jobs that no longer belong to the caller are left alone.
-- Returns how many were handed back.
begin_writing()
local released = 0
for i = 1, #ARGV, 9 do
  local id, token, score, delay, refund, suspect, entry =
    ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], ARGV[i + 6]
  local mine, late = holds(id, token)
  if mine then
    if late then redis.call('ZREM', suspects, id) end
    if tonumber(delay) > 0 then
      score = now_ms + delay
    elseif suspect == '1' then
      redis.call('ZADD', suspects, now_ms, id)
      score = now_ms + HOLD_MS
    end
    redis.call('ZADD', queue, score, id)
    redis.call('ZREM', leases, id)
    redis.call('HDEL', holders, id)
    redis.call('DEL', IN_PROGRESS_PREFIX .. id)
    if ARGV[i + 8] ~= '' then add_progress(id, ARGV[i + 7], ARGV[i + 8]) end
    if entry ~= '' then remember_try(id, entry) end
    if refund == '1' and tonumber(redis.call('GET', RETRY_PREFIX .. id) or 0) > 0 then
      redis.call('DECR', RETRY_PREFIX .. id)
    end
    released = released + 1
  end
end
if released > 0 then ring() end
return released
