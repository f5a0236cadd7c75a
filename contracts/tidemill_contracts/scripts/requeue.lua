-- Queues dead jobs again, as new: their results and tries are forgotten. KEYS: queue. ARGV: ids.
-- Returns for each: 1 queued, 0 there is no such dead job, 2 a job of that id is queued already.
local answers, queued = {}, 0
for n, id in ipairs(ARGV) do
  local letter = DEAD_PREFIX .. id
  if redis.call('EXISTS', letter) == 0 then
    redis.call('ZREM', dead, id)
    answers[n] = 0
  elseif redis.call('EXISTS', JOB_PREFIX .. id) == 1 then
    answers[n] = 2
  else
    redis.call('RENAME', letter, JOB_PREFIX .. id)
    redis.call('PERSIST', JOB_PREFIX .. id)
    redis.call('DEL', RESULT_PREFIX .. id, RETRY_PREFIX .. id, DEAD_HISTORY_PREFIX .. id)
    redis.call('ZREM', dead, id)
    redis.call('HINCRBY', load, 'bytes', redis.call('STRLEN', JOB_PREFIX .. id))
    redis.call('ZADD', queue, now_us / 1000 - 2 + n / 4096, id)
    answers[n] = 1
    queued = queued + 1
  end
end
if queued > 0 then ring() end
return answers
